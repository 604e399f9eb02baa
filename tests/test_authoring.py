"""The parts that fixes are written with: a correction that is counted, observed, refused, or that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vllm_graphfix.authoring import correct_arguments, correct_result
from vllm_graphfix.fix import STEPPED_ASIDE, Activity, Event

MET = Event("met", "The condition was met.")


def stock(self: str, number: int, *rest: Any, **more: Any) -> tuple[Any, ...]:
    return (self, number, *rest, more)


@correct_arguments("module", "target", MET)
def at_least_one(self: str, number: int, *args: Any, **kwargs: Any) -> tuple[str, int] | None:
    if number < 0:
        raise ValueError(number)
    return None if number else (self, 1)


@correct_result("module", "target", MET)
def filled(result: list[int], *args: Any, **kwargs: Any) -> Callable[[], Any] | None:
    if args == ("fail",):
        raise ValueError(args)
    return None if result else lambda: result.append(1)


@correct_result("module", "target", MET)
def of_one_argument(result: list[int], number: int) -> Callable[[], Any] | None:
    return None


def activity(*, corrects: bool = True) -> Activity:
    return Activity([MET], corrects=corrects)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        (("s", 5, "r"), {"k": 1}, ("s", 5, "r", {"k": 1})),
        (("s", 0, "r"), {"k": 1}, ("s", 1, "r", {"k": 1})),
        (("s",), {"number": 0, "k": 1}, ("s", 1, {"k": 1})),
        ((), {"self": "s", "number": 0}, ("s", 1, {})),
    ],
)
def test_arguments_are_corrected_by_position_and_by_name(
    args: tuple[Any, ...], kwargs: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    of = activity()
    assert at_least_one.wrap(stock, of)(*args, **kwargs) == expected
    assert of.counts == {"met": int(expected[1] == 1)}


@correct_arguments("module", "target", MET)
def with_an_even_limit(self: str, number: int = 0, limit: int | None = None) -> tuple[Any, ...]:
    return (self, number, 2 if number else limit)


def test_an_argument_that_the_call_leaves_out_is_corrected_too() -> None:
    def limited(self: str, number: int = 7, limit: int | None = 9) -> tuple[Any, ...]:
        return (self, number, limit)

    corrected = with_an_even_limit.wrap(limited, activity())
    assert corrected("s", 3) == ("s", 3, 2)
    assert corrected("s", number=3) == ("s", 3, 2)
    assert corrected("s") == ("s", 7, 9), "stock's own defaults stand where nothing is corrected"


def test_a_patch_goes_by_the_parameters_that_its_correction_names() -> None:
    assert (at_least_one.leading, filled.leading) == (2, 0)
    assert of_one_argument.leading is None, "it could not be called with one more"


def test_while_it_observes_a_correction_is_counted_and_dropped() -> None:
    of = activity(corrects=False)
    assert at_least_one.wrap(stock, of)("s", 0) == ("s", 0, {})
    assert filled.wrap(list, of)() == []
    assert of.counts == {"met": 2}


def test_a_correction_that_fails_leaves_stocks_call_and_result() -> None:
    of = activity()
    assert at_least_one.wrap(stock, of)("s", -1) == ("s", -1, {})
    assert filled.wrap(lambda *_: [], of)("fail") == []
    assert of.counts == {"met": 0}
    assert of.error == "ValueError: -1"


def test_a_result_is_put_right_in_place() -> None:
    of = activity()
    wrapped = filled.wrap(list, of)
    assert (wrapped(), of.counts) == ([1], {"met": 1})
    assert (filled.wrap(lambda: [2], of)(), of.counts) == ([2], {"met": 1})


def test_an_error_of_stock_comes_out_as_it_is_and_is_none_of_the_fix() -> None:
    def broken(*_: Any) -> None:
        raise KeyError("stock")

    of = activity()
    for patch in (at_least_one, filled):
        with pytest.raises(KeyError, match="stock"):
            patch.wrap(broken, of)("s", 0)
    assert of.error is None


def test_a_fix_that_steps_aside_counts_and_names_the_code_once(caplog: pytest.LogCaptureFixture) -> None:
    of = activity()
    for _ in range(3):
        of.step_aside("x-y", "fork.Model.encode")
    assert of.counts == {"met": 0, STEPPED_ASIDE: 3}
    assert [record.getMessage() for record in caplog.records] == [
        "graphfix: x-y steps aside: fork.Model.encode is not vLLM's own code, and may have put the defect right"
    ]
    of.reset()
    assert of.counts == {"met": 0}
