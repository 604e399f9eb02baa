"""Runs the CPU double's scenarios on stock, observed and with the fixes.

They run in forks of one process that has imported vLLM.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from vllm_graphfix.fix import variable
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins
from vllm_graphfix.verify.double.worker import load_scenario
from vllm_graphfix.verify.measurement import Measurement
from vllm_graphfix.verify.proof import differing

MASTER = {"stock": "off", "observe": "on", "active": "on"}
MODE = {"stock": "auto", "observe": "observe", "active": "auto"}
"""The mode of every fix, by name: without it some are observed."""
Workload = Callable[[], Measurement]


def main(names: list[str], further: Mapping[str, Workload] = MappingProxyType({})) -> None:
    """One fork for each way.

    Each prints a line of JSON for every workload of every fix of *names*: state, events, numbers.

    The workloads: the fix's scenario, the same code ``without`` the defect's condition, and those of *further*, by
    name.
    """
    install_flashmla_stand_ins()
    importlib.import_module("vllm.v1.worker.gpu_model_runner")
    for name in names:
        load_scenario(name)
    for way, master in MASTER.items():
        child = os.fork()
        if not child:
            try:
                os.environ["VLLM_GRAPHFIX"] = master
                os.environ.update(dict.fromkeys(map(variable, BY_NAME), MODE[way]))
                _run(way, names, further)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{way}: ended in an error")


def _run(way: str, names: list[str], further: Mapping[str, Workload]) -> None:
    import vllm_graphfix

    vllm_graphfix.register()
    for name in names:
        activity, scenario = vllm_graphfix._this_process().manager.activity(name), load_scenario(name)
        workloads: dict[str, Workload] = {"scenario": scenario, "without": partial(scenario, trigger=False), **further}
        for workload, run in workloads.items():
            activity.reset()
            line = {"way": way, "fix": name, "workload": workload} | _measured(run())
            line["state"] = vllm_graphfix.states()[name].state.value
            line["events"] = activity.counts
            print(json.dumps(line), flush=True)  # noqa: T201 - the result


def _measured(measurement: Measurement) -> dict[str, object]:
    return {
        "numbers": repr((measurement.graphed, measurement.error)),  # as text, in which NaN equals NaN
        "right": measurement.error is None and not differing(measurement.eager, measurement.graphed),
        "stopped": measurement.error is not None,
        "expected": dict(measurement.counted),
    }


def drafts_in_full_graphs() -> Measurement:
    """Measure the scenario of `draft-decode-mode` in full graphs; it has drafts in piecewise graphs too."""
    from vllm.config import CUDAGraphMode

    from vllm_graphfix.verify.double.scenarios import draft_decode_mode

    return draft_decode_mode.run(modes=(CUDAGraphMode.FULL,))
