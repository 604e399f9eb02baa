"""`workspace-growth`: a workspace in a graph of model runner V2 outlives its replacement by a larger one (PR 55341)."""

from __future__ import annotations

import ast
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Counter, Diagnosis, Event, Patch, Slice, StockFunction, Verdict

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_WORKSPACE = "vllm/v1/worker/workspace.py"
_RUNNER = "vllm/v1/worker/gpu/model_runner.py"
_GRAPHS = "vllm/v1/worker/gpu/cudagraph_utils.py"
_WORKER = "vllm/v1/worker/gpu_worker.py"
_WARM_UP = "vllm/v1/worker/gpu/warmup.py"
_LAYER = "vllm/v1/attention/backends/mla/triton_mla.py"
_SCALING = "vllm/distributed/elastic_ep/elastic_execute.py"
_WORKSPACE_MODULE = "vllm.v1.worker.workspace"
_RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"
_OF_A_SLOT = "current_workspace = self._current_workspaces[...]"
_CLEARED = "self._current_workspaces[...] = None"
_ALLOCATED = "self._current_workspaces[...] = torch.empty((required_bytes,), dtype=torch.uint8, device=self._device)"
_NONE_YET = "self._current_workspaces: list[torch.Tensor | None] = [None] * ..."
_SLOTS = "for ubatch_id in range(self._num_ubatches): ..."
_APPENDED = "(...).append(current_workspace)"
"""A remedy: the outgrown workspace stays referenced."""
_LOCK = "lock_workspace()"
"""Upstream's correction."""
_UNLESS_ON_TRIAL = "if not profile_only: ..."
_UNLESS_EAGER = "if not self.model_config.enforce_eager: ..."
_IMPORTED = tuple(
    f"from vllm.v1.worker.workspace import {names}"
    for names in ("lock_workspace, use_workspace_lane", "use_workspace_lane")
)
_LOCKED = "if self._locked: raise AssertionError(...)"

RECORDED_WORKSPACE_OUTGROWN = Event(
    "recorded-workspace-outgrown",
    "A larger workspace replaced one that a graph had recorded: on stock that memory is freed, and the graph still "
    "reads and writes there.",
)

Workspace = Any
"""A tensor of bytes; vLLM's manager has one per slot: per micro-batch, and from 0.28.0 on per lane of it."""
Reference = Callable[[], "Workspace | None"]


def diagnose(source: Source) -> Diagnosis:
    """Find the replacement of a workspace that is too small, and the lock against growth."""
    manager = source.function(_WORKSPACE, "WorkspaceManager")
    ensure = source.function(_WORKSPACE, "WorkspaceManager._ensure_workspace_size")
    capture = source.function(_RUNNER, "GPUModelRunner.capture_model")
    if manager is not None and ensure is not None and capture is not None:
        cleared = ensure.find_unique(_CLEARED)
        locked = _place_of_lock(source, manager, ensure, capture)
        if locked is not None:
            return Diagnosis.fixed("the workspace is locked when graphs are captured, and growth is an error", locked)
        if cleared is not None and not any(source.contains_word(path, "lock_workspace") for path in (_RUNNER, _WORKER)):
            holding = _holding_statement(manager, ensure, cleared)
            if holding is not None:
                return Diagnosis.fixed("an outgrown workspace is kept", ensure.at(holding))
            if not ensure.find(_APPENDED):
                return Diagnosis.affected(
                    "model runner V2 lets the workspace grow after a capture, and the one that graphs have recorded "
                    "is freed",
                    ensure.at(cleared),
                    _shape(source, ensure),
                )
    return Diagnosis.unrecognised("the workspace grows, or model runner V2 locks it, in a way", ensure or _WORKSPACE)


def _place_of_lock(source: Source, manager: Function, ensure: Function, capture: Function) -> str | None:
    """Return the place after every capture where model runner V2, or the worker of both, locks the workspace."""
    lock = source.function(_WORKSPACE, "WorkspaceManager.lock")
    if lock is None or not lock.always("self._locked = True") or ensure.find_unique(_LOCKED) is None:
        return None
    if len(manager.find("self._locked = ...")) != 2:  # in `lock` and `unlock`, whose callers are in slices
        return None
    if source.contains_word(_RUNNER, "lock_workspace"):
        return _place_behind(capture, _UNLESS_ON_TRIAL, "(...).capture(...)", "(...).capture_model(...)")
    warm_up = source.function(_WORKER, "Worker.compile_or_warm_up_model")
    return warm_up and _place_behind(warm_up, _UNLESS_EAGER, "self.model_runner.capture_model(...)")


def _place_behind(function: Function, condition: str, *captures: str) -> str | None:
    """Return the place where *function* locks the workspace after all *captures*, always or under *condition*."""
    locked = function.find_unique(_LOCK)
    captured = [call.lineno for call in function.find(*captures)]
    if locked is None or not captured or max(captured) > locked.lineno:
        return None
    if function.returns(max(captured), locked.lineno):  # before it nothing is captured
        return None
    body = function.node.body
    blocks = [body, *(part.body for part in function.find(condition) if isinstance(part, ast.If) and part in body)]
    always = any(isinstance(part, ast.Expr) and part.value is locked for block in blocks for part in block)
    return function.at(locked) if always else None


def _holding_statement(manager: Function, ensure: Function, cleared: ast.stmt | ast.expr) -> ast.stmt | ast.expr | None:
    """Return the statement that appends a slot's tensor, before the slot is cleared, to a list that never shrinks."""
    appended = ensure.find_unique(_APPENDED)
    holder: Any = getattr(getattr(appended, "func", None), "value", None)
    if isinstance(holder, ast.Subscript):
        holder = holder.value
    if appended is None or not isinstance(holder, ast.Attribute) or ast.unparse(holder.value) != "self":
        return None
    made, name = f"{ast.unparse(holder)} = ...", holder.attr
    only_grows = manager.used_only_in(name, made, ast.unparse(appended)) and len(manager.find(made)) <= 1
    return appended if only_grows and not ensure.find(made) and ensure.in_one_block(appended, cleared) else None


def _shape(source: Source, ensure: Function) -> str:
    """Name the slots that grow, and if graphs are captured on trial first."""
    shape = "every-slot" if ensure.find(_SLOTS) else "one-slot"
    profile = source.function(_RUNNER, "GPUModelRunner.profile_cudagraph_memory")
    on_trial = profile is not None and profile.find_unique("return _profile_cudagraph_memory(self)") is not None
    return f"{shape}-on-trial" if on_trial else shape


class _Captures:
    """The running captures of model runner V2, and the workspaces of trial captures, whose graphs are dropped."""

    __slots__ = ("on_trial", "running")

    def __init__(self) -> None:
        self.running = 0
        self.on_trial: list[tuple[_RecordedWorkspaces, Reference]] | None = None


class _RecordedWorkspaces:
    """The workspaces of one manager that graphs have recorded: those in use, and those that it has outgrown."""

    __slots__ = ("_captures", "_seen", "current", "outgrown")

    def __init__(self, captures: _Captures, seen: Counter) -> None:
        self._captures, self._seen = captures, seen
        self.current: list[Reference] = []
        self.outgrown: list[Reference] = []

    def add(self, held: Reference, workspace: Workspace) -> None:
        if not any(known() is workspace for known in self.current):
            self.current.append(held)
            if self._captures.on_trial is not None:
                self._captures.on_trial.append((self, held))

    def count_outgrown(self, workspaces: Sequence[Workspace | None]) -> None:
        """Count recorded workspaces that are no longer among the manager's *workspaces*."""
        before, self.current = self.current, []
        for held in before:
            there = any(one is not None and held() is one for one in workspaces)
            (self.current if there else self.outgrown).append(held)
        self._seen.count += len(before) - len(self.current)

    def forget(self, held: Reference) -> None:
        # By identity: weak references compare their referents, and tensors compare by element.
        self.current = [other for other in self.current if other is not held]
        self.outgrown = [other for other in self.outgrown if other is not held]


class _StrongReference:
    """A reference that keeps a workspace alive, and so in its place."""

    __slots__ = ("_workspace",)

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def __call__(self) -> Workspace:
        return self._workspace


def _hold_what_is_recorded(stock: StockFunction, activity: Activity, *, captures: _Captures) -> StockFunction:
    """Wrap `WorkspaceManager._ensure_workspace_size(required_bytes)`, through which every workspace is requested.

    A workspace that a graph has recorded is kept alive from then on. To count alone, it is referenced weakly.
    """
    from torch import cuda  # the target is imported by now, and torch with it

    outgrown = activity.counter(RECORDED_WORKSPACE_OUTGROWN)
    hold: Callable[[Workspace], Reference] = _StrongReference if activity.corrects else weakref.ref

    @functools.wraps(stock)
    def _ensure_workspace_size(self: Any, *args: Any, **kwargs: Any) -> Any:
        workspace = stock(self, *args, **kwargs)
        try:
            recorded = getattr(self, "graphfix_recorded", None)
            if captures.running and cuda.is_current_stream_capturing():
                if recorded is None:
                    recorded = self.graphfix_recorded = _RecordedWorkspaces(captures, outgrown)
                recorded.add(hold(workspace), workspace)
            if recorded is not None:
                for held in recorded.current:
                    if held() is not workspace:  # another slot's, or outgrown
                        recorded.count_outgrown(self._current_workspaces)
                        break
        except Exception as error:
            activity.failed(error)
        return workspace

    return _ensure_workspace_size


def _mark_captures(stock: StockFunction, _: Activity, *, captures: _Captures) -> StockFunction:
    """Wrap `GPUModelRunner.capture_model`, which captures all graphs of model runner V2. V1 locks the workspace."""

    @functools.wraps(stock)
    def capture_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        captures.running += 1
        try:
            return stock(self, *args, **kwargs)
        finally:
            captures.running -= 1

    return capture_model


def _forget_what_was_on_trial(stock: StockFunction, _: Activity, *, captures: _Captures) -> StockFunction:
    """Wrap `GPUModelRunner.profile_cudagraph_memory` (0.29.0), which drops its graphs before it returns."""

    @functools.wraps(stock)
    def profile_cudagraph_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, on_trial = captures.on_trial, list[tuple[_RecordedWorkspaces, Reference]]()
        captures.on_trial = on_trial
        try:
            return stock(self, *args, **kwargs)
        finally:
            captures.on_trial = before
            for recorded, held in on_trial:
                recorded.forget(held)

    return profile_cudagraph_memory


def patches(shape: str) -> tuple[Patch, ...]:
    captures = _Captures()
    holding, knowing, forgetting = (
        functools.partial(wrap, captures=captures)
        for wrap in (_hold_what_is_recorded, _mark_captures, _forget_what_was_on_trial)
    )
    on_trial = Patch(_RUNNER_MODULE, "GPUModelRunner.profile_cudagraph_memory", forgetting)
    return (
        Patch(_WORKSPACE_MODULE, "WorkspaceManager._ensure_workspace_size", holding),
        Patch(_RUNNER_MODULE, "GPUModelRunner.capture_model", knowing),
        *([on_trial] if shape.endswith("-on-trial") else []),
    )


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import unseen

    layers = (
        "mixture of experts, sparse MLA and its indexer, decode context parallelism, "
        "TurboQuant, from 0.25.0 on Triton MLA"
    )
    return (needs.RUNNER_V2, needs.GRAPHS, unseen("layers that use the workspace", layers))


_LOCKS = (
    "lock_workspace unlock_workspace lock unlock current_workspace_manager reset_workspace_manager "
    "init_workspace_manager WorkspaceManager _manager"
)

FIX = fix(
    "workspace-growth",
    runner="V2",
    diagnose=diagnose,
    surroundings=(
        # The slots, every use of their workspaces, and the lock
        Slice(_WORKSPACE, "", "_current_workspaces current_workspace _locked lock unlock"),
        Slice(_WORKSPACE, "lock_workspace", "return lock", Verdict.FIXED),
        # Code that locks or unlocks, or makes another manager
        Slice(_RUNNER, "", _LOCKS),
        Slice(_GRAPHS, "", _LOCKS),
        Slice(_WORKER, "", _LOCKS),
        Slice(_WARM_UP, "", _LOCKS, Verdict.FIXED),
        Slice(_SCALING, "", _LOCKS, Verdict.FIXED),
        # A layer with memory from the manager
        Slice(_LAYER, "TritonMLAImpl.forward_mqa", "attn_logits current_workspace_manager", Verdict.FIXED),
        # Captures on trial
        Slice(_RUNNER, "GPUModelRunner.profile_cudagraph_memory", "", Verdict.AFFECTED),
        Slice(_GRAPHS, "profile_cudagraph_memory", "capture_model", Verdict.AFFECTED),
    ),
    recognised=(
        *(2 * (_OF_A_SLOT,)),  # before it has grown, and after
        _CLEARED,
        _ALLOCATED,
        _NONE_YET,
        _APPENDED,
        _LOCK,
        f"if not profile_only: {_LOCK}",
        "init_workspace_manager(...)",  # once
        *_IMPORTED,
    ),
    corrections=patches,
    modules=(_WORKSPACE_MODULE, _RUNNER_MODULE),
    events=(RECORDED_WORKSPACE_OUTGROWN,),
    needs=needs,
    default_rationale="memory",
)
