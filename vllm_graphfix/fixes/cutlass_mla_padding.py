"""`cutlass-mla-padding`: rows of length 0 are zeros, not memory as it was, in Cutlass MLA's decode (PR 37442)."""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import NEWEST, About
from vllm_graphfix.fixes._empty_rows import counts_empty_rows

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_BACKEND = "vllm/v1/attention/backends/mla/cutlass_mla.py"
_BACKEND_MODULE = "vllm.v1.attention.backends.mla.cutlass_mla"
_KERNELS = "vllm/_custom_ops.py"
_KERNELS_MODULE = "vllm._custom_ops"
_COMMON = "vllm/model_executor/layers/attention/mla_attention.py"
_COMMON_MODULE = "vllm.model_executor.layers.attention.mla_attention"
_COMMON_BEFORE = "vllm/v1/attention/backends/mla/common.py"
_COMMON_BEFORE_MODULE = "vllm.v1.attention.backends.mla.common"
_UTILS = "vllm/v1/attention/backends/utils.py"
_BUILDER = "CutlassMLAMetadataBuilder"
_LAUNCH = "sm100_cutlass_mla_decode"
_LAUNCH_PARAMETERS = (
    "out, lse, q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, workspace, scale, num_kv_splits"
)
_LAUNCHED = f"torch.ops._C.{_LAUNCH}({_LAUNCH_PARAMETERS})"
_CALLED = f"ops.{_LAUNCH}({_LAUNCH_PARAMETERS.replace(', scale', ', sm_scale')})"
_FRESH = "out = q_nope.new_empty((B_q, MAX_HEADS, D_latent), dtype=dtype)"
_HEADS_TAKEN = "out = out[:, :H]"
_ZEROS = (
    "out = q_nope.new_zeros((B_q, MAX_HEADS, D_latent), dtype=dtype)",
    "self._decode_out = q_nope.new_zeros((B_q, MAX_HEADS, D_latent), dtype=dtype)",
)
_CLEARED = (
    "out.masked_fill_(..., 0)",
    "out.masked_fill_(..., 0.0)",
    "out = out.masked_fill(..., 0)",
    "out = out.masked_fill(..., 0.0)",
    "out = torch.where(..., out, 0)",
    "out = torch.where(..., 0, out)",
    "out[...] = 0",
)
_FULL = ("ALWAYS", "UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE")

EMPTY_ROWS_GIVEN = Event(
    "rows-left-as-they-were",
    "A batch with padded rows reached Cutlass MLA's decode: on stock these rows are as their memory was before, which "
    "may hold NaN.",
)
_COUNT = counts_empty_rows(EMPTY_ROWS_GIVEN, _BUILDER, _BACKEND_MODULE)


def diagnose(source: Source) -> Diagnosis:
    if source.read(_BACKEND) is None:
        return Diagnosis(Verdict.ABSENT, "no Cutlass MLA")
    common = _COMMON if source.says(_COMMON, "MLACommonMetadataBuilder") else _COMMON_BEFORE
    builder = source.function(_BACKEND, _BUILDER)
    decode = source.function(_BACKEND, f"CutlassMLAImpl._{_LAUNCH}")
    launch = source.function(_KERNELS, _LAUNCH)
    build = source.function(common, "MLACommonMetadataBuilder.build")
    if builder is None or decode is None or launch is None or build is None:
        return Diagnosis.unrecognised("Cutlass MLA decodes in a way", decode or _BACKEND)
    builds_otherwise = any(source.function(_BACKEND, f"{_BUILDER}.{name}") for name in ("build", "_build_decode"))
    allowed = any(builder.find(f"AttentionCGSupport.{name}") for name in _FULL)
    if not allowed and builder.find("AttentionCGSupport.NEVER"):
        return Diagnosis(
            Verdict.FIXED, "Cutlass MLA allows no full graphs, without which no row is padded", builder.where
        )
    called = decode.only(_CALLED)
    remedy = _zeroed(decode)
    if remedy is not None:
        return Diagnosis(Verdict.FIXED, "rows that the kernel leaves out are zeros, or what a request left", remedy)
    fresh = decode.only(_FRESH)
    if (
        fresh is not None
        and called is not None
        and decode.in_one_block(fresh, called)
        and decode.confines("out", _FRESH, _CALLED, _HEADS_TAKEN, "return out, lse")
        and launch.takes == _LAUNCH_PARAMETERS
        and len(launch.find(_LAUNCHED)) == 1
        and launch.confines("out", _LAUNCHED, "return out")
        and build.takes == "self, common_prefix_len, common_attn_metadata, fast_build"
        and not builds_otherwise
        and allowed
    ):
        return Diagnosis(
            Verdict.AFFECTED,
            "full graphs are allowed, their padded rows have length 0, and the kernel is given memory as it is",
            decode.at(fresh),
            "fresh-output" if common == _COMMON else "fresh-output-of-old",
        )
    return Diagnosis.unrecognised("Cutlass MLA decodes in a way", decode)


def _zeroed(decode: Function) -> str | None:
    """The place where the kernel is given zeros to write to, or empty rows are cleared after it, if there is one."""
    called = decode.only(_CALLED)
    made = next((made for made in map(decode.only, _ZEROS) if made is not None), None)
    if made is not None and not decode.find("q_nope.new_empty(...)"):
        return decode.at(made)
    for cleared in (cleared for pattern in _CLEARED for cleared in decode.find(pattern)):
        if called is not None and _goes_by_length(cleared) and decode.in_one_block(called, cleared):
            return decode.at(cleared)
    return None


def _goes_by_length(cleared: ast.stmt | ast.expr) -> bool:
    """Whether it asks how long rows are; what it clears may be other heads, else."""
    asked = (node for node in ast.walk(cleared) if isinstance(node, ast.Compare))
    return any(isinstance(node, ast.Name) and node.id == "seq_lens" for each in asked for node in ast.walk(each))


def _zeros_for_empty_rows(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `sm100_cutlass_mla_decode`, which launches the kernel: rows whose length is below 1 become zeros.

    `out` is (rows, heads, values) and `lse` (rows, heads), or empty where nobody asks for it; `seq_lens` (rows,) int32,
    all on the device. Their log-sum-exp becomes -inf, which the merge of ranks takes as "no tokens". A graph records
    both, and each replay goes by the lengths of its own batch.
    """

    @functools.wraps(stock)
    def sm100_cutlass_mla_decode(
        out: Any, lse: Any, q_nope: Any, q_pe: Any, kv_c_and_k_pe_cache: Any, seq_lens: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = stock(out, lse, q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, *args, **kwargs)
        try:
            # By the number of rows, so that other than one length a row is an error here, and nothing is written.
            empty = (seq_lens < 1).view(out.shape[0], 1)
            if lse.numel():
                lse.masked_fill_(empty, float("-inf"))
            out.masked_fill_(empty.unsqueeze(2), 0.0)
        except Exception as error:
            activity.failed(error)
        return result

    return sm100_cutlass_mla_decode


def patches(shape: str) -> tuple[Patch, ...]:
    common = _COMMON_MODULE if shape == "fresh-output" else _COMMON_BEFORE_MODULE
    return (
        Patch(_KERNELS_MODULE, _LAUNCH, _zeros_for_empty_rows, observes=False),
        Patch(common, "MLACommonMetadataBuilder.build", _COUNT),
    )


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need, unseen

    attention = "latent attention on a Blackwell of compute capability 10"
    return (
        Need("Cutlass MLA", lambda deployment, _: deployment.cutlass_mla(), attention),
        needs.FULL_GRAPHS,
        unseen("a scale or a routing that a whole batch shares", "such as NVFP4 with experts"),
    )


FIX = Fix(
    number=21,
    name="cutlass-mla-padding",
    runner=None,
    reads=(_BACKEND, _KERNELS, _COMMON, _COMMON_BEFORE, _UTILS),
    modules=(_KERNELS_MODULE, _COMMON_MODULE, _COMMON_BEFORE_MODULE),
    diagnose=diagnose,
    patches=patches,
    events=(EMPTY_ROWS_GIVEN,),
    needs=needs,
    evidence=(
        *(f"{_BACKEND}::CutlassMLAImpl.{name}" for name in ("__init__", "forward_mqa", "_forward_decode")),
        *(
            f"{path}::MLACommonMetadataBuilder.{name}"
            for path in (_COMMON, _COMMON_BEFORE)
            for name in ("build", "_build_decode")
        ),
        f"{_UTILS}::split_decodes_and_prefills",
    ),
)

ABOUT = About(
    pr=None,
    references=("PR 37442", "PR 38359", "issue 40047", "issue 42426"),
    summary="padded rows of Cutlass MLA are zeros, not memory as it was",
    releases=f"0.14.1 - 0.17.1, 0.20.0 - {NEWEST}",
    seen="NaN in all answers of a batch on Blackwell, at sizes between two capture sizes",
    first_test="`--enforce-eager`: gone?",
    symptom="NaN that spreads to all requests of a batch whose size lies between two capture sizes, now and then (PR "
    "37442: DeepSeek-R1 NVFP4 on GB200).",
    cause="Padded rows of a full graph have length 0. As reported, the kernel writes nothing for such a row, and its "
    "output is memory that vLLM has not cleared, so that the row is what others left there, NaN included. Code that "
    "quantises activations with one scale for the whole batch, or routes by it, may then spread it.",
    remedy="Rows of length 0 are filled with zeros after the kernel, and their log-sum-exp with -inf, in the graph. "
    "Upstream gave the kernel zeros once, in 0.18.0 - 0.19.1, and took that back for its cost and because it did not "
    "help enough.",
    detect="Wrong output, or NaN log-probabilities, only at batch sizes between two capture sizes, on Blackwell with "
    "CUTLASS_MLA in the log; with --enforce-eager both are right.",
    workaround="--enforce-eager, or capture sizes that your batches have (-cc.cudagraph_capture_sizes).",
    removable=f"not yet: no release from 0.20.0 to {NEWEST} has a remedy",
    in_caches="NaN in entries of generated tokens of whole batches, if the NaN of a padded row reached real rows; "
    "otherwise nothing",
    how_sure="as reported; no Blackwell was there",
)
