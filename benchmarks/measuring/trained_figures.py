"""Figures of the answers of `benchmarks/trained.py`, and its tables for a page."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from measuring.trained_cases import EXACT, SCORED, Trained
from measuring.trained_questions import Question
from vllm_graphfix.verify.comparison import Answer, Kind, compare, noise_between
from vllm_graphfix.verify.engine.case import MODES
from vllm_graphfix.verify.engine.processes import JobResult

_LONGEST = 400
"""Characters of a text in a table."""

_LOST = 0.05
"""The share by which acceptance may fall below eager's, which includes a second pass in other batches."""

Text = Callable[[tuple[int, ...]], str]

_LARGEST_EXPONENT = math.log(sys.float_info.max)


def figures(
    trained: Trained, questions: Sequence[Question], ended: Mapping[str, JobResult], text: Text
) -> dict[str, Any]:
    """Return the figures of the engines of one case, by mode, and their answers side by side."""
    eager = ended["eager"].result
    return {
        "modes": {mode: _mode(trained, questions, end, ended["eager"], text) for mode, end in ended.items()},
        "answers": [
            {
                "prompt": question.prompt,
                "right": question.right,
                "tokens": len(question.ids),
                **{mode: text(_generated(question, end, number)) for mode, end in ended.items() if end.result},
            }
            for number, question in enumerate(questions)
        ]
        if eager is not None
        else [],
    }


def _mode(
    trained: Trained, questions: Sequence[Question], end: JobResult, eager: JobResult, text: Text
) -> dict[str, Any]:
    figures: dict[str, Any] = {"error": end.error, "seconds": round(end.seconds, 1)}
    if end.result is None:
        return figures
    figures |= {
        "state": " and ".join(sorted({states.get(trained.fix, "unknown") for states in end.result.states.values()})),
        "graphs": end.result.cudagraph_mode,
        "drafts": end.result.drafts,
        "acceptance": _acceptance(end),
        "facts": {name: end.result.facts.get(name) for name in ("vllm", "torch", "device", "driver")},
    }
    answers = end.result.passes[0]
    if trained.kind == EXACT:
        texts = [text(_generated(question, end, number)) for number, question in enumerate(questions)]
        rights = [question.right or "" for question in questions]
        same = [sum(map(str.__eq__, one, right)) for one, right in zip(texts, rights, strict=True)]
        figures["right"] = [sum(map(str.__eq__, texts, rights)), len(questions)]
        figures["characters"] = [sum(same), sum(map(len, rights))]
    if trained.kind == SCORED:
        figures["perplexity"] = _perplexity(questions, answers)
    if eager.result is not None and end is not eager:
        noise = noise_between(*eager.result.passes) if len(eager.result.passes) > 1 else 0.0
        comparison = compare(eager.result.passes[0], answers, noise)
        figures |= {
            "sound": [len(questions) - len(comparison.of(Kind.CORRUPT)), len(questions)],
            "agreed": [comparison.tokens_before_corruption, comparison.tokens],
            "compared": comparison.tokens_compared,
            "distance": comparison.distance if math.isfinite(comparison.distance) else None,
            "noise": noise,
            "corrupt": [number for number, one in enumerate(comparison.judgements) if one.kind is Kind.CORRUPT],
            "ties": len(comparison.of(Kind.TIE)),
        }
    return figures


def _acceptance(end: JobResult) -> float | None:
    """Return the share of draft tokens that were accepted; None without drafts."""
    if end.result is None or end.result.drafts is None:
        return None
    accepted, proposed = end.result.drafts
    return round(accepted / proposed, 3)


def _generated(question: Question, end: JobResult, number: int) -> tuple[int, ...]:
    """Return the tokens of the answer, without those of a scored prompt."""
    assert end.result is not None  # noqa: S101 - callers pass engines with a result
    return end.result.passes[0][number].tokens[-question.tokens :]


def _perplexity(questions: Sequence[Question], answers: Sequence[Answer]) -> float | None:
    """Return the perplexity of the prompts; None if it is NaN or exceeds a float, as with corrupt log-probabilities."""
    losses = [
        -answer.top[position][token]
        for question, answer in zip(questions, answers, strict=True)
        # The first token of a prompt has no log-probability.
        for position, token in enumerate(answer.tokens[: len(question.ids) - 1])
        if position + 1 >= question.unscored
    ]
    mean = sum(losses) / len(losses)
    return round(math.exp(mean), 2) if math.isfinite(mean) and mean < _LARGEST_EXPONENT else None


def pair(run: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the texts of the first prompt whose answer on stock is corrupt and differs from eager's."""
    corrupt = run["modes"]["stock"].get("corrupt", [])
    answers = [run["answers"][number] for number in corrupt]
    return next((answer for answer in answers if answer["eager"] != answer["stock"]), None)


def is_good(run: Mapping[str, Any]) -> bool:
    """Return whether the patched engine answered without corruption, with its fix active, and drafted as eager does.

    On a release without the defect no fix is active.
    """
    patched, eager = run["modes"]["patched"], run["modes"]["eager"]
    if patched["error"] is not None or patched.get("corrupt"):
        return False
    if run.get("affected", True) and patched["state"] != "active":
        return False
    lost = (eager.get("acceptance") or 0.0) - (patched.get("acceptance") or 0.0)
    return lost <= _LOST


def markdown(result: Mapping[str, Any]) -> str:
    """The tables for a page: what each engine came to, and one pair of texts for each model."""
    lines = ["| fix | vLLM | engine | what is counted | eager | stock | patched |", "|---|---|---|---|---|---|---|"]
    for run in result["runs"]:
        begin = f"| `{run['fix']}` | {run['release']} | {run['title']} |"
        if run["not_run"]:
            lines.append(f"{begin} not run: {run['not_run']} | | | |")
            continue
        lines += [
            f"{begin} {what} | {' | '.join(_value(run['modes'][mode], key) for mode in MODES)} |"
            for what, key in _COUNTED
            if any(run["modes"][mode].get(key) is not None for mode in MODES)
        ]
        if all(run["modes"][mode]["error"] for mode in MODES):
            lines.append(f"{begin} | {' | '.join(_value(run['modes'][mode], '') for mode in MODES)} |")
    lines += ["", *_of_models(result)]
    for run in result["runs"]:
        if not run["not_run"] and (texts := pair(run)):
            lines += ["", f"{run['case']} on {run['release']}, the first prompt whose answer on stock is corrupt:", ""]
            lines += ["| | |", "|---|---|", f"| prompt | {_cell(texts['prompt'])} |"]
            lines += [f"| right | {_cell(texts['right'])} |"] if texts["right"] else []
            lines += [f"| {mode} | {_cell(texts.get(mode, 'no answer'))} |" for mode in MODES]
    return "\n".join(lines)


_COUNTED = (
    ("answers right", "right"),
    ("characters right", "characters"),
    ("perplexity of the prompts", "perplexity"),
    ("answers without corruption", "sound"),
    ("tokens before corruption", "agreed"),
    ("draft tokens accepted", "drafts"),
    ("share of them", "acceptance"),
)


def _value(mode: Mapping[str, Any], key: str) -> str:
    if mode["error"]:
        return _cell(mode["error"])
    value = mode.get(key)
    if value is None:
        return ""
    return f"{value[0]} of {value[1]}" if isinstance(value, (list, tuple)) else f"{value:g}"


def _of_models(result: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: {model['parameters']:,} parameters, {model['steps']:,} steps in {model['seconds']:.0f} s on "
        f"{model['device']}; answers right, given the right characters before: "
        + ", ".join(f"{share:.1%} ({task})" for task, share in model["right"].items())
        + "".join(f"; draft token {number}: {share:.1%}" for number, share in model.get("drafts", {}).items())
        for name, model in result["models"].items()
        if "steps" in model
    ]


def _cell(text: str) -> str:
    """Return *text* in one line, and cut if it is long."""
    short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
    return " ".join(short.split("\n")).replace("|", "\\|")
