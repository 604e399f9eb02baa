"""A double of a fleet of any size: /metrics of each engine by its path on one port, with states that are planted.

The series are the plugin's own, by its own collector, of made-up snapshots of eight ranks; vLLM has one of its names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from vllm_graphfix.engine.metrics import Exposition
from vllm_graphfix.engine.metrics_snapshot import Process, ServedEngine, Snapshot
from vllm_graphfix.fixes import FIXES

RANKS = 8
NO_PLUGIN = "no plugin"
_NAMES = tuple(fix.name for fix in FIXES)
_APPLIED: dict[tuple[str, ...], int] = {(name, "auto", "active", "none"): RANKS for name in _NAMES}
_EVENTS: dict[tuple[str, ...], int] = {(fix.name, event.name): 7 for fix in FIXES for event in fix.events}


def _snapshot(fixes: dict[tuple[str, ...], int], events: dict[tuple[str, ...], int], **changes: Any) -> Snapshot:
    counted = {Process("ranks", 1, 1): _EVENTS | events}
    return Snapshot(time.time() + 3600, fixes, {}, counted, RANKS, unrecorded=0)._replace(**changes)


def _fixes(state: str, code: str = "none", ranks: int = RANKS) -> dict[tuple[str, ...], int]:
    """The first fix in *state* on so many ranks, all else applied."""
    first, *others = _APPLIED
    changed = {first: RANKS - ranks} if ranks < RANKS else {}
    return changed | {(_NAMES[0], "auto", state, code): ranks} | dict.fromkeys(others, RANKS)


_SNAPSHOTS = {
    "fixed": _snapshot(_APPLIED, {}),
    "counting": _snapshot({(name, "observe", "observing", "none"): RANKS for name in _NAMES}, {}),
    "stock": _snapshot({(name, "auto", "not-in-canary", "none"): RANKS for name in _NAMES}, {}),
    "wrong replay": _snapshot(_APPLIED, {("shadow", "checks"): 100, ("shadow", "mismatches"): 3}),
    "refused drafts": _snapshot(_APPLIED, {("shadow", "checks"): 100, ("shadow", "acceptance-collapses"): 8}),
    "misconfigured": _snapshot(_APPLIED, {}),
    "failed fix": _snapshot(_fixes("failed", "error"), {}),
    "full disk": _snapshot(_APPLIED, {}, outdated=2),
    "hung rank": _snapshot(_APPLIED, {}, stuck=1),
    "silent rank": _snapshot(_APPLIED, {}, silent=1),
    "error of the gate": _snapshot(_APPLIED, {}, unchecked=RANKS),
    "ranks of two versions": _snapshot(_fixes("incompatible", "new-code", 1), {}, agreeing=RANKS - 1),
    "older plugin": _snapshot(_APPLIED, {}),
    "older vLLM": _snapshot(_APPLIED, {}),
    "old numbers": _snapshot(_APPLIED, {}, read_at=time.time() - 900),
}
STATES = (*_SNAPSHOTS, NO_PLUGIN)
"""What an engine of the double can be."""


def exposed(state: str) -> bytes:
    """Return /metrics of an engine in *state*, one of `STATES`."""
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Double.", ("model_name", "engine"), registry=registry).labels("m", "0").set(3)
    if state != NO_PLUGIN:
        exposition = Exposition(registry)
        exposition.publish_engine(
            ServedEngine(
                "e" * 16,
                canary=state not in ("counting", "stock"),
                percentage=25.0,
                ranks=RANKS,
                misconfigured={"VLLM_GRAPHFIX_SHADOW": "1 in 3"} if state == "misconfigured" else {},
                graphfix="0.1.9" if state == "older plugin" else "0.2.0",
                vllm="0.21.0" if state == "older vLLM" else "0.33.0",
            )
        )
        exposition.publish_unreadable(0)
        exposition.publish(_SNAPSHOTS[state])
    return generate_latest(registry)


class Simulator:
    """The engines, by number; a state may be changed while they are scraped."""

    def __init__(self, states: Sequence[str]) -> None:
        self.states: list[str | None] = [*states]
        """None: it does not answer."""
        self._bodies = {state: exposed(state) for state in STATES}
        self.address = ""

    @property
    def urls(self) -> list[str]:
        return [f"http://{self.address}/{number}/metrics" for number in range(len(self.states))]

    def body(self, path: str) -> bytes | None:
        state = self.states[int(path.split("/")[1])]
        return None if state is None else self._bodies[state]


@contextmanager
def serve_metrics(body: Callable[[str], bytes | None]) -> Iterator[str]:
    """Answer like vLLM's /metrics, whatever the client accepts, on a port of this machine, whose address is yielded.

    *body* is of a path; where it is None the answer is 503. The own server of prometheus_client would offer
    OpenMetrics, where ``vllm:`` becomes ``vllm_``.
    """

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = body(self.path)
            self.send_response(200 if answer is not None else 503)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(answer or b"")))
            self.end_headers()
            with suppress(ConnectionError):  # a Prometheus that is ending hangs up
                self.wfile.write(answer or b"")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the name is the base class's
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextmanager
def simulated(states: Sequence[str]) -> Iterator[Simulator]:
    """Serve an engine in each of *states*, on one port of this machine."""
    simulator = Simulator(states)
    with serve_metrics(simulator.body) as simulator.address:
        yield simulator
