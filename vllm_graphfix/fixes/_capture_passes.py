"""Passes of a capture: a warm-up outside the graph, then the pass that the graph records.

FlashMLA's metadata is lazy: the first kernel call that sees it runs the planner. A pass that is to record the planner
must therefore run on an attention state that no forward pass has touched. What is here hands each pass a state of its
own, built by vLLM's code, outside the graph, after the warm-up has returned; or only tells whether a plan was consumed.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from contextvars import ContextVar
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity

if TYPE_CHECKING:
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

# Descriptors, attention states and forward functions are vLLM's and differ by release; none of their insides is used
# here.
CreateForwardFn = Callable[[Any], Any]
ForwardFn = Callable[..., Any]

_DEEPEST, _MOST = 8, 4000
"""Levels below an attention state, and objects in all, among which a plan is looked for. Sparse FlashMLA's is five
levels down."""


def has_consumed_plan(state: object) -> bool:
    """Whether a lazy plan in *state*, or in what a forward function keeps, has already been made.

    If so, the pass that follows records no planner. `FlashMLASchedMeta` says so in ``have_initialized``. Attention
    metadata without a lazy plan have none. Reads attributes alone, no tensor and no property; never raises.
    """
    seen: dict[int, object] = {}
    level = [state]
    try:
        for _ in range(_DEEPEST):
            below: list[object] = []
            for found in level:
                if id(found) in seen or len(seen) >= _MOST:
                    continue
                seen[id(found)] = found
                parts = _parts(found)
                if parts is None:
                    continue
                if isinstance(parts, dict):
                    if parts.get("have_initialized") is True and not isinstance(found, dict):
                        return True
                    parts = parts.values()
                below.extend(parts)
            level = below
    except Exception:  # what is counted must not matter to vLLM; a container of a fork may refuse to be looked at
        return False
    return False


def _parts(found: object) -> Any:
    """What *found* is made of: values by name, or values; None for what no plan is in."""
    if isinstance(found, (dict, list, tuple)):
        return found
    if isinstance(found, FunctionType):
        return [held for held in map(_held, found.__closure__ or ()) if isinstance(held, (dict, list, tuple))]
    # Tensors, modules of a model and whatever else torch's are have no plan, and some have much below them.
    if isinstance(found, (type, ModuleType)) or type(found).__module__.partition(".")[0] == "torch":
        return None
    return getattr(found, "__dict__", None)


def _held(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


MANAGER = "vllm/v1/worker/gpu/cudagraph_utils.py"
_MODEL_STATE = "vllm/v1/worker/gpu/model_states/default.py"
_ATTENTION = "vllm/v1/worker/gpu/attn_utils.py"
_FLASHMLA = "vllm/v1/attention/backends/mla/flashmla.py"
_SPARSE = (
    ("vllm/v1/attention/backends/mla/flashmla_sparse.py", "FlashMLASparseMetadataBuilder"),
    ("vllm/v1/attention/backends/mla/sparse_swa.py", "DeepseekSparseSWAMetadataBuilder"),
)
_SPEC_DECODE = "vllm/v1/worker/gpu/spec_decode"
_DRAFTS = (
    (f"{_SPEC_DECODE}/eagle/cudagraph.py", "EagleCudaGraphManager"),
    (f"{_SPEC_DECODE}/eagle/cudagraph.py", "DecodeEagleCudaGraphManager"),
    (f"{_SPEC_DECODE}/autoregressive/cudagraph_utils.py", "DecodeSpeculatorCudaGraphManager"),
    (f"{_SPEC_DECODE}/autoregressive/cudagraph_utils.py", "SpeculatorCudaGraphManager"),
    (f"{_SPEC_DECODE}/target_dependent_ar/cudagraph_utils.py", "SpeculatorCudaGraphManager"),
)
"""Managers of drafts that build states of their own."""
BUILDS_STATES = (MANAGER, _MODEL_STATE, _ATTENTION, _FLASHMLA, *dict(_SPARSE), *dict(_DRAFTS))
"""The files that `builds_each_state` reads."""

_BUILT = "attn_metadata, slot_mappings = prepare_inputs_to_capture(...)"
_GIVEN = (
    "set_forward_context(attn_metadata, *..., slot_mapping=slot_mappings)",
    (
        "set_forward_context(attn_metadata if cg_mode != CUDAGraphMode.PIECEWISE else None, *..., "
        "slot_mapping=slot_mappings)"
    ),
    "set_forward_context(*..., attn_metadata=attn_metadata, slot_mapping=slot_mappings)",
)
"""How a pass gets its state."""
_STATE_HANDED_ON = (
    "attn_metadata is None",
    "attn_metadata is not None",
    "return forward_fn, ...(attn_metadata, slot_mappings)",
    "capture_fn(*..., attn_metadata=attn_metadata, slot_mappings=slot_mappings)",
)
_METADATA = tuple(
    f"metadata = {made}(*...)"
    for made in (
        "attn_metadata_builder.build",
        "attn_metadata_builder.build_for_cudagraph_capture",
        "attn_metadata_builder.update_block_table",
        "attn_group.build_metadata",
        "attn_group.build_metadata_for_cudagraph_capture",
    )
)
_PLANNED = "scheduler_metadata, _ = get_mla_metadata(...)"
_PLANNED_SPARSE = (_PLANNED, "out[layer_type] = get_mla_metadata()[0]")
# A call that is none of these may do something about the state.
_CALLS_BETWEEN_PASSES = frozenset(
    "CUDAGraph capture_fn cdiv copy_ create_forward_fn debug empty empty_like forward_fn generate_fn get_offloader "
    "getattr make_num_tokens_across_dp min model nullcontext prepare_dummy_inputs prepare_inputs_to_capture "
    "set_forward_context sync_prev_onload".split()
)


def forward_functions(capture: Function) -> list[ast.Assign]:
    """The assignments in which `CudaGraphManager.capture(create_forward_fn, …)` asks for a forward function.

    It asks once for the warm-up and the graph, or once for each. Empty for code of which it is not known that a FULL
    descriptor's passes are a warm-up and then the one in the graph.
    """
    from vllm_graphfix.source.functions import first_target

    asked = capture.assignments(None, "create_forward_fn(desc, *...)")
    graphs = capture.entering("torch.cuda.graph(...)")
    if len(asked) not in {1, 2} or (len(graphs), len(capture.find("torch.cuda.graph(...)")), capture.loops()) != (
        1,
        1,
        2,
    ):
        return []
    names = [first_target(ask) or "" for ask in asked]
    passes = {name: capture.find(f"{name}(CUDAGraphMode.NONE)") for name in names if name}
    others = {name: capture.find(f"{name}(CUDAGraphMode.PIECEWISE)") for name in passes}
    calls = [ask.value for ask in asked if isinstance(ask.value, ast.Call)]
    if "" in names or not all(len(call.args) == 1 and _are_constants(call) for call in calls):
        return []
    warm_up, recorded = passes[names[0]][0] if passes[names[0]] else None, passes[names[-1]][-1:]
    known = (
        warm_up is not None
        and recorded != []
        and sum(map(len, passes.values())) == 2
        and recorded[0] is not warm_up
        and (len(asked) == 2 or len(others[names[0]]) == 1)
        and capture.mentions(create_forward_fn=len(asked))
        and capture.mentions(**{name: names.count(name) + len(passes[name]) + len(others[name]) for name in passes})
        and capture.in_one_block(asked[0], warm_up)
        and recorded[0] in [getattr(statement, "value", None) for statement in graphs[0].body]
    )
    if known and warm_up is not None:
        known = (
            _left_alone(capture, asked[0])
            if len(asked) == 1
            else capture.in_one_block(asked[1], graphs[0]) and warm_up.lineno < asked[1].lineno
        )
    return asked if known else []


def _are_constants(call: ast.Call) -> bool:
    return all(given.arg is not None and isinstance(given.value, ast.Constant) for given in call.keywords)


def _left_alone(capture: Function, ask: ast.Assign) -> bool:
    """Whether nothing is done to the state between the passes: it is stored for whoever called, and that is all."""
    target = ask.targets[0]
    states = [getattr(part, "id", "") for part in target.elts[1:]] if isinstance(target, ast.Tuple) else []
    (graph,) = capture.entering("torch.cuda.graph(...)")
    return capture.calls(ask, graph) <= _CALLS_BETWEEN_PASSES and all(
        state and capture.confines(state, ast.unparse(ask), f"...[desc] = {state}") for state in states
    )


def builds_each_state(source: Source) -> bool:
    """Whether the target's factory builds a new state whenever it is asked, and nobody keeps one (0.18.0+).

    This is followed all the way down to the plan.
    """
    target = source.function(MANAGER, "ModelCudaGraphManager.capture")
    factory = target and target.inner("create_forward_fn")
    forward = factory and factory.inner("forward_fn")
    if not target or not factory or not forward:
        return False
    _, *further = factory.parameters
    return (
        target.confines("create_forward_fn", "super().capture(create_forward_fn, *...)")
        and len(target.find("super().capture(create_forward_fn, *...)")) == 1
        and factory.takes.startswith("desc")
        and not any(map(factory.names, further))
        and factory.always(_BUILT)
        and factory.confines("attn_metadata", _BUILT, *_GIVEN, *_STATE_HANDED_ON)
        and sum(len(forward.find(given)) for given in _GIVEN) == 1
        and (
            factory.always("return forward_fn")
            or factory.always("return forward_fn, ...(attn_metadata, slot_mappings)")
        )
        and drafts_build_each_state(source)
        and prepares_each_state(source)
    )


def drafts_build_each_state(source: Source) -> bool:
    """The same of the drafts that have states of their own."""
    for path, name in _DRAFTS:
        capture = source.function(path, f"{name}.capture")
        factory = capture and capture.inner("create_forward_fn")
        if capture is not None and not (
            factory
            and not any(map(factory.names, factory.parameters[1:]))
            and (factory.always(_BUILT) or factory.always("attn_state = prepare_inputs_to_capture(...)"))
            and len(factory.find("prepare_inputs_to_capture(...)")) == 1
            and factory.assigned("attn_metadata") == 1
        ):
            return False
    return True


def prepares_each_state(source: Source) -> bool:
    """Whether `prepare_inputs_to_capture` builds a state at each call, all the way down to the plan."""
    prepare = source.function(MANAGER, "prepare_inputs_to_capture")
    attention = source.function(_ATTENTION, "build_attn_metadata")
    builder = source.function(_FLASHMLA, "FlashMLAMetadataBuilder._build_decode")
    if prepare is None or attention is None:
        return False
    by_model = "attn_metadata = model_state.prepare_attn(*...)"
    directly = "attn_metadata = build_attn_metadata(*...)"
    built = by_model if prepare.only(by_model) else directly
    returned = prepare.only("return ...")
    if not prepare.only(built) or returned is not prepare.node.body[-1]:
        return False
    if not prepare.confines(
        "attn_metadata",
        built,
        "attn_metadata = None",
        "return ...(attn_metadata, slot_mappings_by_layer)",
        "return attn_metadata, slot_mappings_by_layer",
    ):
        return False
    if built == by_model:
        model = source.function(_MODEL_STATE, "DefaultModelState.prepare_attn")
        if not (
            model
            and model.always(directly)
            and model.confines("attn_metadata", directly, "return attn_metadata")
            and model.only("return ...") is model.node.body[-1]
        ):
            return False
    return (
        any(map(attention.find, _METADATA))
        and attention.confines(
            "metadata", *_METADATA, "attn_metadata[layer_name] = metadata", "cached_metadata[reuse_key] = metadata"
        )
        and attention.confines(
            "cached_metadata",
            "cached_metadata: ... = {}",
            "attn_metadata_builder.update_block_table(cached_metadata[reuse_key], *...)",
            "reuse_key in cached_metadata",
            "reuse_key not in cached_metadata",
            "cached_metadata[reuse_key] = metadata",
        )
        and attention.only("return ...") is attention.node.body[-1]
        and (builder is None or plans_each_batch(builder))
        and all(
            sparse is None or sparse.confines("get_mla_metadata", *_PLANNED_SPARSE)
            for sparse in (source.function(path, name) for path, name in _SPARSE)
        )
    )


def plans_each_batch(build: Function) -> bool:
    """Whether `FlashMLAMetadataBuilder._build_decode` only hands on a FlashMLA plan that this call made."""
    return build.always(_PLANNED) and build.confines(
        "scheduler_metadata",
        _PLANNED,
        "scheduler_metadata.tile_scheduler_metadata = tile_scheduler_metadata",
        "scheduler_metadata.num_splits = num_splits",
        "return FlashMLADecodeMetadata(*..., scheduler_metadata=scheduler_metadata)",
    )


_ONCE_AND_TWICE = {"prepare_inputs_to_capture": 1, "set_forward_context": 2}


def hands_both_passes_one_state(captures: list[Function], run: str, *given: str) -> bool:
    """Whether *captures* (0.15.0-0.17.1) build one state and *run* twice, *given* that state.

    *captures* are `capture_graph` and what it calls.
    """
    found = [part for each in captures for part in each.find(_BUILT)]
    if len(found) != 1:
        return False
    (built,) = found
    given_to = {name: sum(len(each.find(f"{name}(...)")) for each in captures) for name in _ONCE_AND_TWICE}
    return (
        built in captures[0].node.body
        and given_to == ({**_ONCE_AND_TWICE, "set_forward_context": 0} if given else _ONCE_AND_TWICE)
        and sum(len(each.find(f"{run}(...)")) for each in captures) == 2
        and sum(len(each.find(pattern)) for each in captures for pattern in given or _GIVEN) == 2
        and all(each.confines("attn_metadata", _BUILT, *(given or _GIVEN), *_STATE_HANDED_ON) for each in captures)
        and not any(each.loops() for each in captures if given or each is captures[0])
        and not any(each.repeats(f"{run}(...)") for each in captures)
        and all(
            each.calls(built if each is captures[0] else None, each.only("torch.cuda.graph(...)"))
            <= _CALLS_BETWEEN_PASSES
            for each in captures
        )
    )


class FactoryPerPass:
    """``create_forward_fn`` of `CudaGraphManager.capture` (0.18.0-0.22.1), asked for each pass of a FULL descriptor.

    Takes a descriptor, and what else the stock factory takes; returns what that returns: a forward function, or
    (0.21.0+) that and the attention state. What goes wrong in it is told to *activity*, and stock's factory
    decides; an error of stock's own comes out as it is.
    """

    def __init__(self, create: CreateForwardFn, activity: Activity) -> None:
        self._create = create
        self.activity = activity
        self._passes: dict[Any, _Passes] = {}
        self.consumed = 0
        """FULL descriptors so far, of whose first state the warm-up has consumed the plan: stock would have recorded
        with it."""
        self.recorded_states: dict[Any, Any] = {}
        """The state of the recorded pass by FULL descriptor, where the factory returns states."""

    @classmethod
    def around(cls, create: CreateForwardFn, activity: Activity) -> CreateForwardFn:
        """*create* itself if it is one already: two fixes may ask for the same."""
        try:
            return create if isinstance(create, cls) else cls(create, activity)
        except Exception as error:
            activity.failed(error)
            return create

    def __call__(self, *asked: Any, **asked_by_name: Any) -> Any:
        try:
            descriptor = _descriptor(asked, asked_by_name)
            passes = self._passes.pop(descriptor, None)
            if passes is not None and passes.next is not None:
                return passes.next  # this capture asks for each pass by itself, as from 0.22.0 on
            create = functools.partial(self._create, *asked, **asked_by_name)
        except Exception as error:
            self.activity.failed(error)
            return self._create(*asked, **asked_by_name)
        made = self._create(*asked, **asked_by_name)
        try:
            if descriptor.cg_mode.name != "FULL":
                return made
            passes = _Passes(self, descriptor, made, create)
            returned = passes if passes.alone else (passes, *made[1:])
            self._passes[descriptor] = passes
        except Exception as error:
            self.activity.failed(error)
            return made
        return returned


class _Passes:
    """The forward function of one FULL descriptor: a warm-up and a recorded pass with different states.

    The warm-up has the state that was built first, the recorded pass a state of its own.
    """

    def __init__(self, factory: FactoryPerPass, descriptor: Any, made: Any, create: Callable[[], Any]) -> None:
        self._factory, self._descriptor, self._create = factory, descriptor, create
        self.alone = callable(made)
        """The factory makes a forward function, and hands no state on beside it."""
        self._first = made  # until its pass is over: two states at a time take twice the memory
        self.next: Any = None
        """What the factory has made for the recorded pass."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # No call of our own until the pass has run: what fails before it would leave the graph without one.
        made, warms_up = self.next, self.next is None
        if warms_up:
            made = self._first if self._first is not None else self._create()
        self._first = self.next = None
        result = (made if self.alone else made[0])(*args, **kwargs)
        if warms_up:
            self._prepare_recorded_pass(made)
        return result

    def _prepare_recorded_pass(self, warmed_up: Any) -> None:
        """Prepares the state of the recorded pass after the warm-up.

        If it were built before, the state's views of builder-owned buffers could be overwritten (PR 48261).
        """
        try:
            self._factory.consumed += has_consumed_plan(warmed_up)
            made = self._create()
            if not self.alone:
                self._factory.recorded_states[self._descriptor] = made[1]
            self.next = made
        except Exception as error:
            self._factory.activity.failed(error)
            self.next = warmed_up


def _descriptor(asked: tuple[Any, ...], asked_by_name: dict[str, Any]) -> Any:
    """What a factory was asked for: its first argument."""
    return asked[0] if asked else next(iter(asked_by_name.values()), None)


class WatchedFactory:
    """``create_forward_fn`` that returns what the stock one makes and inspects it after its passes.

    It hands on the very objects that the stock one makes.
    """

    def __init__(self, create: CreateForwardFn) -> None:
        self._create = create
        self._made: Any = None
        self.consumed = 0
        """FULL descriptors so far, counted as in `FactoryPerPass`. Both passes have run on the one state; the plan went
        to the first."""

    def __call__(self, *asked: Any, **asked_by_name: Any) -> Any:
        self.look()
        made = self._create(*asked, **asked_by_name)
        if is_full(_descriptor(asked, asked_by_name)):
            self._made = made
        return made

    def look(self) -> None:
        """To be called after the capture too, for the last descriptor."""
        made, self._made = self._made, None
        self.consumed += has_consumed_plan(made)


def is_full(descriptor: Any) -> bool:
    """Never raises."""
    try:
        return bool(descriptor.cg_mode.name == "FULL")
    except Exception:
        return False


class RebuildableStates(dict[Any, Any]):
    """What `CudaGraphManager.capture` returns (0.21.0-0.22.1), and a way to build the states again.

    That is a mapping from descriptor to attention state.
    """

    def __init__(self, states: dict[Any, Any], create: CreateForwardFn) -> None:
        super().__init__(states)
        self.create = create

    def copy(self) -> RebuildableStates:
        return RebuildableStates(self, self.create)

    __copy__ = copy

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[dict[Any, Any]]]:
        # A factory is a closure, which does not pickle. What is in the states may: it goes as the dict that stock
        # returns.
        return dict, (dict(self),)


class UntouchedStates(dict[Any, Any]):
    """A mapping from descriptor to attention state that has untouched states for FULL descriptors.

    For a FULL descriptor every look-up builds a state that no forward pass has touched.
    """

    def __init__(self, states: RebuildableStates, activity: Activity) -> None:
        super().__init__(states)
        self._create = states.create
        self._activity = activity

    def __getitem__(self, descriptor: Any) -> Any:
        try:
            if descriptor.cg_mode.name == "FULL":
                return self._create(descriptor)[1]
        except Exception as error:
            self._activity.failed(error)
        return super().__getitem__(descriptor)


asks_per_pass: ContextVar[bool] = ContextVar("graphfix_asks_per_pass", default=False)
"""The capture that is running was started by one that wants a state for each pass."""


class CaptureSession:
    """One descriptor of `capture_graph` (0.15.0-0.17.1).

    Keeps how its attention state was built, and whether a pass has had it.
    """

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._outer: CaptureSession | None = None
        self._build: Callable[[], tuple[Any, Any]] | None = None
        self._state: tuple[Any, Any] = (None, None)
        self._handed_over = False

    def begin(self) -> None:
        """From now on this is the `current_session`, until `end`."""
        self._outer = _session.get()
        _session.set(self)

    def end(self) -> None:
        try:
            _session.set(self._outer)
        except Exception as error:
            self._activity.failed(error)

    def built(self, build: Callable[[], tuple[Any, Any]], state: tuple[Any, Any]) -> None:
        """*build* made *state* (attention metadata, slot mappings) and can make one like it."""
        self._build, self._state, self._handed_over = build, state, False

    def concerns(self, *given: object) -> bool:
        """Whether the attention metadata that were built are among *given*."""
        return self._state[0] is not None and any(each is self._state[0] for each in given)

    def for_next_pass(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], state: tuple[Any, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, positional or keyword, with the state that was built replaced.

        *state*, or the state of the next pass, takes its place.
        """
        try:
            if not self.concerns(*args, *kwargs.values()):
                return args, kwargs
            return self._with_state(self.state_for_next_pass() if state is None else state, args, kwargs)
        except Exception as error:
            self._activity.failed(error)
            return args, kwargs

    def _with_state(
        self, state: tuple[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        pairs = [(built, given) for built, given in zip(self._state, state, strict=True) if built is not None]

        def exchanged(argument: object) -> Any:
            return next((given for built, given in pairs if argument is built), argument)

        return tuple(map(exchanged, args)), {name: exchanged(argument) for name, argument in kwargs.items()}

    def state_for_next_pass(self) -> tuple[Any, Any]:
        """The state that was built, for the first pass; a new one after that. Not to be called inside a graph."""
        if self._handed_over and self._build is not None:
            try:
                return self._build()
            except Exception as error:
                self._activity.failed(error)
        self._handed_over = True
        return self._state

    def consumed(self) -> bool:
        """Whether the warm-up has consumed the plan of the state that was built first.

        Stock would have recorded the graph with that plan. Never raises.
        """
        try:
            return has_consumed_plan(self._state)
        except Exception as error:
            self._activity.failed(error)
            return False


_session: ContextVar[CaptureSession | None] = ContextVar("graphfix_capture_session", default=None)


def current_session() -> CaptureSession | None:
    return _session.get()
