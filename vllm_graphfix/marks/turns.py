"""The batches of marked blocks of one rank, and the order in which they are checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from vllm_graphfix.marks.ledger import Block
from vllm_graphfix.marks.sums import Batch


class CheckQueue:
    """The batch of each marked block, and the batch to check next."""

    def __init__(self) -> None:
        self.fresh: deque[Batch] = deque()
        """Batches that were never checked, the newest last."""
        self.others: deque[Batch] = deque()
        """The others, first those whose check was longest ago."""
        self.urgent: deque[Batch] = deque()
        """Batches in danger, to be checked before all others."""
        self.where: dict[int, tuple[Batch, int]] = {}
        """The batch of each block, by the block's number, and its place in there."""
        self._in_danger: list[Batch] = []
        self._newest_first = False
        self._from_fresh = False
        """The batch that `next` returned last was the newest, and not that of the longest ago."""

    def __len__(self) -> int:
        return len(self.fresh) + len(self.others)

    def add(self, batch: Batch) -> None:
        """Add *batch*, whose blocks have just been marked."""
        self.fresh.append(batch)
        self.where.update((block.number, (batch, at)) for at, block in enumerate(batch.blocks))

    def drop_oldest(self) -> list[Block]:
        """Drop the batch that goes first where there are too many, and return its blocks."""
        oldest = (self.others or self.fresh).popleft()
        return [oldest.blocks[at] for at in oldest.alive]

    def drop(self, block: Block) -> bool:
        """Drop the mark of *block*; return whether it had one."""
        batch, at = self.where.pop(block.number, (None, 0))
        if batch is not None:
            batch.alive.discard(at)
        return batch is not None

    def of(self, blocks: Sequence[Block]) -> list[Batch]:
        """Return the batches of those of *blocks* that are marked, each once."""
        return list(dict.fromkeys(self.where[block.number][0] for block in blocks if block.number in self.where))

    def note_danger(self, newest: Sequence[Block], step: int) -> None:
        """Note the batches that a rank without work may write to from *step* on, the likeliest first.

        First the blocks of the last step of requests, the *newest*, whose slots the buffers still have; then others
        that were marked just now.
        """
        now = (batch for batch in self.fresh if batch.since == step)
        self._in_danger = list(dict.fromkeys([*self.of(newest[::-1]), *now]))

    def put_danger_first(self) -> None:
        """Put the batches in danger before all others."""
        self.urgent = deque(self._in_danger)

    def put_last(self, batch: Batch) -> None:
        """Put *batch*, which was checked, behind all others."""
        for queue in (self.fresh, self.others):
            if batch in queue:
                queue.remove(batch)
        self.others.append(batch)

    def next(self, step: int) -> Batch | None:
        """Remove and return the batch to check before *step*: in turns the newest, and that of the longest ago.

        Most foreign writes go to what was used last; but no batch may be out of sight for ever, however many new ones
        there are.
        """
        self._newest_first = not self._newest_first
        newest = self.fresh, -1
        oldest = self.others, 0
        for queue, end in (newest, oldest) if self._newest_first else (oldest, newest):
            while queue and not queue[end].alive:
                del queue[end]
            if queue and queue[end].checked_at < step:
                batch = queue[end]
                del queue[end]
                self._from_fresh = queue is self.fresh
                return batch
        return None

    def put_back(self, batch: Batch) -> None:
        """Put *batch*, which `next` has just returned and which could not be checked, back to where it was."""
        self._newest_first = not self._newest_first
        if self._from_fresh:
            self.fresh.append(batch)
        else:
            self.others.appendleft(batch)
