"""The layers that `benchmarks/hot_path.py` measures: each runs on its release, and says whose it is."""

from __future__ import annotations

import ast
import json
import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

import benchmarked  # noqa: F401 - puts the benchmarks on the path
import layers
from vllm_graphfix.fixes import BY_NAME
from warm_release import run_in_fork

LAYERS = [module.name for module in iter_modules(layers.__path__)]
_CODE = """
import json, sys
sys.path += {path!r}
from layers import {layer}
print(json.dumps([label for label, *_ in {layer}.measure(2)]))
"""


@pytest.mark.parametrize(("release", "layer"), [(import_module(f"layers.{each}").RELEASE, each) for each in LAYERS])
def test_a_layer_is_measured_in_one_batch_or_several_and_named_after_its_fix(release: str, layer: str) -> None:
    project = Path(__file__).parents[1]
    path = [str(project / folder) for folder in ("benchmarks", "tools")]
    done = run_in_fork(release, _CODE.format(path=path, layer=layer), timeout=120)
    labels = json.loads(done.stdout.splitlines()[-1])
    assert labels
    assert {label.partition(",")[0] for label in labels} <= BY_NAME.keys()


def test_each_fix_with_figures_of_a_decode_step_has_a_layer() -> None:
    project = Path(__file__).parents[1]
    section = (project / "docs/performance.md").read_text().split("## A decode step\n")[1].split("\n## ")[0]
    named = set(re.findall(r"^\| `([a-z0-9-]+)`", section, re.MULTILINE))
    texts = [text for layer in LAYERS for text in _texts(project / f"benchmarks/layers/{layer}.py")]
    assert "adaptive-schedule" in named
    assert {name for name in named if not any(text.startswith(f"{name}, ") for text in texts)} == set()


def _texts(module: Path) -> list[str]:
    """The strings in its code, of an f-string its parts; docstrings, which are statements, are not among them."""
    nodes = list(ast.walk(ast.parse(module.read_text())))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and node not in docstrings]
    return [node.value for node in constants if isinstance(node.value, str)]
