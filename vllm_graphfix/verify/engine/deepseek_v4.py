"""A tiny DeepSeek V4: one layer that attends to groups of 128 tokens, one to groups of 4 with an indexer.

Heads, head width, window, indexer and residual streams are those of the real model, since kernels support no others.
Attention and shared experts are in fp8 with a scale per block of 128 x 128, as in every checkpoint (up to 0.29.0 vLLM
has no other output projection). The routed experts are in bf16.
"""

from __future__ import annotations

from vllm_graphfix.verify.engine.model_shapes import Config, Shapes

BLOCK = 128
"""Rows and columns of a matrix in fp8 that share a scale."""
_LAYERS = 2
CONFIG: Config = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 2048,
    "num_hidden_layers": _LAYERS,
    "vocab_size": 1024,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "compress_ratios": [128, 4],
    "sliding_window": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 256,
    "o_groups": 8,
    "o_lora_rank": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,  # four times as many tokens: more than any context here has
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,  # all of them: a tie in the choice of experts would look like corruption
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "num_hash_layers": 0,
    "num_nextn_predict_layers": 0,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "swiglu_limit": 10.0,  # as in the checkpoints; some configurations refuse a model without one
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "expert_dtype": "fp8",  # those that are not ignored, and scales in float32
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "ignored_layers": [f"model.layers.{layer}.ffn.experts" for layer in range(_LAYERS)],
    },
}
LOUD = {"layers.0.attn.compressor.norm.weight": 4.0}
"""Norms that are not 1, so that the groups of the first layer outweigh the window's 128 tokens, and answers depend on
them."""


def shapes(config: Config) -> Shapes:
    """Return the shapes of all tensors by name. A matrix with a ``.scale`` is in fp8."""
    hidden, streams, vocabulary = config["hidden_size"], config["hc_mult"], config["vocab_size"]
    tensors: Shapes = {
        "embed.weight": (vocabulary, hidden),
        "norm.weight": (hidden,),
        "head.weight": (vocabulary, hidden),
        "hc_head_fn": (streams, streams * hidden),
        "hc_head_base": (streams,),
        "hc_head_scale": (1,),
    }
    for layer, ratio in enumerate(config["compress_ratios"]):
        prefix = f"layers.{layer}"
        tensors |= _residual(prefix, config) | _attention(f"{prefix}.attn", config) | _experts(f"{prefix}.ffn", config)
        tensors |= _compressor(f"{prefix}.attn.compressor", config, ratio, config["head_dim"])
        if ratio == 4:
            tensors |= _indexer(f"{prefix}.attn.indexer", config, ratio)
    return tensors


def _residual(prefix: str, config: Config) -> Shapes:
    hidden, streams = config["hidden_size"], config["hc_mult"]
    mixed = streams * (streams + 2)
    tensors: Shapes = {}
    for part in ("attn", "ffn"):
        tensors |= {
            f"{prefix}.{part}_norm.weight": (hidden,),
            f"{prefix}.hc_{part}_fn": (mixed, streams * hidden),
            f"{prefix}.hc_{part}_base": (mixed,),
            f"{prefix}.hc_{part}_scale": (3,),
        }
    return tensors


def _attention(prefix: str, config: Config) -> Shapes:
    hidden, rank, head = config["hidden_size"], config["q_lora_rank"], config["head_dim"]
    heads, groups, width = config["num_attention_heads"], config["o_groups"], config["o_lora_rank"]
    return {
        f"{prefix}.attn_sink": (heads,),
        f"{prefix}.q_norm.weight": (rank,),
        f"{prefix}.kv_norm.weight": (head,),
        **_in_fp8(f"{prefix}.wq_a", rank, hidden),
        **_in_fp8(f"{prefix}.wkv", head, hidden),
        **_in_fp8(f"{prefix}.wq_b", heads * head, rank),
        **_in_fp8(f"{prefix}.wo_a", groups * width, heads * head // groups),
        **_in_fp8(f"{prefix}.wo_b", hidden, groups * width),
    }


def _compressor(prefix: str, config: Config, ratio: int, head: int) -> Shapes:
    width = head * (2 if ratio == 4 else 1)  # groups of four overlap
    return {
        f"{prefix}.ape": (ratio, width),
        f"{prefix}.wkv.weight": (width, config["hidden_size"]),
        f"{prefix}.wgate.weight": (width, config["hidden_size"]),
        f"{prefix}.norm.weight": (head,),
    }


def _indexer(prefix: str, config: Config, ratio: int) -> Shapes:
    heads, head = config["index_n_heads"], config["index_head_dim"]
    return {
        **_in_fp8(f"{prefix}.wq_b", heads * head, config["q_lora_rank"]),
        f"{prefix}.weights_proj.weight": (heads, config["hidden_size"]),
        **_compressor(f"{prefix}.compressor", config, ratio, head),
    }


def _experts(prefix: str, config: Config) -> Shapes:
    hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    tensors: Shapes = {f"{prefix}.gate.weight": (count, hidden), f"{prefix}.gate.bias": (count,)}
    for name, rows, columns in (("w1", inner, hidden), ("w2", hidden, inner), ("w3", inner, hidden)):
        tensors |= _in_fp8(f"{prefix}.shared_experts.{name}", rows, columns)
        tensors |= {f"{prefix}.experts.{expert}.{name}.weight": (rows, columns) for expert in range(count)}
    return tensors


def _in_fp8(name: str, rows: int, columns: int) -> Shapes:
    return {f"{name}.weight": (rows, columns), f"{name}.scale": (rows // BLOCK, columns // BLOCK)}
