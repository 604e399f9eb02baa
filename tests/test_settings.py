"""What the environment is taken to say."""

from __future__ import annotations

import pytest

from vllm_graphfix import settings
from vllm_graphfix.fix import Mode
from vllm_graphfix.settings import Master, read

FIXES = ("capture-state", "flashmla-fp8")


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        ("", Mode.AUTO),
        ("auto", Mode.AUTO),
        ("On", Mode.ON),
        ("1", Mode.ON),
        ("TRUE", Mode.ON),
        ("yes", Mode.ON),
        ("off", Mode.OFF),
        ("0", Mode.OFF),
        ("False", Mode.OFF),
        (" no ", Mode.OFF),
    ],
)
def test_a_mode_is_read_whatever_its_case(value: str, mode: Mode) -> None:
    found = read({"VLLM_GRAPHFIX_CAPTURE_STATE": value}, FIXES)
    assert found.modes == {"capture-state": mode, "flashmla-fp8": Mode.AUTO}
    assert found.problems == ()
    assert found.explicit == ({"capture-state"} if value.strip() else frozenset())


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, Mode.OBSERVE),
        ({"VLLM_GRAPHFIX": "strict"}, Mode.OBSERVE),
        ({"VLLM_GRAPHFIX_CAPTURE_STATE": "xyzzy"}, Mode.OBSERVE),
        ({"VLLM_GRAPHFIX_CAPTURE_STATE": "auto"}, Mode.AUTO),
        ({"VLLM_GRAPHFIX_CAPTURE_STATE": "on"}, Mode.ON),
        ({"VLLM_GRAPHFIX_CAPTURE_STATE": "off"}, Mode.OFF),
        ({"VLLM_GRAPHFIX": "observe", "VLLM_GRAPHFIX_CAPTURE_STATE": "auto"}, Mode.OBSERVE),
    ],
)
def test_a_fix_may_be_observed_by_default(environment: dict[str, str], mode: Mode) -> None:
    found = read(environment, FIXES, {"capture-state"})
    assert found.modes["capture-state"] is mode
    assert found.modes["flashmla-fp8"] is (Mode.OBSERVE if environment.get("VLLM_GRAPHFIX") == "observe" else Mode.AUTO)


@pytest.mark.parametrize(
    ("value", "master"), [("", Master.ON), ("1", Master.ON), ("STRICT", Master.STRICT), ("false", Master.OFF)]
)
def test_the_master_switch_is_read_likewise(value: str, master: Master) -> None:
    found = read({"VLLM_GRAPHFIX": value}, FIXES)
    assert (found.master, found.problems) == (master, ())


MEANINGLESS = [
    ("VLLM_GRAPHFIX", "strickt", "did you mean strict?"),
    ("VLLM_GRAPHFIX", "xyzzy", "valid: observe, off, on, strict."),
    ("VLLM_GRAPHFIX_FLASHMLA_FP8", "of", "did you mean off?"),
    ("VLLM_GRAPHFIX_FLASHMLA_PF8", "on", "did you mean VLLM_GRAPHFIX_FLASHMLA_FP8?"),
    ("VLLM_GRAPHFIXX", "on", "did you mean VLLM_GRAPHFIX?"),
    ("VLLM_GRAPHFIX_" + 30 * "Q", "on", "x-y has the variable VLLM_GRAPHFIX_X_Y."),
    ("vllm_graphfix_capture_state", "on", "did you mean VLLM_GRAPHFIX_CAPTURE_STATE?"),
    ("VLLM_GRAPHFIX", "\x1b[31m" + "x" * 10_000, "valid: observe, off, on, strict."),
]


@pytest.mark.parametrize(("name", "value", "nearest"), MEANINGLESS)
def test_what_means_nothing_is_named_with_the_nearest_and_changes_nothing(name: str, value: str, nearest: str) -> None:
    found = read({name: value}, FIXES)
    (problem,) = found.problems
    assert problem.startswith(name)
    assert nearest in problem
    assert problem.endswith("It has no effect")
    assert problem.isprintable()
    assert len(problem) < 200
    assert found._replace(problems=(), explicit=frozenset()) == read({}, FIXES)


def test_observe_for_all_is_for_what_is_left_at_auto() -> None:
    one_on = read({"VLLM_GRAPHFIX": "observe", "VLLM_GRAPHFIX_FLASHMLA_FP8": "on"}, FIXES)
    assert one_on.modes == {"capture-state": Mode.OBSERVE, "flashmla-fp8": Mode.ON}
    one_off = read({"VLLM_GRAPHFIX": "observe", "VLLM_GRAPHFIX_FLASHMLA_FP8": "off"}, FIXES)
    assert one_off.modes == {"capture-state": Mode.OBSERVE, "flashmla-fp8": Mode.OFF}


def test_every_name_of_the_interface_is_known() -> None:
    names = settings.names(FIXES)
    assert read(dict.fromkeys(names, ""), FIXES).problems == ()
    assert set(names) >= {
        "VLLM_GRAPHFIX",
        "VLLM_GRAPHFIX_FLASHMLA_FP8",
        "VLLM_GRAPHFIX_STATUS_DIR",
        "VLLM_GRAPHFIX_DECISION",
    }
