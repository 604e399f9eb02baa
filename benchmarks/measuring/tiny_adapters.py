"""LoRA adapters for the tiny Llama: folders that vLLM loads like any adapter, with random weights made on the spot."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from vllm_graphfix.verify.engine import models

NAMES = ("one", "two")
RANK = 8


def write(folder: Path) -> list[str]:
    """Makes the adapters in *folder* and returns theirs. What each adds to a matrix is as large as the matrix."""
    import torch
    from safetensors.torch import save_file

    config, shapes = models.MODELS["llama"]
    matrices = {name: shape for name, shape in shapes(config).items() if name.endswith("_proj.weight")}
    for adapter in NAMES:
        made = folder / adapter
        made.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        for name, (outer, inner) in matrices.items():
            for part, shape in (("A", (RANK, inner)), ("B", (outer, RANK))):
                key = f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight"
                generator = torch.Generator().manual_seed(zlib.crc32(f"{adapter}.{key}".encode()))
                values = torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5)
                tensors[key] = values.to(torch.bfloat16)
        save_file(tensors, made / "adapter_model.safetensors", metadata={"format": "pt"})
        modules = sorted({name.split(".")[-2] for name in matrices})
        told = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules, "bias": "none"}
        (made / "adapter_config.json").write_text(json.dumps(told))
    return [str(folder / adapter) for adapter in NAMES]
