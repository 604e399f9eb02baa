"""Poison in the scenarios of `verify` on the CPU double: what it finds on its own, and where it is silent."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from defects import affected

from vllm_graphfix.shadow.snapshot import same_bits
from vllm_graphfix.verify.double import worker
from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.double.poisoned import effects_of_poison
from vllm_graphfix.verify.double.unpinned import unpinned
from vllm_graphfix.verify.poison.blocks import Blocks
from vllm_graphfix.verify.poison.engine import PoisonedRunner, _buffer_holders
from vllm_graphfix.verify.poison.kinds import BLOCKS, ROWS
from vllm_graphfix.verify.poison.poison import STATES, Poison
from vllm_graphfix.verify.poison.rows import Lease, Room, Rows, ValidIds, buffers_of
from vllm_graphfix.verify.poison.states import free_rows, states_of

FIXES = ("flashmla-padding", "triton-mla-padding", "indexer-padding", "mamba-padding", "idle-rank")
"""What the shadow check cannot see, and mamba-padding."""
SHOW_WITHOUT_THEIR_PROVOCATION = {"mamba-padding": ROWS, "idle-rank": ROWS}
"""Poison is enough for these: a workload that happens to leave a slot in the middle of a prompt, or a block table of
somebody's, is not needed."""


@pytest.fixture(autouse=True)
def _cpu_memory() -> Iterator[None]:
    with unpinned():
        yield


def scenario_on_this_release(fix: str) -> Any:
    """Skips where the scenario is of code that this release has not, and the fix is not needed."""
    try:
        scenario = worker.load_scenario(fix)
        scenario(trigger=True)
    except (AttributeError, TypeError):
        if affected(fix):
            raise
        pytest.skip(f"this release is not affected by {fix}, and has not the classes that its scenario runs")
    return scenario


@pytest.mark.parametrize("fix", FIXES)
def test_poison_shows_a_defect_and_nothing_in_other_releases(fix: str) -> None:
    effects = effects_of_poison(scenario_on_this_release(fix))
    assert bool(effects) == affected(fix), effects
    assert not any("without graphs" in text for text in effects)


@pytest.mark.parametrize("fix", FIXES)
def test_what_the_workload_does_not_provoke_poison_does(fix: str) -> None:
    scenario = scenario_on_this_release(fix)
    plain = scenario(trigger=False)
    assert plain.error is None
    assert plain.eager == plain.graphed
    effects = effects_of_poison(scenario, trigger=False)
    expected = affected(fix) and fix in SHOW_WITHOUT_THEIR_PROVOCATION
    assert bool(effects) == expected, effects
    if expected:
        assert not effects_of_poison(scenario, {BLOCKS}, trigger=False), "no row names the blocks"


def runner_with(*requests: str) -> Any:
    """Model runner V1's own batch and buffers, as the scenario of mamba-padding has them."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend

    from vllm_graphfix.verify.double.scenarios import mamba_padding

    try:
        runner = mamba_padding._runner(Mamba2AttentionBackend, CUDAGraphMode.NONE)
        mamba_padding._update_batch(runner, dict.fromkeys(requests, 1))
    except (AttributeError, TypeError):
        if affected("mamba-padding"):
            raise
        pytest.skip("this release is not affected by mamba-padding, and has not the runner that its scenario runs")
    return runner


VALID = ValidIds(block=4, length=31, block_size=32, vocabulary=1000)


def test_padded_rows_look_like_a_prefilling_request_and_are_restored() -> None:
    runner = runner_with("first", "second")
    batch, room = runner.input_batch, Room(4, 32)
    before = {each.name: each.tensor.clone() for each in buffers_of({"runner": runner}, room)}
    assert {"runner.query_start_loc.gpu", "runner.seq_lens", "runner.positions"} <= before.keys()
    lease = Lease()
    lease.fill(buffers_of({"runner": runner}, room), Rows(2, 2, 2), VALID)
    assert (batch.num_computed_tokens_cpu[2:] < batch.num_prompt_tokens[2:]).all()
    assert (batch.block_table[0].block_table.gpu[2:] == VALID.block).all()
    assert (batch.block_table[0].slot_mapping.gpu[2:] == VALID.block * batch.block_table[0].block_size).all()
    assert batch.num_prompt_tokens[:2].tolist() == [3, 4]
    for each in buffers_of({"runner": runner}, room):
        real = each.tensor.narrow(each.axis, 0, 2)
        assert same_bits(real, before[each.name].narrow(each.axis, 0, 2)), each.name
    runner.seq_lens[2] = 0  # what vLLM pads with
    lease.end()
    for each in buffers_of({"runner": runner}, room):
        assert same_bits(each.tensor, before[each.name]), each.name


def test_a_step_without_work_leaves_the_batch_what_it_knows_of_its_requests() -> None:
    runner = runner_with("first", "second")
    Lease().fill(buffers_of({"runner": runner}, Room(4, 32)), Rows(0, 0, 2), VALID)
    assert runner.input_batch.num_prompt_tokens[:2].tolist() == [3, 4]
    assert (runner.input_batch.block_table[0].block_table.gpu == VALID.block).all()


def test_a_padded_row_with_any_token_stays_within_the_embeddings_of_adapters() -> None:
    """A kernel adds both: the token may be the last one of the vocabulary."""
    punica = pytest.importorskip("vllm.lora.punica_wrapper.punica_base")
    wrapper = SimpleNamespace()  # the class is abstract
    punica.PunicaWrapperBase.__init__(wrapper, 16, 4, torch.device("cpu"))
    Lease().fill(buffers_of({"wrapper": wrapper}, Room(4, 16)), Rows(1, 3), VALID)
    assert not wrapper._embeddings_indices[..., 3:].any()


def test_slots_of_model_runner_v2_lie_in_the_block_of_their_group() -> None:
    input_batch = pytest.importorskip("vllm.v1.worker.gpu.input_batch")
    tables = SimpleNamespace(
        input_block_tables=[torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)],
        slot_mappings=torch.zeros(2, 16, dtype=torch.int64),
        block_sizes=[16, 64],
    )
    try:
        inputs = input_batch.InputBuffers(max_num_reqs=4, max_num_tokens=16, device=torch.device("cpu"))
    except TypeError:
        pytest.skip("InputBuffers of this release are made with other arguments; the engine's own are found likewise")
    runner = SimpleNamespace(input_buffers=inputs, block_tables=tables, attn_groups=[])
    buffers = buffers_of(_buffer_holders(runner), Room(4, 16))
    Lease().fill(buffers, Rows(1, 3), VALID)
    assert (tables.slot_mappings[:, 3:] // torch.tensor([[16], [64]]) == VALID.block).all()
    assert not tables.slot_mappings[:, :3].any()
    assert (tables.input_block_tables[1][1:] == VALID.block).all()
    assert inputs.input_ids.tolist() == [0] * 3 + [VALID.block] * 13
    assert inputs.seq_lens.tolist() == [0, *[VALID.length] * 3]


def test_free_rows_of_model_runner_v2_look_like_a_request_and_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    states = pytest.importorskip("vllm.v1.worker.gpu.states")
    buffers = pytest.importorskip("vllm.v1.worker.gpu.buffer_utils")

    def on_the_host(self: Any, size: Any, dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()
        if not hasattr(type(self), "uva"):  # a method from 0.30.0 on
            self.uva = self.cpu
        self._uva = self.cpu

    monkeypatch.setattr(buffers, "is_uva_available", lambda: True)
    monkeypatch.setattr(buffers.UvaBuffer, "__init__", on_the_host)
    sizes: dict[str, Any] = {
        "max_num_reqs": 4,
        "max_model_len": 32,
        "max_num_batched_tokens": 16,
        "num_speculative_steps": 2,
    }
    sizes |= {"vocab_size": 1000, "device": torch.device("cpu")}
    sizes |= {"model_dtype": torch.bfloat16, "cache_draft_logits": False}  # up to 0.18
    requests = states.RequestState(**supported_kwargs(states.RequestState, sizes))
    tables = SimpleNamespace(
        block_tables=[buffers.StagedWriteTensor((4, 8), torch.int32, torch.device("cpu"))],
        num_blocks=buffers.UvaBackedTensor((1, 4), torch.int32),
        input_block_tables=[torch.zeros(4, 8, dtype=torch.int32)],
    )
    runner = SimpleNamespace(req_states=requests, block_tables=tables, max_num_reqs=4)
    held = requests.free_indices.pop()
    before = {each.name: each.tensor.clone() for each in states_of(runner)}
    poison = Poison([], Blocks([], 1), length=31, kinds=frozenset({ROWS}), states=lambda: _states(runner))
    poison.before_preparing(Rows(1, 1, 1), set())
    free = [row for row in range(4) if row != held]
    names = before.keys()
    assert {"requests.prefill_len.gpu", "requests.num_computed_tokens.gpu", "requests.last_sampled_tokens"} <= names
    assert {"requests.block_tables[0].gpu", "requests.num_blocks.cpu"} <= names
    assert requests.prefill_len.gpu[free].tolist() == [31] * 3
    assert (requests.num_computed_tokens.gpu[free] < requests.prefill_len.gpu[free]).all()
    for each in states_of(runner):
        assert each.tensor.select(each.axis, held).equal(before[each.name].select(each.axis, held)), each.name
    requests.draft_tokens[free[0]] = 9  # what vLLM writes stays
    poison.end_of_step()
    assert requests.draft_tokens[free[0]].tolist() == [9, 9]
    changed = [each.name for each in states_of(runner) if not each.tensor.equal(before[each.name])]
    assert changed == ["requests.draft_tokens"]
    assert poison.most == {ROWS: 0, STATES: 3}


def _states(runner: Any) -> Any:
    return [(each, free_rows(runner)) for each in states_of(runner)]


def test_poison_is_there_before_the_fix_empties_the_buffers_of_a_step_without_work() -> None:
    """As in an engine, where poison is around the worker's method that the fix is around, too."""
    from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
    from vllm_graphfix.verify.double.scenarios.idle_rank import _Rank

    with cpu_cuda_graphs():
        rank = _Rank()
        runner, caches = rank.runner, rank.cache.by_layer()
        runner.max_num_reqs, runner.model_config.get_vocab_size, runner.cache_config.block_size = 2, lambda: 1000, 4
        runner.kv_cache_config.num_blocks = len(caches["model.layers.0.mixer"])
        forward_context = {name: SimpleNamespace(kv_cache=[cache]) for name, cache in caches.items()}
        runner.vllm_config.compilation_config.static_forward_context = forward_context
        rank.capture()
        rank.step(("first",))
        # Large numbers: what a CPU computes from NaN is the same NaN, to the bit.
        poisoned = PoisonedRunner(runner, worker=rank.worker, finite=True)
        rank.idle()
        rank.update(())
        rank.idle()  # all rows are nobody's now
        text = poisoned.remove()
        rank.idle()
    assert (text["steps"], text["error"], text["notes"]) == (2, None, [])
    assert bool(text["findings"]) == affected("idle-rank"), text["findings"]
    assert "execute_dummy_batch" not in vars(rank.worker)
