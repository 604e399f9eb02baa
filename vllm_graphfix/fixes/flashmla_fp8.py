"""`flashmla-fp8`: the tile plan of dense fp8 FlashMLA stays at the addresses that graphs recorded (PR 35175)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Together, Verdict
from vllm_graphfix.fixes._about import About
from vllm_graphfix.fixes._capture_source import plans_each_batch

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_BACKEND = "vllm/v1/attention/backends/mla/flashmla.py"
_BACKEND_MODULE = "vllm.v1.attention.backends.mla.flashmla"
_OPERATORS = "vllm/v1/attention/ops/flashmla.py"
_CALLER = "vllm/model_executor/layers/attention/mla_attention.py"

_POINTED_AT = (
    "scheduler_metadata.tile_scheduler_metadata = tile_scheduler_metadata",
    "scheduler_metadata.num_splits = num_splits",
)
_PLANNED = "tile_scheduler_metadata, num_splits = get_mla_metadata_dense_fp8(...)"
_BUFFERS = ("self.cg_buf_tile_scheduler_metadata", "self.cg_buf_num_splits")
_FULL_GRAPHS = "if self.compilation_config.cudagraph_mode.has_full_cudagraphs(): ..."
_KEPT = (
    "self.cg_buf_tile_scheduler_metadata[:n].copy_(tile_scheduler_metadata)",
    "tile_scheduler_metadata = self.cg_buf_tile_scheduler_metadata[:n]",
    "self.cg_buf_num_splits[:n].copy_(num_splits)",
    "num_splits = self.cg_buf_num_splits[:n]",
)
"""Upstream's correction."""
_MADE = (
    "self.is_fp8_kvcache = ...",
    _FULL_GRAPHS,
    "self.cg_buf_tile_scheduler_metadata = torch.zeros(..., device=self.device, dtype=torch.int32)",
    "self.cg_buf_num_splits = torch.empty(..., device=self.device, dtype=torch.int32)",
    "vllm_config.scheduler_config.max_num_seqs + 1",
)
"""What the patches use of a builder."""

PLAN_OUTSIDE_BUFFERS = Event(
    "plan-outside-buffers",
    "The planner returned a plan for fp8 decodes outside the persistent buffers: on stock a replayed full graph does "
    "not see it.",
)


def diagnose(source: Source) -> Diagnosis:
    build = source.function(_BACKEND, "FlashMLAMetadataBuilder._build_decode")
    if not any(source.says(path, "FlashMLASchedMeta") for path in (_BACKEND, _OPERATORS)):
        return Diagnosis(Verdict.ABSENT, "no dense fp8 FlashMLA")
    if build is None:
        return Diagnosis.unrecognised("dense fp8 is planned in a place", _BACKEND)
    planned = build.only("get_mla_metadata_dense_fp8(...)")
    if planned and build.each(*_POINTED_AT):
        if _plan_is_in_buffers(source, build):
            return Diagnosis(Verdict.FIXED, "the plan is copied into persistent buffers", build.at(planned))
        init = source.function(_BACKEND, "FlashMLAMetadataBuilder.__init__")
        flag = build.find("self.is_fp8_kvcache") and not build.find("not self.is_fp8_kvcache")
        if (
            init
            and init.each(*_MADE)
            and flag
            and not any(map(build.find, _BUFFERS))
            and _plans_anew_as_known(source, build)
        ):
            return Diagnosis(
                Verdict.AFFECTED,
                "every batch gets a new plan, but graphs read the one of their capture",
                build.at(planned),
                "new-plan",
            )
    return Diagnosis.unrecognised("the plan of dense fp8 is kept in a way", build)


def _plan_is_in_buffers(source: Source, build: Function) -> bool:
    """Whether the plan that the metadata point at is that of the buffers, and no other, where there are full graphs."""
    builder = source.function(_BACKEND, "FlashMLAMetadataBuilder")
    full, kept = build.each(_FULL_GRAPHS), build.each(*_KEPT)
    return (
        full != []
        and kept != []
        and build.mentions(scheduler_metadata=4, tile_scheduler_metadata=5, num_splits=5)
        and build.in_one_block(*kept)
        and kept[1] in getattr(full[0], "body", [])
        and build.in_one_block(*full, *build.each(*_POINTED_AT))
        and not build.own_calls()
        # Made once, with the builder, and only written into.
        and builder is not None
        and all(len(builder.find(f"{buffer} = ...")) == 2 and not build.find(f"{buffer} = ...") for buffer in _BUFFERS)
        and _caller_builds_each_time(source)
    )


def _plans_anew_as_known(source: Source, build: Function) -> bool:
    """Whether planner and builder make a plan for each batch, and neither they nor the builder's caller keep one."""
    planner = source.function(_OPERATORS, "get_mla_metadata_dense_fp8")
    pointed = dict(zip(("tile_scheduler_metadata", "num_splits"), _POINTED_AT, strict=True))
    return (
        planner is not None
        and planner.always("return torch.ops._flashmla_extension_C.get_mla_decoding_metadata_dense_fp8(...)")
        and all(build.confines(name, _PLANNED, part, f"{name}.size(...)") for name, part in pointed.items())
        and plans_each_batch(build)
        and not build.own_calls()
        and _caller_builds_each_time(source)
    )


def _caller_builds_each_time(source: Source) -> bool:
    """Whether the builder's caller has the metadata of decodes made for each batch, and keeps none."""
    caller = source.function(_CALLER, "MLACommonMetadataBuilder.build")
    return (
        caller is not None
        and caller.only("decode_metadata = self._build_decode(*...)") is not None
        and caller.confines(
            "decode_metadata",
            "decode_metadata = None",
            "decode_metadata = self._build_decode(*...)",
            "self.metadata_cls(*..., decode=decode_metadata)",
        )
    )


def _plan_in_persistent_buffers(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `FlashMLAMetadataBuilder._build_decode`, whose result then points to the plan in the persistent buffers.

    The plan, in `scheduler_metadata`, is `tile_scheduler_metadata`, (parts, 8) int32, and `num_splits`,
    (num_reqs + 1,) int32.

    Raises AssertionError, as the upstream fix does, for a plan larger than the buffers.
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
            # A plan that does not fit, which the upstream fix does not serve either.
            if corrects and isinstance(error, AssertionError):
                raise
            activity.failed(error)
        return metadata

    return _build_decode


def _plan_outside_buffers(builder: Any, metadata: Any) -> Any:
    """The plan of *metadata* if full graphs read one at another address; None otherwise.

    Compares addresses and reads no tensor.
    """
    tiles = builder.cg_buf_tile_scheduler_metadata
    if tiles is None or not builder.is_fp8_kvcache:  # the buffers exist with full graphs only
        return None
    plan = metadata.scheduler_metadata
    if plan.tile_scheduler_metadata.data_ptr() != tiles.data_ptr():
        return plan
    return None if plan.num_splits.data_ptr() == builder.cg_buf_num_splits.data_ptr() else plan


def _rows(buffer: Any, values: Any, name: str) -> Any:
    """The part of *buffer* that *values* go into."""
    rows = values.shape[0]
    if rows > buffer.shape[0]:
        raise AssertionError(
            f"FlashMLA's {name} for this batch has {rows} rows, the buffer that CUDA graphs read has "
            f"{buffer.shape[0]}: lower --max-num-seqs, or serve without full CUDA graphs"
        )
    return buffer[:rows]


_TARGET = "FlashMLAMetadataBuilder._build_decode"


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_BACKEND_MODULE, _TARGET, _plan_in_persistent_buffers),)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs

    return (needs.FP8_CACHE, needs.DENSE_FLASHMLA, needs.FULL_GRAPHS)


FIX = Fix(
    number=5,
    name="flashmla-fp8",
    runner=None,
    reads=(_BACKEND, _OPERATORS, _CALLER),
    modules=(_BACKEND_MODULE,),
    diagnose=diagnose,
    patches=patches,
    events=(PLAN_OUTSIDE_BUFFERS,),
    needs=needs,
    ground="answers",
    together=(
        Together(
            name="flashmla-padding",
            module=_BACKEND_MODULE,
            because="a right plan makes the kernel follow padded rows to block -1, a crash instead of garbage",
            may_be_off=True,
        ),
    ),
)

ABOUT = About(
    pr=35175,
    references=("PR 32810", "issue 33638"),
    summary="FlashMLA's fp8 plan stays where graphs recorded it",
    releases="0.15.0 - 0.18.1",
    absent="0.14.1",
    seen="garbage or gibberish",
    first_test="`--kv-cache-dtype auto`: gone?",
    symptom="With --kv-cache-dtype fp8, FlashMLA and full CUDA graphs, output turns to garbage (DeepSeek-V3.1).",
    cause="The builder gets new tensors from the planner for every batch. The graph recorded the addresses of those "
    "from its capture, which nothing refreshes.",
    remedy="The plan of each batch is copied into the builder's persistent buffers, and the metadata point there. A "
    "plan that does not fit raises an error that gives both sizes.",
    detect="Output differs from --enforce-eager on the same prompts, and with --kv-cache-dtype auto it does not.",
    workaround='--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', or --kv-cache-dtype auto.',
    removable="with vLLM 0.19.0",
    in_caches="wrong entries of generated tokens, and of the last token of a prompt if it was computed in a step of "
    "its own (a remainder of one token, or a prompt that was in the cache except for its last token)",
    how_sure="follows from the code: only decode graphs replay the wrong plan",
)
