"""The commands as a user gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from edited import edited
from stock import release_root
from table import affected_by
from typer.testing import CliRunner

from vllm_graphfix import __version__
from vllm_graphfix.cli import app
from vllm_graphfix.fixes import FIXES

FLASHMLA = "vllm/v1/attention/backends/mla/flashmla.py"


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
    found: dict[str, Any] = json.loads(out)
    return found


def test_status_json_is_the_interface_that_the_design_gives() -> None:
    found = status("0.18.1")
    assert {key: found[key] for key in ("schema", "graphfix", "vllm", "source")} == {
        "schema": 1,
        "graphfix": __version__,
        "vllm": "0.18.1",
        "source": str(release_root("0.18.1")),
    }
    assert [row["name"] for row in found["fixes"]] == [fix.name for fix in FIXES]
    row = next(row for row in found["fixes"] if row["name"] == "flashmla-fp8")
    assert row == {
        "name": "flashmla-fp8",
        "pr": 35175,
        "references": ["PR 32810", "issue 33638"],
        "diagnosis": "affected",
        "reason": row["reason"],
        "where": "vllm/v1/attention/backends/mla/flashmla.py:172",
        "known_release": True,
        "mode": "auto",
        "would_be": "active",
        "notes": [],
    }


WOULD_BE: list[tuple[str, dict[str, str], dict[str, str]]] = [
    ("0.18.1", {}, {"flashmla-fp8": "active", "draft-prefill-state": "not-needed", "mamba-padding": "not-needed"}),
    ("0.18.1", {"VLLM_GRAPHFIX": "0"}, {"flashmla-fp8": "off", "capture-state": "off"}),
    ("0.18.1", {"VLLM_GRAPHFIX": "strict"}, {"flashmla-fp8": "active"}),
    ("0.18.1", {"VLLM_GRAPHFIX_FLASHMLA_FP8": "off"}, {"flashmla-fp8": "off", "capture-state": "active"}),
    ("0.18.1", {"VLLM_PLUGINS": "other"}, {"flashmla-fp8": "off"}),
    ("0.18.1", {"VLLM_PLUGINS": "other,graphfix"}, {"flashmla-fp8": "active"}),
    ("0.18.1", {"VLLM_GRAPHFIX_ROLLOUT": "5%"}, {"flashmla-fp8": "not-in-canary"}),
]


@pytest.mark.parametrize(("release", "env", "wanted"), WOULD_BE, ids=[str(row[1]) for row in WOULD_BE])
def test_status_says_what_this_environment_would_do(release: str, env: dict[str, str], wanted: dict[str, str]) -> None:
    found = {row["name"]: row["would_be"] for row in status(release, env)["fixes"]}
    assert {name: found[name] for name in wanted} == wanted


def test_check_is_3_where_a_needed_fix_would_not_be_applied() -> None:
    status("0.18.1", check=True)
    status("0.33.0", {"VLLM_GRAPHFIX": "off"}, check=True)
    status("0.18.1", {"VLLM_GRAPHFIX_FLASHMLA_FP8": "off"}, check=True, code=3)
    status("0.18.1", {"VLLM_PLUGINS": ""}, check=True, code=3)
    status("0.18.1", {"VLLM_GRAPHFIX": "off"}, code=0)


def test_check_is_3_for_a_shape_that_nobody_has_looked_at(tmp_path: Path) -> None:
    root = edited(
        release_root("0.18.1"),
        tmp_path / "fork",
        {FLASHMLA: lambda text: text.replace("scheduler_metadata.tile_scheduler_metadata = ", "self.plan = ")},
    )
    row = next(row for row in status(root, check=True, code=3)["fixes"] if row["name"] == "flashmla-fp8")
    assert (row["diagnosis"], row["would_be"], row["known_release"]) == ("unrecognised", "incompatible", False)


def notes(release: str, env: dict[str, str]) -> str:
    found = status(release, env)
    return "\n".join([*found["notes"], *(note for row in found["fixes"] for note in row["notes"])])


def test_status_tells_what_to_act_on() -> None:
    assert "no longer needed with this vLLM: VLLM_GRAPHFIX_FLASHMLA_FP8" in notes(
        "0.33.0", {"VLLM_GRAPHFIX_FLASHMLA_FP8": "on"}
    )
    assert "add graphfix to it" in notes("0.18.1", {"VLLM_PLUGINS": ""})
    assert "did you mean VLLM_GRAPHFIX_FLASHMLA_FP8?" in notes("0.18.1", {"VLLM_GRAPHFIX_FLASHMLA_FP": "on"})
    assert "flashmla-padding is switched off: a right plan" in notes(
        "0.18.1", {"VLLM_GRAPHFIX_FLASHMLA_PADDING": "off"}
    )
    assert "draft-prefill-state is switched off" in notes("0.21.0", {"VLLM_GRAPHFIX_DRAFT_PREFILL_STATE": "off"})
    assert notes("0.20.0", {"VLLM_GRAPHFIX_DRAFT_PREFILL_STATE": "off"}).startswith("no longer needed")
    assert notes("0.18.1", {}) == ""


@pytest.mark.parametrize("release", ["0.14.1", "0.18.1", "0.21.0", "0.33.0"])
def test_the_table_for_eyes_has_a_row_for_every_fix(release: str) -> None:
    out, _ = call("status", "--vllm", str(release_root(release)))
    lines = out.splitlines()
    assert f"vLLM {release} in" in lines[0]
    for fix in FIXES:
        (row,) = [line for line in lines if line.startswith(fix.name)]
        assert ("active" in row) == (fix.name in affected_by(release))


def test_a_pipe_gets_neither_colour_nor_control_codes() -> None:
    out, _ = call("status", "--vllm", str(release_root("0.18.1")), env={"NO_COLOR": "1"})
    assert out.isascii()
    assert "\x1b" not in out


@pytest.mark.parametrize("fix", FIXES, ids=[fix.name for fix in FIXES])
def test_explain_says_all_that_there_is(fix: Any) -> None:
    out, _ = call("explain", fix.name)
    words = " ".join(out.split())
    for text in (
        fix.symptom,
        fix.cause,
        fix.remedy,
        fix.detect,
        fix.concerns,
        fix.workaround,
        fix.removable,
        fix.releases,
    ):
        assert " ".join(text.split()) in words
    assert f"{fix.variable}=off" in words
    found = json.loads(call("explain", fix.name.upper().replace("-", "_"), "--json")[0])
    assert (found["schema"], found["name"], found["pr"], found["cause"]) == (1, fix.name, fix.pr, fix.cause)


def test_explain_without_a_name_lists_the_fixes() -> None:
    out, _ = call("explain")
    assert all(fix.name in out for fix in FIXES)
    assert [row["name"] for row in json.loads(call("explain", "--json")[0])["fixes"]] == [fix.name for fix in FIXES]


WRONG = [
    (("explain", "mamba-pading"), "did you mean mamba-padding?"),
    (("explain", "xyzzy"), "there are: capture-state"),
    (("verify", "flashmla"), "did you mean flashmla-fp8?"),
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


def test_the_version_and_the_help_are_there() -> None:
    assert call("--version")[0] == f"vllm-graphfix {__version__}\n"
    assert all(command in call("--help")[0] for command in ("status", "explain", "verify"))
