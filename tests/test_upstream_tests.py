"""tools/upstream_tests.py: what it makes of two runs of upstream's tests, and of an sdist that cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

import upstream_tests
from fetch_vllm import FetchError
from upstream_tests import Run, compare

PASSED = {"setup": "passed", "call": "passed", "teardown": "passed"}
FAILED = {"setup": "passed", "call": "failed", "teardown": "passed"}
SKIPPED = {"setup": "skipped", "teardown": "passed"}
ERROR = {"setup": "failed", "teardown": "passed"}


def run(outcomes: dict[str, dict[str, str]], failed: dict[str, str] | None = None) -> Run:
    return Run(outcomes, failed or {}, {})


def test_the_same_outcomes_are_no_difference_whatever_they_are() -> None:
    same = {"a": PASSED, "b": FAILED, "c": SKIPPED, "d": ERROR}
    assert compare(run(same), run(dict(reversed(same.items())))) == []


def test_each_test_with_another_outcome_is_named_with_both() -> None:
    off, on = run({"a": PASSED, "b": FAILED, "c": PASSED}), run({"a": FAILED, "b": FAILED, "d": PASSED})
    assert [line.partition(": ")[2].partition(":")[0] for line in compare(off, on)] == ["a", "c", "d"]
    (first, second, _) = compare(off, on)
    assert "call passed, teardown passed without the plugin, setup passed, call failed" in first
    assert second.endswith("not run with it")


def test_an_error_after_a_test_that_passed_is_a_difference() -> None:
    assert len(compare(run({"a": PASSED}), run({"a": {**PASSED, "teardown": "failed"}}))) == 1


def test_a_fix_that_failed_is_one_though_all_outcomes_are_the_same() -> None:
    assert compare(run({"a": PASSED}), run({"a": PASSED}, {"mamba-padding": "why"})) == ["failed: mamba-padding: why"]


def test_outcomes_are_counted_by_kind() -> None:
    assert run({"a": PASSED, "b": PASSED, "c": SKIPPED, "d": ERROR}).counts == "2 passed, 1 skipped, 1 errors"


def test_of_a_run_that_was_stopped_the_tests_that_ended_are_compared() -> None:
    off = Run({"a": PASSED, "b": PASSED, "c": {"setup": "passed"}, "d": PASSED}, {}, {}, ended=False)
    assert [line[:11] for line in compare(off, run({"a": FAILED, "b": {"setup": "passed"}, "c": PASSED}))] == [
        "differs: a:"
    ]


def test_processes_of_a_run_are_read_as_one(tmp_path: Path) -> None:
    (tmp_path / "outcomes").write_text(
        '["a", "setup", "passed"]\n["b", "collect", "failed"]\n["a", "call", "failed"]\n'
    )
    (tmp_path / "1.json").write_text('{"failed": {}, "calls": {"f: g": 2, "f: h": 0}}')
    (tmp_path / "2.json").write_text('{"failed": {"f": "why"}, "calls": {"f: g": 1}}')
    assert upstream_tests._read(tmp_path, tmp_path / "output", ended=True) == Run(
        {"a": {"setup": "passed", "call": "failed"}, "b": {"collect": "failed"}}, {"f": "why"}, {"f: g": 3, "f: h": 0}
    )


def test_paths_that_no_test_has_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="has none of tests/nowhere"):
        upstream_tests.run(tmp_path, tmp_path, ["tests/nowhere/*.py"], {})


def test_a_run_in_which_no_fix_was_applied_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, answer in (("release", Path()), ("fetch", Path()), ("run", run({"a": PASSED}))):
        monkeypatch.setattr(upstream_tests, name, lambda *_, answer=answer: answer)
    assert upstream_tests.main(["0.33.0"]) == 1
    assert "no fix was applied" in capsys.readouterr().out


@pytest.mark.parametrize(("off", "on", "code"), [(PASSED, PASSED, 0), (PASSED, FAILED, 1)])
def test_the_exit_code_says_if_the_plugin_changed_anything(
    off: dict[str, str],
    on: dict[str, str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = iter([run({"a": off}), Run({"a": on}, {}, {"fix: f": 3, "fix: g": 0})])
    monkeypatch.setattr(upstream_tests, "release", lambda *_: Path())
    monkeypatch.setattr(upstream_tests, "fetch", lambda *_: Path())
    monkeypatch.setattr(upstream_tests, "run", lambda *_: next(runs))
    assert upstream_tests.main(["0.33.0"]) == code
    out = capsys.readouterr().out
    assert "1 of 2 wrappers called" in out
    assert "not called: fix: g" in out
    assert ("differs: a:" in out) == bool(code)
