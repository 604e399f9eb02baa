"""A tiny Qwen2-VL with random weights: a folder that vLLM loads like any checkpoint.

Its tokenizer and its image processor are made on the spot, too. Token 0 is where an image goes.
"""

from __future__ import annotations

import json
from pathlib import Path

from vllm_graphfix.verify.engine import models
from vllm_graphfix.verify.engine.models import VOCABULARY

NAME = "qwen2-vl"
_LLAMA, _of_llama = models.MODELS["llama"]
_HIDDEN, _WIDTH, _DEPTH, _PATCH = _LLAMA["hidden_size"], 128, 2, 14
CONFIG: models.Config = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "text_config": _LLAMA
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2_vl_text",
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    },
    "vision_config": {
        "model_type": "qwen2_vl",
        "depth": _DEPTH,
        "embed_dim": _WIDTH,
        "hidden_size": _HIDDEN,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": _PATCH,
    },
    "image_token_id": 0,
    # Behind the vocabulary: no prompt has them.
    "video_token_id": VOCABULARY,
    "vision_start_token_id": VOCABULARY + 1,
    "vision_end_token_id": VOCABULARY + 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write(folder: Path) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    made = models.save(CONFIG, _shapes(), folder / NAME)
    special = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    words = [special[0], *(f"w{number}" for number in range(1, VOCABULARY)), *special[1:]]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[1]))
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(made / "tokenizer.json"))
    told = {
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": words[2]},
        "preprocessor_config": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
            "size": {"shortest_edge": 56**2, "longest_edge": 112**2},  # in pixels: from 4 tokens to 16
            # As in any checkpoint. A vLLM that normalises images on the device finds it here, and does nothing without.
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.48, 0.46, 0.41],
            "image_std": [0.27, 0.26, 0.28],
        },
    }
    for name, value in told.items():
        (made / f"{name}.json").write_text(json.dumps(value))
    return made


def _shapes() -> models.Shapes:
    text = _of_llama(CONFIG["text_config"])
    inner = tuple(f"{name}_proj.weight" for name in "qkv")
    biases = {name.replace("weight", "bias"): shape[:1] for name, shape in text.items() if name.endswith(inner)}
    shapes = text | biases | {"visual.patch_embed.proj.weight": (_WIDTH, 3, 2, _PATCH, _PATCH)}
    for number in range(_DEPTH):
        block = f"visual.blocks.{number}"
        shapes |= _biased(f"{block}.norm1", _WIDTH) | _biased(f"{block}.norm2", _WIDTH)
        shapes |= _biased(f"{block}.attn.qkv", 3 * _WIDTH, _WIDTH) | _biased(f"{block}.attn.proj", _WIDTH, _WIDTH)
        shapes |= _biased(f"{block}.mlp.fc1", 2 * _WIDTH, _WIDTH) | _biased(f"{block}.mlp.fc2", _WIDTH, 2 * _WIDTH)
    merged = 4 * _WIDTH  # patches of two by two
    return (
        shapes
        | _biased("visual.merger.ln_q", _WIDTH)
        | _biased("visual.merger.mlp.0", merged, merged)
        | _biased("visual.merger.mlp.2", _HIDDEN, merged)
    )


def _biased(name: str, *shape: int) -> models.Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
