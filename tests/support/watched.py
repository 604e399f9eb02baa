"""Runs a function in a forked process of its own.

It tells what the function asked the system for, and whether it kept to a limit of time and memory.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from typer.testing import CliRunner

import vllm_graphfix
from vllm_graphfix.commands.cli import app

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {
    f"os.{name}" for name in "mkdir rename remove rmdir link symlink truncate chmod chown utime setxattr".split()
} | {"shutil.rmtree", "shutil.move", "tempfile.mkstemp", "tempfile.mkdtemp"}
_RUNS = {f"os.{name}" for name in "system exec fork forkpty posix_spawn spawn".split()} | {
    "subprocess.Popen",
    "socket.connect",
    "socket.bind",
    "socket.getaddrinfo",
    "ctypes.dlopen",
    "import",
    "pickle.find_class",
}
_LOOKS = {"os.scandir", "os.listdir"}


class Watched(NamedTuple):
    """The value and the effects of a call."""

    value: Any
    changes: tuple[str, ...]
    """Files opened for writing, folders made, names changed: each with its audit event."""
    runs: tuple[str, ...]
    """Programs, modules that are neither Python's nor ours, and sockets: each with its audit event."""
    looks: int
    """Folders listed and files opened."""
    grown: int
    """Bytes of memory at the peak, over those before the call."""


def watched(function: Callable[[], Any], *, seconds: int = 30, memory: int = 512 << 20) -> Watched:
    """Calls *function* in a forked process.

    Raises AssertionError if it raises, needs more CPU time or wall time or grows by more bytes than that.
    """
    _import_all()
    # What is free but not given back counts as used before the call: the call could grow into it unseen.
    if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc
        malloc_trim(0)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later, in a process with threads
        pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(function, writer, seconds, memory)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert os.WIFEXITED(status), f"killed by signal {os.WTERMSIG(status)}; the limits were {seconds} s, {memory} bytes"
    result = pickle.loads(data)
    assert isinstance(result, Watched), result
    assert result.grown <= memory, f"grew by {result.grown >> 20} MiB, of which {memory >> 20} are allowed"
    return result


@functools.cache
def _import_all() -> None:
    """Import what the commands import late: once here, and not in every child."""
    with tempfile.TemporaryDirectory() as empty:
        for arguments in (["explain"], ["fleet", "--dir", empty], ["status", "--vllm", empty]):
            CliRunner().invoke(app, arguments)


def _child(function: Callable[[], Any], writer: int, seconds: int, memory: int) -> NoReturn:
    """Ends the process. The time limits end it by a signal, which no `except` of what is called can hide."""
    result: object
    try:
        for number in (signal.SIGALRM, signal.SIGXCPU):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(4 * seconds)  # others use this machine too
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        # Somewhat more than is allowed: MemoryError is caught by who is called, the peak is not hidden by that.
        mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + 2 * memory, mapped + 2 * memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.dont_write_bytecode = True
        before = _peak()
        changes: list[str] = []
        runs: list[str] = []
        looks = [0]
        on = [True]

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if not on[0]:
                return
            if event == "open":
                path, mode, flags = arguments
                looks[0] += 1
                if path != os.devnull and ((mode and set(str(mode)) & set("wax+")) or flags & _WRITES):
                    changes.append(f"{event} {path}")
            elif event in _CHANGES:
                changes.append(f"{event} {arguments[:2]}")
            elif event in _LOOKS:
                looks[0] += 1
            elif event in _RUNS and (
                event != "import"
                or arguments[0].partition(".")[0] not in {*sys.stdlib_module_names, vllm_graphfix.__name__}
            ):
                runs.append(f"{event} {arguments[0]}")

        sys.addaudithook(audit)
        value = function()
        on[0] = False
        result = Watched(value, tuple(changes), tuple(runs), looks[0], _peak() - before)
    except BaseException as error:
        result = f"{type(error).__name__}: {error}"
    data = pickle.dumps(result)
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(data)
    os._exit(0)


def _peak() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii").partition("VmHWM:")[2]
    return int(status.split()[0]) * 1024


class Answer(NamedTuple):
    """The answer of a command."""

    code: int
    out: str
    err: str


def answer(*arguments: str, env: Mapping[str, str] | None = None) -> Answer:
    """The answer of `vllm-graphfix`, called in this process.

    Raises AssertionError if it ends in a traceback, or in an error that is not one printable line.
    """
    done = CliRunner().invoke(app, list(arguments), env=env or {})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise AssertionError(f"{arguments}: {type(done.exception).__name__}: {done.exception}") from done.exception
    assert done.exit_code in (0, 1, 2, 3, 4), done.exit_code
    if done.exit_code == 2:
        assert done.stdout == ""
        line = done.stderr.removesuffix("\n")
        assert line.startswith("vllm-graphfix: "), done.stderr
        assert line.isprintable(), ascii(line)
        assert len(line) < 10_000, f"{len(line)} characters"
    else:
        assert done.stderr == "", done.stderr
        assert done.stdout.replace("\n", "").isprintable(), ascii(done.stdout)
    return Answer(done.exit_code, done.stdout, done.stderr)


def judged(path: Path | str, *, seconds: int = 10, memory: int = 128 << 20) -> Watched:
    """`status --vllm`; it must answer in one of the known ways, and change and run nothing."""
    seen = watched(lambda: answer("status", f"--vllm={path}", "--check"), seconds=seconds, memory=memory)
    assert seen.value.code in (0, 2, 3, 4)
    assert (seen.changes, seen.runs) == ((), ())
    return seen
