"""prefill-dispatch on vLLM's own dispatch.

Which steps of what model have a full decode graph, and what other ranks are told. The builders of its layers are none
that the fix knows, so that each prefill counts; `prefill_builders.py` has vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
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
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, UniformTypeKVCacheSpecs
from vllm.v1.worker import gpu_model_runner

from vllm_graphfix.verify.double.scenarios import prefill_dispatch as scenario

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
Row = tuple[int, int, int]
"""Tokens of a prompt, tokens that are computed, and tokens that are known."""


class SubclassedSpec(MambaSpec):  # type: ignore[misc]
    """A fork's."""


def runner(
    length: int = 1, mode: CUDAGraphMode = CUDAGraphMode.FULL_DECODE_ONLY, groups: KVCacheConfig | None = None
) -> Any:
    config = scenario._config(mode, length)
    config.compilation_config.is_attention_compiled_piecewise = lambda: True
    return scenario.DispatchV1(config, groups or layers(attention(), recurrent())).runner


def ask(made: Any, rows: list[Row], count: int | None = None, **forced: Any) -> Any:
    """Return the result of `_determine_batch_execution_and_padding` for a step.

    The step gives each of *rows* so many tokens, or those of a decode.
    """
    count = made.uniform_decode_query_len if count is None else count
    batch = made.input_batch
    for numbers, column in zip(
        (batch.num_prompt_tokens, batch.num_computed_tokens_cpu, batch.num_tokens_no_spec),
        zip(*rows, strict=True),
        strict=True,
    ):
        numbers[: len(rows)] = column
    return made._determine_batch_execution_and_padding(
        num_tokens=count * len(rows),
        num_reqs=len(rows),
        num_scheduled_tokens_np=np.full(len(rows), count, dtype=np.int32),
        max_num_scheduled_tokens=count,
        use_cascade_attn=False,
        **forced,
    )


def mode_of(made: Any, rows: list[Row], count: int | None = None, **forced: Any) -> CUDAGraphMode:
    mode: CUDAGraphMode = ask(made, rows, count, **forced)[0]
    return mode


def decode(prompt: int = 3, further: int = 4) -> Row:
    """A request that has answered with *further* tokens, the last of which is not computed."""
    return (prompt, prompt + further - 1, prompt + further)


@LENGTHS
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_decodes_have_their_graph(length: int, rows: int) -> None:
    made = runner(length)
    assert mode_of(made, [decode(3 + row) for row in range(rows)]) is FULL
    assert mode_of(made, [decode(3, further=1)] * rows) is FULL, "the first decode after a prompt"
    assert AS_DECODE.count == 0


PREFILLS: dict[str, Callable[[int], Row]] = {
    "a prompt as long as a decode": lambda length: (length, 0, length),
    "the rest of a prompt": lambda length: (5 + length, 5, 5 + length),
    "a chunk from the middle of a prompt": lambda length: (40, 8, 40),
    "a prompt but for what the prefix cache has": lambda length: (16 + length, 16, 16 + length),
    "a preempted request from its beginning": lambda length: (3, 0, 9),
    "a preempted request's own tokens": lambda length: (3, 5, 12),
    "the prompt's last token and tokens of its own": lambda length: (3, 2, 12),
}


@LENGTHS
@pytest.mark.parametrize("others", [0, 1, 3])
@pytest.mark.parametrize("prefill", PREFILLS.values(), ids=list(PREFILLS))
def test_one_row_that_is_not_past_its_prefill_keeps_the_step_out_of_a_decode_graph(
    length: int, others: int, prefill: Callable[[int], Row]
) -> None:
    for place in range(others + 1):
        rows = [decode()] * others
        rows.insert(place, prefill(length))
        assert mode_of(runner(length), rows) is NONE
    assert AS_DECODE.count == others + 1


@LENGTHS
def test_it_runs_in_a_piecewise_graph_as_other_steps_with_prefills_if_there_is_one(length: int) -> None:
    made = runner(length, CUDAGraphMode.FULL_AND_PIECEWISE)
    prefill = PREFILLS["the rest of a prompt"](length)
    assert mode_of(made, [decode(), decode()]) is FULL
    mode, descriptor, *_ = ask(made, [decode(), prefill])
    expected = ask(made, [decode(), prefill], force_uniform_decode=False)
    assert (mode, descriptor) == tuple(expected[:2])
    assert mode is PIECEWISE
    assert not getattr(descriptor, "uniform", getattr(descriptor, "uniform_decode", False))


@pytest.mark.parametrize("length", [2, 4])
def test_the_last_token_of_a_preempted_request_with_its_drafts_is_a_decode(length: int) -> None:
    assert mode_of(runner(length), [(3, 11, 12)]) is FULL


def test_what_is_computed_may_run_ahead_of_what_is_known() -> None:
    """This happens with asynchronous scheduling, which counts every draft as accepted."""
    assert mode_of(runner(2), [(3, 14, 12), (3, 12, 12)]) is FULL


@LENGTHS
def test_rows_beyond_the_batch_are_nobodys_phase(length: int) -> None:
    made = runner(length)
    ask(made, [decode(), decode(), (40, 8, 40), (40, 0, 40)])
    counted = AS_DECODE.count
    assert mode_of(made, [decode(), decode()]) is FULL
    assert AS_DECODE.count == counted


@LENGTHS
@pytest.mark.parametrize("prefill", PREFILLS.values(), ids=list(PREFILLS))
def test_captures_and_dummy_runs_which_force_the_answer_get_it(length: int, prefill: Callable[[int], Row]) -> None:
    made = runner(length)
    assert mode_of(made, [prefill(length)], force_uniform_decode=True) is FULL
    assert mode_of(made, [prefill(length)], force_uniform_decode=False) is NONE
    assert mode_of(made, [decode()], force_uniform_decode=False) is NONE
    assert mode_of(made, [prefill(length)], force_eager=True) is NONE
    assert AS_DECODE.count == 0


@LENGTHS
@pytest.mark.parametrize("prefill", PREFILLS.values(), ids=list(PREFILLS))
def test_models_without_recurrent_layers_keep_their_graphs(length: int, prefill: Callable[[int], Row]) -> None:
    together = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": attention(), "b": attention()})
    for groups in (layers(attention()), layers(attention(), attention()), layers(together), layers()):
        assert mode_of(runner(length, groups=groups), [decode(), prefill(length)]) is FULL
    assert AS_DECODE.count == 0


@pytest.mark.parametrize(
    "groups",
    [
        lambda: layers(recurrent()),
        lambda: layers(attention(), attention(), recurrent()),
        lambda: layers(recurrent(SubclassedSpec)),
        lambda: layers(UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": recurrent(), "b": recurrent()})),
    ],
    ids=["alone", "last of three groups", "subclassed", "several sizes in one group"],
)
def test_a_group_of_recurrent_layers_is_recognised_in_any_place(groups: Callable[[], KVCacheConfig]) -> None:
    assert mode_of(runner(groups=groups()), [decode(), (1, 0, 1)]) is NONE
    assert AS_DECODE.count == 1


@pytest.mark.parametrize("mode", [NONE, PIECEWISE], ids=str)
def test_where_decodes_have_no_graphs_of_their_own_nothing_is_counted(mode: CUDAGraphMode) -> None:
    assert mode_of(runner(mode=mode), [(1, 0, 1)]) is mode
    assert AS_DECODE.count == 0


def test_a_batch_that_is_larger_than_its_graphs_is_not_counted() -> None:
    made = runner()
    made.compilation_config.max_cudagraph_capture_size = 1
    assert mode_of(made, [decode(), (1, 0, 1)]) is NONE
    assert AS_DECODE.count == 0


def test_a_step_that_has_not_the_shape_of_a_decode_is_stocks() -> None:
    assert mode_of(runner(2), [(3, 0, 3)], count=3) is NONE
    assert mode_of(runner(2), [(3, 0, 3)], count=1) is NONE
    assert AS_DECODE.count == 0


def parallel(made: Any, **sizes: int) -> None:
    for name, size in {"data_parallel_rank": 0, **sizes}.items():
        setattr(made.parallel_config, name, size)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_other_ranks_of_data_parallelism_hear_of_this_ranks_mode(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    reported: list[dict[str, Any]] = []

    def coordinate(**inputs: Any) -> Any:
        reported.append(inputs)
        tokens = torch.tensor([inputs["num_tokens_padded"]] * 2)
        return False, tokens, inputs["cudagraph_mode"]

    monkeypatch.setattr(gpu_model_runner, "coordinate_batch_across_dp", coordinate)
    made = runner()
    parallel(made, data_parallel_size=2)
    rows = [decode(), decode() if phase == "decode" else (1, 0, 1)]
    mode = mode_of(made, rows)
    assert mode is (FULL if phase == "decode" else NONE)
    ((uniform, requested),) = [(inputs["uniform_decode"], inputs["cudagraph_mode"]) for inputs in reported]
    assert (uniform, requested) == (phase == "decode", mode.value)


def test_a_rank_that_only_decodes_follows_one_that_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's own agreement: the least of what the ranks ask for."""

    def coordinate(**inputs: Any) -> Any:
        return False, torch.tensor([inputs["num_tokens_padded"]] * 2), NONE.value

    monkeypatch.setattr(gpu_model_runner, "coordinate_batch_across_dp", coordinate)
    made = runner()
    parallel(made, data_parallel_size=2)
    assert mode_of(made, [decode()]) is NONE
    assert AS_DECODE.count == 0


def test_the_stages_of_a_pipeline_go_by_the_prompts_which_all_know() -> None:
    made = runner(2)
    parallel(made, pipeline_parallel_size=2)
    assert mode_of(made, [decode(), (2, 0, 2)]) is NONE
    assert mode_of(made, [decode(), (3, 5, 12)]) is FULL, "what a preempted request knows may differ between stages"


def test_pipelines_with_sequence_parallelism_are_not_touched() -> None:
    """The worker must hear what the runner hears, although it asks earlier.

    It asks for the number of tokens before the batch is updated, the runner after it.
    """
    made = runner()
    parallel(made, pipeline_parallel_size=2)
    made.compilation_config.pass_config.enable_sp = True
    answers = {mode_of(made, rows) for rows in ([decode(), (1, 0, 1)], [decode(), decode()])}
    assert answers == {FULL}
    assert AS_DECODE.count == 0


def test_sequence_parallelism_without_a_pipeline_is_put_right() -> None:
    made = runner()
    made.compilation_config.pass_config.enable_sp = True
    assert mode_of(made, [decode(), (1, 0, 1)]) is NONE


def test_positional_arguments_are_ignored() -> None:
    made = runner()
    ask(made, [(1, 0, 1)])
    counted = AS_DECODE.count
    mode, *_ = made._determine_batch_execution_and_padding(1, 1, np.ones(1, dtype=np.int32), 1, False)
    assert mode is FULL
    assert AS_DECODE.count == counted


def test_the_batch_is_not_changed() -> None:
    made = runner()
    rows = [decode(), (1, 0, 1)]
    ask(made, rows)
    batch = made.input_batch
    numbers = (batch.num_prompt_tokens, batch.num_computed_tokens_cpu, batch.num_tokens_no_spec)
    assert [tuple(column[row] for column in numbers) for row in range(2)] == rows


def test_an_error_of_the_fix_leaves_the_step_to_stock() -> None:
    made = runner()
    made.input_batch = SimpleNamespace(lora_id_to_lora_request={})
    mode, *_ = made._determine_batch_execution_and_padding(
        num_tokens=1,
        num_reqs=1,
        num_scheduled_tokens_np=np.ones(1, dtype=np.int32),
        max_num_scheduled_tokens=1,
        use_cascade_attn=False,
    )
    assert mode is FULL
    assert ACTIVITY.error is not None
    ACTIVITY.error = None
