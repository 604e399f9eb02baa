"""idle-rank (PR 39444): a rank without work runs its step between its requests' steps and after the last.

Two requests decode; the rank has nothing to do for a step while they wait, after the first has ended and the second has
moved into its row, and after both have ended: what they leave in the cache is what a prefix hit finds. The reference is
a rank that never idles. Twice: a hybrid of Mamba and attention in full graphs, and attention with an Eagle drafter
without graphs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker import gpu_model_runner, gpu_worker
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.utils import AttentionGroup

from vllm_graphfix.verify.double.arguments import input_batch, known_to
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.measurement import Measurement

MAX_MODEL_LEN = 16
MAX_TOKENS = 16
REQUESTS = 2
PAGE = 4
WIDTH = 2
MIXER, ATTENTION, DRAFT = "model.layers.0.mixer", "model.layers.1.self_attn", "draft.layers.0.self_attn"
BLOCKS = {"first": (1, [2, 3, 4, 5]), "second": (6, [7, 8, 9, 10])}
"""The blocks of each request: its state's, and those of its keys."""
PROMPT = 3
IDLE = "a step without work"
STEPS: list[tuple[str, ...] | str] = [
    ("first", "second"),
    ("first", "second"),
    IDLE,
    ("first", "second"),
    ("second",),
    IDLE,
    ("second",),
    IDLE,  # the last request has ended, and the batch has not been told
    (),
]
CPU = torch.device("cpu")


def run(*, hit: bool = True) -> Measurement:
    """Not *hit*: the rank idles before its first requests, when nothing is in its buffers."""
    steps: Sequence[tuple[str, ...] | str] = STEPS if hit else [IDLE, IDLE, ("first", "second")]
    numbers = (
        "every cache block of 2 requests and the outputs of a Mamba hybrid and of a model with a drafter, step by step"
    )
    never_idle = [step for step in steps if step != IDLE]
    with unpinned():
        eager = [*_serve(_Rank(), never_idle), *_serve(_DraftingRank(), never_idle)]
        with cpu_cuda_graphs():
            hybrid = _Rank()
            hybrid.capture()
            graphed = [*_serve(hybrid, steps), *_serve(_DraftingRank(), steps)]
    counted = {"idle-step-on-real-blocks": 2 * (len(steps) - len(never_idle))}  # of each of two ranks
    return Measurement(numbers, tuple(eager), tuple(graphed), counted=counted)


@contextmanager
def unpinned() -> Iterator[None]:
    """Pinned memory, which vLLM takes unasked from 0.25 on, needs CUDA."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("vllm.") and vars(module).get("PIN_MEMORY"):
                stack.enter_context(mock.patch.object(module, "PIN_MEMORY", False))
        yield


class CacheStandIn:
    """Stands in for the model's layers and their kernels: a state per block, keys per slot, a draft's keys per slot."""

    def __init__(self) -> None:
        blocks = 1 + max(block for _, keys in BLOCKS.values() for block in keys)
        self.states = torch.zeros(blocks, WIDTH)
        self.keys, self.drafts = torch.zeros(blocks * PAGE, WIDTH), torch.zeros(blocks * PAGE, WIDTH)
        self.hidden = torch.zeros(MAX_TOKENS, WIDTH)
        self.graph: Any = None
        self.output = torch.zeros(0, WIDTH)

    def __call__(self, **inputs: Any) -> torch.Tensor:
        """The target model, through its graph where vLLM says so."""
        context = get_forward_context()
        if context.cudagraph_runtime_mode == CUDAGraphMode.FULL:
            self.graph.replay()
            return self.output
        return self.layers(context.attn_metadata, getattr(context, "slot_mapping", {}))

    def layers(self, metadata: Any, slots: Any) -> torch.Tensor:
        """Writes where it is told; without metadata attention writes (0.15 on) and nothing else runs, as in vLLM."""
        told = slots.get(ATTENTION) if slots else None
        if told is None and metadata:
            told = metadata[ATTENTION].slot_mapping
        if told is not None:
            _write(self.keys, told, self.hidden)
        return self._decode(metadata[MIXER]) if metadata and MIXER in metadata else self.hidden[:REQUESTS].clone()

    def draft(self, **inputs: Any) -> None:
        slots = getattr(get_forward_context(), "slot_mapping", {}).get(DRAFT)
        if slots is not None:
            _write(self.drafts, slots, self.hidden)

    def blocks(self) -> list[float]:
        """All but the null block."""
        return [*self.states[1:].flatten(), *self.keys[PAGE:].flatten(), *self.drafts[PAGE:].flatten()]

    def _decode(self, metadata: Any) -> torch.Tensor:
        """One token for each decode row; -1 (up to 0.19) and 0 mean that a row has no state."""
        indices = getattr(metadata, "state_indices_tensor_d", None)  # 0.16 on
        indices = metadata.state_indices_tensor if indices is None else indices
        indices = indices[: metadata.num_decodes].flatten().clamp(min=0).long()
        updated = self.states[indices] * 0.5 + self.hidden[: len(indices)]
        self.states.index_copy_(0, indices, updated)
        return updated


def _write(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Stands in for reshape_and_cache: nothing is written for a slot of -1, which is the null block's here."""
    cache.index_copy_(0, slots.clamp(min=0), values[: len(slots)])


class _Off(SimpleNamespace):
    """A part of vLLM's configuration: what is not set is off."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Rank:
    """A Worker with the model runner of a Mamba hybrid.

    It has that runner's batch, buffers, metadata builders, and its own step without work.
    """

    mode = CUDAGraphMode.FULL

    def __init__(self) -> None:
        self.cache = CacheStandIn()
        self.runner = _runner(self.cache, self.groups())
        self.worker: Any = object.__new__(gpu_worker.Worker)
        self.worker.model_runner, self.worker.use_v2_model_runner = self.runner, False
        self.runner._determine_batch_execution_and_padding = self._decide
        self.computed: dict[str, int] = {}

    def groups(self) -> list[tuple[Any, list[str], Any]]:
        state = MambaSpec(block_size=MAX_MODEL_LEN, shapes=((WIDTH,),), dtypes=(torch.float32,))
        return [(Mamba2AttentionBackend, [MIXER], state), _KEYS]

    def _decide(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Decides as where another rank has as many requests as the graph takes."""
        full = self.mode == CUDAGraphMode.FULL
        tokens = REQUESTS if full else 1
        return self.mode, BatchDescriptor(num_tokens=tokens, num_reqs=tokens if full else None), False, None, None

    def capture(self) -> None:
        """A graph of a batch of as many decodes as there can be."""
        metadata = self.metadata(REQUESTS, for_cudagraph_capture=True)
        slots = self.slots(REQUESTS)[1]
        self.cache.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.cache.graph):
            self.cache.output = self.cache.layers(metadata, slots)

    def idle(self) -> None:
        with _cpu_step():
            self.worker.execute_dummy_batch()

    def step(self, names: tuple[str, ...]) -> torch.Tensor:
        """A decode step of these requests."""
        self.update(names)
        rows = len(names)
        if not rows:
            return self.cache.hidden[:0]
        places = [self.computed[name] for name in self.runner.input_batch.req_ids]
        self._prepare(places)
        order = self.runner.input_batch.req_ids
        padded = REQUESTS if self.cache.graph else rows
        slots = [
            BLOCKS[name][1][place // PAGE] * PAGE + place % PAGE for name, place in zip(order, places, strict=True)
        ]
        for table in self.runner.input_batch.block_table.block_tables:  # in place of the kernel that computes them
            table.slot_mapping.gpu[:rows] = torch.tensor(slots)
            table.slot_mapping.gpu[rows:] = -1
        _, by_layer = self.slots(padded, rows)
        outputs = self._forward(rows, padded, by_layer)
        for name in names:
            self.computed[name] += 1
        return outputs[[order.index(name) for name in names]]

    def _forward(self, rows: int, padded: int, by_layer: Any) -> torch.Tensor:
        metadata = self.metadata(rows, padded)
        if self.cache.graph:
            self.cache.graph.replay()
            return self.cache.output
        return self.cache.layers(metadata, by_layer)

    def _prepare(self, places: list[int]) -> None:
        """The part of `_prepare_inputs` that fills the persistent lengths, rows beyond the batch included."""
        runner, rows = self.runner, len(places)
        runner.query_start_loc.np[1 : rows + 1] = np.arange(1, rows + 1)
        runner.query_start_loc.np[rows + 1 :] = rows
        runner.query_start_loc.copy_to_gpu()
        for lengths in _lengths(runner):
            lengths.zero_()[:rows] = torch.tensor(places) + 1
        runner.input_batch.block_table.commit_block_table(rows)

    def update(self, names: tuple[str, ...]) -> None:
        """What `_update_states` does to the batch. Prompts are in the cache, as if another step had computed them."""
        batch = self.runner.input_batch
        for name in [n for n in batch.req_ids if n not in names]:
            batch.remove_request(name)
        for name in names:
            if name not in self.computed:
                self.computed[name] = PROMPT
                batch.add_request(_state(name, len(batch.block_table.block_tables)))
        batch.condense()
        batch.refresh_metadata()
        for name, row in batch.req_id_to_index.items():
            batch.num_computed_tokens_cpu[row] = self.computed[name]

    def metadata(self, rows: int, padded: int | None = None, **capture: bool) -> Any:
        build = self.runner._build_attention_metadata
        padded = padded or rows
        given = {
            "num_tokens": rows,
            "num_reqs": rows,
            "max_query_len": 1,
            "num_tokens_padded": padded,
            "num_reqs_padded": padded,
            "slot_mappings": self.slots(padded, rows)[0],
            **capture,
        }
        with _cpu_step():
            return build(**known_to(build, given))[0]

    def slots(self, padded: int, rows: int | None = None) -> Any:
        """By group and by layer; 0.14.1 has them in the metadata alone."""
        get = getattr(self.runner, "_get_slot_mappings", None)
        return get(padded, padded, padded if rows is None else rows) if get else (None, None)


class _DraftingRank(_Rank):
    """The same with attention and an Eagle drafter, and without graphs."""

    mode = CUDAGraphMode.NONE

    def __init__(self) -> None:
        super().__init__()
        self.runner.drafter = _drafter(self.cache, self.runner.vllm_config)
        self.runner.speculative_config = SimpleNamespace(
            use_eagle=lambda: True,
            uses_draft_model=lambda: False,
            uses_extract_hidden_states=lambda: False,
            enforce_eager=False,
        )

    def groups(self) -> list[tuple[Any, list[str], Any]]:
        backend, layers, spec = _KEYS
        return [(backend, [*layers, DRAFT], spec)]

    def _forward(self, rows: int, padded: int, by_layer: Any) -> torch.Tensor:
        drafter, slots = self.runner.drafter, self.runner.input_batch.block_table[0].slot_mapping.gpu[:rows]
        outputs = self.cache.layers(None, by_layer) if by_layer else self.cache.hidden[:rows].clone()
        if by_layer is None:  # 0.14.1
            _write(self.cache.keys, slots, self.cache.hidden)
        own = drafter._get_slot_mapping(rows, slots)[DRAFT] if hasattr(drafter, "_get_slot_mapping") else slots
        _write(self.cache.drafts, own, self.cache.hidden)
        return outputs


class _KeysBackend:
    """Stands in for an attention backend: its metadata are the slots."""

    supports_update_block_table = False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(slot_mapping=common_attn_metadata.slot_mapping)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> SimpleNamespace:
        return self.build(0, common_attn_metadata)


_KEYS = (
    _KeysBackend,
    [ATTENTION],
    FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=WIDTH, dtype=torch.float32),
)


def _serve(rank: _Rank, steps: Sequence[tuple[str, ...] | str]) -> list[float]:
    """The outputs of each step that has requests, and what is in the cache after it."""
    random = torch.Generator().manual_seed(0)
    numbers: list[float] = []
    for step in steps:
        if step == IDLE:
            # What lies in the input buffers then is of no request: data parallelism randomizes it.
            rank.cache.hidden.fill_(7.0)
            rank.idle()
            continue
        rank.cache.hidden.copy_(torch.randn(MAX_TOKENS, WIDTH, generator=random))
        numbers += map(float, rank.step(tuple(step)).flatten())
        numbers += map(float, rank.cache.blocks())
    return numbers


def _runner(cache: CacheStandIn, given: list[tuple[Any, list[str], Any]]) -> Any:
    """A GPUModelRunner with no more than its batch, and what its step without work reads."""
    config: Any = _Off(
        model_config=_Off(max_model_len=MAX_MODEL_LEN, get_mamba_chunk_size=lambda: 8),
        cache_config=_Off(mamba_cache_mode="none", replayssm_buffer_len=0),
        scheduler_config=_Off(max_num_seqs=REQUESTS, max_num_batched_tokens=MAX_TOKENS),
        parallel_config=_Off(
            data_parallel_size=1,
            data_parallel_rank=0,
            num_ubatches=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            is_moe_model=False,
        ),
        compilation_config=_Off(
            cudagraph_mode=CUDAGraphMode.FULL,
            max_cudagraph_capture_size=REQUESTS,
            static_forward_context={},
            static_all_moe_layers=[],
        ),
        kernel_config=SimpleNamespace(ir_op_priority=SimpleNamespace(set_priority=nullcontext)),
        num_speculative_tokens=0,
    )
    runner: Any = object.__new__(gpu_model_runner.GPUModelRunner)
    sizes = [spec.block_size for _, _, spec in given]
    runner.input_batch = input_batch(REQUESTS, MAX_MODEL_LEN, MAX_TOKENS, sizes, CPU)
    runner.attn_groups = [
        [_group(backend, layers, spec, number, config)] for number, (backend, layers, spec) in enumerate(given)
    ]
    runner.kv_cache_config = KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layers, spec) for _, layers, spec in given]
    )
    runner.vllm_config = config
    for name in ("model_config", "cache_config", "scheduler_config", "parallel_config", "compilation_config"):
        setattr(runner, name, getattr(config, name))
    runner.model, runner.device, runner.max_model_len, runner.max_num_tokens = cache, CPU, MAX_MODEL_LEN, MAX_TOKENS
    runner.uniform_decode_query_len = runner.dcp_world_size = 1
    runner.arange_np = np.arange(MAX_TOKENS)
    for name, size, kind in (
        ("query_start_loc", REQUESTS + 1, torch.int32),
        ("query_pos", MAX_TOKENS, torch.int64),
        ("input_ids", MAX_TOKENS, torch.int32),
    ):
        setattr(runner, name, _buffer(size, kind))
    if hasattr(gpu_model_runner.GPUModelRunner, "_get_slot_mappings") and _lengths_are_on_the_device():
        runner.seq_lens = torch.zeros(REQUESTS, dtype=torch.int32)
        runner.optimistic_seq_lens_cpu = torch.zeros(REQUESTS, dtype=torch.int32)
        runner.positions = torch.zeros(MAX_TOKENS, dtype=torch.int64)
    else:
        runner.seq_lens, runner.positions = _buffer(REQUESTS, torch.int32), _buffer(MAX_TOKENS, torch.int64)
    for name in (
        "use_async_spec_decode",
        "routed_experts_initialized",
        "is_mm_prefix_lm",
        "supports_mm_inputs",
        "enable_prompt_embeds",
        "uses_mrope",
        "use_aux_hidden_state_outputs",
    ):
        setattr(runner, name, False)
    runner.uses_xdrope_dim = 0
    for name in ("speculative_config", "lora_config", "prepare_inputs_event", "mamba_prev_last_scheduled_idx"):
        setattr(runner, name, None)
    # What the step does beside its pass.
    runner._init_model_kwargs = lambda *args, **kwargs: {}
    runner.maybe_randomize_inputs = lambda *args, **kwargs: nullcontext()
    runner.maybe_dummy_run_with_lora = lambda *args, **kwargs: nullcontext()
    runner.eplb_step = runner._register_layerwise_nvtx_hooks = runner._prepare_padding_mask = lambda *_, **__: None
    runner._get_encoder_seq_lens = lambda *args, **kwargs: (None, None)
    runner.randomize_dummy_inputs = False
    return runner


def _group(backend: Any, layers: list[str], spec: Any, number: int, config: Any) -> Any:
    if backend is _KeysBackend:
        return AttentionGroup(backend, layers, spec, number, metadata_builders=[backend()])
    group = AttentionGroup(backend, layers, spec, number)
    group.create_metadata_builders(config, CPU, kernel_block_size=None)
    return group


def _drafter(cache: CacheStandIn, config: Any) -> Any:
    drafter: Any = object.__new__(EagleProposer)
    drafter.num_speculative_tokens, drafter.parallel_drafting, drafter.dp_rank = 1, False, 0
    drafter._slot_mapping_buffer = torch.zeros(MAX_TOKENS, dtype=torch.int64)
    drafter.attn_layer_names, drafter.indexer_layer_names = [DRAFT], []
    drafter._draft_attn_layer_names = {DRAFT}
    drafter.supports_mm_inputs = drafter.pass_hidden_states_to_model = drafter.use_cuda_graph = False
    drafter.input_ids = torch.zeros(MAX_TOKENS, dtype=torch.int32)
    drafter.hidden_states = torch.zeros(MAX_TOKENS, WIDTH)
    drafter._get_positions = lambda tokens: torch.zeros(tokens, dtype=torch.int64)
    drafter.vllm_config, drafter.model = config, cache.draft
    drafter._pad_batch_across_dp = lambda num_tokens_unpadded, num_tokens_padded: (num_tokens_padded, None)
    drafter._determine_batch_execution_and_padding = lambda tokens, **_: (CUDAGraphMode.NONE, tokens, None)
    return drafter


def _buffer(size: int, kind: torch.dtype) -> CpuGpuBuffer:
    return CpuGpuBuffer(size, **known_to(CpuGpuBuffer, {"dtype": kind, "device": CPU, "pin_memory": False}))


def _lengths_are_on_the_device() -> bool:
    """From 0.19 on."""
    return "optimistic_seq_lens_cpu" in inspect.getsource(gpu_model_runner.GPUModelRunner._dummy_run)


def _lengths(runner: Any) -> list[torch.Tensor]:
    if isinstance(runner.seq_lens, torch.Tensor):
        return [runner.seq_lens, runner.optimistic_seq_lens_cpu]
    return [runner.seq_lens.cpu, runner.seq_lens.gpu]


def _state(name: str, groups: int) -> CachedRequestState:
    state, keys = BLOCKS[name]
    return CachedRequestState(
        req_id=name,
        prompt_token_ids=[0] * PROMPT,
        mm_features=[],
        sampling_params=SamplingParams(temperature=0.0),
        generator=None,
        block_ids=([state], keys)[2 - groups :],
        num_computed_tokens=PROMPT,
        output_token_ids=[],
    )


@contextmanager
def _cpu_step() -> Iterator[None]:
    """What a step asks of a machine with one GPU, and of pinned memory."""
    alone = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    with ExitStack() as stack:
        for name, value in (
            ("get_pp_group", lambda: alone),
            ("supports_mm_encoder_only", lambda model: False),
            ("async_tensor_h2d", lambda data, *args, **kwargs: torch.as_tensor(data)),
        ):
            if hasattr(gpu_model_runner, name):
                stack.enter_context(mock.patch.object(gpu_model_runner, name, value))
        yield
