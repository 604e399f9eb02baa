"""Which modules of the tests need stock releases of vLLM, a server or Prometheus.

These are the modules that import what fetches them.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

_TESTS = Path(__file__).parents[1]
_FETCH = frozenset({"stock", "warm_release", "server", "promtool", "other_packages", "fetch_vllm", "fetch_cpu_engine"})


@cache
def modules_that_need_releases() -> frozenset[str]:
    """Names of modules that import one of `_FETCH`, directly or by way of others of the tests."""
    folders = (_TESTS, _TESTS / "support", _TESTS / "mutants")
    imports = {path.stem: _imported(path) for folder in folders for path in folder.glob("*.py")}
    del imports["conftest"]
    needing = set(_FETCH)
    while further := {name for name, names in imports.items() if name not in needing and names & needing}:
        needing |= further
    return frozenset(needing)


def _imported(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules.add(node.module.partition(".")[0])
    return modules
