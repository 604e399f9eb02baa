"""vLLM's own report of an environment, `vllm collect-env`, with what the plugin does in that environment.

The command line of vLLM loads the plugins while it builds the parser of `vllm serve`, for each of its commands. The
script alone, `python collect_env.py` as vLLM's bug template downloads it, loads none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_graphfix.log import logger
from vllm_graphfix.patching.hooks import wrap
from vllm_graphfix.settings.environment import PREFIX


def extend(collect_env: ModuleType, report: Callable[[], str]) -> None:
    """Puts what *report* returns at the end of vLLM's own report; it is called only for that."""

    def around(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        vllms_report = stock(*args, **kwargs)
        try:
            return f"{_without_our_variables(vllms_report)}\n\n{_encodable(report())}"
        except Exception:
            logger.exception("graphfix: nothing could be added to vLLM's report; the rest of it is as it was")
            return vllms_report

    wrap(collect_env, "get_pretty_env_info", around)


def _without_our_variables(vllms_report: str) -> str:
    """*vllms_report* without the plugin's variables, which vLLM prints unmasked: the plugin registered their names.

    What may be shown of them is in our own part.
    """
    return "\n".join(line for line in vllms_report.split("\n") if not (line.startswith(PREFIX) and "=" in line)).rstrip(
        "\n"
    )


def _encodable(text: str) -> str:
    """*text* as standard output can take it: vLLM prints all of its report at once."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)
