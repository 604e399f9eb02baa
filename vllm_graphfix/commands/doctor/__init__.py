"""What a bug report has to say, gathered in one go.

It covers versions, GPU, platform, how the plugin is loaded, settings, status, fleet and errors.

Half of it may be missing, hostile or hanging: each part is gathered on its own, and what goes wrong in one is what that
part says. What ends up in public is shown by allow lists: a value is printed only if it has the form that its name is
known for, and every text is masked.
"""

from __future__ import annotations

import os

from vllm_graphfix.commands.doctor.collect import Doctor, examine
from vllm_graphfix.commands.doctor.redaction import VARIABLES
from vllm_graphfix.commands.doctor.report import markdown, text
from vllm_graphfix.settings.environment import DECISION

__all__ = ["VARIABLES", "Doctor", "beside_vllms_own", "examine", "markdown", "text"]


def beside_vllms_own() -> str:
    """The report for the end of `vllm collect-env`, which has versions, GPUs and platform already."""
    # The decision is of this very process, which starts no engine.
    environment = {name: value for name, value in os.environ.items() if name != DECISION}
    return text(examine(environment=environment, without=("versions", "gpu", "platform")))
