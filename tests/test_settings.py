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
    ("value", "master"), [("", Master.ON), ("1", Master.ON), ("STRICT", Master.STRICT), ("false", Master.OFF)]
)
def test_the_master_switch_is_read_likewise(value: str, master: Master) -> None:
    found = read({"VLLM_GRAPHFIX": value}, FIXES)
    assert (found.master, found.problems) == (master, ())


MEANINGLESS = [
    ("VLLM_GRAPHFIX", "strickt", "did you mean strict?"),
    ("VLLM_GRAPHFIX", "xyzzy", "valid: off, on, strict."),
    ("VLLM_GRAPHFIX_FLASHMLA_FP8", "of", "did you mean off?"),
    ("VLLM_GRAPHFIX_FLASHMLA_PF8", "on", "did you mean VLLM_GRAPHFIX_FLASHMLA_FP8?"),
    ("VLLM_GRAPHFIXX", "on", "did you mean VLLM_GRAPHFIX?"),
    ("vllm_graphfix_capture_state", "on", "did you mean VLLM_GRAPHFIX_CAPTURE_STATE?"),
    ("VLLM_GRAPHFIX", "\x1b[31m" + "x" * 10_000, "valid: off, on, strict."),
]


@pytest.mark.parametrize(("name", "value", "nearest"), MEANINGLESS)
def test_what_means_nothing_is_named_with_the_nearest_and_changes_nothing(name: str, value: str, nearest: str) -> None:
    found = read({name: value}, FIXES)
    (problem,) = found.problems
    assert problem.startswith(name)
    assert nearest in problem
    assert problem.endswith("It changes nothing")
    assert problem.isprintable()
    assert len(problem) < 200
    assert found._replace(problems=(), explicit=frozenset()) == read({}, FIXES)


@pytest.mark.parametrize("value", ["25", "25%", "0.5%", "0", "all"])
def test_a_percentage_that_cannot_be_kept_patches_nothing(value: str) -> None:
    found = read({"VLLM_GRAPHFIX_ROLLOUT": value}, FIXES)
    assert found.withheld is not None
    assert found.withheld in found.problems


@pytest.mark.parametrize("value", ["", "100", "100%", " 100 % "])
def test_all_of_a_fleet_is_what_happens_anyway(value: str) -> None:
    assert read({"VLLM_GRAPHFIX_ROLLOUT": value}, FIXES).withheld is None


def test_observe_is_off_and_says_so() -> None:
    found = read({"VLLM_GRAPHFIX_CAPTURE_STATE": "observe"}, FIXES)
    assert found.modes["capture-state"] is Mode.OBSERVE
    assert "until then the fix is off" in found.problems[0]


def test_strict_and_on_are_loud() -> None:
    assert read({"VLLM_GRAPHFIX": "strict"}, FIXES).loud("flashmla-fp8")
    assert read({"VLLM_GRAPHFIX_FLASHMLA_FP8": "on"}, FIXES).loud("flashmla-fp8")
    assert not read({"VLLM_GRAPHFIX_FLASHMLA_FP8": "on"}, FIXES).loud("capture-state")


def test_every_name_of_the_interface_is_known() -> None:
    names = settings.names(FIXES)
    assert read(dict.fromkeys(names, ""), FIXES).problems == ()
    assert set(names) >= {
        "VLLM_GRAPHFIX",
        "VLLM_GRAPHFIX_FLASHMLA_FP8",
        "VLLM_GRAPHFIX_STATUS_DIR",
        "VLLM_GRAPHFIX_DECISION",
    }
