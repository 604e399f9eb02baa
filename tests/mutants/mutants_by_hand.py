"""What upstream might write, by hand: corrections in several wordings, and what looks like one and is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mutants_families import Base, Mutant

if TYPE_CHECKING:
    from edited import Change

SPEC_DECODE = "vllm/v1/worker/gpu/spec_decode"
FIRST_EAGLE = f"{SPEC_DECODE}/eagle_cudagraph.py"
EAGLE = f"{SPEC_DECODE}/eagle/cudagraph.py"
SPECULATOR = f"{SPEC_DECODE}/eagle/speculator.py"
PREFILL = f"{SPEC_DECODE}/autoregressive/cudagraph_utils.py"
SIZE = 260
"""Mutants a fix; those that are broken in themselves do not count, and 200 have to be left."""

FIX_IN_WORDS = "upstream's correction in other words"
NEAR = "looks like a correction"
SHAPE = "another shape"


def hand(
    fix: str, base: Base, paths: tuple[str, ...], kind: str, path: str, **changes: Change | dict[str, Change]
) -> Iterator[Mutant]:
    """Each of *changes* to *path*, or to several files."""
    for name, change in changes.items():
        by_hand = change if isinstance(change, dict) else {path: change}
        yield Mutant(fix, base, paths, (), tuple(by_hand.items()), name=name.replace("_", " "), kind=kind)
