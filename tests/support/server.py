"""Real servers for tests: `vllm serve` of an affected release on a CPU, with the plugin installed as a package."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import fetch_cpu_engine
import warm_python
from engine import UNCOMPILED, environment, forking_python, write_llama
from other_packages import run_pip

RELEASE = fetch_cpu_engine.AFFECTED
MODEL = "tiny"
"""The name that a server serves its model under."""

NOBODY = "0" * 16
"""An engine's id that none has: of files which are no records."""

_PROJECT = Path(__file__).parents[2]
_LIMIT = 1200.0
"""Seconds for a server to start, answer or end; alone on two cores it takes 20 to start, at a load of 17 over 300."""
_FLAGS = "--host=127.0.0.1 --enforce-eager --max-model-len=256 --max-num-seqs=4 --num-gpu-blocks-override=64".split()


class ServerError(RuntimeError):
    """A server did not start, or did not answer; the message has its log."""


class Installed(NamedTuple):
    """Files that all servers of a session share; see `install`."""

    plugin: Path
    """Where the plugin is installed as a package, and nothing else."""
    model: Path
    scratch: Path
    """What vLLM finds out about models is kept there: the first server takes 5 seconds longer."""


@cache
def cpu_release() -> Path:
    """The folder to put on the Python path; fetched if it is missing, and an error, never a skip, if that fails."""
    return fetch_cpu_engine.engine(version=RELEASE)


def install(folder: Path) -> Installed:
    """Builds a wheel of this tree, from a copy of it, and installs it with pip below *folder*."""
    copy, plugin = folder / "tree", folder / "plugin"
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(_PROJECT, copy, ignore=unwanted)
    alone = ["--no-deps", "--no-index"]
    run_pip("install", *alone, "--no-build-isolation", "--target", str(plugin), str(copy))
    return Installed(plugin, write_llama(folder), folder)


class Answer(NamedTuple):
    """The exit code and report of `vllm-graphfix fleet --json`."""

    code: int
    report: dict[str, Any]

    @property
    def engine(self) -> dict[str, Any]:
        """The only engine."""
        (engine,) = self.report["engines"]
        assert isinstance(engine, dict)
        return engine

    @property
    def without_record(self) -> dict[int, str]:
        """Processes of vLLM without a record, and why; those of other tests are among them."""
        return {one["pid"]: one["reason"] for one in self.report["unrecorded"]}


class Server:
    """One `vllm serve`; made by `serve`."""

    def __init__(
        self, installed: Installed, folder: Path, flags: Sequence[str], env: Mapping[str, str], *, forks: bool
    ) -> None:
        self.status_folder = folder / "status"
        self.status_folder.mkdir(exist_ok=True)
        self._log = folder / "server.log"
        # Sockets of vLLM lie in the temporary folder, and their names are at most 107 characters long.
        self._temporary = tempfile.mkdtemp(prefix="graphfix-")
        self._environment = {
            **environment(installed.scratch, installed.plugin, cpu_release()),
            "TMPDIR": self._temporary,
            **UNCOMPILED,
            "VLLM_GRAPHFIX_STATUS_DIR": str(self.status_folder),
            **env,
        }
        del self._environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        python, around = sys.executable, self._environment
        if forks:
            python, _ = forking_python(environment(installed.scratch, cpu_release()) | UNCOMPILED)
            around = around | {warm_python.SPAWNED: python}
        self._folder_of_forks = folder if forks else None
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(installed.model)]
        command += [f"--served-model-name={MODEL}", f"--port={self.port}", *_FLAGS, *flags]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=around,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._shared: set[Path] = set()
        self._serving = next((int(flag.split("=")[1]) for flag in flags if flag.startswith("--api-server-count=")), 1)

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_until_up(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Returns when all of its API servers answer; raises ServerError if it ends before, or takes too long.

        Until then *meanwhile* is called again and again.
        """
        until = time.monotonic() + _LIMIT
        while self.log.count("Application startup complete") < self._serving:
            if self._process.poll() is not None:
                raise ServerError(f"the server ended with {self._process.returncode}:\n{self.log[-8000:]}")
            if time.monotonic() > until:
                raise ServerError(f"the server was not up after {_LIMIT:.0f} s:\n{self.log[-8000:]}")
            meanwhile()
            time.sleep(0.1)
        self._get("/health")
        self._shared = self._shared_memory()

    def completions(self, prompt: str | list[int], tokens: int = 8) -> str:
        """The text that follows *prompt*, greedily."""
        request = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        text = json.loads(self._get("/v1/completions", json.dumps(request).encode()))["choices"][0]["text"]
        assert isinstance(text, str)
        return text

    def metrics(self) -> str:
        """Return the text of /metrics."""
        return self._get("/metrics").decode()

    def metrics_of_each(self) -> dict[str, str]:
        """Return /metrics of each API server, by its name in the log; whichever is faster takes a connection."""
        texts: dict[str, str] = {}
        for _ in range(200):
            with self._connected() as connection:
                text = self._ask(connection, "/metrics").decode()
                here = connection.sock.getsockname()[1]
            access = re.compile(rf'^\((\w+) pid=\d+\) .*:{here} - "GET /metrics', re.MULTILINE)
            until = time.monotonic() + 10
            while not (name := access.search(self.log)) and time.monotonic() < until:
                time.sleep(0.02)
            if not name:
                raise ServerError(f"the log does not say who answered:\n{self.log[-8000:]}")
            texts[name[1]] = text
            if len(texts) == self._serving:
                return texts
        raise ServerError(f"only {', '.join(texts)} answered")

    def _get(self, path: str, data: bytes | None = None) -> bytes:
        with self._connected() as connection:
            return self._ask(connection, path, data)

    def _connected(self) -> contextlib.closing[HTTPConnection]:
        return contextlib.closing(HTTPConnection("127.0.0.1", self.port, timeout=_LIMIT))

    def _ask(self, connection: HTTPConnection, path: str, data: bytes | None = None) -> bytes:
        try:
            connection.request("POST" if data else "GET", path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, HTTPException) as error:
            raise ServerError(f"{path}: {error!r}\n{self.log[-8000:]}") from error
        if answer.status != 200:
            raise ServerError(f"{path}: {answer.status} {body.decode(errors='replace')}\n{self.log[-8000:]}")
        return body

    def fleet(self, *arguments: str) -> Answer:
        """`vllm-graphfix fleet --json` with the environment of this server, now."""
        command = [sys.executable, "-m", "vllm_graphfix", "fleet", "--json", *arguments]
        done = subprocess.run(
            command, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert done.stdout, f"exit code {done.returncode}\n{done.stderr}"
        return Answer(done.returncode, json.loads(done.stdout))

    def records(self) -> list[dict[str, Any]]:
        """The status records of this user's processes, as they lie in the folder.

        What a test put there, of `NOBODY`, is not among them.
        """
        folder = self.status_folder / f"vllm-graphfix-{os.getuid()}"
        files = sorted(path for path in folder.glob("[!.]*.json") if not path.name.startswith(NOBODY))
        return [json.loads(path.read_bytes()) for path in files]

    def pids(self) -> dict[int, str]:
        """Its processes, with what each calls itself: ``VLLM::EngineCore``, or its command line."""
        titles = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z" and self._has(entry):
                        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                        titles[int(entry.name)] = command.decode(errors="replace").strip()
        return titles

    def _has(self, entry: Path) -> bool:
        """Of forks only the folder that they were started in is its own: their session is the warm Python's."""
        if self._folder_of_forks:
            return (entry / "cwd").samefile(self._folder_of_forks)
        return int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == self.pid

    def named(self, title: str) -> list[int]:
        """The processes whose title begins with *title*."""
        return sorted(pid for pid, each in self.pids().items() if each.startswith(title))

    def kill_engine(self) -> int:
        """Kills the engine core as the kernel would, out of memory.

        Returns its pid when all of the server has ended.
        """
        (core,) = self.named("VLLM::EngineCore")
        os.kill(core, signal.SIGKILL)
        self._process.wait(_LIMIT)
        self._wait_until_gone(_LIMIT)
        return core

    def stop(self) -> int:
        """Ends it as a supervisor does; returns the exit code."""
        front_end = self.pid
        if self._folder_of_forks:  # it is not the one that waits for the fork
            (front_end,) = (record["pid"] for record in self.records() if record["role"] == "front-end")
        os.kill(front_end, signal.SIGTERM)
        code = self._process.wait(_LIMIT)
        self._wait_until_gone(_LIMIT)
        return code

    def end(self) -> None:
        """Leaves no process and no file in /tmp or /dev/shm, whatever state it is in."""
        for pid, title in self.pids().items():
            if "resource_tracker" not in title:  # which removes shared memory when all others are gone
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._wait_until_gone(10)  # it does so within a second
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        shutil.rmtree(self._temporary, ignore_errors=True)
        for path in self._shared:
            path.unlink(missing_ok=True)

    def _shared_memory(self) -> set[Path]:
        """Its files there: ranks on a CPU share some that vLLM leaves behind however it ends."""
        files: set[Path] = set()
        for pid in {*self.pids(), *(record["pid"] for record in self.records())}:
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
                names = re.findall(r"/dev/shm/[^\n]+?(?= \(deleted\)$|$)", maps, re.MULTILINE)  # noqa: S108 # the kernel's name
                files |= {Path(name) for name in names}
        return files

    def _wait_until_gone(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.pids() and time.monotonic() < until:
            time.sleep(0.1)


@contextlib.contextmanager
def started(
    installed: Installed, folder: Path, *flags: str, env: Mapping[str, str] | None = None, forks: bool = False
) -> Iterator[Server]:
    """A server that starts; with further *flags* and *env*.

    Its files are in *folder*; its processes end with the block. *forks*: its processes are forks of one that has
    imported torch and the like, and start in a third of the time; beside each is one that waits for it.
    """
    server = Server(installed, folder, flags, env or {}, forks=forks)
    try:
        yield server
    finally:
        server.end()


@contextlib.contextmanager
def serve(
    installed: Installed, folder: Path, *flags: str, env: Mapping[str, str] | None = None, forks: bool = False
) -> Iterator[Server]:
    """The same when it answers."""
    with started(installed, folder, *flags, env=env, forks=forks) as server:
        server.wait_until_up()
        yield server
