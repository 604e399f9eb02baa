"""Report for bug reports: versions, GPU, platform, loading of the plugin, settings, status, fleet and errors.

Any source may be missing, hostile or hanging, so each part is gathered by itself, and its error becomes its content.
The report is made public, so values pass an allow list: a value is printed only in the form that is expected of its
name, and every text is masked.
"""

from __future__ import annotations

import os

from vllm_graphfix.commands.doctor.collect import Doctor, examine
from vllm_graphfix.commands.doctor.report import markdown, text
from vllm_graphfix.commands.redaction import VARIABLES
from vllm_graphfix.settings.environment import DECISION

__all__ = ["VARIABLES", "Doctor", "beside_vllms_own", "examine", "markdown", "text"]


def beside_vllms_own() -> str:
    """Return the report for the end of `vllm collect-env`, which has versions, GPUs and platform already."""
    # The decision is one of this very process, which starts no engine.
    environment = {name: value for name, value in os.environ.items() if name != DECISION}
    return text(examine(environment=environment, without=("versions", "gpu", "platform")))
