"""vLLM's own speculator for Eagle as its model runner has it after start-up.

Stand-ins: the draft model with its attention, metadata builder and block tables; the configuration; the target model,
whose part is what `propose` is given. Triton's kernels are vLLM's own, run on the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from random import Random
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np
import torch
from verified_drafts import Verified
from vllm.config import CompilationConfig, CUDAGraphMode, speculative
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.utils import AttentionGroup

from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import process

LAYER, BLOCK, LENGTH = "draft.layers.0", 4, 64
REQUESTS, DRAFTS, WIDTH, VOCABULARY = 8, 3, 8, 16
TOKENS = REQUESTS * (1 + DRAFTS)
SIZES = [4, 8, 16, 24, 32]


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
        actual = MetadataStandIn(common_attn_metadata.seq_lens, self.scale, self.factor)
        self.update_draft_decode_metadata(actual)
        return dataclasses.replace(actual, scale=None) if self.planned else actual

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> MetadataStandIn:
        return self.build(0, common_attn_metadata)

    def update_draft_decode_metadata(self, metadata: MetadataStandIn) -> None:
        self.scale.copy_(self.scale_of(metadata))

    @staticmethod
    def scale_of(metadata: MetadataStandIn) -> torch.Tensor:
        return 1 + metadata.seq_lens[:1] / 50


class LayerStandIn(Attention):  # type: ignore[misc]
    """Writes a token to its slot, and reads it and the one before."""

    attn_backend = MLACommonBackend

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
        """The slot mappings of a decode step: one token for a request, none for a padded one."""
        rows = len(requests)
        slots = requests.long() * LENGTH + positions[:rows]
        self.slot_mappings.fill_(-1)
        self.slot_mappings[0, :rows] = torch.where(starts[1 : rows + 1] > starts[:rows], slots, -1)
        return self.slot_mappings[:, :tokens]


class States(dict[Any, Any]):
    """The data that the capture of the target model left behind (0.21.0 - 0.25.1)."""

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
        self.model.calls, self.steps, self.generator = 0, 0, torch.Generator().manual_seed(0)
        self.model.layer.kv_cache[0].zero_()
        getattr(self.speculator, "draft_token_confidence_probs", torch.empty(0)).zero_()  # of an estimate that is off

    def _capture(self) -> None:
        if hasattr(self.speculator, "capture_model"):
            self.speculator.capture_model()
        elif inspect.signature(self.speculator.capture).parameters:
            self.speculator.capture(States(self))
        else:
            self.speculator.capture()

    def step(self, requests: list[int], *, dummy_run: bool = False, verified: Verified | None = None) -> torch.Tensor:
        """Drafts for *requests*, after a step of the target model that ran in a full graph, of 4 tokens each.

        Without *verified* the target has sampled a token of each.
        """
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
        input_batch = SimpleNamespace(
            req_ids=[str(request) for request in requests],
            num_reqs=rows,
            num_reqs_after_padding=padded,
            num_tokens=rows * width,
            num_tokens_after_padding=tokens,
            num_scheduled_tokens=np.full(rows, width),
            has_prefill=False,
            decode_graph_eligible=True,
            idx_mapping=batch,
            input_ids=torch.randint(VOCABULARY, (tokens,), generator=self.generator, dtype=torch.int32),
            positions=positions,
            query_start_loc=buffers.query_start_loc[: padded + 1],
            seq_lens=buffers.seq_lens[:padded],
            seq_lens_cpu_upper_bound=torch.full((rows,), computed + width),
        )
        metadata = {LAYER: self.builder.build(0, SimpleNamespace(seq_lens=input_batch.seq_lens))}
        states = torch.randn(tokens, WIDTH, generator=self.generator)
        ones = torch.ones(rows, dtype=torch.int32)
        last_sampled = torch.randint(VOCABULARY, (REQUESTS,), generator=self.generator)
        drafted: torch.Tensor = self.speculator.propose(
            input_batch,
            metadata,
            {LAYER: slots[0, :tokens]},
            states,
            None,
            **(verified or Verified(ones, torch.zeros_like(ones), last_sampled))._asdict(),
            next_prefill_tokens=torch.zeros(REQUESTS, dtype=torch.int32),
            temperature=torch.full((REQUESTS,), 0.7),
            seeds=torch.arange(REQUESTS),
            dummy_run=dummy_run,
        )
        return drafted.clone()

    def held(self) -> dict[str, torch.Tensor]:
        """All that the speculator keeps, and what its layers have, less the slot of padding."""
        actual = {
            f"{owner}.{name}": value.clone()
            for owner, thing in (("speculator", self.speculator), ("buffers", self.speculator.input_buffers))
            for name, value in vars(thing).items()
            if isinstance(value, torch.Tensor)
        }
        cache = self.model.layer.kv_cache[0].view(-1, WIDTH)[1:]
        return actual | {
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
