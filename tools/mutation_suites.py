"""The tests that must notice a change of a module: suites by the module's name, for `mutate.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

Stage = tuple[str, ...]
"""Arguments of pytest. The stages of a suite run one after the other, up to the first test that fails."""


class Suite(NamedTuple):
    stages: tuple[Stage, ...]
    diagnosis: Stage = ()
    """The first stage for a mutant in a function that reads vLLM's source, the last for any other."""


_SHAPES = "0.14.1 or 0.15.0 or 0.16.0 or 0.17.1 or 0.18.1 or 0.19.1 or 0.20.0 or 0.21.0 or 0.22.1 or 0.25.0 or 0.33.0"
"""Releases: one of each shape."""
_LAYERS = tuple(f"tests/test_{name}.py" for name in ("observers", "counted", "lazy_plans", "mutation_layers"))
"""Each layer alone, without a vLLM."""


def _of_fix(name: str, *releases: str, units: str = "nothing_else", more: str = "nothing_else") -> Suite:
    """Return the suite with the fix's scenarios and behaviours on *releases*, one of each shape.

    *units* and *more* are names of further tests.
    """
    module = name.replace("-", "_")
    pairs = " or ".join(f"{name}-{release}" for release in releases)
    behaviours = f"test_behaviours.py and {name} or test_{module}.py"
    scenarios = f"test_observe.py and ({pairs} or {more})"
    own = (f"tests/test_{module}.py",) if (ROOT / "tests" / f"test_{module}.py").exists() else ()
    return Suite(
        stages=(
            (*_LAYERS, "-k", f"({name} or {units}) and not sparse_flashmla"),
            ("tests/test_observe.py", "tests/test_behaviours.py", *own, "-k", f"{scenarios} or {behaviours}"),
        ),
        diagnosis=(
            "tests/test_mutation_shapes.py",
            "tests/test_diagnosis.py",
            "-k",
            f"structure_alone and ({_SHAPES}) or {name} or {more}",
        ),
    )


_OF_FUNCTIONS = Suite(
    (
        ("tests/test_syntax.py",),
        ("tests/test_source.py",),
        ("tests/test_mutation_shapes.py",),
        ("tests/test_diagnosis.py", "-k", "structure_alone and (0.18.1 or 0.33.0) or deeper"),
    )
)
CHOSEN = {
    "settings/decision.py": Suite(
        (
            ("tests/test_rollout.py", "-m", "not hypothesis", "-k", "not (every_percentage or nobody_leaves)"),
            ("tests/test_rollout.py", "-m", "hypothesis"),
            ("tests/test_rollout.py", "-k", "every_percentage or nobody_leaves"),
        )
    ),
    "patching/sites.py": Suite((("tests/test_patching.py",),)),
    "source/files.py": Suite(
        (
            ("tests/test_source.py",),
            ("tests/test_diagnosis.py", "-k", "structure_alone and (0.18.1 or 0.33.0) or deeper"),
        )
    ),
    "source/functions.py": _OF_FUNCTIONS,
    "source/patterns.py": _OF_FUNCTIONS,
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
}
"""The modules that are tested by default."""


def _of_other_fixes() -> dict[str, Suite]:
    """Return suites on the last release of each shape, by the manifest: this process imports nothing of the package."""
    suites: dict[str, Suite] = {}
    for name, entries in json.loads((ROOT / "vllm_graphfix" / "manifest.json").read_text())["fixes"].items():
        module = f"fixes/{name.replace('-', '_')}.py"
        last = {entry["shape"]: entry["releases"][-1] for entry in entries if entry["verdict"] == "affected"}
        if module not in CHOSEN:
            suites[module] = _of_fix(name, *last.values())
    return suites


SUITES = CHOSEN | _of_other_fixes()
