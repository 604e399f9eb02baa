"""Copies of what a second run of a step would change: recurrent state, inputs, attention metadata, random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK_TABLE = "block_table"
"""A part of the name of each attribute of attention metadata that is a block table."""
_PLAN = "scheduler_metadata"
"""FlashAttention's plan, in its attention metadata: a tensor, or None if the kernel makes one. FlashMLA's attribute of
that name is an object, without which its kernel does not run."""
_MAX_DEPTH, _MAX_OBJECTS = 6, 20_000
"""Levels below a layer's attention metadata, and objects in all, whose attributes are copied."""


class StateRows(NamedTuple):
    """Rows of recurrent state: those of *blocks* in *memory*, (blocks, …).

    *blocks* is (rows,) int64, none negative; a block may occur twice.
    """

    layer: str
    memory: Tensor
    blocks: Tensor
    compared: bool = True
    """False: restored, but what a run leaves there does not matter."""

    @property
    def nbytes(self) -> int:
        return self.blocks.numel() * self.memory[0].numel() * self.memory.element_size() if len(self.memory) else 0


Rows = tuple[StateRows, "Tensor"]
"""Rows of recurrent state, and a copy of them."""


def copies_of_rows(states: Sequence[StateRows]) -> list[Rows]:
    return [(rows, rows.memory.index_select(0, rows.blocks)) for rows in states]


class Snapshot:
    """Copies of tensors as they are now."""

    def __init__(self, inputs: Mapping[str, Tensor], states: Sequence[StateRows]) -> None:
        self._inputs = [(name, tensor, tensor.clone()) for name, tensor in inputs.items()]
        self.states = copies_of_rows(states)

    def restore(self) -> None:
        """Write everything back. A block that occurs twice gets the same bytes twice."""
        for _, tensor, copy in self._inputs:
            tensor.copy_(copy)
        for rows, copy in self.states:
            rows.memory.index_copy_(0, rows.blocks, copy)

    def make_readable(self) -> None:
        """Replace negative entries of block tables by block 0.

        Those of padded rows may hold -1, and a kernel that reads the block all the same ends the process. Nobody uses
        what a padded row reads.
        """
        for tensor, _ in self._block_tables():
            tensor.clamp_(min=0)

    def restore_block_tables(self) -> None:
        """Undo `make_readable`, and nothing else."""
        for tensor, copy in self._block_tables():
            tensor.copy_(copy)

    def _block_tables(self) -> Iterator[tuple[Tensor, Tensor]]:
        for name, tensor, copy in self._inputs:
            if _BLOCK_TABLE in name and not tensor.is_floating_point():
                yield tensor, copy

    def changed_inputs(self) -> list[str]:
        """Return the names of the inputs that have changed, without block tables; waits for the device."""
        return [name for name, tensor, copy in self._inputs if _BLOCK_TABLE not in name and not same_bits(tensor, copy)]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare the bytes of two tensors, so that NaN equals itself."""
    import torch

    # A clone: contiguous() leaves a tensor of one element the stride that it has, and bytes cannot be viewed through
    # that.
    flat = [tensor.flatten().clone(memory_format=torch.contiguous_format) for tensor in (one, other)]
    return torch.equal(flat[0].view(torch.uint8), flat[1].view(torch.uint8))


class PythonState:
    """Shallow copies of the objects that a forward pass gets: attributes, and entries of dicts and lists.

    A pass may store a lazy plan in one. The objects stay the same ones; the contents of tensors are not copied.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self._undo: list[Callable[[], None]] = []
        self._attributes: list[dict[str, Any]] = []
        self._visited: dict[int, object] = {}
        level = list(roots)
        for _ in range(_MAX_DEPTH):
            below: list[object] = []
            for visited in level:
                below.extend(self._copy(visited))
            level = below

    def _copy(self, value: object) -> Iterable[object]:
        """Copy one object, and return what it refers to."""
        if id(value) in self._visited or len(self._visited) >= _MAX_OBJECTS:
            return ()
        if isinstance(value, dict):
            entries = dict(value)
            self._undo.append(lambda: _refill(value, entries))
        elif isinstance(value, list):
            items = list(value)
            self._undo.append(lambda: value.__setitem__(slice(None), items))
            entries = dict(enumerate(items))
        elif isinstance(value, tuple):
            entries = dict(enumerate(value))
        elif type(value).__module__.startswith(("vllm.", "vllm_graphfix.")) and isinstance(
            attributes := getattr(value, "__dict__", None), dict
        ):
            entries = dict(attributes)
            self._attributes.append(attributes)
            self._undo.append(lambda: _refill(attributes, entries))
        else:
            return ()
        self._visited[id(value)] = value  # a reference, so that no other object gets the same id
        return entries.values()

    def set_numbers(self, numbers: Mapping[str, int]) -> None:
        """Set each of *numbers* in every numeric attribute of its name, until `restore`.

        FlashAttention then makes its plan itself: it refuses a plan made for other numbers. Among ranks with batches of
        their own one alone would fail, between collectives in which the others wait.
        """
        import torch

        for attributes in self._attributes:
            attributes.update(
                {name: number for name, number in numbers.items() if isinstance(attributes.get(name), int)}
            )
            if numbers and isinstance(attributes.get(_PLAN), torch.Tensor):
                attributes[_PLAN] = None

    def restore(self) -> None:
        for undo in self._undo:
            undo()


def _refill(mapping: dict[Any, Any], entries: dict[Any, Any]) -> None:
    if mapping.keys() != entries.keys() or any(mapping[name] is not value for name, value in entries.items()):
        mapping.clear()
        mapping.update(entries)


class RandomState:
    """The state of the random generators of this process's CPU and of its current GPU."""

    def __init__(self) -> None:
        import torch

        self._cpu = torch.get_rng_state()
        self._gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def restore(self) -> None:
        import torch

        torch.set_rng_state(self._cpu)
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._gpu)
