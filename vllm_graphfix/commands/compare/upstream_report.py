"""Bug report for vLLM, in Markdown, from the output of `compare --json`: poison, wrong replays, and wrong answers."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from vllm_graphfix.commands.compare import CompareError
from vllm_graphfix.commands.compare.report import SCHEMA
from vllm_graphfix.commands.redaction import Mask
from vllm_graphfix.deployment.hardware import first_bytes
from vllm_graphfix.verify.engine.poison_report import LISTED_PROMPTS, gap_text, listed_prompts, place_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

_LARGEST = 16 * 1024 * 1024
"""Bytes of a file; one of a thousand prompts has some hundred thousand."""
_HEAD = """# {title}

vLLM {vllm}, torch {torch}, {device}, driver {driver}, flags `{flags}`, vllm-graphfix {graphfix} (`{switches}`), a
model whose name is left out here. {text}
"""
_POISON = (
    "Memory that belongs to no request reaches an answer",
    """Padded rows, the null block,
blocks that no request holds and freed memory were filled before each step with values that show: NaN, and ids and
lengths inside of the cache. The same engine answered the same prompts twice without that, {noise}.""",
)
_EXACT = (
    "Replays of CUDA graphs differ from the same steps without them",
    """Each step that replays
full graphs, pieces or breakable graphs was compared with the same step, padded as it was, from the same state and
without graphs.""",
)
_CORRUPT = (
    "Answers with CUDA graphs differ from those without",
    """The same prompts, greedy, with
`--enforce-eager` and with CUDA graphs. Answers that diverge where two tokens are equally likely count as rounding.""",
)


def of_comparison(file: Path) -> str | None:
    """Return the report, or None if the comparison detected nothing.

    The model's name and secrets are masked, in flags and errors too, as in a report of records.

    Raises CompareError if *file* cannot be read or is not the output of `compare --json`.
    """
    written = first_bytes(file, _LARGEST + 1)
    if written is None:
        raise CompareError(f"cannot read {file}: name a regular file that this user can read")
    if len(written) > _LARGEST:
        raise CompareError(f"{file} is larger than {_LARGEST} bytes: compare fewer prompts")
    try:
        report = json.loads(written)
        if report["schema"] != SCHEMA:
            raise CompareError(
                f"{file} has schema {report['schema']!r}, and not {SCHEMA}: another release has written it"
            )
        mask = Mask(os.environ, (), _names_of_model(report["model"], report["flags"]))
        return "\n".join(map(mask.whole_text, "\n".join(_parts(report)).split("\n"))) or None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CompareError(f"{file} is not what `vllm-graphfix compare MODEL --json` prints") from error


def _names_of_model(model: str, flags: Iterable[str]) -> Iterator[str]:
    """Yield *model*, the last part of its path, and the names under which *flags* serve it."""
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


def _parts(report: Mapping[str, Any]) -> Iterator[str]:
    if report["poison"] is not None and report["poison"]["found"]:
        yield _written(report, _POISON, {"noise": _apart(report["poison"])}, _of_poison(report["poison"]))
    exact = report.get("exact")  # a file that an earlier version has written has none
    if exact is not None and exact["wrong"]:
        yield _written(report, _EXACT, {}, _of_replays(exact))
    if report["corrupt"]:
        yield _written(report, _CORRUPT, {}, _of_answers(report))


def _apart(poison: Mapping[str, Any]) -> str:
    """Return the difference of the two passes without poison, in words."""
    if poison["noise"] is None:
        return "and crashed before its answers could be compared" if poison["error"] else "with other tokens"
    if not poison["noise"]:
        return "and its answers were equal to the last bit"
    return f"and they differ by up to {poison['noise']:.3g}"


def _of_poison(poison: Mapping[str, Any]) -> Iterator[str]:
    if poison["error"] is not None:
        yield f"- with poison the engine ends: `{poison['error']}`"
    for each in poison["passes"]:
        if not each["shows"]:
            continue
        yield f"\n## {place_of(each['inputs'] or each['kinds'], finite=each['finite'])}\n"
        if each["prompts"]:
            yield f"- answers of prompts {listed_prompts(each['prompts'])} differ: {gap_text(each['distance'])}"
        for rank, result in enumerate(each["ranks"]):
            yield from (f"- rank {rank}, step {step}: {what}" for step, what, _ in result["findings"])
            yield from (f"- rank {rank}: {note}" for note in result["notes"])
            amounts = ", ".join(f"{kind} {number}" for kind, number in result["most"].items())
            yield f"- rank {rank}: {result['steps']} steps poisoned, at most {amounts}"


def _of_replays(exact: Mapping[str, Any]) -> Iterator[str]:
    for number, rank in enumerate(exact["ranks"]):
        if rank["wrong"]:
            yield f"- rank {number}: {rank['wrong']} of {rank['compared']} replays are wrong"
            yield from (f"- rank {number}: {finding}" for finding in rank["findings"])


def _of_answers(report: Mapping[str, Any]) -> Iterator[str]:
    prompts, drafts = report["prompts"], report["drafts"]
    if report["error"] is not None:
        yield f"- with graphs the engine ends: `{report['error']}`"
    if drafts["lost"]:
        shares = (f"{accepted} of {proposed}" for accepted, proposed in (drafts["graphs"], drafts["eager"]))
        yield "- drafts that were accepted: {} with graphs, {} without".format(*shares)
    wrong = [each for each in prompts if each["kind"] == "corrupt"]
    if wrong:
        named = listed_prompts([each["prompt"] for each in wrong])
        yield f"- {len(wrong)} of {len(prompts)} prompts have wrong answers: {named}"
        yield f"- log-probabilities up to {_number(report['tolerance'])} apart count as rounding"
    for each in wrong[:LISTED_PROMPTS]:
        tokens = f"token {each['expected']} without graphs, {each['found']} with them"
        yield f"- prompt {each['prompt']}, from position {each['position']} on: {tokens}, {_number(each['gap'])} apart"


def _number(number: float | None) -> str:
    return "infinitely far" if number is None else f"{number:.3g}"


def _written(
    report: Mapping[str, Any], about: tuple[str, str], numbers: Mapping[str, Any], lines: Iterator[str]
) -> str:
    title, text = about
    facts = {name: report[name] for name in ("vllm", "torch", "device", "driver", "graphfix", "switches")}
    head = _HEAD.format(**facts, title=title, flags=" ".join(report["flags"]) or "none", text=text.format(**numbers))
    states = {fix: state for rank in (report["fixes"] or {}).values() for fix, state in rank.items()}
    fixes = ", ".join(f"`{fix}` {state}" for fix, state in states.items()) or "not known"
    return f"{head}\n" + "\n".join(lines).lstrip("\n") + f"\n\nFixes of vllm-graphfix in this engine: {fixes}.\n"
