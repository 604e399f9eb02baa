"""Processes, ranks and what is said of them, for the tests of `fleet`.

conftest.py has the fixtures, for all of these.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from records import eventually, of, record
from vllm_graphfix.commands.fleet import Engine, Unrecorded, look, render
from vllm_graphfix.records import FixReport, Identity, Record, read

OTHER_ENGINE = "f" * 16


Start = Callable[..., "subprocess.Popen[bytes]"]

WITHOUT_RECORD = "vllm_graphfix.commands.fleet.survey.without_record"
"""The function that looks at this machine's processes."""


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that is killed in the end."""
    with ExitStack() as stack:

        def start(*command: str, env: Mapping[str, str] | None = None, **rest: Any) -> subprocess.Popen[bytes]:
            process = stack.enter_context(
                subprocess.Popen(command or ["/bin/sleep", "600"], env={**os.environ, **(env or {})}, **rest)
            )
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of a machine without any process of vLLM; the one that runs the tests may have some."""
    monkeypatch.setattr(WITHOUT_RECORD, lambda *_: ((), ()))


@pytest.fixture
def two(start: Start) -> tuple[Identity, Identity]:
    """Two processes of this machine, for two ranks."""
    return of(start().pid), of(start().pid)


_KEEPS = """
import json, sys
from pathlib import Path
from vllm_graphfix.records import Record, Reporter, identity
one = Record.from_json(json.loads(sys.argv[2]))._replace(**identity()._asdict())
Reporter(Path(sys.argv[1]), print).keep(lambda: one, 0.05)
sys.stdin.read()
"""


SILENT_AFTER = "vllm_graphfix.records.liveness.SILENT_AFTER"
"""Seconds; patched by tests that have no minute."""


def keeping(start: Start, base: Path, one: Record) -> subprocess.Popen[bytes]:
    """A process that keeps the record *one* of itself, twenty times a second; returns when it has begun to."""
    process = start(
        *(sys.executable, "-c", _KEEPS, str(base), json.dumps(one.as_json())),
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
    )
    assert eventually(lambda: any(stored.record.pid == process.pid for stored in read(base).found))
    return process


def only(base: Path) -> Engine:
    (engine,) = look(base).engines
    return engine


def ranks(two: tuple[Identity, Identity], **changes: Any) -> tuple[Record, Record]:
    first, second = (record(process, rank, 2) for rank, process in enumerate(two))
    return first, second._replace(**changes)


def text(base: Path, width: int = 200) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render(look(base)))
    return capture.get()


def failed(state: str) -> dict[str, Any]:
    return {"fixes": {"capture-state": FixReport("auto", state, "the reason")}}


@pytest.fixture
def serve(start: Start, tmp_path: Path) -> Start:
    """A stand-in of `vllm serve`: a script of that name, called as vLLM's is, that sleeps."""
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text("import time\ntime.sleep(600)\n", encoding="utf-8")

    def serve(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        return start(sys.executable, str(script), *(arguments or ("serve", "some/model")), env=env)

    return serve


def unrecorded_of(process: subprocess.Popen[bytes], base: Path) -> Unrecorded | None:
    return next((one for one in look(base).unrecorded if one.pid == process.pid), None)


def reason(process: subprocess.Popen[bytes], base: Path) -> str:
    deadline = time.monotonic() + 10.0
    while (unrecorded := unrecorded_of(process, base)) is None:  # it is between fork and exec
        assert time.monotonic() < deadline
    return unrecorded.reason


def here(base: Path, **environment: str) -> dict[str, str]:
    return {"VLLM_GRAPHFIX_STATUS_DIR": str(base), **environment}
