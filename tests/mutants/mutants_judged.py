"""Mutants run and judged, in forks of a warm process.

Each runs with the plugin, as stock, and with upstream's correction in its place.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from edited import link, stock_source
from mutants_bases import shape_of, where_of
from mutants_made import Base, Mutant
from mutants_near import module_of
from stock import release_root
from vllm_graphfix import manifest
from vllm_graphfix.fix import Diagnosis, Verdict, variable
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.source.files import Source
from vllm_graphfix.verify.proof import differing
from warm_release import STAND_INS, WarmRelease, modules_with_targets

WORKER = Path(__file__).with_name("mutant_worker.py").read_text()
NOT_YET = (
    *modules_with_targets(),
    "vllm.v1.attention.ops.flashmla",  # the scenarios put stand-ins in front of it
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu.spec_decode.autoregressive",
    "vllm.v1.worker.gpu.spec_decode.autoregressive.cudagraph_utils",
)

# What a mutant comes to.
RIGHT = "right"
AS_STOCK = "left as stock"
BROKEN = "broken in itself"
WRONG = "applied wrongly"
MISSED = "missed"
UNTOUCHED = "left alone"
NEEDLESS = "right, and stock is too"
CLAIMED = "called known, and decides otherwise"


class Judged(NamedTuple):
    mutant: Mutant
    diagnosis: Diagnosis
    outcome: str
    why: str = ""
    stock_is_right: bool | None = None
    """Without the plugin; None where that was not asked for, or it is broken in itself."""

    def __str__(self) -> str:
        return f"{self.outcome} | {self.diagnosis.verdict.value} {self.diagnosis.shape} | {self.mutant} | {self.why}"


@cache
def _stock_bytes(release: str, path: str) -> bytes | None:
    file = release_root(release) / path
    return file.read_bytes() if file.is_file() else None


def diagnosed(mutant: Mutant) -> Diagnosis:
    return manifest.diagnose(BY_NAME[mutant.fix], source_of(mutant))


def source_of(mutant: Mutant) -> Source:
    files = {path: text.encode() for path, text in mutant.files().items()}

    def read(path: str) -> bytes | None:
        return files[path] if path in files else _stock_bytes(mutant.base.release, path)

    return _Mutated(mutant.base.release, files, read)


class _Mutated(Source):
    """Parses no file of a release twice."""

    def __init__(self, release: str, files: dict[str, bytes], read: Callable[[str], bytes | None]) -> None:
        self._release, self._files = release, files
        sizes = stock_source(release_root(release)).sizes
        changed = {path: len(content) for path, content in files.items()}
        super().__init__("mutant", read, lambda: None, list_sizes=lambda: sizes | changed)

    def _parse(self, path: str) -> ast.Module | None:
        return super()._parse(path) if path in self._files else _stock_tree(self._release, path)


@cache
def _stock_tree(release: str, path: str) -> ast.Module | None:
    content = _stock_bytes(release, path)
    return None if content is None else ast.parse(content)


class Stage:
    """A release whose mutated files are files of its own, in front of a warm process that has not imported them."""

    def __init__(self, release: str, folder: Path, paths: Iterable[str]) -> None:
        self.release, self._folder, self._paths = release, folder, set(paths)
        self._own: set[Path] = set()
        self._written = int.from_bytes(os.urandom(3), "big")
        link(release_root(release).resolve(), folder, {Path(path).parts for path in self._paths})
        self._put({})

    def _put(self, files: dict[str, str]) -> None:
        for file in self._own:
            file.unlink()
        self._own = set()
        for path in sorted(self._paths | files.keys()):
            file, stock = self._folder / path, release_root(self.release) / path
            # A file that nobody said would be mutated is a link, or below one.
            if path not in self._paths or not file.parent.resolve().is_relative_to(self._folder.resolve()):
                raise RuntimeError(f"{path} would be written into the stock release")
            if path in files:
                file.parent.mkdir(exist_ok=True)
                file.write_text(files[path])
                self._written += 1
                os.utime(file, (self._written, self._written))  # or Python takes bytecode of the last one for its own
            elif stock.is_file():
                file.symlink_to(stock.resolve())
            else:
                continue
            self._own.add(file)

    @contextmanager
    def warm(self, without: Iterable[str] = NOT_YET) -> Iterator[Stage]:
        previous = os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each fork would compile all of its files
        try:
            with WarmRelease(self._folder, without=without, like=self.release) as self._warm:
                yield self
        finally:
            if previous is not None:
                os.environ["PYTHONDONTWRITEBYTECODE"] = previous

    def run(
        self,
        fix: str,
        files: dict[str, str],
        renamed: dict[str, str],
        *,
        on: bool,
        shape: str | None = None,
        traced: bool = False,
    ) -> dict[str, Any]:
        self._put(files)
        env = {"VLLM_GRAPHFIX": "on" if on else "off", variable(fix): "auto", "TQDM_DISABLE": "1"}
        done = self._warm.run(f"{WORKER}\nmain({fix!r}, {renamed!r}, {shape!r}, {traced!r})\n", env, timeout=120)
        return _answer(done, (done.stdout.strip().splitlines() or [""])[-1])

    def run_both(
        self, fix: str, files: dict[str, str], renamed: dict[str, str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The runs as stock, and patched."""
        self._put(files)
        env = {variable(fix): "auto", "TQDM_DISABLE": "1"}
        done = self._warm.run(f"{WORKER}\nmain_both({fix!r}, {renamed!r})\n", env, timeout=120)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        stock, patched = (_answer(done, line) for line in (lines if len(lines) == 2 else [done.stdout[-300:]] * 2))
        return stock, patched


def _answer(done: subprocess.CompletedProcess[str], line: str) -> dict[str, Any]:
    if done.returncode or not line.startswith("{"):
        return {"raised": f"exit code {done.returncode}: {line[-300:]}", "state": "", "reason": "", "fallback": None}
    answer: dict[str, Any] = json.loads(line)
    return answer


def is_right(run: dict[str, Any], eager: Any = None) -> bool:
    """Return whether the graphs gave what eager gives."""
    if "raised" in run or run["error"] or not run["eager"]:
        return False
    return not differing(tuple(run["eager"] if eager is None else eager), tuple(run["graphed"]))


class Judge:
    """Judges mutants of one release."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._bases: dict[tuple[str, str], dict[str, Any]] = {}

    def _run(self, mutant: Mutant, *, on: bool, remedied: bool = False, shape: str | None = None) -> dict[str, Any]:
        files = mutant.files(remedied=remedied)
        return self._stage.run(mutant.fix, files, mutant.renamed(), on=on, shape=shape)

    def _base(self, mutant: Mutant, base: Base) -> dict[str, Any]:
        """Return the run of *base* as it is, without a fix."""
        key = (mutant.fix, base.name)
        if key not in self._bases:
            run = self._bases[key] = self._run(Mutant(mutant.fix, base, mutant.paths), on=False)
            if "raised" in run or not run["eager"]:
                raise RuntimeError(f"{mutant.fix} on {base.name} as it is: {_summary(run)}")
        return self._bases[key]

    def stock_is_right(self, mutant: Mutant) -> bool | None:
        """Return whether *mutant* is right without the plugin; None where it is broken in itself."""
        stock = self._run(mutant, on=False)
        return None if "raised" in stock or not stock["eager"] else is_right(stock)

    def judge(self, mutant: Mutant, diagnosis: Diagnosis) -> Judged:
        if diagnosis.verdict is Verdict.UNRECOGNISED:
            return Judged(mutant, diagnosis, UNTOUCHED)
        outcome, why = self._applied(mutant) if diagnosis.verdict is Verdict.AFFECTED else self._not_applied(mutant)
        return Judged(mutant, diagnosis, CLAIMED if diagnosis.known and outcome == NEEDLESS else outcome, why)

    def _applied(self, mutant: Mutant) -> tuple[str, str]:
        stock, patched = self._stage.run_both(mutant.fix, mutant.files(), mutant.renamed())
        changes = f"{_summary(stock)} -> {_summary(patched)}"
        fails = stock.get("error") and not self._base(mutant, mutant.base)["error"]
        if "raised" in stock or not stock["eager"] or (fails and patched.get("error") == stock["error"]):
            return BROKEN, _summary(stock)
        if patched["state"] != "active" or patched["fallback"] is not None:
            summary = f"{patched['state']}: {patched['reason']}, fallback: {patched['fallback']}; {changes}"
            return (AS_STOCK if _no_worse(stock, patched) else WRONG), summary
        if is_right(patched, stock["eager"]):
            return (NEEDLESS if is_right(stock) else RIGHT), changes
        if is_right(stock):
            remedied = self._remedied(mutant) if "raised" in patched else None
            if remedied is not None and "raised" in remedied:
                return BROKEN, f"{changes}; with upstream's correction {_summary(remedied)}"
            return WRONG, changes
        if is_right(patched) and not differing(self._base(mutant, mutant.base)["eager"], patched["eager"]):
            return RIGHT, f"what the base gives without graphs; {changes}"
        return self._both_wrong(mutant, patched, changes)

    def _both_wrong(self, mutant: Mutant, patched: dict[str, Any], changes: str) -> tuple[str, str]:
        """Upstream's correction in the same mutant decides whether that could be right."""
        remedied = self._remedied(mutant)
        if remedied is None:
            return WRONG, f"{changes}; nothing to compare with"
        if is_right(remedied):
            return WRONG, f"{changes}; with upstream's correction right"
        if "raised" not in patched and not patched["error"] and _result(remedied) == _result(patched):
            return RIGHT, f"{changes}; the same as with upstream's correction, there is another defect"
        return BROKEN, f"{changes}; with upstream's correction {_summary(remedied)}"

    def _remedied(self, mutant: Mutant) -> dict[str, Any] | None:
        """None where upstream's correction has no place."""
        try:
            return self._run(mutant, on=False, remedied=True) if mutant.base.remedy else None
        except LookupError:
            return None

    def _not_applied(self, mutant: Mutant) -> tuple[str, str]:
        stock = self._run(mutant, on=True)
        if stock["state"] != "not-needed":
            return WRONG, _summary(stock) if "raised" in stock else f"{stock['state']}: {stock['reason']}"
        if is_right(stock):
            return RIGHT, ""
        if "raised" in stock or not stock["eager"]:
            return BROKEN, _summary(stock)
        where = where_of(mutant)
        defective = mutant.base if mutant.base.remedy else where.twin
        if defective is not None and _result(self._base(mutant, defective)) == _result(stock):
            return MISSED, f"{_summary(stock)}, the same as without the remedy"
        if is_right(self._run(mutant, on=True, shape=shape_of(mutant.fix, where))):
            return MISSED, f"{_summary(stock)}; right with the fix"
        remedied = self._remedied(mutant)
        if remedied is not None and is_right(remedied):
            return MISSED, f"{_summary(stock)}; right with upstream's correction"
        return BROKEN, f"another defect: {_summary(stock)}"


def _result(run: dict[str, Any]) -> str:
    return json.dumps([run.get("raised"), run.get("eager"), run.get("graphed"), run.get("error")])


def _no_worse(stock: dict[str, Any], patched: dict[str, Any]) -> bool:
    if _result(stock) == _result(patched):
        return True
    if "raised" in stock or "raised" in patched or patched["error"] or differing(stock["eager"], patched["eager"]):
        return False
    return differing(patched["eager"], patched["graphed"]) <= differing(stock["eager"], stock["graphed"])


def _summary(run: dict[str, Any]) -> str:
    if "raised" in run:
        return f"raised {run['raised']}"[:200]
    if run["error"]:
        return f"error {run['error']}"[:200]
    return f"{differing(tuple(run['eager']), tuple(run['graphed']))} of {len(run['eager'])} differ"


def judged(
    mutants: Iterable[tuple[Mutant, Diagnosis]], *, together: bool = False, as_stock: bool = False
) -> Iterator[Judged]:
    """Judges release by release and fix by fix: only what these mutants are about is not imported before.

    Few mutants of several fixes are judged *together*. *as_stock*: each also runs without the plugin, those that the
    plugin leaves alone included.
    """
    groups: dict[tuple[str, str], list[tuple[Mutant, Diagnosis]]] = {}
    for mutant, diagnosis in mutants:
        groups.setdefault((mutant.base.release, "" if together else mutant.fix), []).append((mutant, diagnosis))
    for (release, _), some in sorted(groups.items(), key=lambda group: group[0]):
        to_run = [pair for pair in some if as_stock or pair[1].verdict is not Verdict.UNRECOGNISED]
        yield from (Judged(*pair, UNTOUCHED) for pair in some if pair not in to_run)
        if not to_run:
            continue
        with tempfile.TemporaryDirectory(prefix="vllm-graphfix-") as folder:
            bases = {base for mutant, _ in to_run for base in (mutant.base, where_of(mutant).twin) if base}
            paths = {path for mutant, _ in to_run for path in (*mutant.paths, *dict((*mutant.by_hand, *mutant.moved)))}
            paths |= {path for base in bases for path, _ in (*base.changes, *base.remedy)}
            patched = {module for mutant, _ in to_run for module in BY_NAME[mutant.fix].modules}
            without = (*sorted(patched), *map(module_of, sorted(paths)), *STAND_INS)
            with Stage(release, Path(folder) / "vllm", paths).warm(without) as stage:
                judge = Judge(stage)
                for pair in to_run:
                    outcome = judge.judge(*pair)
                    yield outcome._replace(stock_is_right=judge.stock_is_right(pair[0])) if as_stock else outcome
