"""Python programs in forks of one process that has imported torch and the like.

Those imports take most of the start of anything in vLLM.

``python warm_python.py SOCKET`` imports, prints a line, serves, and ends with its standard input; whatever it forked
ends with it.

``python warm_python.py SOCKET program.py …`` then does what ``python program.py …`` does, with its own environment,
folder, input and outputs; so do ``-c`` and ``-m``. Nothing of vLLM and nothing of the plugin is imported before the
fork: it serves every release.

What such a program starts by `sys.executable`, or multiprocessing spawns, are ordinary processes, unless `SPAWNED` in
its environment names a program such as `executable` returns: then these are forks, too. The program inherits what is
open as it would from the shell, so that what one process hands to another arrives.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_PRELOADED = (
    "torch torch._dynamo torch._inductor.compile_fx numba networkx transformers transformers.models.auto "
    "transformers.models.auto.modeling_auto transformers.processing_utils mistral_common.protocol.instruct.request "
    "google.protobuf.descriptor_pb2 "
    "mistral_common.tokens.tokenizers.mistral opentelemetry.sdk.trace openai openai_harmony fastapi aiohttp xgrammar "
    "gguf torch.utils.cpp_extension pytest typer rich.console rich.table"
)


SELDOM = (50_000, 20, 100)
"""When garbage is collected: where syntax trees are made, it otherwise takes a third of the time."""
SPAWNED = "WARM_PYTHON"
_MOST_DESCRIPTORS = 250
"""The kernel sends 253 at once."""

IMPORTED = "WARM_IMPORTS"
"""What the server imports before it serves, where that is not `_PRELOADED`."""
_RELEASES = "WARM_RELEASES"
"""The folder of the releases, for the server alone: its forks write beside them what `import_cache` keeps."""
_SHARED = "WARM_PYTHONS"
_shared = os.environ.pop(_SHARED, "")
"""The folder of what the processes of one run of pytest share; see `shared`."""
_programs: dict[tuple[tuple[str, str], ...], tuple[str, int, contextlib.ExitStack]] = {}
"""By its environment: the program, the process that has started its server, and what ends that."""


def executable(**environment: str) -> str:
    """Return a program that takes Python's arguments, and runs in a fork of the process behind it (`end_processes`).

    For what is not about how a process starts: what the libraries read of the environment when they are imported was
    read before; *environment* is for that, and for where the libraries are.
    """
    import tempfile
    from pathlib import Path

    key = tuple(sorted(environment.items()))
    if key not in _programs:
        with contextlib.ExitStack() as started:
            if _shared:
                program = _shared_by_all(Path(_shared), environment)
            else:
                # Not pytest's folder, whose name may be longer than a socket's can be.
                scratch = Path(started.enter_context(tempfile.TemporaryDirectory(prefix="vllm-graphfix-")))
                program = scratch / "python"
                alive, held = os.pipe()
                started.callback(os.waitpid, _start(program, alive, environment), 0)
                started.callback(os.close, held)
                os.close(alive)
            _programs[key] = (str(program), os.getpid(), started.pop_all())
    return _programs[key][0]


def _start(program: Any, alive: int, environment: Mapping[str, str]) -> int:
    """The process that serves *program*, once it does, until *alive* ends."""
    import shlex

    from fetch_vllm import cache_folder
    from stock import isolated_environment

    address = f"{program}.socket"
    reading, writing = os.pipe()
    server = os.posix_spawn(
        sys.executable,
        [sys.executable, __file__, address],
        {**isolated_environment(str(program.parent)), "PYTHONPATH": "", _RELEASES: str(cache_folder()), **environment},
        file_actions=[(os.POSIX_SPAWN_DUP2, alive, 0), (os.POSIX_SPAWN_DUP2, writing, 1)],
    )
    os.close(writing)
    with os.fdopen(reading) as output:
        if output.readline() != "serving\n":
            raise RuntimeError("the warm Python has ended")
    command = shlex.join([sys.executable, "-S", __file__, address])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o755)
    return server


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """The processes that this one starts share what `executable` starts, until this context ends."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="vllm-graphfix-", ignore_cleanup_errors=True) as folder:
        os.mkfifo(f"{folder}/alive")
        held = os.open(f"{folder}/alive", os.O_RDWR)
        os.environ[_SHARED] = folder
        try:
            yield
        finally:
            del os.environ[_SHARED]
            os.close(held)


def _shared_by_all(folder: Path, environment: Mapping[str, str]) -> Path:
    """Started by whoever asks for it first; the others wait for it."""
    import hashlib

    program = folder / hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:8]
    with open(f"{program}.lock", "w") as lock:  # noqa: PTH123
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            alive = os.open(folder / "alive", os.O_RDONLY)
            _start(program, alive, environment)
            os.close(alive)
    return program


def end_processes() -> None:
    """Ends the processes that `executable` has started; in a fork of the one that did, nothing."""
    for key, (_, starter, started) in list(_programs.items()):
        if starter == os.getpid():  # in a fork, its folder would go with the last reference
            del _programs[key]
            started.close()


def call(address: str, arguments: list[str]) -> int:
    """Has *arguments* run by the server at *address*; the exit code."""
    here = os.getcwd()  # noqa: PTH109 - this side imports as little as it can
    inherited = [0, 1, 2, *_open_above(2)]
    job = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": here,
        "numbers": inherited,
        "leads": os.getsid(0) == os.getpid(),
    }
    message = json.dumps(job).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [len(message).to_bytes(8, "big")], inherited)
        server.sendall(message)
        code = server.recv(1)
    return code[0] if code else 1


def _open_above(number: int) -> list[int]:
    """The descriptors above *number* that this process has inherited; what Python opens is not to be inherited."""
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - this side imports as little as it can
    return sorted(each for each in descriptors if each > number and _is_inheritable(each))


def _is_inheritable(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:  # the one of the listing itself
        return False


def serve(address: str) -> dict[str, Any] | None:
    """Returns in each fork, with what it is to run, and in the server when there is nobody left to serve."""
    gc.disable()  # modules stay
    for name in os.environ.pop(IMPORTED, _PRELOADED).split():
        with contextlib.suppress(ImportError):  # only time would be lost
            __import__(name)
    if releases := os.environ.get(_RELEASES):
        import import_cache

        import_cache.remember(f"{releases}/imported/{sys.hexversion:x}", releases)
    gc.enable()
    gc.collect()
    gc.freeze()  # or each fork's first collection goes through, and copies, all that was imported
    gc.set_threshold(*SELDOM)
    job: dict[str, Any] | None = None
    callers: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(address)
        listener.listen(64)
        selector = held.enter_context(selectors.DefaultSelector())
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        print("serving", flush=True)  # noqa: T201 - for whoever started this
        try:
            while job is None:
                for key, _ in selector.select(timeout=0.05):
                    if key.fileobj is sys.stdin:
                        return None
                    if key.fileobj is listener:
                        caller, _ = listener.accept()
                        request = _receive(caller)
                        child = os.fork()
                        if child == 0:
                            job = request
                            caller.close()
                            break
                        for descriptor in request["descriptors"]:
                            os.close(descriptor)
                        callers[child] = caller
                        selector.register(caller, selectors.EVENT_READ, child)
                    else:  # the caller was killed
                        selector.unregister(key.fileobj)
                        _kill(key.data)
                else:
                    _tell_ends(callers, selector)
        finally:
            for child, caller in callers.items():
                caller.close()
                if job is None:
                    _kill(child)
                    os.waitpid(child, 0)
    return job


def _kill(child: int) -> None:
    """Kills it; and its group, if it leads one as its caller did, who was killed with his."""
    os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def _receive(caller: socket.socket) -> dict[str, Any]:
    length, descriptors, _, _ = socket.recv_fds(caller, 8, _MOST_DESCRIPTORS)
    with caller.makefile("rb") as stream:
        request: dict[str, Any] = json.loads(stream.read(int.from_bytes(length, "big")))
    return request | {"descriptors": descriptors}


def _tell_ends(callers: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    while callers:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        if child not in callers:  # an orphan, where this is the first process of a namespace
            continue
        with callers.pop(child) as caller, contextlib.suppress(KeyError, OSError):
            selector.unregister(caller)  # KeyError: the caller went first
            caller.sendall(bytes([os.waitstatus_to_exitcode(status) & 255]))


def run(job: dict[str, Any]) -> None:
    """Runs a program in this fork, with what a Python of its own would have."""
    import multiprocessing
    import runpy

    if job["leads"]:
        os.setsid()
    _put(job["descriptors"], job["numbers"])
    # Those of the process that was forked remember what kind of file they were on, and where in it.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as Python does it
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))  # Python reads it when it starts
    if python := os.environ.get(SPAWNED):
        sys.executable = python
        multiprocessing.set_executable(python)
    arguments = job["arguments"]
    while arguments[0] not in ("-c", "-m") and arguments[0].startswith("-"):  # what this Python was started with
        arguments = arguments[1:]
    sys.orig_argv = [sys.executable, *arguments]
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if any(os.path.exists(f"{folder}/sitecustomize.py") for folder in folders):  # noqa: PTH110
        sys.modules.pop("sitecustomize", None)
        sys.path[:0] = folders
        __import__("sitecustomize")
        del sys.path[: len(folders)]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path[:1] = ["", *folders]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(main))  # noqa: S102 - as Python does it
    elif arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        sys.path[:1] = [os.getcwd(), *folders]  # noqa: PTH109 - as Python does it
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        program, *_ = sys.argv = arguments
        sys.path[:1] = [os.path.dirname(os.path.abspath(program)), *folders]  # noqa: PTH100, PTH120 - as Python does it
        runpy.run_path(program, run_name="__main__")


def _put(descriptors: list[int], numbers: list[int]) -> None:
    """Gives *descriptors* the *numbers* that they had in the other process."""
    above = max(*descriptors, *numbers) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def ended(job: dict[str, Any]) -> int:
    """Runs a program, and what it wants done at exit; its exit code.

    To take down torch and the rest takes longer than many a program.
    """
    import atexit
    import threading

    code: object = 0
    try:
        run(job)
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201 - as Python does it
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return 120  # as Python has it
    finally:
        import import_cache

        import_cache.keep()
    return (code or 0) & 255


if __name__ == "__main__":
    address, *rest = sys.argv[1:]
    if rest:
        sys.exit(call(address, rest))
    job = serve(address)
    if job is None:
        os._exit(0)  # nothing of what it has imported needs to be taken down
    os._exit(ended(job))
