"""Compares the attention metadata of replays with those that full graphs were captured with.

A graph has the addresses of the tensors that its capture read, and the numbers that its kernels were launched with. The
fields that matter are those that vLLM's layers read while the graph was captured: until the capture ends, the classes
of metadata note which of their fields are read. A step's own are read in vLLM's forward context, or in the variables of
model runner V2's `execute_model`, before the replay.

Segments of a breakable graph may read metadata, too, if these lie in persistent buffers. What reads others needs an
eager break (53030). Model runner V1 captures segments without metadata, so that a reader of these takes another path.
Segments are compared without host numbers, which layers read there only to choose what they do in an eager break.

It is off by default. One replay in `_EVERY` is compared: nothing is synchronised, no number of a tensor is read. Host
tensors are left out: layers read lengths of a batch there that need not matter.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm_graphfix.engine.bypass import Watched, serves_requests
from vllm_graphfix.engine.graph_dispatch import graph_being_captured
from vllm_graphfix.log import logger
from vllm_graphfix.records.record import SHORT, OtherMetadata
from vllm_graphfix.text import PAGES

if TYPE_CHECKING:
    from types import FrameType

NAME = "metadata"
"""Its name in records and metrics, which hold its counts like those of a fix."""
_LISTED = 5
"""Limit of fields that a record names."""
_EVERY = 16
_DEEPEST, _MAX_FRAMES = 6, 32
_PRESENT, _MISSING = "present", "missing"
_BREAKABLE = "vllm.compilation.breakable_cudagraph"
_OF_CONTEXT = ("attn_metadata", "slot_mapping")
"""Fields of the forward context that a step's metadata are in."""
Path = tuple[Any, ...]
"""Keys, indices and names of fields that lead from the metadata of all layers to a value."""


class MetadataCheck:
    """Watches the captures and replays of one process."""

    def __init__(self, publish: Callable[[], None] = lambda: None) -> None:
        """*publish* is called when a field differs."""
        self._publish = publish
        self._failures = 0
        self._replaced: list[tuple[Any, str, Any]] = []
        """Classes that have a function of ours under a name until the capture ends, and what they had there."""
        self._capture: _Capture | None = None
        """The graph that is being captured."""
        self._segment: _Sample | None = None
        """Compares the segment whose capture has ended, until the breakable graph has its replay."""
        self._compared: int | None = None
        """Replays that were compared; None before a capture, and after a `reset`: then none is compared."""
        self._differing = 0
        self._first: dict[str, OtherMetadata] = {}

    def begin_capture(self, _: Any = None) -> None:
        """Note from now on what graphs read, whichever worker captures."""
        if self._failures:
            return
        try:
            import torch
            from vllm.forward_context import ForwardContext

            self._compared = self._compared or 0
            self._device = "cuda" if torch.cuda.is_available() else "cpu"
            self._note_reads(ForwardContext)
            for name, around in (("capture_begin", self._begin_graph), ("capture_end", self._end_graph)):
                self._replace(torch.cuda.CUDAGraph, name, around)
            if (breakable := sys.modules.get(_BREAKABLE)) is not None:
                self._replace(breakable.BreakableCUDAGraphCapture, "_end_segment", self._end_segment)
        except Exception as error:
            self._fail(error)

    def end_capture(self) -> None:
        """Leave classes as they were."""
        self._capture = None
        replaced, self._replaced = self._replaced, []
        for kind, name, stock in replaced:
            if stock is _MISSING:
                delattr(kind, name)
            else:
                setattr(kind, name, stock)

    # -- the capture -----------------------------------------------------------------------------------------------

    def _replace(self, kind: Any, name: str, around: Callable[..., Any]) -> None:
        stock = getattr(kind, name)
        self._replaced.append((kind, name, vars(kind).get(name, _MISSING)))

        def replacement(instance: Any, *args: Any, **kwargs: Any) -> Any:
            return around(stock, instance, *args, **kwargs)

        setattr(kind, name, replacement)

    def _note_reads(self, kind: type) -> None:
        """Note reads of fields of objects of *kind*, unless its `__getattribute__` is not Python's."""
        if getattr(kind, "__getattribute__") == getattr(object, "__getattribute__"):  # noqa: B009 - mypy's types differ
            self._replace(kind, "__getattribute__", self._read)

    def _read(self, stock: Callable[..., Any], instance: Any, name: str) -> Any:
        if (capture := self._capture) is not None:
            try:
                if type(instance).__name__ == "ForwardContext":
                    if name in _OF_CONTEXT and not stock(instance, name):
                        capture.absent.setdefault(f"{name} in {_reader()}", name)
                    elif name == "attn_metadata":
                        self._enter(capture, stock(instance, name))
                elif (path := capture.paths.get(id(instance))) is not None:
                    capture.read.add((*path, name))
            except Exception as error:
                self._fail(error)
        return stock(instance, name)

    def _begin_graph(self, stock: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> None:
        stock(graph, *args, **kwargs)
        self._capture = _Capture(self._device)
        self._try(lambda: self._enter(self._capture, _metadata_of_context()))

    def _enter(self, capture: Any, metadata: Any) -> None:
        if metadata is not None and capture.begins(metadata):
            for path, each in objects_of(metadata):
                self._note_reads(type(each))
                capture.add(path, each)

    def _end_graph(self, stock: Callable[..., Any], graph: Any) -> None:
        capture, self._capture = self._capture, None
        stock(graph)
        # A piecewise graph reads no metadata, since attention runs between the pieces: it is not watched.
        if capture is None or not ((fields := capture.fields()) or capture.absent):
            return
        sample = _Sample(functools.partial(self._compare, capture.graph, fields, capture.absent))
        if capture.is_segment:
            self._segment = sample
        else:
            # `Watched` installs itself on the graph.
            self._try(lambda: Watched(graph, "replay", lambda watched: sample(watched.instance())))

    def _end_segment(self, stock: Callable[..., Any], breakable: Any) -> None:
        graph = breakable._current_graph
        stock(breakable)
        sample, self._segment = self._segment, None
        if sample is not None:
            # A `Watched` on the graph would not do: of a segment's graph nothing but the bound `replay` is held.
            breakable.segments[-1] = functools.partial(_replay, sample, graph)

    # -- replays ---------------------------------------------------------------------------------------------------

    def _compare(self, name: str, fields: dict[Path, Any], absent: dict[str, str], graph: Any) -> None:
        if self._compared is not None:
            self._try(lambda: self._judge(name, fields, absent, graph))

    def _judge(self, name: str, fields: dict[Path, Any], absent: dict[str, str], graph: Any) -> None:
        metadata = _metadata_of_context() or _metadata_of_runner(graph)
        if not metadata or not serves_requests(sys._getframe()):
            return
        self._compared = (self._compared or 0) + 1
        differences = [
            (_name_of(metadata, path), difference) for path, difference in differing(fields, metadata, self._device)
        ]
        differences += [(read, "was None or empty") for read, field in absent.items() if _of_context(field)]
        self._differing += bool(differences)
        for field, difference in differences:
            if field not in self._first and len(self._first) < _LISTED:
                self._first[field] = OtherMetadata(field[:SHORT], name, difference[:SHORT])
                logger.warning(
                    "graphfix: graph %s replays on other metadata than it was captured with, and may answer wrongly: "
                    "%s %s. See %s/detectors.md#metadata-of-replays",
                    *(name, field, difference, PAGES),
                )
                self._publish()

    def _try(self, function: Callable[[], Any]) -> None:
        if self._failures:
            return
        try:
            function()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        self._capture = self._segment = None
        logger.warning("graphfix: metadata of replays are not compared: %s: %s", type(error).__name__, error)

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the events for a record; empty before a capture."""
        if self._compared is None and not self._failures:
            return {}
        counted = {"compared": self._compared or 0, "differing": self._differing, "failures": self._failures}
        return {NAME: counted}

    def findings(self) -> tuple[OtherMetadata, ...]:
        """Return the first fields that differ, for a record."""
        return tuple(self._first.values())

    def reset(self) -> None:
        """Discard what was watched: in a forked child, which has no graphs yet, or when the setting changes."""
        self.end_capture()
        self._failures, self._compared, self._differing, self._first = 0, None, 0, {}


class _Capture:
    """Holds the metadata that one graph is captured with, and the fields of them that it reads."""

    def __init__(self, device: str) -> None:
        made = graph_being_captured()
        self.graph = f"{made.mode} {made.tokens}" if made is not None else "a graph"
        self.paths: dict[int, Path] = {}
        self.read: set[Path] = set()
        self.absent: dict[str, str] = {}
        """Fields of the forward context that had nothing when they were read, by field and reader."""
        breakable = sys.modules.get(_BREAKABLE)
        self.is_segment = breakable is not None and breakable.BreakableCUDAGraphCapture.current() is not None
        self._breaks = self.is_segment and getattr(_of_context("cudagraph_runtime_mode"), "name", "") != "FULL"
        self._device = device
        self._values: dict[Path, dict[Path, Any]] = {}
        self._objects: list[Any] = []
        """Metadata, which live as long as their ids are in use."""

    def begins(self, metadata: Any) -> bool:
        """Tell if *metadata*, of all layers, are new here."""
        if any(each is metadata for each in self._objects):
            return False
        self._objects.append(metadata)
        return True

    def add(self, path: Path, instance: Any) -> None:
        if id(instance) not in self.paths:
            self.paths[id(instance)] = path
            self._objects.append(instance)
            for name, value in vars(instance).items():
                own = (*path, name)
                self._values[own] = {each: _seen(each, leaf, self._device) for each, leaf in _leaves(value, own)}

    def fields(self) -> dict[Path, Any]:
        """Return the values that the graph has read, as they were when its capture began."""
        all_fields = {path: seen for read in self.read for path, seen in self._values.get(read, {}).items()}
        if not self._breaks:
            return all_fields
        return {path: seen for path, seen in all_fields.items() if not isinstance(seen, (int, float))}


class _Sample:
    """Calls *compare* with the graph for its first replay, and one in `_EVERY`."""

    def __init__(self, compare: Callable[[Any], None]) -> None:
        self._compare = compare
        self._count = -1

    def __call__(self, graph: Any) -> None:
        self._count += 1
        if self._count % _EVERY == 0:
            self._compare(graph)


def _replay(sample: _Sample, graph: Any) -> None:
    sample(graph)
    graph.replay()


def differing(fields: dict[Path, Any], metadata: Any, device: str) -> Iterator[tuple[Path, str]]:
    """Yield the paths at which *metadata* have no longer what the capture read, each with the difference."""
    # Parts of the metadata with a schedule that was made for their longest query, in a tensor.
    planned = {
        path[:-1] for path, before in fields.items() if "schedule" in str(path[-1]) and isinstance(before, tuple)
    }
    for path, before in fields.items():
        value = _at(metadata, path)
        if value is _MISSING:
            continue
        now = _seen(path, value, device)
        if (before is None) != (now is None):
            yield path, "is not None any more" if before is None else "is None"
        elif isinstance(before, tuple) and isinstance(now, tuple):
            if before[0] != now[0]:
                yield path, "lies elsewhere"
            # Dimensions of size 1 have no stride here (`_seen`), so that a smaller batch may have fewer strides.
            elif len(before) == len(now) and before != now:
                yield path, "has other strides"
        elif isinstance(before, (int, float)) and isinstance(now, (int, float)) and before != now:
            # The longest of a batch bounds what kernels do, unless a schedule is made for it.
            is_bound = str(path[-1]).startswith("max_")
            if not is_bound or now > before or (path[-1] == "max_query_len" and path[:-1] in planned):
                yield path, f"is {now}, not {before}"


def objects_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the dataclasses among the metadata of layers, each with its path."""
    if len(path) > _DEEPEST:
        return
    is_one = dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")
    if is_one:
        yield path, value
    for key, part in vars(value).items() if is_one else _parts(value):
        yield from objects_of(part, (*path, key))


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    yield path, value
    for key, part in _parts(value) if len(path) <= _DEEPEST else ():
        yield from _leaves(part, (*path, key))


def _parts(value: Any) -> Any:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


def _seen(path: Path, value: Any, device: str) -> Any:
    """Return what a graph has of *value*: of a tensor its address and strides, of other objects that they are there."""
    if value is None or isinstance(value, (int, float)):
        return value
    is_tensor = hasattr(value, "data_ptr") and hasattr(value, "stride")
    if not is_tensor or value.device.type != device or str(path[-1]).endswith("_cpu") or not value.numel():
        return _PRESENT
    return (value.data_ptr(), *(step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1))


def _at(value: Any, path: Path) -> Any:
    for key in path:
        if isinstance(value, (dict, list, tuple)):
            try:
                value = value[key]
            except LookupError:
                return _MISSING
        else:
            value = getattr(value, "__dict__", {}).get(key, _MISSING)
        if value is _MISSING:
            break
    return value


def _name_of(metadata: Any, path: Path) -> str:
    layer = 2 if isinstance(path[0], int) else 1  # with micro-batches, the number of one comes before the layer
    return ".".join(map(str, (type(_at(metadata, path[:layer])).__name__, *path[layer:])))


def _metadata_of_context() -> Any:
    return _of_context("attn_metadata")


def _of_context(field: str) -> Any:
    """Return a field of the present forward context; None without one."""
    context = getattr(sys.modules.get("vllm.forward_context"), "_forward_context", None)
    return vars(context).get(field) if context is not None else None


def _reader() -> str:
    """Return the name of the function of vLLM's that reads the forward context now."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (
        frame.f_globals.get("__name__") == __name__ or frame.f_code.co_name.startswith("get_")
    ):
        frame = frame.f_back
    return frame.f_code.co_name if frame is not None else "a function"


def _metadata_of_runner(graph: Any) -> Any:
    """Return the metadata of the step in which a model runner V2 or its speculator replays *graph*, by its caller."""
    frame: FrameType | None = sys._getframe()
    for _ in range(_MAX_FRAMES):
        frame = frame and frame.f_back
        if frame is None:
            break
        names = [name for name in _VARIABLES if name in frame.f_code.co_varnames]
        if names and _replays(frame.f_locals.get("self"), graph):
            return frame.f_locals.get(names[0])
    return None


_VARIABLES = ("draft_attn_metadata", "attn_metadata_updated", "attn_metadata")


def _replays(owner: Any, graph: Any) -> bool:
    """Tell if a manager of *owner* has *graph*.

    Not by `managers_of`: that has a runner's speculator, too, whose graphs replay on other metadata.
    """
    managers = [*getattr(owner, "__dict__", {}).values()]
    return any(graph is each for manager in managers for each in [*_graphs_of(manager).values()])


def _graphs_of(manager: Any) -> dict[Any, Any]:
    graphs = getattr(manager, "__dict__", {}).get("graphs")
    return graphs if isinstance(graphs, dict) else {}
