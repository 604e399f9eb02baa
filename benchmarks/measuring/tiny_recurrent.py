"""Tiny models with recurrent layers of kinds that no case of `verify` has, with random weights.

Folders that vLLM loads like any checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from vllm_graphfix.verify.engine import models
from vllm_graphfix.verify.engine.models import LAYERS, VOCABULARY, Config, Shapes

_COMMON: Config = {
    "hidden_size": 512,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MAMBA1: Config = _COMMON | {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "intermediate_size": 1024,
    "expand": 2,
    "state_size": 16,
    "conv_kernel": 4,
    "time_step_rank": 32,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "residual_in_fp32": True,
}
_LATENT: Config = _COMMON | {
    # vLLM's own class of configurations: the releases' and transformers' others need remote code.
    "model_type": "kimi_linear",
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
KDA: Config = _LATENT | {
    "architectures": ["KimiLinearForCausalLM"],
    "mla_use_nope": True,  # vLLM takes no other
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "num_heads": 4,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
"""A delta attention of Kimi Linear, and one with latent keys and values."""
LINEAR: Config = _LATENT | {
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "layer_group_size": LAYERS,  # the last of each group has latent keys and values
    "head_dim": 64,  # of the linear attention, whose kernels take multiples of 64
    "group_norm_size": 4,
    "use_bias": False,
    "use_qkv_bias": False,
    "num_experts": 1,  # all layers are dense
}
"""A linear attention and one with latent keys and values. MiniMax-Text-01, whose layer this is, went with 0.23.0."""


def _mamba1(config: Config) -> Shapes:
    hidden, inner, states = config["hidden_size"], config["intermediate_size"], config["state_size"]
    rank = config["time_step_rank"]
    shapes: Shapes = {
        "backbone.embeddings.weight": (VOCABULARY, hidden),
        "backbone.norm_f.weight": (hidden,),
        "lm_head.weight": (VOCABULARY, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        mixer = f"backbone.layers.{layer}.mixer"
        shapes |= {
            f"backbone.layers.{layer}.norm.weight": (hidden,),
            f"{mixer}.in_proj.weight": (2 * inner, hidden),
            f"{mixer}.conv1d.weight": (inner, 1, config["conv_kernel"]),
            f"{mixer}.conv1d.bias": (inner,),
            f"{mixer}.x_proj.weight": (rank + 2 * states, inner),
            f"{mixer}.dt_proj.weight": (inner, rank),
            f"{mixer}.dt_proj.bias": (inner,),
            f"{mixer}.A_log": (inner, states),
            f"{mixer}.D": (inner,),
            f"{mixer}.out_proj.weight": (hidden, inner),
        }
    return shapes


def _kda(config: Config) -> Shapes:
    hidden, kda = config["hidden_size"], config["linear_attn_config"]
    heads, head = kda["num_heads"], kda["head_dim"]
    shapes: Shapes = {
        "model.embed_tokens.weight": (VOCABULARY, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCABULARY, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= _mlp(prefix, config)
        if layer + 1 not in kda["kda_layers"]:
            shapes |= _latent_attention(f"{prefix}.self_attn", config, "o_proj")
            continue
        attention = f"{prefix}.self_attn"
        for name in "qkv":
            shapes |= {
                f"{attention}.{name}_proj.weight": (heads * head, hidden),
                f"{attention}.{name}_conv1d.weight": (heads * head, 1, kda["short_conv_kernel_size"]),
            }
        for name in "fg":  # what is forgotten, and the gate
            shapes |= {
                f"{attention}.{name}_a_proj.weight": (head, hidden),
                f"{attention}.{name}_b_proj.weight": (heads * head, head),
            }
        shapes |= {
            f"{attention}.b_proj.weight": (heads, hidden),
            f"{attention}.A_log": (1, 1, heads, 1),
            f"{attention}.dt_bias": (heads * head,),
            f"{attention}.o_norm.weight": (head,),
            f"{attention}.o_proj.weight": (hidden, heads * head),
        }
    return shapes


def _linear(config: Config) -> Shapes:
    hidden, inner = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    shapes: Shapes = {
        "model.word_embeddings.weight": (VOCABULARY, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCABULARY, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= _mlp(prefix, config)
        if (layer + 1) % config["layer_group_size"] == 0:
            shapes |= _latent_attention(f"{prefix}.attention", config, "dense")
            continue
        shapes |= {
            f"{prefix}.attention.query_key_value.weight": (3 * inner, hidden),
            f"{prefix}.attention.g_proj.weight": (inner, hidden),
            f"{prefix}.attention.g_norm.weight": (inner,),
            f"{prefix}.attention.dense.weight": (hidden, inner),
        }
    return shapes


def _mlp(prefix: str, config: Config) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
    }


def _latent_attention(prefix: str, config: Config, output: str) -> Shapes:
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    return {
        f"{prefix}.q_proj.weight": (heads * (nope + rope), hidden),
        f"{prefix}.kv_a_proj_with_mqa.weight": (latent + rope, hidden),
        f"{prefix}.kv_a_layernorm.weight": (latent,),
        f"{prefix}.kv_b_proj.weight": (heads * (nope + value), latent),
        f"{prefix}.{output}.weight": (hidden, heads * value),
    }


MODELS: Mapping[str, tuple[Config, Callable[[Config], Shapes]]] = {
    "mamba1": (MAMBA1, _mamba1),
    "kda": (KDA, _kda),
    "linear": (LINEAR, _linear),
}


def write(name: str, folder: Path) -> Path:
    """Makes the model *name* in *folder*, in a folder of its name, and returns that."""
    config, described = MODELS[name]
    return models.save(config, described(config), folder / name)
