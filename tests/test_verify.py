"""`verify` as users run it.

The defect on stock, its absence with the plugin, and that it is the fix that makes it so.
"""

from __future__ import annotations

import getpass
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console

import warm_python
from edited import changes, edited, stock_source
from engines_run import SOON, all_end
from nightly import make_nightly
from stock import calling_main, release_root, run_in_release
from table import (
    AFFECTED_RELEASES,
    ALL_APPLIED,
    FEW,
    PAIRS,
    SAMPLE,
    affected_by,
    slow_but_for,
    verdict,
)
from trial_rows import Edit, edits_of
from vllm_graphfix import manifest
from vllm_graphfix.fix import Activity, Fix, Patch, Verdict, Wrap
from vllm_graphfix.fixes import BY_NAME, FIXES
from vllm_graphfix.patching import hooks, sites
from vllm_graphfix.source.files import open_source
from vllm_graphfix.verify import cpu_proof
from vllm_graphfix.verify.cpu_proof import run
from vllm_graphfix.verify.double import worker
from vllm_graphfix.verify.measurement import Measurement
from vllm_graphfix.verify.proof import Proof
from vllm_graphfix.verify.report import Report
from vllm_graphfix.verify.trial import trial_of
from warm_release import run_in_fork


def verified(root: Path, fixes: Sequence[Fix] = FIXES) -> Report:
    return run(open_source(root), fixes, Console(file=io.StringIO()))


@pytest.fixture
def libraries_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes of `verified` are forks of one that has imported the libraries.

    Those of other tests start as a user's.
    """
    monkeypatch.setattr(sys, "executable", warm_python.executable())


def outcomes(report: Report) -> dict[str, str]:
    """The outcome of each fix; of a scenario that failed, with the reason."""
    return {proof.fix.name: ": ".join(filter(None, [proof.outcome, proof.failure])) for proof in report.proofs}


def watched_on(release: str) -> set[str]:
    """The fixes that *release* needs and in whose scenarios the shadow check looks at every replay."""
    first = {
        "shadow-v1": (0, 15),
        "shadow-v2": (0, 18),
        "shadow-v2-drafter": (0, 19),
        "shadow-v2-dflash-drafter": (0, 24),
    }
    return {
        fix.name
        for fix in FIXES
        if (watched := trial_of(fix.name).watched) is not None
        and verdict(fix.name, release) == "affected"
        and tuple(map(int, release.split("."))) >= first[watched.graphs]
    }


@pytest.mark.parametrize("fix", FIXES, ids=lambda fix: fix.name)
def test_each_fix_is_watched_or_says_why_the_shadow_check_cannot_see_the_defect(fix: Fix) -> None:
    trial = trial_of(fix.name)
    assert bool(trial.watched) != bool(trial.unwatched)
    assert trial.watched or not trial.watched_further
    cases = [case for case in (trial.case, *trial.further) if case is not None]
    assert trial.watched or not any(case.watched for case in cases)


@pytest.mark.xdist_group("verify a release")  # in no fork of one
@pytest.mark.usefixtures("libraries_loaded")
@pytest.mark.parametrize("release", slow_but_for(("0.33.0",), AFFECTED_RELEASES))
def test_every_fix_that_a_release_needs_is_proven_and_nothing_else_is_patched(release: str) -> None:
    report = verified(release_root(release))
    assert outcomes(report) == {
        fix.name: "proven" if verdict(fix.name, release) == "affected" else "nothing patched" for fix in FIXES
    }
    assert report.holds
    assert (report.vllm, report.device) == (release, "CPU double")
    assert {proof.fix.name for proof in report.proofs if proof.watched} == watched_on(release)
    counted = [proof.patched for proof in report.proofs if proof.patched and proof.patched.counted]
    assert counted
    for each in counted:
        assert {event: each.events[event] for event in each.counted} == each.counted
    for proof in report.proofs:
        if proof.watched:
            stock, patched = (
                (watch, *watch.further) for watch in map(proof.watched.get, ("stock", "patched")) if watch
            )
            for results in zip(stock, patched, strict=True):
                assert [(each.state, each.error) for each in results] == [("active", None)] * 2
                assert [bool(each.mismatches) for each in results] == [True, False], proof.fix.name
                assert all(each.checks for each in results)


class Forked(NamedTuple):
    """Results of one worker process; the command runs two."""

    measured: dict[str, Measurement]
    failed: dict[str, str]
    states: dict[str, tuple[str, str]]


# Tests of one release share a process of pytest.
@cache
def forks(release: str, names: tuple[str, ...], *ways: str) -> dict[str, Forked]:
    """Run the scenarios of *names* in each way: `stock`, `patched`, or the name of a fix whose body is emptied."""
    code = calling_main("emptied.py", [*names], [*ways])
    results: dict[str, Forked] = {}
    for line in run_in_fork(release, code, ALL_APPLIED).stdout.splitlines():
        event: dict[str, Any] = json.loads(line) if line.startswith('{"event": ') else {"event": None}
        if event["event"] == "forked":
            fork = results[event["as"]] = Forked({}, {}, {})
        elif event["event"] == "measured":
            fork.measured[event["fix"]] = Measurement(
                event["numbers"], tuple(event["eager"]), tuple(event["graphed"]), event["error"]
            )
        elif event["event"] == "failed":
            fork.failed[event["fix"]] = event["error"]
        elif event["event"] == "state":
            fork.states[event["fix"]] = (event["state"], event["reason"])
    return results


def emptied_with(name: str, release: str) -> tuple[str, ...]:
    """The fixes that are emptied on *release* in one run with *name*; in `make test` those of `EMPTIED`."""
    few = tuple(fix for fix in affected_by(release) if EMPTIED[fix] == release)
    return few if name in few else affected_by(release)


def proof(name: str, release: str, names: tuple[str, ...], patched: str) -> Proof:
    """The proof of the stock fork and the one that is named *patched*, as the command makes it of two processes."""
    plain = forks(release, names, "stock", "patched")
    stock, other = plain["stock"], (plain if patched in plain else forks(release, names, *names))[patched]
    return Proof(
        BY_NAME[name],
        manifest.diagnose(BY_NAME[name], stock_source(release_root(release))),
        stock.measured.get(name),
        other.measured.get(name),
        stock.failed.get(name) or other.failed.get(name),
        stock.states[name],
        other.states[name],
    )


EMPTIED = dict(sorted(PAIRS, key=lambda pair: (pair[1] in SAMPLE, pair[1] in FEW)))
"""The newest release that each fix is for, of FEW or the sample where one is there."""


# The command proves each pair of a fix and a release above; these are fast enough for `make test`. On the releases of
# FEW, test_observe.py shows stock wrong and the fix right by the same scenarios.
@pytest.mark.parametrize(
    ("name", "release"),
    [
        pytest.param(*pair, marks=() if EMPTIED[pair[0]] == pair[1] else pytest.mark.slow)
        for pair in PAIRS
        if pair[1] in SAMPLE - FEW
    ],
)
def test_each_fix_is_proven(name: str, release: str) -> None:
    """Run in two forks what the command runs in two processes."""
    results = proof(name, release, emptied_with(name, release), "patched")
    assert (results.outcome, results.failure) == ("proven", None)


@pytest.mark.parametrize(
    ("name", "release"),
    [pytest.param(*pair, marks=() if EMPTIED[pair[0]] == pair[1] else pytest.mark.slow) for pair in PAIRS],
)
def test_the_defect_is_still_there_if_the_body_of_the_fix_is_emptied(name: str, release: str) -> None:
    """All patches are on their targets, those of this one fix change nothing."""
    names = emptied_with(name, release)
    emptied = proof(name, release, names, name)
    assert emptied.patched_state == forks(release, names, "stock", "patched")["patched"].states[name]
    assert (emptied.outcome, emptied.failure) == ("defect still there", None)


@pytest.mark.slow  # test_observe.py shows the same in forks of one process
@pytest.mark.usefixtures("libraries_loaded")
@pytest.mark.parametrize(
    ("without_mode", "without_zero_fill"), [(True, False), (False, True), (True, True)], ids=["mode", "indices", "both"]
)
def test_nightlies_before_pr_39773_are_proven(tmp_path: Path, without_mode: bool, without_zero_fill: bool) -> None:
    root = make_nightly(
        release_root("0.20.0"), tmp_path, without_mode=without_mode, without_zero_fill=without_zero_fill
    )
    assert outcomes(verified(root, [BY_NAME["draft-decode-mode"]])) == {"draft-decode-mode": "proven"}


@pytest.mark.slow  # half a minute each
@pytest.mark.usefixtures("libraries_loaded")
@pytest.mark.parametrize(
    ("fix", "edit"),
    [
        pytest.param(fix, edit, id=f"{fix.name}-{edit.release}")
        for fix in FIXES
        for edit in edits_of(fix.name)
        if edit.runs and edit.verdict is Verdict.AFFECTED
    ],
)
def test_a_fixed_release_with_the_fix_cut_out_is_proven(tmp_path: Path, fix: Fix, edit: Edit) -> None:
    """Together with the fixes without which it trades one defect for another."""
    root = edited(release_root(edit.release), tmp_path / "vllm", changes(edit))
    fixes = [fix, *(BY_NAME[other.name] for other in fix.requires)]
    report = verified(root, fixes)
    assert report.vllm is None, "nothing tells the version"
    affected = {each for each in fixes if manifest.diagnose(each, open_source(root)).verdict is Verdict.AFFECTED}
    assert fix in affected
    assert outcomes(report) == {each.name: "proven" if each in affected else "nothing patched" for each in fixes}
    # Also where no other scenario has imported what the check is wrapped around.
    assert {proof.fix for proof in report.proofs if proof.watched} == {
        each for each in affected if trial_of(each.name).watched
    }


def verify(
    *arguments: str | Path, env: Mapping[str, str] | None = None, libraries_loaded: bool = False
) -> subprocess.CompletedProcess[str]:
    """The command, in a process as a user has it; with *libraries_loaded*, in a fork, as the two that it starts."""
    command = [sys.executable, "-m", "vllm_graphfix"]
    if libraries_loaded:
        python = warm_python.executable()
        command = [python, "-c", f"import sys\nsys.executable = {python!r}\n{COMMAND}"]
    return subprocess.run(
        [*command, "verify", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": "", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


COMMAND = "from vllm_graphfix.commands.cli import main\nmain()"


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python in which torch cannot be imported; what `verify` leaves behind is in `tmp_path`."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    return {"PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)}


def test_what_is_not_affected_is_not_patched_and_its_scenario_does_not_run() -> None:
    chosen = [fix.name for fix in FIXES if verdict(fix.name, "0.33.0") != "affected"]
    done = verify(*chosen, "--json", "--vllm", release_root("0.33.0"), libraries_loaded=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["schema"], report["vllm"], report["holds"]) == (1, "0.33.0", True)
    assert [row["name"] for row in report["fixes"]] == chosen
    assert {(row["outcome"], row["eager"], row["state"]) for row in report["fixes"]} == {
        ("nothing patched", None, "not-needed")
    }


def test_the_named_vllm_is_verified_wherever_this_is_and_whatever_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('the working directory is no argument')\n")
    monkeypatch.chdir(tmp_path)
    done = verify(
        *("flashmla-fp8", "--json", "--vllm", release_root("0.18.1")),
        env={"VLLM_GRAPHFIX": "off", "VLLM_GRAPHFIX_FLASHMLA_FP8": "off", "VLLM_GRAPHFIX_ROLLOUT": "1%"},
        libraries_loaded=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)["fixes"]
    assert (row["name"], row["pr"], row["diagnosis"], row["outcome"]) == ("flashmla-fp8", 35175, "affected", "proven")
    assert row["state"] == "active"
    assert row["patched"] == row["eager"] != row["stock"]
    # No other scenario has imported what the check is wrapped around.
    checked = {way: (watch["checks"] > 0, watch["mismatches"] > 0) for way, watch in row["shadow"].items()}
    assert checked == {"stock": (True, True), "patched": (True, False)}


def test_a_wheel_file_is_verified_as_it_would_be_installed(tmp_path: Path) -> None:
    """With a fix whose scenario imports little: none of it is compiled."""
    root, wheel = release_root("0.18.1"), tmp_path / "vllm-0.18.1-cp38-abi3-manylinux1_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in root.rglob("*"):
            if file.is_file() and file.suffix != ".pyc":
                archive.write(file, file.relative_to(root))
        archive.writestr("vllm/_C.abi3.so", b"compiled for a GPU")
    done = verify("flashmla-fp8", "encoder-padding", "compressor-skip", "--vllm", wheel, libraries_loaded=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "vLLM 0.18.1 in " in done.stdout
    assert "(CPU double)." in done.stdout.splitlines()[0]
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("flashmla-fp8 ")]
    assert "wrong" in row
    assert row.split()[-2:] == ["equal", "proven"]
    assert "not in this vLLM, nothing patched: 2 (--verbose)" in done.stdout


def test_a_patch_where_none_is_needed_is_detected(tmp_path: Path) -> None:
    """The state alone would say not-needed; what is looked at is the code."""
    (tmp_path / "sitecustomize.py").write_text(
        "import wrapt\n"
        "@wrapt.when_imported('vllm.v1.attention.backends.mla.flashmla')\n"
        "def patch(module):\n"
        "    from vllm_graphfix.fixes import flashmla_fp8\n"
        "    builder = module.FlashMLAMetadataBuilder\n"
        "    builder._build_decode = flashmla_fp8._plan_in_persistent_buffers(builder._build_decode)\n"
    )
    around = {"PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = verify("flashmla-fp8", "--vllm", release_root("0.23.0"), env=around, libraries_loaded=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "not left alone" in done.stdout


TARGET = "vllm.standin_target"


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with one function, which is the one that every fix concerns."""
    module = ModuleType(TARGET)
    exec("def helper(*arguments): ...", vars(module))  # noqa: S102 - this very file's source
    monkeypatch.setitem(sys.modules, TARGET, module)
    monkeypatch.setattr(worker, "_import_targets", lambda fix: [module])
    return module


def wrappers_of(fix: str) -> list[Wrap]:
    """The wrappers of all patches, whatever the shape."""
    shapes = {entry["shape"] for entry in manifest.load()["fixes"][fix] if entry["verdict"] == "affected"}
    return [patch.wrap for shape in sorted(shapes) for patch in BY_NAME[fix].patches(shape)]


@pytest.mark.parametrize("fix", BY_NAME)
def test_every_wrapper_of_a_fix_is_detected_where_none_is_needed(target: Any, fix: str) -> None:
    """Also under a decorator, and where nothing has recorded that it was applied."""
    stock = target.helper
    worker.refuse_patched(fix)
    wrappers = wrappers_of(fix)
    assert wrappers
    for layer in (wrap(stock, Activity(BY_NAME[fix].events)) for wrap in wrappers):
        for target.helper in (layer, torch.inference_mode()(layer)):
            with pytest.raises(AssertionError, match="helper is patched"):
                worker.refuse_patched(fix)


def test_a_layer_of_another_fix_and_a_hook_are_no_patch_of_this_one(target: Any) -> None:
    others = ("mamba-padding", "cutlass-mla-padding")
    for fix in others:
        sites.apply(fix, [Patch(TARGET, "helper", wrappers_of(fix)[-1])], Activity(BY_NAME[fix].events))
        setattr(target, f"copy_of_{fix}", target.helper)
    hooks.wrap(target, "helper", lambda helper, *arguments: helper(*arguments))
    worker.refuse_patched("flashmla-fp8")
    for fix in others:
        with pytest.raises(AssertionError, match="is patched"):
            worker.refuse_patched(fix)


def test_an_unknown_fix_is_a_usage_error_with_the_nearest_that_there_is() -> None:
    done = verify("flashmla-fp9")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "vllm-graphfix: there is no fix named 'flashmla-fp9'; did you mean flashmla-fp8?\n"


def test_without_torch_one_message_says_what_to_do(without_torch: dict[str, str], tmp_path: Path) -> None:
    done = verify("--vllm", release_root("0.22.1"), env=without_torch)
    assert (done.returncode, done.stdout) == (2, "")
    (message,) = done.stderr.splitlines()
    assert message.startswith("vllm-graphfix: ")
    assert "No module named 'torch'" in message
    assert f"Use a Python that has torch and what vLLM imports; this one is {sys.executable}." in message
    (log,) = tmp_path.glob("graphfix-verify-*.log")
    assert message.endswith(f"The log is {log}")


def at_work(process: subprocess.Popen[str]) -> list[int]:
    """The process that a command has started and its two forks, once there are these."""
    while process.poll() is None:
        started = children(process.pid)
        forks = [fork for each in started for fork in children(each)]
        if len(forks) == 2:
            return [*started, *forks]
        time.sleep(0.02)
    raise AssertionError(f"it ended by itself, with {process.returncode}")


@contextmanager
def verifying(folder: Path, *fixes: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Yield a running `verify` on 0.18.1, with its files in *folder*, and its processes once all are at work."""
    with subprocess.Popen(
        [sys.executable, "-m", "vllm_graphfix", "verify", *fixes, "--vllm", release_root("0.18.1")],
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, at_work(process)
        finally:
            process.kill()  # where the test fails


def children(pid: int) -> list[int]:
    return [int(child) for child in (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split()]


@pytest.mark.parametrize("which", [0, 1, 2], ids=["of the libraries", "stock", "patched"])
def test_where_one_process_is_killed_one_message_says_so_and_all_end(tmp_path: Path, which: int) -> None:
    with verifying(tmp_path, "prompt-logprobs") as (process, workers):
        os.kill(workers[which], signal.SIGKILL)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (2, "")
    (message,) = err.splitlines()
    kind = "patched" if which == 2 else "stock"
    assert message.startswith(f"vllm-graphfix: the {kind} process ended with -9: ")
    assert all_end(workers)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_interrupted_it_leaves_no_process_and_no_file(tmp_path: Path, number: signal.Signals) -> None:
    """The signal goes to the command alone, not to what it has started."""
    with verifying(tmp_path) as (process, workers):
        process.send_signal(number)
        out, err = process.communicate(timeout=SOON)
    assert (process.returncode, out) == (130, "")
    assert err == "vllm-graphfix: interrupted; all processes it had started have ended\n"
    assert all_end(workers)
    assert [path for path in tmp_path.iterdir() if path.name != f"torchinductor_{getpass.getuser()}"] == []


@pytest.mark.parametrize("what", ["Popen", "Timer"])
def test_where_a_process_or_a_thread_cannot_start_all_ends_and_no_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """As at a limit of processes, or of threads."""
    processes: list[subprocess.Popen[str]] = []
    start_process = subprocess.Popen

    def process(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        if what == "Popen":
            raise BlockingIOError("no more processes")
        processes.append(start_process(*arguments, **options))
        return processes[-1]

    def timer(*arguments: Any) -> threading.Timer:
        raise BlockingIOError("no more threads")

    monkeypatch.setattr(subprocess, "Popen", process)
    monkeypatch.setattr(threading, "Timer", timer)
    monkeypatch.setattr(cpu_proof, "_FORKS", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    try:
        with pytest.raises(BlockingIOError, match="no more"):
            verified(release_root("0.18.1"), [BY_NAME["flashmla-fp8"]])
        assert [each.returncode for each in processes] == [-signal.SIGKILL] * (what == "Timer")
        assert list(tmp_path.iterdir()) == []
    finally:
        for each in processes:
            each.kill()  # where the test fails


def test_nothing_of_vllm_or_of_the_settings_is_imported_before_the_fork() -> None:
    """The forks share only what serves stock and patched code."""
    code = """
    import sys, vllm_graphfix
    from vllm_graphfix.verify.double import forks
    forks.main(sys.path[0], [])
    assert [name for name in forks._LIBRARIES if name not in sys.modules] == []
    assert [name for name in sys.modules if name.partition(".")[0] == "vllm"] == []
    assert vllm_graphfix._engine_process.cache_info().currsize == 0
    """
    run_in_release("0.33.0", code)


def test_what_a_library_prints_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('imported')")
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-m", "vllm_graphfix", "verify", "prompt-logprobs", "--vllm", release_root("0.18.1")],
        env=buffered | {"PYTHONPATH": f"{tmp_path}:{buffered.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
