"""Makes twins: models of a config's architecture with random weights, by transformers' own classes.

Weights are those of `models`: norms of 1 and matrices normal(0, 1/sqrt(fan-in)), so that each layer keeps the size of
what it is given. Then the model is run once, on the CPU, and its output matrix (its last norm, where the matrix is
tied to the embeddings) scaled so that logits have a standard deviation of `_SPREAD`: with less, each token would be as
good as any; multipliers in a config may take it away, as Falcon-H1's do. Needs torch, transformers and safetensors.
"""

from __future__ import annotations

import importlib
import json
import re
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_graphfix.verify.engine import adapters, models
from vllm_graphfix.verify.engine.reduction import EXPERTS, Change, Plan, Section, reduced

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

_SPREAD = 3.0
_PROMPT_TOKENS = 32
"""Tokens of the prompt by which logits are scaled."""
_LINEAR = re.compile(r"\.(?!eh_proj)(\w+_proj|\w+_proj_with_mqa|w[123])\.weight$")
"""Matrices that checkpoints quantise: none of routers, of embeddings, of convolutions."""
_RENAMED = (
    (re.compile(r"\.block_sparse_moe\.(?=(gate|up|down)_proj\.)"), ".mlp."),  # Kimi's dense layers
    (re.compile(r"\.hc_pre\.(hc_attn_layer|hc_mlp_layer)\."), r".\1.hc_pre."),  # HY-V4's
    (re.compile(r"\.hc_pre\.hc_head\."), ".hc_head."),
    (re.compile(r"\.hc_head\.hc_(?=(fn|base|scale)$)"), ".hc_head_"),  # DeepSeek V4's
    (re.compile(r"(layers\.\d+\.attn)\.norm\."), r"\1.kv_norm."),
)
"""Names by which transformers saves weights, and those by which vLLM loads them."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_EXPERTS_OUT_OF = "down_proj"
_MXFP4_BLOCK, _MXFP4_SPREAD, _E8M0_BIAS = 32, 2.93, 127
"""Values that share a scale; the standard deviation of a value of random bits; the exponent that stands for 1."""
_BYTES = 256


class TwinError(Exception):
    """No twin can be made of a config; the message has the reason."""


@dataclass
class Twin:
    folder: Path
    config: Section
    changes: list[Change]
    parameters: int = 0
    spread: float | None = None
    """Standard deviation of the logits before they were scaled; None if transformers cannot run the model here."""
    linear: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of matrices that adapters may be added to, by tensor."""


def make(config: Section, folder: Path, plan: Callable[[Section], Plan]) -> Twin:
    """Write the twin of the model with *config* to *folder*. Raises TwinError.

    *plan* makes the `Plan` of a section of the config.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    kind = _class_of(config)
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    try:
        defaults = kind.config_class(**plain).to_dict()
    except Exception as error:
        raise TwinError(f"transformers rejects this config.json: {error}") from error
    is_mxfp4 = (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    alignment = 2 * _MXFP4_BLOCK if is_mxfp4 else 1
    twin = Twin(folder, *reduced(plain, defaults, lambda section: replace(plan(section), alignment=alignment)))
    torch_default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with _no_init_weights():
            model = kind(kind.config_class(**twin.config)).eval()
        model.tie_weights()
    except Exception as error:
        raise TwinError(f"transformers makes no model of the reduced config.json: {error}") from error
    finally:
        torch.set_default_dtype(torch_default)
    _fill(model, twin)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size="100GB")
    tensors = _as_vllm_loads(load_file(folder / "model.safetensors"), twin.config)
    tensors |= _draft_layers(tensors, twin.config)
    twin.parameters = sum(each.numel() for each in tensors.values())
    twin.linear = {
        name: tuple(each.shape) for name, each in tensors.items() if _LINEAR.search(name) and each.dim() == 2
    }
    if wanted := config.get("quantization_config"):
        tensors = _quantised(tensors, wanted, twin)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    twin.config["torch_dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(twin.config, indent=2))
    _write_tokenizer(folder)
    return twin


def _class_of(config: Section) -> Any:
    import transformers

    names = config.get("architectures") or ["unknown"]
    kind = getattr(transformers, str(names[0]), None)
    if kind is None or getattr(kind, "config_class", None) is None:
        raise TwinError(
            f"transformers {transformers.__version__} has no class {names[0]}, whose names of weights are needed; "
            "models with code of their own (--trust-remote-code) have no twin"
        )
    return kind


def _no_init_weights() -> AbstractContextManager[None]:
    for module in ("transformers.initialization", "transformers.modeling_utils"):  # since 5, up to 4
        with suppress(ImportError, AttributeError):
            context: AbstractContextManager[None] = importlib.import_module(module).no_init_weights()
            return context
    return nullcontext()


def _fill(model: Any, twin: Twin) -> None:
    import torch

    text = twin.config.get("text_config", twin.config)
    hidden = next((text[key] for key in ("hidden_size", "n_embd", "d_model") if key in text), 0)
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            values = models.values_of(name, shape, tied)
            if len(shape) == 3 and "experts" in name:  # (experts, inputs, outputs) or (experts, outputs, inputs)
                inner = next((size for size in shape[1:] if (size == hidden) == (_EXPERTS_OUT_OF not in name)), hidden)
                values *= (values[0].numel() / inner) ** 0.5
            parameter.copy_(values)
        last = model.get_output_embeddings()
        scaled = last.weight if last is not None and not tied else _last_norm(model)
        generator = torch.Generator().manual_seed(zlib.crc32(b"twin"))
        prompt = torch.randint(len(model.get_input_embeddings().weight), (1, _PROMPT_TOKENS), generator=generator)
        try:
            twin.spread = _spread(model, prompt)
        except Exception:  # a kernel that needs a GPU
            return
        without = 0.0
        if tied:  # Gemma's norms multiply by 1 more than their weights
            scaled.zero_()
            without = _spread(model, prompt)
            scaled.fill_(1)
        scaled.mul_((_SPREAD - without) / (twin.spread - without))


def _spread(model: Any, prompt: torch.Tensor) -> float:
    return float(model(input_ids=prompt, use_cache=False).logits.float().std(-1).mean())


def _last_norm(model: Any) -> torch.Tensor:
    """Return the weights of the norm in front of the output matrix."""
    named: Iterable[tuple[str, torch.Tensor]] = model.named_parameters()
    return [each for name, each in named if each.dim() == 1 and re.search(r"(norm|ln_)\w*\.weight$", name)][-1]


def _as_vllm_loads(saved: Tensors, config: Section) -> Tensors:
    """Return the weights that transformers has *saved* as checkpoints have them."""
    tensors = {}
    for saved_name, each in saved.items():
        name = saved_name
        for pattern, other in _RENAMED:
            name = pattern.sub(other, name)
        expert = _EXPERT.search(name) if config.get("zero_expert_num") else None
        if expert is None or int(expert[1]) < config["n_routed_experts"]:  # LongCat's zero experts have no weights
            tensors[name] = each
    if config.get("model_type") == "axk1":  # vLLM loads, but does not run, a norm behind a dense layer
        for number in range(config["first_k_dense_replace"]):
            layer = f"model.layers.{number}."
            tensors[f"{layer}post_mlp_layernorm.weight"] = tensors[f"{layer}post_attention_layernorm.weight"].clone()
    return tensors


def _draft_layers(tensors: Tensors, config: Section) -> Tensors:
    """Return the weights of multi-token prediction, which transformers' classes lack: a layer like the last one."""
    import torch

    layer, hidden = config.get("num_hidden_layers", 0), config.get("hidden_size", 0)
    if config.get("num_nextn_predict_layers"):
        own, into = f"model.layers.{layer - 1}.", f"model.layers.{layer}."
        vectors, matrices = ("enorm", "hnorm", "shared_head.norm"), {"eh_proj": (hidden, 2 * hidden)}
        matrices |= dict.fromkeys(("shared_head.head", "embed_tokens"), (config["vocab_size"], hidden))
    elif config.get("model_type") == "qwen3_next":
        own, into = f"model.layers.{layer - 1}.", "mtp."
        vectors, matrices = ("pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm"), {"fc": (hidden, 2 * hidden)}
    else:
        return {}
    made: dict[str, tuple[int, ...]] = {f"{into}{name}.weight": (hidden,) for name in vectors}
    made |= {f"{into}{name}.weight": shape for name, shape in matrices.items()}
    copied = into + ("layers.0." if into == "mtp." else "")
    made |= {name.replace(own, copied, 1): tuple(each.shape) for name, each in tensors.items() if name.startswith(own)}
    return {name: models.values_of(name, shape, False).to(torch.bfloat16) for name, shape in made.items()}


def _quantised(tensors: Tensors, wanted: Section, twin: Twin) -> Tensors:
    """Return *tensors* quantised as *wanted*, or as they are, with a `Change` that says so."""
    method, block = wanted.get("quant_method"), wanted.get("weight_block_size")
    ignored = [*(wanted.get("ignored_layers") or ()), *(wanted.get("modules_to_not_convert") or ())]
    made: Tensors = {}
    for name, values in tensors.items():
        if method == "fp8" and block and _LINEAR.search(name) and not any(each in name for each in ignored):
            made |= _in_fp8(name, values, block)
        elif method == "mxfp4" and name.endswith(("gate_up_proj", _EXPERTS_OUT_OF)):
            made |= _in_mxfp4(name, values)
        else:
            made[name] = values
    if made.keys() == tensors.keys():
        why = "weights are bfloat16: kernels for quantised ones, which may spread a padded row's NaN, are not run"
        twin.changes.append(Change("quantization_config", method, None, ("triton-mla-padding",), why))
    else:
        twin.config["quantization_config"] = wanted
    return made


def _in_fp8(name: str, values: torch.Tensor, block: Any) -> Tensors:
    """Return *values* in fp8 with a scale for each *block* of (rows, columns), the last ones cut off."""
    import torch
    from torch.nn.functional import pad

    (rows, columns), (down, across) = values.shape, block
    whole = pad(values.float(), (0, -columns % across, 0, -rows % down))
    tiles = whole.view(len(whole) // down, down, -1, across)
    scales = (tiles.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max).clamp(min=1e-12)
    scales = scales.log2().ceil().exp2()  # which kernels with power-of-two scales never round
    small = (tiles / scales[:, None, :, None]).view(whole.shape)[:rows, :columns]
    return {name: small.contiguous().to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def _in_mxfp4(name: str, values: torch.Tensor) -> Tensors:
    """Return random bits for *values* of shape (experts, inputs, outputs), and the scale that gives them their size."""
    import torch

    experts, inputs, outputs = values.shape
    shape = (experts, outputs, inputs // _MXFP4_BLOCK, _MXFP4_BLOCK // 2)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    blocks = torch.randint(_BYTES, shape, dtype=torch.uint8, generator=generator)
    exponent = round(-torch.tensor(inputs**0.5 * _MXFP4_SPREAD).log2().item()) + _E8M0_BIAS
    return {f"{name}_blocks": blocks, f"{name}_scales": torch.full(shape[:3], exponent, dtype=torch.uint8)}


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are bytes, and words that no text has."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), Decoder()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def make_adapters(twin: Twin) -> tuple[Path, ...]:
    """Write two LoRA adapters, of a mixture of experts for its attention alone, and return their folders.

    Where an adapter has one of an expert's matrices, vLLM asks for all of them.
    """
    text = twin.config.get("text_config", twin.config)
    taken = adapters.ATTENTION if any(text.get(key) for key in EXPERTS) else adapters.MODULES
    shapes = {name: shape for name, shape in twin.linear.items() if name.split(".")[-2] in taken}
    modules = sorted({name.split(".")[-2] for name in shapes})
    if not modules:
        raise TwinError(f"no matrix of this model is one of {', '.join(taken)}, to which adapters are added")
    return tuple(adapters.save(name, shapes, twin.folder / name, modules) for name in adapters.NAMES)
