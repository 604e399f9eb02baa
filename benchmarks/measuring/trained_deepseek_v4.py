"""A DeepSeek V4 to train: its configuration, and its checkpoint from the tensors of transformers.

The first layer attends to one entry for each group of 128 tokens. The second one would attend to groups of four, and
could do without the first: its compressor's output is frozen at 0. Both have a window of 128 tokens, so that only the
entries of the first layer hold what lies more than 254 tokens back.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from measuring.trained_drafts import Tensors
from vllm_graphfix.verify.engine import deepseek_v4 as tiny
from vllm_graphfix.verify.engine.models import in_blocks

if TYPE_CHECKING:
    import torch

CONFIG: dict[str, Any] = tiny.CONFIG
TOY = {  # matrices in fp8 have at least one block
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "o_groups": 2,
    "o_lora_rank": 64,
    "q_lora_rank": 128,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "moe_intermediate_size": 128,
}
HELD = {"model.layers.1.self_attn.compressor.kv_norm.weight": 0.0}

_NORMS = {"attn": "input_layernorm", "ffn": "post_attention_layernorm"}
_MATRICES = {"1": "gate", "2": "down", "3": "up"}
_NAMES = (
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^norm\.", "model.norm."),
    (r"^hc_head_(\w+)$", r"model.hc_head.hc_\1"),
    (r"^layers\.", "model.layers."),
    (r"\.(attn|ffn)_norm\.", lambda match: f".{_NORMS[match[1]]}."),
    (r"\.hc_(attn|ffn)_(\w+)$", r".\1_hc.\2"),
    (r"\.attn\.indexer\.compressor\.norm\.", ".self_attn.compressor.indexer.kv_norm."),
    (r"\.attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.attn\.indexer\.", ".self_attn.compressor.indexer."),
    (r"\.attn\.compressor\.norm\.", ".self_attn.compressor.kv_norm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.ape$", ".position_bias"),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.w([qo])_([ab])\.", r".\1_\2_proj."),
    (r"\.ffn\.", ".mlp."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.shared_experts\.w([123])\.", lambda match: f".shared_experts.{_MATRICES[match[1]]}_proj."),
)
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.w([123])\.weight$")


def as_checkpoint(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Return *tensors* of transformers under DeepSeek's names, in fp8 where its checkpoints are.

    Raises ValueError for a wrong shape, and for a tensor without a place.
    """
    shapes = tiny.shapes(config)
    unused = dict(tensors)
    made: Tensors = {}
    for name, shape in shapes.items():
        matrix, _, kind = name.rpartition(".")
        if kind == "scale":
            continue
        tensor = _of(name, tensors, unused)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is of shape {tuple(tensor.shape)}, and not {shape}")
        made |= (
            in_blocks(matrix, tensor.float(), shapes[f"{matrix}.scale"])
            if f"{matrix}.scale" in shapes
            else {name: tensor}
        )
    if unused:
        raise ValueError(f"there is no place for {', '.join(unused)}")
    return config, made


def in_transformers(name: str) -> str:
    """Return transformers' name of the tensor *name* of a checkpoint; it joins the experts of a layer in one tensor."""
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _of(name: str, tensors: Tensors, unused: Tensors) -> torch.Tensor:
    theirs = in_transformers(name)
    if not (expert := _EXPERT.match(theirs)):
        unused.pop(theirs, None)
        return tensors[theirs]
    prefix, number, part = expert[1], int(expert[2]), expert[3]
    joined = f"{prefix}.{'down' if part == '2' else 'gate_up'}_proj"
    unused.pop(joined, None)
    matrix = tensors[joined][number]
    return matrix if part == "2" else matrix.chunk(2)[int(part == "3")].contiguous()
