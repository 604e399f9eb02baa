"""`flashmla-fp8`: the tile plan of dense fp8 FlashMLA stays at the addresses that graphs recorded (PR 35175)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Companion, Diagnosis, Event, Patch, Slice, StockFunction, Verdict
from vllm_graphfix.fixes._premises import AS_BUILT, BUILDERS_STAY

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source

_BACKEND = "vllm/v1/attention/backends/mla/flashmla.py"
_BACKEND_MODULE = "vllm.v1.attention.backends.mla.flashmla"
_OPERATORS = "vllm/v1/attention/ops/flashmla.py"
_CALLER = "vllm/model_executor/layers/attention/mla_attention.py"

_PLANNED = "tile_scheduler_metadata, num_splits = get_mla_metadata_dense_fp8(...)"
_POINTED_AT = (
    "scheduler_metadata.tile_scheduler_metadata = tile_scheduler_metadata",
    "scheduler_metadata.num_splits = num_splits",
)
_FULL_GRAPHS = "if self.compilation_config.cudagraph_mode.has_full_cudagraphs(): ..."
_COPIED = (
    "self.cg_buf_tile_scheduler_metadata[:n].copy_(tile_scheduler_metadata)",
    "tile_scheduler_metadata = self.cg_buf_tile_scheduler_metadata[:n]",
    "self.cg_buf_num_splits[:n].copy_(num_splits)",
    "num_splits = self.cg_buf_num_splits[:n]",
)
_COUNTED = ("n = tile_scheduler_metadata.size(0)", "n = num_splits.size(0)")
_REMEDY = (_COUNTED[0], *_COPIED[:2], _COUNTED[1], *_COPIED[2:])
"""Upstream's correction."""
_CHECKED = tuple(
    f"assert {fact}"
    for buffer in ("self.cg_buf_tile_scheduler_metadata", "self.cg_buf_num_splits")
    for fact in (f"{buffer} is not None", f"n <= {buffer}.size(0)")
)

_OTHER_CACHES = "if ... and not self.kv_cache_dtype.startswith('fp8'):\n    ..."
"""The plan of caches that are not fp8."""

PLAN_OUTSIDE_BUFFERS = Event(
    "plan-outside-buffers",
    "The planner returned a plan for fp8 decodes outside the persistent buffers: on stock a replayed full graph does "
    "not see it.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the plan of a batch, and its copy in the buffers that graphs read."""
    build = source.function(_BACKEND, "FlashMLAMetadataBuilder._build_decode")
    if not any(source.contains_word(path, "FlashMLASchedMeta") for path in (_BACKEND, _OPERATORS)):
        return Diagnosis.absent("no dense fp8 FlashMLA")
    if build is None:
        return Diagnosis.unrecognised("dense fp8 is planned in a place", _BACKEND)
    new_plan = build.find_sequence(_PLANNED, *_POINTED_AT)
    if new_plan:
        full, copied = build.find_each(_FULL_GRAPHS), build.find_sequence(*_REMEDY)
        if full and copied and copied[0] in getattr(full[0], "body", []):
            planned, *pointed = new_plan
            # A method called here might make other buffers.
            if build.in_one_block(planned, *full, *pointed) and not build.own_calls():
                return Diagnosis.fixed("the plan is copied into persistent buffers", build.at(planned))
        elif not build.find(*_COPIED):
            return Diagnosis.affected(
                "every batch gets a new plan, but graphs read the one of their capture",
                build.at(new_plan[0]),
                "new-plan",
            )
    return Diagnosis.unrecognised("the plan of dense fp8 is kept in a way", build)


def _plan_in_persistent_buffers(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `FlashMLAMetadataBuilder._build_decode`, whose plan is then copied into the persistent buffers.

    The plan in `scheduler_metadata` is `tile_scheduler_metadata`, (parts, 8) int32, and `num_splits`,
    (num_reqs + 1,) int32. Raises AssertionError, as the upstream fix does, for a plan larger than the buffers.
    """
    plans_outside, corrects = activity.counter(PLAN_OUTSIDE_BUFFERS), activity.corrects

    @functools.wraps(stock)
    def _build_decode(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = stock(self, *args, **kwargs)
        try:
            plan = _plan_outside_buffers(self, metadata)
            if plan is not None:
                if corrects:
                    planned = plan.tile_scheduler_metadata, plan.num_splits
                    tiles = _rows(self.cg_buf_tile_scheduler_metadata, planned[0], "tile_scheduler_metadata")
                    splits = _rows(self.cg_buf_num_splits, planned[1], "num_splits")
                    plan.tile_scheduler_metadata, plan.num_splits = tiles.copy_(planned[0]), splits.copy_(planned[1])
                plans_outside.count += 1
        except Exception as error:
            # A plan that does not fit: the upstream fix raises as well.
            if corrects and isinstance(error, AssertionError):
                raise
            activity.failed(error)
        return metadata

    return _build_decode


def _plan_outside_buffers(builder: Any, metadata: Any) -> Any:
    """Return the plan of *metadata* if full graphs read another address; None otherwise. Reads no tensor."""
    tiles = builder.cg_buf_tile_scheduler_metadata
    if tiles is None or not builder.is_fp8_kvcache:  # the buffers exist with full graphs only
        return None
    plan = metadata.scheduler_metadata
    if plan.tile_scheduler_metadata.data_ptr() != tiles.data_ptr():
        return plan
    return None if plan.num_splits.data_ptr() == builder.cg_buf_num_splits.data_ptr() else plan


def _rows(buffer: Any, values: Any, name: str) -> Any:
    """Return the rows of *buffer* for *values*. Raises AssertionError where they do not fit."""
    rows = values.shape[0]
    if rows > buffer.shape[0]:
        raise AssertionError(
            f"FlashMLA's {name} for this batch has {rows} rows, the buffer that CUDA graphs read has "
            f"{buffer.shape[0]}: lower --max-num-seqs, or serve without full CUDA graphs"
        )
    return buffer[:rows]


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs

    return (needs.FP8_CACHE, needs.DENSE_FLASHMLA, needs.FULL_GRAPHS)


FIX = fix(
    "flashmla-fp8",
    diagnose=diagnose,
    surroundings=(
        # The plan, and the buffers
        Slice(
            _BACKEND,
            "FlashMLAMetadataBuilder",
            "scheduler_metadata tile_scheduler_metadata num_splits cg_buf_tile_scheduler_metadata cg_buf_num_splits "
            "is_fp8_kvcache",
        ),
        Slice(_BACKEND, "FlashMLABackend.get_builder_cls"),
        # The builder runs for each batch, the planner caches no plan, and the kernel reads that of the metadata
        Slice(_CALLER, "MLACommonMetadataBuilder.build", "decode_metadata _build_decode"),
        Slice(_OPERATORS, "get_mla_metadata_dense_fp8", "", Verdict.AFFECTED),
        Slice(_BACKEND, "FlashMLAImpl", "scheduler_metadata tile_scheduler_metadata num_splits", Verdict.AFFECTED),
        *BUILDERS_STAY,
    ),
    recognised=(_PLANNED, *_POINTED_AT, *_REMEDY, *_CHECKED, _OTHER_CACHES),
    distant_code=AS_BUILT,
    corrections=(Patch(_BACKEND_MODULE, "FlashMLAMetadataBuilder._build_decode", _plan_in_persistent_buffers),),
    events=(PLAN_OUTSIDE_BUFFERS,),
    needs=needs,
    requires=(
        Companion(
            name="flashmla-padding",
            module=_BACKEND_MODULE,
            because="a right plan makes the kernel follow padded rows to block -1, a crash instead of garbage",
            may_be_off=True,
        ),
    ),
    default_rationale="answers",
)
