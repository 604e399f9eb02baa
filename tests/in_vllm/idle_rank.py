"""idle-rank on vLLM's own worker, model runner and block tables.

What a step without work finds, and what real steps find after it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker import gpu_worker

from activities import activity_of, layers
from vllm_graphfix.fix import Activity
from vllm_graphfix.fixes import idle_rank as fix
from vllm_graphfix.fixes.idle_rank import IDLE_STEP_ON_REAL_BLOCKS
from vllm_graphfix.verify.double import idle_runner
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.idle_runner import DRAFT, REQUESTS
from vllm_graphfix.verify.double.scenarios.idle_rank import _DraftingRank, _Rank
from vllm_graphfix.verify.double.unpinned import unpinned

BOTH = ("first", "second")
HAS_DRAFT_SLOTS = hasattr(EagleProposer, "_get_slot_mapping")
ACTIVITY = activity_of("idle-rank")
STEPS_ON_REAL_BLOCKS = ACTIVITY.counter(IDLE_STEP_ON_REAL_BLOCKS)


@pytest.fixture(autouse=True)
def _no_error_of_a_layer(request: pytest.FixtureRequest) -> Any:
    ACTIVITY.error = None
    yield
    if "meets_an_error" not in request.node.name:
        assert ACTIVITY.error is None


def hybrid() -> _Rank:
    """With a full graph, after two steps of two requests."""
    rank = _Rank()
    rank.capture()
    rank.step(BOTH)
    rank.step(BOTH)
    return rank


def drafting() -> _DraftingRank:
    rank = _DraftingRank()
    rank.step(BOTH)
    return rank


def tables(rank: _Rank) -> list[Any]:
    result: list[Any] = rank.runner.input_batch.block_table.block_tables
    return result


def during(rank: _Rank, look: Callable[[], Any]) -> list[Any]:
    """Return the results of *look* at the very pass of a step without work."""
    seen: list[Any] = []
    call = idle_runner.CacheStandIn.__call__

    def model(**inputs: Any) -> torch.Tensor:
        seen.append(look())
        return call(rank.cache, **inputs)

    rank.runner.model = model
    rank.idle()
    rank.runner.model = rank.cache
    return seen


@pytest.fixture(autouse=True)
def _graphs() -> Any:
    with unpinned(), cpu_cuda_graphs():
        yield


def test_in_the_pass_the_buffers_of_graphs_have_only_pad_slots_and_null_blocks() -> None:
    rank = hybrid()
    addresses = [(table.slot_mapping.gpu.data_ptr(), table.block_table.gpu.data_ptr()) for table in tables(rank)]
    (seen,) = during(
        rank,
        lambda: [
            (
                (table.slot_mapping.gpu.data_ptr(), table.block_table.gpu.data_ptr()),
                set(table.slot_mapping.gpu.tolist()),
                set(table.block_table.gpu.flatten().tolist()),
            )
            for table in tables(rank)
        ],
    )
    assert seen == [(address, {-1}, {0}) for address in addresses]


def test_in_the_pass_the_state_indices_of_graphs_name_no_state() -> None:
    rank = hybrid()
    builder = rank.runner.attn_groups[0][0].metadata_builders[0]
    ((_, indices),) = [
        (name, tensor) for name, tensor in vars(builder).items() if name.startswith("state_indices_tensor")
    ]
    (seen,) = during(rank, lambda: set(indices.flatten().tolist()))
    assert seen <= {0, -1}


def test_rows_that_only_grow_are_those_of_the_requests_afterwards() -> None:
    rank = hybrid()
    rows = [table.block_table.np.copy() for table in tables(rank)]
    counts = [table.num_blocks_per_row.copy() for table in tables(rank)]
    assert any(each.any() for each in rows)
    rank.idle()
    for table, row, count in zip(tables(rank), rows, counts, strict=True):
        assert (table.block_table.np == row).all()
        assert (table.num_blocks_per_row == count).all()


def test_the_next_step_commits_rows_again() -> None:
    rank = hybrid()
    rank.idle()
    assert "commit_block_table" not in vars(rank.runner.input_batch.block_table)
    rank.runner.input_batch.block_table.commit_block_table(REQUESTS)
    for table in tables(rank):
        assert (table.block_table.gpu.numpy() == table.block_table.np).all()
        assert table.block_table.gpu.any()


def test_no_block_changes_and_no_step_differs_however_often_a_rank_idles() -> None:
    idling, busy = hybrid(), hybrid()
    for _ in range(3):
        before = idling.cache.blocks()
        for _ in range(2):
            idling.idle()
        assert idling.cache.blocks() == before
        assert torch.equal(idling.step(BOTH), busy.step(BOTH))
        assert idling.cache.blocks() == busy.cache.blocks()


@pytest.mark.parametrize("requests", [("second",), ()], ids=["one has moved to another row", "all have ended"])
def test_blocks_that_earlier_requests_have_left_stay(requests: tuple[str, ...]) -> None:
    rank = hybrid()
    rank.step(requests)
    before = rank.cache.blocks()
    rank.idle()
    assert rank.cache.blocks() == before


def test_a_rank_that_never_had_a_request_idles_uncounted() -> None:
    rank = _Rank()
    rank.capture()
    before = STEPS_ON_REAL_BLOCKS.count
    rank.idle()
    assert STEPS_ON_REAL_BLOCKS.count == before
    assert not any(rank.cache.blocks())


def test_after_a_batch_every_idle_step_is_counted() -> None:
    rank = hybrid()
    before = STEPS_ON_REAL_BLOCKS.count
    for _ in range(2):
        rank.idle()
    assert STEPS_ON_REAL_BLOCKS.count == before + 2


def test_where_stock_pads_the_slots_attention_alone_is_not_counted() -> None:
    rank = drafting()
    rank.runner.drafter = None
    for shape, counted in (("slots", True), ("slots-and-inputs", True), ("rows-and-tables", False), ("rows", False)):
        assert fix._names_real_blocks(rank.runner, shape) is counted


@pytest.mark.skipif(not HAS_DRAFT_SLOTS, reason="drafts have no slots of their own in 0.14.1")
def test_a_drafters_own_slots_are_pad_slots_too() -> None:
    rank = drafting()
    drafter = rank.runner.drafter
    groups = {1: torch.arange(4)}
    drafter._per_group_slot_mapping_buffers = groups
    before = rank.cache.blocks()
    assert drafter._slot_mapping_buffer.any()
    rank.idle()
    assert set(drafter._slot_mapping_buffer.tolist()) == {-1} == set(groups[1].tolist())
    assert rank.cache.blocks() == before
    own = drafter._get_slot_mapping(REQUESTS, torch.tensor([9, 13]))[DRAFT]
    assert own.tolist() == [9, 13]


def test_a_step_that_ends_in_an_error_leaves_what_later_steps_need() -> None:
    rank = hybrid()
    rows = [table.block_table.np.copy() for table in tables(rank)]

    def fails(**inputs: Any) -> None:
        raise RuntimeError("of the pass")

    rank.runner.model = fails
    with pytest.raises(RuntimeError, match="of the pass"):
        rank.idle()
    assert "commit_block_table" not in vars(rank.runner.input_batch.block_table)
    assert all((table.block_table.np == row).all() for table, row in zip(tables(rank), rows, strict=True))


def test_a_layer_that_meets_an_error_lets_stock_run_and_brings_back_what_it_took() -> None:
    rank = drafting()
    ran: list[bool] = []

    class Unfit:
        def fill_(self, value: int) -> None:
            raise TypeError("no tensor")

    rank.runner.drafter.of_a_fork_slot_mapping = Unfit()
    stock = rank.runner._dummy_run

    def run(*args: Any, **kwargs: Any) -> Any:
        ran.append("commit_block_table" in vars(rank.runner.input_batch.block_table))
        return stock(*args, **kwargs)

    rank.runner._dummy_run = run
    before = STEPS_ON_REAL_BLOCKS.count
    rank.idle()
    assert ran == [False]
    assert ACTIVITY.error == "TypeError: no tensor"
    assert STEPS_ON_REAL_BLOCKS.count == before


def test_runs_that_are_no_steps_of_an_idle_rank_are_untouched() -> None:
    """Warm-ups, profiling and captures call the model runner, not the worker."""
    rank = drafting()
    slots = [table.slot_mapping.gpu.clone() for table in tables(rank)]
    seen: list[Any] = []
    rank.runner.model = lambda **inputs: seen.append([t.block_table.gpu.clone() for t in tables(rank)])
    rows = [table.block_table.gpu.clone() for table in tables(rank)]
    before = STEPS_ON_REAL_BLOCKS.count
    with idle_runner.step_on_a_cpu(), pytest.raises(TypeError, match="NoneType"):
        rank.runner._dummy_run(1, uniform_decode=True, cudagraph_runtime_mode=CUDAGraphMode.NONE)
    assert all(map(torch.equal, seen[0], rows))
    assert STEPS_ON_REAL_BLOCKS.count == before
    for table, slot in zip(tables(rank), slots, strict=True):
        assert torch.equal(table.slot_mapping.gpu[1:], slot[1:]), "stock pads the first from 0.20 on"


def test_a_worker_on_a_cpu_has_its_rows_back() -> None:
    """Its buffers for the host and for the device are one memory."""
    rank = hybrid()
    for table in tables(rank):
        table.block_table.gpu = table.block_table.cpu
    rows = [table.block_table.np.copy() for table in tables(rank)]
    (seen,) = during(rank, lambda: any(table.block_table.gpu.any() for table in tables(rank)))
    assert not seen
    for table, row in zip(tables(rank), rows, strict=True):
        assert (table.block_table.np == row).all()


# Model runner V2: its block tables need pinned memory, so these are their attributes alone.


class TablesStandIn:
    """The state of `BlockTables`: the rows of requests, which grow, and the buffers that graphs read."""

    def __init__(self, blocks: int = 3) -> None:
        self.block_tables = [SimpleNamespace(gpu=torch.arange(1, 7, dtype=torch.int32).view(2, 3))]
        self.input_block_tables = [torch.arange(1, 7, dtype=torch.int32).view(2, 3)]
        self.slot_mappings = torch.arange(8).view(1, 8)
        self.num_blocks = SimpleNamespace(np=torch.full((1, 2), blocks, dtype=torch.int32).numpy())

    def compute_slot_mappings(self, idx_mapping: torch.Tensor, num_tokens_padded: int) -> torch.Tensor:
        self.slot_mappings[0, : len(idx_mapping)] = 4 * self.block_tables[0].gpu[idx_mapping, 0]
        return self.slot_mappings[:, :num_tokens_padded]

    def all(self) -> dict[str, torch.Tensor]:
        return {
            "requests": self.block_tables[0].gpu.clone(),
            "inputs": self.input_block_tables[0].clone(),
            "slots": self.slot_mappings.clone(),
        }


class RunnerStandIn:
    """A model runner V2 as far as a step without work is concerned."""

    def __init__(self, speculator: bool = False, states: bool = False, blocks: int = 3) -> None:
        self.block_tables = TablesStandIn(blocks)
        self.indices = torch.arange(4, dtype=torch.int32)
        builder = SimpleNamespace(state_indices_tensor_d=self.indices) if states else SimpleNamespace()
        self.attn_groups = [[SimpleNamespace(metadata_builders=[builder])]]
        self.drafts = torch.arange(4)
        own = SimpleNamespace(compressed_slot_mapping_buffer=self.drafts)
        groups = [[SimpleNamespace(metadata_builders=[own])]]
        self.speculator = SimpleNamespace(attn_groups=groups) if speculator else None
        self.seen: dict[str, torch.Tensor] = {}

    def run(self) -> str:
        self.seen = self.block_tables.all()
        if self.speculator is not None:
            self.seen["drafted"] = self.block_tables.compute_slot_mappings(torch.tensor([0, 1]), num_tokens_padded=4)
        return "what stock returns"


def idle(runner: RunnerStandIn, shape: str) -> Activity:
    """Return the activity of the fix in a step of its own."""
    activity, (layer,) = layers(fix.FIX, shape)
    step = layer.wrap(lambda self: self.model_runner.run())
    assert step(SimpleNamespace(model_runner=runner)) == "what stock returns"
    assert activity.error is None
    return activity


@pytest.mark.parametrize("shape", ["slots-and-inputs", "rows-and-tables", "rows-and-drafts"])
@pytest.mark.parametrize("speculator", [False, True])
def test_on_v2_the_pass_finds_no_block_and_requests_have_their_rows_back(shape: str, speculator: bool) -> None:
    runner = RunnerStandIn(speculator, states=True)
    before = copy.deepcopy(runner.block_tables.all())
    idle(runner, shape)
    assert set(runner.seen["slots"].flatten().tolist()) == {-1}
    assert not runner.seen["inputs"].any()
    assert runner.seen["requests"].any() != speculator, "drafts alone compute slots from them"
    assert torch.equal(runner.block_tables.all()["requests"], before["requests"])
    assert not runner.indices.any()
    assert (set(runner.drafts.tolist()) == {-1}) is speculator


def test_on_v2_drafts_compute_pad_slots_and_real_ones_afterwards() -> None:
    runner = RunnerStandIn(speculator=True)
    idle(runner, "rows-and-drafts")
    assert set(runner.seen["drafted"].flatten().tolist()) == {-1}
    computed = runner.block_tables.compute_slot_mappings(torch.tensor([0, 1]), num_tokens_padded=2)
    assert computed.tolist() == [[4, 16]]


def test_on_v2_nothing_is_done_where_stock_does_it() -> None:
    runner = RunnerStandIn(speculator=True)
    before = runner.block_tables.all()
    idle(runner, "rows")
    for name, tensor in before.items():
        assert torch.equal(runner.seen[name], tensor)


@pytest.mark.parametrize(
    ("shape", "speculator", "states", "blocks", "counted"),
    [
        ("slots-and-inputs", False, False, 3, True),
        ("slots-and-inputs", False, False, 0, False),
        ("rows-and-tables", False, False, 3, False),
        ("rows-and-tables", False, True, 3, True),
        ("rows-and-tables", True, False, 3, True),
        ("rows-and-drafts", False, True, 3, False),
        ("rows-and-drafts", True, False, 3, True),
        ("rows-and-drafts", True, False, 0, False),
        ("rows", True, True, 3, False),
        ("slots", True, True, 3, False),
    ],
)
def test_on_v2_what_stock_would_write_is_counted(
    shape: str, speculator: bool, states: bool, blocks: int, counted: bool
) -> None:
    runner = RunnerStandIn(speculator, states, blocks)
    activity = idle(runner, shape)
    assert activity.counter(IDLE_STEP_ON_REAL_BLOCKS).count == counted


def test_the_target_is_the_one_that_executors_call() -> None:
    assert gpu_worker.Worker.execute_dummy_batch.__wrapped__.__name__ == "execute_dummy_batch"
