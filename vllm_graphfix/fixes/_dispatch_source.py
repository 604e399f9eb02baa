"""The criterion by which each model runner takes a step for a decode: its shape alone, or the phase of its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_graphfix.fix import Diagnosis, Verdict

if TYPE_CHECKING:
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

RUNNER = "vllm/v1/worker/gpu_model_runner.py"
RUNNER_V2 = "vllm/v1/worker/gpu/model_runner.py"
_HYBRIDS_V2 = "vllm/v1/worker/gpu/model_states/mamba_hybrid.py"
GRAPHS_V2 = "vllm/v1/worker/gpu/cudagraph_utils.py"
UTILS = "vllm/v1/worker/utils.py"
_CONFIG = "vllm/config/vllm.py"

_LENGTH, _COUNT = (
    "max_num_scheduled_tokens == uniform_decode_query_len",
    "num_tokens == max_num_scheduled_tokens * num_reqs",
)
_BY_SHAPE = f"return ({_LENGTH} and {_COUNT}) if force_uniform_decode is None else force_uniform_decode"
_PREDICATE_CALL = (
    "uniform_decode = self._is_uniform_decode("
    "max_num_scheduled_tokens=max_num_scheduled_tokens, uniform_decode_query_len=self.uniform_decode_query_len, "
    "num_tokens=num_tokens, num_reqs=num_reqs, force_uniform_decode=force_uniform_decode{})"
)
PREDICATE_PARAMETERS = "max_num_scheduled_tokens, uniform_decode_query_len, num_tokens, num_reqs, force_uniform_decode"
_DETERMINE = "self._determine_batch_execution_and_padding(...)"
_DETERMINED = (
    "cudagraph_mode, batch_desc, should_ubatch, num_tokens_across_dp, cudagraph_stats = "
    "self._determine_batch_execution_and_padding(*..., num_tokens=num_tokens_unpadded, num_reqs=num_reqs, "
    "max_num_scheduled_tokens=max_num_scheduled_tokens)"
)
_PHASE = "self.input_batch.num_computed_tokens_cpu[:num_reqs] {} self.input_batch.num_prompt_tokens[:num_reqs]"
_PREFILLING = f"({_PHASE.format('<')}).any()"
_FORCED = tuple(
    f"force_uniform_decode=False if {prefilling} else None" for prefilling in (_PREFILLING, f"bool({_PREFILLING})")
)
"""A remedy at the call: a step with a row in its prompt is no decode, others are judged as before."""
_REMEDIES = tuple(
    (name, f"return ({' and '.join(conditions)}) if force_uniform_decode is None else force_uniform_decode", call)
    for name in ("past_prompt", "all_decodes", "past_prefill")
    for conditions in ((name, _COUNT), (name, _LENGTH, _COUNT), (_LENGTH, _COUNT, name))
    for call in (
        _PREDICATE_CALL.format(f", {name}=bool(({_PHASE.format('>=')}).all())"),
        _PREDICATE_CALL.format(f", {name}=not ({_PHASE.format('<')}).any()"),
    )
)
"""Remedies in the predicate by one more parameter: its name, the answer, and the call (PRs 53059, 47123)."""

_UNIFORM_V2 = (
    "if max_query_len == num_tokens // num_reqs and num_tokens == max_query_len * num_reqs: return max_query_len"
)
_COUNTED_V2 = "uniform_tok_count = get_uniform_token_count(num_reqs, num_toks, max_query_len)"
_UPDATED_V2 = (
    "np.minimum(self.req_states.num_computed_tokens_np, self.req_states.prefill_len.np, "
    "out=self.req_states.num_computed_prefill_tokens)"
)
_GATHERED_V2 = "batch_req_state, uniform_tok_count = self.gather_batch_req_state(scheduler_output, dummy_run)"
_DISPATCHED_V2 = tuple(
    f"batch_desc, {synchronised} = "
    "dispatch_cg_and_sync_dp(self.cudagraph_manager, num_reqs, num_toks, uniform_tok_count, *...)"
    for synchronised in ("num_tokens_across_dp", "dp_sync", "dp_sync_state")
)
_PREFILLING_V2 = (
    "is_prefilling_np = num_computed_prefill_tokens_np < prefill_len_np",
    "bool(is_prefilling_np.any())",
)
_ANSWERED_V2 = tuple(
    f"return batch_state, get_uniform_decode_token_count(num_reqs, num_toks, max_query_len, {phase})"
    for phase in ("batch_state.has_prefill", "decode_graph_eligible")
)
_BY_PHASE_V2 = tuple(
    f"if {phase} and is_uniform_query_len(num_reqs, num_tokens, max_query_len): return max_query_len"
    for phase in ("not has_prefill", "decode_graph_eligible")
)

V1, V2 = "shape-only-v1", "shape-only-v2"
BOTH = "shape-only-v1-v2"

RECOGNISED = (
    _BY_SHAPE,
    _PREDICATE_CALL.format(""),
    _DETERMINED,
    *(wording for _, *wordings in _REMEDIES for wording in wordings),
    _UNIFORM_V2,
    _COUNTED_V2,
    _UPDATED_V2,
    _GATHERED_V2,
    *_DISPATCHED_V2,
)


def judge_v1(source: Source) -> Diagnosis:
    uniform = source.function(RUNNER, "GPUModelRunner._is_uniform_decode")
    determine = source.function(RUNNER, "GPUModelRunner._determine_batch_execution_and_padding")
    execute = source.function(RUNNER, "GPUModelRunner.execute_model")
    if uniform is None and not source.contains_word(RUNNER, "uniform_decode", of="GPUModelRunner"):
        return Diagnosis.absent("no model runner V1 with graphs for decodes only")
    if uniform and determine and execute and execute.find_unique(_DETERMINED):
        by_shape = (
            uniform.signature == PREDICATE_PARAMETERS
            and uniform.find_unique(_BY_SHAPE)
            and determine.find_unique(_PREDICATE_CALL.format(""))
        )
        remedy = _place_of_remedy(uniform, determine, execute, by_shape=bool(by_shape))
        if remedy is not None:
            return Diagnosis.fixed("model runner V1 checks which phase the rows are in", remedy)
        forced = any(
            execute.call_has_keyword(_DETERMINE, f"{name}=...") for name in ("force_uniform_decode", "force_eager")
        )
        if by_shape and not forced:
            return Diagnosis.affected("model runner V1 treats a step as a decode by its shape alone", uniform.where, V1)
    return Diagnosis.unrecognised("model runner V1 tells decodes from prefills in a way", uniform or RUNNER)


def _place_of_remedy(uniform: Function, determine: Function, execute: Function, *, by_shape: bool) -> str | None:
    """Find the place where each row's computed tokens are compared with its prompt, and decide."""
    if by_shape:
        call = execute.find_unique(_DETERMINED)
        return (
            execute.at(call)
            if call and any(execute.call_has_keyword(_DETERMINE, forced) for forced in _FORCED)
            else None
        )
    if not execute.call_has_keyword(_DETERMINE, "force_uniform_decode=..."):
        for name, answered, called in _REMEDIES:
            place = determine.find_unique(called)
            if place and uniform.signature == f"{PREDICATE_PARAMETERS}, {name}" and uniform.find_unique(answered):
                return determine.at(place)
    return None


def judge_v2(source: Source) -> Diagnosis:
    if source.read(_HYBRIDS_V2) is None and not source.contains_word(RUNNER_V2, "MambaSpec"):
        return Diagnosis.absent("model runner V2 has no recurrent models")
    execute = source.function(RUNNER_V2, "GPUModelRunner.execute_model")
    gather = source.function(RUNNER_V2, "GPUModelRunner.gather_batch_req_state")
    by_phase = source.function(UTILS, "get_uniform_decode_token_count")
    by_shape = source.function(GRAPHS_V2, "get_uniform_token_count")
    if execute and gather and by_phase and by_shape is None:
        prefilling = gather.find_each(*_PREFILLING_V2)
        answers = zip(_ANSWERED_V2, _BY_PHASE_V2, strict=True)
        by_answer = any(gather.find_unique(answered) and by_phase.find_unique(phase) for answered, phase in answers)
        if execute.find_unique(_GATHERED_V2) and prefilling and by_answer:
            return Diagnosis.fixed("model runner V2 checks which phase the rows are in", gather.at(prefilling[0]))
    elif (
        execute
        and by_shape
        and gather is None
        and by_shape.find_unique(_UNIFORM_V2)
        and execute.find_unique(_COUNTED_V2)
    ):
        return Diagnosis.affected("model runner V2 treats a step as a decode by its shape alone", by_shape.where, V2)
    return Diagnosis.unrecognised("model runner V2 tells decodes from prefills in a way", execute or RUNNER_V2)


def serves_them_wrong_on_v2(source: Source) -> bool:
    """Tell if model runner V2 has the defect without refusing recurrent models, as 0.21.0 - 0.22.1 do."""
    refuses = b'"hybrid/mamba models"' in (source.read(_CONFIG) or b"")
    return judge_v2(source).verdict is Verdict.AFFECTED and not refuses
