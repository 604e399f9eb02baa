"""The engines of `rank_faults.py`: which part of the plugin fails on one of two ranks, and what is to become of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm_graphfix.settings import environment as settings

RIGHT, ENDED, AS_STOCK, STOP = "right", "ended", "as stock", "clean stop"
AT = 12
"""The replay that is wrong, in which all requests decode."""
WATCHED = {
    settings.SHADOW: "1/1",
    settings.SHADOW_ACTION: "abort",
    settings.KV_MARKS: "1/1",
    settings.KV_MARKS_ACTION: "abort",
}
_READING = "shadow.runner_v1:_replays,shadow.runner_v2:_variables_of_caller"
"""The functions by which a rank learns whether a call is a replay."""


class Case(NamedTuple):
    """An engine, and what is to become of it."""

    fault: Mapping[str, Any]
    """Fields of `rank_fault.Fault`."""
    expected: tuple[str, ...]
    words: str = ""
    """A part of what `fleet` has to say is wrong, or notes; with none it says that all is in order."""
    environment: Mapping[str, str] = WATCHED


def _gate(name: str, before: bool, **fault: Any) -> dict[str, Case]:
    """Return both cases of a statement of the gate; *before* the capture `auto` may go on, on all ranks."""
    stops = "stops this engine before it"
    auto = ((RIGHT,), "") if before else ((STOP,), stops)
    return {
        f"gate, {name}, auto": Case(fault, *auto, {}),
        f"gate, {name}, strict": Case(fault, (STOP,), stops, {settings.PREFIX: "strict"}),
    }


CASES = {
    "no fault": Case({}, (RIGHT,)),
    "no fault, strict": Case({}, (RIGHT,), environment={settings.PREFIX: "strict"}),
    "shadow, a wrong replay": Case({"wrong": AT}, (ENDED,), "found wrong CUDA graph replays"),
    "abort, refused": Case(
        {"wrong": AT, "at": "engine.abort_channel:Sender.__init__", "error": "ECONNREFUSED"}, (AS_STOCK,), "abort is"
    ),
    "abort, sending fails": Case(
        {"wrong": AT, "at": "engine.abort_channel:Sender.send", "error": "EPIPE"}, (AS_STOCK,), "abort is failed"
    ),
    "abort, the receiver ends": Case(
        {"wrong": AT, "at": "engine.abort_channel:Receiver._read", "rank": None}, (AS_STOCK,), "abort is"
    ),
    **_gate("graphs", before=True, at="engine.capture_gate:_uses_graphs", times=1),
    **_gate("report before", before=True, at="engine.rank_agreement:publish", first=2, times=1),
    **_gate("comparison before", before=True, at="engine.rank_agreement:compare", times=2),
    **_gate("fixes before", before=True, at="engine.capture_gate:CaptureGate._unapplied_fixes", times=1),
    **_gate("failures after", before=False, at="engine.context:EngineContext.stop_recording_failures", times=1),
    **_gate("report after", before=False, at="engine.own_report:report_after_capture", times=1),
    **_gate("act after", before=False, at="engine.capture_gate:CaptureGate._act_on_failures", times=1),
    "records, no space": Case({"at": "records.writing:write", "error": "ENOSPC"}, (RIGHT,), "record not written for"),
    "shadow, each call": Case({"at": _READING}, (RIGHT,), "shadow is failed"),
    "shadow, a later call": Case({"at": _READING, "first": 30, "times": 1}, (STOP,), "shadow"),
    "shadow, before the step": Case(
        {"at": "shadow.runs:CheckedStep.__init__", "first": 3}, (RIGHT,), "shadow is failed"
    ),
    "shadow, second run": Case({"at": "shadow.runs:FurtherRun.__init__", "times": 1}, (RIGHT, STOP), "shadow"),
    "shadow, in a second run": Case(
        {"at": "shadow.runs:CheckedStep._run", "first": 2, "times": 1}, (RIGHT, STOP), "shadow"
    ),
    "addresses, capture": Case({"at": "engine.inventory:Inventory.__init__"}, (RIGHT,), "addresses are not compared"),
    "addresses, heartbeat": Case(
        {"at": "engine.rank_addresses:RankAddresses._poll", "first": 2}, (RIGHT,), "addresses are not compared"
    ),
    "marks, begin": Case({"at": "marks.watch:ChecksumMonitor._start_on"}, (RIGHT,), "kv-marks is failed"),
    "marks, step": Case({"at": "marks.watch:ChecksumMonitor._track", "first": 2}, (RIGHT,), "kv-marks is failed"),
}
