"""Tiny LoRA adapters with random weights, made on the spot: folders that vLLM loads like any adapter.

What an adapter adds to a matrix is as large as the matrix. `down_proj` is left alone: vLLM's kernels add up its 1024
inputs in four parts or more, in whatever order these are done, and two runs differ by rounding. The 512 inputs of the
other matrices are two parts in a step of fewer than 128 tokens.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ONE, TWO = "llama-adapter-one", "llama-adapter-two"
NAMES = (ONE, TWO)
RANK = 8
MODULES = ("gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


def save(name: str, shapes: dict[str, tuple[int, ...]], made: Path, modules: Sequence[str] = MODULES) -> Path:
    """Makes the adapter *name* of these *modules* in the folder *made*, for a model with tensors of these *shapes*."""
    import torch
    from safetensors.torch import save_file

    made.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for matrix in (each for each in shapes if each.split(".")[-2] in modules):
        outer, inner = shapes[matrix]
        for part, shape in (("A", (RANK, inner)), ("B", (outer, RANK))):
            key = f"base_model.model.{matrix.removesuffix('.weight')}.lora_{part}.weight"
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name}.{key}".encode()))
            values = torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5)
            tensors[key] = values.to(torch.bfloat16)
    save_file(tensors, made / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*modules], "bias": "none"}
    (made / "adapter_config.json").write_text(json.dumps(config, indent=2))
    return made
