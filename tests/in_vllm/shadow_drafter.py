"""The shadow check on vLLM's own speculator for Eagle, its managers and forward context; graphs are the CPU double's.

Stand-ins: the draft model with its attention, metadata builder and block tables; the configuration; the target model, whose part is what
`propose` is given. Triton's kernels are vLLM's own, run on the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any, Literal, get_args
from unittest import mock

import numpy as np
import pytest
import torch
from vllm.config import CompilationConfig, CUDAGraphMode, speculative
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.utils import AttentionGroup

import vllm_graphfix
from vllm_graphfix.shadow import drafter_v2, process
from vllm_graphfix.shadow.rate import Action, Rate
from vllm_graphfix.verify.double.graph import CPUStream, cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios.draft_idx_mapping import _kernels

LAYER, BLOCK, LENGTH = "draft.layers.0", 4, 64
REQUESTS, DRAFTS, WIDTH, VOCABULARY = 8, 3, 8, 16
TOKENS = REQUESTS * (1 + DRAFTS)
SIZES = [4, 8, 16, 24, 32]
BATCHES = ([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [5, 0, 3], [7, 6, 5, 4], [2])
"""Requests of each step: with padded rows and without."""


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    base = sys.modules.get("vllm.v1.worker.gpu.spec_decode.speculator")
    with contextlib.ExitStack() as stack:
        if hasattr(base, "_target_feeds_hc_residual"):
            stack.enter_context(mock.patch.object(base, "_target_feeds_hc_residual", return_value=False))
        if hasattr(cudagraph_utils, "current_stream"):
            stack.enter_context(mock.patch.object(cudagraph_utils, "current_stream", CPUStream))
        for context in (cpu_cuda_graphs(), _kernels(), torch.inference_mode()):
            stack.enter_context(context)
        yield
    process.start(Rate(), Action.REPORT)


@dataclasses.dataclass
class MetadataStandIn:
    """Attention metadata: persistent buffers, and a number that a graph keeps from its capture."""

    seq_lens: torch.Tensor
    scale: torch.Tensor | None
    """None: the first forward pass makes it, as FlashMLA does its plan."""
    factor: float
    lazy: Any = None


MetadataStandIn.__module__ = "vllm.stand_in"


class BuilderStandIn:
    supports_draft_decode_metadata_update = True
    supports_update_block_table = False

    def __init__(self, *, fused: bool, planned: bool) -> None:
        self.supports_draft_decode_metadata_update, self.planned = fused and not planned, planned
        self.scale, self.factor = torch.ones(1), 1.0

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> MetadataStandIn:
        found = MetadataStandIn(common_attn_metadata.seq_lens, self.scale, self.factor)
        self.update_draft_decode_metadata(found)
        return dataclasses.replace(found, scale=None) if self.planned else found

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> MetadataStandIn:
        return self.build(0, common_attn_metadata)

    def update_draft_decode_metadata(self, metadata: MetadataStandIn) -> None:
        self.scale.copy_(self.scale_of(metadata))

    @staticmethod
    def scale_of(metadata: MetadataStandIn) -> torch.Tensor:
        return 1 + metadata.seq_lens[:1] / 50


class LayerStandIn(Attention):  # type: ignore[misc]
    """Writes a token to its slot, and reads it and the one before."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.kv_cache = [torch.zeros(REQUESTS * LENGTH // BLOCK, BLOCK, WIDTH)]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        context = get_forward_context()
        slots, flat = context.slot_mapping[LAYER].clamp(min=0), self.kv_cache[0].view(-1, WIDTH)
        metadata = context.attn_metadata[LAYER]
        metadata.lazy = metadata.lazy or "seen"
        if metadata.scale is None:
            metadata.scale = BuilderStandIn.scale_of(metadata)
        flat.index_copy_(0, slots, hidden)
        before = flat.index_select(0, (slots - 1).clamp(min=0))
        mixed: torch.Tensor = flat.index_select(0, slots) * metadata.scale * metadata.factor + before / 2
        return mixed


class HeadStandIn:
    """Stands in for an Eagle head: random weights."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        self.embedding = torch.randn(VOCABULARY, WIDTH, generator=random)
        self.mix = torch.randn(WIDTH, WIDTH, generator=random)
        self.layer = LayerStandIn()
        self.calls, self.breaks_at, self.noise, self.random = 0, 0, 0.0, Random(0)  # noqa: S311

    def __call__(self, input_ids: Any, hidden_states: Any, **_: Any) -> Any:
        self.calls += 1
        if self.calls == self.breaks_at:
            raise RuntimeError("planted")
        hidden = self.embedding[input_ids.long()] + hidden_states @ self.mix
        if self.noise:
            hidden = hidden * (1 + self.noise * self.random.random())
        hidden = torch.tanh(hidden + self.layer(hidden))
        return hidden, hidden

    def compute_logits(self, hidden: Any) -> Any:
        return hidden @ self.embedding.T


class TablesStandIn:
    """Block tables: a request's tokens are in a row of the cache of its own; slot 0 is nobody's."""

    cp_size, cp_rank, cp_interleave, num_kv_cache_groups = 1, 0, 1, 1

    def __init__(self) -> None:
        self.input_block_tables = [torch.zeros(REQUESTS, LENGTH // BLOCK, dtype=torch.int32)]
        self.slot_mappings = torch.zeros(1, TOKENS, dtype=torch.int64)

    def get_dummy_block_tables(self, requests: int) -> Any:
        return tuple(table[:requests] for table in self.input_block_tables)

    def get_dummy_slot_mappings(self, tokens: int) -> Any:
        self.slot_mappings.fill_(-1)
        return self.slot_mappings[:, :tokens]

    def gather_block_tables(self, *_: Any, **__: Any) -> None: ...

    def compute_slot_mappings(self, requests: Any, starts: Any, positions: Any, tokens: int) -> Any:
        """Of a decode step: one token for a request, none for a padded one."""
        rows = len(requests)
        slots = requests.long() * LENGTH + positions[:rows]
        self.slot_mappings.fill_(-1)
        self.slot_mappings[0, :rows] = torch.where(starts[1 : rows + 1] > starts[:rows], slots, -1)
        return self.slot_mappings[:, :tokens]


class States(dict[Any, Any]):
    """What the capture of the target model left (0.21.0 - 0.25.1)."""

    def __init__(self, served: Served) -> None:
        self.served = served

    def __missing__(self, desc: Any) -> Any:
        def made() -> Any:
            own = self.served
            return cudagraph_utils.prepare_inputs_to_capture(
                desc.num_reqs, desc.num_tokens, own.state, own.buffers, own.tables, own.groups, own.caches_config
            )

        pair = getattr(cudagraph_utils, "AttentionStatePair", None)
        return pair(made(), made()) if pair else made()


def sampling(*, sampled: bool) -> str:
    """Called gumbel in 0.21, and told by the method of rejection before."""
    return get_args(getattr(speculative, "DraftSampleMethod", Literal["strict", "probabilistic"]))[int(sampled)]  # type: ignore[no-any-return]


class Served:
    """Eagle's speculator as the model runner has it after start-up."""

    def __init__(
        self,
        rate: Rate = Rate(every=1),  # noqa: B008 - a tuple
        action: Action = Action.REPORT,
        *,
        sampled: bool = False,
        fused: bool = True,
        planned: bool = False,
        mode: CUDAGraphMode = CUDAGraphMode.FULL_DECODE_ONLY,
        **config: Any,
    ) -> None:
        process.start(rate, action)
        self.shadow: Any = process.SHADOW
        self.model, self.tables, self.builder = (
            HeadStandIn(),
            TablesStandIn(),
            BuilderStandIn(fused=fused, planned=planned),
        )
        self.buffers = InputBuffers(max_num_reqs=REQUESTS, max_num_tokens=TOKENS, device=torch.device("cpu"))
        spec = SimpleNamespace(block_size=BLOCK)
        self.caches_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=[LAYER], kv_cache_spec=spec)])
        group = AttentionGroup(SimpleNamespace(get_name=lambda: "STAND_IN"), [LAYER], spec, 0)
        group.metadata_builders = [self.builder]
        self.groups = [[group]]
        self.state: Any = object.__new__(DefaultModelState)
        self.config = _configuration(mode, sampling(sampled=sampled), self.model.layer)
        vars(self.config).update(config)
        vars(self.state).update(
            max_model_len=LENGTH,
            model_config=self.config.model_config,
            supports_mm_inputs=False,
            uses_mrope=False,
            rope_state=None,
            encoder_cache=None,
        )
        self.speculator: Any = EagleSpeculator(self.config, torch.device("cpu"))
        vars(self.speculator).update(
            model=self.model,
            model_state=self.state,
            kv_cache_config=self.caches_config,
            attn_groups=self.groups,
            draft_attn_layer_names={LAYER},
            block_tables=self.tables,
            target_input_buffers=self.buffers,
            target_attn_groups=self.groups,
            supports_mm_inputs=False,
        )
        for configure in ("_configure_fused_multi_step_decode", "_configure_decode_metadata_update"):
            getattr(self.speculator, configure, lambda: None)()
        if hasattr(self.speculator, "init_cudagraph_manager"):
            self.speculator.init_cudagraph_manager(mode)
        if mode != CUDAGraphMode.NONE:
            self._capture()
        self.model.calls, self.steps, self.given = 0, 0, torch.Generator().manual_seed(0)
        self.model.layer.kv_cache[0].zero_()
        getattr(self.speculator, "draft_token_confidence_probs", torch.empty(0)).zero_()  # of an estimate that is off

    def _capture(self) -> None:
        if hasattr(self.speculator, "capture_model"):
            self.speculator.capture_model()
        elif inspect.signature(self.speculator.capture).parameters:
            self.speculator.capture(States(self))
        else:
            self.speculator.capture()

    def step(self, requests: list[int], *, dummy_run: bool = False) -> torch.Tensor:
        """Drafts for *requests*, after a step of the target model that ran in a full graph, of 4 tokens each."""
        self.steps += 1
        rows, width = len(requests), 1 + DRAFTS
        tokens = next(size for size in SIZES if size >= rows * width)
        padded, computed = tokens // width, 3 + self.steps
        batch = torch.tensor(requests, dtype=torch.int32)
        positions = torch.zeros(tokens, dtype=torch.int64)
        positions[: rows * width] = computed + torch.arange(width).repeat(rows)
        buffers, slots = self.buffers, self.tables.slot_mappings
        buffers.query_start_loc[:] = (torch.arange(REQUESTS + 1).clamp(max=rows) * width).int()
        buffers.seq_lens.zero_()[:rows] = computed + width
        slots.fill_(-1)[0, : rows * width] = batch.repeat_interleave(width) * LENGTH + positions[: rows * width]
        given = SimpleNamespace(
            num_reqs=rows,
            num_reqs_after_padding=padded,
            num_tokens=rows * width,
            num_tokens_after_padding=tokens,
            num_scheduled_tokens=np.full(rows, width),
            has_prefill=False,
            decode_graph_eligible=True,
            idx_mapping=batch,
            input_ids=torch.randint(VOCABULARY, (tokens,), generator=self.given, dtype=torch.int32),
            positions=positions,
            query_start_loc=buffers.query_start_loc[: padded + 1],
            seq_lens=buffers.seq_lens[:padded],
            seq_lens_cpu_upper_bound=torch.full((rows,), computed + width),
        )
        metadata = {LAYER: self.builder.build(0, SimpleNamespace(seq_lens=given.seq_lens))}
        drafted: torch.Tensor = self.speculator.propose(
            given,
            metadata,
            {LAYER: slots[0, :tokens]},
            torch.randn(tokens, WIDTH, generator=self.given),
            None,
            num_sampled=torch.ones(rows, dtype=torch.int32),
            num_rejected=torch.zeros(rows, dtype=torch.int32),
            last_sampled=torch.randint(VOCABULARY, (REQUESTS,), generator=self.given),
            next_prefill_tokens=torch.zeros(REQUESTS, dtype=torch.int32),
            temperature=torch.full((REQUESTS,), 0.7),
            seeds=torch.arange(REQUESTS),
            dummy_run=dummy_run,
        )
        return drafted.clone()

    def held(self) -> dict[str, torch.Tensor]:
        """All that the speculator keeps, and what its layers have, less the slot of padding."""
        found = {
            f"{owner}.{name}": value.clone()
            for owner, thing in (("speculator", self.speculator), ("buffers", self.speculator.input_buffers))
            for name, value in vars(thing).items()
            if isinstance(value, torch.Tensor)
        }
        cache = self.model.layer.kv_cache[0].view(-1, WIDTH)[1:]
        return found | {
            "cache": cache.clone(),
            "slots": self.tables.slot_mappings.clone(),
            "scale": self.builder.scale.clone(),
        }


def _configuration(mode: CUDAGraphMode, method: str, layer: Any) -> Any:
    compilation = CompilationConfig(cudagraph_mode=mode, cudagraph_capture_sizes=list(SIZES))
    compilation.max_cudagraph_capture_size = max(SIZES)
    compilation.static_forward_context = {LAYER: layer}
    draft = SimpleNamespace(
        get_hidden_size=lambda: WIDTH, get_vocab_size=lambda: VOCABULARY, hf_config=None, is_multimodal_model=False
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=LENGTH, dtype=torch.float32, head_dtype=torch.float32, use_fp64_gumbel=False
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS, max_num_batched_tokens=TOKENS),
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            data_parallel_rank=0,
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            is_moe_model=False,
            use_sequence_parallel_moe=False,
        ),
        compilation_config=compilation,
        cache_config=SimpleNamespace(),
        num_speculative_tokens=DRAFTS,
        use_cumem_cudagraph_pool=False,
        speculative_config=SimpleNamespace(
            method="eagle",
            num_speculative_tokens=DRAFTS,
            rejection_sample_method=method,
            draft_sample_method=method,
            draft_model_config=draft,
            use_local_argmax_reduction=False,
            enable_adaptive_verification=False,
            uses_dynamic_speculative_decoding=lambda: False,
        ),
        kernel_config=SimpleNamespace(ir_op_priority=SimpleNamespace(set_priority=contextlib.nullcontext)),
    )


def affected(fix: str) -> bool:
    """Whether this release has the defect, and nothing mends it here."""
    from vllm_graphfix.fixes import BY_NAME
    from vllm_graphfix.source import open_source

    found = BY_NAME[fix].diagnose(open_source()).verdict.value == "affected"
    return found and vllm_graphfix.states()[fix].state.value != "active"


def refused() -> str:
    return process.REFUSED or ""


def wrong_graphs(served: Served) -> set[str]:
    return {each.graph.name.partition(",")[0] for each in served.shadow.results.kept}


def differing(one: Served, other: Served) -> list[str]:
    mine, stock = one.held(), other.held()
    assert mine.keys() == stock.keys()
    return [name for name in mine if not torch.equal(mine[name], stock[name])]


HAS_PREFILL = hasattr(EagleSpeculator, "init_cudagraph_manager")
GRAPHS = {"draft prefill", "draft decode"} if HAS_PREFILL else {"draft decode"}
BY_STEP = any(hasattr(EagleSpeculator, name) for name in ("multi_step_decode", "_multi_step_decode"))
PADDED = GRAPHS if BY_STEP else {"draft decode"}
"""Those that batches with padded rows run in: before 0.21 a draft prefill has a graph only for as many requests as were captured."""
FUSED = pytest.mark.parametrize("fused", [True, False], ids=["fused", "step-by-step"])


@FUSED
def test_right_graphs_are_equal_to_the_last_bit_and_all_is_as_without_the_check(fused: bool) -> None:
    unwatched, served = Served(Rate(), fused=fused), Served(fused=fused)
    for requests in BATCHES:
        assert torch.equal(served.step(requests), unwatched.step(requests))
        assert differing(served, unwatched) == []
    results = served.shadow.results
    assert (results.mismatches, results.noise, served.shadow.stopped, refused()) == (0, 0.0, None, "")
    assert results.checks == served.shadow.schedule.count >= len(BATCHES)


@pytest.mark.skipif(hasattr(gumbel, "murmur3_hash32"), reason="the double runs no such kernel")
@FUSED
def test_sampled_drafts_are_drawn_again_and_padded_rows_that_write_a_requests_logits_are_caught(fused: bool) -> None:
    unwatched, served = Served(Rate(), sampled=True, fused=fused), Served(sampled=True, fused=fused)
    for requests in BATCHES:
        assert torch.equal(served.step(requests), unwatched.step(requests))
        assert differing(served, unwatched) == []
    assert (served.shadow.results.noise, served.shadow.stopped) == (0.0, None)
    assert wrong_graphs(served) == (PADDED if affected("draft-idx-mapping") else set())


@FUSED
def test_graphs_that_keep_what_has_changed_are_mismatches_and_what_they_drafted_is_served(fused: bool) -> None:
    unwatched, served = Served(Rate(), fused=fused), Served(fused=fused)
    unwatched.builder.factor = served.builder.factor = 2.0
    requests = [5, 0, 3, 1]
    assert torch.equal(served.step(requests), unwatched.step(requests))
    assert [name for name in differing(served, unwatched) if name != "cache"] == []
    assert wrong_graphs(served) == GRAPHS
    served.step([2, 6, 7])
    for each in served.shadow.results.kept:
        assert len(each.errors) == each.rows <= each.graph.padded_rows == 4
        assert min(each.errors) > 0
        assert len(each.graph.backends) == 1
    assert {each.rows for each in served.shadow.results.kept} == {3, 4}


def test_a_plan_that_the_warm_up_has_made_is_caught_in_decodes() -> None:
    """`capture-state`, and from 0.23 on no more. Prefills take the target model's states, which are not vLLM's here."""
    unwatched, served = Served(Rate(), planned=True), Served(planned=True)
    for requests in ([0, 1, 2, 3], [4, 5, 6, 7]):
        assert torch.equal(served.step(requests), unwatched.step(requests))
    assert ("draft decode" in wrong_graphs(served)) == affected("capture-state")
    if vllm_graphfix.states()["capture-state"].state.value == "not-needed":
        assert not wrong_graphs(served)
    assert served.shadow.stopped is None


@FUSED
def test_in_quarantine_drafts_are_those_of_a_speculator_without_graphs(fused: bool) -> None:
    right, served = Served(Rate(), mode=CUDAGraphMode.NONE, fused=fused), Served(action=Action.QUARANTINE, fused=fused)
    right.builder.factor = served.builder.factor = 2.0
    for requests in ([0, 1], [2, 3]):
        served.step(requests), right.step(requests)
    assert len(served.shadow.quarantined) == len(GRAPHS)
    replayed = served.shadow.results.checks
    for requests in ([4, 5], [6, 7]):
        assert torch.equal(served.step(requests), right.step(requests))
    assert served.shadow.results.checks == replayed


def test_dummy_batches_and_other_callers_are_not_checked() -> None:
    served = Served()
    served.step([0, 1], dummy_run=True)
    for name in ("prefill_cudagraph_manager", "decode_cudagraph_manager", "cudagraph_manager"):
        if (manager := getattr(served.speculator, name, None)) is not None:
            manager.run_fullgraph(next(iter(manager.graphs)))
    assert (served.shadow.results.checks, served.shadow.stopped) == (0, None)
    served.step([0, 1])
    assert served.shadow.results.checks > 0


def test_drafts_count_for_a_budget_and_leave_the_clock_to_the_target_model() -> None:
    served = Served(Rate(share=0.001))
    with mock.patch("vllm_graphfix.shadow.schedule.perf_counter", side_effect=AssertionError):
        served.step([0, 1])
    assert served.shadow.schedule.count >= len(GRAPHS)
    assert served.shadow.schedule.due > served.shadow.schedule.count
    assert served.shadow.stopped is None


def test_off_there_is_no_wrapper_at_all_and_no_reason_to_ask() -> None:
    served = Served(Rate())
    assert not [
        name for name, each in vars(served.speculator).items() if "run_fullgraph" in getattr(each, "__dict__", ())
    ]


def test_an_engine_whose_steps_cannot_run_twice_is_refused_and_drafts() -> None:
    unwatched = Served(Rate())
    served = Served(kv_transfer_config=SimpleNamespace())
    assert torch.equal(served.step([0, 1, 2]), unwatched.step([0, 1, 2]))
    assert "KV connector" in refused()
    assert served.shadow.results.checks == 0


def test_a_cache_of_unknown_kind_makes_the_check_incompatible() -> None:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class Compressor(AttentionLayerBase):  # type: ignore[misc]
        get_attn_backend = get_kv_cache_spec = None

    served = Served()
    served.config.compilation_config.static_forward_context["draft.layers.1"] = Compressor()
    served.step([0, 1])
    assert not refused()  # it is none of the drafter's
    served.speculator.draft_attn_layer_names.add("draft.layers.1")
    checks = served.shadow.results.checks
    served.step([0, 1])
    assert "Compressor" in refused()
    assert (served.shadow.results.checks, served.shadow.stopped) == (checks, None)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_failing_eager_run_turns_the_check_off_and_drafting_goes_on(at: int) -> None:
    unwatched, served = Served(Rate()), Served()
    if not HAS_PREFILL:
        at += 1  # each step has an eager prefill
    served.model.breaks_at = at
    for requests in BATCHES[:2]:
        assert torch.equal(served.step(requests), unwatched.step(requests))
        assert differing(served, unwatched) == []
    assert served.shadow.stopped == "RuntimeError: planted"


def test_noise_of_eager_runs_is_no_mismatch() -> None:
    served = Served()
    served.model.noise = 1e-6
    for requests in BATCHES * 2:
        served.step(requests)
    assert served.shadow.results.mismatches == 0
    assert served.shadow.results.noise > 0


def test_whatever_fails_in_finding_out_what_is_replayed_drafting_goes_on() -> None:
    for name in ("_calling", "_step", "_buffers", "_without_graph"):
        unwatched, served = Served(Rate()), Served()
        with mock.patch.object(drafter_v2, name, side_effect=ValueError("planted")):
            assert torch.equal(served.step([0, 1, 2]), unwatched.step([0, 1, 2])), name
        assert "planted" in (served.shadow.stopped or ""), name


@pytest.mark.parametrize("attribute", ["draft_watermarker", "acceptance_estimator"])
def test_drafters_with_a_history_of_their_own_are_left_alone(attribute: str) -> None:
    served = Served()
    setattr(served.speculator, attribute, object())
    managers = {
        name: each for name, each in vars(served.speculator).items() if name.endswith("cudagraph_manager") and each
    }
    for each in managers.values():
        del each.run_fullgraph
    (shape,) = {shape for shape, known in drafter_v2.SHAPES.items() if known.graphs[0].manager in managers} & {
        drafter_v2.diagnose(_source()).shape
    }
    drafter_v2._watch(served.speculator, drafter_v2.SHAPES[shape].graphs, served.shadow)
    assert not [name for name, each in managers.items() if "run_fullgraph" in vars(each)]
    assert not refused()


def _source() -> Any:
    from vllm_graphfix.source import open_source

    return open_source()


def test_the_record_says_what_is_wrapped() -> None:
    wrapped: Any = vllm_graphfix._this_process().shadow
    assert wrapped.states()["shadow-v2-drafter"].state.value == "active"
