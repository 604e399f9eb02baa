"""Asks an engine again with poison in memory that belongs to no request, and isolates the poison that shows."""

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
from vllm_graphfix.verify.engine.job import PoisonPass
from vllm_graphfix.verify.poison.kinds import BLOCKS, KINDS, NULL, ROWS

if TYPE_CHECKING:
    from vllm import LLM

_MIN_SECONDS, _MIN_SECONDS_OF_A_CASE, _SLOWDOWN = 120.0, 40.0, 20
"""A pass with poison hangs if it takes longer than `_MIN_SECONDS`, and `_SLOWDOWN` times as long as one without. A case
of a tiny model answers in a few seconds and has a shorter minimum."""
PASSES = "poison: passes begun"
"""Key of the number of passes with poison among the observations, which survive a crash."""


@dataclass(frozen=True)
class Session:
    """An engine that has answered, and the means to ask it again."""

    llm: LLM
    ask: Callable[[], tuple[Answer, ...]]
    without: Sequence[tuple[Answer, ...]]
    """Answers without poison, by pass."""
    seconds: float
    """Duration of the first of these passes."""
    observed: dict[str, list[float]]
    write: Callable[[dict[str, Any]], None]
    """Writes a result for the process that waits for this one."""


def ask_with_poison(session: Session) -> tuple[PoisonPass, ...]:
    """Ask with all kinds of poison and, if they show, with each kind alone, then with halves of the persistent inputs.

    If NaN in blocks shows, ask with large numbers in its place. If nothing shows but padded rows of the model's output
    are NaN, ask with poison in rows alone: then no cache can be the source of that NaN.
    """
    started = time.monotonic()
    _release_all_blocks(session.llm)
    session.ask()
    bound = max(_MIN_SECONDS, _SLOWDOWN * (time.monotonic() - started))

    def one(kinds: Sequence[str], buffers: Sequence[str] | None = None, *, finite: bool = False) -> PoisonPass:
        return _one_pass(session, bound, kinds, buffers, finite)

    passes = [one(KINDS)]
    if not passes[0].shows:
        return (passes[0], one([ROWS])) if passes[0].padded else tuple(passes)
    alone = {kind: one([kind]) for kind in KINDS}
    passes += alone.values()
    for kind in (NULL, BLOCKS):
        if alone[kind].shows and not alone[kind].written:
            passes.append(one([kind], finite=True))
    if alone[ROWS].shows:
        passes += _halves(one, [name for rank in alone[ROWS].ranks[:1] for name in rank["buffers"]])
    return tuple(passes)


def ask_last_with_poison(session: Session) -> tuple[tuple[Answer, ...], tuple[PoisonPass, ...]]:
    """Ask once more without poison, then with all kinds; return those answers and the passes with poison.

    If poison shows and was not overwritten, one more pass has large numbers in blocks in place of NaN, which a kernel
    may multiply by 0. If padded rows of the output are NaN, one more has poison in rows alone, as above.
    """

    def late() -> dict[str, Any]:
        return {"observed": session.observed, "error": "hangs when it is asked again without poison: no answers"}

    started = time.monotonic()
    with _bounded(max(_MIN_SECONDS_OF_A_CASE, _SLOWDOWN * session.seconds), late, session.write):
        _release_all_blocks(session.llm)
        again = session.ask()
    bound = max(_MIN_SECONDS_OF_A_CASE, _SLOWDOWN * (time.monotonic() - started))
    passes = [_one_pass(session, bound, KINDS, None, finite=False)]
    if passes[0].written:
        return again, tuple(passes)
    if passes[0].shows:
        passes.append(_one_pass(session, bound, KINDS, None, finite=True))
    if passes[0].padded:
        passes.append(_one_pass(session, bound, [ROWS], None, finite=False))
    return again, tuple(passes)


def _release_all_blocks(llm: LLM) -> None:
    """Empty the prefix cache, so that every block can be poisoned. Raises RuntimeError if a block is still held."""
    if llm.reset_prefix_cache() is False:
        raise RuntimeError("vLLM holds blocks of its cache although no request runs, so none can be poisoned")


def _halves(one: Callable[..., PoisonPass], names: list[str]) -> Iterator[PoisonPass]:
    """Halve the inputs *names* down to one in which poison shows."""
    while len(names) > 1:
        first = names[: len(names) // 2]
        half = one([ROWS], first)
        yield half
        names = first if half.shows else names[len(first) :]
    if names:
        yield one([ROWS], names)


def _one_pass(
    session: Session, bound: float, kinds: Sequence[str], buffers: Sequence[str] | None, finite: bool
) -> PoisonPass:
    _release_all_blocks(session.llm)
    session.observed.setdefault(PASSES, [0.0])[0] += 1
    session.write({"observed": session.observed, "error": ""})  # before the pass, which may crash
    named = f"poison in {', '.join(buffers if buffers and len(buffers) < 4 else kinds)}"
    with _bounded(
        bound, lambda: {"observed": session.observed, "error": f"hangs with {named}: no answers"}, session.write
    ):
        chosen = None if buffers is None else list(buffers)
        session.llm.collective_rpc("graphfix_poison", args=(list(kinds), chosen, finite))
        answers = session.ask()
        ranks = session.llm.collective_rpc("graphfix_poison_result")
    gaps = [gap_between(one, other) for one, other in zip(session.without[0], answers, strict=True)]
    return PoisonPass(
        tuple(kinds),
        None if buffers is None else tuple(buffers),
        finite,
        tuple(number for number, gap in enumerate(gaps) if gap > 0),
        max(gaps, default=0.0),
        tuple(ranks),
    )


def gap_between(one: Answer, other: Answer) -> float:
    """Return the largest difference of log-probabilities; infinite if the tokens or the sets of best tokens differ."""
    if one.tokens != other.tokens or any(a.keys() != b.keys() for a, b in zip(one.top, other.top, strict=True)):
        return math.inf
    pairs = ((a[token], b[token]) for a, b in zip(one.top, other.top, strict=True) for token in a)
    gaps = [0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b) for a, b in pairs]
    return max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0)


@contextmanager
def _bounded(
    seconds: float, late_result: Callable[[], dict[str, Any]], write: Callable[[dict[str, Any]], None]
) -> Iterator[None]:
    """Write a result and end this process if the block takes longer: nothing else ends a kernel that waits."""

    def end() -> None:
        late = late_result()
        write(late | {"error": f"{late['error']} in {seconds:.0f} s"})
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
