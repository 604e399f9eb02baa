"""Mutation testing: one operator, comparison, number or keyword of a module is changed at a time; tests must notice.

In a copy of the tree. cosmic-ray makes the mutants; here they are filtered, and tested in forks of processes that have
imported what takes long. The results are kept in ``build/mutation/`` for ``cr-report`` and ``cr-html``; what was
stopped goes on where it was, and what survived is tested again.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import difflib
import functools
import hashlib
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mutation_suites import CHOSEN, ROOT, SUITES
from mutation_tests import Tests

RESULTS = ROOT / "build" / "mutation"

_REPLACED = {
    "Comparison": (
        "Eq_NotEq Eq_LtE Eq_GtE NotEq_Eq NotEq_Lt NotEq_Gt Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt "
        "GtE_Lt Is_IsNot IsNot_Is"
    ),
    "Binary": (
        "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_Mul Pow_Mul BitOr_BitAnd BitAnd_BitOr BitXor_BitOr "
        "LShift_RShift RShift_LShift"
    ),
}
"""Each comparison is negated and its bounds are moved. cosmic-ray makes seven of one, and eleven of a binary operator,
most of which are the same for these operands (``is`` and ``==``), or raise TypeError (``<`` of two functions)."""
_CHOSEN = re.compile(
    "core/(?!Replace(?:Comparison|Binary)Operator_)|"
    + "|".join(f"core/Replace{kind}Operator_{pair}$" for kind, pairs in _REPLACED.items() for pair in pairs.split())
)


class _Behaviour(ast.NodeTransformer):
    """Takes out what has no behaviour.

    These are annotations, imports for them, and what follows a fix's record.
    """

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


@functools.lru_cache(maxsize=1)
def _unchanged(code: str) -> str:
    return _behaviour(code)


def _behaviour(code: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of what an operator made of a comparison
        compile(code, "mutant", "exec")
        return ast.dump(_Behaviour().visit(ast.parse(code)))


def _filtered(code: str, changed: str | None) -> str | None:
    """Return the reason not to test a mutant, or None."""
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


def _reads_source(code: str, line: int) -> bool:
    """Return whether the function at *line* takes vLLM's source, and so is part of a diagnosis."""
    return any(
        isinstance(node, ast.FunctionDef)
        and node.lineno <= line <= (node.end_lineno or 0)
        and node.args.args[:1]
        and node.args.args[0].arg == "source"
        for node in ast.parse(code).body
    )


def _test(session: Any, name: str, tests: Tests, output: Path, limit: int | None) -> None:
    """Test mutants without a result, or that survived; with a *limit* of 0 only filter them."""
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
            outcome = tests.run(stages, output)
        finally:
            path.write_text(code)
        killed = TestOutcome.SURVIVED if outcome == "survived" else TestOutcome.KILLED
        diff = "\n".join(_changed_lines(code, changed))
        session.set_result(
            item.job_id, WorkResult(WorkerOutcome.NORMAL, outcome + "\n" + output.read_text()[-2000:], killed, diff)
        )
        if outcome != "killed" or number % 20 == 0:
            print(f"{name} {number}/{len(todo)} {outcome} {_place(item)} {diff!r}"[:230], flush=True)


def _changed_lines(before: str, after: str) -> Iterator[str]:
    for line in difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""):
        if line[:1] in "+-" and line[:3] not in {"+++", "---"}:
            yield line


def _place(item: Any) -> str:
    mutation = item.mutations[0]
    return f"line {mutation.start_pos[0]}, {mutation.operator_name.partition('/')[2]}"


_FILTERED = ("not chosen", "no behaviour", "no Python", "not made")


def _report(name: str, session: Any) -> tuple[str, list[str]]:
    """Return a row of a table, and the mutants that survived."""
    from cosmic_ray.work_item import WorkerOutcome

    results = list(session.results)
    counts = Counter((result.output or "").partition("\n")[0] for _, result in results)
    tested = [(job, result) for job, result in results if result.worker_outcome is WorkerOutcome.NORMAL]
    alive = {job: result for job, result in tested if not result.is_killed}
    share = f"{100 * (len(tested) - len(alive)) / len(tested):.0f} %" if tested else ""
    numbers = [session.num_work_items, *(counts[reason] for reason in _FILTERED), len(tested)]
    numbers += [counts["killed"], counts["timed out"], len(alive), share, len(list(session.pending_work_items))]
    diffs = [f"{name} {_place(item)}\n{alive[item.job_id].diff}" for item in session.work_items if item.job_id in alive]
    return f"| `{name}` | {' | '.join(map(str, numbers))} |", sorted(diffs)


def _copied(destination: Path) -> Path:
    """Copy the files of the tree that git has or would add, and compile them."""
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
            f"no tests are known for {', '.join(unknown)}; name modules as in `fixes/mamba_padding.py`. A new "
            "fix has to be in the manifest: run `make manifest`"
        )
    from cosmic_ray.work_db import use_db

    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vllm-graphfix-mutation-") as scratch:
        copy = _copied(Path(scratch) / "copy")
        output = Path(scratch) / "told"
        with Tests(copy) as tests:
            rows, survivors = list[str](), list[str]()
            for name in arguments.modules:
                module = copy / "vllm_graphfix" / name
                with use_db(_session(name, module.read_text())) as session:
                    if not session.num_work_items:
                        _fill(session, module)
                    if not arguments.count:
                        _prove(name, tests, output)
                    _test(session, name, tests, output, 0 if arguments.count else arguments.limit)
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


def _prove(name: str, tests: Tests, output: Path) -> None:
    """Check that the suite passes on the code, and fails if it cannot be imported: that it tests this copy."""
    suite, module = SUITES[name], tests.copy / "vllm_graphfix" / name
    for cached in module.parent.glob(f"__pycache__/{module.stem}.*"):
        cached.unlink()
    stages = [stage for stage in (suite.diagnosis, *suite.stages) if stage]
    began = time.monotonic()
    tests.cpu_limit = 300
    if tests.run(stages, output) != "survived":
        sys.exit(f"{name}: a test fails without a mutant\n{output.read_text()[-3000:]}")
    tests.remember_trees(output)
    before = _cpu_of_children()
    tests.run(stages, output)
    tests.cpu_limit = 3 + round(5 * (_cpu_of_children() - before))
    code = module.read_text()
    for stage in stages:
        try:
            module.write_text("raise RuntimeError('planted')\n")
            if tests.run([stage], output) != "killed":
                sys.exit(f"{name}: {' '.join(stage)} does not import the copy")
        finally:
            module.write_text(code)
    print(
        f"{name}: the suite passes; it takes {time.monotonic() - began:.0f} s, and {tests.cpu_limit} s of CPU at most",
        flush=True,
    )


if __name__ == "__main__":
    main()
