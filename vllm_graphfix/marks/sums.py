"""Checksums of cache blocks, made and compared on the device; the host waits for nothing.

All work is queued on the stream on which vLLM runs its steps, between two of them. The result of a comparison is copied
to pinned memory, and read when an event says that it has arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix.marks.groups import Group, LayerCache
from vllm_graphfix.marks.ledger import Block

if TYPE_CHECKING:
    from torch import Tensor

LAYERS = 4
"""Layers of a group in one batch of marks; the next batch has the next ones."""
BATCH = 64
"""Blocks in a batch."""
_CHUNK = 8 << 20
"""Bytes of one layer's blocks that are copied for checksums at once."""
_TRANSFERS = 8
"""Transfers that may be under way."""


class Batch:
    """Marks that were made together: checksums of blocks of one group, in some of its layers."""

    def __init__(self, blocks: Sequence[Block], layers: Sequence[LayerCache], numbers: Tensor, step: int) -> None:
        self.blocks = tuple(blocks)
        self.layers = tuple(layers)
        self.numbers = numbers
        """The blocks' numbers, on the device, padded with zeros."""
        self.checksums: Tensor | None = None
        """(layers, numbers) int64"""
        self.since = step
        """The last step before which the blocks were as marked."""
        self.checked_at = step
        """The step before which they were checked last."""
        self.alive = set(range(len(blocks)))
        """The places of those that are still marked."""
        self.reported: set[int] = set()
        """The places of those that have changed."""


class ChecksumResult(NamedTuple):
    """The result of a comparison."""

    batch: Batch
    step: int
    alive: frozenset[int]
    """The places in the batch that were marked at the time."""
    changed: dict[int, list[str]]
    """The places of blocks that have changed, each with the layers in whose caches it has."""


class _Transfer:
    """Pinned memory for one transfer at a time, and an event that says when it is over."""

    def __init__(self, device: Any) -> None:
        import torch

        gpu = device.type != "cpu"
        self.numbers = torch.zeros(BATCH, dtype=torch.int64, pin_memory=gpu)
        self.flags = torch.zeros(LAYERS * BATCH, dtype=torch.bool, pin_memory=gpu)
        """Flat: a copy to a part of each row would go through other memory, and wait."""
        self._event = torch.cuda.Event() if gpu else None
        self.check: tuple[Batch, int, frozenset[int]] | None = None
        self._under_way = False

    def start(self) -> None:
        if self._event is not None:
            self._event.record()
            self._under_way = True

    def is_over(self) -> bool:
        if self._under_way and self._event is not None and self._event.query():
            self._under_way = False
        return not self._under_way

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class BlockChecksums:
    """Makes marks on one device, and checks them."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._transfers = [_Transfer(device) for _ in range(_TRANSFERS)]
        self.checks: deque[_Transfer] = deque()
        """Transfers of results that nobody has read, in the order in which they will be over."""
        self._weights: dict[int, Tensor] = {}
        self._next_layer: dict[int, int] = {}

    def warm_up(self, groups: dict[int, Group]) -> None:
        """Load the kernels of all checksums before requests come; the null block is only read.

        The host would wait for the device when it loads a kernel later.
        """
        for number, group in groups.items():
            for _ in range(0, len(group.caches), LAYERS):
                batch = self.mark([Block(0, number, 0, "", 0)], group, 0)
                if batch is not None:
                    self.check(batch, 0)
                self.results(wait=True)

    def mark(self, blocks: Sequence[Block], group: Group, step: int) -> Batch | None:
        """Mark the first of *blocks*, all of *group*, before *step*; None if too much is under way."""
        import torch

        transfer = self._free_transfer()
        if transfer is None:
            return None
        first = self._next_layer.get(blocks[0].group, 0)
        layers = [group.caches[(first + at) % len(group.caches)] for at in range(min(LAYERS, len(group.caches)))]
        self._next_layer[blocks[0].group] = (first + len(layers)) % len(group.caches)
        most = max(1, min(BATCH, _CHUNK // max(each.nbytes for each in layers)))
        marked = blocks[:most]
        # Padded with the null block to one number of rows: other numbers of rows would need other kernels.
        transfer.numbers[:most] = torch.tensor([*(each.number for each in marked), *[0] * (most - len(marked))])
        with torch.inference_mode():
            numbers = transfer.numbers[:most].to(self._device, non_blocking=True, copy=True)
            batch = Batch(marked, layers, numbers, step)
            batch.checksums = self._checksums(batch)
            transfer.start()
        return batch

    def check(self, batch: Batch, step: int) -> bool:
        """Compare *batch*, before *step*; False if too much is under way."""
        import torch

        transfer = self._free_transfer()
        if transfer is None or batch.checksums is None:
            return False
        with torch.inference_mode():
            flags = self._checksums(batch).ne(batch.checksums)
            transfer.flags[: flags.numel()].copy_(flags.flatten(), non_blocking=True)
            # A copy: blocks may be dropped from the batch before the result arrives.
            transfer.check = batch, step, frozenset(batch.alive)
            transfer.start()
            self.checks.append(transfer)
        batch.checked_at = step
        return True

    def results(self, *, wait: bool = False) -> list[ChecksumResult]:
        """Return the results that have arrived; *wait* for all."""
        arrived: list[ChecksumResult] = []
        while self.checks and (wait or self.checks[0].is_over()):
            transfer = self.checks.popleft()
            if wait:
                transfer.wait()
            assert transfer.check is not None  # noqa: S101 - for mypy
            batch, step, alive = transfer.check
            transfer.check = None
            shape = len(batch.layers), len(batch.numbers)
            flags = transfer.flags[: shape[0] * shape[1]].view(shape)
            changed: dict[int, list[str]] = {}
            if flags.any():
                by_layer = [(layer.layer, row) for layer, row in zip(batch.layers, flags.tolist(), strict=True)]
                named = {at: [layer for layer, row in by_layer if row[at]] for at in sorted(alive)}
                changed = {at: layers for at, layers in named.items() if layers}
            arrived.append(ChecksumResult(batch, step, alive, changed))
        return arrived

    def forget(self) -> None:
        """Drop the results under way: they are of caches that do not exist any more."""
        for transfer in self.checks:
            # The device may still write to it: `_free_transfer` asks the event, too.
            transfer.check = None
        self.checks.clear()

    def _free_transfer(self) -> _Transfer | None:
        return next((each for each in self._transfers if each.check is None and each.is_over()), None)

    def _checksums(self, batch: Batch) -> Tensor:
        """Return (layers, blocks) int64: the sum, modulo 2^64, of each integer of a block times an odd number."""
        import torch

        by_layer = []
        for layer in batch.layers:
            numbers = batch.numbers
            if layer.parts > 1:
                parts = torch.arange(layer.parts, device=numbers.device)
                numbers = (numbers[:, None] * layer.parts + parts).flatten()
            rows = layer.memory.index_select(layer.axis, numbers).movedim(layer.axis, 0)
            rows = rows.reshape(len(batch.numbers), -1)
            width = rows.shape[1] * rows.element_size()
            wide = next(kind for size, kind in ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
                        if width % size == 0 and size >= rows.element_size())  # fmt: skip
            rows = rows.view(wide)
            by_layer.append((rows * self._weights_of(rows.shape[1])).sum(1))
        return torch.stack(by_layer)

    def _weights_of(self, width: int) -> Tensor:
        """Return (width,) int64: odd numbers, so that a change of any one integer changes the sum."""
        import torch

        if width not in self._weights:
            chance = torch.Generator().manual_seed(width)
            drawn = torch.randint(-(1 << 62), 1 << 62, (width,), generator=chance, dtype=torch.int64)
            self._weights[width] = (drawn | 1).to(self._device)
        return self._weights[width]
