"""The case `adapters` of `image_encoder.py`: images at once, each with an adapter of the encoder or none.

An engine without graphs of the encoder says what each image's embeddings are with each of the adapters. One of stock
and one with the fix `encoder-adapters` encode several images in a step, in graphs of three forms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from measuring import tiny_qwen2_vl
from measuring.encoder_case import (
    DECODES,
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
from vllm_graphfix.verify.engine import adapters

NEAR = 0.1
"""The distance that rounding in bfloat16 may take embeddings; adapters take them further than this many times over."""

_ARGUMENTS: dict[str, Any] = {
    "enable_lora": True,
    "enable_tower_connector_lora": True,
    "max_loras": len(adapters.NAMES),
    "max_lora_rank": adapters.RANK,
}
_MODULES = ("fc1", "fc2")
"""The layers of the encoder that adapters change."""
_WEIGHTS = tuple(f".{module}.weight" for module in _MODULES)
_STRENGTH = 5.0
"""How many times as large as the layers' own matrices what adapters add to them is. What these layers add to the sum of
all before is small here."""

ONE, TWO = adapters.NAMES
_LARGE, _SMALL, _MIDDLE = (112, 112), (56, 56), (56, 112)
STEPS: Steps = {
    "the largest first": (Image(*_LARGE, 11, ONE), Image(*_SMALL, 12, TWO), Image(*_MIDDLE, 13)),
    "the smallest first": (Image(*_SMALL, 21), Image(*_LARGE, 22, TWO), Image(*_MIDDLE, 23, ONE)),
}
FORMS = (
    Form("one image a replay", "plain", (64,), 1),
    Form("all images in one replay", "plain", (64,), 4),
    # A replay then has fewer rows than the step, whose adapters its kernels look up: it may write beyond them. Last.
    Form("graphs as large as each image", "plain", (4, 8, 16), 1),
)
# After a step without any adapter, a graph would be captured without their kernels, which it is not when an engine
# starts.
_BEFORE_CAPTURES = (Image(*_SMALL, 1, ONE),)

References = Mapping[int, Mapping[str | None, Embeddings]]
"""By an image's seed, its embeddings with each adapter and, by None, with none."""


def write(folder: Path) -> None:
    """Makes the adapters, for the model that is in *folder*."""
    import torch
    from safetensors import safe_open

    with safe_open(folder / tiny_qwen2_vl.NAME / "model.safetensors", framework="pt") as held:
        names = [name.removesuffix(".weight") for name in held.keys() if name.endswith(_WEIGHTS)]  # noqa: SIM118
        shapes = {name: held.get_slice(f"{name}.weight").get_shape() for name in names}
    for number, adapter in enumerate(adapters.NAMES):
        chance = torch.Generator().manual_seed(number)
        matrices = {
            name: (
                torch.randn((adapters.RANK, inner), generator=chance) * inner**-0.5,
                torch.randn((outer, adapters.RANK), generator=chance) * adapters.RANK**-0.5 * _STRENGTH,
            )
            for name, (outer, inner) in sorted(shapes.items())
        }
        adapters.write(matrices, folder / adapter, _MODULES)


def engines(_: Sequence[str]) -> Iterator[Engine]:
    every = [image for images in STEPS.values() for image in images]
    each_alone = {f"{image.name} alone": (image,) for image in with_each_adapter(every)}
    own_alone = {f"{image.name} alone": (image,) for image in every}
    in_graphs = {**STEPS, **{name: step for name, step in each_alone.items() if name in own_alone}}
    yield Engine("none", {**STEPS, **each_alone}, {**_ARGUMENTS, "compilation_config": dict(DECODES)})
    yield Engine("graphs", in_graphs, _ARGUMENTS, FORMS, before_captures=_BEFORE_CAPTURES)
    yield Engine("patched", in_graphs, _ARGUMENTS, FORMS, plugin=True, before_captures=_BEFORE_CAPTURES)


def with_each_adapter(images: Iterable[Image]) -> Iterator[Image]:
    """Each of these images with each of the adapters, and without one."""
    for image in images:
        for adapter in (None, *adapters.NAMES):
            yield Image(image.width, image.height, image.seed, adapter)


def judge(engines: Mapping[str, Engine]) -> dict[str, Any]:
    """Whose embeddings each image has, by form of the graphs and by step; and how far apart those are that may be."""
    alone = engines["none"].answers.get(EAGER, {})
    references: dict[int, dict[str | None, Embeddings]] = {}
    for image in (image for images in STEPS.values() for image in with_each_adapter(images)):
        if (answer := alone.get(f"{image.name} alone")) is not None:
            references.setdefault(image.seed, {})[image.adapter] = answer.embeddings[0]
    apart = [
        distance(one, another)
        for each in references.values()
        for adapter, one in each.items()
        for other, another in each.items()
        if adapter != other
    ]
    findings: dict[str, Any] = {"references are apart by": round(min(apart), 3) if apart else None}
    for engine in engines.values():
        for form, steps in engine.answers.items():
            of_form = engine.name if form == EAGER else f"{form}, patched" if engine.plugin else form
            findings[of_form] = {
                step: owners_in_step(answer, engine.steps[step], references, alone)
                for step, answer in steps.items()
                if len(engine.steps[step]) > 1
            } | {"alone": owners_alone(engine, steps, references)}
    states = engines["graphs"].found.get("state", {})
    findings["captured"] = {form: state.get("kernels of adapters left out", {}) for form, state in states.items()}
    if "patched" in engines:
        states = engines["patched"].found.get("state", {})
        findings["events"] = {form: state["fixes"]["encoder-adapters"]["events"] for form, state in states.items()}
    return findings


def owners_in_step(
    answer: Answer, images: Sequence[Image], references: References, alone: Mapping[str, Answer]
) -> dict[str, Any]:
    """Whose embeddings the images of one step have, and how many answers are not as alone."""
    owners = {
        image.name: owner(found, image.adapter, references.get(image.seed, {None: ()}))
        for image, found in zip(images, answer.embeddings, strict=True)
    }
    right = [alone[f"{image.name} alone"].answers[0] for image in images if f"{image.name} alone" in alone]
    different = sum(one != other for one, other in zip(answer.answers, right, strict=False))
    return owners | {"different answers": different} | answer.counted


def owners_alone(engine: Engine, steps: Mapping[str, Answer], references: References) -> dict[str, int]:
    """Of how many images that are encoded alone, each with its own adapter, the embeddings are whose."""
    counted: dict[str, int] = {}
    for step, answer in steps.items():
        images = engine.steps[step]
        if len(images) == 1:
            whose = owner(answer.embeddings[0], images[0].adapter, references.get(images[0].seed, {None: ()}))
            counted[whose] = counted.get(whose, 0) + 1
    return counted


def owner(found: Embeddings, own: str | None, references: Mapping[str | None, Embeddings]) -> str:
    """Whose embeddings an image has that should have those of the adapter *own*.

    *references* are its embeddings with each adapter and, by None, with none.
    """
    if any(map(math.isnan, found)):
        return "none of these, NaN"
    near = {adapter: distance(found, values) for adapter, values in references.items()}
    nearest = min(near, key=lambda adapter: near[adapter])
    name = "its own" if nearest == own else "the base model's" if nearest is None else f"another adapter's ({nearest})"
    # Where an image's adapters hardly change it, a mixture of them is near to each.
    between = [distance(values, references[nearest]) for adapter, values in references.items() if adapter != nearest]
    return name if near[nearest] <= min([NEAR, *(each / 4 for each in between)]) else f"none of these, nearest {name}"


def is_mixed_up(findings: Mapping[str, Any]) -> bool:
    """Whether an image has other embeddings than its own with the fix."""
    patched = [steps for form, steps in findings.items() if form.endswith(", patched")]
    in_steps = [owners for steps in patched for name, owners in steps.items() if name != "alone"]
    return any(whose != "its own" for owners in in_steps for whose in owners.values() if isinstance(whose, str))


CASE = Case(
    fix="encoder-adapters",
    engines=engines,
    judge=judge,
    is_wrong=is_mixed_up,
    where_known=NORMALISED_BY_THE_HOST,
    write=write,
)
