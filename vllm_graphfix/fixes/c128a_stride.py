"""`c128a-stride`: rows of DeepSeek V4's compressed attention stay where graphs read them, in any batch (PR 51318)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import correct_arguments, fix
from vllm_graphfix.fix import Diagnosis, Event, Slice, Verdict
from vllm_graphfix.fixes._premises import AS_BUILT, BUILDERS_STAY

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_BACKEND = "vllm/models/deepseek_v4/sparse_mla.py"
_BACKEND_MODULE = "vllm.models.deepseek_v4.sparse_mla"
_BACKEND_BEFORE = "vllm/v1/attention/backends/mla/flashmla_sparse.py"
"""The file up to 0.22.1."""
_BUILDERS = (
    "DeepseekV4FlashMLAMetadataBuilder",
    "DeepseekV4SparseMLAMetadataBuilder",
    "FlashMLASparseMetadataBuilder",
)
_METHOD = "_build_c128a_metadata"
_TARGET = f"{_BUILDERS[0]}.{_METHOD}"
_ROWS = "build_c128a_topk_metadata"
_ALIGNMENT = 128
"""Entries; rows have a multiple."""
_WIDTH = (
    "active_topk_width = min(max(triton.next_power_of_2(max(cm.max_seq_len // self.compress_ratio, 1)), "
    "_C128A_TOPK_ALIGNMENT), self.c128a_max_compressed)"
)
_PACKED = (
    "global_decode = global_decode_buffer.view(-1)[:num_decode_tokens * max_compressed_tokens]"
    ".view(num_decode_tokens, max_compressed_tokens)"
)
_AS_THEY_LIE = (
    "global_decode = global_decode_buffer[:num_decode_tokens]",
    "global_decode = global_decode_buffer[:num_decode_tokens, :max_compressed_tokens]",
)
_CHECKED = "assert global_decode.stride(0) == global_decode_buffer.stride(0)"
_BUILT = tuple(
    f"(global_decode, decode_lens, prefill_local) = {_ROWS}(*..., max_compressed_tokens={width})"
    for width in ("active_topk_width", "self.c128a_max_compressed")
)

ROWS_CLOSER = Event(
    "rows-closer",
    "A decode batch reached DeepSeek V4's compressed attention whose rows stock packs more closely than the capture "
    "did: from the second row on, graphs read another request's.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the width of rows that the builder chooses, and the layout of rows in their buffer."""
    path = _BACKEND if source.read(_BACKEND) is not None else _BACKEND_BEFORE
    if not source.contains_word(path, _ROWS):
        return Diagnosis.absent("no attention over entries of 128 tokens each, as in DeepSeek V4")
    builds = (source.function(path, f"{builder}.{_METHOD}") for builder in _BUILDERS)
    build, rows = next(filter(None, builds), None), source.function(path, _ROWS)
    if build is not None and rows is not None:
        remedy = _at_the_buffers_stride(rows)
        if remedy is not None:
            return Diagnosis.fixed("rows are as far apart as in their buffer, however many entries they have", remedy)
        if build.call_has_keyword(f"{_ROWS}(...)", "max_compressed_tokens=self.c128a_max_compressed"):
            return Diagnosis.fixed("each row has room for the longest request", build.where)
        width = build.find_unique(_WIDTH)
        by_width = build.call_has_keyword(f"{_ROWS}(...)", "max_compressed_tokens=active_topk_width")
        # The width depends on the batch's unchanged length, and is the only one.
        by_length = len(build.find("cm.max_seq_len")) == build.assigned(
            "active_topk_width"
        ) == 1 and not build.reassigns("cm")
        if width and by_width and by_length and rows.find_unique(_PACKED) and build.qualname == _TARGET:
            return Diagnosis.affected(
                "rows are packed as closely as the longest request of the batch allows, and graphs read them where "
                "the capture had them",
                build.at(width),
                "packed-by-length",
            )
    return Diagnosis.unrecognised("entries for tokens are laid out in a way", build or path)


def _at_the_buffers_stride(rows: Function) -> str | None:
    """Return the place where decode rows are taken from their buffer at its own stride, if they are in no other way."""
    taken = rows.find(*_AS_THEY_LIE)
    if not taken or rows.assigned("global_decode") != len(taken) or rows.reassigns("global_decode_buffer"):
        return None
    return rows.at(taken[0]) if rows.find("global_decode_buffer.stride(0)") else None


@correct_arguments(_BACKEND_MODULE, _TARGET, ROWS_CLOSER)
def with_rows_as_wide_as_their_buffer(self: Any, cm: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any] | None:
    """Replace `cm` by a copy whose `max_seq_len` gives rows the capture's width; None where they have it, or no graph.

    Entries beyond a request's own are -1, and its count excludes them.
    """
    if not _are_rows_closer(self, cm):
        return None
    # A copy: other builders, and this one's metadata, need the length of the batch.
    longest = object.__new__(type(cm))
    longest.__dict__.update(cm.__dict__, max_seq_len=self.c128a_max_compressed * self.compress_ratio)
    return self, longest


def _are_rows_closer(builder: Any, cm: Any) -> bool:
    """Tell if the second row of this decode batch is nearer to the first than it is in their buffer.

    Only for batches of a size that has a graph. A builder made without its `__init__` has no configuration, and no
    graphs.
    """
    config = getattr(builder, "vllm_config", None)
    if config is None or cm.num_actual_tokens < 2 or cm.max_query_len > builder.reorder_batch_threshold:
        return False
    entries = max(cm.max_seq_len // builder.compress_ratio, _ALIGNMENT)
    if 1 << (entries - 1).bit_length() >= builder.c128a_max_compressed:  # stock's width: the next power of two
        return False
    graphs = config.compilation_config
    return bool(
        graphs.cudagraph_mode.has_full_cudagraphs() and cm.num_actual_tokens <= graphs.max_cudagraph_capture_size
    )


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    return (
        needs.SPARSE_MLA,
        Need(
            "DeepSeek V4",
            lambda deployment, _: deployment.compressed_by(128),
            "layers with a compress_ratio of 128",
            clause="the model is DeepSeek V4",
        ),
        Need(
            "--max-model-len above 16384",
            _rows_differ,
            "the model's own is",
            ("--max-model-len=",),
            clause="--max-model-len is above 16384",
        ),
        needs.FULL_GRAPHS,
    )


def _rows_differ(deployment: Deployment, _: str) -> Fact:
    """Tell if requests may have more than 128 entries of 128 tokens each."""
    from vllm_graphfix.deployment import Fact

    length, missing = deployment.value("--max-model-len")
    if missing is not None:
        return Fact(None, missing)
    if length is not None and length.isdecimal() and int(length) <= _ALIGNMENT * 128:
        return Fact(False, f"--max-model-len {length[:20]}: all batches have rows of one width")
    return Fact(True, "requests may be longer than 16384 tokens (--max-model-len)")


FIX = fix(
    "c128a-stride",
    diagnose=diagnose,
    surroundings=(
        # The layout of rows in their buffer, their width, and every other use of them
        *(Slice(path, _ROWS, "global_decode") for path in (_BACKEND, _BACKEND_BEFORE)),
        *(
            Slice(
                _BACKEND_BEFORE if builder == "FlashMLASparseMetadataBuilder" else _BACKEND,
                f"{builder}.{_METHOD}",
                f"{_ROWS} global_decode split_decodes_and_prefills",
            )
            for builder in _BUILDERS
        ),
        *(
            Slice(_BACKEND, f"{backend}.get_builder_cls")
            for backend in ("DeepseekV4FlashMLABackend", "DeepseekV4SparseMLABackend")
        ),
        # The batches concerned, and the numbers that the correction reads
        Slice(_BACKEND, f"{_BUILDERS[0]}.build", f"{_METHOD} max_seq_len"),
        Slice(_BACKEND, f"{_BUILDERS[0]}.__init__", "c128a_max_compressed", Verdict.AFFECTED),
        Slice(_BACKEND, "", "_C128A_TOPK_ALIGNMENT", Verdict.AFFECTED),
        *BUILDERS_STAY,
    ),
    recognised=(_WIDTH, _PACKED, *_AS_THEY_LIE, *_BUILT, _CHECKED),
    distant_code=AS_BUILT,
    corrections=(with_rows_as_wide_as_their_buffer,),
    events=(ROWS_CLOSER,),
    needs=needs,
    default_rationale="answers",
)
