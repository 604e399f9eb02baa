"""The case `padding` of `image_encoder.py`: images that do not fill their graph.

An engine without graphs says what is right. One of stock and one with the fix `encoder-padding` capture their graphs
once for each of the memories that `image_encoder_engine.py` knows; what is wrong depends on what memory holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from measuring.encoder_case import (
    EAGER,
    NORMALISED_BY_THE_HOST,
    Answer,
    Case,
    Embeddings,
    Engine,
    Form,
    Image,
    Steps,
    distance,
)

MEMORIES = ("driver", "zeros", "pool", "output")
NAN = ("driver", "pool", "output")
"""Those that have it somewhere."""
TOLERANCE = 0.05
"""By the largest number of an image's embeddings; rounding takes no number further."""

_SIZES = ((56, 56), (84, 84), (56, 112), (112, 112))
"""Of 4, 9, 8 and 16 tokens; the third fills the smaller graph."""
_IMAGES = tuple(Image(*size, seed=number) for number, size in enumerate(_SIZES))
STEPS: Steps = {
    **{f"{image.name} alone": (image,) for image in _IMAGES},
    "together": _IMAGES,
}
FORMS = {memory: Form(memory, memory, (8, 32), 4) for memory in MEMORIES}
"""All at once are two batches: 21 tokens and 16, both in the larger graph."""


def engines(memories: Sequence[str]) -> Iterator[Engine]:
    forms = tuple(FORMS[memory] for memory in memories)
    yield Engine("eager", STEPS, {"enforce_eager": True})
    yield Engine("stock", STEPS, forms=forms)
    yield Engine("patched", STEPS, forms=forms, plugin=True)


def has_nan(memories: Sequence[str]) -> bool:
    return not {*NAN}.isdisjoint(memories)


def judge(engines: Mapping[str, Engine]) -> dict[str, Any]:
    """What is wrong in each memory, of stock and patched, measured by the eager engine's."""
    eager = engines["eager"].answers.get(EAGER, {})
    clean = engines["stock"].answers.get("zeros", {})
    findings: dict[str, Any] = {
        "far from the eager engine's": {
            f"{name} {form}": round(max(distances(steps, eager), default=math.inf), 4)
            for name, engine in engines.items()
            for form, steps in engine.answers.items()
            if name != "eager"
        },
    }
    for name in ("stock", "patched"):
        engine = engines[name]
        findings[name] = {form: errors(steps, eager, clean) for form, steps in engine.answers.items()}
        states = engine.found.get("state", {})
        if engine.plugin and states:
            findings["fixes"] = states[[*states][-1]].get("fixes", {})
    return findings


def distances(steps: Mapping[str, Answer], right: Mapping[str, Answer]) -> list[float]:
    """How far each image's embeddings are from the *right* ones."""
    return [
        distance(own, its)
        for step in steps
        if step in right
        for own, its in zip(steps[step].embeddings, right[step].embeddings, strict=True)
    ]


def errors(steps: Mapping[str, Answer], right: Mapping[str, Answer], clean: Mapping[str, Answer]) -> dict[str, Any]:
    """How many numbers of the embeddings are NaN or different, and how many answers are not the *right* ones.

    *clean* is a stock engine's whose graphs have nothing but zeros to write to: the same kernels as these steps have.
    """
    counted = dict.fromkeys(("numbers", "nan", "different", "unlike zeros", "answers", "different answers"), 0)
    wrong = []
    for step in (step for step in steps if step in right):
        for number, image in enumerate(STEPS.get(step, ())):
            own, its = steps[step].embeddings[number], right[step].embeddings[number]
            nan, different = nan_and_different(own, its)
            counted["numbers"] += len(its)
            counted["nan"] += nan
            counted["different"] += different
            if step in clean:
                counted["unlike zeros"] += unequal(own, clean[step].embeddings[number])
            counted["answers"] += 1
            counted["different answers"] += steps[step].answers[number] != right[step].answers[number]
            if nan or different:
                wrong.append(image.name if len(STEPS[step]) == 1 else f"{image.name} {step}")
    calls = [answer.counted for answer in steps.values()]
    in_graphs = {name: sum(each.get(name, 0) for each in calls) for name in ("in graphs", "in none")}
    return {**counted, "wrong images": wrong, **in_graphs, "steps compared": len({*steps} & {*right})}


def nan_and_different(found: Embeddings, right: Embeddings) -> tuple[int, int]:
    """How many numbers are NaN, and how many others are further from the right ones than rounding takes them."""
    if len(found) != len(right):
        return 0, len(right)
    allowed = TOLERANCE * max(map(abs, right), default=0.0)
    nan = sum(map(math.isnan, found))
    return nan, sum(abs(one - other) > allowed for one, other in zip(found, right, strict=True))


def unequal(found: Embeddings, other: Embeddings) -> int:
    """How many numbers are not the very same; NaN is none."""
    return sum(one != another for one, another in zip(found, other, strict=True))


def is_unexpected(findings: Mapping[str, Any]) -> bool:
    """Whether the fix leaves something wrong, or stock is not as its release lets expect."""
    wrong = {
        name: {form: bool(each["nan"] or each["different"]) for form, each in findings.get(name, {}).items()}
        for name in ("stock", "patched")
    }
    if any(wrong["patched"].values()) or not all(wrong.values()) or wrong["stock"].get("zeros", False):
        return True
    return findings["expected"] is not None and any(wrong["stock"].values()) != findings["expected"]


CASE = Case(
    fix="encoder-padding",
    engines=engines,
    judge=judge,
    is_wrong=is_unexpected,
    where_known=NORMALISED_BY_THE_HOST,
    shows_on_stock=has_nan,
)
