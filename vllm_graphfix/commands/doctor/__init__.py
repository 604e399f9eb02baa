"""What a bug report has to say, gathered in one go.

It covers versions, GPU, platform, how the plugin is loaded, settings, status, fleet and errors.

Half of it may be missing, hostile or hanging: each part is gathered on its own, and what goes wrong in one is what that
part says. What ends up in public is shown by allow lists: a value is printed only if it has the form that its name is
known for, and every text is masked.
"""

from __future__ import annotations

from vllm_graphfix.commands.doctor.collect import Doctor, examine
from vllm_graphfix.commands.doctor.markdown_report import markdown
from vllm_graphfix.commands.doctor.redaction import VARIABLES

__all__ = ["VARIABLES", "Doctor", "examine", "markdown"]
