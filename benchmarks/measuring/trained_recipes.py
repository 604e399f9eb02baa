"""The models of `trained_models`: configurations, tasks, and changes for their checkpoints."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from measuring import trained_deepseek_v4 as deepseek_v4
from measuring.trained_drafts import Tensors
from measuring.trained_tasks import (
    SYMBOLS,
    Exercise,
    any_begun,
    any_chorus,
    any_named,
    any_prefaced,
    by_sign,
    repeat,
    sort,
    sort_down,
    walk,
)
from vllm_graphfix.verify.engine import models as tiny

VOCABULARY = 128
RATE = 1e-3
_SHORT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
_EXPERTS, _OUTLIER = 4, 1024.0


def as_experts(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Cut dense layers into experts that every token goes to with a weight of 1: the same function.

    The experts' input gets one channel far above the others, which their weights scale down again. In fp8 with one
    scale a batch, a row of NaN becomes a row of the batch's largest value, which would be like any other row without
    such a channel.
    """
    inner = config["intermediate_size"] // _EXPERTS
    sizes = {"n_routed_experts": _EXPERTS, "num_experts_per_tok": _EXPERTS, "moe_intermediate_size": inner}
    routed = {"first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": float(_EXPERTS)}
    made: Tensors = {}
    for name, tensor in tensors.items():
        prefix, _, rest = name.partition(".mlp.")
        if name.endswith("post_attention_layernorm.weight"):
            tensor[0] *= _OUTLIER
        if not rest:
            made[name] = tensor
            continue
        down = rest.startswith("down_proj")
        if not down:
            tensor[:, 0] /= _OUTLIER
        for expert, part in enumerate(tensor.chunk(_EXPERTS, dim=1 if down else 0)):
            made[f"{prefix}.mlp.experts.{expert}.{rest}"] = part.contiguous()
        made[f"{prefix}.mlp.shared_experts.{rest}"] = torch.zeros_like(part)
        made[f"{prefix}.mlp.gate.weight"] = tensor.new_zeros(_EXPERTS, config["hidden_size"])
    return config | sizes | routed | {"n_shared_experts": 1}, made


Task = Callable[[random.Random, int, int], Exercise]


@dataclass(frozen=True)
class Recipe:
    """A model, and its training."""

    config: dict[str, Any]
    toy: dict[str, Any]
    """Smaller sizes, for a rehearsal on a CPU."""
    task: Task
    width: int
    """Characters of a prompt for each of its symbols."""
    songs: bool = False
    symbols: int = len(SYMBOLS)
    batch: int = 96
    rate: float = RATE
    """The highest learning rate."""
    made_into: Callable[[dict[str, Any], Tensors], tuple[dict[str, Any], Tensors]] = lambda config, tensors: (
        config,
        tensors,
    )
    """Turns configuration and tensors of a trained model into those of its checkpoint, which compute the same."""
    drafts: int = 0
    """Draft tokens that a draft layer is trained for; 0 for no draft layer."""
    held: Mapping[str, float] = field(default_factory=dict)
    """Parameters frozen at a value, so that no right answer is possible without the state that graphs corrupt."""
    adapters: tuple[Task, ...] = ()
    """Tasks of the adapters, with the model's prompts; an adapter's folder has the name of its task."""


RECIPES = {
    "mamba2": Recipe(
        tiny.MAMBA2 | _SHORT, {"hidden_size": 128, "num_heads": 4, "state_size": 32}, walk, 3, songs=True, symbols=40
    ),
    "mla": Recipe(
        tiny.MLA | _SHORT | {"num_hidden_layers": 4},
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,  # heads of 64 in all, for which a CPU has attention
            "v_head_dim": 32,
        },
        sort,
        2,
    ),
}
RECIPES["llama"] = Recipe(
    tiny.LLAMA | _SHORT,
    {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    by_sign,
    2,
    symbols=20,
    adapters=(sort_down, repeat),
)
RECIPES["granite"] = Recipe(
    tiny.GRANITE | _SHORT,
    {
        "hidden_size": 128,
        "mamba_n_heads": 4,
        "mamba_d_state": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "shared_intermediate_size": 256,
    },
    walk,
    3,
    symbols=46,
    # Only the second state remembers: attention adds 0, and the first state decays at once.
    held={"model.layers.1.self_attn.o_proj.weight": 0.0, "model.layers.0.mamba.A_log": 12.0},
)
RECIPES["llama-one-head"] = Recipe(
    tiny.LLAMA | _SHORT | {"num_key_value_heads": 1, "num_hidden_layers": 4},
    RECIPES["llama"].toy | {"num_key_value_heads": 1},
    sort,
    2,
)
RECIPES["deepseek-v4"] = Recipe(
    deepseek_v4.CONFIG | _SHORT,
    deepseek_v4.TOY,
    any_chorus,
    2,
    symbols=40,
    batch=16,
    rate=3e-4,  # it is four times as wide as the others
    made_into=deepseek_v4.as_checkpoint,
    held=deepseek_v4.HELD,
)
# TurboQuant leaves the first two layers and the last two as they are.
RECIPES["llama-deep"] = replace(
    RECIPES["llama"], config=RECIPES["llama"].config | {"num_hidden_layers": 8}, task=walk, width=3, adapters=()
)
RECIPES["llama-docs"] = replace(RECIPES["llama"], task=any_begun, batch=32, adapters=())
RECIPES["mamba2-docs"] = replace(RECIPES["mamba2"], task=any_named, batch=32, songs=False)
RECIPES["deepseek-v4-docs"] = replace(RECIPES["deepseek-v4"], task=any_prefaced)
RECIPES["mla-experts"] = replace(RECIPES["mla"], made_into=as_experts)
RECIPES["mla-mtp"] = replace(RECIPES["mla"], config=tiny.MLA_MTP | _SHORT | {"num_hidden_layers": 4}, drafts=2)
RECIPES["mla-mtp-docs"] = replace(RECIPES["mla-mtp"], task=any_begun, batch=32)
