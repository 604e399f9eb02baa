"""A bug report for vLLM, in Markdown, from what `compare --json` has written: what poison showed, and wrong answers."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from vllm_graphfix.commands.compare import CompareError
from vllm_graphfix.commands.compare.report import SCHEMA
from vllm_graphfix.commands.doctor.redaction import Mask

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

_HEAD = """# {title}

vLLM {vllm}, torch {torch}, {device}, driver {driver}, flags `{flags}`, vllm-graphfix {graphfix} (`{switches}`), a
model whose name is left out here. {text}
"""
_POISON = (
    "What must not matter to an answer reaches one",
    """Padded rows, the null block,
blocks that no request holds and freed memory were filled before each step with what would be seen: NaN, and ids and
lengths inside of the cache. The same engine answered the same prompts twice without that, {noise}.""",
)
_CORRUPT = (
    "Answers with CUDA graphs are others than without",
    """The same prompts, greedy, with
`--enforce-eager` and with CUDA graphs. Answers that go apart where two tokens are as likely count as rounding.""",
)
_SHOWN = 12
"""Prompts that are named."""


def of_comparison(file: Path) -> str | None:
    """The report; None if the comparison has found nothing.

    As in a report of records, the model's name and secrets are masked, in flags and errors, too.

    Raises CompareError if *file* cannot be read or is not what `compare --json` writes.
    """
    try:
        told = json.loads(file.read_text())
        if told["schema"] != SCHEMA:
            raise CompareError(
                f"{file} has schema {told['schema']!r}, and not {SCHEMA}: another release has written it"
            )
        mask = Mask(os.environ, (), _names_of_model(told["model"], told["flags"]))
        return "\n".join(map(mask.whole_text, "\n".join(_parts(told)).split("\n"))) or None
    except OSError as error:
        raise CompareError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CompareError(f"{file} is not what `vllm-graphfix compare MODEL --json` prints") from error


def _names_of_model(model: str, flags: Iterable[str]) -> Iterator[str]:
    """Yield *model* as it was named, the last part of that, and the names that *flags* serve it under."""
    yield model
    yield model.rstrip("/").rpartition("/")[2]
    of_names = False
    for flag in flags:
        if flag.startswith("-"):
            name, _, value = flag.partition("=")
            of_names = name.replace("_", "-") == "--served-model-name"
            if of_names and value:
                yield value
        elif of_names:
            yield flag


def _parts(told: Mapping[str, Any]) -> Iterator[str]:
    if told["poison"] is not None and told["poison"]["found"]:
        yield _written(told, _POISON, {"noise": _apart(told["poison"])}, _of_poison(told["poison"]))
    if told["corrupt"]:
        yield _written(told, _CORRUPT, {}, _of_answers(told))


def _apart(poison: Mapping[str, Any]) -> str:
    """What is known of its two passes without poison."""
    if poison["noise"] is None:
        return "and has not come to tell whether its answers were equal" if poison["error"] else "with other tokens"
    if not poison["noise"]:
        return "and its answers were equal to the last bit"
    return f"and they differ by up to {poison['noise']:.3g}"


def _of_poison(poison: Mapping[str, Any]) -> Iterator[str]:
    if poison["error"] is not None:
        yield f"- with poison the engine ends: `{poison['error']}`"
    for each in poison["passes"]:
        if not each["shows"]:
            continue
        filled = ", ".join(each["inputs"] or each["kinds"])
        yield f"\n## {filled}{' (large numbers, no NaN)' if each['finite'] else ''}\n"
        if each["prompts"]:
            gap = each["distance"]
            how = "another token, or NaN" if gap is None else f"log-probabilities by up to {gap:.3g}"
            yield f"- answers of prompts {_named(each['prompts'])} differ: {how}"
        for rank, found in enumerate(each["ranks"]):
            yield from (f"- rank {rank}, step {step}: {what}" for step, what, _ in found["findings"])
            yield from (f"- rank {rank}: {note}" for note in found["notes"])
            amounts = ", ".join(f"{kind} {number}" for kind, number in found["most"].items())
            yield f"- rank {rank}: {found['steps']} steps poisoned, at most {amounts}"


def _of_answers(told: Mapping[str, Any]) -> Iterator[str]:
    prompts, drafts = told["prompts"], told["drafts"]
    if told["error"] is not None:
        yield f"- with graphs the engine ends: `{told['error']}`"
    if drafts["lost"]:
        shares = (f"{accepted} of {proposed}" for accepted, proposed in (drafts["graphs"], drafts["eager"]))
        yield "- drafts that were accepted: {} with graphs, {} without".format(*shares)
    wrong = [each for each in prompts if each["kind"] == "corrupt"]
    if wrong:
        named = _named([each["prompt"] for each in wrong])
        yield f"- {len(wrong)} of {len(prompts)} prompts have wrong answers: {named}"
        yield f"- log-probabilities up to {_number(told['tolerance'])} apart count as rounding"
    for each in wrong[:_SHOWN]:
        tokens = f"token {each['expected']} without graphs, {each['found']} with them"
        yield f"- prompt {each['prompt']}, from position {each['position']} on: {tokens}, {_number(each['gap'])} apart"


def _number(number: float | None) -> str:
    return "infinitely far" if number is None else f"{number:.3g}"


def _named(prompts: list[int]) -> str:
    return ", ".join(map(str, prompts[:_SHOWN])) + (" …" if len(prompts) > _SHOWN else "")


def _written(told: Mapping[str, Any], about: tuple[str, str], numbers: Mapping[str, Any], found: Iterator[str]) -> str:
    title, text = about
    facts = {name: told[name] for name in ("vllm", "torch", "device", "driver", "graphfix", "switches")}
    head = _HEAD.format(**facts, title=title, flags=" ".join(told["flags"]) or "none", text=text.format(**numbers))
    states = {fix: state for rank in (told["fixes"] or {}).values() for fix, state in rank.items()}
    fixes = ", ".join(f"`{fix}` {state}" for fix, state in states.items()) or "not known"
    return f"{head}\n" + "\n".join(found).lstrip("\n") + f"\n\nFixes of vllm-graphfix in this engine: {fixes}.\n"
