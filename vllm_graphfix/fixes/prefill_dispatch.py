"""`prefill-dispatch`: what a builder takes for a prefill never replays a decode graph (PR 53059).

This concerns recurrent models, and steps that have the shape of a decode.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import NEWEST, About
from vllm_graphfix.fixes._recurrent_builders import MAMBA, MAMBA2, READS, Builders, with_builders

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"
_RUNNER_V2 = "vllm/v1/worker/gpu/model_runner.py"
_RUNNER_V2_MODULE = "vllm.v1.worker.gpu.model_runner"
_BATCH = "vllm/v1/worker/gpu_input_batch.py"
_HYBRIDS_V2 = "vllm/v1/worker/gpu/model_states/mamba_hybrid.py"
_GRAPHS_V2 = "vllm/v1/worker/gpu/cudagraph_utils.py"
_UTILS = "vllm/v1/worker/utils.py"
_CONFIG = "vllm/config/vllm.py"
_DISPATCHER = "vllm/v1/cudagraph_dispatcher.py"

_SHAPE = "max_num_scheduled_tokens == uniform_decode_query_len and num_tokens == max_num_scheduled_tokens * num_reqs"
_OVERRIDDEN = f"return ({_SHAPE}) if force_uniform_decode is None else force_uniform_decode"
_ASKS = (
    "uniform_decode = self._is_uniform_decode("
    "max_num_scheduled_tokens=max_num_scheduled_tokens, uniform_decode_query_len=self.uniform_decode_query_len, "
    "num_tokens=num_tokens, num_reqs=num_reqs, force_uniform_decode=force_uniform_decode)"
)
_TAKES = "max_num_scheduled_tokens, uniform_decode_query_len, num_tokens, num_reqs, force_uniform_decode"
_DETERMINE = "self._determine_batch_execution_and_padding(...)"
_PHASES = tuple(
    f"self.input_batch.num_computed_tokens_cpu[...] {compared} self.input_batch.num_prompt_tokens[...]"
    for compared in (">=", "<")
)

_V1, _V2 = "shape-only-v1", "shape-only-v2"
_BOTH = "shape-only-v1-v2"

PREFILL_AS_DECODE = Event(
    "prefill-as-decode",
    "A step had the shape of a decode, and a builder of the model's recurrent layers takes a request of it for a "
    "prefill: on stock it replays a full decode graph, with stale indices.",
)


def diagnose(source: Source) -> Diagnosis:
    v1, v2 = _of_v1(source), _of_v2(source)
    for found in (v1, v2):
        if found.verdict is Verdict.UNRECOGNISED:
            return found
    affected = [found for found in (v1, v2) if found.verdict is Verdict.AFFECTED]
    if not affected:
        return v1 if v2.verdict is Verdict.ABSENT else v2
    if affected == [v1, v2]:
        v1 = v1._replace(reason="both model runners treat a step as a decode by its shape alone", shape=_BOTH)
    return with_builders(source, v1 if affected[0].shape == _V1 else v2)


def _of_v1(source: Source) -> Diagnosis:
    if not source.says(_RUNNER, "_is_uniform_decode", of="GPUModelRunner"):
        if source.read(_RUNNER) is not None and not source.says(_RUNNER, "GPUModelRunner"):
            return Diagnosis.unrecognised("model runner V1 is in a place", _RUNNER)
        if source.says(_RUNNER, "uniform_decode"):
            return Diagnosis.unrecognised("model runner V1 tells decodes from prefills by a condition", _RUNNER)
        return Diagnosis(Verdict.ABSENT, "no model runner V1 with graphs for decodes only")
    uniform = source.function(_RUNNER, "GPUModelRunner._is_uniform_decode")
    determine = source.function(_RUNNER, "GPUModelRunner._determine_batch_execution_and_padding")
    execute = source.function(_RUNNER, "GPUModelRunner.execute_model")
    dummy = source.function(_RUNNER, "GPUModelRunner._dummy_run")
    if uniform and determine and execute and dummy and dummy.gives(_DETERMINE, "force_uniform_decode=uniform_decode"):
        for place in (determine, execute):
            if phase := _asked_phase(place, uniform):
                return Diagnosis(Verdict.FIXED, "model runner V1 checks which phase the rows are in", phase)
        by_shape = (
            uniform.takes == _TAKES
            and uniform.only(_OVERRIDDEN)
            and uniform.mentions(max_num_scheduled_tokens=2, num_reqs=1, force_uniform_decode=2)
        )
        asked_once = (
            determine.takes.startswith(
                "self, num_tokens, num_reqs, num_scheduled_tokens_np, max_num_scheduled_tokens, "
            )
            and determine.only(_ASKS)
            and determine.mentions(uniform_decode=3, force_uniform_decode=1)
            and execute.only(_DETERMINE)
            and not execute.gives(_DETERMINE, "force_uniform_decode=...")
        )
        counted = ("num_computed_tokens_cpu", "num_prompt_tokens", "num_tokens_no_spec")
        if by_shape and asked_once and all(source.says(_BATCH, name) for name in counted):
            return Diagnosis(
                Verdict.AFFECTED, "model runner V1 treats a step as a decode by its shape alone", uniform.where, _V1
            )
    return Diagnosis.unrecognised("model runner V1 tells decodes from prefills in a way", uniform or _RUNNER)


def _asked_phase(place: Function, uniform: Function) -> str | None:
    """Where *place* compares the number of computed tokens with the prompts (PRs 53059, 47123).

    The answer must go to the predicate or take its place.
    """
    compared = [part for pattern in _PHASES for part in place.find(pattern)]
    more = [name for name in uniform.parameters if name not in _TAKES.split(", ") and uniform.mentions(**{name: 1})]
    goes_on = place.gives(_DETERMINE, "force_uniform_decode=...") or any(
        place.gives("self._is_uniform_decode(...)", f"{name}=...") for name in more
    )
    return place.at(compared[0]) if compared and goes_on else None


def _of_v2(source: Source) -> Diagnosis:
    if source.read(_HYBRIDS_V2) is None and not source.says(_RUNNER_V2, "MambaSpec"):
        return Diagnosis(Verdict.ABSENT, "model runner V2 has no recurrent models")
    execute = source.function(_RUNNER_V2, "GPUModelRunner.execute_model")
    gather = source.function(_RUNNER_V2, "GPUModelRunner.gather_batch_req_state")
    update = source.function(_RUNNER_V2, "GPUModelRunner.update_requests")
    by_phase = source.function(_UTILS, "get_uniform_decode_token_count")
    by_shape = source.function(_GRAPHS_V2, "get_uniform_token_count")
    if execute and gather and by_phase and by_shape is None:
        asked = execute.only(
            "batch_req_state, uniform_tok_count = self.gather_batch_req_state(scheduler_output, dummy_run)"
        )
        told = gather.only("is_prefilling_np = num_computed_prefill_tokens_np < prefill_len_np")
        answered = gather.only("return batch_state, get_uniform_decode_token_count(...)")
        phase = by_phase.parameters[3:]
        if asked and told and answered and len(phase) == 1 and by_phase.mentions(**{phase[0]: 1}):
            return Diagnosis(Verdict.FIXED, "model runner V2 checks which phase the rows are in", gather.at(told))
    elif execute and update and by_shape and gather is None:
        shape_alone = (
            by_shape.takes == "num_reqs, num_tokens, max_query_len"
            and by_shape.only(
                "if max_query_len == num_tokens // num_reqs and num_tokens == max_query_len * num_reqs: return "
                "max_query_len"
            )
            and by_shape.mentions(num_reqs=2, num_tokens=2, max_query_len=3)
        )
        in_order = execute.each(
            "self.update_requests(scheduler_output)",
            "uniform_tok_count = get_uniform_token_count(num_reqs, num_toks, max_query_len)",
            "dispatch_cg_and_sync_dp(...)",
        )
        after = source.function(_RUNNER_V2, "GPUModelRunner.postprocess")
        kept = update.only(
            "np.minimum(self.req_states.num_computed_tokens_np, self.req_states.prefill_len.np, "
            "out=self.req_states.num_computed_prefill_tokens)"
        ) or (
            after and after.only("np.minimum(computed_prefill, self.req_states.prefill_len.np, out=computed_prefill)")
        )
        if (
            shape_alone
            and [part.lineno for part in in_order] == sorted(part.lineno for part in in_order)
            and len(in_order) == 3
            and kept
            and execute.mentions(uniform_tok_count=2)
            and execute.only("batch_desc, num_tokens_across_dp = dispatch_cg_and_sync_dp(...)")
            and update.takes == "self, scheduler_output"
            and source.says(_GRAPHS_V2, "_capture_descs")
        ):
            return Diagnosis(
                Verdict.AFFECTED, "model runner V2 treats a step as a decode by its shape alone", by_shape.where, _V2
            )
    return Diagnosis.unrecognised("model runner V2 tells decodes from prefills in a way", execute or _RUNNER_V2)


# -- model runner V1


def _around_dispatch(stock: StockFunction, activity: Activity, *, builders: Builders) -> StockFunction:
    """Wraps `_determine_batch_execution_and_padding`, before ranks of data parallelism are asked what they want."""
    as_decode, corrects = activity.counter(PREFILL_AS_DECODE), activity.corrects

    @functools.wraps(stock)
    def _determine_batch_execution_and_padding(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if _prefills_as_decode(builders, self, args, kwargs):
                if corrects:
                    kwargs["force_uniform_decode"] = False
                as_decode.count += 1
        except Exception as error:
            activity.failed(error)
        return stock(self, *args, **kwargs)

    return _determine_batch_execution_and_padding


def _prefills_as_decode(builders: Builders, runner: Any, args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    """Whether stock would replay a decode graph for a real step with a row that a builder takes for a prefill.

    Reads the batch's `num_computed_tokens_cpu`, `num_prompt_tokens` and `num_tokens_no_spec`, (max_num_reqs,) int32 of
    NumPy.
    """
    # A capture and a dummy run force the answer, and vLLM gives all of it by name.
    if args or given.get("force_uniform_decode") is not None or given.get("force_eager"):
        return False
    tokens, rows, length = given["num_tokens"], given["num_reqs"], given["max_num_scheduled_tokens"]
    if length != runner.uniform_decode_query_len or tokens != length * rows:
        return False
    if (prefills := builders.of(runner)) is None:
        return False
    batch, pipelined = runner.input_batch, runner.parallel_config.pipeline_parallel_size > 1
    computed = batch.num_computed_tokens_cpu[:rows]
    if length == prefills.one_token == 1:
        # Only a row of which nothing was computed is taken, whatever its prompt: vLLM refuses requests without tokens.
        if not _any_zero(computed):
            return False
    else:
        # A request that was preempted computes its own tokens again, and a decode feeds the last one that is known; the
        # stages of a pipeline may not know the same ones.
        prompt = batch.num_prompt_tokens[:rows]
        known = prompt if pipelined else batch.num_tokens_no_spec[:rows]
        taken = prefills.rows(length, computed, prompt, known)
        # Bytes, since `any` of arrays this small costs more than all that is here.
        if taken is None or 1 not in taken.tobytes():
            return False
    compilation = runner.compilation_config
    if pipelined and compilation.pass_config.enable_sp:
        return False  # the worker asks too, before the batch is updated, and has to come to the same number of tokens
    return _decode_graphs(runner.cudagraph_dispatcher) and tokens <= compilation.max_cudagraph_capture_size


_LISTED = 64
"""Rows. With cold caches, as in an engine, a list of so few takes less time than any operation on an array."""


def _any_zero(computed: Any) -> bool:
    """Whether some row has no computed token; *computed* is (rows,) int32 of NumPy, with one row or more."""
    if len(computed) <= _LISTED:
        return 0 in computed.tolist()
    return not computed[computed.argmin()]  # `all` and `min` take twice as long


def _decode_graphs(manager: Any) -> bool:
    """Whether decodes have full graphs of their own: FULL_DECODE_ONLY, FULL_AND_PIECEWISE.

    In mode FULL no shape is asked for.
    """
    mode = manager.cudagraph_mode
    return bool(mode.separate_routine()) and mode.decode_mode().name == "FULL"


# -- model runner V2


class _Step:
    """The step that `update_requests` prepares, up to its dispatch in the same `execute_model`."""

    manager: Any = None
    """The one that is to dispatch a step with a row that a builder takes for a prefill."""


def _note_prefills(stock: StockFunction, activity: Activity, *, step: _Step, builders: Builders) -> StockFunction:
    """Wraps `update_requests`, after which the numbers of the step's requests are the step's."""

    @functools.wraps(stock)
    def update_requests(self: Any, *args: Any, **kwargs: Any) -> Any:
        returned = stock(self, *args, **kwargs)
        try:
            step.manager = None
            if _prefills_in_decode_shape(builders, self, args[0] if args else kwargs["scheduler_output"]):
                step.manager = self.cudagraph_manager
        except Exception as error:
            activity.failed(error)
        return returned

    return update_requests


def _prefills_in_decode_shape(builders: Builders, runner: Any, scheduled: Any) -> bool:
    """Whether a builder takes a scheduled request for a prefill, in a step shaped like a decode.

    In that shape all requests may have as many tokens as a decode. Reads `req_states`: `num_computed_prefill_tokens`
    and `prefill_len`, (max_num_reqs,) int32 of NumPy. A request that was preempted comes again as one whose own tokens
    are to be prefilled.
    """
    tokens = scheduled.num_scheduled_tokens
    rows, total = len(tokens), scheduled.total_num_scheduled_tokens
    if not rows or total % rows or total > rows * runner.decode_query_len:
        return False
    if (prefills := builders.of(runner)) is None:
        return False
    states, prompt = runner.req_states, runner.req_states.prefill_len.np
    slots = prefills.rows(total // rows, states.num_computed_prefill_tokens, prompt, prompt)
    taken = b"" if slots is None else slots.tobytes()
    slot = taken.find(1)
    while slot >= 0:  # the slots of requests that are gone, or wait, are looked at too
        if states.index_to_req_id.get(slot) in tokens:
            return True
        slot = taken.find(1, slot + 1)
    return False


def _around_noted_dispatch(stock: StockFunction, activity: Activity, *, step: _Step) -> StockFunction:
    """Wraps the name `dispatch_cg_and_sync_dp`; what ranks of data parallelism are told is corrected with it."""
    as_decode, corrects = activity.counter(PREFILL_AS_DECODE), activity.corrects

    @functools.wraps(stock)
    def dispatch_cg_and_sync_dp(*args: Any, **kwargs: Any) -> Any:
        try:
            if _takes_for_decode(step, args, kwargs):
                if corrects:
                    args = (*args[:3], None, *args[4:])
                as_decode.count += 1
        except Exception as error:
            activity.failed(error)
        return stock(*args, **kwargs)

    return dispatch_cg_and_sync_dp


def _takes_for_decode(step: _Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether stock would replay a decode graph for the step that was noted.

    `args` are (cudagraph_manager, num_reqs, num_tokens, uniform_token_count, …).
    """
    manager, step.manager = step.manager, None
    if manager is None or len(args) < 4 or args[0] is not manager or kwargs.get("need_eager"):
        return False
    tokens, uniform = args[2:4]
    if uniform is None or tokens > manager.compilation_config.max_cudagraph_capture_size:
        return False
    # With drafts whose number changes, decodes of several lengths have graphs.
    captured = (graph for graphs in manager._capture_descs.values() for graph in graphs)
    return any(graph.uniform_token_count == uniform and graph.cg_mode.name == "FULL" for graph in captured)


_TARGET = "GPUModelRunner._determine_batch_execution_and_padding"
_UPDATE_V2, _DISPATCH_V2 = "GPUModelRunner.update_requests", "dispatch_cg_and_sync_dp"


def patches(shape: str) -> tuple[Patch, ...]:
    runners, _, words = shape.partition(" ")
    step, builders = _Step(), Builders(words, v2=True)
    of_v1 = Patch(_RUNNER_MODULE, _TARGET, functools.partial(_around_dispatch, builders=Builders(words, v2=False)))
    of_v2 = (
        Patch(_RUNNER_V2_MODULE, _UPDATE_V2, functools.partial(_note_prefills, step=step, builders=builders)),
        Patch(_RUNNER_V2_MODULE, _DISPATCH_V2, functools.partial(_around_noted_dispatch, step=step)),
    )
    return {_V1: (of_v1,), _V2: of_v2, _BOTH: (of_v1, *of_v2)}[runners]


def _v2_serves_them_wrong(source: Source) -> bool:
    """Whether model runner V2 has the defect, and does not refuse recurrent models, as 0.21.0 - 0.22.1 do."""
    refuses = b'"hybrid/mamba models"' in (source.read(_CONFIG) or b"")
    return _of_v2(source).verdict is Verdict.AFFECTED and not refuses


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    layers = "Mamba, gated delta nets, linear attention, short convolutions"
    return (
        needs.on_runners("model runner V1, in 0.23.0 - 0.27.1 V2 too", _runners),
        Need("recurrent layers", lambda deployment, _: deployment.recurrent(), layers),
        needs.FULL_GRAPHS,
    )


def _runners(shape: str) -> tuple[str, ...]:
    """The model runners that have the defect on code of *shape*."""
    return {_V1: ("V1",), _V2: ("V2",), _BOTH: ("V1", "V2")}.get(shape.partition(" ")[0], ())


FIX = Fix(
    number=7,
    name="prefill-dispatch",
    runner=None,
    reads=(_RUNNER, _BATCH, _RUNNER_V2, _HYBRIDS_V2, _GRAPHS_V2, _UTILS, _DISPATCHER, *READS),
    modules=(_RUNNER_MODULE, _RUNNER_V2_MODULE),
    diagnose=diagnose,
    patches=patches,
    events=(PREFILL_AS_DECODE,),
    needs=needs,
    ground="answers",
    evidence=(
        f"{_DISPATCHER}::CudagraphDispatcher",
        f"{_GRAPHS_V2}::CudaGraphManager.dispatch",
        f"{MAMBA}::BaseMambaAttentionMetadataBuilder.build",
        f"{MAMBA2}::Mamba2AttentionMetadataBuilder.build",
    ),
)

ABOUT = About(
    pr=53059,
    references=("PR 47123", "PR 39945", "issue 49918", "issue 53051", "issue 57720"),
    summary="a prefill never replays a decode graph of a recurrent model",
    releases=f"0.14.1 - {NEWEST}",
    seen="garbage for one-token prompts or one-token remainders of prompts, different each time",
    first_test="`--enforce-eager`: the same answer each time?",
    symptom="If a prompt, or what is left of one, is exactly one token long (with speculative decoding: one token "
    "more than are drafted), Mamba, GDN and short-convolution models answer with text that has nothing to do with it, "
    "different each time. Other requests of the same batch may be hit too.",
    cause="The model runner treats a step as a decode if every request has as many tokens as a decode, whatever phase "
    "it is in. Such a prefill replays a full decode graph, while the layers' builders see a prefill and do not "
    "refresh the buffers that the graph reads.",
    remedy="A step in which a builder takes a request for a prefill is no decode: it runs as other steps with prefills "
    "do, in piecewise graphs or eager. Steps that the builders of all layers take for decodes keep their graph, and "
    "models without recurrent layers, captures and dummy runs are as before.",
    detect="At temperature 0 the same prompt of one token (or one token more than are drafted) gets a different "
    "answer each time, and always the same one with --enforce-eager.",
    workaround='--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', or --enforce-eager. With gated delta nets '
    "and MTP drafts PIECEWISE is reported to end in an illegal memory access of its own (PR 46324, open): take the "
    "latter.",
    removable=f"not yet: no release up to {NEWEST} has the remedy for model runner V1",
    in_caches="wrong recurrent states of one-token prompts and one-token remainders, and of other requests of the same "
    "batch; in hybrids wrong keys and values computed on them, also of the tokens that follow",
    how_sure="that other requests are affected was shown; which states a store keeps depends on the prefix cache's "
    "Mamba mode and the connector",
)
