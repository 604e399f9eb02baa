"""Decorators and a factory for fixes: they try, count, observe and fall back, once for all fixes.

`correct_arguments` and `correct_result` wrap a function of vLLM in one of the fix; any other wrapper is a `Patch` of
its own. `fix` makes the record.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Companion, Event, Fix, Patch, Rationale, Slice, StockFunction

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.fix import Diagnosis
    from vllm_graphfix.source.files import Source

Patches = Callable[[str], Sequence[Patch]]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def correct_arguments(
    module: str, target: str, event: Event
) -> Callable[[Callable[..., tuple[Any, ...] | None]], Patch]:
    """Make a `Patch` of *target*, ``Class.method`` or a name of *module*, whose first arguments may be corrected.

    The decorated function is called with the arguments of each call. It returns None where they are right, or else new
    values of any number of leading arguments, `self` included; *event* is then counted. It changes nothing itself:
    while the fix only observes, the new values are dropped. If it raises, stock runs with the original arguments.
    """

    def decorate(correct: Callable[..., tuple[Any, ...] | None]) -> Patch:
        defaults = _named(correct)

        def wrap(stock: StockFunction, activity: Activity) -> StockFunction:
            occurrences, corrects = activity.counter(event), activity.corrects

            @functools.wraps(stock)
            def corrected_call(*args: Any, **kwargs: Any) -> Any:
                try:
                    corrected = correct(*args, **kwargs)
                    if corrected is not None:
                        occurrences.count += 1
                        if corrects:
                            others = corrected[len(args) :]
                            if others:
                                # An argument that the call leaves out, and the correction too, keeps stock's default.
                                kwargs |= {
                                    name: value
                                    for (name, default), value in zip(defaults[len(args) :], others, strict=False)
                                    if name in kwargs or value is not default
                                }
                                args = corrected[: len(args)]
                            else:
                                args = corrected + args[len(corrected) :]
                except Exception as error:
                    activity.failed(error)
                return stock(*args, **kwargs)

            return corrected_call

        return Patch(module, target, wrap, leading=_leading(correct))

    return decorate


def correct_result(
    module: str, target: str, event: Event
) -> Callable[[Callable[..., Callable[[], Any] | None]], Patch]:
    """Make a `Patch` of *target*, ``Class.method`` or a name of *module*, whose result or effects may be corrected.

    The decorated function is called after stock, with its result and then its arguments. It returns None where all is
    right, or else the correction, a function without arguments that corrects in place; *event* is then counted. While
    the fix only observes, the correction is not called. If either raises, the result is stock's.
    """

    def decorate(correct: Callable[..., Callable[[], Any] | None]) -> Patch:
        def wrap(stock: StockFunction, activity: Activity) -> StockFunction:
            occurrences, corrects = activity.counter(event), activity.corrects

            @functools.wraps(stock)
            def call_and_correct(*args: Any, **kwargs: Any) -> Any:
                result = stock(*args, **kwargs)
                try:
                    correction = correct(result, *args, **kwargs)
                    if correction is not None:
                        if corrects:
                            correction()
                        occurrences.count += 1
                except Exception as error:
                    activity.failed(error)
                return result

            return call_and_correct

        return Patch(module, target, wrap, leading=_leading(correct, but=1))

    return decorate


def _named(correct: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Return the parameters that *correct* names, with their defaults."""
    return [
        (each.name, each.default) for each in inspect.signature(correct).parameters.values() if each.kind in _POSITIONAL
    ]


def _leading(correct: Callable[..., Any], but: int = 0) -> int | None:
    """Count the parameters that *correct* names, less the first *but*; None unless it takes ``*args, **kwargs``."""
    kinds = {each.kind for each in inspect.signature(correct).parameters.values()}
    takes_others = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    return len(_named(correct)) - but if takes_others else None


def fix(
    name: str,
    *,
    diagnose: Callable[[Source], Diagnosis],
    surroundings: tuple[Slice, ...],
    corrections: tuple[Patch, ...] | Patches,
    events: tuple[Event, ...],
    needs: Callable[[], tuple[Need, ...]],
    runner: str | None = None,
    modules: tuple[str, ...] = (),
    recognised: tuple[str, ...] = (),
    distant_code: str = "",
    requires: tuple[Companion, ...] = (),
    default_rationale: Rationale = None,
    changes_compiled_code: bool = False,
) -> Fix:
    """Make the record of a fix, with `inspected_files` from *surroundings*, and `modules` from *corrections*.

    *corrections* that differ by shape are a function of the shape; *modules* then lists all modules that it may patch.
    *recognised* are patterns of statements that `diagnose` matches itself, the defect's and each wording of its
    remedies: slices leave each out once per listing, so that another wording of a remedy does not make its surroundings
    new. *distant_code* names code that is too far away for slices, and by which a fork might undo a remedy. With
    *changes_compiled_code*, code that was compiled while the fix was active is never run without it, nor the other way
    round.
    """
    if not callable(corrections):
        patches: tuple[Patch, ...] = corrections
        modules = modules or tuple(dict.fromkeys(patch.module for patch in patches))
    return Fix(
        name=name,
        runner=runner,
        inspected_files=tuple(dict.fromkeys(part.path for part in surroundings)),
        modules=modules,
        diagnose=diagnose,
        patches=corrections if callable(corrections) else lambda _: patches,
        events=events,
        needs=needs,
        requires=requires,
        default_rationale=default_rationale,
        surroundings=surroundings,
        recognised=recognised,
        distant_code=distant_code,
        changes_compiled_code=changes_compiled_code,
    )
