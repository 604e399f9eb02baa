"""Tiny LoRA adapters with random weights: folders that vLLM loads like any adapter.

An adapter's addition to a matrix is as large as the matrix. vLLM's kernels sum the inputs of a matrix in parts, in the
order in which these finish, so that two runs of one adapter differ by rounding. So each of the `RANK` sums has one
input here: the other parts are 0.
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
ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
MODULES = ("gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
_PARTS = ("A", "B")


def save(name: str, shapes: Shapes, made: Path, modules: Sequence[str] = MODULES) -> Path:
    """Make the adapter *name* of *modules* in the folder *made*, for a model of tensors with *shapes*."""
    import torch

    matrices: dict[str, tuple[torch.Tensor, ...]] = {}
    for matrix in (each.removesuffix(".weight") for each in shapes if each.split(".")[-2] in modules):
        outer, inner = shapes[f"{matrix}.weight"]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name}.{matrix}".encode()))
        one_input = torch.zeros(RANK, inner)
        one_input[torch.arange(RANK), torch.randperm(inner, generator=generator)[:RANK]] = 1.0
        matrices[matrix] = one_input, torch.randn((outer, RANK), generator=generator).mul_(RANK**-0.5)
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
