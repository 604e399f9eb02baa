"""`prompt-logprobs`: log-probabilities of prompts are computed from the target's output alone (PR 53520)."""

from __future__ import annotations

import ast
import functools
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction
from vllm_graphfix.source.patterns import matches_any

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"
_READ = "self._bookkeeping_sync(...)"
_PROMPTS = "self._get_prompt_logprobs_dict(...)"
_OF_ALL_TOKENS = "self._get_prompt_logprobs_dict(hidden_states[:num_scheduled_tokens], ...)"
_HANDED_ON = "self.execute_model_state = ExecuteModelState(...)"
_OPTION = "disable_padded_drafter_batch"
_MODELS = ("use_eagle", "uses_draft_model", "uses_extract_hidden_states")
"""Methods of a SpeculativeConfig, not all in every release, that tell if the drafter is a model, which may have CUDA
graphs."""
_NO_MODELS = ("use_ngram_gpu",)
"""Methods for a drafter that is no model but also runs before the bookkeeping, compiled for CUDAGraphMode.NONE."""
_IF_SCORED = ("self.num_prompt_logprobs", "bool(self.num_prompt_logprobs)", "len(self.num_prompt_logprobs) > 0")
"""Conditions that are true in each step that scores a prompt."""
_TARGETS = ("hidden_states", "scored")
"""Possible names of a copy."""
_CLONES = tuple(
    clone
    for copied in ("hidden_states", "hidden_states[:]", "hidden_states.detach()")
    for clone in (f"{copied}.clone()", f"torch.clone({copied})")
)
_COPIES = {
    target: tuple(
        f"{target} = {value}"
        for clone in _CLONES
        for value in (clone, *(f"{clone} if {scored} else hidden_states" for scored in _IF_SCORED))
    )
    for target in _TARGETS
}
_OUTPUTS = tuple(
    f"(num_nans_in_logits, {more}logprobs_lists, valid_sampled_token_ids, prompt_logprobs_dict, req_ids_output_copy, "
    f"req_id_to_index_output_copy, invalid_req_indices) = {_READ}"
    for more in ("", "num_nans_device, ")
)
_DRAFTERS = ("spec_config.use_eagle()", "spec_config.uses_draft_model()", "spec_config.uses_extract_hidden_states()")
_DRAFTS_FIRST = (
    *(f"use_gpu_toks = ({' or '.join(some)}) and not spec_config.{_OPTION}" for some in (_DRAFTERS[:2], _DRAFTERS)),
    f"drafter_runs_model_forward = {' or '.join(_DRAFTERS)}",
    f"use_gpu_toks = drafter_runs_model_forward and not spec_config.{_OPTION}",
)
"""Drafters that run before the bookkeeping."""
_OTHER_DRAFTS = (
    "if propose_drafts_after_bookkeeping:\n    ...",
    "if draft_after_bookkeeping:\n    ...",
    "if self.parallel_config.data_parallel_size > 1:\n    self.drafter.dummy_run(num_tokens=1)",
)
"""Other drafts, after the bookkeeping or for other ranks. `diagnose` judges the first of all drafts."""

READ_AFTER_DRAFT = Event(
    "prompt-logprobs-after-draft",
    "A step had to compute prompt log-probabilities from hidden states that may lie in CUDA graph memory, after the "
    "drafter had run: on stock they are computed from what its graphs leave there.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the drafts, the reading of prompt log-probabilities, and copies of hidden states before the drafts."""
    if not all(
        source.contains_word(_RUNNER, word) for word in ("_get_prompt_logprobs_dict", "propose_draft_token_ids")
    ):
        return Diagnosis.absent("no model runner V1 that drafts and returns prompt log-probabilities")
    sample, bookkeep, execute = (
        source.function(_RUNNER, f"GPUModelRunner.{name}")
        for name in ("sample_tokens", "_bookkeeping_sync", "execute_model")
    )
    if sample is not None and bookkeep is not None and execute is not None:
        first = next(iter(_calls_of_drafter(sample)), None)
        in_bookkeeping, directly = bookkeep.find(_PROMPTS), sample.find(_PROMPTS)
        read = sample.find_unique(_PROMPTS if directly else _READ)
        if first is not None and read is not None and len(in_bookkeeping) + len(directly) == 1:
            if read.lineno < first.lineno and _is_done_whenever_scored(sample.node.body, read):
                reason = "prompt log-probabilities are computed before the drafter runs"
                return Diagnosis.fixed(reason, sample.at(read))
            handed = (getattr(read, "args", [])[0 if directly else 3 :] or [None])[0]
            copied = _effective_copy(sample, execute, getattr(handed, "id", ""), first)
            if copied is not None and (directly or bookkeep.find_unique(_OF_ALL_TOKENS)):
                return Diagnosis.fixed("the hidden states are copied before the drafter runs", copied)
            late = first.lineno < read.lineno and bookkeep.find_unique(_OF_ALL_TOKENS)
            if late and getattr(handed, "id", "") == "hidden_states" and not _all_copies(sample) + _all_copies(execute):
                return Diagnosis.affected(
                    "the drafter runs before prompt log-probabilities are computed from the target's hidden states",
                    sample.at(first),
                    "draft-first",
                )
    return Diagnosis.unrecognised("prompt log-probabilities and drafts follow each other in a way", sample or _RUNNER)


def _calls_of_drafter(sample: Function) -> list[ast.stmt | ast.expr]:
    """Return the calls in `sample_tokens` that run the drafter, or its dummy run, in source order."""
    calls = sample.find("propose_draft_token_ids(...)") + sample.find("self.drafter.dummy_run(...)")
    return sorted(calls, key=lambda call: call.lineno)


def _all_copies(function: Function) -> list[ast.stmt | ast.expr]:
    return function.find(*chain.from_iterable(_COPIES.values()))


def _effective_copy(sample: Function, execute: Function, name: str, first: ast.stmt | ast.expr) -> str | None:
    """Return the place of the copy *name* that is made before the draft *first* in each step that scores a prompt."""
    copies = sample.find(*_COPIES.get(name, ()))
    if len(copies) == 1:
        # No other assignment, except for steps that score no prompt.
        others = sample.find(f"{name} = hidden_states") if name != "hidden_states" else [sample.node.body[0]]
        only = sample.assigned(name) == 1 + len(others) and all(other.lineno < copies[0].lineno for other in others)
        if only and copies[0].lineno < first.lineno and _is_done_whenever_scored(sample.node.body, copies[0]):
            return sample.at(copies[0])
    state = execute.find_unique(_HANDED_ON)
    by_target = execute.find(*_COPIES["hidden_states"])
    if name == "hidden_states" and len(by_target) == 1 and state is not None and not copies:
        return execute.at(by_target[0]) if execute.in_one_block(by_target[0], state, at_once=True) else None
    return None


def _is_done_whenever_scored(block: list[ast.stmt], part: ast.stmt | ast.expr) -> bool:
    """Tell if *part* runs in each step that runs *block* and scores a prompt."""
    for statement in block:
        if part in ast.walk(statement):
            if not hasattr(statement, "body"):
                return True
            scored = isinstance(statement, ast.If) and matches_any(statement.test, _IF_SCORED)
            return (scored or isinstance(statement, ast.With)) and _is_done_whenever_scored(statement.body, part)
    return False


def _state_read_late(runner: Any) -> Any:
    """Return the state of a step whose drafter runs before prompt log-probabilities are computed; None for others."""
    state, draft = runner.execute_model_state, runner.speculative_config
    if state is None or draft is None or draft.disable_padded_drafter_batch:
        return None
    for name in _MODELS:
        if getattr(draft, name, _is_not_there)():
            break
    else:  # drafters without a model run later, or without graphs
        return None
    scheduled = state.scheduler_output.num_scheduled_tokens
    if scheduled.keys().isdisjoint(runner.num_prompt_logprobs):  # preempted, or waiting
        return None
    # Larger than any graph, or no graphs (0): the hidden states have memory of their own.
    if len(state.hidden_states) > runner.compilation_config.max_cudagraph_capture_size:
        return None
    return state


def _is_not_there() -> bool:
    """Stand in for a method that a release does not have."""
    return False


def _copy_what_is_read_late(runner: Any, *, copies: bool) -> bool:
    """Tell if this step's state is read late, and copy it if *copies*.

    A function of its own, so that no local variable holds the copy when stock frees it at the end of the step.
    """
    state = _state_read_late(runner)
    if state is None:
        return False
    if copies:  # whole, since the drafter gets it too; at most the rows of the largest graph
        runner.execute_model_state = state._replace(hidden_states=state.hidden_states.clone())
    return True


def _sample_with_a_copy(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `GPUModelRunner.sample_tokens(grammar_output)`, which drafts before reading the prompts' hidden states."""
    read_after_draft, corrects = activity.counter(READ_AFTER_DRAFT), activity.corrects

    @functools.wraps(stock)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            # Empty in most steps; missing in a runner that was made without `__init__`.
            if getattr(self, "num_prompt_logprobs", None) and _copy_what_is_read_late(self, copies=corrects):
                read_after_draft.count += 1
        except Exception as error:
            activity.failed(error)
        return stock(self, *args, **kwargs)

    return sample_tokens


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need, unseen

    drafters = "eagle, eagle3, mtp, dflash, dspark, extract_hidden_states, or from 0.26.0 on a draft model"
    return (
        needs.RUNNER_V1,
        Need(
            "speculative decoding other than n-grams",
            _may_draft_in_graphs,
            drafters,
            clause="speculative decoding is on",
        ),
        needs.PROMPTS_IN_GRAPHS,
        unseen("requests with prompt_logprobs"),
    )


def _may_draft_in_graphs(deployment: Deployment, _: str) -> Fact:
    """Tell if the drafter is a model that model runner V1 gives graphs to."""
    from vllm_graphfix.deployment import Fact

    drafted = deployment.speculator("eagle", "eagle3", "mtp", "dflash", "draft_model", "extract_hidden_states")
    if drafted.holds and deployment.speculator("draft_model").holds and deployment.draft_model_lacks_graphs():
        return Fact(False, "this vLLM runs draft models without graphs")
    return drafted


FIX = fix(
    "prompt-logprobs",
    runner="V1",
    diagnose=diagnose,
    surroundings=(
        # The order of drafts and readers of the hidden states, and the drafters that come first
        Slice(
            _RUNNER,
            "GPUModelRunner.sample_tokens",
            f"hidden_states scored propose_draft_token_ids dummy_run _bookkeeping_sync _get_prompt_logprobs_dict "
            f"use_gpu_toks drafter_runs_model_forward {' '.join((_OPTION, *_MODELS, *_NO_MODELS))}",
        ),
        Slice(_RUNNER, "GPUModelRunner._bookkeeping_sync", "hidden_states _get_prompt_logprobs_dict"),
        Slice(
            _RUNNER,
            "GPUModelRunner._get_prompt_logprobs_dict",
            "hidden_states prompt_hidden_states num_prompt_logprobs_dict",
        ),
        # The hidden states of the target
        Slice(_RUNNER, "GPUModelRunner.execute_model", "hidden_states"),
        Slice(_RUNNER, "ExecuteModelState", "hidden_states"),
        # Other code that scores prompts
        Slice(_RUNNER, "", "_get_prompt_logprobs_dict"),
    ),
    recognised=(
        *chain.from_iterable(_COPIES.values()),
        "scored = hidden_states",
        *(f"{name} = {_PROMPTS}" for name in ("prompt_logprobs_dict", "scored")),
        "prompt_logprobs_dict = scored",
        *_OUTPUTS,
        *_DRAFTS_FIRST,
        *_OTHER_DRAFTS,
        # Does not change values
        "hidden_states.kv_connector_output = kv_connector_output",
    ),
    corrections=(Patch(_RUNNER_MODULE, "GPUModelRunner.sample_tokens", _sample_with_a_copy),),
    events=(READ_AFTER_DRAFT,),
    needs=needs,
    default_rationale="answers",
)
