"""For every fix, a family of mutants of what its verdict rests on and it does not patch.

These are callers, factories, dispatch, builders, and what they call.

Which functions these are was seen: those that run in the fix's scenario near the ones that it patches or reads
(``elsewhere.json``, which this module writes:
``PYTHONPATH=tests:tests/support:tools python tests/mutants/mutants_elsewhere.py [FIX …|--missing]``). Their mutants
are made of affected releases, of those with upstream's remedy written in, of later ones that have it, and of these with
the remedy cut out.
"""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import json
import random
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from edited import changes
from fetch_vllm import ALL_RELEASES
from mutants import ELSEWHERE
from mutants_families import Base, Mutant, Step, _edits, _sound, fingerprint
from mutants_of_values import OPERATORS as OF_VALUES
from stock import release_root
from table import verdict
from trial_rows import Edit, edits_of
from vllm_graphfix.fix import Diagnosis, Verdict
from vllm_graphfix.fixes import BY_NAME, FIXES

SEEN = Path(__file__).with_name("elsewhere.json")
FIRST_SIX = tuple(fix.name for fix in FIXES[:6])
FAR = 3
"""Calls between a function and one that the fix patches or reads."""
FUNCTIONS = 16
"""The nearest of each base."""
_GENERAL = (
    "vllm/config",
    "vllm/distributed",
    "vllm/envs",
    "vllm/forward_context",
    "vllm/ir",
    "vllm/logger",
    "vllm/logging_utils",
    "vllm/multimodal",
    "vllm/platforms",
    "vllm/sampling_params",
    "vllm/third_party",
    "vllm/transformers_utils",
    "vllm/utils",
    "vllm/_",
    "vllm/model_executor/offloader",
    "vllm/compilation",
    "vllm/v1/attention/ops/flashmla",
    "vllm/lora",
    "vllm/model_executor/models",
)
"""What every part of vLLM uses: its settings, platforms, tools. Nobody would look for a defect of graphs there, and
nothing can be imported without."""


def enough(fix: str) -> int:
    """Mutants that have to be left once those that are broken without the plugin are taken away."""
    return 100 if fix in FIRST_SIX else 40


class Where(NamedTuple):
    base: Base
    twin: Base | None
    """The same release with the defect, of one that has the remedy."""


@cache
def bases(fix: str) -> tuple[Where, ...]:
    """Each direction: with the defect, and with the remedy."""
    if fix in FIRST_SIX:
        return _of_the_other_family(fix)
    edits = edits_of(fix)
    affected = [release for release in ALL_RELEASES if verdict(fix, release) == "affected"]
    found: list[Where] = []
    remedies = {
        edit.release: edit for edit in reversed(edits) if edit.verdict is Verdict.FIXED and edit.release in affected
    }
    ends = sorted(remedies, key=ALL_RELEASES.index)
    for release in dict.fromkeys([ends[-1], ends[0]]):
        defective = Base(release, "stock", remedy=_changes(remedies[release]))
        found += [
            Where(defective, None),
            Where(Base(release, "with the remedy", changes=_changes(remedies[release])), defective),
        ]
    after = ALL_RELEASES[ALL_RELEASES.index(affected[-1]) + 1 :]
    for release in [release for release in after if verdict(fix, release) == "fixed"][:1]:
        found.append(Where(Base(release, "stock"), None))
    for edit in edits:
        if edit.runs and edit.verdict is Verdict.AFFECTED and verdict(fix, edit.release) == "fixed":
            back = tuple((path, functools.partial(_as_in, edit.release, path)) for path in changes(edit))
            cut = Base(edit.release, "with the remedy cut out", changes=_changes(edit), remedy=back)
            found.append(Where(cut, None))
            found = [
                where._replace(twin=cut) if where.base.name == f"{edit.release} stock" else where for where in found
            ]
    return tuple(found)


def where_of(mutant: Mutant) -> Where:
    return next(where for where in bases(mutant.fix) if where.base == mutant.base)


def _of_the_other_family(fix: str) -> tuple[Where, ...]:
    """What mutants of the functions themselves are made of.

    These are the first and the last release with the defect, and one that never had it.
    """
    module = importlib.import_module(f"mutants_of_{fix.replace('-', '_')}")
    named = {base.name: base for base in vars(module).values() if isinstance(base, Base)}
    in_order = sorted(named.values(), key=lambda base: ALL_RELEASES.index(base.release))
    defective = [base for base in in_order if base.remedy]
    found = []
    for base in dict.fromkeys([defective[-1], defective[0]]):
        remedied = Base(base.release, f"{base.kind}, with the remedy", (*base.changes, *base.remedy), (), base.words)
        found += [Where(base, None), Where(remedied, base)]
    return (*found, *(Where(base, None) for base in in_order[-1:0:-1] if not base.remedy))


def _changes(edit: Edit) -> tuple[tuple[str, Any], ...]:
    return tuple(changes(edit).items())


def _as_in(release: str, path: str, _: str) -> str:
    return (release_root(release) / path).read_text()


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def seen() -> dict[str, dict[str, list[tuple[str, str, int]]]]:
    """For each fix and base, the functions that run near those that the fix patches or reads.

    Each is a path, a name, and the number of calls between.
    """
    found: dict[str, dict[str, list[tuple[str, str, int]]]] = json.loads(SEEN.read_text())
    return found


@cache
def elsewhere(fix: str, release: str | None = None) -> tuple[Mutant, ...]:
    """Mutants of all bases, or of those of one release, no two with the same trees."""
    here = [where.base for where in bases(fix) if where.base.name in seen()[fix]]
    each = -(-(enough(fix) * 5 // 4) // len(here))
    found: dict[str, Mutant] = {}
    for base in here:
        if release in (None, base.release):
            new = (mutant for mutant in _of_base(fix, base) if _sound(mutant) and identity(mutant) not in found)
            found |= {identity(mutant): mutant for mutant in itertools.islice(new, each)}
    return tuple(found.values())


def identity(mutant: Mutant) -> str:
    """Its trees, and what is done to calls of its function, which may be elsewhere."""
    return fingerprint(mutant) + "".join(step.kind for step in mutant.steps if step.kind.startswith("called"))


def _of_base(fix: str, base: Base) -> Iterator[Mutant]:
    """One of each kind, then another one of each, and each kind of all functions in turn.

    Every other one is of what functions take and give: of the kinds that may cure a defect elsewhere, or bring it back.
    """
    functions = seen()[fix][base.name]
    paths = tuple(dict.fromkeys(path for path, _, _ in functions))
    waiting = []
    for kind in ELSEWHERE:
        chance = random.Random(f"{fix} {base.name} {kind}")  # noqa: S311 - to choose the same again
        order = sorted(functions, key=lambda function: (function[2] > 1, chance.random()))
        steps = [_steps(base, path, name, kind, chance) for path, name, _ in order]
        waiting.append((kind, _in_turn(steps)))
    chance = random.Random(f"{fix} {base.name}")  # noqa: S311 - to choose the same again
    chance.shuffle(waiting)
    of_values = _in_turn([steps for kind, steps in waiting if kind in OF_VALUES])
    of_the_rest = _in_turn([steps for kind, steps in waiting if kind not in OF_VALUES])
    for step in _in_turn([of_values, of_the_rest]):
        name = f"{step.path.removeprefix('vllm/')} {step.qualname}: {step.kind}: {step.label}"
        yield Mutant(fix, base, paths, (step,), name=name, kind=step.kind)


def _in_turn(each: list[Iterator[Step]]) -> Iterator[Step]:
    """The first of each, then the second; none is asked for before its turn, since that takes a while."""
    waiting = deque(each)
    while waiting:
        with suppress(StopIteration):
            yield next(waiting[0])
            waiting.append(waiting[0])
        waiting.popleft()


def _steps(base: Base, path: str, name: str, kind: str, chance: random.Random) -> Iterator[Step]:
    try:
        labels = list(_edits(base, path, name, kind, False))
    except (LookupError, AssertionError, AttributeError, TypeError, ValueError):
        return
    chance.shuffle(labels)
    yield from (Step(path, name, kind, label) for label in labels)


def near(
    fix: str, where: Where, shape: str, calls: list[Any], read: set[tuple[str, str]]
) -> list[tuple[str, str, int]]:
    """Functions that the calls lead to and from, but for those that the fix patches; the nearest first."""
    targets = {(patch.module.replace(".", "/") + ".py", patch.name) for patch in BY_NAME[fix].patches(shape)}
    bare = {name for _, name in targets if "." not in name}
    edges = {(tuple(one) if one else None, tuple(other)) for one, other in calls}
    nodes = {node for edge in edges for node in edge if node}
    patched = {node for node in nodes if node in targets or node[1] in bare}
    distance = dict.fromkeys((patched | read) & nodes, 0)
    around = set(distance)
    for far in range(1, FAR + 1):
        around = {
            node
            for pair in edges
            if None not in pair and set(pair) & around
            for node in pair
            if node and node not in distance
        }
        distance |= dict.fromkeys(around, far)
    chosen = [
        (path, name, far)
        for (path, name), far in distance.items()
        if (path, name) not in patched and not path.startswith(_GENERAL) and _is_function(where.base, path, name)
    ]
    # Of a base whose defective functions are not called by others: whatever else runs in its modules.
    own = {path for path, _ in patched | read}
    chosen += [
        (path, name, FAR + 1) for path, name in nodes
        if (path, name) not in distance and path in own and _is_function(where.base, path, name)
    ]  # fmt: skip
    return sorted(chosen, key=lambda each: (each[2], each[0], each[1]))[:FUNCTIONS]


def _is_function(base: Base, path: str, name: str) -> bool:
    from mutants_families import _find, _parsed

    try:
        node, _ = _find(_parsed(base, path, False), name)
    except (LookupError, AssertionError):
        return False
    decorated = {ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in node.decorator_list}
    return not decorated & {"property", "jit", "overload", "contextmanager", "abstractmethod", "cached_property"}


def look(names: list[str]) -> Iterator[tuple[str, Where, list[tuple[str, str, int]]]]:
    """What is near, of each base in which the scenario shows the defect, or the remedy; release by release."""
    from mutants_judged import NOT_YET, Stage, is_right, source_of
    from vllm_graphfix import manifest

    wheres = [(name, where) for name in names for where in bases(name)]
    for release in dict.fromkeys(where.base.release for _, where in wheres):
        here = [(name, where) for name, where in wheres if where.base.release == release]
        with tempfile.TemporaryDirectory(prefix="vllm-graphfix-") as folder:
            paths = {path for _, where in here for path, _ in where.base.changes}
            without = (*NOT_YET, *map(module_of, paths))
            with Stage(release, Path(folder) / "vllm", paths).warm(without) as stage:
                for name, where in here:
                    mutant = Mutant(name, where.base, ())
                    run = stage.run(name, mutant.files(), mutant.renamed(), on=False, traced=True)
                    judged, evidence = manifest.examine(BY_NAME[name], source_of(mutant))
                    read = {tuple(each.split("::")) for each in evidence}
                    shape = judged.shape if judged.verdict is Verdict.AFFECTED else shape_of(name, where)
                    right = is_right(run)
                    told = (
                        f"{judged.verdict.value}, {'right' if right else 'wrong'} "
                        f"{run.get('raised') or run.get('error') or ''}"
                    )
                    if judged.verdict is (Verdict.FIXED if right else Verdict.AFFECTED) and "raised" not in run:
                        found = near(name, where, shape, run["calls"], read)  # type: ignore[arg-type]
                        told += f", {len(found)} functions"
                        yield name, where, found
                    print(f"{name} {where.base.name}: {told}", flush=True)  # noqa: T201 - a tool's output


def shape_of(fix: str, where: Where) -> str:
    """What the diagnosis calls the defect there, or in the last release that has it."""
    twin = where.twin or next(each.base for each in bases(fix) if each.base.remedy)
    return diagnosis_of(fix, twin).shape


@cache
def diagnosis_of(fix: str, base: Base) -> Diagnosis:
    from mutants_judged import diagnosed

    return diagnosed(Mutant(fix, base, ()))


def main() -> None:
    kept: dict[str, Any] = json.loads(SEEN.read_text()) if SEEN.exists() else {}
    names = sys.argv[1:] or [fix.name for fix in FIXES]
    if names == ["--missing"]:
        names = [fix.name for fix in FIXES if fix.name not in kept]
    kept |= {name: {} for name in names}
    for name, where, found in look(names):
        kept[name][where.base.name] = found
    ordered = {
        fix.name: {
            where.base.name: kept[fix.name][where.base.name]
            for where in bases(fix.name)
            if where.base.name in kept[fix.name]
        }
        for fix in FIXES
        if fix.name in kept
    }
    SEEN.write_text(json.dumps(ordered, indent=1).replace("\n     ", " ").replace("\n    ]", " ]") + "\n")


if __name__ == "__main__":
    main()
