"""Makes the twins of a hunt, in processes that have imported transformers."""

from __future__ import annotations

import ast
import json
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from vllm_graphfix.commands.compare import CompareError
from vllm_graphfix.source.files import Source
from vllm_graphfix.source.known_code import code_digest

_REGISTRY = "vllm/model_executor/models/registry.py"
TEXT, IMAGES = "_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS"
"""Tables in vLLM's registry."""
VOCABULARY = 384
"""So small that a prompt can have every token: an n-gram drafter then has drafts for each."""
_BIASED = {"topk_method": "noaux_tc"}
"""The routing method as published: without it vLLM has no bias of the router, which transformers always saves."""
_CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8}
_HYBRID = {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"] * 8}
"""Layers of two kinds, as published, where the class's default is one kind."""
_DELTA_LAYERS = {
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [number for number in range(1, 27) if number % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    }
}
"""Kimi Linear's layers as published, counted from 1; of the class's own list of them vLLM knows nothing."""
_WINDOWS = {
    "hybrid_layer_pattern": [int(0 < layer < 47 and layer % 6 != 5) for layer in range(48)],
    "moe_layer_freq": [0] + [1] * 47,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window_size": 128,
    "layernorm_epsilon": 1e-5,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}
"""MiMo V2's layers as published."""
_OTHERWISE: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "BloomForCausalLM": {"hidden_size": 4096, "n_head": 32},  # of BLOOM-7B1; the class's heads are too small
    # The published base of RoPE, and the limit of queries, keys and values.
    "DbrxForCausalLM": {"attn_config": {"clip_qkv": 8, "rope_theta": 500000}},
    # As the Lite model is published; vLLM always routes by groups.
    "DeepseekV2ForCausalLM": {
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
    },
    "DeepseekV3ForCausalLM": _BIASED,
    "DeepseekV32ForCausalLM": _BIASED,
    "DeepseekV4ForCausalLM": _BIASED | {"num_nextn_predict_layers": 0},  # vLLM calls the layers of drafts otherwise
    "Glm4MoeForCausalLM": {"head_dim": 128},  # as published, which vLLM needs
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1} | _BIASED,
    "GlmMoeDsaForCausalLM": _BIASED,
    "GraniteMoeHybridForCausalLM": _HYBRID,
    # As published; vLLM reads widths and layers by these names.
    "HYV3ForCausalLM": {"expert_hidden_dim": 1536, "first_k_dense_replace": 1, "qk_norm": True, "route_norm": True},
    "KimiLinearForCausalLM": {"mla_use_nope": True, "first_k_dense_replace": 1, "layer_types": None} | _DELTA_LAYERS,
    "Lfm2ForCausalLM": {"hidden_size": 2048, "conv_dim": 2048, "block_dim": 2048} | _CONVOLUTIONS,
    "Lfm2MoeForCausalLM": _CONVOLUTIONS,
    "LongcatFlashForCausalLM": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
        "moe_intermediate_size": 2048,  # the published `expert_ffn_hidden_size` by vLLM's name
    },
    "MiMoV2FlashForCausalLM": _WINDOWS,
    "MiniMaxM2ForCausalLM": {"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True},
    "NemotronForCausalLM": {"num_key_value_heads": 8},
    # As published; the class derives the sizes of attention from the hidden size, if they are absent.
    "Zamba2ForCausalLM": {
        "n_mamba_heads": 80,
        "mamba_headdim": 64,
        "attention_hidden_size": None,
        "attention_head_dim": None,
    },
}
"""Values of an architecture's config that replace the defaults of its class; a key with None is left out."""
_NEEDS_TOKENIZER = "vLLM starts it with a tokenizer alone, and a hunt's engines have none"
_NOT_MADE = {
    "InklingForCausalLM": _NEEDS_TOKENIZER,
    "InklingForConditionalGeneration": _NEEDS_TOKENIZER,
    "Qwen4ExpForCausalLM": "its class has no sizes of an indexer, without which it makes no layer of sparse attention",
}
"""Architectures without a twin although transformers has their class, and why."""


class Made(NamedTuple):
    """A twin, or the reason why there is none."""

    folder: str
    flags: tuple[str, ...]
    adapters: tuple[str, ...]
    why_not: str | None = None


_ADAPTERS, _STAGES = "SupportsLoRA", "SupportsPP"
"""Words in the file of a class that takes adapters, and pipeline parallelism; one made of Llama's takes both."""


def architectures_of(source: Source, table: str = TEXT) -> dict[str, str]:
    """Return the files of the architectures in a *table* in the registry of *source*.

    Raises CompareError.
    """
    for node in ast.parse(source.read(_REGISTRY) or b"").body:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)):
            continue
        if any(isinstance(target, ast.Name) and target.id == table for target in node.targets):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            named = {key.value: ast.literal_eval(value) for key, value in pairs if isinstance(key, ast.Constant)}
            return {str(name): f"vllm/model_executor/models/{place[0]}.py" for name, place in named.items()}
    raise CompareError(f"{_REGISTRY} of this vLLM has no {table}, so its architectures are not known")


def takes(source: Source, file: str) -> tuple[bool, bool]:
    """Tell if the architecture in *file* takes adapters, and stages."""
    others = source.contains_word(file, "LlamaForCausalLM")
    return others or source.contains_word(file, _ADAPTERS), others or source.contains_word(file, _STAGES)


def is_changed(file: str, source: Source, earlier: Source) -> bool:
    """Tell if *file* has other code in *source* than in *earlier*; comments do not count."""
    return code_digest(file, source.read(file) or b"") != code_digest(file, earlier.read(file) or b"")


def pool(processes: int) -> ProcessPoolExecutor:
    """Return *processes* that make twins."""
    context = get_context("forkserver")  # from a process without threads, in which torch is imported once
    context.set_forkserver_preload(["transformers", "torch", "safetensors.torch", __name__])
    return ProcessPoolExecutor(processes, mp_context=context, initializer=_begin)


def _begin() -> None:
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os._exit(1)


def default_config(name: str) -> dict[str, Any] | str:
    """Return the config.json of a model of architecture *name* with all defaults, or the reason why there is none."""
    import transformers

    kind = getattr(getattr(transformers, name, None), "config_class", None)
    if kind is None:
        return f"transformers {transformers.__version__} has no class of this name"
    if name in _NOT_MADE:
        return _NOT_MADE[name]
    errors = []
    for use_diff in (False, True):
        try:
            config: dict[str, Any] = json.loads(kind().to_json_string(use_diff=use_diff), object_hook=_number)
            kind(**config)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}".partition("\n")[0])
            continue
        config |= {"architectures": [name], "model_type": kind.model_type} | _OTHERWISE.get(name, {})
        absent = [key for key, value in _OTHERWISE.get(name, {}).items() if value is None]
        return with_few_tokens({key: value for key, value in config.items() if key not in absent})
    return f"its class makes no config of defaults: {errors[-1]}"


def with_few_tokens(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("vocab_size", 0) <= VOCABULARY:
        return config
    last = VOCABULARY - 1
    for key, value in config.items():
        if key.endswith("_token_id") and value is not None:
            config[key] = [min(each, last) for each in value] if isinstance(value, list) else min(value, last)
    return config | {"vocab_size": VOCABULARY}


def _number(section: dict[str, Any]) -> Any:
    """Return the number in an object that transformers writes for infinity or NaN, which JSON lacks; else *section*."""
    return float(section["__float__"]) if section.keys() == {"__float__"} else section


def make(config: Path, flags: Sequence[str], folder: Path) -> Made:
    """Make the twin of the model with the config.json *config*, for *flags*, in *folder*."""
    from vllm_graphfix.commands.compare.twin import fit

    try:
        twin = fit(str(config), flags, folder)
    except Exception as error:  # of transformers' classes, for configs that nobody has tried
        text = str(error) if isinstance(error, CompareError) else f"{type(error).__name__}: {error}"
        return Made("", (), (), text.partition("\n")[0])
    return Made(str(twin.folder), twin.flags, twin.adapters)
