"""`flashmla-padding`: padded rows of dense fp8 FlashMLA get a length and a block that exist (issue 33664)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction, Verdict
from vllm_graphfix.fixes._empty_rows import COMMON, COMMON_BEFORE, NOT_OF_DECODES
from vllm_graphfix.fixes._premises import TAKEN_FIRST

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source

_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_UTILS = "vllm/v1/attention/backends/utils.py"
_BACKEND = "vllm/v1/attention/backends/mla/flashmla.py"
_BACKEND_MODULE = "vllm.v1.attention.backends.mla.flashmla"
_OPERATORS = "vllm/v1/attention/ops/flashmla.py"
_NULL_BLOCK = 0
"""The block that vLLM's block pool keeps for itself and never gives to a request."""
_MINUS_ONE = "blk_table_tensor[num_reqs:num_reqs_padded].fill_(-1)"
_NULL = "blk_table_tensor[num_reqs:num_reqs_padded].fill_(NULL_BLOCK_ID)"
_RETURNED = "return blk_table_tensor"
_TO_DRAFTERS = (
    "self.drafter.set_per_group_block_table(kv_cache_gid, cm.block_table_tensor)",
    "self.drafter.set_per_group_attn_metadata(kv_cache_gid, cm.block_table_tensor, cm.slot_mapping)",
)
"""Drafters with attention of several kinds store the padded tables of each."""

PADDED_BATCH_DECODED = Event(
    "padded-rows-given",
    "A batch with padded rows reached dense fp8 FlashMLA: on stock the kernel gets length 0 and block -1 for them.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the block number by which the runner pads block tables."""
    build_decode = source.function(_BACKEND, "FlashMLAMetadataBuilder._build_decode")
    if not any(source.contains_word(path, "FlashMLASchedMeta") for path in (_BACKEND, _OPERATORS)):
        return Diagnosis.absent("no dense fp8 FlashMLA")
    build = source.function(_RUNNER, "GPUModelRunner._build_attention_metadata")
    if source.read(_RUNNER) is None:
        return Diagnosis.absent("no model runner V1")
    if build is None or build_decode is None:
        path = _RUNNER if build is None else _BACKEND
        return Diagnosis.unrecognised("block tables are padded in a place", path)
    table = build.inner("_get_block_table")
    minus_one, null = build.find(_MINUS_ONE), build.find(_NULL)
    # One of the two runs on every path, and `num_reqs` has not become the padded number.
    if (
        table is not None
        and len(minus_one + null) == 1
        and table.always(_RETURNED)
        and table.in_one_block(*minus_one, *null, *table.find_each(_RETURNED))
        and not build.assigned("num_reqs")
    ):
        if minus_one:
            return Diagnosis.affected(
                "block tables are padded with -1, which dense fp8 FlashMLA follows", build.at(minus_one[0]), "minus-one"
            )
        runner = source.module(_RUNNER)
        if runner is not None and not runner.reassigns("NULL_BLOCK_ID"):
            return Diagnosis.fixed("block tables are padded with the null block", build.at(null[0]))
    return Diagnosis.unrecognised("block tables are padded in a way", build, defect_seen=bool(minus_one))


def _padded_rows_that_exist(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `_build_decode`: with fp8, rows without a scheduled token get length 1 in the null block.

    In place, since graphs recorded the addresses of the runner's buffers; the runner refills the padding for every
    batch. The rows of an idle rank's dummy batch are not counted: only the device knows their lengths.
    """
    padded_batches, corrects = activity.counter(PADDED_BATCH_DECODED), activity.corrects

    @functools.wraps(stock)
    def _build_decode(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if self.is_fp8_kvcache and _pad(corrects, *args, **kwargs):
                padded_batches.count += 1
        except Exception as error:
            activity.failed(error)
        return stock(self, *args, **kwargs)

    return _build_decode


def _pad(
    corrects: bool,
    block_table_tensor: Any,
    seq_lens_device: Any,
    max_seq_len: Any,
    query_start_loc_cpu: Any,
    query_start_loc_device: Any,
    num_decode_tokens: Any,
    dcp_tot_seq_lens_device: Any,
) -> bool:
    """Give padded rows a length and a block, if *corrects*, and tell if the query starts show such rows.

    `block_table_tensor` is (num_reqs, max_blocks) int32, `seq_lens_device` (num_reqs,) int32, `query_start_loc_cpu`
    (num_reqs + 1,) int32 on the CPU.
    """
    starts = query_start_loc_cpu.numpy()
    if starts[-1] == starts[-2]:
        if corrects:
            real_rows = int(starts.searchsorted(starts[-1]))
            block_table_tensor[real_rows:].fill_(_NULL_BLOCK)
            seq_lens_device[real_rows:].fill_(1)
        return True
    if corrects and dcp_tot_seq_lens_device is None:
        # The dummy batch of an idle data-parallel rank has rows of length 0 that its query starts do not show. Not with
        # decode context parallelism, under which a real row may have length 0 on a rank.
        seq_lens_device.clamp_(min=1)
    return False


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs

    return (needs.FP8_CACHE, needs.DENSE_FLASHMLA, needs.FULL_GRAPHS)


FIX = fix(
    "flashmla-padding",
    diagnose=diagnose,
    surroundings=(
        # The block tables, from the padding to the metadata of each group of layers
        Slice(
            _RUNNER,
            "GPUModelRunner._build_attention_metadata",
            "blk_table_tensor _get_block_table block_table_gid_0 block_table_tensor NULL_BLOCK_ID",
        ),
        Slice(_UTILS, "", "NULL_BLOCK_ID"),
        # Their way to the kernel, with the lengths, and the flag that the correction reads
        Slice(_BACKEND, "FlashMLAMetadataBuilder.__init__", "is_fp8_kvcache", Verdict.AFFECTED),
        Slice(_BACKEND, "FlashMLAMetadataBuilder._build_decode", "block_table_tensor seq_lens_device"),
        Slice(_BACKEND, "FlashMLAImpl", "block_table seq_lens", Verdict.AFFECTED),
        Slice(_OPERATORS, "flash_mla_with_kvcache_fp8", "block_table cache_seqlens", Verdict.AFFECTED),
        *(
            Slice(path, "MLACommonMetadataBuilder.build", "block_table_tensor seq_lens")
            for path in (COMMON, COMMON_BEFORE)
        ),
    ),
    recognised=(_MINUS_ONE, _NULL, *_TO_DRAFTERS, *NOT_OF_DECODES),
    # Model runner V2 pads with the null block in that kernel.
    distant_code=f"{TAKEN_FIRST} _gather_block_tables_kernel",
    corrections=(Patch(_BACKEND_MODULE, "FlashMLAMetadataBuilder._build_decode", _padded_rows_that_exist),),
    events=(PADDED_BATCH_DECODED,),
    needs=needs,
    default_rationale="answers",
)
