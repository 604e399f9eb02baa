"""CPU stand-in for Triton's launcher: a kernel's own Python body runs on CPU tensors, one program after another.

The body is vLLM's; only `tl` is replaced, with the part of it that the kernels of the scenarios use. A launch is one
opaque operator, as a kernel is in a CUDA graph.

Triton's own interpreter does not replace this. It needs `TRITON_INTERPRET=1` and a Triton that vLLM takes for active
before vLLM is imported, for without them vLLM's placeholder drops the kernels' `tl.constexpr`; PyTorch for CPUs does
not bring Triton. It adds 66 names to the globals of each of vLLM's modules with kernels, checks no address, and takes
125 ms for a launch that takes 3 ms here (eight programs of `_fwd_kernel_stage2`, vLLM 0.18.1, Triton 3.9.0).
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def cpu_triton_kernels(*modules: ModuleType) -> Iterator[None]:
    """Make each `…_kernel` or `…_kernel_stage1` of *modules* launchable on a CPU within the block."""
    host = SimpleNamespace(cdiv=lambda a, b: -(-a // b), next_power_of_2=lambda n: 1 << (n - 1).bit_length())
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "triton", host))
            for name, kernel in list(vars(module).items()):
                if re.search(r"_kernel(_stage\d)?$", name):
                    stack.enter_context(mock.patch.object(module, name, KernelStandIn(_body(kernel))))
        yield


class KernelStandIn:
    """Stands in for a `triton.JITFunction`, launched as `kernel[grid](*arguments, CONSTANT=…)`."""

    def __init__(self, body: Callable[..., None]) -> None:
        self.body = body

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        places = [i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor)]
        scalars = [None if isinstance(a, torch.Tensor) else a for a in arguments]
        for option in ("num_warps", "num_stages", "num_ctas"):  # of the launch; the kernel does not see them
            constants.pop(option, None)
        _launches.append(Launch(self.body, grid, scalars, places, constants))
        torch.ops.vllm_graphfix.triton_launch(tensors, len(_launches) - 1)


@dataclass(frozen=True)
class Launch:
    """A launch without its tensors, which are the operator's arguments: a captured launch runs again."""

    body: Callable[..., None]
    grid: tuple[int, ...]
    scalars: list[object]
    places: list[int]
    constants: dict[str, object]

    def run(self, tensors: list[torch.Tensor]) -> None:
        arguments = list(self.scalars)
        for place, tensor in zip(self.places, tensors, strict=True):
            arguments[place] = Pointer.to(tensor)
        modules = _replacements(self.body)
        with contextlib.ExitStack() as stack:
            for names, replaced in modules:
                stack.enter_context(mock.patch.dict(names, {**replaced, "tl": None}))
            for program in itertools.product(*map(range, self.grid)):
                language = Language(self.grid, program)
                for names, _ in modules:
                    names["tl"] = language
                self.body(*arguments, **self.constants)


def _replacements(body: Callable[..., None]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the globals of each module of *body* and of the kernels it calls, each with the names to replace there."""
    replacements: list[tuple[dict[str, Any], dict[str, Any]]] = []
    waiting = [body]
    while waiting:
        names = waiting.pop().__globals__
        if any(names is known for known, _ in replacements):
            continue
        jitted = {name: _body(value) for name, value in names.items() if _body(value) is not value}
        replacements.append((names, jitted))
        called = (jitted.get(name, names[name]) for name in names)
        waiting += [each for each in called if inspect.isfunction(each) and "tl" in each.__globals__]
    return replacements


_launches: list[Launch] = []
"""All launches of this process: a graph refers to them by index, and may be replayed at any time."""


# No tensor is declared as written to, for only the kernel's body knows which are.
@torch.library.custom_op("vllm_graphfix::triton_launch", mutates_args=(), schema="(Tensor[] tensors, int launch) -> ()")
def _triton_launch(tensors: list[torch.Tensor], launch: int) -> None:
    _launches[launch].run(tensors)


@_triton_launch.register_fake
def _(tensors: list[torch.Tensor], launch: int) -> None: ...


@dataclass(frozen=True)
class Pointer:
    """A typed address, or a block of them."""

    memory: torch.Tensor
    offset: torch.Tensor

    @classmethod
    def to(cls, tensor: torch.Tensor) -> Pointer:
        """Return a pointer to the storage behind *tensor*: as on a GPU, the end of a view stops no kernel."""
        end = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(tensor.as_strided((end - tensor.storage_offset(),), (1,)), torch.tensor(0))

    def __add__(self, offset: torch.Tensor | int) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def __sub__(self, offset: torch.Tensor | int) -> Pointer:
        return self + -offset

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)


class ProgramId(int):
    """Place of a program in the grid, which a kernel may widen."""

    def to(self, dtype: torch.dtype) -> ProgramId:
        return self


class Language:
    """Stands in for `triton.language` in one program of a launch."""

    int32, int64, float32, float64 = torch.int32, torch.int64, torch.float32, torch.float64
    arange = staticmethod(torch.arange)
    range = staticmethod(range)
    zeros = staticmethod(torch.zeros)

    def __init__(self, grid: tuple[int, ...], program: tuple[int, ...]) -> None:
        self._grid, self._program = grid, program

    def program_id(self, axis: int) -> ProgramId:
        return ProgramId(self._program[axis])

    def num_programs(self, axis: int) -> int:
        return self._grid[axis]

    @staticmethod
    def load(pointer: Pointer, mask: torch.Tensor | None = None, other: float = 0) -> torch.Tensor:
        if mask is None:
            return pointer.memory[_checked(pointer)].clone()
        block = pointer.memory.new_full(mask.shape, other)
        block[mask] = pointer.memory[_checked(pointer, mask)]
        return block

    @staticmethod
    def store(pointer: Pointer, value: torch.Tensor | float, mask: torch.Tensor | None = None) -> None:
        values = torch.as_tensor(value).to(pointer.memory.dtype)
        if mask is not None:
            values = values.expand(mask.shape)[mask]
        pointer.memory[_checked(pointer, mask)] = values

    @staticmethod
    def where(condition: torch.Tensor | bool, a: torch.Tensor | float, b: torch.Tensor | float) -> torch.Tensor:
        return torch.where(torch.as_tensor(condition), a, b)

    @staticmethod
    def minimum(a: torch.Tensor, b: torch.Tensor | int) -> torch.Tensor:
        return torch.minimum(a, torch.as_tensor(_plain(b), dtype=a.dtype))

    @staticmethod
    def maximum(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
        return torch.maximum(a, torch.as_tensor(_plain(b), dtype=a.dtype))

    @staticmethod
    def cdiv(a: torch.Tensor, b: int) -> torch.Tensor:
        return -(-a // b)

    @staticmethod
    def exp(x: torch.Tensor | float) -> torch.Tensor:
        return torch.as_tensor(x).exp()

    @staticmethod
    def log(x: torch.Tensor | float) -> torch.Tensor:
        return torch.as_tensor(x).log()

    @staticmethod
    def sum(block: torch.Tensor, axis: int) -> torch.Tensor:
        return block.sum(dim=axis)

    @staticmethod
    def max(block: torch.Tensor, axis: int, return_indices: bool) -> tuple[torch.Tensor, torch.Tensor]:
        value, index = block.max(dim=axis)
        return value, index


def _checked(pointer: Pointer, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the offsets that are accessed.

    Raises:
        RuntimeError: an offset is negative. It would count from the end here, and faults on a GPU.
    """
    offsets = pointer.offset if mask is None else pointer.offset.expand(mask.shape)[mask]
    if offsets.numel() and int(offsets.min()) < 0:
        raise RuntimeError("illegal memory access (CPU stand-in): an offset before the tensor")
    return offsets


def _plain(number: Any) -> Any:
    """Return the number behind a module's constant, which is a `constexpr` where Triton is installed."""
    return getattr(number, "value", number)


def _body(kernel: Any) -> Any:
    """Return the Python function behind a `triton.JITFunction` or its stand-in; without Triton, *kernel* itself."""
    if isinstance(kernel, KernelStandIn):
        return kernel.body
    function = getattr(kernel, "fn", None)
    return function if inspect.isfunction(function) else kernel
