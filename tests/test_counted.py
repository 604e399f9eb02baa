"""Observers count from what the host has: they read nothing from the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from activities import Layer, layers
from stock_stand_ins import arguments_for, stock_of
from vllm_graphfix.fix import Activity
from vllm_graphfix.fixes import BY_NAME


def observer_of(fix: str, shape: str) -> tuple[Activity, Layer]:
    """Return the activity of a fix that changes nothing, and its one observer."""
    activity, (layer,) = layers(BY_NAME[fix], shape, corrects=False)
    return activity, layer


def count_of(activity: Activity) -> int:
    """Return the count of its one event."""
    (count,) = activity.counts.values()
    return count


@pytest.mark.parametrize(
    ("requests", "tokens", "mode", "metadata", "counted"),
    [
        (3, 4, "PIECEWISE", "some", 1),
        (4, 4, "PIECEWISE", "some", 0),
        (3, 4, "NONE", "some", 0),  # of a data-parallel engine
        (3, 4, "FULL", "some", 0),
        (3, 4, "PIECEWISE", None, 0),
    ],
    ids=["padded", "whole", "no graph", "full", "a dummy run without attention"],
)
def test_draft_decodes_are_counted_where_attention_reads_past_the_batch(
    requests: int, tokens: int, mode: str, metadata: object, counted: int
) -> None:
    activity, patch = observer_of("draft-decode-mode", "one-manager")
    speculator = SimpleNamespace(cudagraph_manager=object())
    arguments = (speculator, requests, tokens, metadata, None, None)
    patch.wrap(stock_of(patch))(*arguments, cudagraph_runtime_mode=SimpleNamespace(name=mode))
    assert activity.counts["decode-padded-in-piecewise"] == counted


class DeviceTensorStandIn:
    """A tensor whose values are on a device: only its address may be asked for."""

    def __init__(self, address: int = 0) -> None:
        self.data_ptr = lambda: address

    def numpy(self) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a tensor on the device")


def test_nothing_is_read_from_the_device_to_see_padded_rows() -> None:
    activity, patch = observer_of("flashmla-padding", "minus-one")
    arguments = arguments_for(patch, DeviceTensorStandIn)
    starts = {"on the CPU": SimpleNamespace(numpy=lambda: np.array([0, 1, 1])), "on the device": DeviceTensorStandIn()}
    for where, counted in (("on the CPU", 1), ("on the device", 0)):
        activity.reset()
        builder = SimpleNamespace(is_fp8_kvcache=True)
        patch.wrap(stock_of(patch))(**arguments | {"self": builder, "query_start_loc_cpu": starts[where]})
        assert (where, count_of(activity)) == (where, counted)


def test_nothing_is_read_from_the_device_to_see_tokens_of_padded_rows() -> None:
    activity, patch = observer_of("indexer-padding", "view-of-a-row")
    arguments = arguments_for(patch, DeviceTensorStandIn) | {"use_native": True, "max_decode_len": 2}
    for last, counted in ((0, 1), (2, 0)):
        activity.reset()
        tokens = SimpleNamespace(numpy=lambda last=last: np.array([2, 2, last]))
        patch.wrap(stock_of(patch))(**arguments | {"decode_lens_cpu": tokens})
        assert (last, count_of(activity)) == (last, counted)


@pytest.mark.parametrize(
    ("starts", "counted"),
    [([0, 1, 1], 1), ([0, 1, 2], 0), ([0, 0], 1), ([0], 0), ([], 0), ([0, 2, 2, 2], 1)],
    ids=["padded", "unpadded", "one padded row", "no rows", "nothing", "two tokens and padding"],
)
@pytest.mark.parametrize("tritons", [True, False])
def test_padded_rows_of_tritons_builder_alone_are_counted(tritons: bool, starts: list[int], counted: int) -> None:
    activity, patch = observer_of("triton-mla-padding", "divides-by-nothing")
    module = "vllm.v1.attention.backends.mla.triton_mla" if tritons else "vllm.v1.attention.backends.mla.flashmla"
    above = type("TritonMLAMetadataBuilder", (), {"__module__": module})
    of_a_model = type("OfAModel", (above,), {})
    metadata = SimpleNamespace(query_start_loc_cpu=SimpleNamespace(numpy=lambda: np.array(starts)))
    patch.wrap(stock_of(patch))(of_a_model(), 0, metadata, False)
    assert count_of(activity) == (counted if tritons else 0)


@pytest.mark.parametrize(
    ("plan", "splits", "counted"),
    [(8, 16, 0), (9, 16, 1), (7, 16, 1), (8, 17, 1), (8, 15, 1)],
    ids=["inside", "tiles above", "tiles below", "splits above", "splits below"],
)
def test_plans_are_distinguished_by_their_addresses(plan: int, splits: int, counted: int) -> None:
    activity, patch = observer_of("flashmla-fp8", "new-plan")
    builder = SimpleNamespace(
        is_fp8_kvcache=True,
        cg_buf_tile_scheduler_metadata=DeviceTensorStandIn(8),
        cg_buf_num_splits=DeviceTensorStandIn(16),
    )
    scheduler = SimpleNamespace(
        tile_scheduler_metadata=DeviceTensorStandIn(plan), num_splits=DeviceTensorStandIn(splits)
    )
    metadata = SimpleNamespace(scheduler_metadata=scheduler)
    attributes = dict(vars(scheduler))
    assert patch.wrap(lambda self: metadata)(builder) is metadata
    assert count_of(activity) == counted
    assert vars(scheduler) == attributes


def test_only_where_plans_are_corrected_an_assertion_stops_the_engine() -> None:
    """It is that of a plan which does not fit; whoever only counts has nothing to refuse."""
    activity, patch = observer_of("flashmla-fp8", "new-plan")
    builder = SimpleNamespace(is_fp8_kvcache=True, cg_buf_tile_scheduler_metadata=DeviceTensorStandIn(8))
    unreadable = DeviceTensorStandIn()
    assert patch.wrap(lambda self: unreadable)(builder) is unreadable
    assert (count_of(activity), str(activity.error).partition(":")[0]) == (0, "AssertionError")


def test_marks_on_the_device_are_not_read() -> None:
    _, patch = observer_of("mamba-padding", "prefilling-over-padding")
    arguments = arguments_for(patch, object) | {
        "common_attn_metadata": SimpleNamespace(is_prefilling=DeviceTensorStandIn())
    }
    assert patch.wrap(stock_of(patch))(**arguments) == arguments


class StateStandIn(NamedTuple):
    """The fields of vLLM's ExecuteModelState that observers read."""

    scheduler_output: Any
    hidden_states: Any


class RowsStandIn:
    """Hidden states on a device: only how many rows there are may be asked for."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a tensor on the device")


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({}, 1),
        ({"asked": {}}, 0),
        ({"asked": {"preempted": 1}}, 0),
        ({"asked": {"preempted": 1, "scored": 1}}, 1),
        ({"rows": 17}, 0),
        ({"largest": 0}, 0),
        ({"padded": True}, 0),
        ({"method": "suffix"}, 0),
        ({"method": "use_ngram_gpu"}, 0),
        ({"method": "uses_draft_model"}, 1),
        ({"method": "uses_extract_hidden_states"}, 1),
        ({"method": None}, 0),
    ],
    ids=[
        "scored",
        "nobody asks",
        "who asks is not scheduled",
        "one of two is",
        "more tokens than a graph takes",
        "no graphs",
        "drafts afterwards",
        "no model",
        "n-grams",
        "a draft model",
        "hidden states",
        "no drafter",
    ],
)
def test_steps_are_counted_in_which_a_prompt_is_scored_after_a_draft(changes: dict[str, Any], counted: int) -> None:
    activity, patch = observer_of("prompt-logprobs", "draft-first")
    arguments: dict[str, Any] = {
        "asked": {"scored": 1},
        "rows": 16,
        "largest": 16,
        "padded": False,
        "method": "use_eagle",
    } | changes
    methods = {"use_eagle": lambda: False, str(arguments["method"]): lambda: True}
    speculation = SimpleNamespace(disable_padded_drafter_batch=arguments["padded"], **methods)
    state = StateStandIn(
        SimpleNamespace(num_scheduled_tokens={"scored": 9, "other": 7}), RowsStandIn(arguments["rows"])
    )
    runner = SimpleNamespace(
        num_prompt_logprobs=arguments["asked"],
        execute_model_state=state,
        speculative_config=speculation if arguments["method"] else None,
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=arguments["largest"]),
    )
    assert patch.wrap(stock_of(patch))(runner, None) == {"self": runner, "grammar_output": None}
    assert count_of(activity) == counted
    assert runner.execute_model_state is state


def test_a_step_without_a_state_is_not_looked_at() -> None:
    """The step is that of a rank that is not the last of a pipeline."""
    activity, patch = observer_of("prompt-logprobs", "draft-first")
    runner = SimpleNamespace(num_prompt_logprobs={"scored": 1}, execute_model_state=None, speculative_config=None)
    patch.wrap(stock_of(patch))(runner, None)
    assert (count_of(activity), activity.error) == (0, None)
