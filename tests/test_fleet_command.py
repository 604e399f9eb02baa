"""The command `fleet`: JSON, exit codes, folders, `--watch`."""

from __future__ import annotations

import json
import os
import pty
import pwd
import re
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fleets import Start, failed, here, ranks, reason
from records import ENGINE, elsewhere, leave, of, record
from vllm_graphfix import __version__
from vllm_graphfix.commands.cli import app
from vllm_graphfix.commands.fleet import as_json, look
from vllm_graphfix.records import FixReport, Identity, own_folder, reading


def call(*arguments: str, code: int = 0, env: dict[str, str] | None = None) -> tuple[str, str]:
    done = CliRunner().invoke(app, ["fleet", *arguments], env=env or {})
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    return done.stdout, done.stderr


@pytest.mark.usefixtures("alone")
def test_the_json_is_the_interface_that_is_documented(tmp_path: Path, two: tuple[Identity, Identity]) -> None:
    leave(tmp_path, record(), *ranks(two))
    report = json.loads(call("--dir", str(tmp_path), "--json")[0])
    (engine,) = report.pop("engines")
    mine = of(os.getpid())
    assert report == {
        "schema": 1,
        "graphfix": __version__,
        "host": mine.host,
        "folder": str(tmp_path),
        "prometheus": None,
        "exit_code": 0,
        "unrecorded": [],
        "wrong": [],
        "notes": [],
        "problems": [],
    }
    processes = engine.pop("processes")
    assert engine == {
        "engine": ENGINE,
        "status": "in order",
        "live": True,
        "user": pwd.getpwuid(os.geteuid()).pw_name,
        "wrong": [],
        "notes": [],
        "model": "some/model",
        "vllm": ["0.21.0"],
        "graphfix": ["0.1.0"],
        "canary": True,
        "bucket": 1234,
        "percentage": 25.0,
        "master": "on",
        "misconfigured": {},
        "hosts": [mine.host],
        "ranks": {"expected": 2, "recorded": 2, "agreeing": 2, "unreadable": [], "missing": []},
        "fixes": {
            "capture-state": {
                "states": {"active": ["rank 0", "rank 1"]},
                "mode": "auto",
                "reason": "applied to GPUModelRunner.capture_model",
                "events": {"state-consumed": 24},
            }
        },
    }
    assert processes[1] == {
        "engine": ENGINE,
        "role": "worker",
        "rank": {"rank": 0, "local_rank": 0, "world_size": 2, "data_parallel_rank": 0},
        "host": mine.host,
        "pid": two[0].pid,
        "liveness": "alive",
        "age": processes[1]["age"],
        "outdated": False,
        "in_step_since": None,
        "starting": False,
        "problem": None,
    }


def test_unrecorded_processes_are_in_the_json(tmp_path: Path, serve: Start) -> None:
    process = serve(env=here(tmp_path, VLLM_PLUGINS=""))
    reason(process, tmp_path)
    one = next(one for one in as_json(look(tmp_path))["unrecorded"] if one["pid"] == process.pid)
    assert set(one) == {"pid", "user", "command", "age", "reason", "elsewhere", "starting"}
    assert one["command"].endswith("vllm serve some/model")


@pytest.mark.usefixtures("alone")
def test_nothing_to_see_is_exit_3(tmp_path: Path) -> None:
    out, _ = call("--dir", str(tmp_path), code=3)
    assert (
        "Engines on other machines show up if VLLM_GRAPHFIX_STATUS_DIR names the same folder on shared storage"
        in " ".join(out.split())
    )


@pytest.mark.usefixtures("alone")
def test_something_wrong_is_exit_1_and_in_words(tmp_path: Path) -> None:
    leave(tmp_path, record(rank=0, **failed("failed")))
    out, _ = call("--dir", str(tmp_path), code=1)
    assert "capture-state is failed on rank 0: the reason" in out


@pytest.mark.usefixtures("alone")
def test_the_folder_is_the_environments_and_may_be_named_in_full(tmp_path: Path) -> None:
    leave(tmp_path, record(rank=0))
    call(env={"VLLM_GRAPHFIX_STATUS_DIR": str(tmp_path)})
    call("--dir", str(own_folder(tmp_path)))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("folder", ["gone", "a file"])
def test_a_folder_that_is_none_is_one_sentence_and_exit_2(tmp_path: Path, folder: str) -> None:
    (tmp_path / "a file").touch()
    out, err = call("--dir", str(tmp_path / folder), code=2)
    assert out == ""
    assert err.startswith(f"vllm-graphfix: --dir='{tmp_path / folder}' is not a folder")
    _, err = call(env={"VLLM_GRAPHFIX_STATUS_DIR": str(tmp_path / folder)}, code=2)
    assert err.startswith("vllm-graphfix: VLLM_GRAPHFIX_STATUS_DIR=")
    call("--watch", "--dir", str(tmp_path / folder), code=2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("5",), "no engine whose name begins with '5'"),
        (("--watch", "--json"), "--watch and --json do not go together"),
        (("--watch", "0"), "--watch takes 0.1 to 86400 seconds, not 0"),
        (("--watch", "nan"), "seconds, not nan"),
        (("--watch", "inf"), "seconds, not inf"),
    ],
)
def test_options_that_make_no_sense_are_exit_2(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in call("--dir", str(tmp_path), *arguments, code=2)[1]


def test_watching_goes_on_until_it_is_interrupted_which_is_exit_0(tmp_path: Path, start: Start) -> None:
    leave(tmp_path, record(rank=0))
    with start(
        *(sys.executable, "-m", "vllm_graphfix", "fleet", "--watch", "0.1", "--dir", str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        looks = 0
        while looks < 3:
            looks += ENGINE.encode() in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr.read() == b""
        assert process.wait(20) == 0


def test_watching_on_a_terminal_shows_changes_in_place_and_gives_the_terminal_back(
    tmp_path: Path, start: Start
) -> None:
    leave(tmp_path, record(rank=0))
    ours, theirs = pty.openpty()
    process = start(
        *(sys.executable, "-m", "vllm_graphfix", "fleet", "--watch", "0.1", "--dir", str(tmp_path)),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={"TERM": "xterm", "COLUMNS": "140", "LINES": "40"},
    )
    os.close(theirs)
    seen = b""
    while b"another/model" not in seen:
        seen += os.read(ours, 65536)
        if b"some/model" in seen:
            leave(tmp_path, record(rank=0, model="another/model"))
    process.send_signal(signal.SIGINT)
    try:
        while more := os.read(ours, 65536):
            seen += more
    except OSError:  # how a terminal ends
        os.close(ours)
    assert process.wait(20) == 0
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")  # the cursor
    assert b"Traceback" not in seen


def many(folder: Path, number: int = 200) -> None:
    """Engines on other machines: one fixed in twenty, one not in order, twelve without graphs."""
    for each in range(number):
        host, canary = f"node-{each % 50}", each % 20 == 0
        state = "active" if canary else "not-in-canary"
        changes: dict[str, Any] = {
            "engine": f"{each:016x}",
            "fixes": {"capture-state": FixReport("auto", state, "the reason")},
            "decision": record().decision._replace(canary=canary),
            "graphs": not 1 <= each <= 12,
            "kept": True,
            "written": time.time(),
        }
        if each == 53:
            changes["misconfigured"] = {"VLLM_GRAPHFIX": "observ"}
        leave(folder, record(elsewhere(1000 + each, host), 0, **changes))


@pytest.mark.usefixtures("alone")
def test_two_hundred_engines_fit_one_screen_with_the_verdict_first(tmp_path: Path) -> None:
    many(tmp_path)
    out, _ = call("--dir", str(tmp_path), code=1)
    lines = out.splitlines()
    assert lines[0].startswith("200 engines on 50 hosts: 10 fixed, 177 stock, 12 without graphs, 1 WRONG")
    assert len(lines) < 12
    assert any(line.startswith("✗ 0000000000000035") and "VLLM_GRAPHFIX=observ" in line for line in lines)
    assert sum("without CUDA graphs" in line for line in lines) == 1
    assert lines[-1] == "details: vllm-graphfix fleet ENGINE, or --all"


@pytest.mark.usefixtures("alone")
def test_engines_that_are_silent_for_other_times_are_one_line(tmp_path: Path) -> None:
    for each in range(30):
        named = {"engine": f"{each:016x}"}
        leave(tmp_path, record(elsewhere(2 * each + 1), 0, 2, **named))
        leave(tmp_path, record(elsewhere(2 * each + 2), 1, 2, **named), age=200.0 + each)
    lines = call("--dir", str(tmp_path), code=1)[0].splitlines()
    assert [line for line in lines if "not heard from" in line] == ["✗ 30 engines: not heard from"]
    assert len(lines) < 12


@pytest.mark.usefixtures("alone")
def test_live_engines_that_are_all_wrong_run_and_some_of_them_are_named(tmp_path: Path) -> None:
    for each in range(7):
        wrong: dict[str, Any] = {"engine": f"{each:016x}", "misconfigured": {"VLLM_GRAPHFIX": "observ"}}
        leave(tmp_path, record(elsewhere(each + 1, f"node-{each}"), 0, **wrong))
    leave(tmp_path, record(elsewhere(9), 0, engine="f" * 16, problem="why"), age=120.0)
    lines = call("--dir", str(tmp_path), code=1)[0].splitlines()
    assert lines[0].startswith("7 engines on 7 hosts: 7 WRONG; 1 not running and WRONG")
    output = " ".join(lines)
    assert "✗ 7 engines: misconfigured: VLLM_GRAPHFIX=observ" in output
    assert "0000000000000000 on node-0, 0000000000000001 on node-1" in output
    assert "0000000000000004 on node-4 and 2 more" in output


@pytest.mark.usefixtures("alone")
def test_a_stop_is_one_line_of_an_engine_and_of_engines_that_stop_for_the_same(tmp_path: Path) -> None:
    for each in range(4):
        for rank in range(8):
            stopped = record(elsewhere(8 * each + rank + 1), rank, 8, engine=f"{each:016x}", problem="the ranks differ")
            leave(tmp_path, stopped, age=70.0 + rank + each)
    lines = call("--dir", str(tmp_path), code=1)[0].splitlines()
    assert lines[0].startswith("0 engines on 0 hosts: none is running; 4 not running and WRONG")
    assert "✗ 4 engines: stopped by vllm-graphfix: the ranks differ" in lines
    (one,) = look(tmp_path).engines[0].wrong
    assert re.fullmatch(r"stopped by vllm-graphfix 7\d s ago, according to ranks 0-7: the ranks differ", one)


@pytest.mark.usefixtures("alone")
def test_one_engine_of_many_and_all_of_them_are_printed_whole_on_demand(tmp_path: Path) -> None:
    many(tmp_path, 60)
    out, _ = call("--dir", str(tmp_path), "0000000000000035", code=1)
    assert "engine 0000000000000035" in out
    assert "engine 0000000000000034" not in out
    everything, _ = call("--dir", str(tmp_path), "--all", code=1)
    assert all(f"engine {each:016x}" in everything for each in range(60))
    _, err = call("--dir", str(tmp_path), "feedfeed", code=2)
    assert "no engine whose name begins with 'feedfeed'" in err


@pytest.mark.usefixtures("alone")
def test_an_engine_without_graphs_says_that_its_zeros_mean_nothing(tmp_path: Path) -> None:
    leave(tmp_path, record(rank=0, graphs=False))
    out, _ = call("--dir", str(tmp_path))
    assert "1 engine on 1 host: 1 without graphs" in out
    assert "without CUDA graphs (--enforce-eager, or cudagraph_mode NONE): its zeros mean nothing" in out


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("states", "label"),
    [
        ({"capture-state": "observing", "kv-marks": "active"}, "counting"),
        ({"capture-state": "off", "shadow": "active", "abort": "active"}, "stock"),
        ({"capture-state": "active", "kv-marks": "off"}, "fixed"),
    ],
)
def test_an_engine_is_fixed_by_fixes_and_not_by_detectors(tmp_path: Path, states: dict[str, str], label: str) -> None:
    fixes = {name: FixReport("auto", state, "the reason") for name, state in states.items()}
    leave(tmp_path, record(rank=0, fixes=fixes))
    assert f"1 engine on 1 host: 1 {label}" in call("--dir", str(tmp_path))[0]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("age", [90.0, -90.0], ids=["not heard from", "the clock was set back"])
def test_an_engine_that_may_run_is_not_called_ended(tmp_path: Path, age: float) -> None:
    leave(tmp_path, record(elsewhere(1), rank=0), age=age)
    verdict = call("--dir", str(tmp_path), code=3)[0].splitlines()[0]
    assert "none is heard from; 1 silent" in verdict


@pytest.mark.usefixtures("alone")
def test_a_watched_fleet_is_no_longer_than_its_terminal(tmp_path: Path) -> None:
    from rich.console import Console

    from vllm_graphfix.commands.fleet.table import _page, render

    many(tmp_path)
    console = Console(width=80, height=6, record=True, file=StringIO())
    console.print(_page(console, render(look(tmp_path))))
    lines = console.export_text().splitlines()
    assert len(lines) <= 6
    assert "more lines" in lines[-1]


@pytest.mark.usefixtures("alone")
def test_records_that_were_not_read_are_no_all_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(tmp_path, *(record(elsewhere(4242 + rank), rank=rank, world_size=2) for rank in (0, 1)))
    assert "NOT READ" not in call("--dir", str(tmp_path))[0]
    monkeypatch.setattr(reading, "FILES", 1)
    out, _ = call("--dir", str(tmp_path), code=1)
    assert "; 1 file or folder NOT READ" in out.splitlines()[0]
    assert "1 files were skipped, since at most 1 are read" in out
