"""Sums over the bytes of cache blocks, made and compared on the device; the host waits for nothing.

All is queued on the stream on which vLLM runs its steps, between two of them. What comes of a comparison is copied to
pinned memory and read when an event says that it is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix.marks.ledger import Block
from vllm_graphfix.shadow.layers import block_and_token, caches_of

if TYPE_CHECKING:
    from torch import Tensor

LAYERS = 4
"""Layers of a group that a batch of marks has; the next batch has the next ones."""
MOST = 64
"""Blocks in a batch."""
_BYTES = 8 << 20
"""Bytes of one layer's blocks that are copied for a sum at once."""
_AT_ONCE = 8
"""Transfers that may be under way."""
_WHOLE = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
"""Classes of vLLM for caches whose blocks are written once, a slot for each token."""
_OTHERS = (
    "MambaSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "SlidingWindowMLASpec",
    "SinkFullAttentionSpec",
    "CircularBufferSpec",
    "HiddenStateCacheSpec",
    "RSWASpec",
)
"""Classes whose blocks come from the same pool, and are not marked."""


class LayerCache(NamedTuple):
    """The cache of one layer."""

    layer: str
    memory: Tensor
    """Its bytes seen as integers, among which NaN equals itself."""
    axis: int
    """The axis of blocks."""
    parts: int
    """The blocks of the kernels that make one of the scheduler's."""

    @property
    def nbytes(self) -> int:
        """The bytes of one block of the scheduler."""
        return self.parts * self.memory.select(self.axis, 0).numel() * self.memory.element_size()


class Group(NamedTuple):
    """A cache group whose blocks are marked."""

    tokens: int
    """The tokens of a block, on all ranks of context parallelism together."""
    caches: tuple[LayerCache, ...]


class UnsafeCacheError(Exception):
    """Blocks of this engine cannot be marked; the message says why."""


def groups(worker: Any) -> dict[int, Group]:
    """The cache groups of *worker* whose blocks can be marked, by number; raises UnsafeCacheError if there are none."""
    config, runner = worker.vllm_config, worker.model_runner
    kv, layers = runner.kv_cache_config, config.compilation_config.static_forward_context
    parallel = config.parallel_config
    ranks = int(getattr(parallel, "decode_context_parallel_size", 1) or 1)
    ranks *= int(getattr(parallel, "prefill_context_parallel_size", 1) or 1)
    found: dict[int, Group] = {}
    left_out: list[str] = []
    for number, group in enumerate(kv.kv_cache_groups):
        specs = _specs(group)
        names = {type(spec).__name__ for spec in specs.values()}
        if unknown := names - {*_WHOLE, *_OTHERS}:
            raise UnsafeCacheError(f"it is not known how blocks of a {min(unknown)} are used")
        if not names <= {*_WHOLE} or not all(map(_is_plain, specs.values())):
            left_out += sorted(names)
            continue
        caches: list[LayerCache] = []
        seen: set[int] = set()
        for layer, spec in specs.items():
            for cache in caches_of(layers[layer]) if layer in layers else ():
                made = _layer_cache(layer, layers[layer], cache, spec.block_size, kv.num_blocks)
                if made is not None and cache.data_ptr() not in seen:  # layers may share one
                    seen.add(cache.data_ptr())
                    caches.append(made)
        if caches:
            found[number] = Group(group.kv_cache_spec.block_size * ranks, tuple(caches))
        else:
            left_out += [f"{name} of an unknown shape" for name in sorted(names)]
    if not found:
        raise UnsafeCacheError(
            f"it has no cache whose blocks are written once ({', '.join(left_out) or 'none at all'})"
        )
    return found


def _specs(group: Any) -> dict[str, Any]:
    """The specification of each layer of a cache group."""
    spec = group.kv_cache_spec
    each = getattr(spec, "kv_cache_specs", None)
    return dict(each) if isinstance(each, dict) else dict.fromkeys(group.layer_names, spec)


def _is_plain(spec: Any) -> bool:
    """Whether a block has a slot for each of its tokens, which is computed once and from tokens before it alone."""
    return (
        getattr(spec, "tokens_per_state", 1) == 1
        and getattr(spec, "compress_ratio", 1) in (None, 1)
        and not getattr(spec, "non_causal", False)
        and not getattr(spec, "non_causal_multi_token_decode", False)
    )


def _layer_cache(name: str, layer: Any, cache: Tensor, tokens: int, blocks: int) -> LayerCache | None:
    """None where it is not known where in *cache* a block of *tokens* tokens, one of *blocks*, lies."""
    import torch

    axes = block_and_token(layer, cache)
    if axes is None:
        return None
    parts, rest = divmod(cache.shape[axes[0]], blocks)
    if rest or parts * cache.shape[axes[1]] != tokens:
        return None
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return LayerCache(name, cache.view(integers[cache.element_size()]), axes[0], parts)


class Batch:
    """Marks that were made together: blocks of one group, in some of its layers."""

    def __init__(self, blocks: Sequence[Block], layers: Sequence[LayerCache], numbers: Tensor, step: int) -> None:
        self.blocks = tuple(blocks)
        self.layers = tuple(layers)
        self.numbers = numbers
        """Theirs, on the device, and then zeros."""
        self.sums: Tensor | None = None
        """(layers, numbers) int64"""
        self.since = step
        """The last step before which they were as they had been marked."""
        self.looked = step
        """The step before which they were looked at last."""
        self.alive = set(range(len(blocks)))
        """Which of them are still marked."""
        self.told: set[int] = set()
        """Which of them were found changed."""


class Looked(NamedTuple):
    """A comparison whose result is there."""

    batch: Batch
    step: int
    alive: frozenset[int]
    """The marks that it is of."""
    changed: dict[int, list[str]]
    """The blocks of the batch that have changed, each with the layers in whose caches it has."""


class _Transfer:
    """Pinned memory for one transfer at a time, and an event that says that it is over."""

    def __init__(self, device: Any) -> None:
        import torch

        gpu = device.type != "cpu"
        self.numbers = torch.zeros(MOST, dtype=torch.int64, pin_memory=gpu)
        self.flags = torch.zeros(LAYERS * MOST, dtype=torch.bool, pin_memory=gpu)
        """Flat: a copy to a part of each row would go through other memory, and wait."""
        self._event = torch.cuda.Event() if gpu else None
        self.look: tuple[Batch, int, frozenset[int]] | None = None
        self._under_way = False

    def begun(self) -> None:
        if self._event is not None:
            self._event.record()
            self._under_way = True

    def over(self) -> bool:
        if self._under_way and self._event is not None and self._event.query():
            self._under_way = False
        return not self._under_way


class Sums:
    """Makes marks on one device and compares them."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._transfers = [_Transfer(device) for _ in range(_AT_ONCE)]
        self.looks: deque[_Transfer] = deque()
        """Those of them that bring what came of a comparison, in the order in which they will be over; nobody has read
        it yet."""
        self._weights: dict[int, Tensor] = {}
        self._next_layer: dict[int, int] = {}

    def warm_up(self, groups: dict[int, Group]) -> None:
        """Has the kernels of all sums loaded, before requests come; the null block is only read.

        A kernel that is loaded later has the host wait for what the device is at.
        """
        for number, group in groups.items():
            for _ in range(0, len(group.caches), LAYERS):
                batch = self.mark([Block(0, number, 0, "", 0)], group, 0)
                if batch is not None:
                    self.look(batch, 0)
                self.results(wait=True)

    def mark(self, blocks: Sequence[Block], group: Group, step: int) -> Batch | None:
        """Marks the first of *blocks*, all of *group*; None if too much is under way."""
        import torch

        transfer = self._free_transfer()
        if transfer is None:
            return None
        first = self._next_layer.get(blocks[0].group, 0)
        layers = [group.caches[(first + at) % len(group.caches)] for at in range(min(LAYERS, len(group.caches)))]
        self._next_layer[blocks[0].group] = (first + len(layers)) % len(group.caches)
        most = max(1, min(MOST, _BYTES // max(each.nbytes for each in layers)))
        given = blocks[:most]
        # Always as many rows, with the null block in those left: other numbers of rows need other kernels.
        transfer.numbers[:most] = torch.tensor([*(each.number for each in given), *[0] * (most - len(given))])
        with torch.inference_mode():
            numbers = transfer.numbers[:most].to(self._device, non_blocking=True, copy=True)
            batch = Batch(given, layers, numbers, step)
            batch.sums = self._sums(batch)
            transfer.begun()
        return batch

    def look(self, batch: Batch, step: int) -> bool:
        """Compares *batch*, before *step*; False if too much is under way."""
        import torch

        transfer = self._free_transfer()
        if transfer is None or batch.sums is None:
            return False
        with torch.inference_mode():
            flags = self._sums(batch).ne(batch.sums)
            transfer.flags[: flags.numel()].copy_(flags.flatten(), non_blocking=True)
            transfer.look = batch, step, frozenset(batch.alive)
            transfer.begun()
            self.looks.append(transfer)
        batch.looked = step
        return True

    def results(self, *, wait: bool = False) -> list[Looked]:
        """The comparisons that are over."""
        found: list[Looked] = []
        while self.looks and (wait or self.looks[0].over()):
            transfer = self.looks.popleft()
            if wait and transfer._event is not None:
                transfer._event.synchronize()
            assert transfer.look is not None  # noqa: S101 - for mypy
            batch, step, alive = transfer.look
            transfer.look = None
            shape = len(batch.layers), len(batch.numbers)
            flags = transfer.flags[: shape[0] * shape[1]].view(shape)
            changed: dict[int, list[str]] = {}
            if flags.any():
                by_layer = [(layer.layer, row) for layer, row in zip(batch.layers, flags.tolist(), strict=True)]
                named = {at: [layer for layer, row in by_layer if row[at]] for at in sorted(alive)}
                changed = {at: layers for at, layers in named.items() if layers}
            found.append(Looked(batch, step, alive, changed))
        return found

    def forget(self) -> None:
        """What is under way is of caches that are not there any more."""
        for transfer in self.looks:
            transfer.look = None
        self.looks.clear()

    def _free_transfer(self) -> _Transfer | None:
        return next((each for each in self._transfers if each.look is None and each.over()), None)

    def _sums(self, batch: Batch) -> Tensor:
        """(layers, blocks) int64, modulo 2^64: each integer of a block times an odd number of its own."""
        import torch

        found = []
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
            found.append((rows * self._weights_of(rows.shape[1])).sum(1))
        return torch.stack(found)

    def _weights_of(self, width: int) -> Tensor:
        import torch

        if width not in self._weights:
            chance = torch.Generator().manual_seed(width)
            drawn = torch.randint(-(1 << 62), 1 << 62, (width,), generator=chance, dtype=torch.int64)
            self._weights[width] = (drawn | 1).to(self._device)
        return self._weights[width]
