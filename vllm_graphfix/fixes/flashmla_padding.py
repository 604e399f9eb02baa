"""`flashmla-padding`: padded rows of dense fp8 FlashMLA get a length and a block that exist (issue 33664)."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import About

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_BACKEND = "vllm/v1/attention/backends/mla/flashmla.py"
_BACKEND_MODULE = "vllm.v1.attention.backends.mla.flashmla"
_OPERATORS = "vllm/v1/attention/ops/flashmla.py"
_PARAMETERS = (
    "self, block_table_tensor, seq_lens_device, max_seq_len, query_start_loc_cpu, query_start_loc_device, "
    "num_decode_tokens, dcp_tot_seq_lens_device"
)
_NULL_BLOCK = 0
"""The block that vLLM's block pool keeps for itself and never gives to a request."""

_TABLES = ("block_table_gid_0 = _get_block_table(0)", "cm.block_table_tensor = _get_block_table(kv_cache_gid)")
_KERNELS = ("flash_mla_with_kvcache_fp8", "flash_mla_with_kvcache")
_WIDTH = "attn_metadata.decode.block_table.shape"

PADDED_ROWS_GIVEN = Event(
    "padded-rows-given",
    "A batch with padded rows reached dense fp8 FlashMLA: on stock the kernel gets length 0 and block -1 for them.",
)


def diagnose(source: Source) -> Diagnosis:
    build_decode = source.function(_BACKEND, "FlashMLAMetadataBuilder._build_decode")
    if not any(source.says(path, "FlashMLASchedMeta") for path in (_BACKEND, _OPERATORS)):
        return Diagnosis(Verdict.ABSENT, "no dense fp8 FlashMLA")
    build = source.function(_RUNNER, "GPUModelRunner._build_attention_metadata")
    if source.read(_RUNNER) is None:
        return Diagnosis(Verdict.ABSENT, "no model runner V1")
    if build is None or build_decode is None:
        path = _RUNNER if build is None else _BACKEND
        return Diagnosis.unrecognised("block tables are padded in a place", path)
    # Made in one of two ways, padded, returned.
    padded = build.only("blk_table_tensor[num_reqs:num_reqs_padded].fill_(...)")
    returned = build.only("return blk_table_tensor")
    if (
        padded
        and returned
        and build.mentions(blk_table_tensor=4)
        and build.in_one_block(padded, returned)
        and not build.sets("num_reqs")
    ):
        null_block = build.find("blk_table_tensor[num_reqs:num_reqs_padded].fill_(NULL_BLOCK_ID)")
        if null_block and build.mentions(NULL_BLOCK_ID=1) and not _module_assigns(source, "NULL_BLOCK_ID"):
            return Diagnosis(Verdict.FIXED, "block tables are padded with the null block", build.at(padded))
        minus_one = build.find("blk_table_tensor[num_reqs:num_reqs_padded].fill_(-1)")
        if (
            minus_one
            and build_decode.takes == _PARAMETERS
            and _knows_fp8(source)
            and _followed_as_known(source, build, build_decode)
        ):
            return Diagnosis(
                Verdict.AFFECTED,
                "block tables are padded with -1, which dense fp8 FlashMLA follows",
                build.at(padded),
                "minus-one",
            )
    return Diagnosis.unrecognised("block tables are padded in a way", build)


def _followed_as_known(source: Source, build: Function, build_decode: Function) -> bool:
    """Whether block tables go as they are from where they are padded to the kernel."""
    attention = source.function(_BACKEND, "FlashMLAImpl")
    operator = source.function(_OPERATORS, "flash_mla_with_kvcache_fp8")
    return (
        attention is not None
        and operator is not None
        and build.confines("_get_block_table", *_TABLES)
        and build.confines(
            "block_table_gid_0", _TABLES[0], "CommonAttentionMetadata(*..., block_table_tensor=block_table_gid_0)"
        )
        and build_decode.confines(
            "block_table_tensor", "return FlashMLADecodeMetadata(*..., block_table=block_table_tensor)"
        )
        and attention.find("flash_mla_with_kvcache_fp8(*..., block_table=attn_metadata.decode.block_table)") != []
        and attention.confines(
            "block_table",
            *(f"{kernel}(*..., block_table=attn_metadata.decode.block_table)" for kernel in _KERNELS),
            _WIDTH,
        )
        and operator.confines(
            "block_table", "torch.ops._flashmla_extension_C.fwd_kvcache_mla_fp8(..., ..., ..., ..., block_table, *...)"
        )
    )


def _knows_fp8(source: Source) -> bool:
    """Whether a builder says of itself that its cache is fp8, in the way that the patch asks."""
    init = source.function(_BACKEND, "FlashMLAMetadataBuilder.__init__")
    flag = init and init.only("self.is_fp8_kvcache = ...")
    return flag is not None and not (init and init.find("self.is_fp8_kvcache = not ..."))


def _module_assigns(source: Source, name: str) -> bool:
    """Whether the runner's module gives *name* a value of its own."""
    return re.search(rf"^{name}\b[^=\n]*=".encode(), source.read(_RUNNER) or b"", re.MULTILINE) is not None


def _padded_rows_that_exist(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `_build_decode`, where rows that schedule no token then have length 1 in the null block; fp8 only.

    In place, in the runner's buffers: graphs recorded their addresses, and the runner fills the padding anew for every
    batch. `block_table_tensor` is (num_reqs, max_blocks) int32, `seq_lens_device` (num_reqs,) int32,
    `query_start_loc_cpu` (num_reqs + 1,) int32 on the CPU.

    The rows of an idle rank's dummy batch are not counted: only the device knows their lengths.
    """
    padded_batches, corrects = activity.counter(PADDED_ROWS_GIVEN), activity.corrects

    @functools.wraps(stock)
    def _build_decode(
        self: Any,
        block_table_tensor: Any,
        seq_lens_device: Any,
        max_seq_len: Any,
        query_start_loc_cpu: Any,
        query_start_loc_device: Any,
        num_decode_tokens: Any,
        dcp_tot_seq_lens_device: Any,
    ) -> Any:
        try:
            if self.is_fp8_kvcache:
                starts = query_start_loc_cpu.numpy()
                if _has_padded_rows(starts):
                    if corrects:
                        real_rows = int(starts.searchsorted(starts[-1]))
                        block_table_tensor[real_rows:].fill_(_NULL_BLOCK)
                        seq_lens_device[real_rows:].fill_(1)
                    padded_batches.count += 1
                elif corrects and dcp_tot_seq_lens_device is None:
                    # The dummy batch of an idle data-parallel rank has rows of length 0 that its query starts do not
                    # show. With decode context parallelism a real row may have length 0 on a rank; it keeps it.
                    seq_lens_device.clamp_(min=1)
        except Exception as error:
            activity.failed(error)
        return stock(
            self,
            block_table_tensor,
            seq_lens_device,
            max_seq_len,
            query_start_loc_cpu,
            query_start_loc_device,
            num_decode_tokens,
            dcp_tot_seq_lens_device,
        )

    return _build_decode


def _has_padded_rows(starts: Any) -> bool:
    """Whether the last row schedules no token; *starts* is `query_start_loc_cpu` as an array."""
    return bool(starts[-1] == starts[-2])


_TARGET = "FlashMLAMetadataBuilder._build_decode"


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_BACKEND_MODULE, _TARGET, _padded_rows_that_exist),)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs

    return (needs.FP8_CACHE, needs.DENSE_FLASHMLA, needs.FULL_GRAPHS)


FIX = Fix(
    number=6,
    name="flashmla-padding",
    runner=None,
    reads=(_RUNNER, _BACKEND, _OPERATORS),
    modules=(_BACKEND_MODULE,),
    diagnose=diagnose,
    patches=patches,
    events=(PADDED_ROWS_GIVEN,),
    needs=needs,
    ground="answers",
)

ABOUT = About(
    pr=None,
    references=("issue 33664", "issue 33638", "issue 40435", "PR 35969", "PR 35431"),
    summary="padded rows of fp8 FlashMLA point to memory that exists",
    releases="0.15.0 - 0.19.1",
    absent="0.14.1",
    seen="illegal memory access under concurrency",
    first_test="`--kv-cache-dtype auto`: gone?",
    symptom="Illegal memory access under concurrency with --kv-cache-dtype fp8, FlashMLA and CUDA graphs (issue "
    "40435: 25-56 % of requests succeed).",
    cause="The model runner pads a batch with sequence lengths of 0 and block-table entries of -1. The dense fp8 "
    "kernel computes a negative cache offset from them; whether that faults depends on what lies there.",
    remedy="Before planner and kernel see them, padded rows get length 1 and the null block. Real rows and bf16 are "
    "untouched.",
    detect="compute-sanitizer on a short run with a batch size between two capture sizes; or CUDA errors that vanish "
    "with --kv-cache-dtype auto.",
    workaround='--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', or --kv-cache-dtype auto.',
    removable="with vLLM 0.20.0",
    in_caches="nothing known: only padded rows read wrong memory, and their output is not used. The crash ends the "
    "engine while entries are being written",
    how_sure="whether a store keeps a half-written entry depends on the store",
)
