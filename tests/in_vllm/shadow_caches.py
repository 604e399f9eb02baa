"""Which caches a step can write twice: vLLM's own layers and kernels, which Triton's interpreter runs on a CPU.

Of a cache with a slot for each token, or each group of them, a second run writes the same; a ring has to be put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.models.deepseek_v4 import compressor as v4
from vllm.triton_utils import HAS_TRITON

from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import forward, layers, process
from vllm_graphfix.shadow.failures import StepNotCheckable
from vllm_graphfix.shadow.snapshot import Snapshot
from vllm_graphfix.verify.double.model_runners import WrappedModel, wrappers_on_the_double


def test_the_kernels_are_vllms_own() -> None:
    assert HAS_TRITON


# -- DeepSeek V4: a slot for each token's state, and one for each group's entry


@pytest.mark.parametrize(("ratio", "head"), [(4, 128), (4, 512), (128, 512)])
def test_a_second_run_of_deepseek_v4s_compressor_writes_the_same_slots(ratio: int, head: int) -> None:
    """A decode, and a chunk of nine tokens; both complete a group."""
    compressor, states, entries, block = compressor_of(ratio, head)
    requests = torch.tensor([0] + [1] * 9, dtype=torch.int32)
    positions = torch.tensor([127, *range(250, 259)])
    table = torch.arange(1, 161, dtype=torch.int32).view(2, 80)
    slots = table[requests.long(), positions // block].long() * block + positions % block
    blocks = torch.tensor([[1, 2], [3, 4]])[requests.long(), positions // 256]
    groups = blocks * (256 // ratio) + positions % 256 // ratio
    groups = torch.where((positions + 1) % ratio == 0, groups, -1)
    metadata = {
        "states": v4.CompressorMetadata(table, slots, block, requests),
        "entries": SimpleNamespace(slot_mapping=groups),
    }
    kv_score, rotary = torch.randn(10, 2 * compressor.coff * head), SimpleNamespace(cos_sin_cache=torch.randn(512, 64))
    before = states.clone(), entries.clone()
    with override_forward_context(create_forward_context(metadata, config(), cudagraph_runtime_mode=NONE)):
        compressor.forward(kv_score, positions, rotary)
        first = states.clone(), entries.clone()
        compressor.forward(kv_score, positions, rotary)
    assert torch.equal(first[0], states)
    assert torch.equal(first[1], entries)
    changed = (before[0] != states).flatten(0, 1).any(-1).nonzero().flatten()
    assert changed.tolist() == sorted(slots.tolist())
    changed = (before[1] != entries).flatten(1).any(-1).nonzero().flatten()
    assert changed.tolist() == sorted({int(group) * ratio // 256 for group in groups if group >= 0})


NONE = CUDAGraphMode.NONE


def config() -> Any:
    compilation = SimpleNamespace(static_forward_context={}, fast_moe_cold_start=False, static_all_moe_layers=[])
    return SimpleNamespace(compilation_config=compilation, parallel_config=SimpleNamespace(data_parallel_size=1))


def compressor_of(ratio: int, head: int) -> tuple[Any, torch.Tensor, torch.Tensor, int]:
    """vLLM's compressor, its states, its entries, and the tokens of a block of states."""
    overlap, width = ratio == 4, 584 if head == 512 else 132
    coff, block = 1 + overlap, 4 if overlap else 8
    states = torch.randn(200, block, 2 * coff * head)
    entries = torch.zeros(8, 256 // ratio, width, dtype=torch.uint8)
    actual: Any = object.__new__(v4.DeepseekCompressor)
    vars(actual).update(
        compress_ratio=ratio,
        head_dim=head,
        rope_head_dim=64,
        nope_head_dim=head - 64,
        coff=coff,
        overlap=overlap,
        use_fp4_cache=False,
        ape=torch.randn(ratio, coff * head),
        norm=SimpleNamespace(weight=torch.ones(head, dtype=torch.bfloat16)),
        rms_norm_eps=1e-6,
        state_cache=SimpleNamespace(prefix="states", kv_cache=states),
        k_cache_prefix="entries",
        eager_scratch_pool=None,
        _static_forward_context={"entries": SimpleNamespace(kv_cache=entries)},
        _use_two_stage_fused_compressor=False,
        _quant_block=64 if head == 512 else 128,
        _token_stride=head - 64 + 128 if head == 512 else 128,
        _scale_dim=(head - 64) // 64 + 1 if head == 512 else 4,
    )
    return actual, states, entries, block


# -- which classes


@pytest.mark.parametrize(
    ("place", "checked"),
    [
        ("vllm.v1.attention.backends.mla.sparse_swa.DeepseekV4SWACache", True),
        ("vllm.models.deepseek_v4.compressor.CompressorStateCache", True),
        ("vllm.models.deepseek_v4.attention.DeepseekV4IndexerCache", True),
        ("vllm.models.minimax_m3.common.indexer.MiniMaxM3IndexerCache", True),
        ("vllm.model_executor.models.extract_hidden_states.CacheOnlyAttentionLayer", False),
    ],
)
def test_classes_of_other_devices_and_new_subclasses_are_unknown(place: str, checked: bool) -> None:
    module, _, name = place.rpartition(".")
    kind = getattr(pytest.importorskip(module), name)

    def refused(kind: Any) -> str | None:
        return layers.unknown_cache({"layer": object.__new__(kind)})

    assert (refused(kind) is None) == checked
    inherits = type("Inherits", (kind,), {"__module__": "vllm.models.deepseek_v4.nvidia.model"})
    assert (refused(inherits) is None) == checked
    for module, says in (("vllm.models.deepseek_v4.amd.rocm", {}), (kind.__module__, {"get_kv_cache_spec": None})):
        assert "Anew" in (refused(type("Anew", (kind,), {"__module__": module, **says})) or "")


# -- rings


RING, BLOCKS, TOKENS, START = 8, 4, 9, 13
"""Slots of a request's block; blocks; tokens of the step, one more than the ring holds; the first one's position."""


class Ringed:
    """DeepSeek V4.1's compressor in vLLM's wrapper of full graphs: its own cache class, metadata and kernel."""

    def __init__(self, rate: Rate = Rate(every=1)) -> None:  # noqa: B008 - a tuple
        from vllm.models.deepseek_v41 import compressor as v41
        from vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache import fused_save_compress_norm

        process.start(rate, Action.REPORT)
        self.shadow: Any = process.SHADOW
        self.cache: Any = object.__new__(v41.CompressorStateCache)
        torch.nn.Module.__init__(self.cache)
        random = torch.Generator().manual_seed(0)
        self.cache.kv_cache = torch.randn(BLOCKS, RING, 1024, generator=random)
        self.raw = torch.randn(TOKENS, 1024, generator=random)
        self.positions = torch.arange(START, START + TOKENS)
        self.slots = torch.full((TOKENS,), -1)
        starts, requests = torch.tensor([0, TOKENS], dtype=torch.int32), torch.zeros(TOKENS, dtype=torch.int32)
        weight = torch.ones(512, dtype=torch.bfloat16)
        latent = torch.zeros(TOKENS, 512, dtype=torch.bfloat16)
        self.metadata = v41.CompressorMetadata(self.slots, starts, requests)

        def save() -> None:
            fused_save_compress_norm(
                self.raw, self.positions, self.cache.kv_cache, self.slots, starts, requests, weight, 1e-6, 2, latent
            )

        self._model = WrappedModel({"ring": self.cache}, lambda metadata, tokens: launched(save, latent), RING)
        self._model.capture(TOKENS, {"ring": self.metadata})
        self.entry = next(iter(self._model._model.concrete_cudagraph_entries.values()))
        if self.shadow:
            self.shadow.schedule.count, self.shadow.schedule.due = 0, 1

    def step(self) -> torch.Tensor:
        self.slots.copy_(2 * RING + self.positions % RING)
        return self._model.replay(TOKENS, {"ring": self.metadata}, TOKENS).clone()


_launches: list[Callable[[], None]] = []


# A kernel is one opaque operation of a graph; which tensors it writes to is for its body to know.
@torch.library.custom_op("shadow_caches::launch", mutates_args=(), schema="(Tensor latent, int launch) -> ()")
def _launch(latent: torch.Tensor, launch: int) -> None:
    _launches[launch]()


@_launch.register_fake
def _(latent: torch.Tensor, launch: int) -> None: ...


def launched(save: Callable[[], None], latent: torch.Tensor) -> torch.Tensor:
    _launches.append(save)
    torch.ops.shadow_caches.launch(latent, len(_launches) - 1)
    return latent * 1.0


@pytest.fixture(name="double")
def _double() -> Iterator[None]:
    pytest.importorskip("vllm.models.deepseek_v41", reason="from 0.30.0 on")
    with wrappers_on_the_double():
        yield
    process.start(Rate(), Action.REPORT)


@pytest.mark.usefixtures("double")
def test_a_ring_is_restored_and_a_right_graph_is_no_mismatch() -> None:
    unwatched, served = Ringed(Rate()), Ringed()
    for _ in range(2):
        assert torch.equal(served.step(), unwatched.step())
        assert torch.equal(served.cache.kv_cache, unwatched.cache.kv_cache)
    results = served.shadow.results
    assert (results.checks, results.mismatches, results.noise, served.shadow.stopped) == (2, 0, 0.0, None)
    assert process.REFUSED is None


@pytest.mark.usefixtures("double")
def test_not_put_back_a_second_run_reads_what_the_first_one_wrote() -> None:
    served = Ringed()
    with mock.patch.object(forward, "ring_rows", return_value=[]):
        served.step()
    assert served.shadow.results.mismatches == 1


@pytest.mark.usefixtures("double")
def test_a_graph_that_leaves_a_ring_wrong_is_a_mismatch_though_its_output_is_right() -> None:
    served = Ringed()
    replay = served.entry.cudagraph.replay

    def forgetful() -> None:
        replay()
        served.cache.kv_cache[2, 3] = 0.0

    served.entry.cudagraph = SimpleNamespace(replay=forgetful)
    served.step()
    results = served.shadow.results
    assert (results.checks, results.mismatches) == (1, 1)
    assert max(results.first_mismatches[0].errors) == 0


@pytest.mark.usefixtures("double")
def test_the_blocks_of_a_ring_are_those_of_its_own_slots() -> None:
    served = Ringed(Rate())
    served.slots.copy_(torch.tensor([-1, 8, 9, 31, -1, -1, 24, 10, 11]))
    (rows,) = layers.ring_rows({"ring": served.cache}, {"ring": served.metadata}, every=True)
    assert (rows.blocks.tolist(), rows.compared) == ([1, 3], True)
    assert layers.ring_rows({"ring": served.cache}, {}, every=False) == []
    with pytest.raises(StepNotCheckable, match="which blocks of ring"):
        layers.ring_rows({"ring": served.cache}, {}, every=True)


class BoolMasks:
    """Triton's interpreter with masks that are numbers where vLLM combines conditions, as a compiler takes them."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        return self._stock.load(pointers, mask.astype(bool), other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        return self._stock.store(pointers, value, mask.astype(bool))


def test_a_ring_of_qwen4_exp_is_put_back_before_a_second_run() -> None:
    """Nine tokens close two groups of four, the first of which has a token in the ring of eight.

    The kernels are vLLM's own, of the path that is not fused.
    """
    qsa: Any = pytest.importorskip("vllm.models.qwen4_exp.nvidia.ops.qsa", reason="from 0.29.0 on")
    from triton.runtime import interpreter
    from vllm.models.qwen4_exp.common.qsa_cache import QSAKeyStateCache

    positions, requests = torch.arange(START, START + TOKENS), torch.zeros(TOKENS, dtype=torch.int32)
    ring: Any = object.__new__(QSAKeyStateCache)
    torch.nn.Module.__init__(ring)
    ring.kv_cache = torch.randn(BLOCKS, RING, 1, 64)
    slots = torch.where(positions > START, 2 * RING + positions % RING, -1)
    groups = torch.where((positions + 1) % 4 == 0, positions // 4, -1)
    table, starts = torch.tensor([[2]], dtype=torch.int32), torch.tensor([0, TOKENS], dtype=torch.int32)
    keys, compressed = torch.randn(TOKENS, 1, 64), torch.zeros(2, 8, 1, 64)
    rows = positions.view(-1, 1, 1).expand(-1, 1, 3)

    def run() -> torch.Tensor:
        masks = mock.patch.object(interpreter, "_interpreter", BoolMasks(interpreter._interpreter))
        with masks, mock.patch.object(torch.Tensor, "is_cuda", True):
            pooled, _ = qsa.qsa_compress_groups_with_ratio(
                keys, rows, ring.kv_cache, table, requests, starts, positions, groups, 4
            )
            qsa.qsa_store_cache_rows(compressed, groups, pooled)
            qsa.qsa_store_cache_rows(ring.kv_cache, slots, keys)
        return compressed.clone()

    before = Snapshot({}, layers.ring_rows({"ring": ring}, {"ring": SimpleNamespace(slot_mapping=slots)}, every=True))
    first, unrestored = run(), run()
    before.restore()
    assert not torch.equal(first, unrestored)
    assert torch.equal(first, run())
