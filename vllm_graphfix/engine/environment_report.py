"""Extends vLLM's own report of an environment, `vllm collect-env`, by the plugin's report.

vLLM's command line loads plugins for each of its commands, while it builds the parser of `vllm serve`. The script
alone, `python collect_env.py` from vLLM's bug template, loads none.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_graphfix.log import logger
from vllm_graphfix.patching.hooks import wrap
from vllm_graphfix.settings.environment import PREFIX


def extend(collect_env: ModuleType, report: Callable[[], str]) -> None:
    """Append the result of *report* to vLLM's own report."""

    def around(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        vllms_report = _without_our_variables(stock(*args, **kwargs))
        try:
            return f"{vllms_report}\n\n{_encodable(report())}"
        except Exception:
            logger.exception("graphfix: nothing could be added to vLLM's report")
            return vllms_report

    wrap(collect_env, "get_pretty_env_info", around)


def _without_our_variables(vllms_report: str) -> str:
    """Remove the plugin's variables, which vLLM prints unmasked, since the plugin has registered their names.

    The plugin's part of the report holds what may be published of them.
    """
    ours = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(PREFIX)]
    for setting in sorted(ours, key=len, reverse=True):  # a value may have several lines, and hold another setting
        vllms_report = re.sub(rf"^{re.escape(setting)}(?:\n|\Z)", "", vllms_report, flags=re.MULTILINE)
    return vllms_report.rstrip("\n")


def _encodable(text: str) -> str:
    """Replace what standard output cannot encode: vLLM prints its report in one call, which would fail as a whole."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)
