"""Runs tests on a copy of the tree, in forks of processes that have imported what takes long, for `mutate.py`."""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mutation_suites import Stage

_LIMIT = 600
"""Seconds of wall time for a mutant; its CPU time is five times that of the tests without one."""


class _SyntaxTrees:
    """Python's `ast.parse`, which takes most of a diagnosis, done once for each large text: forks find the tree."""

    def __init__(self) -> None:
        self._parse = ast.parse
        self._known: dict[Any, ast.Module] = {}
        self.missed: list[Any] = []
        ast.parse = self

    def __call__(self, source: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or len(source) < 4_000:
            return self._parse(source, *args, **kwargs)
        if source not in self._known:
            self._known[source] = self._parse(source)
            self.missed.append(source)
        return self._known[source]


_PYTEST = (
    "-x -q --assert=plain --tb=short -W ignore::SyntaxWarning -p xdist.plugin -p _hypothesis_pytestplugin "
    "--hypothesis-profile=mutation -p no:cacheprovider -p no:unraisableexception "
    "-p no:threadexception"
)


class Tests:
    """Runs suites on the copy in forks of this process, and of processes of stock releases.

    This process has nothing of the package.
    """

    def __init__(self, copy: Path) -> None:
        self.copy = copy
        sys.path[:0] = [
            str(copy),
            str(copy / "tests"),
            str(copy / "tests" / "support"),
            str(copy / "tests" / "mutants"),
            str(copy / "tools"),
        ]
        sys.dont_write_bytecode = True  # a mutant of the same size and second would be taken for the one before
        os.environ["PYTHONDONTWRITEBYTECODE"] = os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        import hypothesis
        import numpy as np
        import pytest
        import rich.console
        import wrapt

        import stock
        import warm_release

        hypothesis.settings.register_profile(
            "mutation", max_examples=25, deadline=None, derandomize=True, database=None
        )
        stock.run_in_release = warm_release.run_in_fork = self._in_warm_release
        self._pytest, self._heavy = pytest, (np, rich.console, wrapt)
        self._warm: dict[Path, Any] = {}
        self._held = contextlib.ExitStack()
        self.trees = _SyntaxTrees()
        self.cpu_limit = 300

    def __enter__(self) -> Tests:  # noqa: PYI034 - nobody derives from it
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def _start(self, releases: Iterable[Path]) -> None:
        import warm_python
        from warm_release import STAND_INS, WarmRelease, modules_with_targets

        excluded = (*modules_with_targets(), *STAND_INS)  # FlashMLA's stand-ins come before what looks for it
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_graphfix"]:
            del sys.modules[name]  # `patched` has imported it, and a fork would find it in place of the mutant
        self._held.callback(warm_python.end_processes)
        for root in releases:
            self._warm[root] = self._held.enter_context(WarmRelease(root, excluded))

    def run(self, stages: Sequence[Stage], output: Path) -> str:
        """Return ``survived``, ``killed`` or ``timed out``; pytest writes to *output*."""
        outcome = self._run(stages, output)
        while outcome == "killed" and self._wanted.exists():
            self._start([Path(self._wanted.read_text())])
            outcome = self._run(stages, output)
        if outcome == "timed out" and self._warm:  # a process of a release may be about to answer one who is not there
            self._held.close()
            self._warm.clear()
        return outcome

    def _run(self, stages: Sequence[Stage], log: Path) -> str:
        self._wanted = log.with_suffix(".release")
        self._wanted.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            code = 1
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (self.cpu_limit, self.cpu_limit))
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.chdir(self.copy)
                self.trees.missed.clear()
                code = _until_failure(stages, self._stage)
                log.with_suffix(".texts").write_bytes(pickle.dumps(self.trees.missed))
            finally:
                os._exit(code)
        return _ending(child)

    def _stage(self, stage: Stage) -> int:
        return int(self._pytest.main([*_PYTEST.split(), *stage]))

    def remember_trees(self, output: Path) -> None:
        """Parse the texts that the last run parsed, so that later forks inherit the trees."""
        for text in pickle.loads(output.with_suffix(".texts").read_bytes()):  # noqa: S301 - this program's own
            self.trees(text)
        gc.collect()
        gc.freeze()

    def _in_warm_release(
        self,
        release: str | Path,
        code: str,
        env: Mapping[str, str] | None = None,
        *,
        check: bool = True,
        timeout: float = 300,
        libraries_loaded: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Stands in place of `run_in_release` and `run_in_fork`.

        A folder of links to a release runs in a fork of that release's process.
        """
        import stock

        root = stock.release_root(release) if isinstance(release, str) else release
        of = (root / "vllm" / "__init__.py").resolve().parent.parent
        if of not in self._warm:  # who has forked this process starts it, and runs the tests again
            self._wanted.write_text(str(of))
            raise LookupError(f"no process of {of} yet")
        enter = _ENTER.format(copy=str(self.copy), stock=str(of), root=str(root))
        with tempfile.TemporaryDirectory() as scratch:
            environment = {"VLLM_GRAPHFIX_STATUS_DIR": scratch, **(env or {})}
            body = re.sub(r"^from __future__ .*$", "", textwrap.dedent(code), flags=re.MULTILINE)
            done: subprocess.CompletedProcess[str] = self._warm[of].run(enter + body, environment, timeout=timeout)
        if check and done.returncode:
            raise AssertionError(f"vLLM {release}: exit code {done.returncode}\n{done.stdout}")
        return done


_ENTER = """
import sys
sys.path.insert(0, {copy!r})
if {root!r} != {stock!r}:
    sys.path[sys.path.index({stock!r})] = {root!r}
    for module in list(sys.modules.values()):
        if module.__name__.partition(".")[0] == "vllm" and hasattr(module, "__path__"):
            module.__path__ = [folder.replace({stock!r}, {root!r}) for folder in module.__path__]
import vllm_graphfix
assert vllm_graphfix.__file__.startswith({copy!r})
"""


def _until_failure(stages: Sequence[Stage], run: Callable[[Stage], int]) -> int:
    return next((code for stage in stages if (code := run(stage))), 0)


def _ending(child: int) -> str:
    give_up = time.monotonic() + _LIMIT
    try:
        while time.monotonic() < give_up:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return {0: "survived", -signal.SIGXCPU: "timed out", -signal.SIGKILL: "timed out"}.get(code, "killed")
            time.sleep(0.005)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timed out"
