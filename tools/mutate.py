"""Mutation testing: one operator, comparison, number or keyword of a module is changed at a time, and tests must notice.

In a copy of the tree. cosmic-ray makes the mutants; here they are filtered, and tested in forks of processes that have imported what takes
long. The results are kept in ``build/mutation/`` for ``cr-report`` and ``cr-html``; what was stopped goes on where it was, and what
survived is tested again.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import difflib
import functools
import gc
import hashlib
import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "mutation"
_LIMIT = 600
"""Seconds by the clock of a mutant; of CPU it gets five times what the tests take without one."""

Stage = tuple[str, ...]
"""Arguments of pytest. The stages of a suite run one after the other, up to the first test that fails."""


class Suite(NamedTuple):
    stages: tuple[Stage, ...]
    diagnosis: Stage = ()
    """The first stage for a mutant in a function that reads vLLM's source, the last for any other."""
    releases: tuple[str, ...] = ()
    """On which the stages run vLLM."""


_SHAPES = "0.14.1 or 0.15.0 or 0.16.0 or 0.17.1 or 0.18.1 or 0.19.1 or 0.20.0 or 0.21.0 or 0.22.1 or 0.25.0 or 0.33.0"
"""Releases: one of each shape."""
_LAYERS = tuple(f"tests/test_{name}.py" for name in ("observers", "counted", "lazy_plans", "mutation_layers"))
"""Each layer alone, without a vLLM."""


def _of_fix(name: str, *releases: str, units: str = "nothing_else", more: str = "nothing_else") -> Suite:
    """With the fix's scenarios and behaviours on *releases*, one of each shape; *units* and *more* are names of further tests."""
    module = name.replace("-", "_")
    pairs = " or ".join(f"{name}-{release}" for release in releases)
    behaviours = (
        " or ".join(releases) if name in {"mamba-padding", "flashmla-fp8", "flashmla-padding"} else f"test_{module}.py"
    )
    scenarios = f"test_observe.py and ({pairs} or {more})"
    own = (f"tests/test_{module}.py",) if (ROOT / "tests" / f"test_{module}.py").exists() else ()
    return Suite(
        stages=(
            (*_LAYERS, "-k", f"({name} or {units} or every_target) and not sparse_flashmla"),
            ("tests/test_observe.py", *own, "-k", f"{scenarios} or test_{module}.py and ({behaviours})"),
        ),
        diagnosis=("tests/test_mutation_shapes.py", "tests/test_diagnosis.py", "-k", f"structure_alone and ({_SHAPES}) or {name} or {more}"),
        releases=(*releases, *(("0.20.0",) if name == "draft-decode-mode" else ())),
    )  # fmt: skip


CHOSEN = {
    "rollout.py": Suite(
        (
            ("tests/test_rollout.py", "-m", "not hypothesis", "-k", "not (every_percentage or nobody_leaves)"),
            ("tests/test_rollout.py", "-m", "hypothesis"),
            ("tests/test_rollout.py", "-k", "every_percentage or nobody_leaves"),
        )
    ),
    "patching.py": Suite((("tests/test_patching.py",),)),
    "source.py": Suite((("tests/test_source.py",), ("tests/test_diagnosis.py", "-k", "structure_alone and (0.18.1 or 0.33.0) or deeper"))),
    "syntax.py": Suite((("tests/test_syntax.py",), ("tests/test_source.py",), ("tests/test_mutation_shapes.py",), ("tests/test_diagnosis.py", "-k", "structure_alone and (0.18.1 or 0.33.0) or deeper"))),
    "fixes/mamba_padding.py": _of_fix("mamba-padding", "0.21.0", units="marks_on_the_device"),
    "fixes/flashmla_padding.py": _of_fix("flashmla-padding", "0.19.1", units="nothing_is_read"),
    "fixes/flashmla_fp8.py": _of_fix("flashmla-fp8", "0.18.1", units="plans_are_told"),
    "fixes/draft_prefill_state.py": _of_fix("draft-prefill-state", "0.21.0", "0.22.1"),
    "fixes/draft_decode_mode.py": _of_fix(
        "draft-decode-mode", "0.17.1", units="draft_decodes_are_counted or old_indices", more="nightlies"
    ),
    "fixes/capture_state.py": _of_fix(
        "capture-state", "0.16.0", "0.17.1", "0.18.1", "0.21.0", units="watched_factory or plan"
    ),
}  # fmt: skip
"""What is run if no module is named."""


def _of_other_fixes() -> dict[str, Suite]:
    """On the last release of each of their shapes. From the manifest, since this process has nothing of the package."""
    found: dict[str, Suite] = {}
    for name, entries in json.loads((ROOT / "vllm_graphfix" / "manifest.json").read_text())["fixes"].items():
        module = f"fixes/{name.replace('-', '_')}.py"
        last = {entry["shape"]: entry["releases"][-1] for entry in entries if entry["verdict"] == "affected"}
        if module not in CHOSEN:
            found[module] = _of_fix(name, *last.values())
    return found


SUITES = CHOSEN | _of_other_fixes()


# Which mutants there are

_REPLACED = {
    "Comparison": "Eq_NotEq Eq_LtE Eq_GtE NotEq_Eq NotEq_Lt NotEq_Gt Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Is_IsNot IsNot_Is",
    "Binary": "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_Mul Pow_Mul BitOr_BitAnd BitAnd_BitOr BitXor_BitOr LShift_RShift RShift_LShift",
}
"""Each comparison is negated and its bounds are moved. cosmic-ray makes seven of one, and eleven of a binary operator, most of which are the
same for these operands (``is`` and ``==``), or raise TypeError (``<`` of two functions)."""
_CHOSEN = re.compile(
    "core/(?!Replace(?:Comparison|Binary)Operator_)|"
    + "|".join(f"core/Replace{kind}Operator_{pair}$" for kind, pairs in _REPLACED.items() for pair in pairs.split())
)


class _Behaviour(ast.NodeTransformer):
    """Takes out what has none: annotations, imports for them, the number of the pull request in a fix's record, and what tries it, below."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        ends = (
            at
            for at, each in enumerate(node.body, 1)
            if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "FIX"
        )
        node.body = node.body[: next(ends, len(node.body))]
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        node.annotation = ast.Constant(None)
        return node

    def visit_If(self, node: ast.If) -> ast.AST | None:
        self.generic_visit(node)
        return None if "TYPE_CHECKING" in ast.unparse(node.test) else node

    def visit_keyword(self, node: ast.keyword) -> ast.AST | None:
        self.generic_visit(node)
        return None if node.arg == "pr" else node


@functools.lru_cache(maxsize=1)
def _unchanged(code: str) -> str:
    return _behaviour(code)


def _behaviour(code: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of what an operator made of a comparison
        compile(code, "mutant", "exec")
        return ast.dump(_Behaviour().visit(ast.parse(code)))


def _filtered(code: str, changed: str | None) -> str | None:
    """Why a mutant is not tested, or None."""
    try:
        behaviour = _behaviour(changed or "")
    except (SyntaxError, ValueError):
        return "no Python"
    return "no behaviour" if behaviour == _unchanged(code) else None


def _mutant(code: str, mutation: Any) -> str | None:
    import cosmic_ray.plugins
    from cosmic_ray.mutating import mutate_code

    try:
        made: str | None = mutate_code(
            code, cosmic_ray.plugins.get_operator(mutation.operator_name)(), mutation.occurrence
        )
    except AttributeError:  # cosmic-ray 8.7 replaces no exception that is written with a dot
        return None
    return made


def _fill(session: Any, module: Path) -> None:
    from cosmic_ray.commands.init import init
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    init([module], session, {})
    others = [item.job_id for item in session.work_items if not _CHOSEN.match(item.mutations[0].operator_name)]
    session.set_multiple_results(others, WorkResult(WorkerOutcome.SKIPPED, "not chosen"))


# How one is tested


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
    "-x -q --assert=plain --tb=short -W ignore::SyntaxWarning -p xdist.plugin -p _hypothesis_pytestplugin --hypothesis-profile=mutation -p no:cacheprovider -p no:unraisableexception "
    "-p no:threadexception"
)


class Tests:
    """Runs suites on the copy in forks of this process, which has nothing of the package, and of processes of stock releases."""

    def __init__(self, copy: Path) -> None:
        self.copy = copy
        sys.path[:0] = [str(copy), str(copy / "tests"), str(copy / "tools")]
        sys.dont_write_bytecode = True  # a mutant of the same size and second would be taken for the one before
        os.environ["PYTHONDONTWRITEBYTECODE"] = os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        import hypothesis
        import numpy as np
        import pytest
        import rich.console
        import stock
        import wrapt

        hypothesis.settings.register_profile(
            "mutation", max_examples=25, deadline=None, derandomize=True, database=None
        )
        stock.run_in_release = self._in_warm_release
        self._pytest, self._heavy = pytest, (np, rich.console, wrapt)
        self._warm: dict[Path, Any] = {}
        self._held = contextlib.ExitStack()
        self.trees = _SyntaxTrees()
        self.cpu_limit = 300

    def __enter__(self) -> Tests:  # noqa: PYI034 - nobody derives from it
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def start(self, releases: Sequence[str]) -> None:
        import stock
        from warm_release import STAND_INS, WarmRelease, patched

        left_out = (*patched(), *STAND_INS)  # FlashMLA's stand-ins come before what looks for it
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_graphfix"]:
            del sys.modules[name]  # `patched` has imported it, and a fork would find it in place of the mutant
        for release in releases:
            root = stock.release_root(release).resolve()
            if root not in self._warm:
                warm = WarmRelease(root, left_out)
                self._warm[root] = self._held.enter_context(warm)

    def run(self, stages: Sequence[Stage], told: Path, releases: Sequence[str] = ()) -> str:
        """``survived``, ``killed`` or ``timed out``; what pytest says is in *told*."""
        outcome = self._run(stages, told)
        if outcome == "timed out" and self._warm:  # a process of a release may be about to answer one who is not there
            self._held.close()
            self._warm.clear()
            self.start(releases)
        return outcome

    def _run(self, stages: Sequence[Stage], told: Path) -> str:
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            code = 1
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (self.cpu_limit, self.cpu_limit))
                output = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.chdir(self.copy)
                self.trees.missed.clear()
                code = _until_failure(stages, self._stage)
                told.with_suffix(".texts").write_bytes(pickle.dumps(self.trees.missed))
            finally:
                os._exit(code)
        return _ending(child)

    def _stage(self, stage: Stage) -> int:
        return int(self._pytest.main([*_PYTEST.split(), *stage]))

    def remember_trees(self, told: Path) -> None:
        """Parses what the last run had to parse."""
        for text in pickle.loads(told.with_suffix(".texts").read_bytes()):  # noqa: S301 - this program's own
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
    ) -> subprocess.CompletedProcess[str]:
        """In place of `run_in_release`. A folder of links to a release runs in a fork of that release's process."""
        import stock

        root = stock.release_root(release) if isinstance(release, str) else release
        of = (root / "vllm" / "__init__.py").resolve().parent.parent
        enter = _ENTER.format(copy=str(self.copy), stock=str(of), root=str(root))
        with tempfile.TemporaryDirectory() as scratch:
            environment = {"VLLM_GRAPHFIX_STATUS_DIR": scratch, **(env or {})}
            body = re.sub(r"^from __future__ .*$", "", textwrap.dedent(code), flags=re.MULTILINE)
            done: subprocess.CompletedProcess[str] = self._warm[of].run(enter + body, environment)
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


def _reads_source(code: str, line: int) -> bool:
    """Whether the function at *line* takes vLLM's source, and so is a part of a diagnosis."""
    return any(
        isinstance(node, ast.FunctionDef)
        and node.lineno <= line <= (node.end_lineno or 0)
        and node.args.args[:1]
        and node.args.args[0].arg == "source"
        for node in ast.parse(code).body
    )


def _test(session: Any, name: str, tests: Tests, told: Path, limit: int | None) -> None:
    """What has no result yet, or has survived; with a *limit* of 0 mutants are filtered only."""
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

    path, suite = tests.copy / "vllm_graphfix" / name, SUITES[name]
    code = path.read_text()
    survived = {item.job_id for item, result in session.completed_work_items if not result.is_killed}
    todo = [item for item in session.work_items if item.job_id in survived] + list(session.pending_work_items)
    for number, item in enumerate(todo[: limit or None], 1):
        mutation = item.mutations[0]
        stages = [*suite.stages, suite.diagnosis] if suite.diagnosis else list(suite.stages)
        if suite.diagnosis and _reads_source(code, mutation.start_pos[0]):
            stages.insert(0, stages.pop())
        changed = _mutant(code, mutation) or ""
        filtered = _filtered(code, changed) if changed else "not made"
        if filtered is not None:
            session.set_result(item.job_id, WorkResult(WorkerOutcome.SKIPPED, filtered))
            continue
        if limit == 0:
            continue
        try:
            path.write_text(changed)
            outcome = tests.run(stages, told, suite.releases)
        finally:
            path.write_text(code)
        killed = TestOutcome.SURVIVED if outcome == "survived" else TestOutcome.KILLED
        diff = "\n".join(_changed_lines(code, changed))
        session.set_result(
            item.job_id, WorkResult(WorkerOutcome.NORMAL, outcome + "\n" + told.read_text()[-2000:], killed, diff)
        )
        if outcome != "killed" or number % 20 == 0:
            print(f"{name} {number}/{len(todo)} {outcome} {_shown(item)} {diff!r}"[:230], flush=True)


def _changed_lines(before: str, after: str) -> Iterator[str]:
    for line in difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""):
        if line[:1] in "+-" and line[:3] not in {"+++", "---"}:
            yield line


def _shown(item: Any) -> str:
    mutation = item.mutations[0]
    return f"line {mutation.start_pos[0]}, {mutation.operator_name.partition('/')[2]}"


_FILTERED = ("not chosen", "no behaviour", "no Python", "not made")


def _report(name: str, session: Any) -> tuple[str, list[str]]:
    """A row of a table, and the mutants that survived."""
    from cosmic_ray.work_item import WorkerOutcome

    results = list(session.results)
    counts = Counter((result.output or "").partition("\n")[0] for _, result in results)
    tested = [(job, result) for job, result in results if result.worker_outcome is WorkerOutcome.NORMAL]
    alive = {job: result for job, result in tested if not result.is_killed}
    share = f"{100 * (len(tested) - len(alive)) / len(tested):.0f} %" if tested else ""
    numbers = [session.num_work_items, *(counts[reason] for reason in _FILTERED), len(tested)]
    numbers += [counts["killed"], counts["timed out"], len(alive), share, len(list(session.pending_work_items))]
    diffs = [f"{name} {_shown(item)}\n{alive[item.job_id].diff}" for item in session.work_items if item.job_id in alive]
    return f"| `{name}` | {' | '.join(map(str, numbers))} |", sorted(diffs)


def _copied(destination: Path) -> Path:
    """The files of the tree that git has or would take, compiled."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607 - make needs it on the PATH too
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, destination / name)
    compileall.compile_dir(destination, quiet=2)
    return destination


def _session(name: str, code: str) -> Path:
    digest = hashlib.sha256(code.encode()).hexdigest()[:8]
    return RESULTS / f"{Path(name).stem}-{digest}.sqlite"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=list(CHOSEN), metavar="MODULE", help=", ".join(SUITES))
    parser.add_argument("--count", action="store_true", help="only say how many mutants there are")
    parser.add_argument("--limit", type=int, help="test so many of a module at most")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.modules if name not in SUITES]:
        parser.error(
            f"no tests are known for {', '.join(unknown)}; name modules as in `fixes/mamba_padding.py`. A new fix has to be in the manifest: run `make manifest`"
        )
    from cosmic_ray.work_db import use_db

    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vllm-graphfix-mutation-") as scratch:
        copy = _copied(Path(scratch) / "copy")
        told = Path(scratch) / "told"
        with Tests(copy) as tests:
            rows, survivors = list[str](), list[str]()
            for name in arguments.modules:
                module = copy / "vllm_graphfix" / name
                with use_db(_session(name, module.read_text())) as session:
                    if not session.num_work_items:
                        _fill(session, module)
                    if not arguments.count:
                        _prove(name, tests, told)
                    _test(session, name, tests, told, 0 if arguments.count else arguments.limit)
                    row, alive = _report(name, session)
                    rows.append(row)
                    survivors += alive
                    print(row, flush=True)
    columns = [
        "module",
        "made",
        *_FILTERED,
        "tested",
        "killed",
        "timed out",
        "survived",
        "killed of tested",
        "not tested yet",
    ]
    head = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    (RESULTS / "report.md").write_text("\n".join([*head, *rows, "", *(f"```\n{each}\n```" for each in survivors), ""]))
    print("\n".join([*survivors, *head, *rows]))


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _prove(name: str, tests: Tests, told: Path) -> None:
    """The suite passes on the code as it is, and fails on code that cannot be imported: it is this copy that is tested."""
    suite, module = SUITES[name], tests.copy / "vllm_graphfix" / name
    for cached in module.parent.glob(f"__pycache__/{module.stem}.*"):
        cached.unlink()
    tests.start(suite.releases)
    stages = [stage for stage in (suite.diagnosis, *suite.stages) if stage]
    began = time.monotonic()
    tests.cpu_limit = 300
    if tests.run(stages, told) != "survived":
        sys.exit(f"{name}: a test fails without a mutant\n{told.read_text()[-3000:]}")
    tests.remember_trees(told)
    before = _cpu_of_children()
    tests.run(stages, told)
    tests.cpu_limit = 3 + round(5 * (_cpu_of_children() - before))
    code = module.read_text()
    for stage in stages:
        try:
            module.write_text("raise RuntimeError('planted')\n")
            if tests.run([stage], told) != "killed":
                sys.exit(f"{name}: {' '.join(stage)} does not import the copy")
        finally:
            module.write_text(code)
    print(
        f"{name}: the suite passes; it takes {time.monotonic() - began:.0f} s, and {tests.cpu_limit} s of CPU at most",
        flush=True,
    )


if __name__ == "__main__":
    main()
