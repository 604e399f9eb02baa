"""The settings that the environment is read as."""

from __future__ import annotations

from typing import Any

import pytest

import vllm_graphfix
from vllm_graphfix.fix import Mode
from vllm_graphfix.fixes import FIXES as ALL_FIXES
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.settings.environment import Master, read

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
    parsed = read({"VLLM_GRAPHFIX_CAPTURE_STATE": value}, FIXES)
    assert parsed.modes == {"capture-state": mode, "flashmla-fp8": Mode.AUTO}
    assert parsed.problems == ()
    assert parsed.explicit == ({"capture-state"} if value.strip() else frozenset())


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, Mode.OBSERVE),
        ({"VLLM_GRAPHFIX": "strict"}, Mode.OBSERVE),
        ({"VLLM_GRAPHFIX_CAPTURE_STATE": "xyzzy"}, Mode.OFF),
        ({"VLLM_GRAPHFIX_CAPTURE_STATE": "auto"}, Mode.AUTO),
        ({"VLLM_GRAPHFIX_CAPTURE_STATE": "on"}, Mode.ON),
        ({"VLLM_GRAPHFIX_CAPTURE_STATE": "off"}, Mode.OFF),
        ({"VLLM_GRAPHFIX": "observe", "VLLM_GRAPHFIX_CAPTURE_STATE": "auto"}, Mode.OBSERVE),
    ],
)
def test_a_fix_may_be_observed_by_default(environment: dict[str, str], mode: Mode) -> None:
    parsed = read(environment, FIXES, {"capture-state"})
    assert parsed.modes["capture-state"] is mode
    assert parsed.modes["flashmla-fp8"] is (
        Mode.OBSERVE if environment.get("VLLM_GRAPHFIX") == "observe" else Mode.AUTO
    )


@pytest.mark.parametrize(
    ("value", "master"), [("", Master.ON), ("1", Master.ON), ("STRICT", Master.STRICT), ("false", Master.OFF)]
)
def test_the_master_switch_is_read_likewise(value: str, master: Master) -> None:
    parsed = read({"VLLM_GRAPHFIX": value}, FIXES)
    assert (parsed.master, parsed.problems) == (master, ())


UNLIKE_ANY = "; `vllm-graphfix status` lists the fixes, and x-y has the variable VLLM_GRAPHFIX_X_Y."
MEANINGLESS = [
    ("VLLM_GRAPHFIX_FLASHMLA_PF8", "on", "did you mean VLLM_GRAPHFIX_FLASHMLA_FP8?"),
    ("VLLM_GRAPFIX_FLASHMLA_FP8", "off", "did you mean VLLM_GRAPHFIX_FLASHMLA_FP8?"),
    ("VLLM_GRAPHFIX_" + 30 * "Q", "on", UNLIKE_ANY),
    ("vllm_graphfix_capture_state", "on", "did you mean VLLM_GRAPHFIX_CAPTURE_STATE?"),
    ("VLLM_GRAPHFIX_CAPTURE_STAT", "off", "did you mean VLLM_GRAPHFIX_CAPTURE_STATE?"),
    ("VLLM_GRAPHFIX_ENABLED", "1", UNLIKE_ANY),
    ("VLLM_GRAPHFIX_MODE", "strict", UNLIKE_ANY),
    ("VLLM_GRAPHFIX_CAPTURE_MODE", "off", UNLIKE_ANY),
    ("VLLM_GRAPHFIX_CAPTURE_SKIP", "on", UNLIKE_ANY),
]


@pytest.mark.parametrize(("name", "value", "nearest"), MEANINGLESS)
def test_an_unknown_name_is_reported_with_the_nearest_and_changes_nothing(name: str, value: str, nearest: str) -> None:
    parsed = read({name: value}, FIXES)
    (problem,) = parsed.problems
    assert problem.startswith(name)
    assert nearest in problem
    assert problem.endswith("It has no effect")
    assert problem.isprintable()
    assert len(problem) < 200
    assert parsed.misconfigured == {name: value}
    assert parsed._replace(problems=(), explicit=frozenset(), misconfigured={}) == read({}, FIXES)


LESS = [
    ("VLLM_GRAPHFIX_ROLOUT", "5"),
    ("VLLM_GRAPHFIX_ROLOUT", ""),
    ("vllm_graphfix_rollout", "5"),
    ("VLLM_GRAPHFIX_ROLLOUT_PERCENTAGE", "5"),
    ("VLLM_GRAPHFIX_CANARY", "5"),
    ("VLLM_GRAPHFIX_OFF", "1"),
    ("VLLM_GRAPHFIX_DISABLED", "1"),
    ("VLLM_GRAPHFIX_KILL", "1"),
    ("VLLM_GRAPHFIX_KILL_SWITCH", "on"),
    ("VLLM_GRAPHFIX_SKIP", "1"),
    ("VLLM_GRAPHFIX_ENABLED", "0"),
    ("VLLM_GRAPHFIX_ENABLE", "False"),
    ("VLLM_GRAPHFIX_MODE", "off"),
    ("VLLM_GRAPHFIX_ALL", "none"),
    ("VLLM_GRAPHFIX_ALL_FIXES", "no"),
    ("VLLM_GRAPHFIX_ON", "0"),
    ("VLLM_GRAPHFIXX", "on"),
    ("VLLM_GRAPFIX", "off"),
    ("VLM_GRAPHFIX_ROLOUT", "5"),
    ("VLLM_GRAPH_FIX", "off"),
    ("VLLM-GRAPHFIX", "off"),
]


@pytest.mark.parametrize(("name", "value"), LESS)
@pytest.mark.parametrize("master", ["on", "strict", "observe"])
def test_a_name_that_may_have_been_meant_to_switch_off_does(name: str, value: str, master: str) -> None:
    parsed = read({name: value, "VLLM_GRAPHFIX": master}, FIXES)
    (problem,) = parsed.problems
    assert problem.startswith(name)
    assert problem.endswith("It may have been meant to switch off: nothing is patched until this is corrected")
    assert parsed.master is Master.OFF
    assert list(parsed.misconfigured.values()) == [value]
    (handed_on,) = parsed.misconfigured
    assert settings.is_brief(handed_on, value)
    assert handed_on not in settings.names(FIXES)


@pytest.mark.parametrize(
    "name", ["VLLM_GRAPHVIZ_TOKEN", "VLLM_GRAPHFIX_ROLLOUTKEY", "VLLM_GRAPHFIX_OFF", "VLLM_GRAPHFIX_X"]
)
@pytest.mark.parametrize("value", ["sk-secret", "8817", "on-call", "1\n2"])
def test_the_value_of_a_mistyped_name_is_published_only_if_it_is_a_setting(name: str, value: str) -> None:
    parsed = read({name: value}, FIXES)
    assert parsed.misconfigured == {name: "(set)"}
    assert not [each for each in parsed.problems if value in each]
    assert read({name: " Off "}, FIXES).misconfigured == {name: "Off"}


@pytest.mark.parametrize("name", ["VLLM_GRAPHICS", "VLLM_GRAPH_OFF", "VLLM_PLUGINS", "GRAPHFIX_RELEASES", "PATH", ""])
def test_a_name_of_somebody_else_is_none_of_ours(name: str) -> None:
    assert read({name: "off"}, FIXES) == read({}, FIXES)


@pytest.mark.parametrize("name", ["VLLM_GRAPFIX", "VLLM_GRAPHFIX_OFF", "VLLM_GRAPHFIX_MAMBA_PADING"])
def test_a_mistyped_name_that_is_empty_is_as_if_it_were_not_set(name: str) -> None:
    assert read({name: " "}, FIXES) == read({}, FIXES)


def test_the_first_of_many_mistyped_names_are_those_that_switch_off() -> None:
    environment = {f"VLLM_GRAPHFIX_{number:03}": "1" for number in range(100)} | {"VLLM_GRAPHFIX_ZERO_PERCENT": "1"}
    parsed = read(environment, FIXES)
    assert parsed.master is Master.OFF
    assert list(parsed.misconfigured)[:2] == ["VLLM_GRAPHFIX_ZERO_PERCENT", "VLLM_GRAPHFIX_000"]
    assert len(parsed.misconfigured) == 8


def test_a_hint_to_another_variable_would_mislead_and_is_none() -> None:
    (problem,) = read({"VLLM_GRAPHFIX_PERCENTAGE": "5"}, [fix.name for fix in ALL_FIXES]).problems
    assert "did you mean" not in problem


@pytest.mark.parametrize("value", ["1", "off"])
def test_no_variable_of_the_interface_is_taken_for_a_mistyped_one(value: str) -> None:
    names = settings.names(fix.name for fix in ALL_FIXES)
    assert [name for name in names if settings.asks_for_less(name, value)] == []


OFF_BY_MISTAKE: dict[str, Any] = {"modes": {"capture-state": Mode.AUTO, "flashmla-fp8": Mode.OFF}}
CLOSED: list[tuple[str, str, str, dict[str, Any]]] = [
    ("VLLM_GRAPHFIX", "observ", "did you mean observe? Nothing is patched", {"master": Master.OFF}),
    ("VLLM_GRAPHFIX", "strickt", "did you mean strict? Nothing is patched", {"master": Master.OFF}),
    ("VLLM_GRAPHFIX", "none", "value; valid: observe, off, on, strict. Nothing is patched", {"master": Master.OFF}),
    ("VLLM_GRAPHFIX", "xyzzy", "valid: observe, off, on, strict. Nothing is patched", {"master": Master.OFF}),
    ("VLLM_GRAPHFIX", "\x1b[31m" + "x" * 10_000, "valid: observe, off, on, strict.", {"master": Master.OFF}),
    ("VLLM_GRAPHFIX_FLASHMLA_FP8", "of", "did you mean off? flashmla-fp8 is off", OFF_BY_MISTAKE),
    ("VLLM_GRAPHFIX_FLASHMLA_FP8", "2", "valid: auto, observe, off, on. flashmla-fp8 is off", OFF_BY_MISTAKE),
    (
        "VLLM_GRAPHFIX_FIXES",
        "flashmla-fp=off",
        "'flashmla-fp', which is not a fix; did you mean flashmla-fp8? Nothing is patched",
        {"master": Master.OFF},
    ),
    (
        "VLLM_GRAPHFIX_FIXES",
        "off",
        "not of the form NAME=MODE, such as capture-state=off. Nothing is",
        {"master": Master.OFF},
    ),
    (
        "VLLM_GRAPHFIX_FIXES",
        "x=off",
        "is not a fix; `vllm-graphfix explain` lists them. Nothing",
        {"master": Master.OFF},
    ),
    ("VLLM_GRAPHFIX_FIXES", "flashmla_fp8", "without a mode; valid: flashmla-fp8=auto, ", {"master": Master.OFF}),
    (
        "VLLM_GRAPHFIX_FIXES",
        "flashmla-fp8=auto,flashmla-fp8=off",
        "sets flashmla-fp8 a second time, in 'flashmla-fp8=off'. Nothing is patched",
        {"master": Master.OFF},
    ),
    ("VLLM_GRAPHFIX_SHADOW", "off,explode", "has 'explode', which is not an action; valid: abort, ", {}),
    ("VLLM_GRAPHFIX_KV_MARKS", "off,abrot", "has 'abrot', which is not an action; did you mean abort? It counts", {}),
    ("VLLM_GRAPHFIX_SHADOW", "often", "valid: off, a fraction such as 1/2000", {}),
    ("VLLM_GRAPHFIX_SHADOW_ACTION", "quarantin", "did you mean quarantine? It counts as report", {}),
    ("VLLM_GRAPHFIX_SHADOW_GRAPHS", "piecewise", "valid: all, full. It counts as full", {}),
    ("VLLM_GRAPHFIX_ADDRESSES", "repare", "did you mean repair? No address", {"addresses": settings.Addresses.OFF}),
    ("VLLM_GRAPHFIX_CLAIMS", "reprot", "did you mean report? No capture", {"claims": settings.Claims.OFF}),
    ("VLLM_GRAPHFIX_BYPASS", "reprot", "did you mean report? No call of a fix is watched", {}),
    ("VLLM_GRAPHFIX_BYPASS", "on", "valid: off, report. No call of a fix is watched", {}),
    ("VLLM_GRAPHFIX_METADATA", "on", "valid: off, report. No metadata are compared", {}),
    ("VLLM_GRAPHFIX_TRACED", "on", "valid: off, report. No arguments are compared", {}),
    ("VLLM_GRAPHFIX_KV_MARKS", "0.1%", "and an action behind a comma: 1/16,abort. No cache block is marked", {}),
    ("VLLM_GRAPHFIX_KV_MARKS_ACTION", "abrot", "did you mean abort? It counts as report", {}),
    ("VLLM_GRAPHFIX_AGREEMENT_TIMEOUT", "10 minutes", "Ranks wait 600 s", {}),
]
"""A variable, a value that means nothing, what is said of it, and what differs then from an environment that says
nothing."""


@pytest.mark.parametrize(
    ("name", "value", "message", "changed"), CLOSED, ids=[f"{row[0]}={row[1][:9]!r}" for row in CLOSED]
)
def test_an_unknown_value_is_reported_with_the_nearest_and_fails_closed(
    name: str, value: str, message: str, changed: dict[str, Any]
) -> None:
    parsed = read({name: value}, FIXES)
    (problem,) = parsed.problems
    assert problem.startswith(f"{name}=")
    assert message in problem
    assert problem.endswith(" until this is corrected")
    assert problem.isprintable()
    assert len(problem) < 200
    assert parsed.misconfigured == {name: settings.brief(value)}
    assert parsed._replace(problems=(), explicit=frozenset(), misconfigured={}) == read({}, FIXES)._replace(**changed)


def test_an_unknown_value_is_abridged_and_in_ascii() -> None:
    assert settings.brief("observ") == "observ"
    assert settings.brief("\x1b[31m \N{PILE OF POO}\udcff") == r"\x1b[31m \U0001f4a9\udcff"
    assert settings.brief("x" * 41) == "x" * 37 + "..."


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, 600),
        ({"VLLM_GRAPHFIX_AGREEMENT_TIMEOUT": " 900 "}, 900),
        ({"VLLM_GRAPHFIX_AGREEMENT_TIMEOUT": "0.5"}, 0.5),
        ({"VLLM_GRAPHFIX_AGREEMENT_TIMEOUT": "604800"}, 604800),
        ({"VLLM_ENGINE_READY_TIMEOUT_S": "3600"}, 3600),
        ({"VLLM_ENGINE_READY_TIMEOUT_S": "60"}, 600),
        ({"VLLM_ENGINE_READY_TIMEOUT_S": "soon"}, 600),
        ({"VLLM_ENGINE_READY_TIMEOUT_S": "9" * 400}, 604800),
        ({"VLLM_ENGINE_READY_TIMEOUT_S": "3600", "VLLM_GRAPHFIX_AGREEMENT_TIMEOUT": "60"}, 60),
    ],
)
def test_ranks_wait_as_long_as_vllm_waits_for_its_engines_unless_set_otherwise(
    environment: dict[str, str], seconds: float
) -> None:
    parsed = read(environment, FIXES)
    assert (parsed.agreement_timeout, parsed.misconfigured, parsed.problems) == (seconds, {}, ())


@pytest.mark.parametrize("value", ["0", "0.0", "-1", "604801", "9999999", "nan", "inf", "1e3", "٣", "off", "10s"])
def test_a_timeout_that_means_nothing_is_the_default(value: str) -> None:
    set_by_vllm = {"VLLM_ENGINE_READY_TIMEOUT_S": "1200"}
    for environment, default in (({}, 600), (set_by_vllm, 1200)):
        parsed = read({"VLLM_GRAPHFIX_AGREEMENT_TIMEOUT": value, **environment}, FIXES)
        assert parsed.agreement_timeout == default
        assert list(parsed.misconfigured) == ["VLLM_GRAPHFIX_AGREEMENT_TIMEOUT"]


def test_observe_for_all_applies_to_the_fixes_at_auto() -> None:
    one_on = read({"VLLM_GRAPHFIX": "observe", "VLLM_GRAPHFIX_FLASHMLA_FP8": "on"}, FIXES)
    assert one_on.modes == {"capture-state": Mode.OBSERVE, "flashmla-fp8": Mode.ON}
    one_off = read({"VLLM_GRAPHFIX": "observe", "VLLM_GRAPHFIX_FLASHMLA_FP8": "off"}, FIXES)
    assert one_off.modes == {"capture-state": Mode.OBSERVE, "flashmla-fp8": Mode.OFF}


@pytest.mark.parametrize(
    ("environment", "modes"),
    [
        ({"VLLM_GRAPHFIX_FIXES": "flashmla-fp8=off, CAPTURE_STATE=on"}, {"flashmla-fp8": "off", "capture-state": "on"}),
        ({"VLLM_GRAPHFIX_FIXES": " , "}, {"flashmla-fp8": "auto", "capture-state": "auto"}),
        (
            {"VLLM_GRAPHFIX_FIXES": "flashmla-fp8=off", "VLLM_GRAPHFIX_FLASHMLA_FP8": "observe"},
            {"flashmla-fp8": "observe", "capture-state": "auto"},
        ),
    ],
)
def test_one_variable_holds_modes_of_fixes_and_that_of_a_single_fix_wins(
    environment: dict[str, str], modes: dict[str, str]
) -> None:
    parsed = read(environment, FIXES)
    assert {name: mode.value for name, mode in parsed.modes.items()} == modes
    assert parsed.problems == ()
    assert parsed.explicit == {name for name in modes if modes[name] != "auto"}


@pytest.mark.parametrize("several", ["flashmla-fp8=off,flashmla-fp8=on", "flashmla-fp8", "capture-state=on,mamba=off"])
def test_one_entry_that_is_no_fix_and_its_mode_patches_nothing(several: str) -> None:
    parsed = read({"VLLM_GRAPHFIX": "strict", "VLLM_GRAPHFIX_FIXES": several}, FIXES)
    assert parsed.master is Master.OFF
    assert list(parsed.misconfigured) == ["VLLM_GRAPHFIX_FIXES"]


def test_an_invalid_mode_of_one_entry_switches_that_fix_off() -> None:
    parsed = read({"VLLM_GRAPHFIX_FIXES": "flashmla-fp8=onn,capture-state=on"}, FIXES)
    assert parsed.modes == {"flashmla-fp8": Mode.OFF, "capture-state": Mode.ON}
    assert parsed.misconfigured == {"VLLM_GRAPHFIX_FIXES": "flashmla-fp8=onn,capture-state=on"}
    assert "has 'onn', which is not a mode; did you mean on? flashmla-fp8 is off" in parsed.problems[0]


@pytest.mark.parametrize("several", ["flashmla-fp8=on", "mamba_padding = ON", "mamba-padding=on:0123456789abcdef"])
def test_where_nothing_else_can_be_imported_an_entry_that_insists_is_one_that_insists(
    several: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", {"VLLM_GRAPHFIX_FIXES": several})
    assert vllm_graphfix._requires_a_fix()
    monkeypatch.setattr("os.environ", {"VLLM_GRAPHFIX_FIXES": f"{several},nonsense", "VLLM_GRAPHFIX": "strict"})
    assert not vllm_graphfix._requires_a_fix()


@pytest.mark.parametrize("name", ["_ABOUT", "X/Y", "", "../MANIFEST", "mamba_padding\n"])
def test_where_nothing_else_can_be_imported_a_name_that_no_fix_can_have_insists_on_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", {f"VLLM_GRAPHFIX_{name}": "on"})
    assert not vllm_graphfix._requires_a_fix()


def test_no_variable_is_kept_that_is_neither_ours_nor_read() -> None:
    environment = {"VLLM_API_KEY": "x", "vllm_graphfix_x": "1", "VLLM_ENGINE_READY_TIMEOUT_S": "900", "PATH": "/"}
    assert settings.own_variables(environment).keys() == {"vllm_graphfix_x", "VLLM_ENGINE_READY_TIMEOUT_S"}


def test_the_action_of_a_detector_stands_beside_its_rate_and_a_variable_of_its_own_wins() -> None:
    both = {"VLLM_GRAPHFIX_SHADOW": "0.1% , quarantine", "VLLM_GRAPHFIX_KV_MARKS": "1/16,abort"}
    parsed = read(both, FIXES)
    assert (parsed.shadow, parsed.shadow_action.value) == ("0.1%", "quarantine")
    assert (parsed.kv_marks, parsed.kv_marks_action.value) == ("1/16", "abort")
    assert read({**both, "VLLM_GRAPHFIX_SHADOW_ACTION": "report"}, FIXES).shadow_action.value == "report"
    wrong = read({"VLLM_GRAPHFIX_SHADOW": "0.1%,abrot"}, FIXES)
    assert (wrong.shadow_action.value, wrong.misconfigured) == ("report", {"VLLM_GRAPHFIX_SHADOW": "0.1%,abrot"})
    assert settings.effective(wrong.misconfigured, "on", FIXES) == []
    neither = read({"VLLM_GRAPHFIX_SHADOW": "lots,abrot"}, FIXES).misconfigured
    assert settings.effective(neither, "on", FIXES) == ["VLLM_GRAPHFIX_SHADOW=lots,abrot"]


def test_every_name_of_the_interface_is_known() -> None:
    names = settings.names(FIXES)
    assert read(dict.fromkeys(names, ""), FIXES).problems == ()
    assert set(names) >= {
        "VLLM_GRAPHFIX",
        "VLLM_GRAPHFIX_FLASHMLA_FP8",
        "VLLM_GRAPHFIX_STATUS_DIR",
        "VLLM_GRAPHFIX_DECISION",
        "VLLM_GRAPHFIX_AGREEMENT_TIMEOUT",
    }
