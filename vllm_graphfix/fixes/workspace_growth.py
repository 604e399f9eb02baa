"""`workspace-growth`: a recorded workspace is kept when a larger one takes its place (PR 55341).

A graph of model runner V2 has recorded it.
"""

from __future__ import annotations

import ast
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Counter, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import About

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_WORKSPACE = "vllm/v1/worker/workspace.py"
_RUNNER = "vllm/v1/worker/gpu/model_runner.py"
_GRAPHS = "vllm/v1/worker/gpu/cudagraph_utils.py"
_WORKER = "vllm/v1/worker/gpu_worker.py"
_WORKSPACE_MODULE = "vllm.v1.worker.workspace"
_RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"
_ALLOCATED = "self._current_workspaces[...] = torch.empty((required_bytes,), dtype=torch.uint8, device=self._device)"
_SLOTS = "for ubatch_id in range(self._num_ubatches): ..."

RECORDED_WORKSPACE_OUTGROWN = Event(
    "recorded-workspace-outgrown",
    "A larger workspace replaced one that a graph had recorded: on stock that memory is freed, and the graph still "
    "reads and writes there.",
)

Workspace = Any
"""A tensor of bytes; vLLM's manager has one for each slot: each micro-batch, and from 0.28.0 on each lane of it."""
Reference = Callable[[], "Workspace | None"]


def diagnose(source: Source) -> Diagnosis:
    if source.read(_WORKSPACE) is None or source.read(_RUNNER) is None:
        return Diagnosis(Verdict.ABSENT, "no workspace manager, or no model runner V2 that captures graphs with it")
    ensure = source.function(_WORKSPACE, "WorkspaceManager._ensure_workspace_size")
    capture = source.function(_RUNNER, "GPUModelRunner.capture_model")
    if ensure is not None and capture is not None:
        locked = _place_of_lock(source, capture)
        if locked and ensure.find("if self._locked: ...") and ensure.find("raise AssertionError(...)"):
            return Diagnosis(
                Verdict.FIXED, "the workspace is locked when graphs are captured, and growth is an error", locked
            )
        cleared = ensure.only("self._current_workspaces[...] = None")
        if cleared and not _mentions_lock(source):
            kept = _keeping_statement(ensure, cleared)
            if kept:
                return Diagnosis(Verdict.FIXED, "an outgrown workspace is kept", ensure.at(kept))
            shape = _shape(source, ensure, capture)
            if shape:
                return Diagnosis(
                    Verdict.AFFECTED,
                    "model runner V2 lets the workspace grow after a capture, and the one that graphs have recorded "
                    "is freed",
                    ensure.at(cleared),
                    shape,
                )
    return Diagnosis.unrecognised("the workspace grows, or model runner V2 locks it, in a way", ensure or _WORKSPACE)


def _place_of_lock(source: Source, capture: Function) -> str | None:
    """Where the workspace is locked after every capture.

    Model runner V2 locks it itself, or the worker of both runners does.
    """
    lock = source.function(_WORKSPACE, "WorkspaceManager.lock")
    if lock is None or not lock.only("self._locked = True"):
        return None
    if source.says(_RUNNER, "lock_workspace"):
        return _place_of_lock_behind(
            capture, "if not profile_only: ...", "(...).capture(...)", "(...).capture_model(...)"
        )
    if source.says(_WORKER, "lock_workspace"):
        warm_up = source.function(_WORKER, "Worker.compile_or_warm_up_model")
        unless_eager = "if not self.model_config.enforce_eager: ..."
        return _place_of_lock_behind(warm_up, unless_eager, "self.model_runner.capture_model(...)") if warm_up else None
    return None


def _place_of_lock_behind(function: Function, condition: str, *captures: str) -> str | None:
    """Where *function* locks the workspace behind all *captures*, always or under *condition*."""
    locked = function.only("lock_workspace()")
    captured = [found.lineno for pattern in captures for found in function.find(pattern)]
    if locked is None or not captured or max(captured) > locked.lineno:
        return None
    blocks = [function.node.body, *(found.body for found in function.find(condition) if isinstance(found, ast.If))]
    always = any(isinstance(found, ast.Expr) and found.value is locked for block in blocks for found in block)
    return function.at(locked) if always else None


def _mentions_lock(source: Source) -> bool:
    """Whether model runner V2 or the worker does something about the lock, or about the manager that has it."""
    return any(
        source.says(path, word)
        for path in (_RUNNER, _WORKER)
        for word in ("lock_workspace", "current_workspace_manager")
    )


def _keeping_statement(ensure: Function, cleared: ast.stmt | ast.expr) -> ast.stmt | ast.expr | None:
    """Where, just before the slot is cleared, its tensor goes to a list that outlives the call."""
    kept = ensure.only("(...).append(current_workspace)")
    owner: Any = getattr(getattr(kept, "func", None), "value", None)
    while isinstance(owner, (ast.Attribute, ast.Subscript)):
        owner = owner.value
    lasts = isinstance(owner, ast.Name) and owner.id == "self"
    return kept if kept and lasts and ensure.in_one_block(kept, cleared) else None


def _shape(source: Source, ensure: Function, capture: Function) -> str:
    """The shape of code in which what is wrapped does what the layers rely on; empty for other code."""
    manager = source.function(_WORKSPACE, "WorkspaceManager")
    handed_out = source.function(_WORKSPACE, "WorkspaceManager.get_simultaneous")
    slots = len(ensure.find(_SLOTS))
    if (
        manager is None
        or handed_out is None
        # Nobody else hands a workspace out, or puts one in a slot.
        or not handed_out.only("current_workspace = self._ensure_workspace_size(total_bytes)")
        or len(manager.find("self._ensure_workspace_size(...)")) != 1
        or len(manager.find("self._current_workspaces[...] = ...")) != 2
        or not ensure.takes.startswith("self, required_bytes")
        or not ensure.only(_ALLOCATED)
        or not ensure.only("return current_workspace")
        or ensure.loops() != slots + len(ensure.find("while curr_frame is not None: ..."))
        or not ensure.mentions(current_workspace=8 if slots else 5)
        or len(ensure.find("self._current_workspaces")) != (5 if slots else 4)
        or len(capture.find("self.cudagraph_manager.capture(...)")) != 1
    ):
        return ""
    shape = "every-slot" if slots else "one-slot"
    profile = source.function(_RUNNER, "GPUModelRunner.profile_cudagraph_memory")
    if profile is None or profile.only("return 0"):
        return shape if not source.says(_GRAPHS, "capture_model") else ""
    on_trial = source.function(_GRAPHS, "profile_cudagraph_memory")
    if (
        on_trial
        and profile.only("return _profile_cudagraph_memory(self)")
        and on_trial.only("runner.capture_model(...)")
    ):
        return f"{shape}-on-trial"
    return ""


class _Captures:
    """Whether model runner V2 is capturing, and what trial captures have recorded.

    The graphs of trial captures are thrown away again.
    """

    __slots__ = ("on_trial", "running")

    def __init__(self) -> None:
        self.running = 0
        self.on_trial: list[tuple[_RecordedWorkspaces, Reference]] | None = None


class _RecordedWorkspaces:
    """The workspaces of one manager that graphs have recorded.

    Those are the ones that it still hands out, and those that it has outgrown.
    """

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

    def look(self, workspaces: Sequence[Workspace | None]) -> None:
        """Counts those that none of the manager's *workspaces* is any more."""
        before, self.current = self.current, []
        for held in before:
            there = any(one is not None and held() is one for one in workspaces)
            (self.current if there else self.outgrown).append(held)
        self._seen.count += len(before) - len(self.current)

    def forget(self, held: Reference) -> None:
        # By identity: weak references are equal if what they refer to is, and tensors compare themselves by element.
        self.current = [other for other in self.current if other is not held]
        self.outgrown = [other for other in self.outgrown if other is not held]


class _StrongReference:
    """A workspace that stays where it is for as long as this does."""

    __slots__ = ("_workspace",)

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def __call__(self) -> Workspace:
        return self._workspace


def _hold_what_is_recorded(stock: StockFunction, activity: Activity, *, captures: _Captures) -> StockFunction:
    """Wraps `WorkspaceManager._ensure_workspace_size(required_bytes)`: every request for a workspace goes through it.

    A workspace that a graph has recorded is held from then on. To count alone, it is only referred to.
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
                        recorded.look(self._current_workspaces)
                        break
        except Exception as error:
            activity.failed(error)
        return workspace

    return _ensure_workspace_size


def _mark_captures(stock: StockFunction, _: Activity, *, captures: _Captures) -> StockFunction:
    """Wraps `GPUModelRunner.capture_model`, in which model runner V2 captures all of its graphs.

    V1 captures elsewhere, and locks the workspace.
    """

    @functools.wraps(stock)
    def capture_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        captures.running += 1
        try:
            return stock(self, *args, **kwargs)
        finally:
            captures.running -= 1

    return capture_model


def _forget_what_was_on_trial(stock: StockFunction, _: Activity, *, captures: _Captures) -> StockFunction:
    """Wraps `GPUModelRunner.profile_cudagraph_memory` (0.29.0), whose graphs are gone when it returns."""

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


FIX = Fix(
    number=12,
    name="workspace-growth",
    runner="V2",
    reads=(_WORKSPACE, _RUNNER, _GRAPHS, _WORKER),
    modules=(_WORKSPACE_MODULE, _RUNNER_MODULE),
    diagnose=diagnose,
    patches=patches,
    events=(RECORDED_WORKSPACE_OUTGROWN,),
    needs=needs,
    ground="memory",
    evidence=(
        f"{_WORKSPACE}::WorkspaceManager",
        *(
            f"{_WORKSPACE}::{name}"
            for name in ("current_workspace_manager", "init_workspace_manager", "reset_workspace_manager")
        ),
    ),
)

ABOUT = About(
    pr=55341,
    references=("issue 55336",),
    summary="a workspace that a graph has recorded outlives its replacement",
    releases="0.14.1 - 0.29.0",
    seen="wrong tokens or illegal memory access some time after start, after a long prompt",
    first_test="`VLLM_DEBUG_WORKSPACE=1`: does the workspace grow after the captures?",
    symptom="With model runner V2, an illegal memory access right after the engine has captured its graphs, or at "
    "some step while serving, or wrong output of requests whose tensors lie where the old workspace was. Upstream saw "
    "a DeepSeek V4 engine abort during start-up.",
    cause="Mixture-of-experts, sparse attention and other layers share one workspace, whose address their graphs "
    "record. A batch that needs more makes the manager free it and allocate a larger one: the warm-up after the "
    "captures (from 0.17.0 on), or a request. V1 locks the workspace when its graphs are captured; V2 does not, and "
    "its graphs go on using memory that is no longer theirs.",
    remedy="A workspace that was handed out while model runner V2 captured is kept by its manager when a larger one "
    "replaces it. After the captures that is at most one for each slot, smaller than the one in use; without a "
    "capture nothing is kept.",
    detect="VLLM_DEBUG_WORKSPACE=1 logs 'Resized workspace' after 'Graph capturing finished'; --enforce-eager does "
    "not fail.",
    workaround="--enforce-eager, or model runner V1.",
    removable="with vLLM 0.30.0",
    in_caches="anything that was computed from or written over the freed workspace: nothing can be ruled out",
    how_sure="not known",
)
