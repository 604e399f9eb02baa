"""`flash-mixed-schedule`: FlashAttention 3's schedule is made for the kernel that a full graph launches.

The graph is one of prompts and decodes.
"""

from __future__ import annotations

import ast
import functools
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import NEWEST, About

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_BACKEND = "vllm/v1/attention/backends/flash_attn.py"
_KERNELS = "vllm/v1/attention/backends/fa_utils.py"
_BACKEND_MODULE = "vllm.v1.attention.backends.flash_attn"
_BUILDER = "FlashAttentionMetadataBuilder"
_TARGET = f"{_BUILDER}.build"
_STORED = ("self.scheduler_metadata[:n] = scheduler_metadata", "self.scheduler_metadata[n:] = 0")
_GIVEN = ("scheduler_metadata = self.scheduler_metadata[:n]", "return self.scheduler_metadata[:n]")
"""What graphs read is written first."""
_FULL_GRAPHS = "self.use_full_cuda_graph = self.compilation_config.cudagraph_mode.has_full_cudagraphs()"

SCHEDULES_MADE_FOR_THE_GRAPH = Event(
    "schedules-made-for-the-graph",
    "FlashAttention 3 made a schedule for a batch whose longest query is not as long as the graph for it: on stock "
    "the kernel in the graph was launched for another length.",
)


def diagnose(source: Source) -> Diagnosis:
    if not source.says(_BACKEND, "get_scheduler_metadata"):
        return Diagnosis(Verdict.ABSENT, "FlashAttention makes no schedule before a step")
    builder = source.function(_BACKEND, _BUILDER)
    build, init = source.function(_BACKEND, _TARGET), source.function(_BACKEND, f"{_BUILDER}.__init__")
    if builder is not None and build is not None and init is not None:
        support = builder.assignments("_cudagraph_support", "AttentionCGSupport.UNIFORM_BATCH")
        if support and not builder.find("AttentionCGSupport.ALWAYS"):
            return Diagnosis(Verdict.FIXED, "no full graph of FlashAttention holds prompts", builder.at(support[0]))
        longest = build.assignments("max_query_len", "...")
        if _is_as_published(build, init) and _schedules_by_it(build, builder):
            if len(longest) == 1 and builder.find("AttentionCGSupport.ALWAYS") and _launches_by_it(source):
                return Diagnosis(
                    Verdict.AFFECTED,
                    "a schedule is made for the longest query of its step, and a graph launches a kernel for that of "
                    "its capture",
                    build.at(longest[0]),
                    "longest-of-the-step",
                )
            if len(longest) == 2 and _covers_graphs(build, longest[1]):
                return Diagnosis(
                    Verdict.FIXED, "with full graphs a schedule is made for all tokens of a step", build.at(longest[1])
                )
    return Diagnosis.unrecognised("FlashAttention's schedule is made in a way", build or _BACKEND)


def _is_as_published(build: Function, init: Function) -> bool:
    """Whether the builder reads the lengths where the layer puts them.

    It must also know when there is a schedule and when there are full graphs.
    """
    return (
        build.takes == "self, common_prefix_len, common_attn_metadata, fast_build"
        and len(
            build.each(
                "num_actual_tokens = common_attn_metadata.num_actual_tokens",
                "max_query_len = common_attn_metadata.max_query_len",
            )
        )
        == 2
        and build.gives("FlashAttentionMetadata(...)", "max_query_len=max_query_len")
        and build.gives("FlashAttentionMetadata(...)", "scheduler_metadata=scheduler_metadata")
        and init.only("self.aot_schedule = get_flash_attn_version() == 3") is not None
        and init.only(_FULL_GRAPHS) is not None
    )


def _schedules_by_it(build: Function, builder: Function) -> bool:
    """Whether every schedule is made for the longest query, and goes into the builder's buffer.

    The schedule of a common prefix, which no graph has, is left out of account.
    """
    made = [*build.find("schedule(...)"), *build.find("self._get_scheduler_metadata(...)")]
    lengths = [
        ast.unparse(keyword.value)
        for call in made
        for keyword in getattr(call, "keywords", ())
        if keyword.arg == "max_query_len"
    ]
    prefixes = len(build.assignments("prefix_scheduler_metadata", "..."))
    return (
        len(made) == len(lengths)
        and lengths.count("max_query_len") >= 2
        and lengths.count("num_actual_tokens") == len(lengths) - lengths.count("max_query_len") == prefixes // 2
        and builder.gives("get_scheduler_metadata(...)", "max_seqlen_q=max_query_len")
        and any(
            parts != [] and builder.in_one_block(*parts)
            for parts in (builder.each(*_STORED, given) for given in _GIVEN)
        )
    )


def _launches_by_it(source: Source) -> bool:
    """Whether the layer launches its kernel for the longest query that the metadata have, with their schedule."""
    forward = source.function(_BACKEND, "FlashAttentionImpl.forward")
    return (
        forward is not None
        and forward.only("max_seqlen_q = attn_metadata.max_query_len") is not None
        and forward.only("scheduler_metadata = attn_metadata.scheduler_metadata") is not None
    )


def _covers_graphs(build: Function, assigned: ast.Assign) -> bool:
    """Whether *assigned* makes the longest query as long as the batch wherever there are full graphs."""
    if ast.unparse(assigned.value) != "num_actual_tokens":
        return False
    splits = build.find("max_num_splits = self.max_num_splits")  # stock's own branch for batches of graphs
    return any(build.in_one_block(split, assigned) for split in splits) or any(
        assigned in getattr(found, "body", ()) for found in build.find("if self.use_full_cuda_graph:\n    ...")
    )


def _tokens_of_graph(builder: Any, common_attn_metadata: Any) -> int | None:
    """The number of tokens of the graph for a batch, if the batch's longest query is not as long.

    None otherwise, and where no graph holds prompts and decodes. The same for a graph's capture and all its replays,
    whether or not the batch is padded by now: model runner V2 of up to 0.17.1 pads later.
    """
    config = builder.compilation_config
    if not (builder.aot_schedule and builder.use_full_cuda_graph and config.cudagraph_mode.name == "FULL"):
        return None
    sizes: list[int] = config.cudagraph_capture_sizes  # in ascending order
    place = bisect_left(sizes, common_attn_metadata.num_actual_tokens)
    if place == len(sizes) or sizes[place] == common_attn_metadata.max_query_len:
        return None
    return sizes[place]


def _schedule_for_the_graph(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `build(common_prefix_len, common_attn_metadata, …)`: the longest query is set for the graph.

    The builder sees a batch whose longest query is as long as the graph for it. The metadata have this length too, so
    that a kernel that is launched without a graph agrees with its schedule. It is an upper bound to any.
    """
    schedules, corrects = activity.counter(SCHEDULES_MADE_FOR_THE_GRAPH), activity.corrects

    @functools.wraps(stock)
    def build(self: Any, common_prefix_len: Any, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        given, is_another_length = common_attn_metadata, False
        try:
            tokens = _tokens_of_graph(self, common_attn_metadata)
            if tokens is not None:
                if corrects:
                    # A copy: the same metadata go to the builders of other layers.
                    lengthened = object.__new__(type(common_attn_metadata))
                    lengthened.__dict__.update(common_attn_metadata.__dict__, max_query_len=tokens)
                    given = lengthened
                is_another_length = True
        except Exception as error:
            activity.failed(error)
        metadata = stock(self, common_prefix_len, given, *args, **kwargs)
        if is_another_length:
            try:
                if metadata.scheduler_metadata is not None:
                    schedules.count += 1
                elif corrects:  # a draft, layers with several windows, batch invariance: the kernel makes its own
                    metadata.max_query_len = common_attn_metadata.max_query_len
            except Exception as error:
                activity.failed(error)
        return metadata

    return build


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_BACKEND_MODULE, _TARGET, _schedule_for_the_graph),)


def _v2_pads_before_it_schedules(source: Source) -> bool:
    """What model runner V2 gets wrong before that, 0.14.1 to 0.17.1, is more than the longest query."""
    return source.says("vllm/v1/worker/gpu/model_states/default.py", "num_reqs_after_padding")


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment.needs import Need

    # vLLM itself makes FULL of the default, and logs it, with fuse_attn_quant in pass_config, with enable_sp or
    # fuse_gemm_comms there (0.20.0 - 0.31.0), and with empty splitting_ops.
    default = "which is no default, and no layer for which vLLM makes another mode of it"
    return (
        Need("cudagraph_mode FULL", lambda deployment, _: deployment.prompts_in_full_graphs(), default, usual=False),
        Need(
            "FlashAttention 3",
            lambda deployment, _: deployment.flash_attention_3(),
            "Hopper, and no latent attention (MLA)",
        ),
    )


FIX = Fix(
    number=17,
    name="flash-mixed-schedule",
    runner=None,
    reads=(_BACKEND, _KERNELS),
    modules=(_BACKEND_MODULE,),
    diagnose=diagnose,
    patches=patches,
    events=(SCHEDULES_MADE_FOR_THE_GRAPH,),
    needs=needs,
    ground="answers",
    evidence=(
        *(f"{_BACKEND}::{_BUILDER}.{name}" for name in ("_get_scheduler_metadata", "_store_scheduler_metadata")),
        f"{_KERNELS}::get_flash_attn_version",
    ),
)

ABOUT = About(
    pr=None,
    references=("https://github.com/pytorch/torchtitan/issues/3668",),
    summary="with cudagraph_mode FULL, the schedule of FlashAttention 3 is made for the kernel in the graph",
    releases=f"0.14.1 - {NEWEST}; no stock release up to {NEWEST} has a remedy",
    seen="garbage; on model runner V2 for prompts that are answered next to others",
    first_test="`-cc.cudagraph_mode=FULL_DECODE_ONLY`: gone?",
    symptom="With cudagraph_mode FULL, which is no default, models on FlashAttention 3 (Hopper) answer with garbage: "
    "on model runner V1 almost always, on V2 where prompts and decodes are in one batch.",
    cause="Before each step FlashAttention's builder makes a schedule for the longest query of that step, in the "
    "buffer that graphs read. The kernel in the graph was launched for the longest query of the capture: all tokens "
    "of the graph in one request (V1), or a few each (V2, some releases). It cuts its work otherwise than the "
    "schedule says.",
    remedy="With cudagraph_mode FULL, the builder sees a batch whose longest query is as long as the graph for it, at "
    "the capture and in each step.",
    detect="Answers are wrong with cudagraph_mode FULL, and right with FULL_AND_PIECEWISE, FULL_DECODE_ONLY or "
    "--enforce-eager.",
    workaround='--compilation-config \'{"cudagraph_mode": "FULL_DECODE_ONLY"}\'; or FULL_AND_PIECEWISE, which is '
    "the default, where vLLM does not make FULL of it.",
    removable=f"not yet: no release up to {NEWEST} has a remedy",
    in_caches="entries of prompts and of generated tokens: what a layer puts into the cache is computed from the wrong "
    "attention of the one before",
    how_sure="follows from the code; the wrong answers were shown",
)
