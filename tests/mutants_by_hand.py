"""What upstream might write, by hand: corrections in several wordings, and what looks like one and is none."""

from __future__ import annotations

from collections.abc import Iterator

from edited import swap
from mutants_families import Base, Change, Mutant

SPEC_DECODE = "vllm/v1/worker/gpu/spec_decode"
FIRST_EAGLE = f"{SPEC_DECODE}/eagle_cudagraph.py"
EAGLE = f"{SPEC_DECODE}/eagle/cudagraph.py"
SPECULATOR = f"{SPEC_DECODE}/eagle/speculator.py"
PREFILL = f"{SPEC_DECODE}/autoregressive/cudagraph_utils.py"
SIZE = 260
"""Mutants a fix; those that are broken in themselves do not count, and 200 have to be left."""


def and_then(*changes: Change) -> Change:
    def change(text: str) -> str:
        for one in changes:
            text = one(text)
        return text

    return change


def before(pattern: str, *lines: str) -> Change:
    """*lines* in front of each line that matches *pattern*, which takes no indentation, as deep as that."""
    inserted = "".join(rf"\1{line}\n" for line in lines)
    return swap(rf"^( *)(?={pattern})", inserted + r"\1")


def after(pattern: str, *lines: str) -> Change:
    """The same behind it."""
    return swap(rf"^( *)({pattern}.*)\n", r"\1\2\n" + "".join(rf"\1{line}\n" for line in lines))


def hand(
    fix: str, base: Base, paths: tuple[str, ...], kind: str, path: str, **changes: Change | dict[str, Change]
) -> Iterator[Mutant]:
    """Each of *changes* to *path*, or to several files."""
    for name, change in changes.items():
        by_hand = change if isinstance(change, dict) else {path: change}
        yield Mutant(fix, base, paths, (), tuple(by_hand.items()), name=name.replace("_", " "), kind=kind)


FIX_IN_WORDS = "upstream's correction in other words"
NEAR = "looks like a correction"
SHAPE = "another shape"
