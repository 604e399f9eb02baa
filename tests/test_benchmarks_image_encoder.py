"""The benchmark of encoder graphs, as far as it needs no engine: what it makes of embeddings, and its exit code."""

from __future__ import annotations

import math
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import image_encoder as benchmark
from measuring import encoder_adapters, encoder_padding
from measuring.encoder_adapters import ONE, TWO
from measuring.encoder_case import Answer, Engine, Image, Steps

RIGHT = (1.0, -2.0, 0.5)
NAN = math.nan


@pytest.mark.parametrize(
    ("found", "counted"),
    [
        (RIGHT, (0, 0)),
        ((1.04, -2.04, 0.52), (0, 0)),  # as far as rounding goes
        ((1.0, -2.0, 0.7), (0, 1)),
        ((NAN, -2.0, 0.5), (1, 0)),
        ((NAN, NAN, 9.0), (2, 1)),
        ((1.0, math.inf, 0.5), (0, 1)),
        ((1.0, -2.0), (0, 3)),  # tokens are missing
    ],
)
def test_numbers_that_are_nan_and_numbers_that_are_others_are_counted_apart(
    found: tuple[float, ...], counted: tuple[int, int]
) -> None:
    assert encoder_padding.nan_and_different(found, RIGHT) == counted


def test_nan_is_the_same_as_nothing() -> None:
    assert encoder_padding.unequal((1.0, NAN, 3.0), (1.0, NAN, 4.0)) == 2


REFERENCES: dict[str | None, tuple[float, ...]] = {None: (1.0, 0.0, 0.0), ONE: (0.0, 1.0, 0.0), TWO: (0.0, 0.0, 1.0)}


@pytest.mark.parametrize(
    ("found", "own", "said"),
    [
        ((0.0, 1.02, 0.01), ONE, "its own"),
        ((0.99, 0.0, 0.0), None, "its own"),
        ((0.0, 0.0, 1.0), ONE, f"another adapter's ({TWO})"),
        ((0.0, 0.0, 1.0), None, f"another adapter's ({TWO})"),
        ((1.0, 0.0, 0.0), TWO, "the base model's"),
        ((0.0, 0.6, 0.4), ONE, "none of these, nearest its own"),  # some tokens with one, some with the other
        ((0.0, NAN, 0.0), ONE, "none of these, NaN"),
        ((0.7, 0.2, 0.1), ONE, "none of these, nearest the base model's"),
    ],
)
def test_embeddings_are_those_that_they_are_near_to(found: tuple[float, ...], own: str | None, said: str) -> None:
    assert encoder_adapters.owner(found, own, REFERENCES) == said


def test_a_mixture_of_adapters_that_hardly_change_an_image_is_none_of_them() -> None:
    faint: dict[str | None, tuple[float, ...]] = {None: (1.0, 0.0), ONE: (1.0, 0.01)}
    assert encoder_adapters.owner((1.0, 0.01), ONE, faint) == "its own"
    assert encoder_adapters.owner((1.0, 0.007), ONE, faint) == "none of these, nearest its own"


def test_no_two_images_have_one_name() -> None:
    """Steps and references are found by it."""
    steps = encoder_adapters.STEPS.values()
    names = [image.name for images in steps for image in encoder_adapters.with_each_adapter(images)]
    assert len(names) == len(set(names)) == 18
    assert len(encoder_padding.STEPS) == 5


def test_images_have_the_tokens_that_the_graphs_are_made_for() -> None:
    padding = [image.tokens for image in encoder_padding.STEPS["together"]]
    smaller, larger = encoder_padding.FORMS["pool"].budgets
    assert smaller in padding, "one image fills its graph"
    assert sum(padding) > larger, "all at once are more than one batch"
    one, together, small = encoder_adapters.FORMS
    for images in encoder_adapters.STEPS.values():
        tokens = [image.tokens for image in images]
        assert sum(tokens) <= one.budgets[0] == together.budgets[0], "no replay is smaller than the step"
        assert sorted(tokens) == list(small.budgets)
        assert {image.adapter for image in images} == {None, ONE, TWO}
    assert all(form.items <= min(form.budgets) for form in encoder_adapters.FORMS), "vLLM refuses more"


def answer(*embeddings: tuple[float, ...], tokens: int = 7) -> Answer:
    return Answer(tuple(array("f", each) for each in embeddings), ((tokens,),) * len(embeddings), {"in graphs": 1})


def engine(name: str, steps: Steps, **answers: dict[str, Answer]) -> Engine:
    made = Engine(name, steps, plugin=name == "patched")
    made.answers = dict(answers)
    return made


def test_padding_is_measured_by_the_eager_engine() -> None:
    alone, filled, *_ = encoder_padding.STEPS
    steps = encoder_padding.STEPS
    right = {alone: answer(RIGHT), filled: answer(RIGHT)}
    wrong = {alone: answer((NAN, NAN, 0.5), tokens=0), filled: answer(RIGHT)}
    engines = {
        "eager": engine("eager", steps, eager=right),
        "stock": engine("stock", steps, zeros=right, pool=wrong),
        "patched": engine("patched", steps, pool=right),
    }
    engines["patched"].found["state"] = {"driver": {"fixes": {"a": "waiting"}}, "pool": {"fixes": {"a": "active"}}}
    found = encoder_padding.judge(engines)
    assert found["fixes"] == {"a": "active"}, "the last word"
    assert found["stock"]["pool"] == {
        "numbers": 6,
        "nan": 2,
        "different": 0,
        "unlike zeros": 2,
        "answers": 2,
        "different answers": 1,
        "wrong images": ["image 0, 56x56"],
        "in graphs": 2,
        "in none": 0,
        "steps compared": 2,
    }
    assert found["patched"]["pool"]["nan"] == found["patched"]["pool"]["unlike zeros"] == 0


def test_adapters_are_measured_by_images_alone_without_graphs() -> None:
    image = Image(56, 56, 12, TWO)
    other = Image(56, 112, 13)
    alone = {
        f"{each.name} alone": answer(REFERENCES[each.adapter])
        for each in encoder_adapters.with_each_adapter((image, other))
    }
    both: dict[str, tuple[Image, ...]] = {"the largest first": (image, other)}
    own: dict[str, tuple[Image, ...]] = {
        f"{each.name} alone": (each,) for each in encoder_adapters.with_each_adapter((image, other))
    }
    engines = {
        "none": engine("none", both | own, eager=alone | {"the largest first": answer((0, 0, 1), (1, 0, 0))}),
        "graphs": engine("graphs", both, small={"the largest first": answer((0, 1, 0), (0, 0, 1))}),
    }
    found = encoder_adapters.judge(engines)
    assert found["references are apart by"] > encoder_adapters.NEAR
    assert found["none"]["alone"] == {"its own": 6}
    assert found["none"]["the largest first"][image.name] == "its own"
    assert found["small"]["the largest first"][image.name] == f"another adapter's ({ONE})"
    assert found["small"]["the largest first"][other.name] == f"another adapter's ({TWO})"


RAN = [{"engine": "stock"}]


def case(
    stock: dict[str, int], patched: dict[str, int], *, expected: bool | None = True, **more: Any
) -> dict[str, Any]:
    """A case of `padding`, with so many NaN by memory."""
    found = {"stock": stock, "patched": patched}
    told = {
        name: {memory: {"nan": nan, "different": 0} for memory, nan in each.items()} for name, each in found.items()
    }
    return {"case": "padding", "expected": expected} | told | more


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (case({"driver": 0, "pool": 3}, {"driver": 0, "pool": 0}), 0),
        (case({"driver": 0, "pool": 0}, {"driver": 0, "pool": 0}), 1),  # stock is right on an affected release
        (case({"driver": 0, "pool": 0}, {"driver": 0, "pool": 0}, expected=False), 0),
        (case({"driver": 0, "pool": 3}, {"driver": 0, "pool": 0}, expected=False), 1),
        (case({"driver": 0, "pool": 0}, {"driver": 0, "pool": 0}, expected=None), 0),
        (case({"pool": 3}, {"pool": 1}), 1),  # the fix leaves something wrong
        (case({"pool": 3, "zeros": 1}, {"pool": 0, "zeros": 0}), 1),  # more is wrong than padded rows
        (case({"pool": 3}, {}), 1),
        (case({"pool": 3}, {"pool": 0}, died={"patched": "it did"}), 1),
        ({"case": "adapters", "expected": None, "small": {"a step": {"an image": "none of these"}}}, 0),
        ({"case": "adapters", "expected": None, "died": {"graphs": "it did"}}, 1),
        ({"case": "adapters", "small, patched": {"a step": {"an image": "its own", "calls": 1}, "alone": {"x": 1}}}, 0),
        ({"case": "adapters", "small, patched": {"a step": {"an image": "the base model's"}}}, 1),
    ],
)
def test_the_exit_code_says_whether_something_is_unexpected(found: dict[str, Any], code: int) -> None:
    assert benchmark.verdict(RAN, [found]) == code


def test_numbers_that_are_different_are_wrong_too() -> None:
    found = case({"pool": 3}, {"pool": 0})
    found["patched"]["pool"]["different"] = 1
    assert benchmark.verdict(RAN, [found]) == 1


def test_nothing_ran_where_every_engine_died() -> None:
    assert benchmark.verdict([], []) == 2
    assert benchmark.verdict([{"engine": "stock", "error": "no GPU"}], [{"case": "adapters", "died": {}}]) == 2


def test_what_graphs_leave_to_the_model_is_noted_once_it_is_encoded() -> None:
    from measuring.image_encoder_engine import Encoder

    class Embedding:
        def detach(self) -> Embedding:
            return self

        clone = detach

    encoder, embedding = Encoder("plain", 0), Embedding()
    encoder.encoded = []
    assert encoder._noted(None) is None, "encoder-adapters has taken the images out of the graphs"
    assert encoder._noted([embedding]) == [embedding]
    assert encoder.encoded == [[embedding]]
