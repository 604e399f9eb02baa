"""Tiny models with random weights: folders that vLLM loads like any checkpoint.

They have two layers, Granite 4 has three, one Llama and MiMo eight. Norms are 1 (except for one of DeepSeek V4) and
matrices normal(0, 1/sqrt(fan-in)): with vLLM's own dummy weights, which are near zero, every output would be the same.
Each tensor has its own seed, so that folders made on different machines hold the same numbers.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_graphfix.verify.engine import adapters, deepseek_v4, model_shapes
from vllm_graphfix.verify.engine.model_shapes import Config, Shapes

if TYPE_CHECKING:
    import torch

__all__ = ["LAYERS", "MODELS", "VOCABULARY", "Config", "Shapes", "in_blocks", "save", "write"]
VOCABULARY = 1024
LAYERS = 2

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
"""Two Mamba-2 layers and one of attention. vLLM groups layers of a kind by the number of the rarer kind, so that each
layer is a group of its own. With keys and values of this size a state fits in a block of 128 tokens."""
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
LLAMA_8: Config = LLAMA | {"num_hidden_layers": 8}
"""Four layers more than vLLM leaves out of a quantised TurboQuant cache: two at each end."""
MIMO: Config = LLAMA_8 | {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",  # transformers has no class for MiMo's own
    "num_nextn_predict_layers": 1,
}
"""Grouped attention with an MTP layer."""
LFM2: Config = _COMMON | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention"],
    "conv_dim": 512,
    "conv_L_cache": 3,
    "conv_bias": False,
    "block_dim": 512,
    "block_ff_dim": 1024,  # the name of `intermediate_size` in transformers 4
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,  # vLLM ties them anyway
}
"""A short convolution and an attention layer: the smallest hybrid. Model runner V2 supports recurrent layers in hybrids
only."""
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
"""A gated delta net layer and an attention layer, each with experts, and a draft layer."""
EAGLE: Config = LLAMA | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
"""Draft head of a Llama, which uses the target's embeddings and output matrix."""


MODELS: dict[str, tuple[Config, Callable[[Config], Shapes]]] = {
    "mla": (MLA, model_shapes.mla),
    "mla-mtp": (MLA_MTP, model_shapes.mla_mtp),
    "sparse-mtp": (SPARSE_MTP, model_shapes.mla_mtp),
    "mamba2": (MAMBA2, model_shapes.mamba2),
    "granite": (GRANITE, model_shapes.granite),
    "lfm2": (LFM2, model_shapes.lfm2),
    "llama": (LLAMA, model_shapes.llama),
    "llama-8": (LLAMA_8, model_shapes.llama),
    "mimo": (MIMO, model_shapes.mimo),
    "mixtral": (MIXTRAL, model_shapes.mixtral),
    "qwen3-next": (QWEN3_NEXT, model_shapes.qwen3_next),
    "eagle": (EAGLE, model_shapes.eagle),
    "deepseek-v4": (deepseek_v4.CONFIG, deepseek_v4.shapes),
}
"""Configuration of a model, and the function that returns the shapes of its tensors, by the model's name."""


def write(name: str, folder: Path) -> Path:
    """Make the model or adapter *name* in *folder*/*name*, and return that folder. Needs torch and safetensors."""
    if name in adapters.NAMES:
        return adapters.save(name, model_shapes.llama(LLAMA), folder / name)
    config, described = MODELS[name]
    return save(config, described(config), folder / name)


def save(config: Config, shapes: Shapes, made: Path) -> Path:
    """Make a model with *config* and tensors of *shapes* in the folder *made*, and return it."""
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
        values = values_of(tensor, shape, tied)
        if f"{matrix}.scale" in shapes:
            tensors |= in_blocks(matrix, values, shapes[f"{matrix}.scale"])
        else:
            tensors[tensor] = values.to(torch.bfloat16)
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


def in_blocks(matrix: str, values: torch.Tensor, blocks: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return *values* in fp8 with a scale per block, for (rows, columns) of *blocks*.

    Scales are powers of two, which vLLM never rounds.
    """
    import torch

    (rows, columns), (down, across) = values.shape, blocks
    tiles = values.view(down, rows // down, across, columns // across)
    fits = tiles.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    scales = fits.log2().ceil().exp2()
    return {
        f"{matrix}.weight": (tiles / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn),
        f"{matrix}.scale": scales,
    }


def values_of(name: str, shape: tuple[int, ...], tied: bool) -> torch.Tensor:
    import torch

    if name.endswith("A_log"):  # decay rates, from slow to fast
        return torch.linspace(0.5, 4.0, math.prod(shape)).log().view(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.full(shape, deepseek_v4.LOUD.get(name, 1.0))
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator)
    # Tied embeddings of size 1 would make every token its own successor.
    fan_in = 1 if "embed" in name and not tied else values[0].numel()
    return values.mul_(fan_in**-0.5)
