"""Names and shapes of the tensors of the tiny models, as in a checkpoint of each architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
Part = Callable[[str, Config], Shapes]
"""Shapes of a part of a layer, from the layer's prefix and the model's configuration."""


def _embeddings(config: Config, layers: str = "model.layers", norm: str = "model.norm") -> Shapes:
    hidden = config["hidden_size"]
    outer = layers.rpartition(".")[0]
    return {
        f"{outer}.{'embeddings' if outer == 'backbone' else 'embed_tokens'}.weight": (config["vocab_size"], hidden),
        f"{norm}.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }


def _layers(config: Config, *parts: Part, prefix: str = "model.layers", extra: int = 0) -> Shapes:
    """Return the shapes of *parts* in every hidden layer and in *extra* ones after them."""
    shapes: Shapes = {}
    for layer in range(config["num_hidden_layers"] + extra):
        for part in parts:
            shapes |= part(f"{prefix}.{layer}", config)
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
    """Latent attention with low-rank queries, and the indexer that selects the tokens that it attends to."""
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


def mla(config: Config) -> Shapes:
    attention = _sparse_attention if "index_topk" in config else _latent_attention
    drafts = config.get("num_nextn_predict_layers", 0)
    return _embeddings(config) | _layers(config, _mlp, attention, extra=drafts)


def mla_mtp(config: Config) -> Shapes:
    hidden = config["hidden_size"]
    prefix = f"model.layers.{config['num_hidden_layers']}"
    return mla(config) | {
        f"{prefix}.embed_tokens.weight": (config["vocab_size"], hidden),
        f"{prefix}.enorm.weight": (hidden,),
        f"{prefix}.hnorm.weight": (hidden,),
        f"{prefix}.eh_proj.weight": (hidden, 2 * hidden),
        f"{prefix}.shared_head.norm.weight": (hidden,),
        f"{prefix}.shared_head.head.weight": (config["vocab_size"], hidden),
    }


def mamba2(config: Config) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_heads"]
    shapes = _embeddings(config, "backbone.layers", "backbone.norm_f")
    for layer in range(config["num_hidden_layers"]):
        prefix = f"backbone.layers.{layer}"
        shapes[f"{prefix}.norm.weight"] = (hidden,)
        shapes |= _mixer(f"{prefix}.mixer", config, heads, config["n_groups"] * config["state_size"])
    return shapes


def _mixer(prefix: str, config: Config, heads: int, states: int) -> Shapes:
    """Mamba-2 with a convolution over four tokens and an inner width of twice the hidden size.

    *states* is the state size of all groups together.
    """
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


def granite(config: Config) -> Shapes:
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


def lfm2(config: Config) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"], config["num_key_value_heads"], config["num_key_value_heads"]
    head = hidden // heads[0]
    shapes: Shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
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


def qwen3_next(config: Config) -> Shapes:
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
        f"{prefix}.self_attn.q_proj.weight": (2 * config["num_attention_heads"] * head, hidden),  # queries and the gate
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


def mixtral(config: Config) -> Shapes:
    return _embeddings(config) | _layers(config, _mixture, _grouped_attention)


def llama(config: Config) -> Shapes:
    return _embeddings(config) | _layers(config, _mlp, _grouped_attention)


def mimo(config: Config) -> Shapes:
    """Qwen2, whose projections to queries, keys and values have biases, and one MTP layer."""
    hidden, draft = config["hidden_size"], "model.mtp_layers"
    shapes = llama(config) | _layers(config | {"num_hidden_layers": 1}, _mlp, _grouped_attention, prefix=draft)
    for name in [name for name in shapes if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        shapes[name.replace("weight", "bias")] = shapes[name][:1]
    shapes |= {f"{draft}.0.{norm}_layernorm.weight": (hidden,) for norm in ("token", "hidden", "final")}
    return shapes | {f"{draft}.0.input_proj.weight": (hidden, 2 * hidden)}


def eagle(config: Config) -> Shapes:
    shapes: Shapes = {"fc.weight": (config["hidden_size"], 2 * config["hidden_size"])}
    shapes |= _layers(config, _mlp, _grouped_attention, prefix="layers")
    del shapes["layers.0.input_layernorm.weight"]  # an Eagle head has none
    return shapes
