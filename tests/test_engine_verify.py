"""`verify` on engines, the whole of it: with a double of vLLM in them and of the GPU that is found.

Diagnosis is of the stock release.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import engine_double
import warm_python
from edited import edited
from engine_proofs import CASES, RIGHT, RUNS, came_to_its_end, page, result_of
from engines_run import SOON, all_end, started
from json_outputs import check_output
from stock import release_root
from test_engine_device import H200
from vllm_graphfix.commands.cli import app
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.source.files import open_source
from vllm_graphfix.verify import cpu_proof
from vllm_graphfix.verify import gpu_proof as engine
from vllm_graphfix.verify.engine import device as devices
from vllm_graphfix.verify.engine.device import Device
from vllm_graphfix.verify.engine.job import EAGER, GRAPHS
from vllm_graphfix.verify.report import as_json


@pytest.fixture(autouse=True)
def python() -> str:
    """Started before a test looks at where temporary folders are made."""
    return warm_python.executable()


@pytest.fixture
def release(tmp_path: Path) -> Path:
    return with_a_double("0.18.1", tmp_path / "release")


def with_a_double(version: str, folder: Path) -> Path:
    """A release whose code is the stock one's but for what engines are made of."""
    changes = {
        "vllm/__init__.py": lambda text: engine_double.SOURCE,
        "vllm/platforms/__init__.py": lambda text: engine_double.PLATFORMS,
        "vllm/engine/arg_utils.py": lambda text: (
            "import dataclasses\nEngineArgs = dataclasses.make_dataclass('EngineArgs', [])\n"
        ),
    }
    root = edited(release_root(version), folder, changes, anonymous=False)
    (root / "torch.py").write_text(engine_double.TORCH)
    (root / "vllm" / "_C.abi3.so").write_bytes(b"compiled for a GPU")
    return root


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for temporary folders."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def find_h200(monkeypatch: pytest.MonkeyPatch, gpu: Device = H200) -> None:
    """Make `find` return *gpu*; it still makes the models."""
    make = devices.find

    def find(folder: Path | None = None, names: tuple[str, ...] = ()) -> Device:
        if folder is None:
            return gpu
        with monkeypatch.context() as patched:  # in a fork that has imported torch, as engines here have a double of it
            patched.setattr(sys, "executable", warm_python.executable())
            return make(folder, names)

    monkeypatch.setattr(devices, "find", find)


def verified(release: Path, *names: str, code: int, env: dict[str, str] | None = None) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["verify", *names, "--vllm", str(release), "--json"], env=env or {})
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    written: dict[str, Any] = json.loads(done.stdout)
    check_output("verify", written)
    return written


def test_a_fix_is_proven_by_three_engines(release: Path, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_h200(monkeypatch)
    report = verified(
        release,
        "flashmla-fp8",
        code=0,
        env={
            "ENGINE_DOUBLE_STOCK": "wrong",
            # None of it reaches the engines: it would decide in place of the proof.
            "VLLM_GRAPHFIX": "off",
            "VLLM_GRAPHFIX_FLASHMLA_FP8": "off",
            "VLLM_GRAPHFIX_ROLLOUT": "1%",
        },
    )
    assert (report["vllm"], report["device"], report["holds"], report["complete"]) == (
        "0.18.1",
        "Double of an H200",
        True,
        True,
    )
    assert report["environment"] == {
        "compute capability": "9.0",
        "driver": "unknown",
        "CUDA": "13.0",
        "torch": "2.11.0+cu130",
        "Python": "3.11.7",
        "modes": "VLLM_GRAPHFIX=off (stock), every fix auto (patched)",
        "seed": "7",
    }
    (row,) = report["fixes"]
    assert (row["outcome"], row["state"]) == ("proven", "active")
    assert (row["eager"], row["stock"], row["patched"]) == ([520], [16], [520])
    assert any(line.startswith("stock: corrupt prompts: 8 of 8") for line in row["details"])
    assert any(line.startswith("patched: 520 of 520 tokens") for line in row["details"])
    assert (report["logs"], list(folders.iterdir())) == (None, [])
    names = ["eager", "stock", "patched", "watched stock", "watched patched"]
    assert {times["name"] for times in report["engines"]} == {f"mla-fp8 {name}" for name in names}
    assert all(times["forked"] and times["error"] is times["why_not_forked"] is None for times in report["engines"])
    assert all(0 <= times["imports"] + times["start"] <= times["seconds"] + 1 for times in report["engines"])
    assert report["seconds"] >= max(times["began"] + times["seconds"] for times in report["engines"]) - 1


def test_requests_have_their_adapters_in_either_order(
    release: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight prompts three have the adapter that stock's double leaves out, three the other one, two have none."""
    find_h200(monkeypatch)
    report = verified(release, "active-lora-count", code=0, env={"ENGINE_DOUBLE_STOCK": "leaves an adapter out"})
    (row,) = report["fixes"]
    assert (row["outcome"], row["state"]) == ("proven", "active")
    assert (row["eager"], row["stock"], row["patched"]) == ([8 * 33], [5 * 33], [8 * 33])
    assert any(line.startswith("stock: corrupt prompts: 3 of 8, the first at token 0 of") for line in row["details"])


def test_an_engine_that_crashes_on_stock_proves_it_and_leaves_its_log(
    release: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_h200(monkeypatch)
    report = verified(release, "flashmla-fp8", code=0, env={"ENGINE_DOUBLE_STOCK": "illegal access"})
    (row,) = report["fixes"]
    assert row["outcome"] == "proven"
    assert row["stock_error"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert report["logs"] == str(next(folders.iterdir()))
    assert "illegal memory access" in (Path(report["logs"]) / "mla-fp8-stock.log").read_text()


@pytest.mark.parametrize(
    ("kind", "behaviour", "failure"),
    [
        ("STOCK", "out of memory", "stock: RuntimeError: CUDA error: out of memory"),
        ("STOCK", "fails in a worker", f"stock: {engine_double.WORKER_FAILED}"),
        ("EAGER", "illegal access", "eager: RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("EAGER", "no numbers", "eager: some log-probabilities are not finite"),
        ("PATCHED", "ends without a word", "patched: INFO 11-21 10:00:00"),
    ],
)
def test_an_engine_that_fails_otherwise_proves_nothing_and_leaves_its_log(
    kind: str, behaviour: str, failure: str, release: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_h200(monkeypatch)
    env = {"ENGINE_DOUBLE_STOCK": "wrong"} | {f"ENGINE_DOUBLE_{kind}": behaviour}
    report = verified(release, "flashmla-fp8", code=1, env=env)
    (row,) = report["fixes"]
    assert (row["outcome"], report["holds"]) == ("scenario failed", False)
    assert row["failure"].startswith(failure)
    assert Path(report["logs"]).parent == folders


def test_what_lacks_a_gpu_of_its_kind_is_skipped_and_the_rest_is_run(
    release: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_h200(monkeypatch, replace(H200, name="Double of an A100", capability=(8, 0)))
    monkeypatch.setattr(engine, "_run_cases", lambda *args, **how: pytest.fail("nothing to run") if args[1] else {})
    report = verified(release, "flashmla-fp8", "capture-state", code=3)
    assert (report["holds"], report["complete"], report["logs"]) == (False, False, None)
    assert {row["outcome"] for row in report["fixes"]} == {"skipped"}
    assert "Double of an A100 has 8.0" in report["fixes"][0]["skipped"]
    assert list(folders.iterdir()) == []


@pytest.mark.parametrize(("root", "cases"), [("0.25.1", 2), ("0.22.1", 1)])
def test_a_further_case_of_a_fix_is_judged_for_itself_where_this_vllm_shows_it(
    root: str, cases: int, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model runner is V2 of 0.25.1, which is right on stock here.

    That of 0.22.1 takes no recurrent model, and nothing is said of it.
    """
    right_on_stock = RUNS | {"stock": came_to_its_end("stock", result_of(RIGHT, "off"))}

    def ended(source: object, cases: Any, *rest: object, **how: object) -> dict[str, Any]:
        runs = {"mamba2-one-token": RUNS, "lfm2-one-token": right_on_stock}
        return {f"{case.name} {mode}": end for case in cases for mode, end in runs[case.name].items()}

    monkeypatch.setattr(engine, "_run_cases", ended)
    fix = BY_NAME["prefill-dispatch"]
    report = engine.run(open_source(release_root(root)), [fix], H200, Console(quiet=True))
    rows = [("prefill-dispatch", "proven"), ("prefill-dispatch (lfm2-one-token)", "defect not shown on stock")][:cases]
    assert [(proof.title, proof.outcome) for proof in report.proofs] == rows
    assert report.holds == (cases == 1)
    assert all(title in page(*report.proofs) for title, _ in rows)
    (entry,) = as_json(report)["fixes"]
    assert (entry["name"], entry["outcome"]) == rows[0]
    assert [(further["case"], further["outcome"]) for further in entry["further"]] == [
        ("lfm2-one-token", "defect not shown on stock")
    ][: cases - 1]


def test_what_is_not_needed_is_looked_at_beside_and_keeps_its_place(
    release: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the stock classes, without engines: the order is that of the question."""
    for name in ("vllm/__init__.py", "vllm/platforms/__init__.py", "vllm/engine/arg_utils.py"):
        shutil.copy(release_root("0.18.1") / name, release / name)
    (release / "torch.py").unlink()
    find_h200(monkeypatch, replace(H200, capability=(8, 0)))
    monkeypatch.setattr(cpu_proof, "_FORKS", (warm_python.executable(), *cpu_proof._FORKS[1:]))
    report = verified(release, "flashmla-fp8", "mamba-padding", "capture-state", code=3)
    assert [(row["name"], row["outcome"]) for row in report["fixes"]] == [
        ("flashmla-fp8", "skipped"),
        ("mamba-padding", "nothing patched"),
        ("capture-state", "skipped"),
    ]


COMMAND = """
import dataclasses, sys
from vllm_graphfix.verify.engine import device

make = device.find
h200 = device.Device("Double of an H200", "", (9, 0), 100.0, 140.0, "", "", "", "")
device.find = lambda folder=None, names=(): h200 if folder is None else make(folder, names)
from vllm_graphfix.commands.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_interrupted_it_leaves_no_process_and_no_folder(release: Path, tmp_path: Path, number: signal.Signals) -> None:
    folders = tmp_path / "temporary"
    folders.mkdir()
    env = os.environ | {"TMPDIR": str(folders)}
    env |= {f"ENGINE_DOUBLE_{kind}": "hangs with a child" for kind in ("EAGER", "STOCK", "PATCHED")}
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "verify", "flashmla-fp8", "--vllm", str(release)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            pids = started(folders, 1, "*/pids of *")
            process.send_signal(number)
            out, err = process.communicate(timeout=SOON)
        finally:
            process.kill()  # where the test fails
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "vllm-graphfix: interrupted; all processes it had started have ended"
    assert "Traceback" not in err
    assert all_end(pids)
    assert list(folders.iterdir()) == []


def test_stock_and_patched_are_poisoned_at_the_end(
    tmp_path: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_h200(monkeypatch)
    crashes = {"ENGINE_DOUBLE_STOCK": "wrong", "ENGINE_DOUBLE_POISON_STOCK": "illegal access"}
    report = verified(with_a_double("0.20.0", tmp_path / "release"), "mamba-padding", code=0, env=crashes)
    (row,) = report["fixes"]
    assert (row["outcome"], row["stock_error"], row["poison_notes"]) == ("proven", None, None)
    line = "with poison the engine ends: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert row["poison"]["stock"][0].startswith(line)
    assert row["poison"]["patched"] == []
    names = ["eager", "stock", "patched", "watched stock", "watched patched"]
    assert {times["name"] for times in report["engines"]} == {f"mamba2 {name}" for name in names}, "no further engine"
    assert "illegal memory access" in (Path(report["logs"]) / "mamba2-stock.log").read_text()


def test_without_a_terminal_each_engine_has_a_line(
    release: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_h200(monkeypatch)
    env = {"ENGINE_DOUBLE_STOCK": "wrong"}
    done = CliRunner().invoke(app, ["verify", "flashmla-fp8", "--vllm", str(release)], env=env)
    assert done.exit_code == 0
    assert sorted(line.split(":")[0] for line in done.stderr.splitlines()) == [
        "mla-fp8 eager",
        "mla-fp8 patched",
        "mla-fp8 stock",
        "mla-fp8 watched patched",
        "mla-fp8 watched stock",
    ]
    assert "(Double of an H200)." in done.stdout.splitlines()[0]
    assert "proven" in done.stdout


def test_eager_alone_asks_twice() -> None:
    assert {job.mode: job.extra_passes for job in CASES["flashmla-fp8"].jobs(Path("models"))} == {
        EAGER: True,
        GRAPHS: False,
    }
