"""A LoRA adapter for a trained model, and its folder as PEFT writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_graphfix.verify.engine import adapters
from vllm_graphfix.verify.engine.adapters import MODULES, RANK


class Adapter(nn.Module):
    """An adapter of *model*; at first it changes nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._adapted = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in MODULES
        }
        # Names of submodules must not have dots.
        self.inner = nn.ModuleDict({_key(name): _inner(matrix) for name, matrix in self._adapted.items()})
        self.outer = nn.ModuleDict({_key(name): _outer(matrix) for name, matrix in self._adapted.items()})

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Apply this adapter to the model within the context."""
        hooks = [
            matrix.register_forward_hook(_added(self.inner[_key(name)], self.outer[_key(name)]))
            for name, matrix in self._adapted.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def save(self, made: Path) -> Path:
        """Write the folder *made*, and return it."""
        factors = {
            name: tuple(self.get_parameter(f"{part}.{_key(name)}.weight") for part in ("inner", "outer"))
            for name in self._adapted
        }
        return adapters.write(factors, made)


def _key(name: str) -> str:
    return name.replace(".", "-")


def _added(inner: nn.Module, outer: nn.Module) -> Callable[[nn.Module, tuple[torch.Tensor, ...], Any], Any]:
    return lambda _, arguments, computed: computed + outer(inner(arguments[0]))


def _inner(matrix: nn.Linear) -> nn.Linear:
    return nn.Linear(matrix.in_features, RANK, bias=False, device=matrix.weight.device, dtype=torch.float32)


def _outer(matrix: nn.Linear) -> nn.Linear:
    made = nn.Linear(RANK, matrix.out_features, bias=False, device=matrix.weight.device, dtype=torch.float32)
    nn.init.zeros_(made.weight)
    return made
