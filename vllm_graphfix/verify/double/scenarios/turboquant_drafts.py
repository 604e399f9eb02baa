"""turboquant-drafts: drafts are verified with a TurboQuant cache, in the graphs that vLLM chooses to capture.

Real: each model runner's question which graphs the backend supports, vLLM's choice of the mode, TurboQuant's metadata
builder and its attention layer. Stand-ins: the layer's kernels, on a cache of plain numbers, and the rest of the
runners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config.compilation import CompilationConfig, CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import attn_utils

from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.model_runners import (
    BareGraphs,
    ManagedGraphs,
    WrappedGraphs,
    wrappers_on_the_double,
)
from vllm_graphfix.verify.measurement import Measurement

LAYER = "model.layers.2.self_attn.attn"
DEVICE = torch.device("cpu")
REQUESTS, DRAFTS, HEADS, WIDTH = 2, 3, 2, 8
BLOCKS, BLOCK_SIZE = 4, 16
"""Blocks of one request, and tokens of one block."""
LENGTHS = ((37, 21), (40, 25), (44, 26))
"""Tokens of each request, step by step, this step's included."""


Forward = Callable[..., torch.Tensor]
MakeGraphs = Callable[[Any, Forward, int], Any]
"""Makes graphs of a layer's forward, for the tokens of a request."""


def run(*, trigger: bool = True) -> Measurement:
    """Verify three drafts a request on both model runners. Without *trigger*, decode without drafts."""
    drafts = DRAFTS if trigger else 0
    numbers = f"attention of {REQUESTS} requests of {1 + drafts} tokens in {len(LENGTHS)} steps of each model runner"
    with cpu_cuda_graphs(), _kernels():
        eager = [number for _ in _RUNNERS for number in _serve(None, drafts, _bare)]
        try:
            graphed = [number for ask in _RUNNERS for number in _serve(ask, drafts, _bare)]
        except RuntimeError as error:  # of the capture
            return Measurement(numbers, tuple(eager), (), f"RuntimeError: {error}")
    return Measurement(numbers, tuple(eager), tuple(graphed))


def watched(*, trigger: bool = True) -> None:
    """Replay the graphs of `run` as model runner V1 does, for the shadow check, with drafts and without.

    With drafts, the fix leaves no full graph to replay. The captures of 0.20.x read lengths here, as on no GPU.
    """
    _watch(_mode_of_v1, trigger, lambda layer, forward, _: WrappedGraphs(LAYER, layer, forward, BLOCK_SIZE))


def watched_v2(*, trigger: bool = True) -> None:
    """Replay the graphs of `run` as model runner V2 does."""
    _watch(_mode_of_v2, trigger, lambda layer, forward, each: ManagedGraphs(LAYER, layer, forward, BLOCK_SIZE, each))


def _bare(layer: Any, forward: Forward, tokens_of_a_request: int) -> Any:
    return BareGraphs(forward)


def _watch(ask: Callable[..., Any], trigger: bool, graphs: MakeGraphs) -> None:
    with wrappers_on_the_double(), _kernels():
        for drafts in (DRAFTS, 0) if trigger else (0,):
            _serve(ask, drafts, graphs)


def _serve(ask: Callable[..., Any] | None, drafts: int, make_graphs: MakeGraphs) -> list[float]:
    """Return the output of attention in all steps, from graphs if the runner of *ask* captures some."""
    random = torch.Generator().manual_seed(0)
    tokens = 1 + drafts
    layer, batch = _Layer(random), _Batch(tokens)
    config = _config(drafts, CUDAGraphMode.NONE if ask is None else CUDAGraphMode.FULL_DECODE_ONLY)
    builder = _backend().get_builder_cls()(_spec(), [LAYER], config, DEVICE)
    inputs = [torch.zeros(REQUESTS * tokens, heads, WIDTH) for heads in (HEADS, 1, 1)]

    def forward(metadata: Any, _: int = 0) -> torch.Tensor:
        return layer.attend(inputs, metadata)

    graphs = make_graphs(layer, forward, tokens)
    captured = ask is not None and ask(config, tokens).decode_mode() == CUDAGraphMode.FULL
    if captured:
        # Both runners give a capture the tokens of the step as lengths, and the longest that a request may become.
        metadata = builder.build_for_cudagraph_capture(batch.of([tokens] * REQUESTS, BLOCKS * BLOCK_SIZE))
        with batch.unreadable() if make_graphs is _bare else nullcontext():
            graphs.capture(REQUESTS * tokens, metadata)
    numbers: list[float] = []
    for lengths in LENGTHS:
        for tensor in inputs:
            tensor.copy_(torch.randn(tensor.shape, generator=random))
        metadata = builder.build(0, batch.of(lengths, max(lengths)))
        output = graphs.replay(len(inputs[0]), metadata, len(inputs[0])) if captured else forward(metadata)
        numbers += output.flatten().tolist()
    return numbers


def _mode_of_v1(config: Any, tokens: int) -> CUDAGraphMode:
    """Return the mode that model runner V1 sets up its graphs for."""
    runner = mock.MagicMock(
        **vars(config),
        vllm_config=config,
        uniform_decode_query_len=tokens,
        kv_cache_config=_caches(),
        max_num_reqs=REQUESTS,
    )
    check = gpu_model_runner.GPUModelRunner._check_and_update_cudagraph_mode
    check(runner, [{_backend()}], runner.kv_cache_config.kv_cache_groups)
    mode: CUDAGraphMode = runner.cudagraph_dispatcher.initialize_cudagraph_keys.call_args.args[0]
    return mode


def _mode_of_v2(config: Any, tokens: int) -> CUDAGraphMode:
    """Return the mode that model runner V2 sets up its graphs for, with what its `init_attn_backend` hands on."""
    results = attn_utils.init_attn_backend(_caches(), config, DEVICE)
    support = next(each for each in results if hasattr(each, "min_cg_support"))
    return config.compilation_config.resolve_cudagraph_mode_and_sizes(
        support.min_cg_support, support.min_cg_attn_backend, tokens
    )


_RUNNERS = (_mode_of_v1, _mode_of_v2)


def _backend() -> Any:
    from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend

    return TurboQuantAttentionBackend


def _spec() -> Any:
    return FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=WIDTH, dtype=torch.float32)


def _caches() -> Any:
    return KVCacheConfig(REQUESTS * BLOCKS, [], [KVCacheGroupSpec([LAYER], _spec())])


def _config(drafts: int, mode: CUDAGraphMode) -> Any:
    """Return the part of a VllmConfig that both runners read, with *drafts* of n-grams a request."""
    tokens = 1 + drafts
    compilation = CompilationConfig(cudagraph_mode=mode, cudagraph_capture_sizes=[tokens, REQUESTS * tokens])
    compilation.max_cudagraph_capture_size = REQUESTS * tokens
    compilation.static_forward_context[LAYER] = _Registered()
    no = {
        name: lambda: False
        for name in ("use_eagle", "uses_draft_model", "uses_extract_hidden_states", "uses_dynamic_speculative_decoding")
    }
    speculative = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False, **no)
    return SimpleNamespace(
        compilation_config=compilation,
        speculative_config=speculative if drafts else None,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, decode_context_parallel_size=1, use_ubatching=False, num_ubatches=1
        ),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        use_v2_model_runner=False,
    )


class _Batch:
    """Persistent tensors of a model runner, for decodes of *tokens* tokens of all requests."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._starts = torch.arange(REQUESTS + 1, dtype=torch.int32) * tokens
        self._lengths = torch.zeros(REQUESTS, dtype=torch.int32)
        self._table = torch.arange(REQUESTS * BLOCKS, dtype=torch.int32).view(REQUESTS, BLOCKS)
        self._slots = torch.zeros(REQUESTS * tokens, dtype=torch.int64)

    def of(self, lengths: Sequence[int], longest: int) -> Any:
        """Return the metadata of a batch whose requests have *lengths* tokens, this step's included."""
        self._lengths[:] = torch.tensor(lengths)
        last = torch.tensor(lengths)[:, None] + torch.arange(-self._tokens, 0)
        self._slots[:] = (last + torch.arange(REQUESTS)[:, None] * BLOCKS * BLOCK_SIZE).flatten()
        values = {
            "query_start_loc": self._starts,
            "query_start_loc_cpu": self._starts.clone(),
            "seq_lens": self._lengths,
            "seq_lens_cpu_upper_bound": self._lengths.clone(),
            "num_reqs": REQUESTS,
            "num_actual_tokens": REQUESTS * self._tokens,
            "max_query_len": self._tokens,
            "max_seq_len": longest,
            "block_table_tensor": self._table,
            "slot_mapping": self._slots,
        }
        return CommonAttentionMetadata(**supported_kwargs(CommonAttentionMetadata, values))

    @contextmanager
    def unreadable(self) -> Iterator[None]:
        """Refuse to read the device's lengths on the host within the block, as a capture on a GPU does."""
        device = {each.data_ptr() for each in (self._starts, self._lengths)}
        read = torch.Tensor.tolist

        def tolist(tensor: torch.Tensor) -> Any:
            if tensor.data_ptr() in device:
                raise RuntimeError("operation not permitted when stream is capturing: lengths are read on the host")
            return read(tensor)

        with mock.patch.object(torch.Tensor, "tolist", tolist):
            yield


class _Registered(AttentionLayerBase):  # type: ignore[misc]  # vLLM is a peer
    """The layer as model runners know it."""

    def get_attn_backend(self) -> Any:
        return _backend()

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return _spec()


class _Layer:
    """An attention layer with vLLM's implementation of TurboQuant, on a full random cache of one head."""

    def __init__(self, random: torch.Generator) -> None:
        from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
        from vllm.v1.attention.backends import turboquant_attn

        self._cache = torch.randn(REQUESTS * BLOCKS, 1, BLOCK_SIZE, 2 * WIDTH, generator=random)
        self._tq_cached = True
        self._tq_Pi = self._tq_PiT = self._tq_centroids = self._tq_midpoints = None
        self._implementation: Any = object.__new__(turboquant_attn.TurboQuantAttentionImpl)
        vars(self._implementation).update(
            num_heads=HEADS,
            num_kv_heads=1,
            head_size=WIDTH,
            scale=WIDTH**-0.5,
            tq_config=TurboQuantConfig.from_cache_dtype("turboquant_k8v4", WIDTH),
            max_num_kv_splits=1,
            sliding_window=None,
            sinks=None,
            _soa_store=False,
            _use_flydsl=False,
        )

    def attend(self, inputs: Sequence[torch.Tensor], metadata: Any) -> torch.Tensor:
        """Store keys and values in the cache, and attend, as vLLM's layers do."""
        query, key, value = inputs
        self._implementation.do_kv_cache_update(self, key, value, self._cache, metadata.slot_mapping)
        output = torch.zeros_like(query)
        self._implementation.forward(self, query, key, value, self._cache, metadata, output)
        return output


@contextmanager
def _kernels() -> Iterator[None]:
    """Replace, within the block, TurboQuant's kernels by stand-ins that pack nothing."""
    from vllm.v1.attention.backends import turboquant_attn

    with mock.patch.multiple(
        turboquant_attn, triton_turboquant_store=_store, triton_turboquant_decode_attention=_decode
    ):
        yield


def _store(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, *_: Any, **__: Any
) -> None:
    kv_cache.view(-1, 2 * WIDTH).index_copy_(0, slots, torch.cat((key, value), -1).flatten(1))


def _decode(
    *,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    **_: Any,
) -> torch.Tensor:
    """Attend with each row of *query*, (rows, heads, width), to the first tokens of its blocks."""
    cached = kv_cache.reshape(-1, BLOCK_SIZE, 2 * WIDTH)[block_table.long()].flatten(1, 2)
    keys, values = cached.split(WIDTH, -1)
    there = torch.arange(cached.shape[1]) < seq_lens[:, None]
    scores = torch.einsum("rhw,rpw->rhp", query, keys) * scale
    weights = scores.masked_fill(~there[:, None], -torch.inf).softmax(-1)
    return torch.einsum("rhp,rpw->rhw", weights, values)
