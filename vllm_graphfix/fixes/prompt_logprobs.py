"""`prompt-logprobs`: log-probabilities of prompts are computed from the target's output (PR 53520).

The drafter's output is not used for them.
"""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import NEWEST, About

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"
_STATE = "self.execute_model_state"
_READ = "self._bookkeeping_sync(...)"
_PROMPTS = "self._get_prompt_logprobs_dict(...)"
_COPIED = "the hidden states are copied before the drafter runs"
_OPTION = "disable_padded_drafter_batch"
_MODELS = ("use_eagle", "uses_draft_model", "uses_extract_hidden_states")
"""Methods of a SpeculativeConfig, not all in every release: whether the drafter is a model that may have CUDA
graphs."""
_NO_MODELS = ("use_ngram_gpu",)
"""The methods for a drafter that is no model but also runs before the bookkeeping, compiled for CUDAGraphMode.NONE."""

READ_AFTER_DRAFT = Event(
    "prompt-logprobs-after-draft",
    "A step had to compute prompt log-probabilities from hidden states that may lie in CUDA graph memory, after the "
    "drafter had run: on stock they are computed from what its graphs leave there.",
)


def diagnose(source: Source) -> Diagnosis:
    if not all(source.says(_RUNNER, word) for word in ("_get_prompt_logprobs_dict", "propose_draft_token_ids")):
        return Diagnosis(Verdict.ABSENT, "no model runner V1 that drafts and returns prompt log-probabilities")
    sample, bookkeep, prompts, execute = (
        source.function(_RUNNER, f"GPUModelRunner.{name}")
        for name in ("sample_tokens", "_bookkeeping_sync", "_get_prompt_logprobs_dict", "execute_model")
    )
    if sample is not None and bookkeep is not None and prompts is not None:
        drafts = _calls_of_drafter(sample)
        read = sample.only(_READ if bookkeep.find(_PROMPTS) else _PROMPTS)
        if drafts and read is not None and not (bookkeep.find(_PROMPTS) and sample.find(_PROMPTS)):
            first = drafts[0]
            if read.lineno < first.lineno and _is_done_whenever(first, sample, read):
                reason = "prompt log-probabilities are computed before the drafter runs"
                return Diagnosis(Verdict.FIXED, reason, sample.at(read))
            copied = {name: copy for name, copy in _copies(sample) if copy.lineno < first.lineno}
            kept = [copied[name] for name in _names_in(read) if name in copied]
            if kept and _is_done_whenever(first, sample, kept[0]):
                return Diagnosis(Verdict.FIXED, _COPIED, sample.at(kept[0]))
            before = [copy for name, copy in _copies(execute) if name == "hidden_states"] if execute else []
            if execute is not None and before and _is_done_whenever(None, execute, before[0]):
                return Diagnosis(Verdict.FIXED, _COPIED, execute.at(before[0]))
            late = first.lineno < read.lineno and not kept and not before
            if late and _reads_late(source, sample, bookkeep, prompts):
                return Diagnosis(
                    Verdict.AFFECTED,
                    "the drafter runs before prompt log-probabilities are computed from the target's hidden states",
                    sample.at(first),
                    "draft-first",
                )
    return Diagnosis.unrecognised("prompt log-probabilities and drafts follow each other in a way", sample or _RUNNER)


def _calls_of_drafter(sample: Function) -> list[ast.stmt | ast.expr]:
    """Where `sample_tokens` runs the drafter, in source order.

    It calls a function of its own, or the drafter's dummy run.
    """
    calls = sample.find("propose_draft_token_ids(...)") + sample.find("self.drafter.dummy_run(...)")
    return sorted(calls, key=lambda call: call.lineno)


def _copies(function: Function) -> list[tuple[str, ast.Assign]]:
    """Assignments of a copy of the hidden states to a name, and that name."""
    return [
        (target.id, node)
        for node in function.find("...")
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and "hidden_states" in _names_in(node.value)
        if any(isinstance(part, ast.Attribute) and part.attr == "clone" for part in ast.walk(node.value))
    ]


def _names_in(part: ast.AST) -> list[str]:
    return [node.id for node in ast.walk(part) if isinstance(node, ast.Name)]


def _is_done_whenever(first: ast.stmt | ast.expr | None, function: Function, part: ast.stmt | ast.expr) -> bool:
    """Whether *part* is done wherever the draft *first* is, or a prompt's log-probabilities are asked for."""
    for node in ast.walk(function.node):
        if isinstance(node, ast.If) and "prompt_logprobs" not in ast.unparse(node.test):
            inside = set(ast.walk(node))
            if part in inside and first not in inside:
                return False
    return True


def _reads_late(source: Source, sample: Function, bookkeep: Function, prompts: Function) -> bool:
    """Whether the layer knows all that it relies on, and nothing else is done to the hidden states."""
    state = source.function(_RUNNER, "ExecuteModelState")
    unpacked = sample.assignments("scheduler_output", _STATE)
    if state is None or not state.find("NamedTuple") or len(unpacked) != 1 or len(sample.find(_STATE)) != 3:
        return False
    fields = [
        node.target.id
        for node in state.node.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    names = [getattr(name, "id", None) for name in getattr(unpacked[0].targets[0], "elts", ())]
    asked = {
        node.attr
        for node in ast.walk(sample.node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "spec_config"
    }
    own = sample.find("self.propose_draft_token_ids(...)")  # in the function that it calls for each of its drafts
    given = getattr(sample.only(_READ), "args", [])[3:4]
    return (
        names == fields
        and "hidden_states" in fields
        and sample.mentions(hidden_states=3)
        and [getattr(argument, "id", None) for argument in given] == ["hidden_states"]
        and len(own) == 1
        and bool(sample.only("spec_config = self.speculative_config"))
        and {_OPTION, _MODELS[0]} <= asked <= {_OPTION, *_MODELS, *_NO_MODELS}
        and bookkeep.takes.startswith(
            "self, scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens"
        )
        and bookkeep.mentions(hidden_states=1)
        and bool(bookkeep.only("hidden_states[:num_scheduled_tokens]"))
        and prompts.takes == "self, hidden_states, num_scheduled_tokens"
        and bool(prompts.only("num_prompt_logprobs_dict = self.num_prompt_logprobs"))
        and bool(prompts.loops_over("num_prompt_logprobs_dict.items()"))
    )


def _state_read_late(runner: Any) -> Any:
    """The state of a step whose drafter runs before log-probabilities of a prompt are computed.

    None for every other step.
    """
    state, draft = runner.execute_model_state, runner.speculative_config
    if state is None or draft is None or draft.disable_padded_drafter_batch:
        return None
    for name in _MODELS:
        if getattr(draft, name, _is_not_there)():
            break
    else:  # drafts of n-grams and the like are made afterwards, or without graphs
        return None
    scheduled = state.scheduler_output.num_scheduled_tokens
    if scheduled.keys().isdisjoint(runner.num_prompt_logprobs):  # preempted, or waits for its turn
        return None
    # More tokens than any graph takes, and 0 where there are no graphs: the hidden states have memory of their own.
    if len(state.hidden_states) > runner.compilation_config.max_cudagraph_capture_size:
        return None
    return state


def _is_not_there() -> bool:
    """In place of a method that a release does not have."""
    return False


def _copy_what_is_read_late(runner: Any, *, copies: bool) -> bool:
    """Whether this step's state is read late, with the state copied if *copies*.

    In a function of its own, so that nothing here holds the copy when stock lets it go, at the end of the step.
    """
    state = _state_read_late(runner)
    if state is None:
        return False
    if copies:  # whole, since the drafter gets it too: at most as many rows as the largest graph
        runner.execute_model_state = state._replace(hidden_states=state.hidden_states.clone())
    return True


def _sample_with_a_copy(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `GPUModelRunner.sample_tokens(grammar_output)`, which drafts before it reads the prompts' hidden states."""
    read_after_draft, corrects = activity.counter(READ_AFTER_DRAFT), activity.corrects

    @functools.wraps(stock)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            # Nobody asks for them in most steps.
            if self.num_prompt_logprobs and _copy_what_is_read_late(self, copies=corrects):
                read_after_draft.count += 1
        except Exception as error:
            activity.failed(error)
        return stock(self, *args, **kwargs)

    return sample_tokens


_TARGET = "GPUModelRunner.sample_tokens"


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_RUNNER_MODULE, _TARGET, _sample_with_a_copy),)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need, unseen

    methods = ("eagle", "eagle3", "mtp", "dflash", "draft_model", "extract_hidden_states")
    drafters = "eagle, eagle3, mtp, dflash, dspark, a draft model or extract_hidden_states"
    return (
        needs.RUNNER_V1,
        Need("speculative decoding", lambda deployment, _: deployment.speculator(*methods), drafters),
        needs.PROMPTS_IN_GRAPHS,
        unseen("requests with prompt_logprobs"),
    )


FIX = Fix(
    number=8,
    name="prompt-logprobs",
    runner="V1",
    reads=(_RUNNER,),
    modules=(_RUNNER_MODULE,),
    diagnose=diagnose,
    patches=patches,
    events=(READ_AFTER_DRAFT,),
    needs=needs,
    ground="answers",
    evidence=(
        f"{_RUNNER}::GPUModelRunner.propose_draft_token_ids",
        f"{_RUNNER}::GPUModelRunner._sample",
    ),
)

ABOUT = About(
    pr=53520,
    references=("issue 53488",),
    summary="with a draft model, prompt_logprobs are the target's",
    releases=f"0.14.1 - {NEWEST}; no stock release up to {NEWEST} has a remedy",
    seen="wrong `prompt_logprobs` of short prompts; generated tokens are right",
    first_test="the same prompt above and below the largest capture size",
    symptom="With Eagle, MTP or a draft model, prompt_logprobs of prompts up to the largest capture size are silently "
    "wrong. Generated tokens are right.",
    cause="The drafter runs before prompt log-probabilities are computed from the target's hidden states. These are "
    "the output of a CUDA graph, kept only as an address: their memory is in the pool that the drafter's graphs "
    "share, and those graphs write there.",
    remedy="In a step that computes prompt log-probabilities after a draft, the hidden states are copied before the "
    "draft, for that step. Nothing is copied in a step without such a request, in one with more tokens than the "
    "largest graph takes, or where the drafter runs afterwards.",
    detect="The same prompt scored with and without --speculative-config, or just below and just above the largest "
    "capture size: prompt_logprobs differ.",
    workaround="Score prompts on an engine without --speculative-config, or with --enforce-eager, "
    "or '\"disable_padded_drafter_batch\": true' in --speculative-config.",
    removable="once PR 53520 is in the release that you run",
    in_caches="nothing: log-probabilities are not stored, keys and values are right",
    how_sure="follows from the code",
)
