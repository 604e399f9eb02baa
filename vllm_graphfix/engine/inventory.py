"""The addresses of tensors that the graphs of a rank may hold, recorded at the capture and compared later.

A graph holds addresses. If a module, the model runner or a builder of attention metadata replaces its tensor later, the
graph still reads the old one. An entry is a path of attributes and keys from a module or the runner to the tensor, and
its address; only *hold* keeps tensors alive.
"""

# No `from __future__ import annotations`: as in `fix.py`, for the named tuples.

import time
import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from enum import Enum
from itertools import accumulate
from typing import Any, NamedTuple

_DEEPEST = 5
"""Limit of objects between a module, or the runner, and a tensor: the runner's batch, its block tables, one table, its
buffer."""
_MOST = 100_000
"""Limit of objects and containers that are searched."""
_AT_ONCE = 200
"""Tensors that a heartbeat compares before it yields to other threads."""
_METADATA = ("attn_groups", "attn_metadata_builders")
_CACHES = ("kv_cache", "kv_caches")
_IN_NO_GRAPH = ("q_range", "k_range", "v_range")
"""Constants of attention layers for scales that are computed in steps without a graph; each load replaces them."""
_CONTAINERS = (dict, list, tuple)


class Kind(str, Enum):
    """The role of a tensor in the model."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"
    """An attribute of a module, or of an object in it: MLA's absorbed weights, scales in a kernel's arguments."""
    INPUT = "input"
    """An attribute of the model runner or its drafter."""
    METADATA = "metadata"
    CACHE = "cache"


LASTING = frozenset({Kind.PARAMETER, Kind.BUFFER, Kind.CACHE})
"""Kinds that no step replaces. Of the other kinds, some tensors are new in each step, and no graph holds those."""
_COPIED = frozenset({Kind.PARAMETER, Kind.BUFFER, Kind.ATTRIBUTE})


class Place(NamedTuple):
    """Address, shape, stride and dtype of a tensor: the arguments of a graph's kernels."""

    pointer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any

    @property
    def end(self) -> int:
        """The address behind the last byte."""
        spans = (max(size - 1, 0) * abs(step) for size, step in zip(self.shape, self.stride, strict=True))
        return self.pointer + (sum(spans) + 1) * int(self.dtype.itemsize)


class Entry(NamedTuple):
    """One tensor, under one of its names."""

    name: str
    kind: Kind
    root: Any
    """A weak reference to a module or the runner."""
    steps: tuple[Any, ...]
    """Attributes and keys from there to the tensor."""
    place: Place
    storage: int
    held: Any = None
    """The tensor of the capture, if it is held."""


class Moved(NamedTuple):
    """A tensor whose address differs from that in the graphs; `now` is None if its name is gone."""

    entry: Entry
    now: Any


class Inventory:
    """The addresses of a worker's tensors when its graphs were captured."""

    def __init__(self, worker: Any, *, hold: bool) -> None:
        """Record the tensors of *worker*, which has captured; *hold*: keep those of its models in memory."""
        self.entries: list[Entry] = []
        self._seen = 0
        runner = worker.model_runner
        self._device = getattr(getattr(worker, "device", None), "type", None) or runner.device.type
        visited: set[int] = set()
        with _no_subclass_functions():
            for prefix, model in models(runner):
                for name, module in model.named_modules(prefix=prefix):
                    self._add_module(f"{name}." if name else "", module, visited)
            skipped = {"model", "requests", "vllm_config", "encoder_cache"}
            self._add(runner, "runner.", Kind.INPUT, (), skipped, visited)
            if hold:
                self.entries = [_with_the_tensor(entry) for entry in self.entries]

    def _add_module(self, name: str, module: Any, visited: set[int]) -> None:
        self._add(module, name, Kind.ATTRIBUTE, (), _attributes_of_any_module(), visited)
        for attribute, kind in (("_parameters", Kind.PARAMETER), ("_buffers", Kind.BUFFER)):
            for key, tensor in getattr(module, attribute).items():
                self._add_tensor(module, f"{name}{key}", kind, (attribute, key), tensor)

    def _add(
        self, root: Any, name: str, kind: Kind, steps: tuple[Any, ...], skipped: Container[str], visited: set[int]
    ) -> None:
        """Add the tensors of *root*, and of vLLM's objects in it that are no modules."""
        waiting: list[tuple[Any, str, tuple[Any, ...], int]] = [(root, name, steps, 0)]
        visited.add(id(root))
        while waiting and self._seen < _MOST:
            holder, holder_name, way, depth = waiting.pop()
            self._seen += 1
            for key, value in items_of(holder):
                if not way and key in skipped:
                    continue
                named = f"{holder_name[:-1]}[{key}]" if isinstance(holder, _CONTAINERS) else f"{holder_name}{key}"
                if _is_tensor(value):
                    self._add_tensor(root, named, kind, (*way, key), value)
                elif id(value) not in visited and may_hold_tensors(value) and depth < _DEEPEST:
                    visited.add(id(value))
                    # A container does not count as a level, an object does.
                    waiting.append((value, f"{named}.", (*way, key), depth + (not isinstance(value, _CONTAINERS))))

    def _add_tensor(self, root: Any, name: str, kind: Kind, steps: tuple[Any, ...], tensor: Any) -> None:
        if not _is_tensor(tensor) or tensor.device.type != self._device or steps[-1] in _IN_NO_GRAPH:
            return
        try:
            place = place_of(tensor)
            storage = tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # it has no storage, such as a fake tensor
            return
        if not place.pointer:  # an empty tensor
            return
        if any(step in _CACHES for step in steps):
            kind = Kind.CACHE
        elif kind is Kind.INPUT and steps[0] in _METADATA:
            kind = Kind.METADATA
        self.entries.append(Entry(name, kind, weakref.ref(root), steps, place, storage))

    def moved(self, kinds: Container[Kind] = frozenset(Kind), *, unhurried: bool = False) -> list[Moved]:
        """Return the tensors of *kinds* whose addresses have changed, without reading device memory.

        *unhurried*: let other threads run after every `_AT_ONCE` tensors; 3,000 of them take 10 ms.
        """
        moved = []
        with _no_subclass_functions():
            for number, entry in enumerate(self.entries):
                if unhurried and not number % _AT_ONCE:
                    time.sleep(0.001)
                if entry.kind not in kinds:
                    continue
                now = current(entry)
                if now is None:
                    if entry.kind in LASTING and entry.root() is not None:
                        moved.append(Moved(entry, None))
                elif not _lies_at(now, entry.place):
                    moved.append(Moved(entry, now))
        return moved

    def forget(self, moved: Iterable[Moved]) -> None:
        """Stop watching these tensors."""
        names = {each.entry.name for each in moved}
        self.entries = [entry for entry in self.entries if entry.name not in names]

    def bring_back(self, moved: Sequence[Moved]) -> dict[str, str]:
        """Copy *moved* tensors to their old addresses, and point the models to the copies.

        Returns the reason for each tensor that is not brought back, by name. The old memory must be held and not shared
        with a tensor that has stayed or lies there now, and shape, stride and dtype must be equal.
        """
        import torch

        neighbours: dict[int, list[Entry]] = defaultdict(list)
        for entry in self.entries:
            neighbours[entry.storage].append(entry)
        twins: dict[Place, list[Any]] = defaultdict(list)
        for each in moved:
            twins[each.entry.place].append(each.now)
        names = {each.entry.name for each in moved}
        with _no_subclass_functions():
            occupied = _Occupied(place_of(each.now) for each in moved if each.now is not None)
        why = {}
        for each in moved:
            reason = _not_copied(each, twins[each.entry.place]) or next(
                (
                    f"{other.name} lies in the same memory"
                    for other in neighbours[each.entry.storage]
                    if other.name not in names and _partly_same(other.place, each.entry.place)
                ),
                None,
            )
            if reason is None and occupied.overlaps(each.entry.place):
                # A copy would overwrite values that are still to be copied, or that stay there.
                reason = "a tensor that has moved lies in the same memory"
            if reason is not None:
                why[each.entry.name] = reason
        good = [each for each in moved if each.entry.name not in why]
        with torch.inference_mode(), _no_subclass_functions():
            # All copies before the first tensor is put back: two may share the memory that they have moved to.
            for each in good:
                each.entry.held.copy_(each.now)
            for each in good:
                _point(each)
            why |= {
                each.entry.name: "it could not be put back"
                for each in good
                if (now := current(each.entry)) is None or not _lies_at(now, each.entry.place)
            }
        return why


class _Occupied:
    """Memory that some tensors lie in."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._spans = sorted((place.pointer, place.end) for place in places)
        self._ends = list(accumulate((end for _, end in self._spans), max))
        """The highest end of each span and those before it."""

    def overlaps(self, place: Place) -> bool:
        """Tell if one of the tensors lies partly in *place*."""
        before = bisect_left(self._spans, (place.end,))
        return before > 0 and self._ends[before - 1] > place.pointer


def _not_copied(each: Moved, twins: Sequence[Any]) -> str | None:
    """Return the reason for which *each* cannot be copied back; *twins*: all tensors that shared its old place."""
    entry, now = each
    if now is None:
        return "it is gone"
    if entry.kind not in _COPIED:
        return f"it is no weight, but {entry.kind.value}"
    if entry.held is None:
        return "nobody holds the memory that the graphs have"
    with _no_subclass_functions():
        if place_of(now)[1:] != entry.place[1:] or now.device != entry.held.device:
            return "its shape, stride or type is another"
        if not all(twin is not None and _equal(twin, now) for twin in twins):
            return "tensors that were one are two"
    return None


def _partly_same(one: Place, other: Place) -> bool:
    return one != other and one.pointer < other.end and other.pointer < one.end


def models(runner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the model of *runner* and that of its drafter, each with a prefix for the names of its modules."""
    import torch

    get_model = getattr(runner, "get_model", None)
    yield "", get_model() if get_model is not None else runner.model
    for owner in ("drafter", "speculator"):
        draft = getattr(getattr(runner, owner, None), "model", None)
        draft = getattr(draft, "unwrap", lambda model=draft: model)()
        if isinstance(draft, torch.nn.Module):
            yield owner, draft


def current(entry: Entry) -> Any:
    """Return the tensor at the path of *entry* now; None if there is none."""
    value = entry.root()
    try:
        for step in entry.steps:
            value = value[step] if isinstance(value, _CONTAINERS) else value.__dict__[step]
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
    return value if _is_tensor(value) else None


def place_of(tensor: Any) -> Place:
    return Place(tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _lies_at(tensor: Any, place: Place) -> bool:
    try:
        return bool(
            tensor.data_ptr() == place.pointer
            and tensor.shape == place.shape
            and tensor.stride() == place.stride
            and tensor.dtype == place.dtype
        )
    except (RuntimeError, NotImplementedError):
        return False


def _with_the_tensor(entry: Entry) -> Entry:
    tensor = current(entry) if entry.kind in _COPIED else None
    return entry if tensor is None else entry._replace(held=tensor.detach())


def _point(each: Moved) -> None:
    """Put the held tensor of *each* at its path in the model."""
    try:
        each.now.data = each.entry.held  # in place: other references to this tensor follow
    except RuntimeError:  # of incompatible kinds, such as one made in inference mode and one not
        holder = each.entry.root()
        for step in each.entry.steps[:-1]:
            holder = holder[step] if isinstance(holder, _CONTAINERS) else holder.__dict__[step]
        if isinstance(holder, (dict, list)):
            holder[each.entry.steps[-1]] = _replacement(each)
        elif not isinstance(holder, tuple):
            holder.__dict__[each.entry.steps[-1]] = _replacement(each)


def _replacement(each: Moved) -> Any:
    """Return the held tensor of *each*, as a parameter if the present one is a parameter."""
    import torch

    if not isinstance(each.now, torch.nn.Parameter):
        return each.entry.held
    made = torch.nn.Parameter(each.entry.held, requires_grad=False)
    made.__dict__.update(each.now.__dict__)  # attributes that loaders of weights read
    return made


def _equal(one: Any, other: Any) -> bool:
    import torch

    return one is other or place_of(one) == place_of(other) or torch.equal(one, other)


def items_of(holder: Any) -> list[tuple[Any, Any]]:
    """Return keys and values of a container, or attributes of an object."""
    if isinstance(holder, dict):
        return list(holder.items())
    if isinstance(holder, (list, tuple)):
        return list(enumerate(holder))
    return list(vars(holder).items())


def may_hold_tensors(value: Any) -> bool:
    """Tell if *value* is a container, or an object of vLLM that is neither a module nor a configuration."""
    if isinstance(value, _CONTAINERS):
        return True
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    import torch

    module = type(value).__module__
    of_vllm = module.startswith("vllm.") and not module.startswith("vllm.config")
    return of_vllm and not isinstance(value, (Enum, torch.nn.Module))


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _attributes_of_any_module() -> Container[str]:
    import torch

    return vars(torch.nn.Module()).keys()


def _no_subclass_functions() -> Any:
    """Return a context in which parameters are plain tensors: vLLM's subclasses wrap each operation."""
    import torch

    return torch._C.DisableTorchFunctionSubclass()
