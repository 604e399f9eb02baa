"""`flashmla-fp8`: the tile plan of dense fp8 FlashMLA stays at the addresses that graphs recorded (PR 35175)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Diagnosis, Event, Fix, Patch, StockFunction, Together, Verdict

if TYPE_CHECKING:
    from vllm_graphfix.source import Source

_BACKEND = "vllm/v1/attention/backends/mla/flashmla.py"
_BACKEND_MODULE = "vllm.v1.attention.backends.mla.flashmla"

PLAN_OUTSIDE_BUFFERS = Event(
    "plan-outside-buffers",
    "A plan for fp8 decodes came from the planner outside the persistent buffers: on stock a full graph that replays does not see it.",
)


def diagnose(source: Source) -> Diagnosis:
    build = source.function(_BACKEND, "FlashMLAMetadataBuilder._build_decode")
    if "get_mla_metadata_dense_fp8" not in source.names(_BACKEND):
        return Diagnosis(Verdict.ABSENT, "no dense fp8 FlashMLA")
    if build is None:
        return Diagnosis(Verdict.UNRECOGNISED, "dense fp8 is planned where nobody has looked for it", f"{_BACKEND}:1")
    planned = build.find("get_mla_metadata_dense_fp8(...)")
    pointed_at = build.find("scheduler_metadata.tile_scheduler_metadata = tile_scheduler_metadata")
    if len(planned) == 1 and len(pointed_at) == 1:
        kept = build.find("self.cg_buf_tile_scheduler_metadata[:n].copy_(tile_scheduler_metadata)")
        splits = build.find("self.cg_buf_num_splits[:n].copy_(num_splits)")
        if len(kept) == len(splits) == 1 and planned[0].lineno < kept[0].lineno < pointed_at[0].lineno:
            return Diagnosis(Verdict.FIXED, "the plan is copied into persistent buffers", build.at(kept[0]))
        init = source.function(_BACKEND, "FlashMLAMetadataBuilder.__init__")
        buffers = init is not None and all(
            init.find(f"self.{name} = torch.{how}(...)")
            for name, how in (("cg_buf_tile_scheduler_metadata", "zeros"), ("cg_buf_num_splits", "empty"))
        )
        if (
            buffers
            and not build.find("self.cg_buf_tile_scheduler_metadata")
            and not build.find("self.cg_buf_num_splits")
        ):
            return Diagnosis(
                Verdict.AFFECTED,
                "every batch gets a new plan, but graphs read the one of their capture",
                build.at(planned[0]),
                "new-plan",
            )
    return Diagnosis(
        Verdict.UNRECOGNISED, "the plan of dense fp8 is kept in a way that nobody has looked at", build.where
    )


def _plan_in_persistent_buffers(stock: StockFunction) -> StockFunction:
    """Around `FlashMLAMetadataBuilder._build_decode`, whose result points to the plan in `scheduler_metadata`.

    The plan is `tile_scheduler_metadata`, (parts, 8) int32, and `num_splits`, (num_reqs + 1,) int32.

    Raises AssertionError, as the upstream fix does, for a plan larger than the buffers.
    """

    @functools.wraps(stock)
    def _build_decode(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = stock(self, *args, **kwargs)
        plan = _plan_outside_buffers(self, metadata)
        if plan is not None:
            PLAN_OUTSIDE_BUFFERS.count += 1
            tiles, splits = self.cg_buf_tile_scheduler_metadata, self.cg_buf_num_splits
            plan.tile_scheduler_metadata = _copied(plan.tile_scheduler_metadata, tiles, "tile_scheduler_metadata")
            plan.num_splits = _copied(plan.num_splits, splits, "num_splits")
        return metadata

    return _build_decode


def _watch_plans(stock: StockFunction) -> StockFunction:
    """Around the same."""

    @functools.wraps(stock)
    def _build_decode(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = stock(self, *args, **kwargs)
        try:
            if _plan_outside_buffers(self, metadata) is not None:
                PLAN_OUTSIDE_BUFFERS.count += 1
        except Exception:  # noqa: S110 - stock has done its work, and whatever that is goes to vLLM
            pass
        return metadata

    return _build_decode


def _plan_outside_buffers(builder: Any, metadata: Any) -> Any:
    """The plan of *metadata* if full graphs read one at another address; None otherwise. Compares addresses, reads no tensor."""
    tiles = builder.cg_buf_tile_scheduler_metadata
    if tiles is None or not builder.is_fp8_kvcache:  # the buffers exist with full graphs only
        return None
    plan = metadata.scheduler_metadata
    if plan.tile_scheduler_metadata.data_ptr() != tiles.data_ptr():
        return plan
    return None if plan.num_splits.data_ptr() == builder.cg_buf_num_splits.data_ptr() else plan


def _copied(values: Any, buffer: Any, name: str) -> Any:
    rows = values.shape[0]
    if rows > buffer.shape[0]:
        raise AssertionError(
            f"FlashMLA's {name} for this batch has {rows} rows, the buffer that CUDA graphs read has {buffer.shape[0]}: "
            "lower --max-num-seqs, or serve without full CUDA graphs"
        )
    return buffer[:rows].copy_(values)


_TARGET = "FlashMLAMetadataBuilder._build_decode"


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_BACKEND_MODULE, _TARGET, _plan_in_persistent_buffers),)


def observers(shape: str) -> tuple[Patch, ...]:
    return (Patch(_BACKEND_MODULE, _TARGET, _watch_plans),)


FIX = Fix(
    name="flashmla-fp8",
    pr=35175,
    references=("PR 32810", "issue 33638"),
    summary="FlashMLA's fp8 plan stays where graphs recorded it",
    releases="0.15.0 - 0.18.1",
    symptom="--kv-cache-dtype fp8 with FlashMLA and full CUDA graphs turns to garbage (DeepSeek-V3.1).",
    cause="The builder gets new tensors from the planner for every batch. The graph recorded the addresses of the capture's, which "
    "nothing refreshes.",
    remedy="The plan of each batch is copied into the builder's persistent buffers, and the metadata point there. A plan that does not "
    "fit stops with both sizes in the message.",
    detect="Output differs from --enforce-eager on the same prompts, and with --kv-cache-dtype auto it does not.",
    concerns="--kv-cache-dtype fp8, MLA models on FlashMLA (Hopper), a cudagraph mode with FULL.",
    workaround='--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', or --kv-cache-dtype auto.',
    removable="with vLLM 0.19.0",
    runner=None,
    reads=(_BACKEND,),
    modules=(_BACKEND_MODULE,),
    diagnose=diagnose,
    patches=patches,
    observers=observers,
    events=(PLAN_OUTSIDE_BUFFERS,),
    together=(
        Together(
            name="flashmla-padding",
            module=_BACKEND_MODULE,
            because="a right plan makes the kernel follow padded rows to block -1, a crash in place of garbage",
            may_be_off=True,
        ),
    ),
)
