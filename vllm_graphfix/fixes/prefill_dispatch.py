"""`prefill-dispatch`: a prefill shaped like a decode never replays a recurrent model's decode graph (PR 53059)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction, Verdict
from vllm_graphfix.fixes._dispatch_source import (
    BOTH,
    GRAPHS_V2,
    PREDICATE_PARAMETERS,
    RECOGNISED,
    RUNNER,
    RUNNER_V2,
    UTILS,
    V1,
    V2,
    judge_v1,
    judge_v2,
)
from vllm_graphfix.fixes._recurrent_builders import BUILDER_SLICES, Builders, with_builders

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source

_RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"
_RUNNER_V2_MODULE = "vllm.v1.worker.gpu.model_runner"
_BATCH = "vllm/v1/worker/gpu_input_batch.py"
_DISPATCHER = "vllm/v1/cudagraph_dispatcher.py"

PREFILL_AS_DECODE = Event(
    "prefill-as-decode",
    "A step had the shape of a decode, and a builder of the model's recurrent layers takes a request of it for a "
    "prefill: on stock it replays a full decode graph, with stale indices.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find each model runner's criterion of decodes: the shape of the step alone, or the phase of its rows."""
    v1, v2 = judge_v1(source), judge_v2(source)
    affected = [each for each in (v1, v2) if each.verdict is Verdict.AFFECTED]
    for each in (v1, v2):
        if each.verdict is Verdict.UNRECOGNISED:
            return each._replace(defect_seen=bool(affected))
    if not affected:
        return v1 if v2.verdict is Verdict.ABSENT else v2
    if affected == [v1, v2]:
        v1 = v1._replace(reason="both model runners treat a step as a decode by its shape alone", shape=BOTH)
    return with_builders(source, v1 if affected[0].shape == V1 else v2)


# -- model runner V1


def _around_dispatch(stock: StockFunction, activity: Activity, *, builders: Builders) -> StockFunction:
    """Wrap `_determine_batch_execution_and_padding`, which runs before data-parallel ranks agree on a mode."""
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


def _prefills_as_decode(builders: Builders, runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell if stock would replay a decode graph for a real step with a row that a builder takes for a prefill.

    Reads the batch's `num_computed_tokens_cpu`, `num_prompt_tokens` and `num_tokens_no_spec`, (max_num_reqs,) int32 of
    NumPy.
    """
    # Captures and dummy runs force the answer, and vLLM passes all arguments by name.
    if args or kwargs.get("force_uniform_decode") is not None or kwargs.get("force_eager"):
        return False
    tokens, rows, length = kwargs["num_tokens"], kwargs["num_reqs"], kwargs["max_num_scheduled_tokens"]
    if length != runner.uniform_decode_query_len or tokens != length * rows:
        return False
    if (prefills := builders.of(runner)) is None:
        return False
    batch, pipelined = runner.input_batch, runner.parallel_config.pipeline_parallel_size > 1
    computed = batch.num_computed_tokens_cpu[:rows]
    if length == prefills.one_token == 1:
        # Then a row counts if none of its tokens is computed: each has a prompt, since vLLM refuses empty ones.
        if not _any_zero(computed):
            return False
    else:
        # A preempted request recomputes its own tokens, and a decode feeds the last known one. Pipeline stages may
        # know different ones, so they use the prompt.
        prompt = batch.num_prompt_tokens[:rows]
        known = prompt if pipelined else batch.num_tokens_no_spec[:rows]
        taken = prefills.rows(length, computed, prompt, known)
        # Bytes, since `any` of arrays of this size costs more than the rest of this function.
        if taken is None or 1 not in taken.tobytes():
            return False
    compilation = runner.compilation_config
    if pipelined and compilation.pass_config.enable_sp:
        return False  # the worker calls it before the batch is updated, too, and needs the same number of tokens
    return _decode_graphs(runner.cudagraph_dispatcher) and tokens <= compilation.max_cudagraph_capture_size


_LISTED = 64
"""Rows. With cold caches, as in an engine, a list of so few is faster than any operation on an array."""


def _any_zero(computed: Any) -> bool:
    """Tell if some row has no computed token; *computed* is (rows,) int32 of NumPy, with at least one row."""
    if len(computed) <= _LISTED:
        return 0 in computed.tolist()
    return not computed[computed.argmin()]  # `all` and `min` take twice as long


def _decode_graphs(manager: Any) -> bool:
    """Tell if decodes have full graphs of their own: in FULL_DECODE_ONLY, FULL_AND_PIECEWISE, but not FULL."""
    mode = manager.cudagraph_mode
    return bool(mode.separate_routine()) and mode.decode_mode().name == "FULL"


# -- model runner V2


class _Step:
    """The step that `update_requests` prepares, up to its dispatch in the same `execute_model`."""

    manager: Any = None
    """The manager that dispatches it, if a builder takes a row for a prefill."""


def _note_prefills(stock: StockFunction, activity: Activity, *, step: _Step, builders: Builders) -> StockFunction:
    """Wrap `update_requests`, after which the numbers of requests are those of the step: note prefills."""

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
    """Tell if a builder takes a scheduled request for a prefill, in a step shaped like a decode.

    Reads `num_computed_prefill_tokens` and `prefill_len` of `req_states`, (max_num_reqs,) int32 of NumPy. A preempted
    request comes back as one whose own tokens have to be prefilled.
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
    while slot >= 0:  # slots of finished and waiting requests match, too
        if states.index_to_req_id.get(slot) in tokens:
            return True
        slot = taken.find(1, slot + 1)
    return False


def _around_noted_dispatch(stock: StockFunction, activity: Activity, *, step: _Step) -> StockFunction:
    """Wrap the name `dispatch_cg_and_sync_dp`, which also passes the corrected choice to data-parallel ranks."""
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
    """Tell if stock would replay a decode graph for the noted step.

    `args` are (cudagraph_manager, num_reqs, num_tokens, uniform_token_count, …).
    """
    manager, step.manager = step.manager, None
    if manager is None or len(args) < 4 or args[0] is not manager or kwargs.get("need_eager"):
        return False
    tokens, uniform = args[2:4]
    if uniform is None or tokens > manager.compilation_config.max_cudagraph_capture_size:
        return False
    # With a varying number of drafts, decodes of several lengths have graphs.
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
    return {V1: (of_v1,), V2: of_v2, BOTH: (of_v1, *of_v2)}[runners]


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    layers = "Mamba, gated delta nets, linear attention, short convolutions"
    return (
        needs.on_runners("model runner V1, in 0.23.0 - 0.27.1 V2 too", _runners),
        Need(
            "recurrent layers",
            lambda deployment, _: deployment.recurrent(),
            layers,
            clause="the model has recurrent layers",
        ),
        needs.FULL_GRAPHS,
    )


def _runners(shape: str) -> tuple[str, ...]:
    """Return the model runners that have the defect on code of *shape*."""
    return {V1: ("V1",), V2: ("V2",), BOTH: ("V1", "V2")}.get(shape.partition(" ")[0], ())


FIX = fix(
    "prefill-dispatch",
    diagnose=diagnose,
    surroundings=(
        # Model runner V1: the predicate, its call, and the use of its answer
        Slice(RUNNER, "GPUModelRunner._is_uniform_decode", PREDICATE_PARAMETERS.replace(",", "")),
        Slice(
            RUNNER,
            "GPUModelRunner._determine_batch_execution_and_padding",
            "uniform_decode force_uniform_decode _is_uniform_decode max_num_scheduled_tokens num_computed_tokens_cpu "
            "num_prompt_tokens",
        ),
        Slice(
            RUNNER,
            "GPUModelRunner.execute_model",
            "_determine_batch_execution_and_padding max_num_scheduled_tokens force_uniform_decode",
        ),
        Slice(RUNNER, "GPUModelRunner._dummy_run", "force_uniform_decode"),
        Slice(_DISPATCHER, "CudagraphDispatcher", "uniform_decode", Verdict.AFFECTED),
        Slice(
            _BATCH,
            "InputBatch.__init__",
            "num_prompt_tokens num_computed_tokens_cpu num_tokens_no_spec",
            Verdict.AFFECTED,
        ),
        # Model runner V2: the same, by shape up to 0.27.1 and by phase since
        Slice(GRAPHS_V2, "get_uniform_token_count", "num_reqs num_tokens max_query_len"),
        Slice(RUNNER_V2, "GPUModelRunner.execute_model", "uniform_tok_count update_requests"),
        Slice(
            RUNNER_V2,
            "GPUModelRunner.update_requests",
            "num_computed_prefill_tokens prefill_len out",
            Verdict.AFFECTED,
        ),
        Slice(
            RUNNER_V2,
            "GPUModelRunner.gather_batch_req_state",
            "is_prefilling_np has_prefill decode_graph_eligible",
            Verdict.FIXED,
        ),
        Slice(UTILS, "get_uniform_decode_token_count", "", Verdict.FIXED),
        # The classes of builders whose code `_recurrent_builders` reads
        *BUILDER_SLICES,
    ),
    recognised=RECOGNISED,
    corrections=patches,
    modules=(_RUNNER_MODULE, _RUNNER_V2_MODULE),
    events=(PREFILL_AS_DECODE,),
    needs=needs,
    default_rationale="answers",
)
