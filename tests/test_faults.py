"""A fault in every call that the plugin makes into vLLM and the system, and in every file that it reads.

Stock is the worst case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fault_engine import INTERRUPTS, PACKAGE
from faults import Fault, Faults, Outcome

# Release, and which part of the faults: one release of each shape whole, and a sample of one.
INJECTED = [
    pytest.param("0.18.1", 167, marks=pytest.mark.xdist_group("0.18.1")),
    *(
        pytest.param(release, 1, marks=[pytest.mark.slow, pytest.mark.xdist_group(f"faults-{release}")])
        for release in ("0.15.0", "0.17.1", "0.18.1", "0.20.0", "0.21.0", "0.22.1")
    ),
]
injected = cache(Faults)
every_release = pytest.mark.parametrize(("release", "every"), INJECTED)


def complaints(faults: Faults, *modes: str, interrupts: bool = False) -> list[tuple[Fault, list[str]]]:
    chosen = [o for o in faults.outcomes if o.fault.mode in modes and (o.fault.error in INTERRUPTS) == interrupts]
    assert chosen
    return [(outcome.fault, messages) for outcome in chosen if (messages := faults.complaints(outcome))]


@every_release
def test_the_calls_are_counted(release: str, every: int, record_property: Callable[[str, object], None]) -> None:
    """A profiler that sees less than it should would make all of the following true."""
    faults = injected(release, every)
    for about, number in Counter(map(faults.ended, faults.outcomes)).items():
        record_property("counted", ("faults, one a process", release, about, number))
    files = Counter(place.split(":")[1] for place in faults.places)
    elsewhere = (
        "commands/",
        "verify/",
        "deployment/",
        "shadow/",
        "marks/",
        "fixes/",
    )  # in no process of an engine, or of their own
    ours = {path.relative_to(PACKAGE).as_posix() for path in Path(PACKAGE).rglob("*.py")}
    ours = {file for file in ours if not file.startswith(elsewhere) and not file.endswith("/__init__.py")}
    where_graphs_are_captured = {
        "engine/graph_dispatch.py",
        "engine/failed_graphs.py",
    }  # `test_fault_acts.py` has these
    # `test_addresses.py`, `test_record_relay.py`
    where_a_rank_has_captured = {"engine/rank_addresses.py", "engine/inventory.py", "engine/record_relay.py"}
    # `test_bypass.py`, `test_metadata.py`, `test_traced.py`
    where_it_is_switched_on = {f"engine/{name}.py" for name in ("bypass", "live_deployment", "metadata", "traced")}
    in_a_report = "engine/environment_report.py"  # `test_collect_env.py`
    where_requests_are_ended = {
        f"engine/{name}.py" for name in ("abort", "abort_channel", "ended_requests", "verdict")
    }  # `test_abort.py`
    assert (
        ours
        - {"__main__.py", "_version.py", in_a_report}
        - where_requests_are_ended
        - where_graphs_are_captured
        - where_a_rank_has_captured
        - where_it_is_switched_on
        <= files.keys()
    )
    assert sum(files.values()) > 700
    assert (
        min(
            files[file]
            for file in (
                "engine/process.py",
                "engine/capture_gate.py",
                "patching/manager.py",
                "patching/sites.py",
                "source/files.py",
                "engine/role.py",
            )
        )
        >= 15
    )
    called = {place.rsplit(":", 1)[1] for place in faults.places}
    assert {"register_post_import_hook", "register_at_fork", "open", "mkdir", "openssl_sha256", "getLogger"} <= called
    assert len(faults.outcomes) == len(range(0, faults.planned, every))
    assert sum(faults.ended(outcome) == "not made" for outcome in faults.outcomes) <= 1 + len(faults.outcomes) // 50


@every_release
def test_by_default_vllm_goes_its_way_and_states_and_log_say_what_is_missing(release: str, every: int) -> None:
    assert complaints(injected(release, every), "auto", "forked") == []


@every_release
def test_the_same_where_the_log_fails_too(release: str, every: int) -> None:
    assert complaints(injected(release, every), "refusing") == []


@every_release
def test_who_insists_is_stopped_with_one_message_and_never_by_an_import(release: str, every: int) -> None:
    assert complaints(injected(release, every), "strict", "on") == []


@every_release
def test_who_interrupts_is_not_held_up(release: str, every: int) -> None:
    assert complaints(injected(release, every), "auto", interrupts=True) == []


@every_release
def test_without_a_fault_all_is_applied_and_nothing_else_changes(release: str, every: int) -> None:
    faults = injected(release, every)
    for mode, result in faults.counted.items():
        assert {name for name, (state, *_) in result["states"].items() if state == "active"} == set(faults.needed), mode
        assert {stage: end for stage, end in result["ends"].items() if stage != "fork"} == faults.stock, mode


@every_release
def test_a_damaged_file_of_vllm_has_vllms_own_error_and_no_other(release: str, every: int) -> None:
    faults = injected(release, every)
    wrong = {
        what: messages for what, results in faults.trees.items() if (messages := faults.complaints_about_files(results))
    }
    assert wrong == {}
    # Else nothing was damaged, or all of it beyond what is to be shown.
    broken = {what for what, results in faults.trees.items() if imports_fail(faults, results["stock"])}
    assert {what for what in faults.trees if what.endswith(UNREADABLE)} <= broken
    # What another module imports by its name breaks that module's import.
    odd = {what for what in faults.trees if what.endswith(ODD)}
    assert len(odd & broken) <= len(odd) / 10


UNREADABLE = ("binary", "null byte", "unknown encoding", "a folder", "a dangling link")
ODD = ("another encoding", "renamed", "further argument", "further keyword", "bytecode only")


def imports_fail(faults: Faults, result: dict[str, Any]) -> bool:
    return any(end != faults.stock[stage] for stage, end in result["ends"].items() if stage.startswith("import "))


@every_release
def test_a_vllm_in_an_archive_is_stock_and_its_source_is_what_is_missing(release: str, every: int) -> None:
    faults = injected(release, every)
    result = faults.trees["all: in a zip"]["auto"]
    assert {state for state, _, _ in result["states"].values()} == {"failed"}
    assert all("its source cannot be read" in reason for _, reason, _ in result["states"].values())


@every_release
def test_a_damaged_manifest_leaves_vllm_stock_and_stops_who_insists(release: str, every: int) -> None:
    faults = injected(release, every)
    assert len(faults.packages) > 5
    for what, results in faults.packages.items():
        assert faults.complaints_about_files(results) == [], what
        states = results["auto"]["states"].values()
        assert {state for state, _, _ in states} == {"failed"}, what
        assert all("reinstall vllm-graphfix" in reason for _, reason, _ in states), what
        assert any("stops this engine" in (end or "") for end in results["strict"]["ends"].values()), what


STOPPED = "GraphfixError: vllm-graphfix stops this engine before it captures its CUDA graphs: a is failed: why"
HALF = {"a": [True, False]}
NONE = {"a": [False, False]}
FAILED = {"a": ["failed", "why", None]}
WARNING_LOG = [[30, "a is not applied"]]
BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "half applied": ("auto", {"layers": HALF}),
    "the log does not say so": ("auto", {"layers": NONE, "states": FAILED, "log": []}),
    "a says active": ("auto", {"layers": NONE}),
    "a is waiting": ("auto", {"layers": NONE, "states": {"a": ["waiting", "why", None]}}),
    "has no reason": ("auto", {"states": {"a": ["active", "", "affected"]}}),
    "went another way": ("auto", {"ends": {"import m": None, "measure": STOPPED}}),
    "states() raised": ("auto", {"states": "KeyError: 'a'"}),
    "not stopped": ("strict", {"layers": NONE, "states": FAILED, "log": WARNING_LOG}),
    "stopped although": ("strict", {"ends": {"import m": None, "measure": STOPPED}}),
    "stopped in the wrong way": (
        "strict",
        {"ends": {"import m": STOPPED}, "layers": NONE, "states": FAILED, "log": WARNING_LOG},
    ),
    "more than one": (
        "on",
        {"ends": {"import m": None, "configure": "E", "measure": STOPPED}, "layers": NONE, "states": FAILED},
    ),
    "was not made": ("auto", {"fired": False}),
}


@pytest.mark.parametrize("what", BAD)
def test_what_must_not_happen_is_noticed(what: str) -> None:
    """On outcomes that no process had."""
    judge = object.__new__(Faults)
    judge.needed, judge.targets = ("a",), {"a": [("m", "f"), ("m", "g")]}
    judge.stock = {"import m": None, "configure": None, "measure": "AttributeError: of a stand-in"}
    mode, changes = BAD[what]
    well = {
        "fired": True,
        "ends": judge.stock,
        "states": {"a": ["active", "why", "affected"]},
        "layers": {"a": [True, True]},
        "log": [],
    }
    fault = Fault(mode, "MainThread:process.py:start:1:1:callee", 1, "EIO", "posix")
    assert judge.complaints(Outcome(fault, well)) == []
    assert any(what in complaint for complaint in judge.complaints(Outcome(fault, well | changes)))


def test_a_swallowed_interrupt_and_a_fix_lost_to_a_fault_in_the_records_are_noticed() -> None:
    judge = object.__new__(Faults)
    judge.needed, judge.targets, judge.stock = ("a",), {"a": [("m", "f")]}, {"import m": None}
    result = {"fired": True, "ends": judge.stock, "states": FAILED, "layers": {"a": [False]}, "log": WARNING_LOG}
    held_up = Fault("auto", "MainThread:process.py:start:1:1:callee", 1, "KeyboardInterrupt", "posix")
    assert judge.complaints(Outcome(held_up, result)) == ["the interrupt was swallowed"]
    in_a_record = Fault("auto", "MainThread:records/writing.py:write:1:1:callee", 1, "EIO", "posix")
    assert judge.complaints(Outcome(in_a_record, result)) == ["a fault where something is only told took a fix away"]
    assert judge.complaints(Outcome(in_a_record, None)) == ["the process died or hung"]
