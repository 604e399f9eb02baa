"""A CPU double of CUDA graphs: capture records operations and runs none, replay runs them on the recorded addresses.

What makes a graph wrong on a GPU makes it wrong here: unwritten memory is poisoned, traced Python does not run again,
and an operation that did not run during the capture is not in the graph. Host and device tensors are all CPU tensors
here, so a captured function must not compute on the host.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace, TracebackType
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_HASHABLE_ARGUMENTS = {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_layouts: dict[Any, Any] = {}
"""Results of `Recorder._layouts_of_results`, by operation and `_layout_key` of its arguments."""
_capturing: list[CPUGraph] = []
"""The graph that is being captured, or none. A list, so that all threads see the same one; see `compressor.py`."""


@dataclass(frozen=True)
class Operation:
    """One recorded operation: its function, the tensors it reads or writes, and the memory of its new results."""

    function: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    results: tuple[torch.Tensor | None, ...]
    """Memory of each returned tensor; None if the function returns one of its arguments."""

    @property
    def name(self) -> str:
        """For example ``aten::mm``."""
        return self.function._schema.name

    def run(self) -> None:
        computed = self.function(*self.arguments, **self.keywords)
        if not any(memory is not None for memory in self.results):
            return
        for memory, value in zip(self.results, tree_leaves(computed), strict=True):
            if memory is not None:
                memory.copy_(value)


@dataclass(frozen=True)
class Layout:
    """A tensor without its numbers."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class CPUGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.operations: list[Operation] = []
        self._pool: tuple[int, int] | None = None
        self._captured = False

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        if _capturing:
            raise RuntimeError("a CUDA graph is being captured already")
        if self._captured:
            raise RuntimeError("this CUDA graph has been captured already; reset() it first")
        self._pool = pool or graph_pool_handle()
        _capturing.append(self)

    def capture_end(self) -> None:
        _capturing.clear()
        self._captured = True

    def replay(self) -> None:
        """Run the recorded operations in order, in the memory of the capture.

        Raises:
            RuntimeError: the graph has not been captured, or another one is being captured.
        """
        _forbid_while_capturing("replaying a CUDA graph")
        if not self._captured:
            raise RuntimeError("replay() of a CUDA graph that has not been captured")
        with torch.inference_mode():
            for operation in self.operations:
                operation.run()

    def reset(self) -> None:
        self.operations.clear()
        self._captured = False

    def pool(self) -> tuple[int, int]:
        if self._pool is None:
            raise RuntimeError("pool() of a CUDA graph that has not been captured")
        return self._pool


class Recorder(TorchDispatchMode):
    """Records operations into `graph` without executing them; views are executed, for they only compute an address."""

    def __init__(self, graph: CPUGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph
        self._fake = FakeTensorMode()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):
            with self:  # in inference mode, composites such as matmul are not decomposed before this
                return func.decompose(*args, **kwargs)
        returns = func._schema.returns
        aliases = [r.alias_info for r in returns]
        if any(a is not None and not a.is_write for a in aliases):
            return func(*args, **kwargs)
        layouts = self._layouts_of_results(func, args, kwargs) if returns else ()
        results = (layouts,) if len(returns) == 1 else layouts
        arguments = _arguments_by_alias(func, args, kwargs) if any(aliases) else {}
        produced = [
            tree_map(_unwritten_like, result) if alias is None else arguments[next(iter(alias.before_set))]
            for alias, result in zip(aliases, results, strict=True)
        ]
        if func not in _ALLOCATIONS:
            memory = tuple(
                leaf if alias is None else None
                for alias, value in zip(aliases, produced, strict=True)
                for leaf in tree_leaves(value)
            )
            self._graph.operations.append(Operation(func, args, kwargs, memory))
        return tuple(produced) if len(returns) > 1 else produced[0] if returns else None

    def _layouts_of_results(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of *func* with a `Layout` for each tensor, computed once for arguments of equal layout.

        Fake tensors take ten times as long as the rest of a recording, and graphs repeat the same operations in each
        layer.
        """
        try:
            key = (func, torch.get_default_dtype(), _layout_key(args), _layout_key(tuple(sorted(kwargs.items()))))
        except TypeError:
            return self._layouts_by_fake_tensors(func, args, kwargs)
        if key not in _layouts:
            _layouts[key] = self._layouts_by_fake_tensors(func, args, kwargs)
        return _layouts[key]

    def _layouts_by_fake_tensors(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with self._fake:
                outputs = func(*tree_map(self._fake_of, args), **tree_map(self._fake_of, kwargs))
        except (DataDependentOutputException, DynamicOutputShapeException) as e:
            raise RuntimeError(
                f"operation not permitted when stream is capturing: {func} needs values on the host"
            ) from e
        return tree_map(_layout_of, outputs)

    def _fake_of(self, value: Any) -> Any:
        return self._fake.from_tensor(value) if isinstance(value, torch.Tensor) else value


class Capture:
    """Stands in for `torch.cuda.graph`, the context manager."""

    def __init__(
        self,
        cuda_graph: CPUGraph,
        pool: tuple[int, int] | None = None,
        stream: object = None,
        capture_error_mode: str = "global",
    ) -> None:
        self._graph, self._pool = cuda_graph, pool
        self._recorder: contextlib.AbstractContextManager[object] = Recorder(cuda_graph)

    def __enter__(self) -> None:
        self._graph.capture_begin(self._pool)
        self._recorder.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder.__exit__(kind, error, traceback)
        self._graph.capture_end()
        if error is not None:
            self._graph.reset()


class CPUStream:
    """Stands in for `torch.cuda.Stream` and `torch.cuda.Event`; everything here runs in order."""

    def __init__(self, *_: object, **__: object) -> None:
        self.cuda_stream = 0

    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: CPUStream | None = None) -> CPUStream:
        return event or CPUStream()

    def synchronize(self) -> None:
        _forbid_while_capturing("synchronizing")


class SingleRankGroupStandIn:
    """Stands in for vLLM's GroupCoordinator of one rank."""

    world_size, rank, local_rank, device_index, rank_in_group, ranks = 1, 0, 0, 0, 0, [0]
    is_first_rank = is_last_rank = True
    device_communicator = None

    @contextlib.contextmanager
    def graph_capture(self, graph_capture_context: Any = None) -> Iterator[Any]:
        yield graph_capture_context or SimpleNamespace(stream=CPUStream())

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return input_


@contextlib.contextmanager
def cpu_cuda_graphs() -> Iterator[None]:
    """Install the double within the block: torch.cuda's graphs, streams and events, and vLLM's groups of one rank."""
    current = CPUStream()
    patches: list[tuple[Any, str, Any]] = [
        (torch.cuda, "CUDAGraph", CPUGraph),
        (torch.cuda, "graph", Capture),
        (torch.cuda, "graph_pool_handle", graph_pool_handle),
        (torch.cuda, "is_current_stream_capturing", lambda: bool(_capturing)),
        (torch.cuda, "Stream", CPUStream),
        (torch.cuda, "Event", CPUStream),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.cuda, "current_stream", lambda device=None: current),
        (torch.cuda, "synchronize", lambda device=None: current.synchronize()),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "mem_get_info", lambda device=None: (1 << 30, 1 << 30)),
    ]
    # Tests have packages named vllm without platforms; the double itself needs no vLLM.
    if importlib.util.find_spec("vllm") and importlib.util.find_spec("vllm.platforms"):
        from vllm.distributed import parallel_state
        from vllm.platforms import current_platform

        group, pool = SingleRankGroupStandIn(), graph_pool_handle()
        patches += [
            (parallel_state, name, group)
            for name in ("_WORLD", "_TP", "_PP", "_DP", "_EP", "_DCP", "_PCP")
            if hasattr(parallel_state, name)
        ]
        patches.append((type(current_platform), "get_global_graph_pool", lambda self: pool))
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


_pools = itertools.count(1)


def graph_pool_handle() -> tuple[int, int]:
    return (0, next(_pools))


def fill_as_unwritten_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill *tensor* as unwritten memory: NaN, a large negative integer, or the largest number of an unsigned type."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    info = torch.iinfo(tensor.dtype)
    return tensor.fill_(info.min // 2 or info.max)


def _unwritten_like(layout: Any) -> Any:
    if not isinstance(layout, Layout):
        return layout
    return fill_as_unwritten_(torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype))


def _is_composite(func: Any) -> bool:
    """Return True if `decompose` has something to do."""
    return _COMPOSITE in func.py_kernels or _has_composite_kernel(func.name())


@cache
def _has_composite_kernel(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, _COMPOSITE)


def _layout_of(value: Any) -> Any:
    return Layout(value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


def _layout_key(value: Any) -> Any:
    """Return what the layout of a result may depend on in an argument, as a key of `_layouts`.

    Raises:
        TypeError: the layout may depend on more, such as the numbers of a subclass of tensors.
    """
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return (value.shape, value.stride(), value.dtype, value.device)
    if kind in (tuple, list):
        return (kind, *map(_layout_key, value))
    if kind in _HASHABLE_ARGUMENTS:
        return (kind, value)  # 1, 1.0 and True are equal, and make results of other types
    raise TypeError(kind)


def _arguments_by_alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that *func* writes to, by the name of their alias set in its schema.

    List arguments have no such name in schemas, and no function returns them.
    """
    named = func._schema.arguments
    arguments = dict(zip((a.name for a in named), args, strict=False)) | kwargs
    return {
        alias: arguments[a.name]
        for a in named
        if a.alias_info is not None and a.name in arguments
        for alias in a.alias_info.before_set
    }


def _forbid_while_capturing(what: str) -> None:
    if _capturing:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
