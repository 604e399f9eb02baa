"""vLLM's FlashAttention on the CPU: its own metadata builder and layer, with stand-ins for the kernels.

Within `flash_attention_stand_ins`, `attend` serves steps in a graph or eagerly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.double.model_runners import BareGraphs, WrappedGraphs

if TYPE_CHECKING:
    from vllm.config import CUDAGraphMode

HEADS, WIDTH = 2, 8
BLOCKS, BLOCK_SIZE = 2, 16
"""Blocks of one request, and tokens of one block."""
LAYER = "model.layers.0.self_attn.attn"


@contextmanager
def flash_attention_stand_ins(version: int) -> Iterator[None]:
    """Replace, within the block, the kernels of FlashAttention *version*, which have no CPU form."""
    names: dict[str, Any] = {
        "flash_attn_varlen_func": _varlen_stand_in,
        "_FA4_DENSE_ATTENTION_KERNEL": _varlen_stand_in,  # from 0.30 on the layer calls the former through it
        "get_scheduler_metadata": _schedule_stand_in,
        "reshape_and_cache_flash": lambda *_: None,  # the cache is full as it is
        "get_flash_attn_version": lambda *_, **__: version,
        "flash_attn_supports_quant_query_input": lambda: False,
    }
    with mock.patch.multiple(flash_attn, create=True, **names):
        yield


def _schedule_stand_in(*, max_seqlen_q: int, **_: Any) -> torch.Tensor:
    """Return a schedule of FlashAttention 3, (1,) int32: the longest query that it was made for."""
    return torch.full((1,), max_seqlen_q, dtype=torch.int32)


def _varlen_stand_in(**arguments: Any) -> Any:
    starts, table = arguments["cu_seqlens_q"], arguments.get("block_table")
    lengths = arguments["seqused_k"] if table is not None else starts.diff()
    if table is None:  # keys of the step's own tokens: a block of one for each request
        table = torch.arange(len(lengths), dtype=torch.int32).unsqueeze(1)
        arguments["k"], arguments["v"] = arguments["k"].unsqueeze(1), arguments["v"].unsqueeze(1)
    operation, _ = _attention_stand_in()
    window, _ = arguments.get("window_size") or (-1, -1)
    results = operation(
        arguments["q"],
        arguments["k"],
        arguments["v"],
        starts,
        lengths,
        table,
        arguments.get("scheduler_metadata"),
        arguments["max_seqlen_q"],
        # As the kernels do at their launch: a window that holds the longest length is no window.
        window if window < arguments["max_seqlen_k"] - 1 else -1,
        arguments["softmax_scale"],
    )
    return results if arguments["out"] is None else arguments["out"].copy_(results[0])


@functools.cache
def _attention_stand_in() -> tuple[Any, object]:
    """Define the attention of each request's query tokens to its blocks as an operation, which captures record.

    Tokens attend to the first *lengths* tokens of the blocks, and to at most *window* tokens before their own if
    *window* is not negative. It assumes, as engines on an H100 confirm, that a kernel of FlashAttention 3 gives wrong
    results if its schedule was made for another longest query. Which results is not known; here it writes zeros.
    """
    library = torch.library.Library("vllm_graphfix_flash_attention", "FRAGMENT")
    library.define(
        "attend(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor lengths, Tensor table, Tensor? schedule, int "
        "longest, int window, float scale) -> (Tensor, Tensor)"
    )

    def kernel(
        q: Any,
        k: Any,
        v: Any,
        starts: Any,
        lengths: Any,
        table: Any,
        schedule: Any,
        longest: int,
        window: int,
        scale: float,
    ) -> Any:
        out, lse = torch.zeros_like(q), torch.full(q.shape[1::-1], -torch.inf)
        if schedule is not None and schedule[0] != longest:
            return out, lse
        bounds = starts.tolist()
        for row, length in enumerate(lengths.tolist()):
            keys, values = (cache[table[row].long()].flatten(0, 1)[:length, 0] for cache in (k, v))
            for token in range(bounds[row], bounds[row + 1]):
                seen = length - (bounds[row + 1] - 1 - token)  # causal: no later token
                if seen < 1:
                    continue
                first = max(seen - 1 - window, 0) if window >= 0 else 0
                scores = q[token] @ keys[first:seen].T * scale
                lse[:, token] = scores.logsumexp(-1)
                out[token] = scores.softmax(-1) @ values[first:seen]
        return out, lse

    library.impl("attend", kernel, "CPU")
    library.impl("attend", lambda q, *_: (torch.empty_like(q), q.new_empty(q.shape[1::-1])), "Meta")
    return torch.ops.vllm_graphfix_flash_attention.attend, library  # the operation ends with its library


def metadata_builder(mode: CUDAGraphMode, requests: int, sizes: Sequence[int]) -> Any:
    """Return vLLM's metadata builder for graphs of *sizes* tokens and at most *requests* requests."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda parallel: HEADS,
            get_num_kv_heads=lambda parallel: 1,
            get_head_size=lambda: WIDTH,
            rswa_window=None,
            is_mm_prefix_lm=False,
        ),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode,
            cudagraph_capture_sizes=list(sizes),
            max_cudagraph_capture_size=max(sizes),
            static_forward_context={},
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=1),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
    )
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=WIDTH, dtype=torch.float32)
    return flash_attn.FlashAttentionMetadataBuilder(spec, [LAYER], config, torch.device("cpu"))


class Rows:
    """Persistent tensors of a model runner for *requests* requests, with batches padded as by both model runners."""

    def __init__(self, requests: int) -> None:
        self._lengths = torch.zeros(requests, dtype=torch.int32)
        self._starts = torch.zeros(requests + 1, dtype=torch.int32)
        self._table = torch.arange(requests * BLOCKS, dtype=torch.int32).view(requests, BLOCKS)

    def batch(self, queries: Sequence[int], lengths: Sequence[int], rows: int, tokens: int) -> Any:
        """Return the metadata of a batch, padded to *rows* requests and *tokens* tokens in all.

        *queries* are the query tokens of each request, *lengths* its tokens including these.
        """
        requests = len(queries)
        self._lengths[:requests], self._lengths[requests:] = torch.tensor(lengths), 0
        self._starts[1 : 1 + requests] = torch.tensor(queries).cumsum(0)
        self._starts[1 + requests :] = sum(queries)
        lengths_cpu = self._lengths[:rows].clone()
        arguments = {
            "query_start_loc": self._starts[: rows + 1],
            "query_start_loc_cpu": self._starts[: rows + 1].clone(),
            "seq_lens": self._lengths[:rows],
            "seq_lens_cpu_upper_bound": lengths_cpu,
            "num_reqs": rows,
            "num_actual_tokens": tokens,
            "max_query_len": max(queries),
            "max_seq_len": BLOCKS * BLOCK_SIZE,
            "block_table_tensor": self._table[:rows],
            "slot_mapping": torch.zeros(tokens, dtype=torch.int64),
        }
        return CommonAttentionMetadata(**supported_kwargs(CommonAttentionMetadata, arguments))


def random_cache(blocks: int, random: torch.Generator) -> torch.Tensor:
    """Return a random KV cache of *blocks* blocks, in the backend's layout."""
    backend, shape = flash_attn.FlashAttentionBackend, (blocks, 1, BLOCK_SIZE, 2 * WIDTH)
    if hasattr(backend, "get_kv_cache_shape"):  # before 0.29
        shape = backend.get_kv_cache_shape(blocks, BLOCK_SIZE, 1, WIDTH)
    return torch.randn(shape, generator=random)


def attention_layer(
    requests: int, tokens: int, random: torch.Generator
) -> tuple[Any, tuple[torch.Tensor, ...], Callable[..., torch.Tensor]]:
    """Return vLLM's layer with a cache for *requests* requests, its inputs for *tokens* tokens, and its forward.

    The inputs are persistent: (tokens, HEADS, WIDTH) for the query, (tokens, 1, WIDTH) for key and value. The forward
    takes the metadata of a step, and ignores the padded tokens that graphs pass.
    """
    cache = random_cache(requests * BLOCKS, random)
    inputs = (torch.zeros(tokens, HEADS, WIDTH), *torch.zeros(2, tokens, 1, WIDTH))
    layer: Any = torch.nn.Module()
    layer._q_scale = layer._k_scale = layer._v_scale = torch.ones(())
    attention: Any = flash_attn.FlashAttentionImpl(HEADS, WIDTH, 0.5, 1, None, None, "auto")

    def forward(metadata: Any, _: int = 0) -> torch.Tensor:
        output = torch.zeros_like(inputs[0])
        attention.forward(layer, *inputs, cache, metadata, output)
        return output

    return layer, inputs, forward


Batch = tuple[Sequence[int], Sequence[int]]
"""Query tokens of each request, and its length including these."""


def attend(
    builder: Any, capture: Batch, steps: Sequence[Batch], requests: int, tokens: int, *, wrapped: bool = False
) -> list[float]:
    """Return the attention output of each step's tokens, by vLLM's own layer.

    If *builder* is for full graphs, all steps replay one graph for *requests* requests and *tokens* tokens, captured
    with the batch *capture*; *wrapped* puts it in vLLM's wrapper.
    """
    random = torch.Generator().manual_seed(0)
    layer, inputs, forward = attention_layer(requests, tokens, random)
    rows, captured = Rows(requests), builder.use_full_cuda_graph
    graphs: Any = WrappedGraphs(LAYER, layer, forward, BLOCK_SIZE) if wrapped else BareGraphs(forward)
    if captured:
        graphs.capture(tokens, builder.build(0, rows.batch(*capture, requests, tokens)))
    numbers: list[float] = []
    for queries, lengths in steps:
        scheduled = sum(queries)
        for tensor in inputs:
            tensor[:scheduled] = torch.randn(scheduled, *tensor.shape[1:], generator=random)
        padded = (requests, tokens) if captured else (len(queries), scheduled)
        metadata = builder.build(0, rows.batch(queries, lengths, *padded))
        output = graphs.replay(tokens, metadata, scheduled) if captured else forward(metadata)
        numbers += output[:scheduled].flatten().tolist()
    return numbers
