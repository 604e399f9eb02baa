"""Measures which full graphs vLLM's metadata builders claim, and what they make of the batches: tests/claims.json.

    python tools/measure_claims.py [RELEASE ...]

Each release is measured in a process of its own, by tests/in_vllm/claims.py. `tools/update_docs.py` writes the claims
that are not true into docs/claims.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import fetch_vllm
from fetch_vllm import ALL_RELEASES

PROJECT = Path(__file__).parent.parent
TABLE = PROJECT / "tests" / "claims.json"
Table = dict[str, dict[str, dict[str, list[str]]]]
"""By builder, deployment and what was measured: the releases."""
_CHILD = """
import json, sys
from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins
install_flashmla_stand_ins()
import claims
open(sys.argv[1], "w").write(json.dumps(claims.measured()))
"""
_COVERS = {"one token": {"UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"}}
"""Claims that a deployment needs for full graphs of its decodes; of those with drafts, the last two."""
_ENDS = "V1 and V2: the engine ends in its capture with a bare AssertionError"
_SHARED = "drafts, context parallel"
VERDICTS = {
    ("TurboQuant", "drafts"): "V1 and V2. Up to 0.20.2 the layer copies lengths from the device, which ends a capture; "
    "from 0.21.0 the graph has the lengths that the host had at the capture",
    ("FlashInfer", "drafts, context parallel, Blackwell"): "V1 and V2: the graph is one of the capture's plan, of a "
    "length that vLLM made up (FlashInfer itself was not run)",
    ("FlashInfer", "drafts, not causal, Blackwell"): "V2 0.24.0 – 0.25.1 with DFlash: nobody asks the draft's "
    "builders, and the draft's graph is one of the capture's plan. Elsewhere no draft has such a graph",
    ("TritonMLA", "drafts"): _ENDS,
    ("TritonMLA", _SHARED): _ENDS,
    ("FlashInferMLA", _SHARED): _ENDS,
    ("FlashMLA", _SHARED): f"{_ENDS}; but V2 0.17.0 – 0.20.2 builds captures as it builds steps, and its graphs hold "
    "the path of prompts (up to 0.19.1 `draft-graph-support` leaves them out)",
    ("Mamba1Attention", "drafts"): "V1 and V2, by n-gram drafts: nothing refuses them. Its layers take no drafts back, "
    "so that answers are wrong without graphs, too",
    **{
        (builder, _SHARED): "not established: up to 0.25.1 vLLM refuses ranks that share the "
        "context of such layers beside others where the prefix cache is on"
        for builder in ("Mamba1Attention", "Mamba2Attention", "ShortConvAttention", "BailingLinearAttention")
    },
    ("KpoolTail", "drafts"): "harmless: it counts, and nothing of it reads the counts in a graph",
    ("RocmOctave", "drafts"): "harmless: its path of prompts reads what changes from buffers that stay",
}
"""By builder and deployment: whether an engine gets there, and what follows. Read, not run."""


def main() -> int:
    table = read()
    for release in sys.argv[1:] or ALL_RELEASES:
        add(table, release, measured(release))
    TABLE.write_text(written(table))
    return 0


def read() -> Table:
    table: Table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    return table


def measured(release: str) -> dict[str, dict[str, str]]:
    out = PROJECT / "build" / f"claims-{release}.json"
    out.parent.mkdir(exist_ok=True)
    path = os.pathsep.join([str(fetch_vllm.release(release)), str(PROJECT / "tests" / "in_vllm")])
    environment = {"PYTHONPATH": path, "VLLM_GRAPHFIX": "off", "VLLM_LOGGING_LEVEL": "CRITICAL", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", _CHILD, str(out)], env={**os.environ, **environment}, check=True)
    truths: dict[str, dict[str, str]] = json.loads(out.read_text())
    return truths


def add(table: Table, release: str, truths: dict[str, dict[str, str]]) -> None:
    """Replace what *table* has of *release*."""
    for texts in (texts for cases in table.values() for texts in cases.values()):
        for releases in texts.values():
            if release in releases:
                releases.remove(release)
    for builder, cases in truths.items():
        for case, text in cases.items():
            releases = table.setdefault(builder, {}).setdefault(case, {}).setdefault(text, [])
            releases.append(release)
            releases.sort(key=ALL_RELEASES.index)


def written(table: Table) -> str:
    """Write a line for each builder's deployment."""
    lines = []
    for builder, cases in sorted(table.items()):
        of_builder = {case: {text: names for text, names in texts.items() if names} for case, texts in cases.items()}
        rows = [f"  {json.dumps(case)}: {json.dumps(texts)}" for case, texts in of_builder.items() if texts]
        if rows:
            lines.append(f" {json.dumps(builder)}: {{\n" + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def is_false(case: str, text: str) -> bool:
    """Tell if a builder claims full graphs of decodes that it takes for prompts."""
    claim, _, truth = text.partition(": ")
    return claim in _COVERS.get(case, {"UNIFORM_BATCH", "ALWAYS"}) and "prompts" in truth


def false_claims() -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield builder, deployment, what was measured, and releases."""
    for builder, cases in read().items():
        for case, texts in cases.items():
            yield from ((builder, case, text, releases) for text, releases in texts.items() if is_false(case, text))


def table() -> Iterator[str]:
    """Yield the rows of docs/claims.md: the claims that are not true, and not the same of a deployment with more."""
    yield "| builder | deployment | releases | the capture | who gets there (read) |"
    yield "|---|---|---|---|---|"
    false = list(false_claims())
    of_drafts = {(builder, each) for builder, case, _, releases in false if case == "drafts" for each in releases}
    rows = [
        (builder, case, _ends(text), [each for each in names if case == "drafts" or (builder, each) not in of_drafts])
        for builder, case, text, names in false
    ]
    for (builder, case, ends), same in groupby(sorted(rows), key=lambda row: row[:3]):
        releases = sorted({release for *_, each in same for release in each}, key=ALL_RELEASES.index)
        if releases:
            yield f"| {builder} | {case} | {', '.join(_spans(releases))} | {ends} | {VERDICTS[builder, case]} |"


def _ends(text: str) -> str:
    return "ends with an error" if "the capture ends" in text else "holds the path of prompts"


def _spans(releases: list[str]) -> Iterator[str]:
    """Yield consecutive releases as ``0.21.0 – 0.33.0``."""
    numbered = [(ALL_RELEASES.index(release) - place, release) for place, release in enumerate(releases)]
    for _, group in groupby(numbered, key=lambda each: each[0]):
        names = [release for _, release in group]
        yield names[0] if len(names) == 1 else f"{names[0]} – {names[-1]}"


if __name__ == "__main__":
    sys.exit(main())
