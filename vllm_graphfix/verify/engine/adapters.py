"""Tiny LoRA adapters with random weights: folders that vLLM loads like any adapter.

An adapter's addition to a matrix is as large as the matrix. `down_proj` has no adapter: vLLM's kernels sum its 1024
inputs in four parts or more, in the order in which these finish, so that two runs would differ by rounding. The 512
inputs of the other matrices are two parts in a step of fewer than 128 tokens, whose sum does not depend on the order.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_graphfix.verify.engine.model_shapes import Shapes

if TYPE_CHECKING:
    import torch

ONE, TWO = "llama-adapter-one", "llama-adapter-two"
NAMES = (ONE, TWO)
RANK = 8
MODULES = ("gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
_PARTS = ("A", "B")


def save(name: str, shapes: Shapes, made: Path, modules: Sequence[str] = MODULES) -> Path:
    """Make the adapter *name* of *modules* in the folder *made*, for a model of tensors with *shapes*."""
    import torch

    matrices: dict[str, tuple[torch.Tensor, ...]] = {}
    for matrix in (each.removesuffix(".weight") for each in shapes if each.split(".")[-2] in modules):
        outer, inner = shapes[f"{matrix}.weight"]
        values = []
        for part, shape in zip(_PARTS, ((RANK, inner), (outer, RANK)), strict=True):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name}.{_key(matrix, part)}".encode()))
            values.append(torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5))
        matrices[matrix] = tuple(values)
    return write(matrices, made, modules)


def write(matrices: Mapping[str, tuple[torch.Tensor, ...]], made: Path, modules: Sequence[str] = MODULES) -> Path:
    """Write an adapter to the folder *made* as PEFT does, in bfloat16, and return *made*.

    *matrices* has the two factors of the addition to each matrix, of shapes (RANK, inputs) and (outputs, RANK), by the
    matrix's name in the model. *modules* are the last parts of those names.
    """
    import torch
    from safetensors.torch import save_file

    made.mkdir(parents=True, exist_ok=True)
    tensors = {
        _key(matrix, part): values.detach().cpu().to(torch.bfloat16)
        for matrix, factors in matrices.items()
        for part, values in zip(_PARTS, factors, strict=True)
    }
    save_file(tensors, made / "adapter_model.safetensors", metadata={"format": "pt"})
    # vLLM scales the addition by alpha / rank, which is 1 here.
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*modules], "bias": "none"}
    (made / "adapter_config.json").write_text(json.dumps(config, indent=2))
    return made


def _key(matrix: str, part: str) -> str:
    return f"base_model.model.{matrix}.lora_{part}.weight"
