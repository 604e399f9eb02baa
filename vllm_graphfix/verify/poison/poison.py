"""Poison in a model runner: put there before a step is prepared, judged after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_graphfix.verify.poison.blocks import Blocks
from vllm_graphfix.verify.poison.kinds import BLOCKS, KINDS, MEMORY, NULL, ROWS
from vllm_graphfix.verify.poison.rows import Buffer, Lease, Rows, Seen

STATES = "rows without a request"
NULL_BLOCK = 0
_MOST = 20
"""Findings that are kept; a write in each step is one defect."""
_LOOKED_AT = 64
"""Blocks of each kind that are looked at after a step: of a large cache all of them would take a second."""


class Finding(NamedTuple):
    """Something that poison showed in a step; steps are counted from 1."""

    step: int
    told: str
    written: bool
    """Somebody wrote where nobody may; else somebody has read NaN."""


@dataclass
class Poison:
    """What one runner has of it."""

    buffers: list[Buffer]
    blocks: Blocks
    length: int
    block_size: int = 16
    vocabulary: int = 1 << 30
    kinds: frozenset[str] = frozenset(KINDS)
    fill_memory: Callable[[], int] = lambda: 0
    """Poisons what is free in the allocator's pools and in workspaces; returns bytes."""
    states: Callable[[], list[tuple[Buffer, list[int]]]] = list
    """States of requests, and those of their rows that no request has."""

    steps: int = 0
    findings: list[Finding] = field(default_factory=list)
    most: dict[str, int] = field(default_factory=dict)
    """What was poisoned at most in a step: buffers, blocks, bytes."""
    held: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._lease = Lease()
        self._pointed_to = NULL_BLOCK

    def before_preparing(self, rows: Rows, held: Iterable[int]) -> None:
        """A step of *rows* begins, whose requests, and whoever else holds blocks, hold *held*."""
        self.end_of_step()
        self.steps += 1
        self.give(held)
        given = self.held
        if BLOCKS in self.kinds:
            free = set(range(1, self.blocks.count)) - given
            self.blocks.fill(free - self.blocks.poisoned)
            self._count(BLOCKS, len(free))
        if NULL in self.kinds:
            self.blocks.fill([NULL_BLOCK])
            self._count(NULL, 1)
        if ROWS in self.kinds:
            self._pointed_to = self.blocks.seen(given)
            seen = Seen(self._pointed_to, self.length, self.block_size, self.vocabulary)
            self._count(ROWS, self._lease.fill(self.buffers, rows, seen))
            for buffer, listed in self.states():
                self._lease.fill_rows(buffer, listed, rows, seen)
                self._count(STATES, len(listed))
        if MEMORY in self.kinds:
            self._count(MEMORY, self.fill_memory())

    def give(self, held: Iterable[int]) -> None:
        """From now on *held* are somebody's: poison is looked for in those that were not, and they are emptied.

        To be called before vLLM, which empties some of them itself.
        """
        self.held = set(held) - {NULL_BLOCK}
        allocated = self.blocks.poisoned & self.held
        self._note_overwritten(allocated)
        self.blocks.wipe(allocated)

    def after_running(self) -> None:
        """The step's work has been done, or is queued: what nobody holds must still be poison.

        Only the block that padded rows name, and those that are likely to be allocated next, are looked at now; each
        other one is before it is somebody's, or in the end.
        """
        near = sorted(self.blocks.poisoned - {NULL_BLOCK})[:_LOOKED_AT]
        self._note_overwritten({*near, self._pointed_to} - {NULL_BLOCK})
        if not all(finding.written for finding in self.findings) or len(self.findings) >= _MOST:
            return  # what follows from the first NaN says nothing new
        if wrong := self.blocks.with_nan(sorted(self.held)[-_LOOKED_AT:]):
            layer, blocks = next(iter(wrong.items()))
            told = f"NaN in what requests hold: first in {layer}, {_listed(blocks)} ({len(wrong)} layers)"
            self._note(told, written=False)

    def end_of_step(self) -> None:
        """Gives the rows back: another request may be in them next."""
        self._lease.end()

    def remove(self) -> None:
        """Takes all poison out; blocks hold zeros then."""
        self._note_overwritten(self.blocks.poisoned - {NULL_BLOCK})
        self.end_of_step()
        self.blocks.wipe(set(self.blocks.poisoned))

    def _note_overwritten(self, blocks: Iterable[int]) -> None:
        for layer, changed in self.blocks.overwritten(blocks).items():
            self._note(f"{layer}: {_listed(changed)}, which nobody holds, was written to", written=True)
            self.blocks.fill(changed)  # once is enough

    def _note(self, told: str, *, written: bool) -> None:
        if len(self.findings) < _MOST and all(told != finding.told for finding in self.findings):
            self.findings.append(Finding(self.steps, told, written))

    def _count(self, kind: str, number: int) -> None:
        self.most[kind] = max(self.most.get(kind, 0), number)


def _listed(blocks: list[int]) -> str:
    shown = ", ".join(map(str, blocks[:8]))
    more = f" and {len(blocks) - 8} more" if len(blocks) > 8 else ""
    return f"block {shown}{more}"
