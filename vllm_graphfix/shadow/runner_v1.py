"""Model runner V1: full graphs of the target model (from 0.18.0 on).

`CUDAGraphWrapper` in mode FULL captures and replays them, and up to 0.29.0 `BreakableCUDAGraphWrapper` those of models
for which vLLM enables breakable graphs, such as DeepSeek V3.2 and V4. A drafter of V1 has piecewise graphs only.
Wrappers of pieces stay stock, as do all wrappers where nothing is checked. A step that runs in pieces goes through the
wrapper of full graphs, too, which can check it as a whole; `pieces` has the runners without such a wrapper.
"""

from __future__ import annotations

import copy
import functools
import sys
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Patch, StockFunction, Verdict
from vllm_graphfix.shadow import process
from vllm_graphfix.shadow.affected_requests import has_requests
from vllm_graphfix.shadow.check import Shadow
from vllm_graphfix.shadow.failures import UnsafeError
from vllm_graphfix.shadow.forward import Pass, unsafe, unsafe_in_pieces
from vllm_graphfix.shadow.lockstep import shape_of
from vllm_graphfix.shadow.runs import Step
from vllm_graphfix.shadow.verdict import TARGET

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_graphfix.source.files import Source

GRAPHS = "vllm/compilation/cuda_graph.py"
GRAPHS_MODULE = "vllm.compilation.cuda_graph"
BREAKABLE = "vllm/compilation/breakable_cudagraph.py"
BREAKABLE_MODULE = "vllm.compilation.breakable_cudagraph"
CONTEXT = "vllm/forward_context.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"

_SHAPE, _OR_BREAKABLE = "full-wrapper", "full-wrapper or-breakable"
_COUNTS = "counts_calls_for_shadow_check"
"""An attribute of classes made here."""


def diagnose(source: Source) -> Diagnosis:
    """Return `AFFECTED` if there are graphs that can be checked.

    A hook, not a defect: `AFFECTED` means that the code can be wrapped; `defect_seen` makes code that cannot be wrapped
    `incompatible`.
    """
    init, call = (source.function(GRAPHS, f"CUDAGraphWrapper.{name}") for name in ("__init__", "__call__"))
    override = source.function(CONTEXT, "override_forward_context")
    context = source.function(CONTEXT, "ForwardContext")
    slots = source.function(RUNNER, "GPUModelRunner._get_slot_mappings")
    if init is None or call is None:
        return Diagnosis(Verdict.ABSENT, "there is no CUDAGraphWrapper with which model runner V1 replays full graphs")
    replays = (
        init.signature == "self, runnable, vllm_config, runtime_mode, cudagraph_options"
        and init.find_unique("self.runtime_mode = runtime_mode")
        and init.find_unique("self.runnable = runnable")
        and call.signature == "self, *args, **kwargs"
        and call.find_unique("entry = self.concrete_cudagraph_entries[batch_descriptor]")
        and call.find_unique("cudagraph_runtime_mode = forward_context.cudagraph_runtime_mode")
        and call.find_unique("batch_descriptor = forward_context.batch_descriptor")
        and call.find_unique("entry.cudagraph.replay()")
        and call.find_unique("return entry.output")
        and call.find("return self.runnable(*args, **kwargs)")
    )
    passes = (
        override
        and override.signature == "forward_context"
        and context
        and all(
            context.find(f"{name}: ...") or context.mentions(**{name: 1}) for name in ("attn_metadata", "slot_mapping")
        )
    )
    padded = slots and slots.find_unique("slot_mapping[num_tokens_unpadded:num_tokens_padded].fill_(-1)")
    if replays and passes and padded and (shape := _shape(source)):
        return Diagnosis(
            Verdict.AFFECTED, "full graphs of model runner V1 replay in CUDAGraphWrapper", call.where, shape
        )
    return Diagnosis(
        Verdict.UNRECOGNISED,
        "full graphs of model runner V1 replay in a way that is not recognised",
        call.where,
        defect_seen=True,
    )


def _shape(source: Source) -> str | None:
    """Return the shape of the code: full graphs may be breakable ones, or not; None if it is not recognised."""
    if not source.contains_word(RUNNER, "BreakableCUDAGraphWrapper"):
        return _SHAPE
    load = source.function(RUNNER, "GPUModelRunner.load_model")
    if load is None:
        return None
    made = "self.model = BreakableCUDAGraphWrapper(self.model, self.vllm_config"
    around = "self.model = CUDAGraphWrapper(self.model, self.vllm_config, runtime_mode=CUDAGraphMode.FULL)"
    if load.find(f"{made}, runtime_mode=CUDAGraphMode.PIECEWISE)"):
        return _SHAPE if load.find(around) else None
    init, call = (source.function(BREAKABLE, f"BreakableCUDAGraphWrapper.{name}") for name in ("__init__", "__call__"))
    known = (
        load.find(f"{made})")
        and init
        and init.signature == "self, runnable, vllm_config"
        and init.find_unique("self.runnable = runnable")
        and call
        and call.signature == "self, *args, **kwargs"
        and call.find_unique("entry = self.entries.get(batch_descriptor)")
        and call.find_unique("batch_descriptor = forward_context.batch_descriptor")
        and call.find("return self._replay(entry, args, kwargs)")
        and call.find("return self.runnable(*args, **kwargs)")
    )
    return _OR_BREAKABLE if known else None


def patches(shape: str) -> tuple[Patch, ...]:
    full = Patch(GRAPHS_MODULE, "CUDAGraphWrapper.__init__", _check_instances)
    if shape == _SHAPE:
        return (full,)
    return (full, Patch(BREAKABLE_MODULE, "BreakableCUDAGraphWrapper.__init__", _check_instances))


def _check_instances(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `CUDAGraphWrapper.__init__`, or `BreakableCUDAGraphWrapper`'s, to check instances with full graphs.

    Such an instance becomes one of a subclass whose call counts and checks. The class itself stays stock: a model has
    one instance of mode FULL and, for each of its pieces, one of mode PIECEWISE.
    """

    @functools.wraps(stock)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        try:
            if (shadow := process.SHADOW) is not None and _full(self) is not None:
                if reason := unsafe(self.vllm_config):
                    process.refuse(reason)
                else:
                    self.__class__ = _measuring_class(type(self), shadow, has_full="runtime_mode" in vars(self))
        except Exception as error:
            activity.failed(error)

    return initialise


def _measuring_class(kind: Any, shadow: Shadow, *, has_full: bool) -> Any:
    """Return a subclass of *kind* for the time until all graphs are captured: it measures warm-ups (`memory`).

    *has_full*: the wrapper has full graphs for sure. A breakable wrapper that has captured none by then becomes
    vLLM's own again, and its calls do not count: it is a drafter's, which not every rank calls as often, or model
    runner V2's, for pieces.
    """
    checked, memory = _checking_class(kind, shadow), shadow.memory
    # This class is made anew for each instance: `final_class`, the class it gets after the capture, is its state.
    final_class = checked if has_full else kind

    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal final_class
        tokens = None
        try:
            if memory.measuring:
                if final_class is kind and _is_in_mode("FULL"):
                    final_class = checked
                tokens = _warm_up()
            else:
                self.__class__ = final_class
        except Exception:
            tokens = None  # the call goes on: an error on one rank alone would leave the others in a collective
        if tokens is None:
            return final_class.__call__(self, *args, **kwargs)
        return memory.measured(id(self), tokens, lambda: final_class.__call__(self, *args, **kwargs))

    return _subclass(kind, measured)


def _is_in_mode(name: str) -> bool:
    """Tell whether the call captures or replays graphs of the `CUDAGraphMode` of that *name*."""
    context = sys.modules["vllm.forward_context"]._forward_context
    return context is not None and context.cudagraph_runtime_mode.name == name


def _warm_up() -> int | None:
    """Return the number of tokens if the call is a warm-up: a run with attention and without a graph."""
    context = sys.modules["vllm.forward_context"]._forward_context
    if getattr(getattr(context, "cudagraph_runtime_mode", None), "name", None) != "NONE" or not context.attn_metadata:
        return None
    tokens: int | None = getattr(context.batch_descriptor, "num_tokens", None)
    return tokens


def _checking_class(kind: Any, shadow: Shadow) -> Any:
    # Looked up once, not in each step: they stay the same for as long as the check lives.
    schedule, quarantined, timed = shadow.schedule, shadow.quarantined, shadow.schedule.timed

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        check = None
        try:
            # Every rank of a group counts the same calls, whether they replay or not.
            schedule.count += 1
            if timed:
                schedule.tick()
            if schedule.count >= schedule.due or quarantined:
                check = _maybe_check_pieces if shadow.checks_pieces and _is_in_mode("PIECEWISE") else _maybe_check
        except Exception as error:  # raised here it would leave the other ranks in a collective of the model
            shadow.stop_on_this_rank(error)
        if check is not None:
            return check(shadow, kind, self, args, kwargs)
        return kind.__call__(self, *args, **kwargs)

    return _subclass(kind, call)


def _subclass(kind: Any, call: Callable[..., Any]) -> Any:
    """Return a subclass of *kind* with another `__call__`, which goes by the name of *kind*."""
    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__, _COUNTS: True}
    return type(kind.__name__, (kind,), names)


def counts_calls(model: Any) -> bool:
    """Tell whether *model* is a wrapper that counts its calls, and checks them where they are due."""
    return hasattr(type(model), _COUNTS)


def _maybe_check(shadow: Shadow, kind: Any, wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def replay() -> Any:
        return kind.__call__(wrapper, *args, **kwargs)

    def read() -> tuple[tuple[int, Any], Any] | None:
        context = sys.modules["vllm.forward_context"]._forward_context
        if not _replays(wrapper, context):
            return None
        descriptor = context.batch_descriptor
        # Ranks that share experts may have other descriptors of one shape, and must quarantine alike.
        return (id(wrapper), descriptor if shadow.lockstep is None else shape_of(descriptor)), context

    call = None
    together = False
    try:
        shadow.plan_next()
        call = shadow.read(TARGET, read)
        together = shadow.lockstep is None or shadow.all_ranks_replay(call[0][1] if call is not None else None)
    except Exception as error:
        shadow.stop_on_this_rank(error)
    if call is None or not together:
        return replay()
    key, context = call
    return shadow.run(key, lambda: step(shadow, wrapper.vllm_config, context, wrapper.runnable, args, kwargs), replay)


def _maybe_check_pieces(shadow: Shadow, kind: Any, wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    breakable = is_breakable(wrapper) or is_breakable(wrapper.runnable)
    run = functools.partial(kind.__call__, wrapper)
    return check_pieces(shadow, wrapper, run, args, kwargs, breakable=breakable)


def is_breakable(model: Any) -> bool:
    """Tell whether *model* is a wrapper that captures breakable graphs."""
    return type(model).__name__ == "BreakableCUDAGraphWrapper"


def check_pieces(
    shadow: Shadow,
    holder: Any,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    breakable: bool,
    model: str = TARGET,
    is_step: Callable[[], bool] = lambda: True,
) -> Any:
    """Return the result of *run*, vLLM's call of *model* that is due, checked if it is a step of requests in pieces.

    As a whole: a piece also hands out memory that only attention fills. *holder* has `vllm_config`, and its graphs are
    *breakable* or compiled pieces; *is_step* tells a step of requests from a dummy batch or a capture that has
    attention metadata, too.
    """

    def replay() -> Any:
        return run(*args, **kwargs)

    def read() -> Any:
        if (reason := unsafe(holder.vllm_config)) is not None:
            process.refuse(reason)
            return None
        context = sys.modules["vllm.forward_context"]._forward_context
        if not (_is_in_mode("PIECEWISE") and context.attn_metadata and is_step()):
            return None
        if (reason := unsafe_in_pieces(holder.vllm_config, images=shadow.may_have_images)) is not None:
            shadow.leave_out_pieces(reason)
            return None
        tokens, needs = context.batch_descriptor.num_tokens, shadow.memory.needs
        # On V1 warm-ups of decodes alone are measured, if any of this size. vLLM itself leaves room for its largest
        # batch, which runs without a graph.
        needs.setdefault((owner, tokens), needs.get((id(holder), tokens), 0))
        return context

    name = f"{model}, {'breakable' if breakable else 'piecewise'} graphs"
    owner, context = (id(holder), name), None
    try:
        shadow.plan_next()
        context = shadow.read(f"{model} in pieces", read)
    except Exception as error:
        shadow.stop_on_this_rank(error)
    if context is None:
        return replay()

    def describe() -> Step:
        # Attention is in no graph, and has this step's numbers in both runs.
        return step(shadow, holder.vllm_config, context, run, args, kwargs, name)._replace(launches=())

    return shadow.run((owner, context.batch_descriptor), describe, replay)


def _replays(wrapper: Any, context: Any) -> bool:
    """Tell whether the call is going to replay a batch of requests; a dummy batch may have no attention metadata."""
    if context is None or context.cudagraph_runtime_mode.name != "FULL" or not context.attn_metadata:
        return False
    entry = (_full(wrapper) or {}).get(context.batch_descriptor)
    # In mode FULL nothing breaks a breakable graph, which is a `capture`.
    return any(getattr(entry, name, None) is not None for name in ("cudagraph", "capture"))


def _full(wrapper: Any) -> dict[Any, Any] | None:
    """Return a wrapper's graphs by batch descriptor; None for a wrapper without full graphs.

    A breakable one has the graphs of all modes.
    """
    # vars(): a breakable wrapper takes attributes that it lacks from the model.
    own = vars(wrapper)
    if "concrete_cudagraph_entries" in own and own["runtime_mode"].name != "FULL":
        return None
    captured: dict[Any, Any] = own.get("concrete_cudagraph_entries") or own.get("entries", {})
    return captured


def step(
    shadow: Shadow,
    config: Any,
    context: Any,
    runnable: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    model: str = TARGET,
) -> Step:
    """Return the step of *model* that is about to run in vLLM's forward *context*: a replay of *runnable*'s call."""
    forward = Pass(
        *(config, context.attn_metadata, context.slot_mapping, (args, kwargs), context.additional_kwargs),
        dummy=shadow.lockstep is not None and not has_requests(),
    )
    eager = _without_graphs(context, runnable, args, kwargs)
    return forward.step(model, context.batch_descriptor, eager, lambda: real_rows(context, config))


def real_rows(context: Any, config: Any) -> int:
    """Return the number of tokens before the padding, which is masked or has slot -1.

    With decode context parallelism a rank has slots for its own tokens only, and an encoder's layers, as of models that
    pool, have none; there the end of the last request counts. Raises UnsafeError where none of these is there.
    """
    if (mask := getattr(context, "is_padding", None)) is not None:
        return int((~mask).sum())
    counts = []
    if getattr(config.parallel_config, "decode_context_parallel_size", 1) == 1:
        counts = [(slots >= 0).sum() for slots in context.slot_mapping.values()]
    counts += [each.query_start_loc[-1] for each in context.attn_metadata.values() if hasattr(each, "query_start_loc")]
    if not counts:
        raise UnsafeError("it is not known which rows are padding")
    return int(counts[0])


def _without_graphs(
    context: Any, runnable: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any]:
    """Return a function that runs the model in a copy of the forward context as it is now, in graph mode NONE.

    A copy, since each pass counts its layers in it, that of pieces, which comes first, too.
    """
    module = sys.modules["vllm.forward_context"]
    before = copy.copy(context)
    before.cudagraph_runtime_mode = type(context.cudagraph_runtime_mode)["NONE"]
    further = dict(context.additional_kwargs)

    def run() -> Any:
        own = copy.copy(before)
        own.additional_kwargs = dict(further)
        with module.override_forward_context(own):
            return runnable(*args, **kwargs)

    return run
