"""Asks an engine again with poison in what must not matter, and finds out which poison it is that shows."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_graphfix.verify.comparison import Answer
from vllm_graphfix.verify.engine.job import Poisoned
from vllm_graphfix.verify.poison.kinds import KINDS

if TYPE_CHECKING:
    from vllm import LLM

_LEAST_SECONDS, _TIMES = 120.0, 20
"""A pass with poison that takes longer than so many seconds, and so many times what one without took, hangs."""
_LEAST_SECONDS_OF_A_CASE = 40.0
"""The same for a tiny model, which answers in a few."""
PASSES = "poison: passes begun"
"""Observed, also of an engine that crashes."""


@dataclass(frozen=True)
class Asked:
    """An engine, and how it is asked."""

    llm: LLM
    ask: Callable[[], tuple[Answer, ...]]
    without: Sequence[tuple[Answer, ...]]
    """The answers without poison."""
    observed: dict[str, list[float]]
    write: Callable[[dict[str, Any]], None]
    """Leaves a result for whoever waits for this process."""


def ask_with_poison(asked: Asked) -> tuple[Poisoned, ...]:
    """One pass with all poison; where it shows, one with each kind alone, and then halves of the persistent inputs.

    Where NaN in blocks shows, one with large numbers in its place. Where nothing shows but padded rows of the model's
    output are NaN, one with the rows alone: no cache gives them NaN then.
    """
    started = time.monotonic()
    _let_go_of_all_blocks(asked.llm)
    asked.ask()
    bound = max(_LEAST_SECONDS, _TIMES * (time.monotonic() - started))

    def one(kinds: Sequence[str], buffers: Sequence[str] | None = None, *, finite: bool = False) -> Poisoned:
        return _one_pass(asked, bound, kinds, buffers, finite)

    passes = [one(KINDS)]
    if not passes[0].shows:
        return tuple(passes) if not passes[0].padded else (passes[0], one(KINDS[:1]))
    alone = [one([kind]) for kind in KINDS]
    passes += alone
    passes += [one(each.kinds, finite=True) for each in alone[1:3] if each.shows and not each.written]
    if alone[0].shows:
        passes += _halves(one, [name for rank in alone[0].ranks[:1] for name in rank["buffers"]])
    return tuple(passes)


def ask_last_with_poison(asked: Asked) -> tuple[tuple[Answer, ...], tuple[Poisoned, ...]]:
    """The answers once more without poison, and what all of it together shows.

    Where it shows and nobody wrote where nobody may, one pass more has large numbers in blocks in place of NaN, which
    a kernel may multiply by 0. Where padded rows of the output are NaN, one more has the rows alone, as above.
    """

    def late() -> dict[str, Any]:
        return {"observed": asked.observed, "error": "hangs when it is asked again without poison: no answers"}

    started = time.monotonic()
    with _bounded(_LEAST_SECONDS_OF_A_CASE, late, asked.write):
        _let_go_of_all_blocks(asked.llm)
        again = asked.ask()
    bound = max(_LEAST_SECONDS_OF_A_CASE, _TIMES * (time.monotonic() - started))
    passes = [_one_pass(asked, bound, KINDS, None, finite=False)]
    if passes[0].written:
        return again, tuple(passes)
    if passes[0].shows:
        passes.append(_one_pass(asked, bound, KINDS, None, finite=True))
    if passes[0].padded:
        passes.append(_one_pass(asked, bound, KINDS[:1], None, finite=False))
    return again, tuple(passes)


def _let_go_of_all_blocks(llm: LLM) -> None:
    """Empties the prefix cache: what is poisoned next is every block. Raises RuntimeError if some are still held."""
    if llm.reset_prefix_cache() is False:
        raise RuntimeError("vLLM holds blocks of its cache although no request runs, so none can be poisoned")


def _halves(one: Callable[..., Poisoned], names: list[str]) -> Iterator[Poisoned]:
    """Down to the input that is enough for it to show."""
    while len(names) > 1:
        first = names[: len(names) // 2]
        found = one(KINDS[:1], first)
        yield found
        names = first if found.shows else names[len(first) :]
    if names:
        yield one(KINDS[:1], names)


def _one_pass(
    asked: Asked, bound: float, kinds: Sequence[str], buffers: Sequence[str] | None, finite: bool
) -> Poisoned:
    _let_go_of_all_blocks(asked.llm)
    asked.observed.setdefault(PASSES, [0.0])[0] += 1
    asked.write({"observed": asked.observed, "error": ""})  # before what may crash
    named = f"poison in {', '.join(buffers if buffers and len(buffers) < 4 else kinds)}"
    with _bounded(bound, lambda: {"observed": asked.observed, "error": f"hangs with {named}: no answers"}, asked.write):
        chosen = None if buffers is None else list(buffers)
        asked.llm.collective_rpc("graphfix_poison", args=(list(kinds), chosen, finite))
        answers = asked.ask()
        ranks = asked.llm.collective_rpc("graphfix_poison_found")
    gaps = [gap_between(one, other) for one, other in zip(asked.without[0], answers, strict=True)]
    return Poisoned(
        tuple(kinds),
        None if buffers is None else tuple(buffers),
        finite,
        tuple(number for number, gap in enumerate(gaps) if gap > 0),
        max(gaps, default=0.0),
        tuple(ranks),
    )


def gap_between(one: Answer, other: Answer) -> float:
    """The largest difference of log-probabilities; infinite if tokens, or which are likeliest, are not the same."""
    if one.tokens != other.tokens or any(a.keys() != b.keys() for a, b in zip(one.top, other.top, strict=True)):
        return math.inf
    pairs = ((a[token], b[token]) for a, b in zip(one.top, other.top, strict=True) for token in a)
    gaps = [0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b) for a, b in pairs]
    return max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0)


@contextmanager
def _bounded(
    seconds: float, told: Callable[[], dict[str, Any]], write: Callable[[dict[str, Any]], None]
) -> Iterator[None]:
    """Ends this process, with what it hangs in, if the block takes longer: nothing else ends a kernel that waits."""

    def end() -> None:
        late = told()
        write(late | {"error": f"{late['error']} in {seconds:.0f} s"})
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
