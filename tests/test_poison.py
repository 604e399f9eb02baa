"""Poison in what must not matter: on the CPU double, on stock releases, and in its parts."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from behaviours import check_behaviours
from stock import ALL_RELEASES
from table import slow_but_for
from vllm_graphfix.verify.poison.bits import LOUD, NAN
from vllm_graphfix.verify.poison.blocks import Blocks, Cache, caches_of
from vllm_graphfix.verify.poison.engine import Holders, PoisonedRunner
from vllm_graphfix.verify.poison.kinds import BLOCKS, MEMORY, NULL, ROWS
from vllm_graphfix.verify.poison.memory import Free, free_parts
from vllm_graphfix.verify.poison.poison import Poison
from vllm_graphfix.verify.poison.rows import Room, Rows, buffers_of

QUICK = ("0.19.1", "0.27.1")
"""Between them they have all five defects, one of them in a release that has cured another."""


@pytest.mark.parametrize("release", slow_but_for(QUICK, ALL_RELEASES))
def test_poison_finds_the_known_defects_of_padding(release: str) -> None:
    check_behaviours(release, "poisoned_steps", {"VLLM_GRAPHFIX": "off"})


@pytest.mark.parametrize("release", slow_but_for(QUICK[:1], ALL_RELEASES))
def test_poison_is_silent_with_the_fixes(release: str) -> None:
    switches = {"VLLM_GRAPHFIX": "on", "VLLM_GRAPHFIX_TRITON_MLA_PADDING": "on"}
    check_behaviours(release, "poisoned_steps", switches, select="nothing_in_other_releases or does")


LAYOUTS = {
    "blocks first": torch.zeros(6, 2, 3),
    "keys and values first": torch.zeros(2, 6, 3, dtype=torch.bfloat16),
    "blocks and as many tokens": torch.zeros(6, 6, 4),
    "kernel blocks": torch.zeros(18, 4, dtype=torch.float16),
    "part of a page": torch.zeros(6, 8).as_strided((6, 3), (8, 1)),
    "fp8 in bytes": torch.zeros(6, 4, dtype=torch.uint8),
    "fp8": torch.zeros(6, 4).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("byte", [NAN, LOUD], ids=["NaN", "large"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_hold_poison_until_somebody_writes_in_whatever_layout(layout: str, byte: int) -> None:
    tensor = LAYOUTS[layout].clone(memory_format=torch.preserve_format)
    (cache,), unknown = caches_of({"layer": [tensor]}, 6)
    blocks = Blocks([cache], 6, byte)
    blocks.fill([2, 4])
    assert not unknown
    assert not blocks.overwritten(range(6))
    bits = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    bits.movedim(cache.axis, 0)[4 * cache.kernel_blocks, ..., -1] = 1
    assert blocks.overwritten(range(6)) == {"layer": [4]}
    blocks.wipe([2, 4])
    assert not bits.float().any()


def test_layers_that_share_memory_agree_on_the_poison_in_it() -> None:
    memory = torch.zeros(4 * 64, dtype=torch.uint8)
    attention, state = memory.view(torch.bfloat16).view(4, 32), memory.view(torch.float32).view(4, 16)
    blocks = Blocks([Cache("attention", attention), Cache("mixer", state)], 4)
    blocks.fill([1, 3])
    assert not blocks.overwritten([1, 3])
    assert attention[1].isnan().all()
    state[3, 0] = 0
    assert blocks.overwritten([1, 3]) == {"attention": [3], "mixer": [3]}


def test_no_block_is_named_whose_number_means_a_held_one_to_a_kernel() -> None:
    """Block 7 of a kernel that sees four in each block is in block 1."""
    blocks = Blocks([Cache("layer", torch.zeros(32, 2), 0, 4)], 8)
    assert blocks.last_free(held=set()) == 7
    assert blocks.last_free(held={1, 6}) == 0
    assert Blocks([Cache("layer", torch.zeros(8, 2))], 8).last_free(held={7, 6}) == 5


def poison_of(cache: torch.Tensor, *kinds: str) -> Poison:
    return Poison([], Blocks([Cache("layer", cache)], len(cache)), length=8, kinds=frozenset(kinds))


def test_a_block_is_looked_at_before_it_is_somebodys_and_is_then_empty() -> None:
    cache = torch.zeros(200, 2)
    poison = poison_of(cache, BLOCKS, NULL)
    poison.before_preparing(Rows(1, 1), {1})
    assert cache[0].isnan().all()
    assert not cache[1].any()
    assert cache[2:].isnan().all()
    cache[150, 0] = 1.0  # by whom nobody knows
    poison.after_running()
    assert not poison.findings, "of a large cache not all is looked at after each step"
    poison.before_preparing(Rows(1, 1), {1, 150})
    assert [finding.text for finding in poison.findings] == ["layer: block 150, which nobody holds, was written to"]
    assert not cache[150].any()


def test_a_block_that_the_engine_empties_when_it_gives_it_away_is_no_finding() -> None:
    cache = torch.zeros(6, 2)
    poison = poison_of(cache, BLOCKS)
    poison.before_preparing(Rows(1, 1), {1})
    poison.allocate({1, 4})
    cache[4] = 0.0  # what vLLM does with new blocks of hybrids, before it prepares the step
    poison.before_preparing(Rows(1, 1), {1, 4})
    assert not poison.findings


def test_a_freed_block_is_poisoned_again_and_all_poison_is_removed_at_the_end() -> None:
    cache = torch.ones(4, 2)
    poison = poison_of(cache, BLOCKS, NULL)
    poison.before_preparing(Rows(1, 1), {1, 2})
    poison.before_preparing(Rows(1, 1), {2})
    assert cache[1].isnan().all()
    cache[3] = 5.0
    poison.remove()
    assert cache.isfinite().all()
    assert cache[2].tolist() == [1, 1]
    assert [(each.text, each.written) for each in poison.findings] == [
        ("layer: block 3, which nobody holds, was written to", True)
    ]


def test_nan_in_blocks_of_a_request_is_noted_once_with_the_first_layer() -> None:
    first, second = torch.zeros(4, 2), torch.zeros(4, 2)
    blocks = Blocks([Cache("layers.0", first), Cache("layers.1", second)], 4)
    poison = Poison([], blocks, length=8, kinds=frozenset({BLOCKS}))
    for _ in range(2):
        poison.before_preparing(Rows(1, 1), {2})
        first[2, 1] = second[2, 0] = torch.nan
        poison.after_running()
    (finding,) = poison.findings
    assert (finding.step, finding.written) == (1, False)
    assert finding.text == "NaN in what requests hold: first in layers.0, block 2 (2 layers)"


def test_nan_is_looked_for_in_a_block_as_the_layers_of_its_own_group_see_it() -> None:
    """Groups share memory: half of a float32 may be a bfloat16 NaN. Layers of one shape see the same as well."""
    memory = torch.zeros(6 * 64, dtype=torch.uint8)
    attention, states = memory.view(torch.bfloat16).view(6, 32), memory.view(torch.float32).view(6, 16)
    states[1:4] = torch.tensor(0x3F807FC0, dtype=torch.int32).view(torch.float32)  # about 1
    holders = Holders(cached=False)
    layers = {"mixer.0": states, "mixer.1": states, "attention": attention}
    caches = [Cache(name, tensor, group=number) for number, (name, tensor) in enumerate(layers.items())]
    blocks = Blocks([*caches, Cache("shares attention's", attention)], 6, groups=holders.groups)
    assert attention[1].isnan().any()
    holders.update(scheduler_output({"a": ([1], [2], [4, 5])}))
    assert not blocks.with_nan(holders.held)
    states[2, 3] = attention[4, 1] = torch.nan
    assert blocks.with_nan(holders.held) == {"mixer.1": [2], "attention": [4]}
    holders.update(scheduler_output({"b": ([], [], [3])}, finished_req_ids={"a"}))
    assert blocks.with_nan(holders.held) == {"attention": [3]}


def test_numbers_that_are_the_same_in_all_steps_are_no_rows() -> None:
    holder = SimpleNamespace(
        numbers=torch.arange(8),
        prev_positions=torch.zeros(8, dtype=torch.int64),
        positions=torch.zeros(8, dtype=torch.int64),
        weights=torch.zeros(3, 6),
        expanded=torch.zeros(1).expand(8),
    )
    assert [each.name for each in buffers_of({"runner": holder}, Room(4, 8))] == ["runner.positions"]


def scheduler_output(new: dict[str, Any] | None = None, cached: dict[str, Any] | None = None, **further: Any) -> Any:
    """A scheduler's output."""
    requests = [SimpleNamespace(req_id=name, block_ids=blocks) for name, blocks in (new or {}).items()]
    known = SimpleNamespace(req_ids=list(cached or {}), new_block_ids=list((cached or {}).values()))
    fields = {"finished_req_ids": set(), "scheduled_new_reqs": requests, "scheduled_cached_reqs": known}
    return SimpleNamespace(**fields | further)


def test_blocks_are_held_from_the_first_word_of_them_until_their_request_ends() -> None:
    holders = Holders(cached=False)
    holders.update(scheduler_output({"a": ([1, 2], [3]), "b": ([4], [5])}))
    holders.update(scheduler_output(cached={"a": ([6], []), "b": None}))
    assert holders.held == {1, 2, 3, 4, 5, 6}
    holders.update(scheduler_output(finished_req_ids={"a"}))
    assert holders.held == {4, 5}
    holders.update(scheduler_output(preempted_req_ids={"b"}))
    assert holders.held == set()


def test_where_prefixes_are_cached_a_block_is_held_for_good() -> None:
    holders = Holders(cached=True)
    holders.update(scheduler_output({"a": ([1, 2],)}))
    holders.update(scheduler_output(finished_req_ids={"a"}))
    assert holders.held == {1, 2}


def test_free_memory_is_what_no_tensor_has_on_this_device() -> None:
    parts = [("active_allocated", 512), ("inactive", 1024), ("active_pending_free", 256), ("inactive", 512)]
    blocks = [{"state": state, "size": size} for state, size in parts]
    segments = [{"device": 0, "address": 4096, "blocks": blocks}, {"device": 1, "address": 0, "blocks": blocks}]
    assert free_parts(segments, 0) == [Free(4608, 1024), Free(5888, 512)]
    addressed = [{**block, "address": 9000} for block in blocks[1:2]]  # newer releases of PyTorch say it
    assert free_parts([{"device": 0, "address": 4096, "blocks": addressed}], 0) == [Free(9000, 1024)]


class RunnerStandIn:
    """Attributes of a model runner V1 that poison reads."""

    def __init__(self, **config: Any) -> None:
        self.cache = torch.ones(6, 2, 3)
        self.input_ids = torch.full((8,), 7, dtype=torch.int32)
        self.max_num_reqs, self.max_num_tokens, self.max_model_len = 4, 8, 32
        self.input_batch = SimpleNamespace(num_reqs=0)
        self.kv_cache_config = SimpleNamespace(num_blocks=6)
        self.vllm_config = SimpleNamespace(
            kv_transfer_config=None,
            cache_config=SimpleNamespace(enable_prefix_caching=False, block_size=16),
            model_config=SimpleNamespace(max_model_len=32, get_vocab_size=lambda: 100),
            compilation_config=SimpleNamespace(static_forward_context={"layer": SimpleNamespace(kv_cache=self.cache)}),
        )
        self.vllm_config.__dict__.update(config)
        self.rows: list[list[int]] = []
        self.execute_model_state: Any = None

    def execute_model(self, output: Any) -> None:
        self._prepare_inputs(output, None)

    def _prepare_inputs(self, output: Any, scheduled: Any) -> None:
        self.rows.append(self.input_ids.tolist())

    def _dummy_run(self, tokens: int) -> None:
        self.rows.append(self.input_ids.tolist())


def step(name: str, blocks: Any) -> Any:
    return scheduler_output({name: blocks}, num_scheduled_tokens={name: 2}, total_num_scheduled_tokens=2)


def test_a_runner_is_poisoned_before_it_prepares_and_is_as_before_in_the_end() -> None:
    runner = RunnerStandIn()
    poisoned = PoisonedRunner(runner)
    runner.execute_model(step("a", ([1],)))
    assert runner.rows.pop() == [7, 7, *[5] * 6], "the last block that nobody holds is 5"
    assert runner.cache[1].eq(1).all()
    assert runner.cache[5].isnan().all()
    runner._dummy_run(1)
    assert runner.rows.pop() == [5] * 8
    outcome = poisoned.remove()
    assert (outcome["steps"], outcome["findings"], outcome["error"], outcome["notes"]) == (2, [], None, [])
    assert outcome["most"][ROWS] == 1
    assert runner.input_ids.tolist() == [7] * 8
    assert not runner.cache.isnan().any()
    assert not {"execute_model", "_prepare_inputs", "_dummy_run"} & vars(runner).keys()


def test_what_goes_wrong_takes_the_poison_out_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = RunnerStandIn()
    poisoned = PoisonedRunner(runner)
    runner.execute_model(step("a", ([1],)))

    def fail(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(poisoned.poison, "before_preparing", fail)
    runner.execute_model(step("b", ([2],)))
    runner.execute_model(step("c", ([3],)))
    assert runner.input_ids.tolist() == [7] * 8
    assert not runner.cache.isnan().any()
    assert poisoned.remove()["error"] == "ValueError: no"


def test_with_a_kv_connector_blocks_are_not_poisoned_which_is_noted() -> None:
    runner = RunnerStandIn(kv_transfer_config=object())
    poisoned = PoisonedRunner(runner)
    runner.execute_model(step("a", ([1],)))
    assert runner.cache.eq(1).all()
    (note,) = poisoned.remove()["notes"]
    assert note == "not poisoned: blocks, since workers are not told which a KV connector writes to"


def test_a_runner_looks_for_nan_where_its_layers_groups_hold_blocks() -> None:
    runner = RunnerStandIn()
    layers = runner.vllm_config.compilation_config.static_forward_context
    layers["layer"].kv_cache, states = torch.zeros(6, 8, dtype=torch.bfloat16), torch.zeros(6, 4)
    layers["mixer"] = SimpleNamespace(kv_cache=[states.set_(layers["layer"].kv_cache.view(torch.float32))])
    runner.kv_cache_config.kv_cache_groups = [SimpleNamespace(layer_names=[name]) for name in ("mixer", "layer")]
    poisoned = PoisonedRunner(runner)
    runner.execute_model(step("a", ([1], [2])))
    assert states.isnan().any(1).tolist() == [True, False, False, True, True, True]
    states[1] = torch.tensor(0x3F807FC0, dtype=torch.int32).view(torch.float32)
    assert not poisoned.remove()["findings"]


def test_nan_of_the_engine_in_the_null_block_is_noted() -> None:
    runner = RunnerStandIn()
    runner.cache[0, 1, 1] = torch.nan
    (note,) = PoisonedRunner(runner).remove()["notes"]
    assert note == "the engine itself has left NaN in the null block (first in layer)"


@pytest.mark.parametrize(
    ("row", "padded"), [(1, None), (2, 2), (3, 2)], ids=["a request's row", "the first padded row", "the last one"]
)
def test_nan_in_padded_rows_of_the_models_output_is_noted_with_its_first_step(row: int, padded: int | None) -> None:
    """Each step has two tokens, and a graph of four. What it put out is there from each step until the next."""
    runner = RunnerStandIn()
    poisoned = PoisonedRunner(runner)
    output = torch.zeros(4, 3)
    runner.execute_model_state = SimpleNamespace(hidden_states=output)
    runner.execute_model(step("a", ([1],)))
    output[row, 1] = torch.nan
    for name in ("b", "c"):
        runner.execute_model(step(name, ([2],)))
    assert poisoned.remove()["padded"] == padded


def test_a_step_without_work_has_no_padding_to_look_at() -> None:
    """All of its rows are nobody's, and what the last step put out may still be there."""
    runner = RunnerStandIn()
    poisoned = PoisonedRunner(runner)
    runner.execute_model_state = SimpleNamespace(hidden_states=torch.full((4, 3), torch.nan))
    runner._dummy_run(4)
    assert poisoned.remove()["padded"] is None


def test_workspaces_are_poisoned_as_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = torch.zeros(8, dtype=torch.uint8)
    manager = SimpleNamespace(_current_workspaces=[None, workspace])
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.workspace", SimpleNamespace(_manager=manager))
    poisoned = PoisonedRunner(runner := RunnerStandIn(), [MEMORY])
    runner.execute_model(step("a", ([1],)))
    assert workspace.view(torch.float32).isnan().all()
    outcome = poisoned.remove()
    assert (outcome["most"], outcome["buffers"]) == ({MEMORY: 8}, [])
