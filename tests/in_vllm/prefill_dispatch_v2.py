"""prefill-dispatch on the dispatch of vLLM's model runner V2, in the releases in which that goes by the shape alone.

The builders of the layers are none that the fix knows.
"""

from __future__ import annotations

from typing import Any

import pytest
from prefill_steps import (  # noqa: F401 - a fixture among them
    ACTIVITY,
    AS_DECODE,
    LENGTHS,
    attention,
    layers,
    nothing_counted,
    recurrent,
)
from vllm.config import CUDAGraphMode

from vllm_graphfix.verify.double.scenarios import prefill_dispatch as scenario

FULL, NONE = CUDAGraphMode.FULL, CUDAGraphMode.NONE

try:
    from vllm.v1.worker.gpu import model_runner as runner_v2
    from vllm.v1.worker.gpu.cudagraph_utils import get_uniform_token_count  # noqa: F401
    from vllm.v1.worker.gpu.model_states import mamba_hybrid  # noqa: F401
except ImportError:
    runner_v2 = None

pytestmark = pytest.mark.skipif(
    runner_v2 is None, reason="model runner V2 has no recurrent models here, or asks for their phase"
)


class V2:
    """Model runner V2 with two requests that decode."""

    def __init__(self, length: int = 1, groups: Any = None, **runner: Any) -> None:
        config = scenario._config(CUDAGraphMode.FULL_DECODE_ONLY, length)
        self.length = length
        self.dispatch = scenario.DispatchV2(config, groups or layers(attention(), recurrent()))
        self.runner = self.dispatch.runner
        self.runner.__dict__.update(runner)
        self.computed: dict[str, int] = {}
        for name in ("one", "other"):
            self.add(name, prefill=3, computed=5)

    def add(self, name: str, prefill: int, computed: int) -> None:
        self.dispatch._states.add(name, prefill)
        self.computed[name] = computed

    def step(self, *names: str, count: int | None = None) -> bool:
        """Return whether these have a full graph if each gets so many tokens, or those of a decode."""
        return self.dispatch(dict.fromkeys(names, count or self.length), self.computed) is not None


@LENGTHS
def test_decodes_have_their_graph(length: int) -> None:
    made = V2(length)
    assert made.step("one")
    assert made.step("one", "other")
    assert AS_DECODE.count == 0


@LENGTHS
def test_prefills_of_that_shape_have_none(length: int) -> None:
    made = V2(length)
    made.add("new", prefill=length, computed=0)
    made.add("rest", prefill=5 + length, computed=5)
    assert not made.step("one", "new")
    assert not made.step("rest", "one", "other")
    assert not made.step("new")
    assert AS_DECODE.count == 3
    made.computed["new"] = length
    assert made.step("one", "new")
    assert AS_DECODE.count == 3


def test_a_preempted_request_comes_again_with_its_own_tokens_to_prefill() -> None:
    made = V2(2)
    made.add("again", prefill=12, computed=10)
    assert not made.step("one", "again")


def test_requests_that_are_not_in_the_step_do_not_count() -> None:
    made = V2()
    made.add("waiting", prefill=40, computed=8)
    assert made.step("one", "other")
    del made.dispatch._states.index_to_req_id[made.dispatch._states.req_id_to_index.pop("waiting")]
    del made.computed["waiting"]
    assert made.step("one", "other"), "nor does the slot of one that is gone"
    assert AS_DECODE.count == 0


def test_models_without_recurrent_layers_keep_their_graphs() -> None:
    made = V2(groups=layers(attention()))
    made.add("new", prefill=1, computed=0)
    assert made.step("one", "new")
    assert AS_DECODE.count == 0


def test_steps_of_another_shape_are_stocks() -> None:
    made = V2(2)
    made.add("new", prefill=3, computed=0)
    assert not made.step("new", count=3)
    assert not made.step("new", count=1)
    assert AS_DECODE.count == 0


def test_a_dummy_run_after_a_step_that_was_not_dispatched_has_its_graph() -> None:
    made = V2()
    made.add("new", prefill=1, computed=0)
    scheduled = scenario._scheduler_output({"new": 1}, ["new"], made.computed)
    made.dispatch._states.look_up(made.computed)
    made.runner.update_requests(scheduled)  # and then an error, say
    another = V2()
    descriptor, _ = runner_v2.dispatch_cg_and_sync_dp(another.runner.cudagraph_manager, 1, 1, 1, 1, 0)
    assert descriptor.cg_mode is FULL
    nothing = scenario._scheduler_output({}, [], made.computed)
    made.runner.update_requests(scheduled)
    made.runner.update_requests(nothing)  # such a step is over before its dispatch
    descriptor, _ = runner_v2.dispatch_cg_and_sync_dp(made.runner.cudagraph_manager, 1, 1, 1, 1, 0)
    assert descriptor.cg_mode is FULL
    assert AS_DECODE.count == 0


def test_one_dispatch_is_corrected_and_the_next_is_not() -> None:
    made = V2()
    made.add("new", prefill=1, computed=0)
    assert not made.step("one", "new")
    descriptor, _ = runner_v2.dispatch_cg_and_sync_dp(made.runner.cudagraph_manager, 1, 1, 1, 1, 0)
    assert descriptor.cg_mode is FULL
    assert AS_DECODE.count == 1


def test_an_eager_step_is_not_counted() -> None:
    made = V2(is_encoder_decoder=True)
    made.add("new", prefill=1, computed=0)
    made.dispatch._states.look_up(made.computed)
    scheduled = scenario._scheduler_output({"new": 1}, ["new"], made.computed)
    scheduled.scheduled_encoder_inputs = {"new": [0]}
    with pytest.raises(scenario._DispatchedError):
        made.runner.execute_model(scheduled)
    assert AS_DECODE.count == 0


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_other_ranks_of_data_parallelism_hear_of_this_ranks_mode(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    from vllm.v1.worker.gpu import dp_utils

    reported: list[Any] = []

    def synced(manager: Any, descriptor: Any, tokens: int, rows: int, uniform: int | None, *_: Any, **__: Any) -> Any:
        reported.append((descriptor.cg_mode, uniform))
        return descriptor, None

    monkeypatch.setattr(dp_utils, "sync_cudagraph_and_dp_padding", synced)
    made = V2(dp_size=2)
    made.add("new", prefill=1, computed=0 if phase == "prefill" else 1)
    made.step("one", "new")
    assert reported == [(NONE, None) if phase == "prefill" else (FULL, 1)]


def test_an_error_of_the_fix_leaves_the_step_to_stock() -> None:
    made = V2()
    made.add("new", prefill=1, computed=0)
    made.runner.decode_query_len = None
    assert made.step("one", "new")
    assert ACTIVITY.error is not None
    ACTIVITY.error = None
