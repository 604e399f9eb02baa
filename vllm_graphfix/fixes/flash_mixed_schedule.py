"""`flash-mixed-schedule`: FlashAttention 3's schedule fits the kernel in full graphs of prompts and decodes."""

from __future__ import annotations

import ast
import functools
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction, Verdict

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_BACKEND = "vllm/v1/attention/backends/flash_attn.py"
_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_STATES = "vllm/v1/worker/gpu/model_states/default.py"
_BACKEND_MODULE = "vllm.v1.attention.backends.flash_attn"
_BUILDER = "FlashAttentionMetadataBuilder"
_TARGET = f"{_BUILDER}.build"
_LONGEST = "max_query_len"
_READ = "max_query_len = common_attn_metadata.max_query_len"
_SCHEDULES = ("schedule", "self._get_scheduler_metadata")
_SCHEDULE_CALLS = tuple(f"{make}(...)" for make in _SCHEDULES)
_OF_THE_STEP = tuple(f"scheduler_metadata = {make}(*..., max_query_len=max_query_len)" for make in _SCHEDULES)
_OF_A_PREFIX = tuple(
    f"prefix_scheduler_metadata = {make}(*..., max_query_len=num_actual_tokens)" for make in _SCHEDULES
)
"""The schedule of a common prefix, which is in no graph."""
_SPLIT = (
    "if max_query_len > 1:\n"
    "    num_decode_reqs, num_prefill_reqs, num_decode_tokens, num_prefill_tokens = split_dcp_context_queries(...)"
)
"""Its use to separate decodes from prefills on ranks that share a context."""
_HANDED_ON_V2 = (
    "max_query_len = input_batch.max_query_len",
    "if max_query_len is None:\n    max_query_len = input_batch.num_scheduled_tokens.max().item()",
    "max_query_len = input_batch.num_scheduled_tokens.max().item()",
)
_UP_TO_0_27 = "def schedule(batch_size, cu_query_lens, max_query_len, seqlens, max_seq_len, causal): ..."
_STORED = ("self.scheduler_metadata[:n] = scheduler_metadata", "self.scheduler_metadata[n:] = 0")
_HANDED_ON = ("scheduler_metadata = self.scheduler_metadata[:n]", "return self.scheduler_metadata[:n]")
"""Uses of the buffer that graphs read, after it is written."""
_LAUNCHED = ("max_seqlen_q = attn_metadata.max_query_len", "scheduler_metadata = attn_metadata.scheduler_metadata")
_HOLDS_PROMPTS = "_cudagraph_support = AttentionCGSupport.ALWAYS if ... else AttentionCGSupport.UNIFORM_BATCH"
_HOLDS_DECODES = "_cudagraph_support = AttentionCGSupport.UNIFORM_BATCH"
_ALL_TOKENS = "max_query_len = num_actual_tokens"
_ALL_TOKENS_OF_GRAPHS = f"if self.use_full_cuda_graph: {_ALL_TOKENS}"
_OF_A_GRAPH = (
    "if self.use_full_cuda_graph and self.max_cudagraph_size is not None "
    "and num_actual_tokens <= self.max_cudagraph_size: ..."
)
"""Stock's condition for batches that have a graph."""

SCHEDULES_MADE_FOR_THE_GRAPH = Event(
    "schedules-made-for-the-graph",
    "FlashAttention 3 made a schedule for a batch whose longest query is not as long as the graph for it: on stock "
    "the kernel in the graph was launched for another length.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the longest query of the schedule, and that of the kernel's launch in the layer."""
    builder, build = source.function(_BACKEND, _BUILDER), source.function(_BACKEND, _TARGET)
    forward = source.function(_BACKEND, "FlashAttentionImpl.forward")
    read = build and build.find_unique(_READ)
    if builder is not None and build is not None:
        decodes = builder.find_unique(_HOLDS_DECODES)
        if decodes is not None and not builder.find("AttentionCGSupport.ALWAYS"):
            return Diagnosis.fixed("no full graph of FlashAttention holds prompts", builder.at(decodes))
        if read is not None and forward is not None and _is_scheduled_and_launched_by_it(builder, build, forward):
            if builder.assigned(_LONGEST) == 1 and builder.find_unique(_HOLDS_PROMPTS):
                return Diagnosis.affected(
                    "a schedule is made for the longest query of its step, and a graph launches a kernel for that of "
                    "its capture",
                    build.at(read),
                    "longest-of-the-step",
                )
            remedy = _remedy(build)
            if builder.assigned(_LONGEST) == 2 and remedy is not None:
                return Diagnosis.fixed("with full graphs a schedule is made for all tokens of a step", build.at(remedy))
    return Diagnosis.unrecognised("FlashAttention's schedule is made in a way", build or _BACKEND)


def _is_scheduled_and_launched_by_it(builder: Function, build: Function, forward: Function) -> bool:
    """Tell if schedules and kernels have that length, and schedules go through the buffer."""
    calls = build.find(*_SCHEDULE_CALLS)
    known = build.find(*_OF_THE_STEP, *_OF_A_PREFIX)
    return (
        len(calls) == len(known) > 0
        and builder.call_has_keyword("get_scheduler_metadata(...)", "max_seqlen_q=max_query_len")
        and any(builder.find_sequence(*_STORED, handed_on) for handed_on in _HANDED_ON)
        and forward.find_each(*_LAUNCHED) != []
        and forward.assigned("max_seqlen_q") == 1
    )


def _remedy(build: Function) -> ast.stmt | ast.expr | None:
    """Find the statement that sets the longest query to the whole batch before any schedule, with all full graphs."""
    schedules = [part.lineno for part in build.find(*_SCHEDULE_CALLS)]
    guards = [
        each for each in (*build.find(_ALL_TOKENS_OF_GRAPHS), *build.find(_OF_A_GRAPH)) if each in build.node.body
    ]
    blocks = [build.node.body, *(getattr(guard, "body", []) for guard in guards)]
    lengthened = build.find_unique(_ALL_TOKENS)
    if lengthened is None or lengthened.lineno > min(schedules) or not any(lengthened in block for block in blocks):
        return None
    return lengthened


def _tokens_of_graph(builder: Any, common_attn_metadata: Any) -> int | None:
    """Return the number of tokens of a batch's graph if the batch's longest query is shorter; None otherwise.

    None, too, where no graph has prompts and decodes. Equal for a graph's capture and its replays, even if the batch is
    padded later, as by model runner V2 up to 0.17.1.
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
    """Wrap `build(common_prefix_len, common_attn_metadata, …)`: the longest query becomes that of the graph.

    The builder gets a batch whose longest query is as long as its graph. So do the metadata, so that a kernel that runs
    without a graph agrees with its schedule: the length is only an upper bound.
    """
    met, corrects = activity.counter(SCHEDULES_MADE_FOR_THE_GRAPH), activity.corrects

    @functools.wraps(stock)
    def build(self: Any, common_prefix_len: Any, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        batch, tokens = common_attn_metadata, None
        try:
            tokens = _tokens_of_graph(self, common_attn_metadata)
            if tokens is not None and corrects:
                # A copy: builders of other layers get the same metadata.
                lengthened = object.__new__(type(common_attn_metadata))
                lengthened.__dict__.update(common_attn_metadata.__dict__, max_query_len=tokens)
                batch = lengthened
        except Exception as error:
            tokens = None
            activity.failed(error)
        metadata = stock(self, common_prefix_len, batch, *args, **kwargs)
        if tokens is not None:
            try:
                if metadata.scheduler_metadata is not None:
                    met.count += 1
                elif corrects:  # a draft, layers with several windows, batch invariance: the kernel makes its own
                    metadata.max_query_len = common_attn_metadata.max_query_len
            except Exception as error:
                activity.failed(error)
        return metadata

    return build


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment.needs import Need

    # vLLM itself makes FULL of the default, and logs it, with fuse_attn_quant in pass_config, with enable_sp or
    # fuse_gemm_comms there (0.20.0 - 0.31.0), and with empty splitting_ops.
    default = "which is no default, and no layer for which vLLM makes another mode of it"
    return (
        Need(
            "cudagraph_mode FULL",
            lambda deployment, _: deployment.prompts_in_full_graphs(),
            default,
            usual=False,
            clause="cudagraph_mode is FULL",
        ),
        Need(
            "FlashAttention 3",
            lambda deployment, _: deployment.flash_attention_3(),
            "Hopper, and no latent attention (MLA)",
            clause="attention runs on FlashAttention 3",
        ),
    )


FIX = fix(
    "flash-mixed-schedule",
    diagnose=diagnose,
    surroundings=(
        # The length in the builder, and its conditions for schedules and graphs
        Slice(_BACKEND, _TARGET, _LONGEST),
        Slice(_BACKEND, f"{_BUILDER}.__init__", "aot_schedule use_full_cuda_graph has_full_cudagraphs"),
        # The graphs that the builder claims
        Slice(_BACKEND, "", "AttentionCGSupport _cudagraph_support get_cudagraph_support"),
        # The length in both model runners
        Slice(_RUNNER, "GPUModelRunner._build_attention_metadata", _LONGEST, Verdict.AFFECTED),
        Slice(_STATES, "DefaultModelState.prepare_attn", _LONGEST, Verdict.AFFECTED),
    ),
    recognised=(
        *(3 * _OF_THE_STEP),  # with a shared context, with a common prefix, with neither
        *_OF_A_PREFIX,
        _SPLIT,
        *_HANDED_ON_V2,
        _UP_TO_0_27,
        _HOLDS_PROMPTS,
        _HOLDS_DECODES,
        _ALL_TOKENS,
        _ALL_TOKENS_OF_GRAPHS,
    ),
    corrections=(Patch(_BACKEND_MODULE, _TARGET, _schedule_for_the_graph),),
    events=(SCHEDULES_MADE_FOR_THE_GRAPH,),
    needs=needs,
    default_rationale="answers",
)
