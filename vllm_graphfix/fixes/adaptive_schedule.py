"""`adaptive-schedule`: attention's metadata are made for the longest query that a graph of decodes was captured for.

With adaptive verification such a graph has no fixed number of tokens a request, only a largest one.
"""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import NEWEST, About

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_RUNNER = "vllm/v1/worker/gpu/model_runner.py"
_GRAPHS = "vllm/v1/worker/gpu/cudagraph_utils.py"
_STATES = "vllm/v1/worker/gpu/model_states/default.py"
_BATCH = "vllm/v1/worker/gpu/input_batch.py"
_VERIFICATION = "vllm/v1/worker/gpu/spec_decode/adaptive_verification.py"
_METADATA = "vllm/v1/worker/gpu/attn_utils.py"
_BUILDER = "vllm/v1/attention/backend.py"
_SYNC = "vllm/v1/worker/gpu/dp_utils.py"
_BACKEND = "vllm/v1/attention/backends/flash_attn.py"
_RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"
_TARGET = "GPUModelRunner.prepare_inputs"

_OF_THE_GRAPH = "batch_desc.max_query_len"
_OF_THE_STEP = "int(num_scheduled_tokens_upper_bound.max()) if adaptive_verification is not None else None"
_ALLOWED = "desc.max_query_len is None or (max_query_len is not None and desc.max_query_len >= max_query_len)"
_TAKEN = "max_query_len = input_batch.max_query_len"
_OTHERWISE = "if max_query_len is None:\n    max_query_len = input_batch.num_scheduled_tokens.max().item()"

SCHEDULE_OF_A_SHORTER_STEP = Event(
    "schedule-of-a-shorter-step",
    "A step whose longest query is shorter than that of the capture was prepared for a full graph: on stock the "
    "metadata of attention, FlashAttention 3's schedule among them, are made for the shorter one.",
)


def diagnose(source: Source) -> Diagnosis:
    if not source.says(_RUNNER, "adaptive_verification") and not source.says(_GRAPHS, "varlen_decode"):
        return Diagnosis(Verdict.ABSENT, "full graphs of decodes have a fixed number of tokens a request")
    prepare, execute = source.function(_RUNNER, _TARGET), source.function(_RUNNER, "GPUModelRunner.execute_model")
    allowed, admits, captured = _is_allowed_shorter(source), _is_captured_for_it(source), _is_told_by_the_batch(source)
    if prepare is not None and execute is not None and allowed and admits and captured:
        longest = _longest(prepare)
        if longest is not None and _is_given_its_graph(prepare, execute):
            given = ast.unparse(longest.value)
            if given == _OF_THE_STEP:
                return Diagnosis(
                    Verdict.AFFECTED,
                    "builders are told of the step's longest query, and a graph launches kernels for that of its "
                    "capture",
                    prepare.at(longest.value),
                    "longest-of-the-step",
                )
            if given in (_OF_THE_GRAPH, f"{_OF_THE_GRAPH} or ({_OF_THE_STEP})"):
                return Diagnosis(
                    Verdict.FIXED, "builders are told of the longest query of the graph", prepare.at(longest.value)
                )
    return Diagnosis.unrecognised(
        "the longest query of a step with adaptive verification is told in a way", prepare or _RUNNER
    )


def _longest(prepare: Function) -> ast.keyword | None:
    """What the one batch of a step is told as its longest query, where nothing changes it afterwards."""
    made = prepare.only("InputBatch(...)")
    found = [each for each in getattr(made, "keywords", ()) if each.arg == "max_query_len"]
    known = [*ast.walk(found[0])] if len(found) == 1 else []
    named = (
        node
        for node in ast.walk(prepare.node)
        if "max_query_len" in (getattr(node, "attr", None), getattr(node, "id", None))
    )
    return found[0] if known and all(node in known for node in named) else None


def _is_given_its_graph(prepare: Function, execute: Function) -> bool:
    """Whether each step is prepared for the graph that was chosen for its own longest query."""
    return (
        prepare.takes.startswith("self, scheduler_output, batch_req_state, batch_desc")
        and not prepare.sets("batch_desc")
        and execute.only("self.prepare_inputs(scheduler_output, batch_req_state, batch_desc, *...)") is not None
        and execute.only("dispatch_cg_and_sync_dp(*..., max_query_len=max_query_len)") is not None
        and "max_query_len = max(scheduler_output.num_scheduled_tokens.values())" in _assigned(execute)
    )


def _assigned(execute: Function) -> list[str]:
    """How `max_query_len` is set, without the type that it may be said to have."""
    nodes = [node for node in ast.walk(execute.node) if isinstance(node, ast.Assign | ast.AnnAssign)]
    found = ((node.targets[0] if isinstance(node, ast.Assign) else node.target, node.value) for node in nodes)
    return [
        f"max_query_len = {ast.unparse(value)}"
        for target, value in found
        if value is not None and ast.unparse(target) == "max_query_len"
    ]


def _is_allowed_shorter(source: Source) -> bool:
    """Whether a graph is taken for any step whose longest query is not longer than the graph's."""
    compatible = source.function(_GRAPHS, "_is_compatible")
    return compatible is not None and compatible.only(_ALLOWED) is not None


def _is_captured_for_it(source: Source) -> bool:
    """Whether a graph of decodes of any length is captured for the longest of them."""
    candidates = source.function(_GRAPHS, "CudaGraphManager._init_candidates")
    prepare = source.function(_GRAPHS, "prepare_inputs_to_capture")
    dummy = source.function(_BATCH, "InputBatch.make_dummy")
    return (
        candidates is not None
        and candidates.only("BatchExecutionDescriptor(*..., max_query_len=self.decode_query_len)") is not None
        and prepare is not None
        and prepare.gives("InputBatch.make_dummy(...)", "max_query_len=max_query_len")
        and dummy is not None
        and dummy.gives("cls(...)", "max_query_len=max_query_len")
    )


def _is_told_by_the_batch(source: Source) -> bool:
    """Whether builders are told of the longest query that the batch says, at the capture and in each step."""
    state = source.function(_STATES, "DefaultModelState.prepare_attn")
    return (
        state is not None
        and len(state.each(_TAKEN, _OTHERWISE)) == 2
        and state.gives("build_attn_metadata(...)", "max_query_len=max_query_len")
    )


def _longest_of_the_graph(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `prepare_inputs(self, scheduler_output, batch_req_state, batch_desc, …)`, which makes a step's batch.

    The batch then says what the dummy batch of the capture did. To all that read it, it is an upper bound.
    """
    shorter, corrects = activity.counter(SCHEDULE_OF_A_SHORTER_STEP), activity.corrects

    @functools.wraps(stock)
    def prepare_inputs(
        self: Any, scheduler_output: Any, batch_req_state: Any, batch_desc: Any, *args: Any, **kwargs: Any
    ) -> Any:
        batch = stock(self, scheduler_output, batch_req_state, batch_desc, *args, **kwargs)
        try:
            of_the_graph = batch_desc.max_query_len
            if of_the_graph is not None and batch_desc.cg_mode.name == "FULL":
                longest = batch.max_query_len
                if longest is None:
                    longest = batch.num_scheduled_tokens.max()  # of the host's
                if longest < of_the_graph:
                    if corrects:
                        batch.max_query_len = of_the_graph
                    shorter.count += 1
        except Exception as error:
            activity.failed(error)
        return batch

    return prepare_inputs


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_RUNNER_MODULE, _TARGET, _longest_of_the_graph),)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    return (
        needs.RUNNER_V2,
        Need("DSpark", lambda deployment, _: deployment.speculator("dspark")),
        Need("enable_adaptive_verification", _verifies_adaptively, "in --speculative-config", usual=False),
        needs.FULL_GRAPHS,
        Need(
            "FlashAttention 3",
            lambda deployment, _: deployment.flash_attention_3(),
            "Hopper, and no latent attention (MLA)",
        ),
    )


def _verifies_adaptively(deployment: Deployment, _: str) -> Fact:
    from vllm_graphfix.deployment import Fact
    from vllm_graphfix.deployment.line import json_or

    value, missing = deployment.value("--speculative-config")
    if missing is not None:
        return Fact(None, missing)
    config = {} if value is None else json_or(value, None)
    if not isinstance(config, dict):
        return Fact(None, "a JSON object for --speculative-config")
    on = bool(config.get("enable_adaptive_verification"))
    return Fact(on, f"enable_adaptive_verification is {'on' if on else 'off'} in --speculative-config")


FIX = Fix(
    number=28,
    name="adaptive-schedule",
    runner="V2",
    reads=(_RUNNER, _GRAPHS, _STATES, _BATCH, _SYNC, _VERIFICATION, _METADATA, _BUILDER, _BACKEND),
    modules=(_RUNNER_MODULE,),
    diagnose=diagnose,
    patches=patches,
    events=(SCHEDULE_OF_A_SHORTER_STEP,),
    needs=needs,
    ground="answers",
    evidence=(
        f"{_GRAPHS}::CudaGraphManager.dispatch",
        f"{_GRAPHS}::ModelCudaGraphManager.capture",
        f"{_SYNC}::dispatch_cg_and_sync_dp",
        f"{_VERIFICATION}::AdaptiveVerificationManager.compact_batch",
        f"{_VERIFICATION}::AdaptiveVerificationManager.reallocate_drafts",
        f"{_METADATA}::build_attn_metadata",
        f"{_BUILDER}::AttentionMetadataBuilder.build_for_cudagraph_capture",
        f"{_BACKEND}::FlashAttentionMetadataBuilder.build",
        f"{_BACKEND}::FlashAttentionMetadataBuilder._get_scheduler_metadata",
        f"{_BACKEND}::FlashAttentionMetadataBuilder._store_scheduler_metadata",
        f"{_BACKEND}::FlashAttentionImpl.forward",
    ),
)

ABOUT = About(
    pr=None,
    references=(),
    summary="with adaptive verification, FlashAttention 3's schedule is made for the kernel in the graph",
    releases=f"0.28.0 - {NEWEST}; no stock release up to {NEWEST} has a remedy",
    absent="0.14.1 - 0.27.1",
    seen="wrong tokens now and then with DSpark, near the end of `max_model_len` or beside other requests",
    first_test='`"enable_adaptive_verification": false`: gone?',
    symptom="With DSpark and enable_adaptive_verification, which is off by default, on FlashAttention 3 (Hopper) "
    "answers have wrong tokens in steps in which no request has all its drafts: the last ones before max_model_len, or "
    "all of them where a limit cuts a step to few tokens a request.",
    cause="A full graph of decodes is captured for K+1 tokens a request, and its kernels are launched for that. It is "
    "replayed for shorter steps, too. Builders are told of the step's own longest query then, before drafts are cut, "
    "and FlashAttention 3's schedule is made for it: a schedule of another kernel than the one in the graph.",
    remedy="The batch of a step that a full graph was chosen for says the longest query of the graph, as the batch of "
    "its capture did.",
    detect="Answers are wrong with enable_adaptive_verification, and right without it or with --enforce-eager. The "
    "counter of `observe` counts steps shorter than their graph.",
    workaround='`"enable_adaptive_verification": false` in --speculative-config; or '
    '--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\'.',
    removable=f"not yet: no release up to {NEWEST} has a remedy",
    in_caches="entries of generated tokens: what a layer puts into the cache is computed from the wrong attention of "
    "the one before",
    how_sure="follows from the code; wrong tokens were seen on a GPU, caches were not looked at",
)
