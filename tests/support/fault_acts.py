"""Faults in each call that the plugin makes while vLLM acts, after its start: in a capture, in a check of a step.

Runs in forks of one process of a stock release, as `fault_engine` does; what vLLM does there is an act of a module of
``in_vllm/``, a class with

- ``prepare``: everything up to the act, without faults;
- ``act``: with one call failing, whatever that makes of it;
- ``right``: whether what vLLM would answer now is right, without faults.
"""

from __future__ import annotations

import importlib
import json
import logging
from typing import Any

from fault_engine import LogLines, Profiler, error_of, plan, result_of_fork

_LIMIT = 30
"""Seconds for one process."""


def main(act: str, environments: dict[str, dict[str, str]], results: str, every: int) -> None:
    """Counts the calls of *act*, ``module:class``, in each of *environments*, by mode.

    Then there is a fork and a line for every nth fault.
    """
    counted: dict[str, Any] = {}
    for mode, environment in environments.items():
        counted[mode] = _result(act, {"environment": environment, "refusing": mode == "refusing"})
        assert counted[mode] is not None, mode
    faults = [fault for fault in plan(counted, tuple(environments)) if _is_ours(fault["place"])]
    with open(results, "w") as file:  # noqa: PTH123
        print(json.dumps({"counted": counted, "planned": len(faults)}), file=file, flush=True)
        for fault in faults[::every]:
            job = fault | {"environment": environments[fault["mode"]], "refusing": fault["mode"] == "refusing"}
            print(json.dumps([fault, _result(act, job)]), file=file, flush=True)


def _is_ours(place: str) -> bool:
    """Return whether the plugin calls there in an engine, too.

    Calls from the CPU double do not count, nor those while a module of the plugin is imported.
    """
    _, file, function, *_ = place.split(":")
    return function != "<module>" and not file.startswith("verify")


def _result(act: str, job: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of *job*, as in `fault_engine`; None if the process died, or hung."""
    result: dict[str, Any] | None = result_of_fork(job["environment"], _LIMIT, lambda: _run(act, job))
    return result


def _run(act: str, job: dict[str, Any]) -> dict[str, Any]:
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    module, _, name = act.partition(":")
    acting = getattr(importlib.import_module(module), name)()
    log = logging.getLogger("vllm.graphfix")
    log_lines = LogLines(refusing=job["refusing"])
    log.handlers, log.propagate = [log_lines], False
    log.setLevel(logging.DEBUG)
    acting.prepare()
    fault = (job["place"], job["number"]) if "place" in job else None
    profiler = Profiler(fault, error_of(job["error"]) if fault else None)
    end = None
    profiler.start()
    try:
        acting.act()
    except BaseException as error:
        profiler.stop()
        end = f"{type(error).__name__}: {error}"
    profiler.stop()
    import vllm_graphfix

    result = {
        "fired": profiler.fired,
        "end": end,
        "right": acting.right() if end is None else None,
        "states": {name: state.state.value for name, state in vllm_graphfix.states().items()},
        "log": log_lines.lines,
    }
    if fault is None:
        result["calls"] = [[place, number, profiler.modules[place]] for place, number in profiler.calls.items()]
    return result
