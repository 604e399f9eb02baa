"""`adaptive-schedule`: attention's metadata are made for the longest query of the decode graph's capture.

With adaptive verification, such a graph has no fixed number of tokens per request, but a largest one.
"""

from __future__ import annotations

import ast
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import correct_result, fix
from vllm_graphfix.fix import Diagnosis, Event, Slice, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source

_RUNNER = "vllm/v1/worker/gpu/model_runner.py"
_GRAPHS = "vllm/v1/worker/gpu/cudagraph_utils.py"
_STATES = "vllm/v1/worker/gpu/model_states/default.py"
_BATCH = "vllm/v1/worker/gpu/input_batch.py"
_VERIFICATION = "vllm/v1/worker/gpu/spec_decode/adaptive_verification.py"
_METADATA = "vllm/v1/worker/gpu/attn_utils.py"
_BACKEND = "vllm/v1/attention/backends/flash_attn.py"
_RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"
_PREPARE = "GPUModelRunner.prepare_inputs"

_LONGEST = "max_query_len"
_OF_THE_STEP = "int(num_scheduled_tokens_upper_bound.max()) if adaptive_verification is not None else None"
_OF_THE_GRAPH = ("batch_desc.max_query_len", f"batch_desc.max_query_len or ({_OF_THE_STEP})")
"""Remedies."""
_MADE = "InputBatch(*..., max_query_len={})"
_ALLOWED = "desc.max_query_len is None or (max_query_len is not None and desc.max_query_len >= max_query_len)"
"""A graph is chosen for any step whose longest query is at most the graph's."""
_PREPARED = "self.prepare_inputs(scheduler_output, batch_req_state, batch_desc, *...)"
_DISPATCHED = "dispatch_cg_and_sync_dp(*..., max_query_len=max_query_len)"
_CAPTURED = (
    "BatchExecutionDescriptor(*..., max_query_len=self.decode_query_len)",
    "InputBatch.make_dummy(*..., max_query_len=max_query_len)",
)
"""The capture has the longest query that the graph is chosen for."""
_READ = "max_query_len = common_attn_metadata.max_query_len"

SCHEDULE_OF_A_SHORTER_STEP = Event(
    "schedule-of-a-shorter-step",
    "A step whose longest query is shorter than that of the capture was prepared for a full graph: on stock the "
    "metadata of attention, FlashAttention 3's schedule among them, are made for the shorter one.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the longest query that the batch of a step gets, and the choice of a graph by that of the step."""
    if not source.contains_word(_RUNNER, "adaptive_verification") and not source.contains_word(
        _GRAPHS, "varlen_decode"
    ):
        return Diagnosis.absent("full graphs of decodes have a fixed number of tokens a request")
    prepare, execute = source.function(_RUNNER, _PREPARE), source.function(_RUNNER, "GPUModelRunner.execute_model")
    build, graphs = source.function(_BACKEND, "FlashAttentionMetadataBuilder.build"), source.module(_GRAPHS)
    made = prepare and prepare.find_unique(_MADE.format("..."))
    if prepare and execute and made and build and graphs and graphs.find_each(_ALLOWED, *_CAPTURED):
        longest = next(each.value for each in getattr(made, "keywords", ()) if each.arg == _LONGEST)
        chosen_for_the_step = (
            execute.find_unique(_PREPARED) is not None and execute.find_unique(_DISPATCHED) is not None
        )
        read_as_it_is = build.find_unique(_READ) is not None and build.assigned(_LONGEST) == 1
        if chosen_for_the_step and read_as_it_is and ast.unparse(longest) == _OF_THE_STEP:
            return Diagnosis.affected(
                "builders are told of the step's longest query, and a graph launches kernels for that of its capture",
                prepare.at(longest),
                "longest-of-the-step",
            )
        if chosen_for_the_step and ast.unparse(longest) in _OF_THE_GRAPH:
            return Diagnosis.fixed("builders are told of the longest query of the graph", prepare.at(longest))
    return Diagnosis.unrecognised(
        "the longest query of a step with adaptive verification is told in a way", prepare or _RUNNER
    )


@correct_result(_RUNNER_MODULE, _PREPARE, SCHEDULE_OF_A_SHORTER_STEP)
def set_longest_of_the_graph(
    batch: Any, self: Any, scheduler_output: Any, batch_req_state: Any, batch_desc: Any, *args: Any, **kwargs: Any
) -> Callable[[], None] | None:
    """Set the longest query of a step's batch to that of the dummy batch of its graph's capture.

    All readers treat it as an upper bound. None where the step has no such graph, or is not shorter.
    """
    of_the_graph = batch_desc.max_query_len
    if of_the_graph is None or batch_desc.cg_mode.name != "FULL":
        return None
    longest = batch.max_query_len
    if longest is None:
        longest = batch.num_scheduled_tokens.max()  # a NumPy array
    return partial(setattr, batch, _LONGEST, of_the_graph) if longest < of_the_graph else None


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    return (
        needs.RUNNER_V2,
        Need("DSpark", lambda deployment, _: deployment.speculator("dspark"), clause="drafts come from DSpark"),
        Need(
            "enable_adaptive_verification",
            _verifies_adaptively,
            "in --speculative-config",
            usual=False,
            clause="enable_adaptive_verification is on",
        ),
        needs.FULL_GRAPHS,
        Need(
            "FlashAttention 3",
            lambda deployment, _: deployment.flash_attention_3(),
            "Hopper, and no latent attention (MLA)",
            clause="attention runs on FlashAttention 3",
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


FIX = fix(
    "adaptive-schedule",
    runner="V2",
    diagnose=diagnose,
    surroundings=(
        # Code that sets the longest query of a step, or chooses a graph by it
        Slice(_RUNNER, "", _LONGEST),
        Slice(_GRAPHS, "", _LONGEST, Verdict.FIXED),
        Slice(_BATCH, "", _LONGEST),
        Slice(_VERIFICATION, "", _LONGEST),
        # The way from the batch to the metadata
        Slice(_STATES, "", _LONGEST),
        Slice(_METADATA, "", _LONGEST, Verdict.AFFECTED),
        # The schedule that graphs read
        Slice(_BACKEND, "", "use_full_cuda_graph", Verdict.AFFECTED),
        Slice(_BACKEND, "FlashAttentionMetadataBuilder.__init__", "aot_schedule", Verdict.AFFECTED),
    ),
    recognised=(
        *(f"input_batch = {_MADE.format(longest)}" for longest in (_OF_THE_STEP, *_OF_THE_GRAPH)),
        *(f"batch_desc, {each} = {_DISPATCHED}" for each in ("num_tokens_across_dp", "dp_sync", "dp_sync_state")),
    ),
    corrections=(set_longest_of_the_graph,),
    events=(SCHEDULE_OF_A_SHORTER_STEP,),
    needs=needs,
    default_rationale="answers",
)
