"""Trains the tiny Qwen3-VL of `image_features.py` to name the colours of an image of 4 by 4 fields, row by row."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

BEFORE, AFTER = tuple(range(1, 9)), (20,)
"""Tokens of a prompt around its image."""
TRAINED = "trained.json"
ASKED = 32
"""Images of an engine; of none of them is a training's."""
_FIRST = 100
"""The token of the first colour."""
_SIDE, _FIELD = 4, 32
"""Fields of a side, and pixels of a field's, of which the model makes one token."""
_FIELDS = _SIDE**2
_COLOURS = 255 * np.array(np.meshgrid([0, 1], [0, 1], [0, 1])).reshape(3, -1).T
_POOL, _BATCH, _RATE, _WARM_UP = 2048, 64, 1e-3, 50


def images(random: np.random.Generator, count: int) -> tuple[Any, Any]:
    """Return images, a little noisy, and the tokens of their colours."""
    colours = random.integers(0, len(_COLOURS), (count, _FIELDS))
    fields = _COLOURS[colours].reshape(count, _SIDE, _SIDE, 3).repeat(_FIELD, 1).repeat(_FIELD, 2)
    noise = random.normal(0, 20, fields.shape)
    return np.clip(fields + noise, 0, 255).astype(np.uint8), _FIRST + colours


def train(folder: Path, config: dict[str, Any], seconds: float) -> None:
    """Train the model in *folder*, and write its weights there and the shares of right answers to TRAINED."""
    import torch
    from safetensors.torch import save_file
    from torch.nn import functional
    from transformers import AutoImageProcessor, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    began = time.monotonic()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    own = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "torch_dtype")}
    kind: Any = Qwen3VLForConditionalGeneration
    model = kind(Qwen3VLConfig(**own)).to(device)
    processor: Any = AutoImageProcessor.from_pretrained(str(folder))  # type: ignore[no-untyped-call]

    def prepared(seed: int, count: int) -> tuple[Any, Any, Any]:
        pictures, answers = images(np.random.default_rng(seed), count)
        pixels = processor(images=list(pictures), return_tensors="pt")
        rows = torch.zeros(count, len(BEFORE) + _FIELDS + len(AFTER) + _FIELDS, dtype=torch.long)
        rows[:, : len(BEFORE)] = torch.tensor(BEFORE)
        rows[:, -_FIELDS - len(AFTER) : -_FIELDS] = torch.tensor(AFTER)
        rows[:, -_FIELDS:] = torch.from_numpy(answers)
        patches = pixels["pixel_values"].reshape(count, -1, pixels["pixel_values"].shape[-1])
        return rows.to(device), patches.to(device), pixels["image_grid_thw"].to(device)

    def answered(rows: Any, patches: Any, grid: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            output = model(
                input_ids=rows,
                attention_mask=torch.ones_like(rows),
                mm_token_type_ids=(rows == 0).int(),
                pixel_values=patches.flatten(0, 1),
                image_grid_thw=grid,
            )
        return output.logits[:, -_FIELDS - 1 : -1].float()

    pool = prepared(1, _POOL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95))
    step, loss = 0, torch.tensor(1.0)
    while time.monotonic() - began < seconds and loss > 1e-3:
        some = torch.randint(_POOL, (_BATCH,))
        rows, patches, grid = (each[some.to(device)] for each in pool)
        loss = functional.cross_entropy(answered(rows, patches, grid).flatten(0, 1), rows[:, -_FIELDS:].flatten())
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / _WARM_UP)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
    weights = {name: tensor.bfloat16().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    @torch.no_grad()
    def right() -> float:
        rows, patches, grid = prepared(2, ASKED)
        return float((answered(rows, patches, grid).argmax(-1) == rows[:, -_FIELDS:]).all(1).float().mean())

    figures = {"steps": step, "loss": loss.item(), "right": right()}
    for merger in model.model.visual.deepstack_merger_list:
        merger.register_forward_hook(lambda module, inputs, features: torch.zeros_like(features))
    figures["right without the features"] = right()
    (folder / TRAINED).write_text(json.dumps(figures))
    print(json.dumps({"training": figures}))
