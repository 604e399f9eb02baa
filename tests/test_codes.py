"""The code of each state: the kind of its reason, for metrics."""

from __future__ import annotations

from typing import Any

import pytest

from records import ENGINE
from vllm_graphfix.engine import addresses
from vllm_graphfix.engine.abort import Aborts
from vllm_graphfix.engine.addresses import AddressWatch
from vllm_graphfix.engine.process import EngineProcess
from vllm_graphfix.fix import Code, Diagnosis, Mode, State, Verdict
from vllm_graphfix.fixes import BY_NAME, FIXES
from vllm_graphfix.patching import sites
from vllm_graphfix.patching.applied_fix import AppliedFix, Policy
from vllm_graphfix.patching.manager import FixManager
from vllm_graphfix.settings.environment import Addresses, Master

FIX = BY_NAME["capture-state"]


def applied(mode: Mode = Mode.AUTO, **policy: Any) -> AppliedFix:
    return AppliedFix(FIX, Policy(**{"master": Master.ON, "modes": {FIX.name: mode}} | policy))


@pytest.mark.parametrize(
    ("one", "code"),
    [
        (applied(), Code.NONE),
        (applied(master=Master.OFF), Code.SETTING),
        (applied(Mode.OFF), Code.SETTING),
        (applied(Mode.OFF, misconfigured={FIX.variable: "onn"}), Code.MISCONFIGURED),
        (applied(master=Master.OFF, misconfigured={"VLLM_GRAPHFIX": "observ"}), Code.MISCONFIGURED),
        (applied(withheld="not in the rollout"), Code.NONE),
    ],
    ids=["waiting", "switch", "mode", "mistyped mode", "mistyped switch", "not in the rollout"],
)
def test_settings_have_codes(one: AppliedFix, code: Code) -> None:
    assert one.code is code


@pytest.mark.parametrize(
    ("diagnosis", "code"),
    [
        (Diagnosis.unrecognised("it captures in a way", "a.py"), Code.NEW_CODE),
        (Diagnosis.unrecognised("it captures in a way", "a.py")._replace(defect_seen=True), Code.NEW_CODE),
        (Diagnosis(Verdict.FIXED, "upstream has it"), Code.NONE),
    ],
)
def test_a_diagnosis_has_a_code(diagnosis: Diagnosis, code: Code) -> None:
    one = applied()
    one.judge(diagnosis)
    assert one.code is code


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        (sites.ConflictError("acme has wrapped it"), State.CONFLICT, Code.FOREIGN_PATCH),
        (KeyError("KeyError"), State.FAILED, Code.ERROR),
    ],
)
def test_what_cannot_be_taken_back_has_the_code_of_why(
    monkeypatch: pytest.MonkeyPatch, error: Exception, state: State, code: Code
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(sites, "revert", fail)
    one = applied()
    one.revert(State.OFF, "reverted")
    assert (one.state, one.code) == (state, code)


def test_errors_of_a_manager_and_of_a_capture_have_codes() -> None:
    manager = FixManager(FIXES, Policy(Master.ON, dict.fromkeys(BY_NAME, Mode.AUTO)))
    first, second, third = list(BY_NAME)[:3]
    manager.give_up(KeyError("planted"))
    assert {state.code for state in manager.states(diagnose=False).values()} == {Code.ERROR}
    for name, failed in ((first, True), (second, False)):
        manager._applied[name].set_state(State.ACTIVE, "applied to it")
        manager.settle_capture(name, "in a graph", failed=failed)
    manager._applied[third].set_state(State.ACTIVE, "applied to it")
    manager.activity(third).error = "IndexError: in a step"
    states = manager.states(diagnose=False)
    assert [(states[name].state, states[name].code) for name in (first, second, third)] == [
        (State.FAILED, Code.IN_CAPTURE),
        (State.ACTIVE, Code.IN_CAPTURE),
        (State.FAILED, Code.ERROR),
    ]


def test_verdicts_that_reach_nobody_have_codes() -> None:
    aborts = Aborts()
    aborts.begin(ENGINE)
    assert aborts.states()["abort"].code is Code.NONE
    aborts._undelivered = 1
    assert aborts.states()["abort"].code is Code.UNDELIVERED
    aborts._refused = "each rank has a scheduler of its own"
    assert aborts.states()["abort"].code is Code.ENGINE


DETECTORS = ("abort", "shadow", "kv-marks")
SETTINGS = {"VLLM_GRAPHFIX_SHADOW": "1/9", "VLLM_GRAPHFIX_KV_MARKS": "1", "VLLM_GRAPHFIX_KV_MARKS_ACTION": "abort"}


@pytest.mark.parametrize("detector", DETECTORS)
def test_a_detector_that_cannot_begin_has_failed_and_is_not_silent(
    monkeypatch: pytest.MonkeyPatch, detector: str
) -> None:
    def fail(*args: object) -> None:
        raise ImportError("planted")

    process = EngineProcess(FIXES, dict(SETTINGS))
    monkeypatch.setattr(process.manager, "start", lambda wanted: None)
    for each in process.components:
        monkeypatch.setattr(each, "start", fail if each.name == detector else lambda decision, policy: None)
    process._decide()
    states = process.states(diagnose=False)
    assert {name for name in DETECTORS if name in states} == {detector}
    assert (states[detector].state, states[detector].code) == (State.FAILED, Code.ERROR)
    assert states[detector].reason == "it could not begin: ImportError: planted"


def test_a_watch_over_addresses_that_cannot_begin_counts_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ImportError("planted")

    monkeypatch.setattr(addresses, "when_imported", fail)
    watch = AddressWatch()
    with pytest.raises(ImportError):
        watch.begin(Addresses.REPORT)
    assert watch.counts() == {"addresses": {"failures": 1}}
