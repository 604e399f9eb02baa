"""The shadow check on vLLM's own speculators for DFlash and DSpark.

Real: the speculators, their manager of graphs, FlashAttention's builder. Stand-ins: those of the scenario for
`draft-non-causal`; graphs are the CPU double's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import one_pass
import pytest
import torch
import verified_drafts
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.spec_decode import speculator as of_drafts
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash
from vllm.v1.worker.utils import AttentionGroup

from vllm_graphfix.log import logger
from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import drafter_v2, process
from vllm_graphfix.shadow.acceptance import Acceptance
from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.double.flash_attention import flash_attention_stand_ins, metadata_builder
from vllm_graphfix.verify.double.graph import CPUStream, cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios import draft_non_causal as scenario
from vllm_graphfix.verify.double.triton_kernels import cpu_triton_kernels
from vllm_graphfix.verify.double.unpinned import unpinned

try:
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
except ImportError:  # before 0.25.0
    DSparkSpeculator = None
SIZES = [2, 3, 4, 6, 8, 9, 12]  # of DSpark, too, whose requests have two tokens in some releases
KINDS = {"DFlash": dflash.DFlashSpeculator} | ({"DSpark": DSparkSpeculator} if DSparkSpeculator else {})


class Model(scenario.DraftModelStandIn):
    """The scenario's draft on FlashAttention's metadata, which also stores context and has DSpark's head."""

    draft_id_to_target_id = None

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, **_: Any) -> Any:
        query = self._embedding[input_ids.long()] + positions[:, None] / scenario.MAX_LENGTH
        metadata = get_forward_context().attn_metadata[scenario.LAYER]
        row = torch.arange(len(query)) // scenario.WIDTH
        causal = metadata.seq_lens[row] - (scenario.WIDTH - 1) + torch.arange(len(query)) % scenario.WIDTH
        return query + scenario._attend(query, self._cache, metadata.block_table[row], causal)

    def precompute_and_store_context_kv(  # type: ignore[override]
        self, states: torch.Tensor, positions: torch.Tensor, *slots: Any, **named: Any
    ) -> None:
        """Write the states to the slots of their tokens, which a negative one has not."""
        for of_group in (*slots, *named.values()):
            for each in of_group if isinstance(of_group, (list, tuple)) else [of_group]:
                if each is None:  # of a dummy batch
                    continue
                slot = each.reshape(-1)[: len(states)].clamp(min=0)
                self._cache.index_copy_(0, slot, states.double() + positions[:, None] / scenario.MAX_LENGTH)

    def combine_hidden_states(self, states: torch.Tensor) -> torch.Tensor:
        return states

    compute_draft_logits = scenario.DraftModelStandIn.compute_logits

    def map_draft_to_target(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens

    def markov_embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._embedding[tokens.long()]

    def markov_bias(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded @ self._embedding.T


class BlockTables(scenario.BlockTablesStandIn):
    cp_rank, cp_interleave = 0, 1


def _speculator(kind: str, mode: CUDAGraphMode) -> Any:
    """Return vLLM's speculator in the state that start-up leaves, its graphs captured."""
    config = scenario._config(mode, causal=True)
    config.compilation_config.cudagraph_capture_sizes, config.use_cumem_cudagraph_pool = SIZES, False
    draft = config.speculative_config.draft_model_config
    draft.hf_config.sample_from_anchor, draft.use_mla = False, False
    vars(config.speculative_config).update(method=kind.lower(), enable_adaptive_verification=False)
    with mock.patch.object(of_drafts, "_target_feeds_hc_residual", return_value=False, create=True):
        speculator: Any = KINDS[kind](config, scenario.DEVICE)
    speculator.model, speculator.draft_attn_layer_names = Model(), {scenario.LAYER}
    size = {"block_size": scenario.PAGE_SIZE, "num_kv_heads": 1, "head_size": scenario.HIDDEN}
    spec = FullAttentionSpec(**size, dtype=torch.float32)
    group = AttentionGroup(flash_attn.FlashAttentionBackend, [scenario.LAYER], spec, 0)
    group.metadata_builders = [metadata_builder(mode, scenario.REQUESTS, SIZES)]
    support = SimpleNamespace(min_cg_support=AttentionCGSupport.ALWAYS, min_cg_attn_backend=None)
    parts = {
        "model_state": None,
        "kv_cache_config": KVCacheConfig(
            num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([scenario.LAYER], spec)]
        ),
        "block_tables": BlockTables(),
        "target_input_buffers": speculator.input_buffers,
        "target_attn_groups": [],
    }
    with mock.patch.object(of_drafts, "init_attn_backend", return_value=([[group]], support, [scenario.PAGE_SIZE])):
        speculator.set_attn(**supported_kwargs(speculator.set_attn, parts))
    speculator.init_cudagraph_manager(mode)
    if mode != CUDAGraphMode.NONE:
        speculator.capture(**supported_kwargs(speculator.capture, {"attn_states": {}}))
    return speculator


class Served:
    """A speculator that has captured; *checked*: its replays are."""

    def __init__(self, kind: str, *, checked: bool = True, action: Action = Action.REPORT, full: bool = True) -> None:
        process.start(Rate(every=1) if checked else Rate(), action)
        mode = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        self.speculator = _speculator(kind, mode)
        self.random = torch.Generator().manual_seed(2)
        self.shadow: Any = process.SHADOW

    def step(self, lengths: tuple[int, ...]) -> list[int]:
        process.SHADOW = self.shadow
        tokens: list[int] = scenario._propose(self.speculator, lengths, self.random).flatten().tolist()
        return tokens

    def move_embedding(self) -> None:
        """Put other weights elsewhere: the graph reads the old ones."""
        self.speculator.model._embedding = -self.speculator.model._embedding


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in (cpu_cuda_graphs(), unpinned(), flash_attention_stand_ins(3), torch.inference_mode()):
            stack.enter_context(each)
        stack.enter_context(cpu_triton_kernels(dflash))
        stack.enter_context(mock.patch.object(cudagraph_utils, "current_stream", CPUStream, create=True))
        with_fields = mock.patch.object(
            dflash, "replace", lambda of, **new: SimpleNamespace(**vars(of) | new), create=True
        )
        stack.enter_context(with_fields)
        yield
    process.start(Rate(), Action.REPORT)


@pytest.mark.parametrize("kind", KINDS)
def test_right_graphs_draft_the_same_with_and_without_the_check(kind: str) -> None:
    unwatched, served = Served(kind, checked=False), Served(kind)
    eager = Served(kind, checked=False, full=False)
    served.shadow.memory.measuring = False
    for lengths in scenario.LENGTHS:
        tokens = served.step(lengths)
        assert tokens == unwatched.step(lengths) == eager.step(lengths)
        assert torch.equal(served.speculator.model._cache, unwatched.speculator.model._cache)
    results = served.shadow.results
    assert (results.checks, results.skipped, results.mismatches, results.noise) == (len(scenario.LENGTHS), 0, 0, 0.0)
    assert (served.shadow.stopped, process.REFUSED) == (None, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_weight_is_a_mismatch_and_quarantine_drafts_with_the_new_one(kind: str) -> None:
    right, served = Served(kind, checked=False, full=False), Served(kind, action=Action.QUARANTINE)
    right.move_embedding()
    served.move_embedding()
    alike = [served.step((5, 42)) == right.step((5, 42)) for _ in range(4)]
    assert alike == [False, False, True, True]
    first = served.shadow.results.first_mismatches[0]
    assert first.graph.name.startswith("draft decode, BatchExecutionDescriptor(")
    assert first.rows == 2
    assert first.graph.backends[0] in ("FlashAttentionMetadata", "FLASH_ATTN"), "where the graph builds: the backend"
    assert (len(served.shadow.quarantined), served.shadow.stopped) == (1, None)


@pytest.mark.parametrize("kind", KINDS)
def test_context_that_a_graph_stores_wrongly_is_a_mismatch(kind: str) -> None:
    served = Served(kind)
    if not drafter_v2._stores_context(served.speculator):
        pytest.skip("its graphs store no context")
    stock = Model.precompute_and_store_context_kv
    with mock.patch.object(
        Model,
        "precompute_and_store_context_kv",
        lambda self, states, positions, *slots: stock(self, states + 50 * self._embedding[0], positions, *slots),
    ):
        served.step((5, 42))
    assert (served.shadow.results.checks, served.shadow.results.mismatches) == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_dummy_batches_are_not_checked(kind: str) -> None:
    served = Served(kind)
    with mock.patch.object(
        served.speculator,
        "propose",
        lambda *args, **kwargs: type(served.speculator).propose(served.speculator, *args, **kwargs, dummy_run=True),
    ):
        served.step((5, 42))
    assert (served.shadow.results.checks, served.shadow.stopped) == (0, None)


def test_a_speculator_of_another_class_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(logger, "info", lambda text, *args: messages.append(text % args))
    monkeypatch.setitem(KINDS, "DFlash", type("DFlash2Speculator", (KINDS["DFlash"],), {}))
    served = Served("DFlash")
    served.step((5, 42))
    assert (served.shadow.results.checks, served.shadow.stopped) == (0, None)
    assert messages == [
        "graphfix: the shadow check leaves the graphs of drafts alone: those of DFlash2Speculator were not examined"
    ]


class Warnings(list[str]):
    """Warnings of the plugin."""

    @property
    def of_acceptance(self) -> list[str]:
        return [each for each in self if "accepts far fewer drafts" in each or "accepted drafts are not" in each]


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> Warnings:
    logged = Warnings()
    monkeypatch.setattr(logger, "warning", lambda text, *args, **_: logged.append(text % args))
    return logged


def _decode(kind: str, target: verified_drafts.Target, *, moved: bool = False, **served: Any) -> tuple[Served, Any]:
    """Return a speculator whose drafts *target* has verified, and its count; *moved*: its graphs are wrong."""
    watched, eager = Served(kind, **served), Served(kind, checked=False, full=False)
    if moved:
        other = torch.randn(scenario.VOCABULARY, scenario.HIDDEN, generator=torch.Generator().manual_seed(4))
        watched.speculator.model._embedding = eager.speculator.model._embedding = other
    process.SHADOW = watched.shadow
    one_pass.decode(watched.speculator, eager.speculator, target)
    return watched, next(iter(watched.shadow.acceptance.by_graph.values()), None)


@pytest.mark.parametrize("kind", KINDS)
def test_all_drafts_of_right_graphs_are_accepted_with_and_without_them(kind: str, warnings: Warnings) -> None:
    served, counts = _decode(kind, verified_drafts.like_eager)
    drafts = one_pass.VERIFIED * scenario.DRAFT_TOKENS
    assert (counts.requests, counts.drafts, counts.fewer, counts.more) == (one_pass.VERIFIED, drafts, 0, 0)
    assert (counts.accepted, counts.accepted_eagerly) == (drafts, drafts)
    assert (warnings, process.counts()["shadow"]["drafts-accepted"]) == ([], drafts)
    assert served.shadow.results.mismatches == 0


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_that_only_the_graph_gets_wrong_are_a_collapse(
    kind: str, warnings: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pair of each step counts: these models may draft alike for all requests, as for copies of one.
    monkeypatch.setattr(verified_drafts, "STEPS", 31)
    _, counts = _decode(kind, verified_drafts.like_eager, moved=True)
    assert counts.collapsed
    assert counts.fewer > 28
    assert len(warnings.of_acceptance) == 1
    assert process.counts()["shadow"]["acceptance-collapses"] == 1
    assert f"of {counts.drafts} drafts accepted" in process.wrong()[0].accepted


@pytest.mark.parametrize("target", [verified_drafts.like_neither, verified_drafts.like_served])
@pytest.mark.parametrize("kind", KINDS)
def test_other_drafts_that_are_accepted_as_often_are_no_collapse(
    kind: str, target: verified_drafts.Target, warnings: Warnings
) -> None:
    served, counts = _decode(kind, target, moved=True)
    assert served.shadow.results.mismatches == verified_drafts.STEPS
    assert (counts.requests, counts.fewer) == (one_pass.VERIFIED, 0)
    assert (counts.collapsed, warnings.of_acceptance) == (False, [])


def test_drafts_of_a_graph_in_quarantine_are_not_counted(warnings: Warnings) -> None:
    served, counts = _decode("DFlash", verified_drafts.like_eager, moved=True, action=Action.QUARANTINE)
    assert (len(served.shadow.quarantined), served.shadow.results.checks, warnings.of_acceptance) == (1, 2, [])
    assert counts.requests == scenario.REQUESTS


@pytest.mark.parametrize("part", ["_add", "_save_sampled", "_count", "req_ids"])
def test_an_error_of_the_count_ends_the_count_alone(
    part: str, warnings: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    unwatched, eager = Served("DFlash", checked=False), Served("DFlash", checked=False, full=False)
    served = Served("DFlash")
    names = one_pass.NAMES[:2] if part == "req_ids" else one_pass.NAMES
    if part != "req_ids":
        monkeypatch.setattr(Acceptance, part, mock.Mock(side_effect=RuntimeError("planted")))
    target = verified_drafts.like_eager
    expected = one_pass.decode(unwatched.speculator, eager.speculator, target)
    process.SHADOW = served.shadow
    drafts = one_pass.decode(served.speculator, eager.speculator, target, names)
    assert torch.equal(drafts, expected)
    assert (served.shadow.results.checks, served.shadow.stopped) == (verified_drafts.STEPS, None)
    assert (len(warnings), len(warnings.of_acceptance)) == (1, 1)
