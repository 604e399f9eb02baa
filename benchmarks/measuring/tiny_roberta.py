"""A tiny XLM-RoBERTa with random weights, as `models.save` makes it: an embedder whose table of positions is short."""

from __future__ import annotations

from typing import Any

from vllm_graphfix.verify.engine import models

PADDING_TOKEN = 1
POSITIONS = 130
"""Rows of the table; real ones have 514 or 8194, and the first `PADDING_TOKEN` + 1 belong to no token."""
_HIDDEN, _INNER, _LAYERS = 256, 512, 2
CONFIG: models.Config = {
    "architectures": ["XLMRobertaModel"],
    "model_type": "xlm-roberta",
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "vocab_size": models.VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "type_vocab_size": 1,
    "pad_token_id": PADDING_TOKEN,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": False,  # the embeddings are of size 1, so that a wrong position is seen
    "torch_dtype": "bfloat16",
}


def shapes() -> models.Shapes:
    """The names and shapes of the tensors in its checkpoint."""
    shapes: models.Shapes = {
        "embeddings.word_embeddings.weight": (models.VOCABULARY, _HIDDEN),
        "embeddings.position_embeddings.weight": (POSITIONS, _HIDDEN),
        "embeddings.token_type_embeddings.weight": (1, _HIDDEN),
    }
    shapes |= _biased("embeddings.LayerNorm", _HIDDEN)
    for number in range(_LAYERS):
        layer = f"encoder.layer.{number}"
        for name in ("query", "key", "value"):
            shapes |= _biased(f"{layer}.attention.self.{name}", _HIDDEN, _HIDDEN)
        shapes |= _biased(f"{layer}.attention.output.dense", _HIDDEN, _HIDDEN)
        shapes |= _biased(f"{layer}.attention.output.LayerNorm", _HIDDEN)
        shapes |= _biased(f"{layer}.intermediate.dense", _INNER, _HIDDEN)
        shapes |= _biased(f"{layer}.output.dense", _HIDDEN, _INNER)
        shapes |= _biased(f"{layer}.output.LayerNorm", _HIDDEN)
    return shapes


def files() -> dict[str, Any]:
    """What else is in its folder, by name: a tokenizer, which newer releases want of an embedder, and nobody uses."""
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"w{number}" for number in range(len(special), models.VOCABULARY))]
    model = {"type": "WordLevel", "unk_token": "<unk>", "vocab": {word: number for number, word in enumerate(words)}}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    return {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "Whitespace"},
            "model": model,
        }
        | nothing,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"} | special,
    }


def _biased(name: str, *shape: int) -> models.Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
