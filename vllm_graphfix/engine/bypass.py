"""Fixes that are in place and that the engine goes past: its full graphs replay, and their wrappers are not called.

A wrapper around code that vLLM runs before each replay corrects nothing once that code is itself part of the graph, as
upstream means to make the build of attention metadata (57632). What proves that a fix is on the path follows from the
names of its targets: `patching.applied_fix.proof_of`.

It is off by default. In a step nothing is counted. After a capture, and every hour, each object whose calls prove
something gets an attribute of its own in place of the method, which is gone at the first call; so does each full graph,
until the next heartbeat after `REPLAYS` replays of them all.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_graphfix.engine.graph_dispatch import builders_of, managers_of
from vllm_graphfix.log import logger
from vllm_graphfix.patching.applied_fix import Proof, is_of_builder
from vllm_graphfix.text import PAGES

if TYPE_CHECKING:
    from types import FrameType

    from vllm_graphfix.patching.sites import Site

REPLAYS = 64
"""Replays without a call after which a fix counts as bypassed. On stock each follows a call, but for one whose step had
begun when the watch did; 64 steps of decodes take about a second, so that the next heartbeat knows."""
_REWATCH_AFTER = 360
"""Heartbeats from one watch to the next: an hour."""
_OUTSIDE_OF_REQUESTS = frozenset({"execute_dummy_batch", "_dummy_run", "compile_or_warm_up_model"})
"""Callers of replays without requests, before which some releases build nothing."""
_MAX_FRAMES = 64


class Watched:
    """A method of an object, in whose place the object has an attribute of ours: a function that notes the call.

    It holds the object weakly. Where vLLM discards a graph, a cycle would keep it until a garbage collection, which may
    come in another capture, where CUDA refuses to free it. It looks the method up at each call: fixes, the marks and
    `compare --exact` replace methods of classes, and a fix that was reverted must not run. Another of ours may be
    beneath it.
    """

    own: ClassVar[weakref.WeakSet[Callable[..., Any]]] = weakref.WeakSet()
    """The attributes of all objects."""

    def __init__(self, instance: Any, method: str, note: Callable[[Watched], None]) -> None:
        """Set the attribute, which calls *note* before each call of the method and refers to this object."""
        self.called = False
        self.instance: Callable[[], Any] = weakref.ref(instance)
        self.method = method
        self._beneath = beneath = vars(instance).get(method)

        def call(*args: Any, **kwargs: Any) -> Any:
            note(self)
            instance = self.instance()
            return beneath(*args, **kwargs) if beneath else getattr(type(instance), method)(instance, *args, **kwargs)

        self._attribute = call
        self.own.add(call)
        setattr(instance, method, call)

    def is_on(self, instance: Any, method: str) -> bool:
        """Tell if this is the attribute *method* of *instance*."""
        return vars(instance).get(method) is self._attribute

    def remove(self) -> None:
        """Remove the attribute, unless it is under somebody else's, which calls it: it does nothing from then on."""
        instance = self.instance()
        if instance is not None and self.is_on(instance, self.method):
            if self._beneath is not None:
                setattr(instance, self.method, self._beneath)
            else:
                vars(instance).pop(self.method, None)  # with a default: a step may remove it now


class BypassWatch:
    """Watches the fixes of one process."""

    def __init__(
        self,
        provable: Callable[[], Mapping[str, Sequence[tuple[Site, Proof]]]],
        concerns: Callable[[str, Any], bool] = lambda fix, worker: True,
        publish: Callable[[], None] = lambda: None,
    ) -> None:
        """*provable* returns the sites of each applied fix at which a call proves that it is on the path.

        *concerns* tells if a worker's engine can have the defect of a fix; *publish* is called when one is bypassed.
        """
        self._provable, self._concerns, self._publish = provable, concerns, publish
        self._worker: Callable[[], Any] = lambda: None
        """Returns the worker that serves; None before it has captured graphs, while it does, and when it is gone."""
        self._watched: list[Watched] = []
        self._pending: dict[str, list[Watched]] = {}
        """The calls that would prove each fix, while they are watched."""
        self._replays = 0
        self._heartbeats = 0
        self._failed = False
        self.bypassed: dict[str, str] = {}
        """Fixes that are bypassed, each with the reason."""

    def begin_capture(self, worker: Any) -> None:
        """Watch the calls of *worker*'s capture, which begins now."""
        self._worker = lambda: None  # until it has captured, the heartbeat's thread must not touch what this one makes
        self._try(self._watch, worker, Proof.CAPTURE)

    def end_capture(self) -> None:
        """Leave no attribute behind, also after a capture that has failed."""
        self._unwatch()

    def on_captured(self, worker: Any) -> None:
        """Judge the capture that has ended, and watch replays from now on."""
        self._try(self._judge_capture, worker)

    def poll(self) -> None:
        """Judge, once there were enough replays; called by the heartbeat's thread."""
        if (worker := self._worker()) is not None:
            self._try(self._judge_replays, worker)

    def _try(self, function: Callable[..., None], *args: Any) -> None:
        if self._failed:
            return
        try:
            function(*args)
        except Exception as error:
            self._failed = True
            self._unwatch()
            self.bypassed = {}
            logger.warning("graphfix: whether graphs go past fixes is not watched: %s: %s", type(error).__name__, error)

    def _judge_capture(self, worker: Any) -> None:
        self._judge(worker, "it has captured graphs without a call of {}")
        self._watch(worker, Proof.STEP)
        self._worker = weakref.ref(worker)  # last: from here on the heartbeat judges

    def _judge_replays(self, worker: Any) -> None:
        self._heartbeats += 1
        if not self._watched:
            if self._heartbeats >= _REWATCH_AFTER:
                self._watch(worker, Proof.STEP)
        elif self._replays >= REPLAYS or all(map(_is_proven, self._pending.values())):
            self._judge(worker, f"it has replayed full graphs {REPLAYS} times without a call of {{}}")

    def _judge(self, worker: Any, reason: str) -> None:
        """End the watch, and judge the fixes that it was for."""
        self._unwatch()
        pending, self._pending = self._pending, {}
        applied = self._provable()  # one may have failed since, and been reverted
        new: dict[str, str] = {}
        for fix, calls in pending.items():
            if _is_proven(calls) or fix not in applied or not any(map(_is_expected, calls)):
                continue
            if self._concerns(fix, worker):
                methods = ", ".join(sorted({call.method for call in calls}))
                new[fix] = f"the engine goes past it: {reason.format(methods)}"
        before = self.bypassed
        still = {fix: why for fix, why in before.items() if not _is_proven(pending.get(fix, ()))}
        self.bypassed = still | new  # one assignment: other threads read it
        if worse := sorted(new.keys() - before.keys()):
            logger.warning(
                "graphfix: %s: bypassed, since %s. The defect may be back. See %s/alerts.md#graphfixfixbypassed",
                ", ".join(worse),
                new[worse[0]],
                PAGES,
            )
            self._publish()

    # -- attributes of the watch -----------------------------------------------------------------------------------

    def _watch(self, worker: Any, proof: Proof) -> None:
        self._unwatch()
        runner = worker.model_runner
        self._pending, self._replays, self._heartbeats = {}, 0, 0
        graphs = list(full_graphs(runner)) if proof is Proof.STEP else []
        if proof is Proof.STEP and not graphs:
            return
        self._pending = {
            fix: calls
            for fix, sites in self._provable().items()
            if (calls := [call for site, of in sites if of is proof for call in self._calls_of(runner, site)])
        }
        if self._pending:  # after the objects: a replay in between must not count against them
            for graph in graphs:
                self._put(graph, "replay", self._count)

    def _calls_of(self, runner: Any, site: Site) -> Iterator[Watched]:
        """Yield the calls on objects of *runner* that would reach *site*, and watch them."""
        method = "build" if is_of_builder(site.name) else site.attribute
        for instance in (runner, *builders_of(runner), *managers_of(runner)):
            # A subclass with a method of its own may call the patched one or not, and proves nothing.
            if _definer(instance, site.attribute) is site.owner and (call := self._put(instance, method, _note)):
                yield call

    def _put(self, instance: Any, method: str, note: Callable[[Watched], None]) -> Watched | None:
        """Watch *method* of *instance*; None if it has an attribute of somebody else's there."""
        if method in vars(instance):
            existing = next((each for each in self._watched if each.is_on(instance, method)), None)
            if existing is not None or vars(instance)[method] not in Watched.own:
                return existing
        watched = Watched(instance, method, note)
        self._watched.append(watched)
        return watched

    def _count(self, replay: Watched) -> None:
        if self._replays < REPLAYS and serves_requests(sys._getframe(2)):
            self._replays += 1

    def _unwatch(self) -> None:
        watched, self._watched = self._watched, []
        for each in watched:
            each.remove()

    def forked(self) -> None:
        """Discard the parent's watch; called in a forked child, which has no graphs yet."""
        self._unwatch()
        self._worker, self._failed, self.bypassed, self._pending = lambda: None, False, {}, {}


def _note(call: Watched) -> None:
    call.called = True
    call.remove()


def _is_expected(call: Watched) -> bool:
    """Tell if vLLM had to make *call*: a manager without graphs has nothing to capture, and an object may be gone."""
    instance = call.instance()
    return instance is not None and bool(getattr(instance, "graphs", True))


def _is_proven(calls: Sequence[Watched]) -> bool:
    return any(call.called for call in calls)


def full_graphs(runner: Any) -> Iterator[Any]:
    """Yield the full graphs of the model of *runner*: those of its wrapper (V1), or of its manager (V2)."""
    wrapper = vars(runner).get("model")
    wrapper = vars(wrapper).get("cudagraph_wrapper", wrapper) if hasattr(wrapper, "__dict__") else None
    own = vars(wrapper) if wrapper is not None else {}
    if getattr(own.get("runtime_mode"), "name", None) == "FULL":
        # A copy, made by one call in C: a step may add an entry meanwhile.
        graphs = [entry.cudagraph for entry in [*own.get("concrete_cudagraph_entries", {}).values()]]
    else:
        graphs = [*getattr(vars(runner).get("cudagraph_manager"), "graphs", {}).values()]
    yield from (graph for graph in graphs if hasattr(graph, "replay"))


def _definer(instance: Any, method: str) -> type | None:
    return next((kind for kind in type(instance).__mro__ if method in vars(kind)), None)


def serves_requests(frame: FrameType | None) -> bool:
    """Tell if the replay at *frame* belongs to a step with requests."""
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name in _OUTSIDE_OF_REQUESTS:
            return False
        frame = frame.f_back
    return True
