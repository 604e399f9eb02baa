"""Writes the table of cache classes in docs/shadow.md anew, from the sources of the releases that it is about.

    python tools/shadow_table.py [--check]

A class that says what a layer's cache is and that `shadow/cache_classes.py` does not know is an error: somebody has to
look at what a step writes there. With --check nothing is written. Exit code 1: the page would change; 2: such a class.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import fetch_vllm
from vllm_graphfix.shadow.cache_classes import (
    CLASSES,
    OF_A_STATE,
    OTHER_DEVICES,
    RECURRENT,
    CacheClass,
    Treatment,
    known_at,
    known_by_name,
)

RELEASES = fetch_vllm.ALL_RELEASES[fetch_vllm.ALL_RELEASES.index("0.28.0") :]
PAGE = Path(__file__).parent.parent / "docs" / "shadow.md"
_BLOCK = re.compile(r"(?<=<!-- generated: cache classes -->\n).*?(?=<!-- end -->)", re.DOTALL)
_SAYS = "def get_kv_cache_spec("
_BASE = "AttentionLayerBase"
"""vLLM's base class."""
_RECURRENT = {RECURRENT, "GatedDeltaNetAttention"}
_WORKERS = ("v1", "worker")
"""The package whose classes collect the descriptions."""
_OTHER_SPECS = {
    "KVCacheSpec": "a base",
    "AttentionSpec": "a base",
    "EncoderOnlyAttentionSpec": "an encoder's layers have no cache, and make none",
    "UniformTypeKVCacheSpecs": "vLLM puts several layers' together in it",
    "KVCacheGroupSpec": "vLLM puts several layers' together in it",
    "HiSparseHotSpec": "HiSparse's, which is refused",
    "HiSparseResidentSpec": "HiSparse's, which is refused",
}
"""Specifications that no layer makes."""


class LayerClass(NamedTuple):
    """A class of a release that describes its layers' caches."""

    place: str
    """``module.Class``, without ``vllm.``."""
    bases: tuple[str, ...]
    specs: tuple[str, ...]


def cache_classes(tree: Path) -> Iterator[LayerClass]:
    """Yield those of the vLLM in *tree*."""
    for path in sorted((tree / "vllm").rglob("*.py")):
        if "get_kv_cache_spec" not in (text := path.read_text(encoding="utf-8")) or _SAYS not in text:
            continue
        parts = path.relative_to(tree / "vllm").with_suffix("").parts
        if parts[:2] == _WORKERS:
            continue
        module = ".".join(parts)
        for node in _classes(ast.parse(text)):
            if node.name == _BASE:
                continue
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and function.name == "get_kv_cache_spec":
                    specs = re.findall(r"\b([A-Z]\w*Spec)\b", ast.unparse(function))
                    named = dict.fromkeys(spec for spec in specs if spec not in ("KVCacheSpec", "AttentionSpec"))
                    yield LayerClass(f"{module}.{node.name}", tuple(map(ast.unparse, node.bases)), tuple(named))


def _classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Yield those of a file, nested ones too, but for those that a function makes."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ClassDef):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt | ast.ExceptHandler)]


def spec_classes(tree: Path) -> set[str]:
    """Return the names of the cache specifications of the vLLM in *tree*."""
    text = (tree / "vllm/v1/kv_cache_interface.py").read_text(encoding="utf-8")
    return set(re.findall(r"^class (\w+Specs?)\b", text, re.MULTILINE))


def what_is_known(layer: LayerClass) -> CacheClass | None:
    if any(part in OTHER_DEVICES for part in layer.place.split(".")):
        return CacheClass("", Treatment.REFUSED, "another device than NVIDIA's, not examined")
    if _RECURRENT & {name.rsplit(".", 1)[-1] for name in (layer.place, *layer.bases)}:
        return OF_A_STATE
    return known_at(layer.place) or known_by_name(layer.place.rsplit(".", 1)[-1])


def table() -> list[str]:
    """Return the lines of the table. Raises LookupError with classes that were not examined."""
    by_place: dict[str, list[tuple[str, LayerClass]]] = {}
    for release in RELEASES:
        for layer in cache_classes(fetch_vllm.release(release)):
            by_place.setdefault(layer.place, []).append((release, layer))
    if unknown := [place for place, seen in by_place.items() if what_is_known(seen[-1][1]) is None]:
        raise LookupError(f"shadow/cache_classes.py does not know {', '.join(unknown)}: what does a step write there?")
    if gone := CLASSES - by_place.keys():
        raise LookupError(f"no release has {', '.join(sorted(gone))}")
    of_layers = {spec for seen in by_place.values() for _, layer in seen for spec in layer.specs}
    specs = {spec: None for release in RELEASES for spec in sorted(spec_classes(fetch_vllm.release(release)))}
    if strange := specs.keys() - of_layers - _OTHER_SPECS.keys():
        raise LookupError(f"no layer is known that makes {', '.join(sorted(strange))}")
    rows = [_row(place, seen) for place, seen in by_place.items()]
    head = ["| class | of | makes | releases | | what a step writes, or why not |", "|---|---|---|---|---|---|"]
    others = "; ".join(f"`{spec}` ({_OTHER_SPECS[spec]})" for spec in specs if spec not in of_layers)
    return [*head, *(line for _, line in sorted(rows)), "", *textwrap.wrap(f"No layer makes {others}.", 120)]


def _row(place: str, seen: list[tuple[str, LayerClass]]) -> tuple[tuple[int, str], str]:
    known = what_is_known(seen[-1][1])
    releases = [release for release, _ in seen]
    between = list(RELEASES[RELEASES.index(releases[0]) : RELEASES.index(releases[-1]) + 1])
    if known is None or releases != between:
        raise LookupError(f"{place} is not in every release from {releases[0]} to {releases[-1]}")
    span = releases[0] if len(releases) == 1 else f"{releases[0]} – {releases[-1]}"
    specs = ", ".join(f"`{spec}`" for spec in seen[-1][1].specs) or "its base's"
    line = f"| `{place}` | {known.models} | {specs} | {span} | {known.treatment.value} | {known.why} |"
    return (list(Treatment).index(known.treatment), place), line


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes the table of cache classes in docs/shadow.md anew.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something would be")
    check = parser.parse_args(arguments).check
    page = PAGE.read_text(encoding="utf-8")
    try:
        written = _BLOCK.sub(lambda _: "\n".join(table()) + "\n", page)
    except LookupError as error:
        print(error.args[0], file=sys.stderr)
        return 2
    if written != page and not check:
        PAGE.write_text(written, encoding="utf-8")
    return int(check and written != page)


if __name__ == "__main__":
    sys.exit(main())
