"""Functions that run near those that a fix patches or reads: callers, factories, dispatch, builders, their callees.

They were seen, while the fix's scenario ran on each base (``near.json``, which this module writes:
``PYTHONPATH=tests:tests/support:tools python tests/mutants/mutants_near.py [FIX …|--missing]``).
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mutants_bases import Where, bases, shape_of, where_of
from mutants_made import Base, Mutant, find, parsed
from vllm_graphfix import manifest
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes import BY_NAME, FIXES

SEEN = Path(__file__).with_name("near.json")
FAR = 3
"""Calls between a function and one that the fix patches or reads."""
FUNCTIONS = 16
"""The nearest of each base."""
_GENERAL = (
    "vllm/config",
    "vllm/distributed",
    "vllm/env_override",
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
_OF_ANOTHER_KIND = {"property", "overload", "contextmanager", "abstractmethod", "cached_property"}


@cache
def seen() -> dict[str, dict[str, list[tuple[str, str, int]]]]:
    """For each fix and base, the functions that run near those that the fix patches or reads.

    Each is a path, a name, and the number of calls between.
    """
    recorded: dict[str, dict[str, list[tuple[str, str, int]]]] = json.loads(SEEN.read_text())
    return recorded


@cache
def patched(fix: str, base: Base) -> tuple[tuple[str, str], ...]:
    """The functions of *base* that the fix patches there, or would if it had the defect, as paths and names."""
    return tuple(patched_of(fix, shape_of(fix, where_of(Mutant(fix, base)))))


@cache
def own(fix: str, base: Base) -> tuple[tuple[str, str], ...]:
    """These, and those that the diagnosis reads."""
    from mutants_judged import source_of

    _, evidence = manifest.examine(BY_NAME[fix], source_of(Mutant(fix, base)))
    read = [place.split("::") for place in evidence.functions]
    functions = dict.fromkeys([*patched(fix, base), *((path, name) for path, name in read)])
    return tuple((path, name) for path, name in functions if is_function(base, path, name))


def patched_of(fix: str, shape: str) -> list[tuple[str, str]]:
    return [(patch.module.replace(".", "/") + ".py", patch.name) for patch in BY_NAME[fix].patches(shape)]


def is_function(base: Base, path: str, name: str, others: frozenset[str] = frozenset()) -> bool:
    """Return whether it can be mutated: it is there, and no decorator makes it something else."""
    try:
        node, _ = find(parsed(base, path, False), name)
    except (LookupError, AssertionError):
        return False
    decorated = {ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in node.decorator_list}
    return not decorated & (_OF_ANOTHER_KIND | others)


def near(
    fix: str, where: Where, shape: str, calls: list[Any], read: set[tuple[str, str]]
) -> list[tuple[str, str, int]]:
    """Functions that the calls lead to and from, but for those that the fix patches; the nearest first."""
    targets = set(patched_of(fix, shape))
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
        if (path, name) not in patched and not path.startswith(_GENERAL) and _runs_as_python(where.base, path, name)
    ]
    # Of a base whose defective functions are not called by others: whatever else runs in its modules.
    own = {path for path, _ in patched | read}
    chosen += [
        (path, name, FAR + 1) for path, name in nodes
        if (path, name) not in distance and path in own and _runs_as_python(where.base, path, name)
    ]  # fmt: skip
    return sorted(chosen, key=lambda each: (each[2], each[0], each[1]))[:FUNCTIONS]


def _runs_as_python(base: Base, path: str, name: str) -> bool:
    return is_function(base, path, name, frozenset({"jit"}))


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def look(names: list[str]) -> Iterator[tuple[str, Where, list[tuple[str, str, int]]]]:
    """Yield the functions near, for each base in which the scenario shows defect or remedy, release by release."""
    from mutants_judged import NOT_YET, Stage, is_right, source_of

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
                    read = {tuple(each.split("::")) for each in evidence.functions}
                    shape = judged.shape if judged.verdict is Verdict.AFFECTED else shape_of(name, where)
                    right = is_right(run)
                    message = (
                        f"{judged.verdict.value}, {'right' if right else 'wrong'} "
                        f"{run.get('raised') or run.get('error') or ''}"
                    )
                    if judged.verdict is (Verdict.FIXED if right else Verdict.AFFECTED) and "raised" not in run:
                        functions = near(name, where, shape, run["calls"], read)  # type: ignore[arg-type]
                        message += f", {len(functions)} functions"
                        yield name, where, functions
                    print(f"{name} {where.base.name}: {message}", flush=True)  # noqa: T201 - a tool's output


def main() -> None:
    recorded: dict[str, Any] = json.loads(SEEN.read_text()) if SEEN.exists() else {}
    names = sys.argv[1:] or [fix.name for fix in FIXES]
    if names == ["--missing"]:
        names = [fix.name for fix in FIXES if fix.name not in recorded]
    recorded |= {name: {} for name in names}
    for name, where, functions in look(names):
        recorded[name][where.base.name] = functions
    ordered = {
        fix.name: {
            where.base.name: recorded[fix.name][where.base.name]
            for where in bases(fix.name)
            if where.base.name in recorded[fix.name]
        }
        for fix in FIXES
        if fix.name in recorded
    }
    SEEN.write_text(json.dumps(ordered, indent=1).replace("\n     ", " ").replace("\n    ]", " ]") + "\n")


if __name__ == "__main__":
    main()
