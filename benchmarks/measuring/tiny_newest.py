"""Tiny models of the newest kinds of attention, with random weights: those whose caches have classes of their own.

Folders that vLLM loads like any checkpoint. Heads, their widths, and what an indexer chooses are those of the real
models where kernels take no others. An indexer may choose more tokens than any context here has: which ones it chooses
does not depend on rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from measuring import tiny_recurrent
from vllm_graphfix.verify.engine import deepseek_v4, models
from vllm_graphfix.verify.engine.models import VOCABULARY, Config, Shapes

_COMMON: Config = {"vocab_size": VOCABULARY, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
MINIMAX_M3: Config = _COMMON | {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "model_type": "minimax_m3_vl",  # vLLM has no class for the configuration of the text alone
    "vision_config": {},
    "text_config": _COMMON
    | {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "hidden_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "dense_intermediate_size": 1024,
        "moe_layer_freq": [0, 0],  # all layers are dense
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "num_mtp_modules": 0,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_attention_freq": [0, 1],
            "sparse_disable_index_value": [0, 1],
            "sparse_num_index_heads": 4,
            "sparse_index_dim": 128,
            "sparse_topk_blocks": 16,
            "sparse_block_size": 128,
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_score_type": "max",
        },
    },
}
"""An ordinary attention, and one to the blocks of 128 tokens that an indexer chooses, of which there are 16 at most."""
QWEN4_EXP: Config = _COMMON | {
    "architectures": ["Qwen4ExpForCausalLM"],
    "model_type": "qwen4_exp_text",
    "hidden_size": 2560,
    "hidden_act": "silu",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],  # as in checkpoints; releases of transformers rename it
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "output_gate_type": "silu",
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_layer_ids": [1],  # from 1
    "ple_embed_dim": 512,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 1000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 1,
    "num_experts": 4,
    "num_experts_per_tok": 4,  # all of them: a tie in the choice of experts would look like corruption
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "eos_token_id": 0,
}
"""A gated delta net with an embedding of n-grams, whose short convolution has a state of its own, and an attention to
groups of four tokens that an indexer chooses: the keys of the last group are in a ring."""
_OUTER = ("architectures", "model_type", "tie_word_embeddings", "torch_dtype", "num_hash_layers", "quantization_config")
DEEPSEEK_V41: Config = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "text_config": {name: value for name, value in deepseek_v4.CONFIG.items() if name not in _OUTER}
    | {
        "compress_ratios": [2, 1],
        "kv_source_layer_ids": [0, 1],
        "index_source_layer_ids": [0, 1],
        "index_topk": 1024,
    },
    "vision_config": {"num_hidden_layers": 0},
    "quantization_config": deepseek_v4.CONFIG["quantization_config"]
    | {"ignored_layers": [f"language_model.model.layers.{layer}.ffn.experts" for layer in range(2)]},
}
"""A layer that attends to groups of two tokens, of which the last is in a ring, and one to tokens; no n-grams, which
want a tokenizer, and no images."""


def _minimax_m3(config: Config) -> Shapes:
    text = config["text_config"]
    sparse = text["sparse_attention_config"]
    hidden, head = text["hidden_size"], text["head_dim"]
    queries, keys = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
    shapes = _embeddings(hidden)
    for layer, indexed in enumerate(sparse["sparse_attention_freq"]):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            **_gated(f"{prefix}.mlp", hidden, text["dense_intermediate_size"]),
            f"{attention}.q_proj.weight": (queries, hidden),
            f"{attention}.k_proj.weight": (keys, hidden),
            f"{attention}.v_proj.weight": (keys, hidden),
            f"{attention}.o_proj.weight": (hidden, queries),
            f"{attention}.q_norm.weight": (head,),
            f"{attention}.k_norm.weight": (head,),
        }
        if indexed:
            width = sparse["sparse_index_dim"]
            shapes |= {
                f"{attention}.index_q_proj.weight": (sparse["sparse_num_index_heads"] * width, hidden),
                f"{attention}.index_k_proj.weight": (width, hidden),
                f"{attention}.index_q_norm.weight": (width,),
                f"{attention}.index_k_norm.weight": (width,),
            }
    return shapes


def _qwen4_exp(config: Config) -> Shapes:
    hidden = config["hidden_size"]
    shapes = _embeddings(hidden) | _streams("model.hyper_connection_mixer", config, final=True)
    del shapes["model.norm.weight"]  # the streams are mixed in its place
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}"
        shapes |= _streams(f"{prefix}.attn_hyper_connection", config)
        shapes |= _streams(f"{prefix}.mlp_hyper_connection", config)
        shapes |= _experts(f"{prefix}.mlp", config)
        if kind == "linear_attention":
            shapes |= _delta_net(f"{prefix}.linear_attn", config)
        else:
            shapes |= _indexed(f"{prefix}.self_attn", config)
        if layer + 1 in config["ple_layer_ids"]:
            shapes |= _n_grams(f"{prefix}.ple", config)
    return shapes


def _streams(prefix: str, config: Config, *, final: bool = False) -> Shapes:
    """Hyper-connections: each stream of the residual has a norm, and all of them a gate of low rank."""
    count, rank = config["hc_count"], config["hc_lowrank"]
    wide = count * config["hidden_size"]
    shapes: Shapes = {
        f"{prefix}.hc_norm.weight": (wide,),
        f"{prefix}.input_mix_weight_down.weight": (rank, wide),
        f"{prefix}.input_mix_weight_up.weight": (wide, rank),
    }
    return shapes if final else shapes | {f"{prefix}.block_inject_weight.weight": (count, wide)}


def _delta_net(prefix: str, config: Config) -> Shapes:
    hidden, heads, width = config["hidden_size"], config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys, values = config["linear_num_key_heads"] * config["linear_key_head_dim"], heads * width
    return {
        f"{prefix}.in_proj_qkv.weight": (2 * keys + values, hidden),
        f"{prefix}.in_proj_z.weight": (values, hidden),
        f"{prefix}.in_proj_b.weight": (heads, hidden),
        f"{prefix}.in_proj_a.weight": (heads, hidden),
        f"{prefix}.conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        f"{prefix}.A_log": (heads,),
        f"{prefix}.dt_bias": (heads,),
        f"{prefix}.norm.weight": (width,),
        f"{prefix}.out_proj.weight": (hidden, values),
    }


def _indexed(prefix: str, config: Config) -> Shapes:
    hidden, head, width = config["hidden_size"], config["head_dim"], config["indexer_head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    indexed = config["indexer_n_heads"] + config["indexer_kv_heads"]
    return {
        f"{prefix}.q_proj.weight": (2 * queries, hidden),  # and the gate
        f"{prefix}.k_proj.weight": (keys, hidden),
        f"{prefix}.v_proj.weight": (keys, hidden),
        f"{prefix}.o_proj.weight": (hidden, queries),
        f"{prefix}.q_norm.weight": (head,),
        f"{prefix}.k_norm.weight": (head,),
        f"{prefix}.indexer.index_qk_proj.weight": (indexed * width, hidden),
        f"{prefix}.indexer.q_layernorm.weight": (width,),
        f"{prefix}.indexer.k_layernorm.weight": (width,),
    }


def _n_grams(prefix: str, config: Config) -> Shapes:
    """An embedding of n-grams in several tables, each as long as another prime number, and its short convolution."""
    hidden, width = config["hidden_size"], config["ple_embed_dim"]
    wide = config["hc_count"] * hidden
    tables = (config["ngram_size"] - 1) * config["heads_per_ngram"]
    divisor = config["make_ngram_vocab_size_divisible_by"]
    rows = math.ceil(sum(_primes(config["ngram_vocab_size_base"], tables)) / divisor) * divisor
    return {
        f"{prefix}.ple_embedding.ngram_embedding.shard_0.weight": (rows, width // tables),
        f"{prefix}.key_proj.weight": (wide, width),
        f"{prefix}.value_proj.weight": (hidden, width),
        f"{prefix}.norm_key.weight": (wide,),
        f"{prefix}.norm_query.weight": (wide,),
        f"{prefix}.norm_conv.weight": (wide,),
        f"{prefix}.conv1d.weight": (wide, 1, config["ple_conv_kernel_size"]),
    }


def _primes(least: int, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        if all(least % divisor for divisor in range(2, math.isqrt(least) + 1)):
            found.append(least)
        least += 1
    return found


def _experts(prefix: str, config: Config) -> Shapes:
    hidden = config["hidden_size"]
    shapes: Shapes = {
        f"{prefix}.gate.weight": (config["num_experts"], hidden),
        f"{prefix}.shared_expert_gate.weight": (1, hidden),
        **_gated(f"{prefix}.shared_expert", hidden, config["shared_expert_intermediate_size"]),
    }
    for expert in range(config["num_experts"]):
        shapes |= _gated(f"{prefix}.experts.{expert}", hidden, config["moe_intermediate_size"])
    return shapes


def _embeddings(hidden: int) -> Shapes:
    return {
        "model.embed_tokens.weight": (VOCABULARY, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCABULARY, hidden),
    }


def _gated(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _deepseek_v41(config: Config) -> Shapes:
    text = config["text_config"]
    ratios, hidden, rank = text["compress_ratios"], text["hidden_size"], text["q_lora_rank"]
    heads, width = text["index_n_heads"], text["index_head_dim"]
    # Groups of 128 tokens have no indexer, whose weights are other ones here.
    shapes = deepseek_v4.shapes(text | {"compress_ratios": [128] * len(ratios)})
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith("hc_head") and "ape" not in name}
    shapes |= {f"image_{name}": (hidden,) for name in ("start", "end", "newline")}  # which vLLM has without images, too
    for layer, ratio in enumerate(ratios):
        attention = f"layers.{layer}.attn"
        if ratio == 1:
            del shapes[f"{attention}.compressor.wgate.weight"]
        shapes |= {
            f"{attention}.indexer.wq_b.weight": (heads * width, rank),
            f"{attention}.indexer.wq_b.scale": (heads * width // deepseek_v4.BLOCK, rank // deepseek_v4.BLOCK),
            f"{attention}.indexer.weights_proj.weight": (heads, hidden),
            f"{attention}.indexer.wk.weight": (width, text["head_dim"]),
            f"{attention}.indexer.k_norm.weight": (width,),
        }
    return shapes


MODELS: Mapping[str, tuple[Config, Callable[[Config], Shapes]]] = {
    "minimax-m3": (MINIMAX_M3, _minimax_m3),
    "qwen4-exp": (QWEN4_EXP, _qwen4_exp),
    "kimi-k3": tiny_recurrent.MODELS["kimi-k3"],
    "deepseek-v41": (DEEPSEEK_V41, _deepseek_v41),
}


def write(name: str, folder: Path) -> Path:
    """Makes the model *name* in *folder*, in a folder of its name, and returns that."""
    config, described = MODELS[name]
    return models.save(config, described(config), folder / name)
