"""Tiny drafters of DFlash and DSpark, which draft all tokens in one pass, with random weights, for `verify`'s Llama."""

from __future__ import annotations

from pathlib import Path

from vllm_graphfix.verify.engine import models

TOKENS = 7
"""Drafted in a pass."""
_RANK, _MASK = 32, models.VOCABULARY - 1
_CONFIG: models.Config = models.LLAMA | {"model_type": "qwen3", "num_hidden_layers": 1, "block_size": TOKENS}
CONFIGS: dict[str, models.Config] = {
    "dflash": _CONFIG
    | {"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": _MASK, "target_layer_ids": [0]}},
    "dspark": _CONFIG
    | {
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": _RANK,
        "mask_token_id": _MASK,
        "target_layer_ids": [0],
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}


def write(name: str, folder: Path) -> Path:
    """Make the drafter *name* in *folder*/*name*; its embeddings and output matrix are the target's."""
    config = CONFIGS[name]
    hidden, layer = config["hidden_size"], "layers.0"
    of_llama = models.MODELS["llama"][1](config)
    shapes = {tensor.removeprefix("model."): shape for tensor, shape in of_llama.items() if f".{layer}." in tensor}
    shapes |= {f"{layer}.self_attn.{norm}.weight": (config["head_dim"],) for norm in ("q_norm", "k_norm")}
    shapes |= {"fc.weight": (hidden, hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    if name == "dspark":
        shapes |= {f"markov_head.markov_w{number}.weight": (models.VOCABULARY, _RANK) for number in (1, 2)}
        shapes |= {"confidence_head.proj.weight": (1, hidden + _RANK), "confidence_head.proj.bias": (1,)}
    return models.save(config, shapes, folder / name)
