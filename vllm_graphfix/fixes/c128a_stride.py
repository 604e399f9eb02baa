"""`c128a-stride`: the rows of DeepSeek V4's compressed attention stay where graphs read them, however long a batch is (PR 51318)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Diagnosis, Event, Fallback, Fix, Mode, Patch, StockFunction, Verdict

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Answer, Deployment, Fact
    from vllm_graphfix.source import Source
    from vllm_graphfix.syntax import Function
    from vllm_graphfix.trial import Trial
    from vllm_graphfix.verify.measurement import Measurement

_BACKEND = "vllm/models/deepseek_v4/sparse_mla.py"
_BACKEND_MODULE = "vllm.models.deepseek_v4.sparse_mla"
_BACKEND_BEFORE = "vllm/v1/attention/backends/mla/flashmla_sparse.py"
"""Where it was up to 0.22.1."""
_BUILDERS = (
    "DeepseekV4FlashMLAMetadataBuilder",
    "DeepseekV4SparseMLAMetadataBuilder",
    "FlashMLASparseMetadataBuilder",
)
_METHOD = "_build_c128a_metadata"
_TARGET = f"{_BUILDERS[0]}.{_METHOD}"
_ROWS = "build_c128a_topk_metadata"
_ALIGNMENT = 128
"""Entries; a row has a multiple of it."""
_WIDTH = (
    "min(max(triton.next_power_of_2(max(cm.max_seq_len // self.compress_ratio, 1)), _C128A_TOPK_ALIGNMENT), "
    "self.c128a_max_compressed)"
)
_PACKED = (
    "global_decode = global_decode_buffer.view(-1)[:num_decode_tokens * max_compressed_tokens]"
    ".view(num_decode_tokens, max_compressed_tokens)"
)

ROWS_CLOSER = Event(
    "rows-closer",
    "A decode batch came to DeepSeek V4's compressed attention whose rows stock packs closer than a capture: from the second row on graphs "
    "read another request's.",
)
FALLBACK = Fallback()


def diagnose(source: Source) -> Diagnosis:
    path = _BACKEND if source.read(_BACKEND) is not None else _BACKEND_BEFORE
    if not source.says(path, _ROWS):
        return Diagnosis(Verdict.ABSENT, "no attention to entries of 128 tokens each, as DeepSeek V4 has it")
    found = (source.function(path, f"{builder}.{_METHOD}") for builder in _BUILDERS)
    build, rows = next(filter(None, found), None), source.function(path, _ROWS)
    if build is not None and rows is not None:
        remedy = _at_the_buffers_stride(rows)
        if remedy is not None:
            return Diagnosis(
                Verdict.FIXED, "rows are as far apart as in their buffer, however many entries they have", remedy
            )
        if build.gives(f"{_ROWS}(...)", "max_compressed_tokens=self.c128a_max_compressed"):
            return Diagnosis(Verdict.FIXED, "each row has room for the longest request", build.where)
        width = build.only(f"active_topk_width = {_WIDTH}")
        packed = rows.only(_PACKED)
        if (
            width is not None
            and packed is not None
            and build.qualname == _TARGET
            and build.takes == "self, cm, req_id_per_token"
            and build.gives(f"{_ROWS}(...)", "max_compressed_tokens=active_topk_width")
            and build.mentions(active_topk_width=2)
            and len(build.find("cm.max_seq_len")) == 1
            and build.only("split_decodes_and_prefills(cm, decode_threshold=self.reorder_batch_threshold or 1)")
            and source.says(path, f"_C128A_TOPK_ALIGNMENT = {_ALIGNMENT}")
            and not rows.find("global_decode_buffer.stride(...)")
            and rows.mentions(global_decode_buffer=2)
        ):
            return Diagnosis(
                Verdict.AFFECTED,
                "rows are packed as closely as the longest request of the batch allows, and graphs read them where the capture had them",
                build.at(width),
                "packed-by-length",
            )
    return Diagnosis(
        Verdict.UNRECOGNISED,
        "entries for tokens are laid out in a way that nobody has looked at",
        build.where if build else f"{path}:1",
    )


def _at_the_buffers_stride(rows: Function) -> str | None:
    """Where decode rows are taken from their buffer as they lie there, and in no other way; or None."""
    taken = rows.find("global_decode = global_decode_buffer[:num_decode_tokens]")
    narrower = rows.find("global_decode = global_decode_buffer[:num_decode_tokens, :max_compressed_tokens]")
    if len(rows.assignments("global_decode", "...")) != len(taken + narrower) or not taken + narrower:
        return None
    return rows.at((taken + narrower)[0]) if rows.find("global_decode_buffer.stride(0)") else None


def _rows_as_wide_as_their_buffer(stock: StockFunction) -> StockFunction:
    """Around `_build_c128a_metadata(cm, req_id_per_token)`: where a full graph is captured or may be replayed, rows are of one width.

    Stock takes the width from `max_seq_len`. Entries beyond a request's own are -1, and its count leaves them out.
    """

    @functools.wraps(stock)
    def _build_c128a_metadata(self: Any, cm: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if _rows_are_closer(self, cm):
                # A copy: other builders, and this one's metadata, have the length of the batch.
                longest = object.__new__(type(cm))
                longest.__dict__.update(cm.__dict__, max_seq_len=self.c128a_max_compressed * self.compress_ratio)
                cm = longest
                ROWS_CLOSER.count += 1
        except Exception as error:
            FALLBACK.take(error)
        return stock(self, cm, *args, **kwargs)

    return _build_c128a_metadata


def _watch_width(stock: StockFunction) -> StockFunction:
    """Around the same."""

    @functools.wraps(stock)
    def _build_c128a_metadata(self: Any, cm: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if _rows_are_closer(self, cm):
                ROWS_CLOSER.count += 1
        except Exception as error:
            FALLBACK.take(error)
        return stock(self, cm, *args, **kwargs)

    return _build_c128a_metadata


def _rows_are_closer(builder: Any, cm: Any) -> bool:
    """Whether a second row of this decode batch, of a size that has a graph, is nearer to the first than in their buffer."""
    if cm.num_actual_tokens < 2 or cm.max_query_len > builder.reorder_batch_threshold:
        return False
    entries = max(cm.max_seq_len // builder.compress_ratio, _ALIGNMENT)
    if 1 << (entries - 1).bit_length() >= builder.c128a_max_compressed:  # stock's width: the next power of two
        return False
    graphs = builder.vllm_config.compilation_config
    return bool(
        graphs.cudagraph_mode.has_full_cudagraphs() and cm.num_actual_tokens <= graphs.max_cudagraph_capture_size
    )


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_BACKEND_MODULE, _TARGET, _rows_as_wide_as_their_buffer),)


def observers(shape: str) -> tuple[Patch, ...]:
    return (Patch(_BACKEND_MODULE, _TARGET, _watch_width),)


def applies(deployment: Deployment, shape: str) -> Answer:
    from vllm_graphfix.deployment import all_of

    return all_of(deployment.sparse_mla(), _compressed_by_128(deployment), deployment.full_graphs())


def _compressed_by_128(deployment: Deployment) -> Fact:
    """Some layers of the model attend to entries of 128 tokens, and requests may have more than 128 of them."""
    from vllm_graphfix.deployment import Fact

    found, missing = deployment.configured("compress_ratios")
    if missing is not None:
        return Fact(None, missing)
    if not any(isinstance(ratios, list) and 128 in ratios for ratios in found):
        return Fact(False, f"no layer of {deployment.model} has a compress_ratio of 128")
    length, missing = deployment.value("--max-model-len")
    if missing is not None:
        return Fact(None, missing)
    if length is not None and length.isdecimal() and int(length) <= _ALIGNMENT * 128:
        return Fact(False, f"--max-model-len {length[:20]}: all batches have rows of one width")
    return Fact(True, f"layers of {deployment.model} have a compress_ratio of 128")


FIX = Fix(
    number=14,
    name="c128a-stride",
    pr=51318,
    references=("PR 50004", "PR 52823"),
    summary="rows of DeepSeek V4's compressed attention are where graphs read them",
    releases="0.27.0 - 0.27.1",
    absent="0.14.1 - 0.19.1",
    symptom="DeepSeek V4 answers wrongly under full CUDA graphs as soon as two requests decode together, with a --max-model-len above 16384.",
    cause="Layers with a compress_ratio of 128 read, for each token, a row of slots in the cache. Rows are packed as closely as the longest request of the "
    "batch allows. A capture has the model's longest, and its graph reads rows as far apart as that; later batches are shorter. "
    "From the second row on it reads slots of other requests, or of earlier batches.",
    remedy="For decode batches that a graph may be replayed for, rows are as wide as in the capture. What is beyond a request's own entries is "
    "marked as such, and left out by its count, as before.",
    detect="One request at a time is answered rightly, two at once are not; with --enforce-eager both are.",
    concerns="DeepSeek V4 with layers of compress_ratio 128, a cudagraph mode with FULL, --max-model-len above 16384, as the model's own is.",
    workaround='--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', or --enforce-eager, or --max-model-len 16384.',
    removable="with vLLM 0.28.0",
    runner=None,
    reads=(_BACKEND, _BACKEND_BEFORE),
    modules=(_BACKEND_MODULE,),
    diagnose=diagnose,
    patches=patches,
    observers=observers,
    events=(ROWS_CLOSER,),
    fallback=FALLBACK,
    default=Mode.OBSERVE,
    applies=applies,
    flags=("--max-model-len=",),
    trial=lambda: trial(),  # noqa: PLW0108 - it stands below
)


def trial() -> Trial:
    from vllm_graphfix.deployment import Concern
    from vllm_graphfix.trial import Edit, Served, Trial

    width = r"max_compressed_tokens=active_topk_width"
    rows = r"global_decode_buffer\.view\(-1\)\[\n +: num_decode_tokens \* max_compressed_tokens\n +\]\.view\(num_decode_tokens, max_compressed_tokens\)"
    whole = "max_compressed_tokens=self.c128a_max_compressed"
    packed = "global_decode_buffer.view(-1)[:num_decode_tokens * max_compressed_tokens].view(num_decode_tokens, -1)"
    v4 = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "compress_ratios": [0, 4, 128],
        "head_dim": 512,
    }
    affects, does_not = Concern.CONCERNS, Concern.DOES_NOT
    return Trial(
        scenario=scenario,
        edits=(
            Edit("width of the longest request", "0.27.1", _BACKEND, width, whole, Verdict.FIXED),
            Edit(
                "width of the batch, at least 256",
                "0.27.0",
                _BACKEND,
                width,
                "max_compressed_tokens=max(active_topk_width, 256)",
                Verdict.UNRECOGNISED,
            ),
            Edit("rows are taken in another way", "0.27.1", _BACKEND, rows, packed, Verdict.UNRECOGNISED),
            Edit(
                "remedy cut out",
                "0.28.0",
                _BACKEND,
                r"global_decode_buffer\[:num_decode_tokens\]",
                packed,
                Verdict.FIXED,
            ),
            Edit(
                "remedy cut out, width too",
                "0.29.0",
                _BACKEND,
                r"global_decode_buffer\[:num_decode_tokens\]",
                packed,
                Verdict.UNRECOGNISED,
            ),
        ),
        served=(
            Served("0.27.0", "./model", affects, "compress_ratio of 128", model=v4),
            Served("0.27.1", "./model --max-model-len 131072", affects, "compress_ratio of 128", model=v4),
            Served("0.27.0", "./model --max-model-len 16384", does_not, "one width", model=v4),
            Served("0.27.0", "./model -cc.cudagraph_mode=PIECEWISE", does_not, "PIECEWISE", model=v4),
            Served("0.27.0", "./v4", does_not, "no layer of DeepseekV4ForCausalLM"),
            Served("0.27.0", "./llama", does_not, "no latent attention"),
            Served("0.27.0", "deepseek-ai/DeepSeek-V4", Concern.UNKNOWN, "config.json"),
        ),
    )


# -- the scenario: three requests decode in a graph of four, far shorter than the model allows

CAPTURED, BLOCK, RATIO = 4, 256, 128
"""Requests of the graph; tokens of a block, of which 128 make one entry."""
MAX_MODEL_LEN = 32768
HEADS, WIDTH = 2, 8
LENGTHS = (700, 1500, 400)
STEPS = 3


def scenario(*, hit: bool = True) -> Measurement:
    """Attention outputs. Not *hit*: a model whose longest request has rows as wide as any."""
    from itertools import chain

    from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
    from vllm_graphfix.verify.measurement import Measurement

    longest = MAX_MODEL_LEN if hit else MAX_MODEL_LEN // 2
    with _cpu_kernels():
        eager = list(chain.from_iterable(_decode(longest, in_graph=False)))
    with _cpu_kernels(), cpu_cuda_graphs():
        graphed = list(chain.from_iterable(_decode(longest, in_graph=True)))
    told = f"compressed attention of {len(LENGTHS)} requests padded to {CAPTURED} over {STEPS} decode steps"
    return Measurement(told, tuple(eager), tuple(graphed))


def _decode(longest: int, *, in_graph: bool) -> list[list[float]]:
    import torch
    from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

    random = torch.Generator().manual_seed(0)
    blocks_each = -(-(max(LENGTHS) + STEPS) // BLOCK)
    cache = torch.randn(1 + CAPTURED * blocks_each, BLOCK // RATIO, WIDTH, generator=random)
    table = torch.zeros(CAPTURED, blocks_each, dtype=torch.int32)
    layer: Any = object.__new__(DeepseekV4FlashMLAAttention)
    layer.__dict__.update(compress_ratio=RATIO, scale=1.0, attn_sink=None, swa_cache_layer=_namespace(kv_cache=cache))
    builder, persistent = _builder(longest, in_graph), _persistent()
    query, output = torch.zeros(CAPTURED, HEADS, WIDTH), torch.zeros(CAPTURED, HEADS, WIDTH)
    # The sliding window's own metadata, of which this layer has no part here.
    window = _namespace(
        num_decodes=CAPTURED, num_decode_tokens=CAPTURED, is_valid_token=torch.ones(CAPTURED, dtype=torch.bool),
        decode_swa_indices=None, decode_swa_lens=None, tile_sched_c128a=object(),
    )  # fmt: skip

    def attend(metadata: Any, rows: int) -> None:
        layer._forward_decode(query[:rows], cache, window, metadata, False, output[:rows])

    graph = None
    if in_graph:
        captured = builder.build(0, _batch(persistent, [1] * CAPTURED, CAPTURED, table, longest))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend(captured, CAPTURED)
    rows = len(LENGTHS)
    table[:rows] = torch.arange(1, 1 + rows * blocks_each).view(rows, blocks_each)
    found: list[list[float]] = []
    for step in range(STEPS):
        query[:rows] = torch.randn(rows, HEADS, WIDTH, generator=random)
        lengths = [length + step for length in LENGTHS]
        metadata = builder.build(0, _batch(persistent, lengths, CAPTURED if in_graph else rows, table, max(lengths)))
        if graph is None:
            attend(metadata, rows)
        else:
            graph.replay()
        found.append(output[:rows].flatten().tolist())
    return found


def _builder(longest: int, in_graph: bool) -> Any:
    """vLLM's own."""
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLAMetadataBuilder
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    config = _namespace(
        model_config=_namespace(max_model_len=longest, hf_config=_namespace(index_topk=8)),
        scheduler_config=_namespace(max_num_batched_tokens=2 * CAPTURED),
        parallel_config=_namespace(decode_context_parallel_size=1),
        compilation_config=_namespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE if in_graph else CUDAGraphMode.NONE,
            max_cudagraph_capture_size=CAPTURED,
        ),
        speculative_config=None,
    )
    spec = MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=WIDTH, dtype=torch.float32, compress_ratio=RATIO
    )
    return DeepseekV4FlashMLAMetadataBuilder(spec, ["model.layers.0.attn"], config, torch.device("cpu"))


def _persistent() -> Any:
    """A model runner's tensors for a batch."""
    import torch

    def integers(dtype: torch.dtype = torch.int32, size: int = CAPTURED) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    return _namespace(
        starts=integers(size=CAPTURED + 1),
        lengths=integers(),
        positions=integers(torch.int64),
        slots=integers(torch.int64),
    )


def _batch(persistent: Any, lengths: list[int], padded: int, table: Any, longest: int) -> Any:
    """Metadata of a decode of one token each, padded as both model runners do it: length 0, the null block, no slot."""
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    rows = len(lengths)
    known = torch.tensor([*lengths, *[0] * (CAPTURED - rows)])
    persistent.lengths.copy_(known)
    persistent.positions.copy_((known - 1).clamp(min=0))
    persistent.slots.copy_(torch.where(known > 0, 0, -1))
    persistent.starts.copy_(torch.arange(CAPTURED + 1).clamp(max=rows))
    return CommonAttentionMetadata(
        query_start_loc=persistent.starts[: padded + 1],
        query_start_loc_cpu=persistent.starts[: padded + 1].clone(),
        seq_lens=persistent.lengths[:padded],
        num_reqs=padded,
        num_actual_tokens=padded,
        max_query_len=1,
        max_seq_len=longest,
        block_table_tensor=table[:padded],
        slot_mapping=persistent.slots[:padded],
        positions=persistent.positions[:padded],
    )


@contextlib.contextmanager
def _cpu_kernels() -> Iterator[None]:
    """vLLM's two kernels of the builder run on the CPU; FlashMLA has a stand-in."""
    from unittest import mock

    import torch
    from vllm.models.deepseek_v4 import sparse_mla
    from vllm.models.deepseek_v4.nvidia import flashmla
    from vllm.v1.attention import backend
    from vllm.v1.attention.backends.mla import compressor_utils

    from vllm_graphfix.verify.double.triton_kernels import cpu_triton_kernels

    with (
        cpu_triton_kernels(sparse_mla, compressor_utils),
        mock.patch.object(backend, "np_to_pinned_tensor", torch.from_numpy),  # pinned memory needs CUDA
        mock.patch.object(flashmla, "flash_mla_with_kvcache", _attention_stand_in),
    ):
        yield


def _attention_stand_in(
    *, q: Any, extra_k_cache: Any, extra_indices_in_kvcache: Any, extra_topk_length: Any, out: Any, **_: object
) -> tuple[Any, None]:
    """Attends to the compressed entries alone: q and out (tokens, 1, heads, width), indices (tokens, 1, entries), of which so many count."""
    import torch

    indices = extra_indices_in_kvcache.squeeze(1)
    counts = torch.arange(indices.shape[1]) < extra_topk_length.unsqueeze(1)
    keys = extra_k_cache.flatten(0, 2)[indices.clamp(min=0).long()]
    scores = torch.einsum("thd,ted->the", q.squeeze(1), keys).exp() * counts.unsqueeze(1)
    weights = scores / scores.sum(-1, keepdim=True).clamp(min=1e-9)
    out.copy_(torch.einsum("the,ted->thd", weights, keys).unsqueeze(1))
    return out, None


def _namespace(**attributes: Any) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(**attributes)
