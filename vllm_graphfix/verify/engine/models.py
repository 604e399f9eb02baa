"""Tiny models with random weights, made on the spot: folders that vLLM loads like any checkpoint.

Two layers each, and three of Granite 4. Norms are 1 (but for one of DeepSeek V4's) and matrices
normal(0, 1/sqrt(fan-in)): with vLLM's own dummy weights, which are near zero, every output is the same. Each tensor has
a seed of its own, so that two folders made anywhere hold the same numbers.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_graphfix.verify.engine import adapters, deepseek_v4

if TYPE_CHECKING:
    import torch

VOCABULARY = 1024
LAYERS = 2

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

_COMMON: Config = {
    "hidden_size": 512,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MLA: Config = _COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 10,  # all layers are dense
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
MLA_MTP: Config = MLA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_nextn_predict_layers": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
SPARSE_MTP: Config = MLA_MTP | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "q_lora_rank": 256,
    "index_topk": 2048,  # more than any context here has: which tokens are chosen does not depend on rounding
    "index_n_heads": 64,
    "index_head_dim": 128,
}
MAMBA2: Config = _COMMON | {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "state_size": 64,
    "head_dim": 64,
    "num_heads": 16,
    "n_groups": 1,
    "expand": 2,
    "conv_kernel": 4,
    "chunk_size": 256,
    "layer_norm_epsilon": 1e-5,
    "rms_norm": True,
    "use_bias": False,
    "use_conv_bias": True,
    "residual_in_fp32": True,
    "time_step_limit": [0.0, 1e9],
}
GRANITE: Config = _COMMON | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "num_hidden_layers": LAYERS + 1,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 64,
    "mamba_d_head": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "attention_multiplier": 0.125,
    "position_embedding_type": None,
    "num_local_experts": 0,
    "intermediate_size": 1024,
    "shared_intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
"""Two Mamba-2 layers and one of attention: layers of a kind are in groups of as many as there are of the rarer kind,
so that each is in a group of its own. With keys and values of this size a state fits in a block of 128 tokens."""
LLAMA: Config = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
LFM2: Config = _COMMON | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention"],
    "conv_dim": 512,
    "conv_L_cache": 3,
    "conv_bias": False,
    "block_dim": 512,
    "block_ff_dim": 1024,  # another name of the next but three, in transformers 4
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,  # vLLM ties them whatever is said here
}
"""A short convolution and an attention layer: the smallest hybrid. Model runner V2 takes recurrent models as hybrids
alone."""
MIXTRAL: Config = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 4,  # all of them: a tie in the choice of experts would look like corruption
    "sliding_window": None,
}
QWEN3_NEXT: Config = _COMMON | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "num_experts": 4,  # vLLM refuses this model without a layer of experts
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "num_nextn_predict_layers": 1,
}
"""A gated delta net and an attention layer, each with experts, and a draft layer."""
EAGLE: Config = LLAMA | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
"""The draft head of a Llama; vLLM gives it the target's embeddings and output matrix."""


def _embeddings(config: Config, layers: str = "model.layers", norm: str = "model.norm") -> Shapes:
    hidden = config["hidden_size"]
    outer = layers.rpartition(".")[0]
    return {
        f"{outer}.{'embeddings' if outer == 'backbone' else 'embed_tokens'}.weight": (VOCABULARY, hidden),
        f"{norm}.weight": (hidden,),
        "lm_head.weight": (VOCABULARY, hidden),
    }


def _mlp(prefix: str, config: Config) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
    }


def _latent_attention(prefix: str, config: Config) -> Shapes:
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    return {
        f"{prefix}.self_attn.q_proj.weight": (heads * (nope + rope), hidden),
        f"{prefix}.self_attn.kv_a_proj_with_mqa.weight": (latent + rope, hidden),
        f"{prefix}.self_attn.kv_a_layernorm.weight": (latent,),
        f"{prefix}.self_attn.kv_b_proj.weight": (heads * (nope + value), latent),
        f"{prefix}.self_attn.o_proj.weight": (hidden, heads * value),
    }


def _sparse_attention(prefix: str, config: Config) -> Shapes:
    """Latent attention with queries of low rank, and the indexer that chooses what it sees."""
    hidden, rank, head = config["hidden_size"], config["q_lora_rank"], config["index_head_dim"]
    shapes = _latent_attention(prefix, config)
    (queries, _) = shapes.pop(f"{prefix}.self_attn.q_proj.weight")
    return shapes | {
        f"{prefix}.self_attn.q_a_proj.weight": (rank, hidden),
        f"{prefix}.self_attn.q_a_layernorm.weight": (rank,),
        f"{prefix}.self_attn.q_b_proj.weight": (queries, rank),
        f"{prefix}.self_attn.indexer.wq_b.weight": (config["index_n_heads"] * head, rank),
        f"{prefix}.self_attn.indexer.wk.weight": (head, hidden),
        f"{prefix}.self_attn.indexer.k_norm.weight": (head,),
        f"{prefix}.self_attn.indexer.k_norm.bias": (head,),
        f"{prefix}.self_attn.indexer.weights_proj.weight": (config["index_n_heads"], hidden),
    }


def _grouped_attention(prefix: str, config: Config) -> Shapes:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
        f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
        f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
    }


def _mla(config: Config) -> Shapes:
    attention = _sparse_attention if "index_topk" in config else _latent_attention
    shapes = _embeddings(config)
    for layer in range(config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)):
        prefix = f"model.layers.{layer}"
        shapes |= _mlp(prefix, config) | attention(prefix, config)
    return shapes


def _mla_mtp(config: Config) -> Shapes:
    hidden = config["hidden_size"]
    prefix = f"model.layers.{config['num_hidden_layers']}"
    return _mla(config) | {
        f"{prefix}.embed_tokens.weight": (VOCABULARY, hidden),
        f"{prefix}.enorm.weight": (hidden,),
        f"{prefix}.hnorm.weight": (hidden,),
        f"{prefix}.eh_proj.weight": (hidden, 2 * hidden),
        f"{prefix}.shared_head.norm.weight": (hidden,),
        f"{prefix}.shared_head.head.weight": (VOCABULARY, hidden),
    }


def _mamba2(config: Config) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_heads"]
    shapes = _embeddings(config, "backbone.layers", "backbone.norm_f")
    for layer in range(config["num_hidden_layers"]):
        prefix = f"backbone.layers.{layer}"
        shapes[f"{prefix}.norm.weight"] = (hidden,)
        shapes |= _mixer(f"{prefix}.mixer", config, heads, config["n_groups"] * config["state_size"])
    return shapes


def _mixer(prefix: str, config: Config, heads: int, states: int) -> Shapes:
    """Mamba-2 with a convolution of four tokens, twice as wide inside as outside. *states* of all groups."""
    hidden = config["hidden_size"]
    inner = 2 * hidden
    convolved = inner + 2 * states
    return {
        f"{prefix}.in_proj.weight": (inner + convolved + heads, hidden),
        f"{prefix}.conv1d.weight": (convolved, 1, 4),
        f"{prefix}.conv1d.bias": (convolved,),
        f"{prefix}.A_log": (heads,),
        f"{prefix}.D": (heads,),
        f"{prefix}.dt_bias": (heads,),
        f"{prefix}.norm.weight": (inner,),
        f"{prefix}.out_proj.weight": (hidden, inner),
    }


def _granite(config: Config) -> Shapes:
    hidden, inner = config["hidden_size"], config["shared_intermediate_size"]
    head = hidden // config["num_attention_heads"]
    shapes = _embeddings(config)
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.shared_mlp.input_linear.weight": (2 * inner, hidden),  # gate and up
            f"{prefix}.shared_mlp.output_linear.weight": (hidden, inner),
        }
        if kind == "mamba":
            states = config["mamba_n_groups"] * config["mamba_d_state"]
            shapes |= _mixer(f"{prefix}.mamba", config, config["mamba_n_heads"], states)
        else:
            shapes |= _grouped_attention(prefix, config | {"head_dim": head})
    return shapes


def _lfm2(config: Config) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"], config["num_key_value_heads"], config["num_key_value_heads"]
    head = hidden // heads[0]
    shapes: Shapes = {
        "model.embed_tokens.weight": (VOCABULARY, hidden),
        "model.embedding_norm.weight": (hidden,),
    }
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.operator_norm.weight": (hidden,),
            f"{prefix}.ffn_norm.weight": (hidden,),
            f"{prefix}.feed_forward.w1.weight": (inner, hidden),
            f"{prefix}.feed_forward.w2.weight": (hidden, inner),
            f"{prefix}.feed_forward.w3.weight": (inner, hidden),
        }
        if kind == "conv":
            shapes |= {
                f"{prefix}.conv.in_proj.weight": (3 * hidden, hidden),
                f"{prefix}.conv.conv.weight": (hidden, 1, config["conv_L_cache"]),
                f"{prefix}.conv.out_proj.weight": (hidden, hidden),
            }
        else:
            shapes |= {
                f"{prefix}.self_attn.{name}_proj.weight": (count * head, hidden)
                for name, count in zip("qkv", heads, strict=True)
            }
            shapes |= {
                f"{prefix}.self_attn.out_proj.weight": (hidden, heads[0] * head),
                f"{prefix}.self_attn.q_layernorm.weight": (head,),
                f"{prefix}.self_attn.k_layernorm.weight": (head,),
            }
    return shapes


def _mixture(prefix: str, config: Config) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.block_sparse_moe.gate.weight": (config["num_local_experts"], hidden),
    }
    for expert in range(config["num_local_experts"]):
        name = f"{prefix}.block_sparse_moe.experts.{expert}"
        shapes |= {
            f"{name}.w1.weight": (inner, hidden),
            f"{name}.w2.weight": (hidden, inner),
            f"{name}.w3.weight": (inner, hidden),
        }
    return shapes


def _qwen3_next(config: Config) -> Shapes:
    hidden, value_heads, value_head = (
        config["hidden_size"],
        config["linear_num_value_heads"],
        config["linear_value_head_dim"],
    )
    of_keys, of_values = config["linear_num_key_heads"] * config["linear_key_head_dim"], value_heads * value_head
    shapes = _embeddings(config)
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}"
        if kind == "linear_attention":
            shapes |= _shared_mixture(prefix, config) | {
                f"{prefix}.linear_attn.in_proj_qkvz.weight": (2 * of_keys + 2 * of_values, hidden),
                f"{prefix}.linear_attn.in_proj_ba.weight": (2 * value_heads, hidden),
                f"{prefix}.linear_attn.conv1d.weight": (2 * of_keys + of_values, 1, config["linear_conv_kernel_dim"]),
                f"{prefix}.linear_attn.A_log": (value_heads,),
                f"{prefix}.linear_attn.dt_bias": (value_heads,),
                f"{prefix}.linear_attn.norm.weight": (value_head,),
                f"{prefix}.linear_attn.out_proj.weight": (hidden, of_values),
            }
        else:
            shapes |= _shared_mixture(prefix, config) | _gated_attention(prefix, config)
    draft = "mtp.layers.0"
    return (
        shapes
        | _shared_mixture(draft, config)
        | _gated_attention(draft, config)
        | {
            "mtp.fc.weight": (hidden, 2 * hidden),
            "mtp.norm.weight": (hidden,),
            "mtp.pre_fc_norm_embedding.weight": (hidden,),
            "mtp.pre_fc_norm_hidden.weight": (hidden,),
        }
    )


def _gated_attention(prefix: str, config: Config) -> Shapes:
    hidden, head = config["hidden_size"], config["head_dim"]
    return _grouped_attention(prefix, config) | {
        f"{prefix}.self_attn.q_proj.weight": (2 * config["num_attention_heads"] * head, hidden),  # and the gate
        f"{prefix}.self_attn.q_norm.weight": (head,),
        f"{prefix}.self_attn.k_norm.weight": (head,),
    }


def _shared_mixture(prefix: str, config: Config) -> Shapes:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    shapes: Shapes = {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.mlp.gate.weight": (config["num_experts"], hidden),
        f"{prefix}.mlp.shared_expert_gate.weight": (1, hidden),
    }
    for expert in ("shared_expert", *(f"experts.{number}" for number in range(config["num_experts"]))):
        shapes |= {
            f"{prefix}.mlp.{expert}.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.{expert}.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.{expert}.down_proj.weight": (hidden, inner),
        }
    return shapes


def _mixtral(config: Config) -> Shapes:
    shapes = _embeddings(config)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= _mixture(prefix, config) | _grouped_attention(prefix, config)
    return shapes


def _llama(config: Config) -> Shapes:
    shapes = _embeddings(config)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= _mlp(prefix, config) | _grouped_attention(prefix, config)
    return shapes


def _eagle(config: Config) -> Shapes:
    shapes: Shapes = {"fc.weight": (config["hidden_size"], 2 * config["hidden_size"])}
    for layer in range(config["num_hidden_layers"]):
        shapes |= _mlp(f"layers.{layer}", config) | _grouped_attention(f"layers.{layer}", config)
    del shapes["layers.0.input_layernorm.weight"]  # an Eagle head begins without
    return shapes


MODELS: dict[str, tuple[Config, Callable[[Config], Shapes]]] = {
    "mla": (MLA, _mla),
    "mla-mtp": (MLA_MTP, _mla_mtp),
    "sparse-mtp": (SPARSE_MTP, _mla_mtp),
    "mamba2": (MAMBA2, _mamba2),
    "granite": (GRANITE, _granite),
    "lfm2": (LFM2, _lfm2),
    "llama": (LLAMA, _llama),
    "mixtral": (MIXTRAL, _mixtral),
    "qwen3-next": (QWEN3_NEXT, _qwen3_next),
    "eagle": (EAGLE, _eagle),
    "deepseek-v4": (deepseek_v4.CONFIG, deepseek_v4.shapes),
}
"""Name of a model: its configuration, and the names and shapes of its tensors in a checkpoint."""


def write(name: str, folder: Path) -> Path:
    """Makes the model or adapter *name* in *folder*, in a folder of its name, and returns that.

    Needs torch and safetensors.
    """
    if name in adapters.NAMES:
        return adapters.save(name, _llama(LLAMA), folder / name)
    config, described = MODELS[name]
    return save(config, described(config), folder / name)


def save(config: Config, shapes: Shapes, made: Path) -> Path:
    """Makes a model of this *config*, with tensors of these *shapes*, in the folder *made*."""
    import torch
    from safetensors.torch import save_file

    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_text(json.dumps(config, indent=2))
    tied = config["tie_word_embeddings"]
    tensors: dict[str, torch.Tensor] = {}
    for tensor, shape in shapes.items():
        matrix, _, kind = tensor.rpartition(".")
        if kind == "scale":
            continue
        values = _values(tensor, shape, tied)
        if f"{matrix}.scale" in shapes:
            tensors |= in_blocks(matrix, values, shapes[f"{matrix}.scale"])
        else:
            tensors[tensor] = values.to(torch.bfloat16)
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


def in_blocks(matrix: str, values: torch.Tensor, blocks: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """A matrix in fp8, and a scale for each of its *blocks*: a power of two, which vLLM changes nowhere."""
    import torch

    (rows, columns), (down, across) = values.shape, blocks
    tiles = values.view(down, rows // down, across, columns // across)
    fits = tiles.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    scales = fits.log2().ceil().exp2()
    return {
        f"{matrix}.weight": (tiles / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn),
        f"{matrix}.scale": scales,
    }


def _values(name: str, shape: tuple[int, ...], tied: bool) -> torch.Tensor:
    import torch

    if name.endswith("A_log"):  # decay rates of a state, from slow to fast
        return torch.linspace(0.5, 4.0, math.prod(shape)).log().view(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.full(shape, deepseek_v4.LOUD.get(name, 1.0))
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator)
    # Embeddings that are the output matrix too, and of size 1, would make every token its own successor.
    fan_in = 1 if "embed" in name and not tied else values[0].numel()
    return values.mul_(fan_in**-0.5)
