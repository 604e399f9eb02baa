"""Every observer, whatever its arguments are, hands them to stock, and stock's answer or error on."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from activities import Layer, layers
from stock_stand_ins import Hostile, Stop, arguments_for, shapes, stock_of
from vllm_graphfix.fix import Activity
from vllm_graphfix.fixes import BY_NAME, FIXES

OBSERVERS = [
    pytest.param(fix.name, *bound, id=f"{fix.name}-{shape}-{bound[1].name}")
    for fix in FIXES
    for shape in shapes(fix)
    for activity, offered in [layers(fix, shape, corrects=False)]
    for bound in [(activity, layer) for layer in offered]
]
each_observer = pytest.mark.parametrize(("name", "activity", "patch"), OBSERVERS)


@each_observer
@pytest.mark.parametrize("kind", [object, Hostile], ids=["object", "hostile"])
@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
def test_stock_gets_the_very_objects_and_its_answer_is_handed_on(
    name: str, activity: Activity, patch: Layer, kind: Callable[[], Any], by_name: bool
) -> None:
    """Also where they are nothing that an observer knows."""
    observe, arguments = patch.wrap(stock_of(patch)), arguments_for(patch, kind)
    before = activity.counts
    returned = observe(**arguments) if by_name else observe(*arguments.values())
    assert list(returned) == list(arguments)
    # what the factory makes is stock's: below
    assert all(returned[key] is value for key, value in arguments.items() if key != "create_forward_fn")
    assert activity.counts == before


@each_observer
def test_an_error_of_stock_comes_out_as_it_is(name: str, activity: Activity, patch: Layer) -> None:
    arguments = arguments_for(patch, object)
    error = arguments[list(arguments)[-1]] = Stop()
    with pytest.raises(Stop) as raised:
        patch.wrap(stock_of(patch))(*arguments.values())
    assert raised.value is error


@each_observer
def test_an_observer_is_a_plain_function_that_wraps_stock(name: str, activity: Activity, patch: Layer) -> None:
    stock = stock_of(patch)
    observe = patch.wrap(stock)
    assert type(observe) is type(stock)
    assert observe.__wrapped__ is stock  # type: ignore[attr-defined]
    assert patch.module in BY_NAME[name].modules


@each_observer
def test_stocks_complaint_about_wrong_arguments_is_a_type_error_as_ever(
    name: str, activity: Activity, patch: Layer
) -> None:
    with pytest.raises(TypeError):
        patch.wrap(stock_of(patch))(*range(20))


def test_every_fix_counts_where_it_is_observed() -> None:
    for fix in FIXES:
        for shape in shapes(fix):
            assert any(patch.observes for patch in fix.patches(shape))


def test_events_have_names_that_a_label_takes_and_one_sentence_each() -> None:
    for fix in FIXES:
        assert fix.events
        for event in fix.events:
            assert event.name == event.name.lower().replace("_", "-").replace(" ", "-")
            assert event.meaning.endswith(".")
            assert ". " not in event.meaning
    names = [event.name for fix in FIXES for event in fix.events]
    assert len(set(names)) == len(names)


def test_a_watched_factory_hands_on_the_very_forward_function_and_state() -> None:
    _, (patch,) = layers(BY_NAME["capture-state"], "factory-with-state", corrects=False)
    made = {full: (lambda mode: None, object()) for full in (True, False)}
    descriptors = {
        full: SimpleNamespace(cg_mode=SimpleNamespace(name="FULL" if full else "PIECEWISE")) for full in made
    }

    def stock(self: Any, create_forward_fn: Any) -> Any:
        return {full: create_forward_fn(descriptor) for full, descriptor in descriptors.items()}

    by_name = {id(descriptor): full for full, descriptor in descriptors.items()}
    returned = patch.wrap(stock)(object(), lambda descriptor: made[by_name[id(descriptor)]])
    assert all(returned[full] is made[full] for full in made)
