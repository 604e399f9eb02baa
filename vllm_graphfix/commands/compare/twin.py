"""Twin of the user's model, and the user's flags made to fit it: `compare --twin`."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_graphfix.commands.compare import CompareError
from vllm_graphfix.deployment import line
from vllm_graphfix.deployment.hardware import first_bytes
from vllm_graphfix.deployment.model import in_the_hub_cache
from vllm_graphfix.verify.engine import model_shapes, models, twin
from vllm_graphfix.verify.engine.reduction import Change, Plan, Section

_LARGEST_CONFIG = 1024 * 1024
_TENSOR_PARALLEL = "--tensor-parallel-size"
_PIPELINE_PARALLEL = "--pipeline-parallel-size"
_CONTEXT_PARALLEL = "--decode-context-parallel-size"
_DRAFTS = "--speculative-config"
_OVERRIDES = "--hf-overrides"
_OF_RANKS = "one rank has all of it: collectives between ranks, and what comes of their order, are not tried"
_FITTED: dict[str, tuple[str, tuple[str, ...], str]] = {
    _TENSOR_PARALLEL: ("", (), _OF_RANKS),
    _CONTEXT_PARALLEL: ("", ("dcp-context-lens", "draft-graph-support"), "these need ranks that share a context"),
    _PIPELINE_PARALLEL: ("", (), _OF_RANKS),
    "--prefill-context-parallel-size": ("1", (), _OF_RANKS),
    "--data-parallel-size": (
        "1",
        ("idle-rank", "ubatch-max-seq-len", "compressor-skip"),
        "idle ranks and micro-batches come with more than one of these ranks",
    ),
    "--data-parallel-size-local": ("1", (), "as --data-parallel-size"),
    "--nnodes": ("1", (), _OF_RANKS),
    "--node-rank": ("0", (), "there is one node"),
    "--load-format": ("auto", (), "the twin's weights are safetensors"),
    "--config-format": ("auto", (), "the twin has a config.json"),
    "--tokenizer-mode": ("auto", (), "the twin's tokens are bytes; the same for every engine"),
    "--hf-config-path": ("", (), "the twin has a config.json"),
}
"""Flags with another value for a twin, the fixes whose defects that may hide, and why; "" is set for each twin."""
_MORE_LAYERS = 6
"""TurboQuant quantises no cache of the first and last two layers: more are needed where it is to show."""


@dataclass(frozen=True)
class FittedTwin:
    """A twin's folder, the flags for it, and how they differ from the model and its flags."""

    folder: Path
    flags: tuple[str, ...]
    changes: tuple[Change, ...]
    parameters: int
    adapters: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "parameters": self.parameters,
            "changes": [change._asdict() for change in self.changes],
        }

    def lines(self) -> list[str]:
        """Return a line for each change: what the comparison cannot see because of it."""
        return [f"twin of {self.parameters / 1e6:.0f} million random weights, in {self.folder}"] + [
            f"  {change.key} {change.before} -> {change.after}: "
            + (f"may hide {', '.join(change.hides)}: " if change.hides else "hides no defect: ")
            + change.why
            for change in self.changes
        ]


def fit(model: str, flags: Sequence[str], folder: Path) -> FittedTwin:
    """Make the twin of *model* in *folder*, and fit *flags* to it. Raises CompareError."""
    names = {f"{flag}=" for flag in (*_FITTED, "--tokenizer")} | {"--enable-lora"}
    parsed = line.parse(shlex.join(flags), names).flags
    if "--config" in parsed:
        raise CompareError("--twin has to know all flags: write those of --config on the command line")
    config = config_of(model, _value(parsed, "--revision"))
    if overrides := _value(parsed, _OVERRIDES):
        config |= _json(overrides, _OVERRIDES)
    ranks = ranks_of(parsed, _TENSOR_PARALLEL)
    fitted = max(count for count in range(1, _devices() + 1) if ranks % count == 0)
    stages = ranks_of(parsed, _PIPELINE_PARALLEL)
    fitted_stages = stages if fitted * stages <= _devices() else 1
    whole = "--enable-expert-parallel" in parsed
    more = _MORE_LAYERS if (_value(parsed, "--kv-cache-dtype") or "").startswith("turboquant") else 0
    more = max(more, fitted_stages - 2)  # a layer for each stage

    def plan(section: Section) -> Plan:
        return Plan(section, (ranks, fitted), whole, more)

    try:
        made = twin.make(config, folder / "model", plan)
        changes = list(made.changes)
        fitting = _fitted_flags(parsed, made.folder, fitted, fitted_stages, changes)
        if drafts := _value(parsed, _DRAFTS):
            fitting += _fitted_drafts(_json(drafts, _DRAFTS), model, made, folder / "draft", plan, changes)
        adapters = twin.make_adapters(made) if "--enable-lora" in parsed else ()
    except twin.TwinError as error:
        raise CompareError(f"no twin of {model}: {error}") from error
    if "vision_config" in config or "audio_config" in config:
        fitting += ["--limit-mm-per-prompt", json.dumps({"image": 0, "video": 0, "audio": 0})]
    return FittedTwin(made.folder, (*flags, *fitting), tuple(changes), made.parameters, tuple(map(str, adapters)))


def config_of(model: str, revision: str | None = None) -> Section:
    """Read the config.json of a folder, of a file, or of a model in the Hub's cache."""
    path = Path(model).expanduser()
    if path.is_dir():
        path /= "config.json"
    elif not path.is_file():
        cached = in_the_hub_cache(model, revision or "main", os.environ, first_bytes)
        if cached is None:
            raise CompareError(
                f"{model} is no folder, no config.json and not in this machine's cache of the Hugging Face Hub; fetch "
                f"its config.json alone (hf download {model} config.json), or name the file"
            )
        path = cached / "config.json"
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_LARGEST_CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise CompareError(f"{path} cannot be read as a config.json of at most 1 MiB: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("architectures"), list):
        raise CompareError(f"{path} is no config.json of a model: it has no list of architectures")
    return config


def _json(text: str, flag: str) -> Section:
    value = line.json_or(text, None)
    if not isinstance(value, dict):
        raise CompareError(f"{flag} is not a JSON object, so --twin cannot fit it")
    return value


def _value(parsed: dict[str, line.FlagValue], flag: str) -> str | None:
    if flag in parsed and parsed[flag].unsure:
        raise CompareError(f"--twin needs {parsed[flag].unsure}")
    return parsed[flag].value if flag in parsed else None


def ranks_of(parsed: dict[str, line.FlagValue], flag: str) -> int:
    text = _value(parsed, flag) or "1"
    if not text.isdecimal() or int(text) < 1:
        raise CompareError(f"{flag} {text} is no number of ranks")
    return int(text)


def _devices() -> int:
    import torch

    return torch.cuda.device_count() or 1


def _fitted_flags(
    parsed: dict[str, line.FlagValue], folder: Path, ranks: int, stages: int, changes: list[Change]
) -> list[str]:
    """Return flags that stand behind the user's, and so replace them."""
    fitting = ["--tokenizer", str(folder)]
    if _OVERRIDES in parsed:
        fitting += [_OVERRIDES, "{}"]
    new = {
        _TENSOR_PARALLEL: str(ranks),
        _PIPELINE_PARALLEL: str(stages),
        _CONTEXT_PARALLEL: str(math.gcd(ranks_of(parsed, _CONTEXT_PARALLEL), ranks)),
    }
    for flag, (fixed, hides, why) in _FITTED.items():
        before, value = _value(parsed, flag), fixed or new.get(flag, str(folder))
        if before is not None and before != value:
            fitting += [flag, value]
            changes.append(Change(flag, before, value, hides, why))
    return fitting


def _fitted_drafts(
    drafts: Section, model: str, target: twin.Twin, folder: Path, plan: Any, changes: list[Change]
) -> list[str]:
    """Return the flags for drafts by the target itself, or by a twin of the draft model in *folder*."""
    name, method = drafts.get("model"), str(drafts.get("method") or "")
    if name is None or method in ("ngram", "suffix"):
        return []
    if method == "eagle":
        heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
        keys = ("hidden_size", "intermediate_size", "vocab_size", *heads)
        sizes = {key: target.config[key] for key in keys if key in target.config}
        own = config_of(str(name), drafts.get("revision")) | sizes
        own["head_dim"] = target.config.get("head_dim") or own["hidden_size"] // own["num_attention_heads"]
        own |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
        models.save(own, model_shapes.eagle(own), folder)
    elif name == model or "mtp" in method:
        folder = target.folder
    elif method in ("", "draft_model"):
        own = config_of(str(name), drafts.get("revision"))
        changes += [each._replace(key=f"draft {each.key}") for each in twin.make(own, folder, plan).changes]
    else:
        raise twin.TwinError(
            f"the weights of a draft model for {method} are not known here; leave out {_DRAFTS}, or draft with ngram, "
            "mtp, eagle (of a Llama) or draft_model"
        )
    why = "random drafts are rarely accepted, in every engine alike"
    changes.append(Change(f"{_DRAFTS} model", name, str(folder), (), why))
    return [_DRAFTS, json.dumps(drafts | {"model": str(folder), "revision": None})]
