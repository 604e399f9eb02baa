"""`c128a-stride`: rows of DeepSeek V4's compressed attention stay where graphs read them (PR 51318).

They stay there however long a batch is.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import About

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_BACKEND = "vllm/models/deepseek_v4/sparse_mla.py"
_UTILS = "vllm/v1/attention/backends/utils.py"
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
    "A decode batch reached DeepSeek V4's compressed attention whose rows stock packs more closely than the capture "
    "did: from the second row on, graphs read another request's.",
)


def diagnose(source: Source) -> Diagnosis:
    path = _BACKEND if source.read(_BACKEND) is not None else _BACKEND_BEFORE
    if not source.says(path, _ROWS):
        return Diagnosis(Verdict.ABSENT, "no attention over entries of 128 tokens each, as in DeepSeek V4")
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
                "rows are packed as closely as the longest request of the batch allows, and graphs read them where "
                "the capture had them",
                build.at(width),
                "packed-by-length",
            )
    return Diagnosis.unrecognised("entries for tokens are laid out in a way", build or path)


def _at_the_buffers_stride(rows: Function) -> str | None:
    """Where decode rows are taken from their buffer as they lie there, and in no other way; or None."""
    taken = rows.find("global_decode = global_decode_buffer[:num_decode_tokens]")
    narrower = rows.find("global_decode = global_decode_buffer[:num_decode_tokens, :max_compressed_tokens]")
    if len(rows.assignments("global_decode", "...")) != len(taken + narrower) or not taken + narrower:
        return None
    return rows.at((taken + narrower)[0]) if rows.find("global_decode_buffer.stride(0)") else None


def _rows_as_wide_as_their_buffer(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `_build_c128a_metadata(cm, req_id_per_token)` so that all rows have one width.

    This holds where a full graph is captured or may be replayed. Stock takes the width from `max_seq_len`. Entries
    beyond a request's own are -1, and its count leaves them out.
    """
    closer_rows, corrects = activity.counter(ROWS_CLOSER), activity.corrects

    @functools.wraps(stock)
    def _build_c128a_metadata(self: Any, cm: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if _rows_are_closer(self, cm):
                if corrects:
                    # A copy: other builders, and this one's metadata, have the length of the batch.
                    longest = object.__new__(type(cm))
                    longest.__dict__.update(cm.__dict__, max_seq_len=self.c128a_max_compressed * self.compress_ratio)
                    cm = longest
                closer_rows.count += 1
        except Exception as error:
            activity.failed(error)
        return stock(self, cm, *args, **kwargs)

    return _build_c128a_metadata


def _rows_are_closer(builder: Any, cm: Any) -> bool:
    """Whether the second row of this decode batch is nearer to the first than it is in their buffer.

    Only batches of a size that has a graph count.
    """
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


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    return (
        needs.SPARSE_MLA,
        Need("DeepSeek V4", lambda deployment, _: deployment.compressed_by(128), "layers with a compress_ratio of 128"),
        Need("--max-model-len above 16384", _rows_differ, "the model's own is", ("--max-model-len=",)),
        needs.FULL_GRAPHS,
    )


def _rows_differ(deployment: Deployment, _: str) -> Fact:
    """Requests may have more than 128 entries of 128 tokens each."""
    from vllm_graphfix.deployment import Fact

    length, missing = deployment.value("--max-model-len")
    if missing is not None:
        return Fact(None, missing)
    if length is not None and length.isdecimal() and int(length) <= _ALIGNMENT * 128:
        return Fact(False, f"--max-model-len {length[:20]}: all batches have rows of one width")
    return Fact(True, "requests may be longer than 16384 tokens (--max-model-len)")


FIX = Fix(
    number=14,
    name="c128a-stride",
    runner=None,
    reads=(_BACKEND, _BACKEND_BEFORE, _UTILS),
    modules=(_BACKEND_MODULE,),
    diagnose=diagnose,
    patches=patches,
    events=(ROWS_CLOSER,),
    needs=needs,
    ground="answers",
    evidence=(
        *(f"{_BACKEND}::DeepseekV4FlashMLAMetadataBuilder.{name}" for name in ("__init__", "build")),
        f"{_UTILS}::split_decodes_and_prefills",
    ),
)

ABOUT = About(
    pr=51318,
    references=("PR 50004", "PR 52823"),
    summary="rows of DeepSeek V4's compressed attention stay where graphs read them",
    releases="0.27.0 - 0.27.1",
    absent="0.14.1 - 0.19.1",
    seen="wrong answers as soon as two requests run at once: they read each other's context",
    first_test="one request at a time: right?",
    symptom="With full CUDA graphs and a --max-model-len above 16384, DeepSeek V4 gives wrong answers as soon as two "
    "requests decode together.",
    cause="Layers with a compress_ratio of 128 read, for each token, a row of slots in the cache. Rows are packed as "
    "closely as the longest request of the batch allows. A capture assumes the longest request that the model allows, "
    "and its graph reads rows that far apart; later batches are shorter. From the second row on, it reads slots of "
    "other requests, or of earlier batches.",
    remedy="For decode batches that a graph may be replayed for, rows are as wide as in the capture. What is beyond a "
    "request's own entries is marked as such, and left out by its count, as before.",
    detect="One request at a time gets a correct answer, two at once do not; with --enforce-eager both do.",
    workaround='--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', or --enforce-eager, or --max-model-len '
    "16384.",
    removable="with vLLM 0.28.0",
    in_caches="wrong entries of generated tokens, of every request but the first of a batch: each layer's entries are "
    "made of what the layers before attended to, which may be other requests'. Prompts are computed without such "
    "graphs and are right, unless they continue from such entries",
    how_sure="that rows are mixed up was shown; what reaches a store follows from the code",
)
