"""Poison of one model runner: filled in before a step is prepared, checked after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_graphfix.verify.poison.blocks import Blocks
from vllm_graphfix.verify.poison.kinds import BLOCKS, KINDS, MEMORY, NULL, ROWS
from vllm_graphfix.verify.poison.rows import Buffer, Lease, Rows, ValidIds

STATES = "rows without a request"
NULL_BLOCK = 0
_MAX_FINDINGS = 20
"""Limit of findings: a write in each step is one defect."""
_CHECKED_BLOCKS = 64
"""Blocks of each kind that are checked after a step: all blocks of a large cache would take a second."""


class Finding(NamedTuple):
    """An effect of poison in a step; steps are counted from 1."""

    step: int
    text: str
    written: bool
    """True if a kernel wrote to memory of no request; else a request holds NaN."""


@dataclass
class Poison:
    """Poison of one runner, and its findings."""

    buffers: list[Buffer]
    blocks: Blocks
    length: int
    block_size: int = 16
    vocabulary: int = 1 << 30
    kinds: frozenset[str] = frozenset(KINDS)
    fill_memory: Callable[[], int] = lambda: 0
    """Fills free memory of the allocator's pools and workspaces; returns bytes."""
    states: Callable[[], list[tuple[Buffer, list[int]]]] = list
    """Buffers of request states, each with the rows that no request has."""

    steps: int = 0
    findings: list[Finding] = field(default_factory=list)
    most: dict[str, int] = field(default_factory=dict)
    """Largest amount of poison in a step, by kind: buffers, blocks, bytes."""
    held: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._lease = Lease()
        self._pointed_to = NULL_BLOCK

    def before_preparing(self, rows: Rows, held: Iterable[int]) -> None:
        """Fill in poison for a step of *rows*. Its requests and the prefix cache hold the blocks *held*."""
        self.end_of_step()
        self.steps += 1
        self.allocate(held)
        if BLOCKS in self.kinds:
            free = set(range(1, self.blocks.count)) - self.held
            self.blocks.fill(free - self.blocks.poisoned)
            self._count(BLOCKS, len(free))
        if NULL in self.kinds:
            self.blocks.fill([NULL_BLOCK])
            self._count(NULL, 1)
        if ROWS in self.kinds:
            self._pointed_to = self.blocks.last_free(self.held)
            valid = ValidIds(self._pointed_to, self.length, self.block_size, self.vocabulary)
            self._count(ROWS, self._lease.fill(self.buffers, rows, valid))
            for buffer, listed in self.states():
                self._lease.fill_rows(buffer, listed, rows, valid)
                self._count(STATES, len(listed))
        if MEMORY in self.kinds:
            self._count(MEMORY, self.fill_memory())

    def allocate(self, held: Iterable[int]) -> None:
        """Take poison out of the blocks that are *held* from now on, and note those that were overwritten.

        Call it before vLLM prepares the step, since vLLM empties some of these blocks itself.
        """
        self.held = set(held) - {NULL_BLOCK}
        allocated = self.blocks.poisoned & self.held
        self._note_overwritten(allocated)
        self.blocks.wipe(allocated)

    def after_running(self) -> None:
        """Check, after the step's work was done or queued, that free blocks still hold poison.

        That covers the block that padded rows name and those that are likely to be allocated next. Each other one is
        checked before it is allocated, or at the end.
        """
        near = sorted(self.blocks.poisoned - {NULL_BLOCK})[:_CHECKED_BLOCKS]
        self._note_overwritten({*near, self._pointed_to} - {NULL_BLOCK})
        if not all(finding.written for finding in self.findings) or len(self.findings) >= _MAX_FINDINGS:
            return  # NaN spreads: later findings add nothing
        if wrong := self.blocks.with_nan(sorted(self.held)[-_CHECKED_BLOCKS:]):
            layer, blocks = next(iter(wrong.items()))
            text = f"NaN in what requests hold: first in {layer}, {_listed(blocks)} ({len(wrong)} layers)"
            self._note(text, written=False)

    def end_of_step(self) -> None:
        """Restore the rows, which may belong to another request next."""
        self._lease.end()

    def remove(self) -> None:
        """Remove all poison; blocks then hold zeros."""
        self._note_overwritten(self.blocks.poisoned - {NULL_BLOCK})
        self.end_of_step()
        self.blocks.wipe(set(self.blocks.poisoned))

    def _note_overwritten(self, blocks: Iterable[int]) -> None:
        for layer, changed in self.blocks.overwritten(blocks).items():
            self._note(f"{layer}: {_listed(changed)}, which nobody holds, was written to", written=True)
            self.blocks.fill(changed)  # so that it is noted once

    def _note(self, text: str, *, written: bool) -> None:
        if len(self.findings) < _MAX_FINDINGS and all(text != finding.text for finding in self.findings):
            self.findings.append(Finding(self.steps, text, written))

    def _count(self, kind: str, number: int) -> None:
        self.most[kind] = max(self.most.get(kind, 0), number)


def _listed(blocks: list[int]) -> str:
    first = ", ".join(map(str, blocks[:8]))
    more = f" and {len(blocks) - 8} more" if len(blocks) > 8 else ""
    return f"block {first}{more}"
