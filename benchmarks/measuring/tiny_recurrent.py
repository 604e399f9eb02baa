"""Tiny models with recurrent layers of kinds that no case of `verify` has, with random weights.

Folders that vLLM loads like any checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from vllm_graphfix.verify.engine import models
from vllm_graphfix.verify.engine.models import LAYERS, VOCABULARY, Config, Shapes

_MLA, _of_mla = models.MODELS["mla"]
_COMMON: Config = {
    name: _MLA[name]
    for name in ("hidden_size", "num_hidden_layers", "vocab_size", "hidden_act", "tie_word_embeddings", "torch_dtype")
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
_LATENT: Config = {
    name: value
    for name, value in _MLA.items()
    if name not in ("architectures", "first_k_dense_replace", "n_group", "topk_group", "moe_intermediate_size")
    and "expert" not in name
} | {
    # vLLM's own class of configurations: the releases' and transformers' others need remote code.
    "model_type": "kimi_linear",
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
KIMI_K3: Config = KDA | {
    "linear_attn_config": KDA["linear_attn_config"]
    | {"num_heads": 12, "use_full_rank_gate": True, "gate_lower_bound": -5.0},  # heads that the fused decode takes
}
"""The same with Kimi K3's own layer, from 0.27.0 on: a gate of full rank is what tells them apart."""
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

NEMOTRON_H: Config = _COMMON | {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "ME*E",  # Mamba-2, experts, attention, experts
    "mamba_num_heads": 16,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "ssm_state_size": 64,
    "n_groups": 1,
    "expand": 2,
    "conv_kernel": 4,
    "chunk_size": 128,
    "use_conv_bias": True,
    "use_bias": False,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "moe_shared_expert_intermediate_size": 512,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,  # all of them, as in Mixtral
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "layer_norm_epsilon": 1e-5,
    "residual_in_fp32": False,
    "max_position_embeddings": 4096,
}
"""Experts without a gate: two matrices each, and the square of what is positive between them."""


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
    shapes = _of_mla(config)
    for layer in kda["kda_layers"]:
        attention = f"model.layers.{layer - 1}.self_attn"
        shapes = _without(shapes, attention)
        for name in "qkv":
            shapes |= {
                f"{attention}.{name}_proj.weight": (heads * head, hidden),
                f"{attention}.{name}_conv1d.weight": (heads * head, 1, kda["short_conv_kernel_size"]),
            }
        full = kda.get("use_full_rank_gate", False)
        if full:
            shapes[f"{attention}.g_proj.weight"] = (heads * head, hidden)
        for name in "f" if full else "fg":  # what is forgotten, and the gate
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
    shapes = _of_mla(config)
    for names in (("embed_tokens", "word_embeddings"), ("self_attn", "attention"), ("o_proj", "dense")):
        shapes = {name.replace(*names): shape for name, shape in shapes.items()}
    for layer in range(config["num_hidden_layers"]):
        attention = f"model.layers.{layer}.attention"
        if (layer + 1) % config["layer_group_size"]:
            shapes = _without(shapes, attention) | {
                f"{attention}.query_key_value.weight": (3 * inner, hidden),
                f"{attention}.g_proj.weight": (inner, hidden),
                f"{attention}.g_norm.weight": (inner,),
                f"{attention}.dense.weight": (hidden, inner),
            }
    return shapes


def _nemotron_h(config: Config) -> Shapes:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: Shapes = {
        "backbone.embeddings.weight": (VOCABULARY, hidden),
        "backbone.norm_f.weight": (hidden,),
        "lm_head.weight": (VOCABULARY, hidden),
    }
    for layer, kind in enumerate(config["hybrid_override_pattern"]):
        mixer = f"backbone.layers.{layer}.mixer"
        shapes[f"backbone.layers.{layer}.norm.weight"] = (hidden,)
        if kind == "M":
            inner = config["mamba_num_heads"] * config["mamba_head_dim"]
            convolved = inner + 2 * config["n_groups"] * config["ssm_state_size"]
            shapes |= {
                f"{mixer}.in_proj.weight": (inner + convolved + config["mamba_num_heads"], hidden),
                f"{mixer}.conv1d.weight": (convolved, 1, config["conv_kernel"]),
                f"{mixer}.conv1d.bias": (convolved,),
                **{f"{mixer}.{name}": (config["mamba_num_heads"],) for name in ("A_log", "D", "dt_bias")},
                f"{mixer}.norm.weight": (inner,),
                f"{mixer}.out_proj.weight": (hidden, inner),
            }
        elif kind == "*":
            shapes |= {
                f"{mixer}.q_proj.weight": (queries, hidden),
                f"{mixer}.k_proj.weight": (keys, hidden),
                f"{mixer}.v_proj.weight": (keys, hidden),
                f"{mixer}.o_proj.weight": (hidden, queries),
            }
        else:
            experts = {f"experts.{each}": config["moe_intermediate_size"] for each in range(config["n_routed_experts"])}
            shapes |= {
                f"{mixer}.gate.weight": (config["n_routed_experts"], hidden),
                f"{mixer}.gate.e_score_correction_bias": (config["n_routed_experts"],),
            }
            for name, inner in (experts | {"shared_experts": config["moe_shared_expert_intermediate_size"]}).items():
                shapes[f"{mixer}.{name}.up_proj.weight"] = (inner, hidden)
                shapes[f"{mixer}.{name}.down_proj.weight"] = (hidden, inner)
    return shapes


def _without(shapes: Shapes, prefix: str) -> Shapes:
    return {name: shape for name, shape in shapes.items() if not name.startswith(f"{prefix}.")}


MODELS: Mapping[str, tuple[Config, Callable[[Config], Shapes]]] = {
    "mamba1": (MAMBA1, _mamba1),
    "kda": (KDA, _kda),
    "kimi-k3": (KIMI_K3, _kda),
    "linear": (LINEAR, _linear),
    "nemotron-h": (NEMOTRON_H, _nemotron_h),
}


def write(name: str, folder: Path) -> Path:
    """Makes the model *name* in *folder*, in a folder of its name, and returns that."""
    config, described = MODELS[name]
    return models.save(config, described(config), folder / name)
