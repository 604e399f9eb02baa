"""What a second run of a step would change, kept and put back.

These are recurrent state, input buffers, attention metadata and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK_TABLE = "block_table"
"""In the name of each attribute of attention metadata that is one."""
_PLAN = "scheduler_metadata"
"""FlashAttention's plan, in its attention metadata: a tensor, or None where the kernel makes one. FlashMLA's of that
name is an object, without which its kernel does not run."""
_DEEPEST, _MOST = 6, 20_000
"""Levels below a layer's attention metadata, and objects in all, whose attributes are kept."""


class StateRows(NamedTuple):
    """Rows of recurrent state: of *memory*, (blocks, …), those of *blocks*.

    *blocks* is (rows,) int64, none negative; one may be named twice.
    """

    layer: str
    memory: Tensor
    blocks: Tensor
    compared: bool = True
    """False: put back, and no matter what a run leaves there."""

    @property
    def nbytes(self) -> int:
        return self.blocks.numel() * self.memory[0].numel() * self.memory.element_size() if len(self.memory) else 0


Rows = tuple[StateRows, "Tensor"]
"""Rows of recurrent state, and what they held."""


def copies_of_rows(states: Sequence[StateRows]) -> list[Rows]:
    """Copies of these rows of recurrent state, as they are now."""
    return [(rows, rows.memory.index_select(0, rows.blocks)) for rows in states]


class Snapshot:
    """The tensors as they are now."""

    def __init__(self, inputs: Mapping[str, Tensor], states: Sequence[StateRows]) -> None:
        self._inputs = [(name, tensor, tensor.clone()) for name, tensor in inputs.items()]
        self.states = copies_of_rows(states)

    def put_back(self) -> None:
        """Writes everything back. A row that is named twice is written twice with the same."""
        for _, tensor, kept in self._inputs:
            tensor.copy_(kept)
        for rows, kept in self.states:
            rows.memory.index_copy_(0, rows.blocks, kept)

    def make_readable(self) -> None:
        """Lets block tables name blocks that there are.

        Those of padded rows may hold -1, and a kernel that reads it all the same ends the process; what a padded row
        reads is nobody's.
        """
        for tensor, _ in self._block_tables():
            tensor.clamp_(min=0)

    def put_block_tables_back(self) -> None:
        """Puts back what `make_readable` has changed, and nothing else."""
        for tensor, kept in self._block_tables():
            tensor.copy_(kept)

    def _block_tables(self) -> Iterator[tuple[Tensor, Tensor]]:
        for name, tensor, kept in self._inputs:
            if _BLOCK_TABLE in name and not tensor.is_floating_point():
                yield tensor, kept

    def changed_inputs(self) -> list[str]:
        """The names of the inputs that are not as they were, less block tables; waits for the device."""
        return [name for name, tensor, kept in self._inputs if _BLOCK_TABLE not in name and not same_bits(tensor, kept)]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether both hold the same bytes: NaN is like itself."""
    import torch

    # A clone: contiguous() leaves a tensor of one element the stride that it has, and bytes cannot be viewed through
    # that.
    flat = [tensor.flatten().clone(memory_format=torch.contiguous_format) for tensor in (one, other)]
    return torch.equal(flat[0].view(torch.uint8), flat[1].view(torch.uint8))


class PythonState:
    """Attributes of the objects that a forward pass is given, and entries of their dicts and lists.

    A lazy plan is made in one. The objects stay the same; tensors are not looked into.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self._undo: list[Callable[[], None]] = []
        self._attributes: list[dict[str, Any]] = []
        self._kept: dict[int, object] = {}
        level = list(roots)
        for _ in range(_DEEPEST):
            below: list[object] = []
            for found in level:
                below.extend(self._keep(found))
            level = below

    def _keep(self, found: object) -> Iterable[object]:
        if id(found) in self._kept or len(self._kept) >= _MOST:
            return ()
        if isinstance(found, dict):
            entries = dict(found)
            self._undo.append(lambda: _refill(found, entries))
        elif isinstance(found, list):
            items = list(found)
            self._undo.append(lambda: found.__setitem__(slice(None), items))
            entries = dict(enumerate(items))
        elif isinstance(found, tuple):
            entries = dict(enumerate(found))
        elif type(found).__module__.startswith(("vllm.", "vllm_graphfix.")) and isinstance(
            attributes := getattr(found, "__dict__", None), dict
        ):
            entries = dict(attributes)
            self._attributes.append(attributes)
            self._undo.append(lambda: _refill(attributes, entries))
        else:
            return ()
        self._kept[id(found)] = found
        return entries.values()

    def set_numbers(self, numbers: Mapping[str, int]) -> None:
        """Until it is put back, each of *numbers* in every attribute of its name that is a number.

        Where there are any, FlashAttention makes its plan itself: it refuses one that was made for other numbers, and
        of ranks with batches of their own one alone would fail, between collectives that the others wait in.
        """
        import torch

        for attributes in self._attributes:
            attributes.update(
                {name: number for name, number in numbers.items() if isinstance(attributes.get(name), int)}
            )
            if numbers and isinstance(attributes.get(_PLAN), torch.Tensor):
                attributes[_PLAN] = None

    def put_back(self) -> None:
        for undo in self._undo:
            undo()


def _refill(mapping: dict[Any, Any], entries: dict[Any, Any]) -> None:
    if mapping.keys() != entries.keys() or any(mapping[name] is not value for name, value in entries.items()):
        mapping.clear()
        mapping.update(entries)


class RandomState:
    """The generators of this process's CPU and of its current GPU."""

    def __init__(self) -> None:
        import torch

        self._cpu = torch.get_rng_state()
        self._gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def put_back(self) -> None:
        import torch

        torch.set_rng_state(self._cpu)
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._gpu)
