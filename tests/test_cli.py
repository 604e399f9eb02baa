"""The commands as a user gives them."""

from __future__ import annotations

import functools
import json
import os
import pty
import shlex
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import vllm_graphfix.commands.compare.report
import vllm_graphfix.commands.compare.run
import vllm_graphfix.verify.run
from edited import edited
from stock import release_root
from table import affected_by, state_by_default
from vllm_files import FLASHMLA
from vllm_graphfix import __version__
from vllm_graphfix.commands.cli import app, main
from vllm_graphfix.fix import Diagnosis, Verdict, variable
from vllm_graphfix.fixes import BY_NAME, FIXES, OBSERVED_BY_DEFAULT, about
from vllm_graphfix.source.files import SourceError, open_source
from vllm_graphfix.verify import VerifyError
from vllm_graphfix.verify.measurement import Measurement
from vllm_graphfix.verify.proof import Proof
from vllm_graphfix.verify.report import Report


def call(*arguments: str, env: dict[str, str] | None = None, code: int = 0) -> tuple[str, str]:
    """Standard output and standard error of a command that ends with *code*."""
    done = CliRunner().invoke(app, list(arguments), env=env or {})
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    return done.stdout, done.stderr


def status(
    release: str | Path, env: dict[str, str] | None = None, *, check: bool = False, code: int = 0
) -> dict[str, Any]:
    root = release_root(release) if isinstance(release, str) else release
    out, _ = call("status", "--vllm", str(root), "--json", *(["--check"] if check else []), env=env, code=code)
    report: dict[str, Any] = json.loads(out)
    return report


def test_status_json_is_the_interface_that_the_design_gives() -> None:
    report = status("0.18.1")
    assert {key: report[key] for key in ("schema", "graphfix", "vllm", "source", "default_runner")} == {
        "schema": 1,
        "graphfix": __version__,
        "vllm": "0.18.1",
        "source": str(release_root("0.18.1")),
        "default_runner": "V1",
    }
    assert report["misconfigured"] == {}
    assert [row["name"] for row in report["fixes"]] == [fix.name for fix in FIXES]
    row = next(row for row in report["fixes"] if row["name"] == "flashmla-fp8")
    assert row == {
        "name": "flashmla-fp8",
        "pr": 35175,
        "references": ["PR 32810", "issue 33638"],
        "diagnosis": "affected",
        "reason": row["reason"],
        "where": "vllm/v1/attention/backends/mla/flashmla.py:172",
        "known_release": True,
        "defect_seen": None,
        "tree": None,
        "rests_on": "answers",
        "ran_on": ["H100", "H200"],
        "mode": "auto",
        "would_be": "active",
        "notes": [],
    }


OUTSIDE = {"VLLM_GRAPHFIX_ROLLOUT_KEY": "node-b"}
"""In the rollout from 56.26 % on."""

WOULD_BE: list[tuple[str, dict[str, str], dict[str, str]]] = [
    ("0.18.1", {}, {"flashmla-fp8": "active", "draft-prefill-state": "not-needed", "mamba-padding": "not-needed"}),
    ("0.18.1", {"VLLM_GRAPHFIX": "0"}, {"flashmla-fp8": "off", "capture-state": "off"}),
    ("0.18.1", {"VLLM_GRAPHFIX": "strict"}, {"flashmla-fp8": "active"}),
    ("0.18.1", {"VLLM_GRAPHFIX_FLASHMLA_FP8": "off"}, {"flashmla-fp8": "off", "capture-state": "active"}),
    ("0.18.1", {"VLLM_PLUGINS": "other"}, {"flashmla-fp8": "off"}),
    ("0.18.1", {"VLLM_PLUGINS": "other,graphfix"}, {"flashmla-fp8": "active"}),
    ("0.18.1", {"VLLM_GRAPHFIX": "observe"}, {"flashmla-fp8": "observing", "mamba-padding": "not-needed"}),
    ("0.18.1", {"VLLM_GRAPHFIX_FLASHMLA_FP8": "observe"}, {"flashmla-fp8": "observing", "capture-state": "active"}),
    ("0.18.1", {"VLLM_GRAPHFIX_ROLLOUT": "5%", **OUTSIDE}, {"flashmla-fp8": "not-in-canary"}),
    ("0.18.1", {"VLLM_GRAPHFIX_ROLLOUT": "57", **OUTSIDE}, {"flashmla-fp8": "active"}),
    ("0.18.1", {"VLLM_GRAPHFIX_ROLLOUT": "many"}, {"flashmla-fp8": "not-in-canary", "mamba-padding": "not-in-canary"}),
]


@pytest.mark.parametrize(("release", "env", "wanted"), WOULD_BE, ids=[str(row[1]) for row in WOULD_BE])
def test_status_says_what_this_environment_would_do(release: str, env: dict[str, str], wanted: dict[str, str]) -> None:
    states = {row["name"]: row["would_be"] for row in status(release, env)["fixes"]}
    assert {name: states[name] for name in wanted} == wanted


def test_check_is_3_where_a_needed_fix_would_not_be_applied() -> None:
    status("0.18.1", check=True)
    status("0.18.1", {"VLLM_GRAPHFIX_FLASHMLA_FP8": "off"}, check=True, code=3)
    status("0.18.1", {"VLLM_PLUGINS": ""}, check=True, code=3)
    status("0.18.1", {"VLLM_GRAPHFIX": "off"}, code=0)


MISTYPED: list[tuple[str, dict[str, str], set[str]]] = [
    ("0.18.1", {"VLLM_GRAPHFIX": "observ"}, {"off"}),
    ("0.18.1", {"VLLM_GRAPHFIX": "strct", "VLLM_GRAPHFIX_FLASHMLA_FP8": "on"}, {"off"}),
    ("0.18.1", {"VLLM_GRAPHFIX_ROLLOUT": "many"}, {"not-in-canary"}),
    ("0.18.1", {"VLLM_GRAPHFIX_ROLLOUT": ""}, {"not-in-canary"}),
    ("0.18.1", {"VLLM_GRAPHFIX_FLASHMLA_FP8": "onn"}, {"off"}),
    ("0.33.0", {"VLLM_GRAPHFIX_FLASHMLA_FP8": "onn"}, {"off"}),
    ("0.33.0", {"VLLM_GRAPHFIX_AGREEMENT_TIMEOUT": "long"}, {"not-needed"}),
]
"""A release, an environment, and what would become of flashmla-fp8, which 0.33.0 does not need."""


@pytest.mark.parametrize(("release", "env", "would_be"), MISTYPED, ids=[f"{row[0]} {row[1]}" for row in MISTYPED])
def test_a_meaningless_value_applies_no_fix_and_is_3_even_if_nothing_is_needed(
    release: str, env: dict[str, str], would_be: set[str]
) -> None:
    observed = {variable(name): "auto" for name in OBSERVED_BY_DEFAULT}
    status(release, observed, check=True)
    report = status(release, observed | env, check=True, code=3)
    (wrong,) = [item for item in env.items() if item[1] != "on"]
    assert report["misconfigured"] == dict([wrong])
    assert any(note.startswith(f"{wrong[0]}='{wrong[1]}' ") for note in report["notes"])
    assert {row["would_be"] for row in report["fixes"] if row["name"] == "flashmla-fp8"} == would_be
    out, _ = call("status", "--vllm", str(release_root(release)), env=observed | env)
    assert f"misconfigured: {wrong[0]}={wrong[1]}" in out


def test_what_is_observed_by_default_passes_the_check() -> None:
    """Nobody has decided against it; how to have it is said."""
    observed = {row["name"]: row for row in status("0.33.0", check=True)["fixes"] if row["would_be"] == "observing"}
    assert observed.keys() == {"cutlass-mla-padding"}
    row = observed["cutlass-mla-padding"]
    assert row["notes"] == ["observed by default; VLLM_GRAPHFIX_CUTLASS_MLA_PADDING=auto applies it"]
    (row,) = [
        row
        for row in status("0.33.0", {"VLLM_GRAPHFIX_CUTLASS_MLA_PADDING": "auto"})["fixes"]
        if row["mode"] == "auto" and row["name"] == "cutlass-mla-padding"
    ]
    assert (row["would_be"], row["notes"]) == ("active", [])
    status("0.33.0", {"VLLM_GRAPHFIX_PREFILL_DISPATCH": "observe"}, check=True, code=3)


PLANNED = "scheduler_metadata.num_splits = num_splits\n"


def test_check_is_3_for_a_shape_that_nobody_has_looked_at(tmp_path: Path) -> None:
    root = edited(
        release_root("0.18.1"),
        tmp_path / "fork",
        {FLASHMLA: lambda text: text.replace(PLANNED, f"{PLANNED}            self.last_splits = num_splits\n")},
    )
    row = next(row for row in status(root, check=True, code=3)["fixes"] if row["name"] == "flashmla-fp8")
    assert (row["diagnosis"], row["would_be"], row["known_release"]) == ("unrecognised", "incompatible", False)


def test_check_is_4_where_nothing_of_a_defect_was_seen_in_new_code(tmp_path: Path) -> None:
    path = "vllm/model_executor/models/roberta.py"
    renamed = {path: lambda text: text.replace("replace_roberta_positions", "shifted_positions")}
    root = edited(release_root("0.18.1"), tmp_path / "fork", renamed)
    row = next(row for row in status(root, check=True, code=4)["fixes"] if row["name"] == "roberta-positions")
    assert (row["diagnosis"], row["would_be"], row["defect_seen"]) == ("unrecognised", "unknown", False)
    assert "the nearest known release is 0.18.1, where it is affected" in row["reason"]


def test_the_command_that_decides_is_quoted_and_without_control_characters(tmp_path: Path) -> None:
    path = "vllm/model_executor/models/roberta.py"
    renamed = {path: lambda text: text.replace("replace_roberta_positions", "shifted_positions")}
    for name in ("a fork; of ours", "\x1b[31mred"):
        root = edited(release_root("0.18.1"), tmp_path / name, renamed)
        out, _ = call("status", "--vllm", str(root))
        quoted = shlex.quote(str(root)).replace("\x1b", "\N{REPLACEMENT CHARACTER}")
        assert f"verify --vllm {quoted} --device cpu" in out
        assert "\x1b" not in out


def notes(release: str, env: dict[str, str]) -> str:
    report = status(release, env)
    return "\n".join([*report["notes"], *(note for row in report["fixes"] for note in row["notes"])])


def test_status_tells_what_to_act_on() -> None:
    assert "these settings are no longer needed with this vLLM: VLLM_GRAPHFIX_FLASHMLA_FP8" in notes(
        "0.33.0", {"VLLM_GRAPHFIX_FLASHMLA_FP8": "on"}
    )
    assert "add graphfix to it" in notes("0.18.1", {"VLLM_PLUGINS": ""})
    assert "did you mean VLLM_GRAPHFIX_FLASHMLA_FP8?" in notes("0.18.1", {"VLLM_GRAPHFIX_FLASHMLA_FP": "on"})
    for mode in ("off", "observe"):
        assert "flashmla-padding is not switched on: a right plan" in notes(
            "0.18.1", {"VLLM_GRAPHFIX_FLASHMLA_PADDING": mode}
        )
        assert "draft-prefill-state is not switched on" in notes("0.21.0", {"VLLM_GRAPHFIX_DRAFT_PREFILL_STATE": mode})
    assert notes("0.20.0", {"VLLM_GRAPHFIX_DRAFT_PREFILL_STATE": "off"}).startswith(
        "these settings are no longer needed"
    )
    applied = {variable(name): "auto" for name in OBSERVED_BY_DEFAULT if name in affected_by("0.18.1")}
    assert notes("0.18.1", applied) == ""


@pytest.mark.parametrize("release", ["0.14.1", "0.18.1", "0.21.0", "0.33.0"])
def test_status_begins_with_a_verdict_and_has_rows_for_defects_of_this_vllm_alone(release: str) -> None:
    out, _ = call("status", "--vllm", str(release_root(release)))
    lines, here = out.splitlines(), affected_by(release)
    assert lines[0].startswith(f"vLLM {release}, stock release; model runner ")
    condition = "With the plugin installed there"  # it may not be beside a vLLM that was named
    assert lines[1].startswith(
        f"{len(here)} of {len(FIXES)} known defects are in it, {len(FIXES) - len(here)} not. {condition}: "
    )
    group = ""
    for line in lines[2:]:
        group = next((title for title in ("FIXED", "WATCHED ONLY") if line.startswith(title)), group)
        for name in (fix.name for fix in FIXES if line.startswith(f"{fix.name} ")):
            assert group == {"active": "FIXED", "observing": "WATCHED ONLY"}[state_by_default(name, release)]
            here = tuple(each for each in here if each != name)
            assert about(BY_NAME[name]).seen.replace("`", "")[:20] in line
    assert not here
    assert f"not in this vLLM: {len(FIXES) - len(affected_by(release))} (--all)" in out
    everything, _ = call("status", "--all", "--vllm", str(release_root(release)))
    assert all(fix.name in everything for fix in FIXES)
    places, _ = call("status", "--verbose", "--vllm", str(release_root(release)))
    assert all(
        place in places
        for place in (row["where"] for row in status(release)["fixes"] if row["diagnosis"] == "affected")
    )


def test_a_failed_check_says_why_in_its_last_line() -> None:
    root = str(release_root("0.18.1"))
    out, _ = call("status", "--check", "--vllm", root, env={"VLLM_GRAPHFIX": "off"}, code=3)
    assert (
        out.splitlines()[-1]
        == f"check failed: {len(affected_by('0.18.1'))} needed fixes not applied (VLLM_GRAPHFIX=off)"
    )
    out, err = call("status", "--check", "--json", "--vllm", root, env={"VLLM_GRAPHFIX": "observ"}, code=3)
    assert json.loads(out)["vllm"] == "0.18.1"
    assert "an invalid value (VLLM_GRAPHFIX=observ)" in err


@pytest.mark.parametrize("name", ["VLLM_GRAPHFIX_ROLOUT", "VLLM_GRAPHFIX_OFF", "VLLM_GRAPFIX", "VLLM_GRAPHFIX_NEWER"])
def test_a_check_fails_over_a_name_that_means_nothing(name: str) -> None:
    root = str(release_root("0.33.0"))
    out, err = call("status", "--check", "--json", "--vllm", root, env={name: "5"}, code=3)
    assert json.loads(out)["misconfigured"] == {name: "5"}
    assert f"an invalid name or value ({name}=5)" in err
    states = {row["would_be"] for row in json.loads(out)["fixes"]}
    assert ("active" in states) == (name == "VLLM_GRAPHFIX_NEWER")


def test_a_folder_with_none_of_the_code_is_no_all_clear(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    out, _ = call("status", "--check", "--vllm", str(tmp_path), code=4)
    assert "is this vLLM, 0.14 or later?" in out


def test_a_gpu_that_is_not_known_is_an_error_that_names_it() -> None:
    _, err = call("status", "--for", "./m", "--gpu", "H20O", "--vllm", str(release_root("0.18.1")), code=2)
    assert "'H20O'" in err


@pytest.mark.parametrize("width", [60, 100])
def test_no_name_is_cut_in_a_narrow_terminal(width: int) -> None:
    from io import StringIO

    from rich.console import Console

    from vllm_graphfix.commands.status import status as judge
    from vllm_graphfix.commands.status_table import show

    written = StringIO()
    show(judge(open_source(release_root("0.21.0")), {}), Console(file=written, width=width))
    assert all(name in written.getvalue() for name in affected_by("0.21.0"))
    assert "…" not in written.getvalue().replace("kv_indptr …", "")


def test_a_pipe_gets_neither_colour_nor_control_codes() -> None:
    out, _ = call("status", "--vllm", str(release_root("0.18.1")), env={"NO_COLOR": "1"})
    assert out.isascii()
    assert "\x1b" not in out
    assert not any(line.endswith(" ") for line in out.splitlines())


@functools.cache
def explained(name: str) -> str:
    """Return what `explain` prints of the fix *name*."""
    return call("explain", name)[0]


@functools.cache
def explained_as_json(name: str) -> dict[str, Any]:
    """Return the JSON of the fix *name*, called as its variable names it."""
    page: dict[str, Any] = json.loads(call("explain", name.upper().replace("-", "_"), "--json")[0])
    return page


@pytest.mark.parametrize("fix", FIXES, ids=[fix.name for fix in FIXES])
def test_explain_says_all_that_there_is(fix: Any) -> None:
    page = about(fix)
    words = " ".join(explained(fix.name).split())
    for text in (
        page.symptom,
        page.cause,
        page.remedy,
        page.detect,
        *(text for need in fix.needs() for text in (need.text, need.detail)),
        page.workaround,
        page.removable,
        page.releases,
        *(f"{event.name}: {event.meaning}" for event in fix.events),
    ):
        assert " ".join(text.split()) in words
    assert f"{fix.variable}=off" in words
    as_json = explained_as_json(fix.name)
    assert (as_json["schema"], as_json["name"], as_json["pr"], as_json["cause"]) == (1, fix.name, page.pr, page.cause)


@pytest.mark.parametrize("fix", FIXES, ids=[fix.name for fix in FIXES])
def test_a_workaround_has_its_price_and_comes_second(fix: Any) -> None:
    assert list(explained_as_json(fix.name))[3:5] == ["symptom", "without_the_plugin"]
    assert any(word in about(fix).workaround for word in (": ", "which costs", "measured")), about(fix).workaround


@pytest.mark.parametrize("fix", FIXES, ids=[fix.name for fix in FIXES])
def test_explain_has_a_line_for_each_event_that_is_counted(fix: Any) -> None:
    lines = explained_as_json(fix.name)["what_it_counts"].splitlines()
    assert lines == [f"{event.name}: {event.meaning}" for event in fix.events]
    section = explained(fix.name).split("\nWhat it counts\n")[1].split("\n\n")[0].splitlines()
    assert all(any(line.startswith(f"  {event.name}: ") for line in section) for event in fix.events)


def test_explain_without_a_name_lists_the_fixes() -> None:
    out, _ = call("explain")
    assert all(fix.name in out for fix in FIXES)
    assert [row["name"] for row in json.loads(call("explain", "--json")[0])["fixes"]] == [fix.name for fix in FIXES]


WRONG = [
    (("explain", "mamba-pading"), "did you mean mamba-padding?"),
    (("explain", "xyzzy"), "there are: capture-state"),
    (("verify", "flashmla"), "did you mean flashmla-fp8 or flashmla-padding?"),
    (("status", "--vllm", "/nowhere"), "/nowhere does not exist"),
    (("verify", "--vllm", "/nowhere"), "/nowhere does not exist"),
    (("status", "--vllm", "/proc"), "holds no vllm/__init__.py"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    out, err = call(*arguments, code=2)
    assert out == ""
    assert err.startswith("vllm-graphfix: ")
    assert message in err
    assert err.count("\n") == 1


VERIFIED = Report("0.18.1", "/somewhere", "a GPU", ())
PROVEN, NOT_PROVEN, SKIPPED = (
    Proof(
        fix=FIXES[number],
        diagnosis=Diagnosis(Verdict.AFFECTED, "affected"),
        stock=Measurement("a number", (1.0,), (0.0,)),
        patched=Measurement("a number", (1.0,), (value,)),
        failure=None,
        stock_state=("off", ""),
        patched_state=("active", ""),
        skipped=skipped,
    )
    for number, (value, skipped) in enumerate([(1.0, None), (0.0, None), (1.0, "no GPU for it")])
)


def verify_with(
    outcome: Report | BaseException, monkeypatch: pytest.MonkeyPatch, *arguments: str, code: int
) -> tuple[str, str]:
    """The command, with a double of what runs a proof."""
    runs: list[Any] = []

    def ran(*positional: Any, fresh: bool, parallel: int | None) -> Report:
        runs.append(positional)
        assert fresh == ("--fresh" in arguments)
        assert parallel == (int(arguments[arguments.index("--parallel") + 1]) if "--parallel" in arguments else None)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(vllm_graphfix.verify.run, "run", ran)
    written = call("verify", "--vllm", str(release_root("0.18.1")), *arguments, code=code)
    ((source, fixes, device, console),) = runs
    assert (source.version, console.stderr) == ("0.18.1", True)
    assert device == (arguments[arguments.index("--device") + 1] if "--device" in arguments else None)
    assert fixes == list(FIXES)
    return written


@pytest.mark.parametrize(
    ("proofs", "code"),
    [((PROVEN,), 0), ((PROVEN, NOT_PROVEN), 1), ((PROVEN, SKIPPED), 3), ((SKIPPED,), 3), ((NOT_PROVEN, SKIPPED), 1)],
    ids=["all proven", "one not", "one not run", "none run", "one not and one not run"],
)
@pytest.mark.parametrize("json_wanted", [False, True], ids=["eyes", "json"])
def test_verify_ends_with_its_report_and_exit_code(
    proofs: tuple[Proof, ...], code: int, json_wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--json"] if json_wanted else []
    out, err = verify_with(replace(VERIFIED, proofs=proofs), monkeypatch, *arguments, code=code)
    assert err == ""
    if json_wanted:
        written = json.loads(out)
        assert written["holds"] == (code == 0)
        assert [row["name"] for row in written["fixes"]] == [proof.fix.name for proof in proofs]
    else:
        assert "(a GPU)." in out
        assert ("skipped: no GPU for it" in out) == (SKIPPED in proofs)


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_verify_passes_on_where_the_user_wants_it(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verify_with(replace(VERIFIED, proofs=(PROVEN,)), monkeypatch, "--device", device, code=0)


def test_verify_passes_on_how_engines_are_to_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    verify_with(replace(VERIFIED, proofs=(PROVEN,)), monkeypatch, "--fresh", "--parallel", "3", code=0)


def test_verbose_verify_tells_what_the_engines_took(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = tuple({"name": f"mla {mode}", "seconds": seconds} for mode, seconds in (("eager", 9.0), ("stock", 21.4)))
    report = replace(VERIFIED, proofs=(PROVEN,), seconds=30.2, engines=engines)
    assert "2 engines in 30 s; mla stock: 21 s" in verify_with(report, monkeypatch, "--verbose", code=0)[0]


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (VerifyError("there is no GPU; do this"), "there is no GPU; do this", 2),
        (SourceError("a file is no Python"), "a file is no Python", 2),
        (KeyboardInterrupt(), "interrupted; all processes it had started have ended", 130),
    ],
    ids=["no GPU", "no source", "interrupted"],
)
def test_verify_that_comes_to_no_result_says_so_in_one_line(
    error: BaseException, message: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verify_with(error, monkeypatch, "--json", code=code) == ("", f"vllm-graphfix: {message}\n")


def test_verify_knows_two_devices() -> None:
    out, err = call("verify", "--device", "tpu", code=2)
    assert out == ""
    assert "'gpu', 'cpu'" in err


def test_a_vllm_without_kernels_is_one_clear_line_for_who_insists_on_a_gpu() -> None:
    out, err = call("verify", "--device", "gpu", "--vllm", str(release_root("0.18.1")), code=2)
    assert out == ""
    assert err == (
        f"vllm-graphfix: cannot verify on a GPU: the vLLM in {release_root('0.18.1')} has no compiled kernels. "
        "`--device cpu` uses the CPU double instead\n"
    )


def test_a_wheel_file_is_one_clear_line_for_who_insists_on_a_gpu(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-0.18.1-cp38-abi3-manylinux1_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
    out, err = call("verify", "--device", "gpu", "--vllm", str(wheel), code=2)
    assert (out, err.count("\n")) == ("", 1)
    assert "cannot verify on a GPU: the wheel file is not installed" in err


def test_the_version_and_the_help_are_there() -> None:
    assert call("--version")[0] == f"vllm-graphfix {__version__}\n"
    assert all(
        command in call("--help")[0]
        for command in ("status", "explain", "verify", "compare", "fleet", "report", "doctor")
    )


COMMAND = (sys.executable, "-m", "vllm_graphfix")
PRINTING = [
    "status --json", "explain", "fleet", "--help",
    *(
        pytest.param(command, marks=pytest.mark.slow)
        for command in ("status", "explain mamba-padding", "fleet --json", "doctor")
    ),
]  # fmt: skip
"""`make test` has one of each kind: JSON, text, a table, the page of the library for command lines."""


def in_a_shell(command: str, outputs: str, folder: Path, stdout: int = subprocess.PIPE) -> tuple[int, str]:
    """Exit code and standard error of *command*, about a release and the records in *folder*.

    Its *outputs* are as a shell has them.
    """
    words = command.split()
    about = {"status": ["--vllm", str(release_root("0.18.1"))], "fleet": ["--dir", str(folder)]}.get(words[0], [])
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {outputs}', "sh", *COMMAND, *words, *about],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert not done.stdout
    return done.returncode, done.stderr


UNPRINTED = "vllm-graphfix: cannot write the output: "


@pytest.mark.parametrize(
    "command", [*PRINTING, "verify", pytest.param("compare some/model", marks=pytest.mark.slow), "fleet --watch"]
)
def test_a_standard_output_that_is_closed_is_one_line_and_exit_code_1(command: str, tmp_path: Path) -> None:
    assert in_a_shell(command, ">&-", tmp_path) == (1, f"{UNPRINTED}standard output is closed\n")


@pytest.mark.parametrize("command", [*PRINTING, "fleet --watch"])
def test_a_device_that_is_full_is_one_line_and_exit_code_1(command: str, tmp_path: Path) -> None:
    assert in_a_shell(command, ">/dev/full", tmp_path) == (1, f"{UNPRINTED}No space left on device\n")


@pytest.mark.parametrize(
    "outputs",
    [
        *(">/dev/full 2>&-", ">/dev/full 2>/dev/full", "<&- >&- 2>&-"),
        *(pytest.param(outputs, marks=pytest.mark.slow) for outputs in (">&- 2>&-", ">&- 2>/dev/full")),
    ],
)
def test_where_there_is_no_standard_error_either_the_exit_code_is_1(outputs: str, tmp_path: Path) -> None:
    assert in_a_shell("explain", outputs, tmp_path) == (1, "")


@pytest.mark.parametrize("command", PRINTING)
def test_a_reader_that_has_gone_gets_no_error_message(command: str, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert in_a_shell(command, "", tmp_path, writing) == (1, "")
    finally:
        os.close(writing)


@pytest.mark.parametrize("command", ["verify", "verify --json", "compare some/model"])
def test_a_result_that_cannot_be_printed_is_one_line_and_exit_code_1(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With doubles of what runs a proof or a comparison, and of what shows the latter."""
    monkeypatch.setattr(vllm_graphfix.verify.run, "run", lambda *args, **how: replace(VERIFIED, proofs=(PROVEN,)))
    monkeypatch.setattr(vllm_graphfix.commands.compare.run, "run", lambda *args, **how: None)
    monkeypatch.setattr(
        vllm_graphfix.commands.compare.report, "show", lambda report, console: console.print("the same")
    )
    about = ["--vllm", str(release_root("0.18.1"))] if command.startswith("verify") else []
    monkeypatch.setattr(sys, "argv", ["vllm-graphfix", *command.split(), *about])
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit, match="1"):
            main()
    assert capsys.readouterr().err == f"{UNPRINTED}No space left on device\n"


def test_an_error_that_is_none_of_printing_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_graphfix.commands.cli, "app", lambda: Path("/nowhere").stat())
    with pytest.raises(FileNotFoundError):
        main()


@pytest.mark.parametrize("width", ["0", ""])
def test_a_terminal_without_a_width_shows_what_others_do(width: str) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "explain"], stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": width}
    ) as process:
        os.close(theirs)
        seen = b""
        try:
            while more := os.read(ours, 65536):
                seen += more
        except OSError:  # the terminal of a process that has ended
            pass
        finally:
            os.close(ours)
    assert process.returncode == 0
    assert b"flashmla-fp8" in seen
