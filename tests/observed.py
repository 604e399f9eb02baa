"""Runs the CPU double's scenarios on stock, observed and with the fixes, in forks of one process that has imported vLLM."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from vllm_graphfix.fix import variable
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.worker import scenario_module, scenario_of
from vllm_graphfix.verify.measurement import Measurement
from vllm_graphfix.verify.report import differing

MASTER = {"stock": "off", "observe": "on", "active": "on"}
MODE = {"stock": "auto", "observe": "observe", "active": "auto"}
"""Of every fix, by name: without it some are observed."""


def main(names: list[str]) -> None:
    """One fork for each way. Each prints a line of JSON for every workload of every fix of *names*: state, events, numbers.

    The workloads: the fix's scenario, and one of the same code ``without`` the defect's condition.
    """
    install_flashmla_stand_ins()
    importlib.import_module("vllm.v1.worker.gpu_model_runner")
    for name in names:
        scenario_of(name)
    for way, master in MASTER.items():
        child = os.fork()
        if not child:
            try:
                os.environ["VLLM_GRAPHFIX"] = master
                os.environ.update(dict.fromkeys(map(variable, BY_NAME), MODE[way]))
                _run(way, names)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{way}: ended in an error")


def _run(way: str, names: list[str]) -> None:
    import vllm_graphfix
    from vllm_graphfix.fixes import BY_NAME

    vllm_graphfix.register()
    for name in names:
        events = BY_NAME[name].events
        for workload, run in workloads(name).items():
            for event in events:
                event.count = 0
            told = {"way": way, "fix": name, "workload": workload} | run()
            told["state"] = vllm_graphfix.states()[name].state.value
            told["events"] = {event.name: event.count for event in events}
            print(json.dumps(told), flush=True)  # noqa: T201 - the result


def workloads(name: str) -> dict[str, Callable[[], dict[str, object]]]:
    """A trial has both; of the first twelve fixes the second is below."""
    trial = BY_NAME[name].trial
    if trial is not None:
        scenario = trial().scenario
        return {"scenario": lambda: _told(scenario()), "without": lambda: _told(scenario(hit=False))}
    module = scenario_module(name)
    runs = {"scenario": _measured, "without": WITHOUT[name], **FURTHER.get(name, {})}
    return {workload: partial(run, module) for workload, run in runs.items()}


def _measured(scenario: Any) -> dict[str, object]:
    return _told(scenario.run())


def _told(found: Measurement) -> dict[str, object]:
    return {
        "numbers": repr((found.graphed, found.error)),  # as text, in which NaN equals NaN
        "right": found.error is None and not differing(found.eager, found.graphed),
        "stopped": found.error is not None,
    }


# The same code without what makes the defect: nothing is to be counted.


def _without_lazy_attention(scenario: Any) -> dict[str, object]:
    from vllm_graphfix.verify.double.decoding import AttentionStandIn

    with mock.patch.object(AttentionStandIn, "forward", lambda self, hidden_states: hidden_states.tanh()):
        return _measured(scenario)


def _drafts_that_fit_their_graphs(scenario: Any) -> dict[str, object]:
    """Every batch has the four requests that the graphs were captured for."""
    from vllm.config import CUDAGraphMode

    with mock.patch.object(scenario, "REJECTED", [0, 1, 2, 0]):
        return _drafts(scenario, *CUDAGraphMode)


def _drafts_in_full_graphs(scenario: Any) -> dict[str, object]:
    from vllm.config import CUDAGraphMode

    return _drafts(scenario, CUDAGraphMode.FULL)


def _drafts(scenario: Any, *modes: Any) -> dict[str, object]:
    from vllm_graphfix.verify.double.triton_kernels import cpu_triton_kernels

    with cpu_cuda_graphs(), cpu_triton_kernels(scenario.eagle, scenario.gumbel):
        try:
            return {"numbers": repr([scenario._draft(mode) for mode in modes])}
        except IndexError as error:  # a graph of stock gathers with an old index
            return {"numbers": str(error)}


def _without_a_prompt_in_chunks(scenario: Any) -> dict[str, object]:
    """A request finishes, and its row is padding from then on: of a request that was past its prompt."""
    steps = [{"first": 3, "second": 4, "third": 5}, *[dict.fromkeys(("first", "second", "third"), 1)] * 3]
    steps += [dict.fromkeys(("second", "third"), 1)] * 3
    with mock.patch.object(scenario, "STEPS", steps):
        return _measured(scenario)


def _without_prefills_as_short_as_a_decode(scenario: Any) -> dict[str, object]:
    """Every prompt and rest of one has a token more than a decode."""

    def prompts(length: int) -> dict[str, int]:
        return {"first": 3, "second": 4, "short": length + 1, "long": 6 + length}

    def steps(length: int) -> list[dict[str, int]]:
        both, three, all_four = (dict.fromkeys(scenario.REQUESTS[:count], length) for count in (2, 3, 4))
        new, chunk, rest = {**both, "short": length + 1}, {**three, "long": 5}, {**three, "long": length + 1}
        return [{"first": 3, "second": 4}, both, new, three, chunk, rest, all_four, all_four]

    with mock.patch.multiple(scenario, prompts=prompts, steps=steps):
        return _measured(scenario)


def _without_full_graphs(scenario: Any) -> dict[str, object]:
    decode = scenario.DenseFP8Decode()
    return {"numbers": repr([decode.step([60 + step, 127 + step, 200 + step]) for step in range(3)])}


def _without_padding(scenario: Any) -> dict[str, object]:
    with cpu_cuda_graphs():
        decode = scenario.DenseFP8Decode(captured_requests=3)
        decode.step([60, 127, 200])
    return {}  # on stock the plan of another batch: the other fix's numbers


def _without_draft_tokens(scenario: Any) -> dict[str, object]:
    """One token in each row, padded ones among them."""
    with mock.patch.object(scenario, "TOKENS", 1):
        return _measured(scenario)


def _requests_that_fill_the_graph(scenario: Any) -> dict[str, object]:
    with scenario.cpu_triton_mla(), cpu_cuda_graphs():
        decode = scenario.TritonMLADecode(captured_requests=scenario.CAPTURED)
        return {"numbers": repr([decode.step([7 + step, 40 + step, 16, 1]) for step in range(3)])}


def _without_growth(scenario: Any) -> dict[str, object]:
    """The first chunk is no longer than the batch that was captured."""
    with mock.patch.object(scenario, "CHUNK", scenario.CAPTURED):
        return _measured(scenario)


def _before_the_first_request(scenario: Any) -> dict[str, object]:
    """Nothing is in the buffers yet."""
    with mock.patch.object(scenario, "STEPS", [scenario.IDLE, scenario.IDLE, ("first", "second")]):
        return _measured(scenario)


def _drafts_after_bookkeeping(scenario: Any) -> dict[str, object]:
    with mock.patch.object(scenario.Speculation, "disable_padded_drafter_batch", True):
        return _measured(scenario)


Workload = Callable[[Any], dict[str, object]]
WITHOUT: dict[str, Workload] = {
    "capture-state": _without_lazy_attention,
    "draft-prefill-state": _without_lazy_attention,
    "draft-decode-mode": _drafts_that_fit_their_graphs,
    "mamba-padding": _without_a_prompt_in_chunks,
    "flashmla-fp8": _without_full_graphs,
    "flashmla-padding": _without_padding,
    "prefill-dispatch": _without_prefills_as_short_as_a_decode,
    "indexer-padding": _without_draft_tokens,
    "triton-mla-padding": _requests_that_fill_the_graph,
    "workspace-growth": _without_growth,
    "idle-rank": _before_the_first_request,
    "prompt-logprobs": _drafts_after_bookkeeping,
}
FURTHER: dict[str, dict[str, Workload]] = {"draft-decode-mode": {"full": _drafts_in_full_graphs}}
