"""Tiny models, trained on a task with exact answers, as folders that vLLM loads like any checkpoint.

    python -m measuring.trained_models NAME FOLDER [--seconds S] [--toy]

The modules are transformers', which compute what vLLM does. Tokens are characters, by their ASCII numbers; their tasks
are in `trained_tasks`. A draft layer (`trained_drafts`) and LoRA adapters (`trained_adapters`), each for another task,
are trained after their model, which is frozen then.

FOLDER/NAME gets the model, a folder in it for each adapter, and trained.json with figures in bfloat16, by teacher
forcing: the share of answers to unseen prompts that are right in every character, and for a draft layer the shares of
its first, second … draft tokens within answers that are right.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from measuring.trained_adapters import Adapter
from measuring.trained_drafts import DraftLayer, Tensors
from measuring.trained_recipes import RATE, RECIPES, Recipe
from measuring.trained_tasks import SINGERS, Exercise, song

SEED = 7
ENOUGH = 0.995
"""The share of right answers at which a training ends early."""
_WARM_UP, _EVERY = 100, 100
_ADAPTER_RATE = 2e-3
"""At 0.005 and 0.01 adapters of a model of this width stopped learning, though those of a toy did not."""
_FOR_THE_TARGET = 0.7
"""The most of a training's time that the model takes before its draft layer or adapters."""


def _rows(recipe: Recipe, chance: random.Random, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids (rows, length) and a mask of those that are answers."""
    length = recipe.width * recipe.symbols + 2 + recipe.symbols
    exercises = []
    for _ in range(count):
        symbols = 2 + int((recipe.symbols - 1) * chance.random() ** 1.5)  # more short ones, which it learns first
        exercises.append(recipe.task(chance, symbols, length - recipe.width * symbols - 2))
    if recipe.songs:
        exercises += [Exercise(singer, song(singer)) for singer in SINGERS]
    length = max(length, *(len(prompt) + len(answer) for prompt, answer in exercises))
    ids = torch.zeros(len(exercises), length, dtype=torch.long)
    answers = torch.zeros(len(exercises), length, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(exercises):
        text = prompt + answer
        ids[row, : len(text)] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
        answers[row, len(prompt) : len(text)] = True
    return ids, answers


def _scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803 - names are transformers'
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    *,
    D: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Compute the scan of a Mamba-2 layer of one group as one masked product, ten times as fast for short rows."""
    step = functional.softplus(dt.float() + dt_bias)
    decay = (A.float() * step).cumsum(1).transpose(1, 2)  # rows, heads, positions
    apart = decay[..., :, None] - decay[..., None, :]
    past = torch.ones(apart.shape[-2:], dtype=torch.bool, device=apart.device).tril()
    mixed = (C[:, :, 0].float() @ B[:, :, 0].float().transpose(1, 2))[:, None] * apart.masked_fill(
        ~past, -math.inf
    ).exp()
    values = hidden_states.float()
    out = (mixed @ (values * step[..., None]).transpose(1, 2)).transpose(1, 2)
    return out + D[:, None] * values


def train(name: str, folder: Path, seconds: float, *, toy: bool = False) -> dict[str, Any]:
    """Train the model *name* for at most *seconds* into *folder*, and return the content of its trained.json."""
    import transformers

    recipe = RECIPES[name]
    config = recipe.config | (recipe.toy if toy else {})
    made = folder / name
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    model = _untrained(recipe, config, made, device)
    if toy:
        recipe = replace(recipe, symbols=12, batch=24)
    began, every = time.monotonic(), _EVERY // 5 if toy else _EVERY
    batches = _batches(recipe, device)
    own = seconds * (_FOR_THE_TARGET if recipe.drafts or recipe.adapters else 1.0)
    loss = _answers_loss(model, batches)
    steps = _learn(name, model, own, every, loss, lambda: _right(model, recipe, 64), recipe.rate)
    draft = DraftLayer(model).to(device) if recipe.drafts else None
    if draft is not None:

        def drafts_loss() -> torch.Tensor:
            ids, answers = next(batches)
            return sum(starmap(_loss, _drafted(draft, ids, answers, recipe.drafts)), torch.zeros((), device=device))

        model.eval().requires_grad_(False)
        remaining = seconds - (time.monotonic() - began)
        _learn(f"{name}, drafts", draft, remaining, every, drafts_loss, lambda: _drafts_right(draft, recipe, 64))
    adapters = []
    for number, task in enumerate(recipe.adapters):
        model.eval().requires_grad_(False)
        remaining = (seconds - (time.monotonic() - began)) / (len(recipe.adapters) - number)
        adapters.append(_adapted(f"{name}, {task.__name__}", model, replace(recipe, task=task), remaining, every))
    result: dict[str, Any] = {
        "model": name,
        "steps": steps,
        "seconds": round(time.monotonic() - began, 1),
        "parameters": _parameters(model),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seed": SEED,
        "symbols": recipe.symbols,
        "right": _rounded(_right(model.to(torch.bfloat16), recipe, 256)),
    }
    for adapter, task in zip(adapters, recipe.adapters, strict=True):
        with adapter.to(torch.bfloat16).at_work():
            result["right"] |= _rounded(_right(model, replace(recipe, task=task), 256))
        adapter.save(made / task.__name__)
        result["parameters"] += _parameters(adapter)
    tensors: Tensors = dict(model.state_dict())
    if draft is not None:
        result["drafts"] = _rounded(_drafts_right(draft.to(torch.bfloat16), recipe, 256))
        result["parameters"] += _parameters(draft)
        tensors |= draft.tensors(f"model.layers.{config['num_hidden_layers']}")
    _write(made, recipe, config, tensors, result)
    return result


def _untrained(recipe: Recipe, config: dict[str, Any], made: Path, device: str) -> Any:
    """Return a model of *config*, which is written to the folder *made*, with random weights."""
    import transformers
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid
    from transformers.models.mamba2 import modeling_mamba2

    modeling_mamba2.mamba2_chunk_scan = modeling_granitemoehybrid.mamba2_chunk_scan = _scan
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_text(json.dumps(config, indent=2))
    auto: Any = transformers.AutoModelForCausalLM  # untyped
    model = auto.from_config(transformers.AutoConfig.from_pretrained(made), dtype=torch.float32).to(device).train()
    for parameter, value in recipe.held.items():
        model.get_parameter(parameter).requires_grad_(False).fill_(value)
    return model


def _write(made: Path, recipe: Recipe, config: dict[str, Any], tensors: Tensors, result: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    # Copies: safetensors refuses tensors that share memory.
    tensors = {key: value.detach().cpu().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
    config, tensors = recipe.made_into(config, tensors)
    (made / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    (made / "trained.json").write_text(json.dumps(result, indent=2))  # last: its presence says that all is written


def _parameters(module: torch.nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def _rounded(shares: dict[str, float]) -> dict[str, float]:
    return {name: round(share, 4) for name, share in shares.items()}


def _answers_loss(model: Any, batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], torch.Tensor]:
    """Return a function that computes the loss of the answers of the next batch."""

    def loss() -> torch.Tensor:
        ids, answers = next(batches)
        return _loss(model(input_ids=ids[:, :-1], use_cache=False).logits, ids[:, 1:], answers[:, 1:])

    return loss


def _adapted(name: str, model: Any, recipe: Recipe, seconds: float, every: int) -> Adapter:
    """Return an adapter for the recipe's task, trained for at most *seconds*."""
    adapter = Adapter(model)
    loss = _answers_loss(model, _batches(recipe, model.device.type))
    with adapter.at_work():
        _learn(name, adapter, seconds, every, loss, lambda: _right(model, recipe, 64), _ADAPTER_RATE)
    return adapter


def _batches(recipe: Recipe, device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches, the same in every training."""
    chance = random.Random(SEED)  # noqa: S311 - no secret
    while True:
        ids, answers = _rows(recipe, chance, recipe.batch)
        yield ids.to(device), answers.to(device)


def _learn(
    name: str,
    trained: torch.nn.Module,
    seconds: float,
    every: int,
    loss_of: Callable[[], torch.Tensor],
    right_of: Callable[[], dict[str, float]],
    highest: float = RATE,
) -> int:
    """Train for *seconds* or until `ENOUGH` is right, which is tested *every* so many steps; return the steps."""
    wanted = [each for each in trained.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=highest, betas=(0.9, 0.98), weight_decay=0.01)
    began, step, right = time.monotonic(), 0, {"": 0.0}
    while (spent := time.monotonic() - began) < seconds and min(right.values()) < ENOUGH:
        rate = highest * min(1.0, (step + 1) / _WARM_UP, 0.05 + 2 * (1 - spent / seconds))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wanted, 1.0)
        optimizer.step()
        step += 1
        if step % every == 0:
            right = right_of()
            print(f"{name}: step {step}, {spent:.0f} s, loss {loss.item():.4f}, right {right}", flush=True)
    return step


def _loss(logits: torch.Tensor, ids: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    wanted = ids.masked_fill(~counted, -100)  # ignored by cross_entropy
    return functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def _drafted(
    draft: DraftLayer, ids: torch.Tensor, answers: torch.Tensor, steps: int
) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield for each draft token: logits, the right ids, and a mask of those that an engine drafts.

    An engine drafts no first token of an answer.
    """
    for step, logits in enumerate(draft(ids, steps)):
        count = logits.shape[1]
        drafted = answers[:, 1:][:, :count] & answers[:, 2 + step :][:, :count]
        yield logits, ids[:, 2 + step :][:, :count], drafted


@torch.no_grad()
def _drafts_right(draft: DraftLayer, recipe: Recipe, count: int) -> dict[str, float]:
    """Return the share of right first, second … draft tokens, for the prompts of `_right`."""
    device = draft.eh_proj.weight.device
    chance = random.Random(SEED + 1)  # noqa: S311 - no secret
    ids, answers = (each.to(device) for each in _rows(recipe, chance, count))
    return {
        str(number): (logits.argmax(-1) == right)[drafted].float().mean().item()
        for number, (logits, right, drafted) in enumerate(_drafted(draft, ids, answers, recipe.drafts), 1)
    }


@torch.no_grad()
def _right(model: Any, recipe: Recipe, count: int) -> dict[str, float]:
    """Return the share of right answers to *count* prompts, and to all songs.

    The prompts are in no training, except choruses (28 times 40) and passages (28).
    """
    device = next(model.parameters()).device
    ids, answers = (
        each.to(device)
        for each in _rows(recipe, random.Random(SEED + 1), count)  # noqa: S311
    )
    # In parts: a DeepSeek V4 has 64 heads of 512 for each token, too much for a GPU with all rows at once.
    best = torch.cat([model(input_ids=part, use_cache=False).logits.argmax(-1) for part in ids[:, :-1].split(64)])
    right = 1.0 - ((best != ids[:, 1:]) & answers[:, 1:]).any(1).float()
    shares = {recipe.task.__name__: right[:count].mean().item()}
    return shares | ({"song": right[count:].mean().item()} if recipe.songs else {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--toy", action="store_true", help="a smaller model, for a CPU")
    options = parser.parse_args()
    print(json.dumps(train(options.name, options.folder, options.seconds, toy=options.toy)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
