"""Runs `verify`'s worker for fixes whose bodies are emptied, in forks of one process that has imported vLLM."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import traceback
from typing import Any

from vllm_graphfix import fixes
from vllm_graphfix.fix import Activity, Fix, StockFunction
from vllm_graphfix.verify.double import worker
from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins


def emptied(fix: Fix) -> Fix:
    """The same patches of the same targets, which change nothing."""
    return fix._replace(patches=lambda shape: [patch._replace(wrap=_pass_on) for patch in fix.patches(shape)])


def _pass_on(stock: StockFunction, _: Activity) -> StockFunction:
    @functools.wraps(stock)
    def unchanged(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    return unchanged


def main(names: list[str], ways: list[str]) -> None:
    """Forks once for each of *ways*.

    A way is ``stock``, ``patched``, or the one of *names* that is emptied, with the others as they are.

    Each prints ``{"event": "forked", "as": …}``, which says ``stock``, ``patched`` or the name, and the lines of a
    worker after it.
    """
    install_flashmla_stand_ins()
    importlib.import_module("vllm.v1.worker.gpu_model_runner")
    for name in names:
        worker.load_scenario(name)
    for way in ways:
        _fork(way, [way] if way in names else names)


def _fork(kind: str, scenarios: list[str]) -> None:
    print(json.dumps({"event": "forked", "as": kind}), flush=True)  # noqa: T201 - the result
    child = os.fork()
    if not child:
        try:
            if kind == "stock":
                os.environ["VLLM_GRAPHFIX"] = "off"
            fixes.FIXES = tuple(emptied(fix) if fix.name == kind else fix for fix in fixes.FIXES)
            worker.main(scenarios)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"the worker of {kind} ended in an error")
