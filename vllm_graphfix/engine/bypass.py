"""Fixes that are in place and that the engine goes past: its full graphs replay, and their wrappers are not called.

A wrapper around code that vLLM runs before each replay corrects nothing once that code is itself part of the graph, as
upstream means to make the build of attention metadata (57632). What proves that a fix is on the path follows from the
names of its targets: `patching.applied_fix.proof_of`.

In a step nothing is counted. After a capture, and every hour, each object whose calls prove something gets an attribute
of its own in place of the method, which is gone at the first call; so does each full graph, until the next heartbeat
after `REPLAYS` replays of them all.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix.engine.claims import builders_of
from vllm_graphfix.engine.graph_dispatch import managers_of
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


class Call(NamedTuple):
    """A method of a live object. Objects are compared by identity, for some cannot be hashed."""

    owned: Any
    method: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Call) and self.owned is other.owned and self.method == other.method

    def __hash__(self) -> int:
        return hash((id(self.owned), self.method))


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
        self._worker: Any = None
        """The worker that serves; None before it has captured graphs."""
        self._attributes: set[Call] = set()
        self._pending: dict[str, list[Call]] = {}
        """The calls that would prove each fix, while they are watched."""
        self._called: set[Call] = set()
        self._replays = 0
        self._heartbeats = 0
        self._failed = False
        self.bypassed: dict[str, str] = {}
        """Fixes that are bypassed, each with the reason."""

    def begin_capture(self, worker: Any) -> None:
        """Watch the calls of *worker*'s capture, which begins now."""
        self._try(self._watch, worker.model_runner, Proof.CAPTURE)

    def end_capture(self) -> None:
        """Leave no attribute behind, also after a capture that has failed."""
        self._unwatch()

    def on_captured(self, worker: Any) -> None:
        """Judge the capture that has ended, and watch replays from now on."""
        self._worker = worker
        self._try(self._judge_capture)

    def poll(self) -> None:
        """Judge, once there were enough replays; called by the heartbeat's thread."""
        if self._worker is not None:
            self._try(self._judge_replays)

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

    def _judge_capture(self) -> None:
        self._judge("it has captured graphs without a call of {}")
        self._watch(self._worker.model_runner, Proof.STEP)

    def _judge_replays(self) -> None:
        self._heartbeats += 1
        if not self._attributes:
            if self._heartbeats >= _REWATCH_AFTER:
                self._watch(self._worker.model_runner, Proof.STEP)
        elif self._replays >= REPLAYS or all(map(self._is_proven, self._pending)):
            self._judge(f"it has replayed full graphs {REPLAYS} times without a call of {{}}")

    def _is_proven(self, fix: str) -> bool:
        return any(call in self._called for call in self._pending[fix])

    def _judge(self, reason: str) -> None:
        """End the watch, and judge the fixes that it was for."""
        self._unwatch()
        pending, self._pending = self._pending, {}
        new: dict[str, str] = {}
        for fix, calls in pending.items():
            if any(call in self._called for call in calls):
                self.bypassed.pop(fix, None)
            # A manager without graphs had nothing to capture.
            elif any(getattr(owned, "graphs", True) for owned, _ in calls) and self._concerns(fix, self._worker):
                methods = ", ".join(sorted({method for _, method in calls}))
                new[fix] = f"the engine goes past it: {reason.format(methods)}"
        if worse := sorted(new.keys() - self.bypassed.keys()):
            logger.warning(
                "graphfix: %s: bypassed, since %s. The defect may be back. See %s/alerts.md#graphfixfixbypassed",
                ", ".join(worse),
                new[worse[0]],
                PAGES,
            )
        self.bypassed = self.bypassed | new
        if worse:
            self._publish()

    # -- attributes of the watch -----------------------------------------------------------------------------------

    def _watch(self, runner: Any, proof: Proof) -> None:
        self._unwatch()
        self._pending, self._called, self._replays, self._heartbeats = {}, set(), 0, 0
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
                self._put(graph, "replay", self._counting(graph.replay))

    def _calls_of(self, runner: Any, site: Site) -> Iterator[Call]:
        """Yield the calls on objects of *runner* that would reach *site*, and watch them."""
        method = "build" if is_of_builder(site.name) else site.attribute
        for owned in (runner, *builders_of(runner), *managers_of(runner)):
            # A subclass with a method of its own may call the patched one or not, and proves nothing.
            if _definer(owned, site.attribute) is site.owner:
                call = Call(owned, method)
                if call in self._attributes or self._put(owned, method, self._noting(call)):
                    yield call

    def _put(self, owned: Any, name: str, function: Callable[..., Any]) -> bool:
        if name in vars(owned):  # somebody else's
            return False
        setattr(owned, name, function)
        self._attributes.add(Call(owned, name))
        return True

    def _noting(self, call: Call) -> Callable[..., Any]:
        stock = getattr(*call)

        @functools.wraps(stock)
        def note(*args: Any, **kwargs: Any) -> Any:
            self._called.add(call)
            vars(call.owned).pop(call.method, None)
            return stock(*args, **kwargs)

        return note

    def _counting(self, replay: Callable[[], Any]) -> Callable[[], Any]:
        def count() -> Any:
            if self._replays < REPLAYS and _serves_requests(sys._getframe(1)):
                self._replays += 1
            return replay()

        return count

    def _unwatch(self) -> None:
        attributes, self._attributes = self._attributes, set()
        for owned, name in attributes:
            vars(owned).pop(name, None)

    def forked(self) -> None:
        """Discard the parent's watch; called in a forked child, which has no graphs yet."""
        self._unwatch()
        self._worker, self._failed, self.bypassed, self._pending = None, False, {}, {}


def full_graphs(runner: Any) -> Iterator[Any]:
    """Yield the full graphs of the model of *runner*: those of its wrapper (V1), or of its manager (V2)."""
    wrapper = vars(runner).get("model")
    wrapper = vars(wrapper).get("cudagraph_wrapper", wrapper) if hasattr(wrapper, "__dict__") else None
    own = vars(wrapper) if wrapper is not None else {}
    if getattr(own.get("runtime_mode"), "name", None) == "FULL":
        graphs = [entry.cudagraph for entry in own.get("concrete_cudagraph_entries", {}).values()]
    else:
        graphs = [*getattr(vars(runner).get("cudagraph_manager"), "graphs", {}).values()]
    yield from (graph for graph in graphs if hasattr(graph, "replay"))


def _definer(owned: Any, method: str) -> type | None:
    return next((kind for kind in type(owned).__mro__ if method in vars(kind)), None)


def _serves_requests(frame: FrameType | None) -> bool:
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name in _OUTSIDE_OF_REQUESTS:
            return False
        frame = frame.f_back
    return True
