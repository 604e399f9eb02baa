"""Results of three engines, and the proofs that `verify` makes of them, for tests."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_graphfix.fix import Diagnosis, Verdict
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.verify.comparison import Answer
from vllm_graphfix.verify.engine.job import GRAPHS, EngineResult, Job
from vllm_graphfix.verify.engine.processes import JobResult
from vllm_graphfix.verify.gpu_proof import prove
from vllm_graphfix.verify.proof import Proof
from vllm_graphfix.verify.report import Report, show
from vllm_graphfix.verify.trial import trial_of

CASES = {name: case for name, fix in BY_NAME.items() if (case := trial_of(fix.name).case) is not None}
AFFECTED = Diagnosis(Verdict.AFFECTED, "affected")
LOG = Path("engine.log")
ILLEGAL_ACCESS = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"


def answer(*tokens: int) -> Answer:
    return Answer(tokens, tuple({token: -0.1, token + 1: -3.0} for token in tokens))


RIGHT = (answer(1, 2, 3, 4), answer(5, 6, 7))
WRONG = (answer(1, 9, 9, 9), answer(5, 6, 7))


def result_of(
    answers: tuple[Answer, ...],
    *states: str,
    again: tuple[Answer, ...] | None = None,
    observed: dict[str, list[float]] | None = None,
) -> EngineResult:
    return EngineResult(
        passes=(answers,) if again is None else (answers, again),
        states={str(rank): dict.fromkeys(BY_NAME, state) for rank, state in enumerate(states)},
        observed=observed or {},
        drafts=None,
        facts={},
        start_seconds=1.0,
    )


def came_to_its_end(mode: str, what: EngineResult) -> JobResult:
    return JobResult(Job(mode, GRAPHS), what, None, LOG, 1.0, what.observed)


def failed(mode: str, error: str, observed: dict[str, list[float]] | None = None) -> JobResult:
    return JobResult(Job(mode, GRAPHS), None, error, LOG, 1.0, observed or {})


RUNS = {
    "eager": came_to_its_end("eager", result_of(RIGHT, "off", again=RIGHT)),
    "stock": came_to_its_end("stock", result_of(WRONG, "off")),
    "patched": came_to_its_end("patched", result_of(RIGHT, "active")),
}
"""The runs of a fix whose defect shows in tokens."""


def proof_of(name: str, **runs: JobResult) -> Proof:
    return prove(BY_NAME[name], AFFECTED, CASES[name], RUNS | runs)


def with_(**changes: Any) -> dict[str, JobResult]:
    return {mode: came_to_its_end(mode, what) for mode, what in changes.items()}


def observing(
    name: str, on_stock: list[float] | None, with_the_fix: list[float] | None, patched: tuple[Answer, ...] = RIGHT
) -> Proof:
    """The proof of *name*, whose probe has seen that in each engine; stock's tokens are eager's."""
    probe = CASES[name].probes[0]
    seen, seen_with_the_fix = ({} if it is None else {probe: it} for it in (on_stock, with_the_fix))
    return proof_of(
        name,
        **with_(
            stock=result_of(RIGHT, "off", observed=seen),
            patched=result_of(patched, "active", observed=seen_with_the_fix),
        ),
    )


def page(*proofs: Proof) -> str:
    written = io.StringIO()
    show(Report("0.18.1", "/somewhere", "a GPU", proofs), Console(file=written, width=200), verbose=True)
    return written.getvalue()
