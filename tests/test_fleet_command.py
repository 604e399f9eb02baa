"""The command `fleet`: JSON, exit codes, folders, `--watch`."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleets import Start, failed, here, ranks, reason
from records import ENGINE, leave, of, record
from vllm_graphfix import __version__
from vllm_graphfix.commands.cli import app
from vllm_graphfix.commands.fleet import as_json, look
from vllm_graphfix.records import Identity, own_folder


def call(*arguments: str, code: int = 0, env: dict[str, str] | None = None) -> tuple[str, str]:
    done = CliRunner().invoke(app, ["fleet", *arguments], env=env or {})
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    return done.stdout, done.stderr


@pytest.mark.usefixtures("alone")
def test_the_json_is_the_interface_that_is_documented(tmp_path: Path, two: tuple[Identity, Identity]) -> None:
    leave(tmp_path, record(), *ranks(two))
    told = json.loads(call("--dir", str(tmp_path), "--json")[0])
    (engine,) = told.pop("engines")
    mine = of(os.getpid())
    assert told == {
        "schema": 1,
        "graphfix": __version__,
        "host": mine.host,
        "folder": str(tmp_path),
        "exit_code": 0,
        "unrecorded": [],
        "notes": [],
        "problems": [],
    }
    processes = engine.pop("processes")
    assert engine == {
        "engine": ENGINE,
        "status": "in order",
        "live": True,
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
        "ranks": {"expected": 2, "recorded": 2, "agreeing": 2, "missing": []},
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
        (("5",), "SECONDS only goes with --watch"),
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
