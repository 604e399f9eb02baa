"""`verify` on engines, poisoned after all else: what it shows, and that nothing which was said before is lost by it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import engine_double
from engine_proofs import CASES, ILLEGAL_ACCESS, RUNS, came_to_its_end, page, proof_of
from engines_run import ended
from vllm_graphfix.verify.codec import from_builtins, to_builtins
from vllm_graphfix.verify.engine.job import EngineResult, PoisonPass
from vllm_graphfix.verify.engine.poison_report import report_of
from vllm_graphfix.verify.engine.poisoned import PASSES
from vllm_graphfix.verify.engine.probes import Observed, Probe
from vllm_graphfix.verify.engine.processes import JobResult
from vllm_graphfix.verify.poison.kinds import KINDS
from vllm_graphfix.verify.proof import Proof
from vllm_graphfix.verify.report import Report, show

POISONED = {"flashmla-padding", "triton-mla-padding", "idle-rank", "mamba-padding"}


def with_poison(folder: Path, behaviour: str, poisoned: str, *path: Path, probe: tuple[str, ...] = ()) -> JobResult:
    """Run an engine of the double and ask it with poison, to which it reacts as *poisoned* says."""
    vllm = engine_double.install(folder / "path")
    environment = {"PYTHONPATH": ":".join(map(str, (vllm, *path))), "ENGINE_DOUBLE_POISON_PATCHED": poisoned}
    return ended(vllm, folder, behaviour, poison_last=True, environment=environment, probes=probe)


@pytest.mark.parametrize(
    ("poisoned", "passes", "detected", "padded"),
    [
        ("is wrong", 2, True, None),
        ("times zero", 2, False, None),
        # Here and above the double's own noise is looked at once more.
        ("is written to", 1, True, None),
        ("has NaN in padding", 3, False, 2),
    ],
)
def test_all_poison_at_once_comes_after_a_pass_without(
    poisoned: str, passes: int, detected: bool, padded: int | None, tmp_path: Path
) -> None:
    result = with_poison(tmp_path, "answers", poisoned).result
    assert result is not None
    report = report_of(result, None, result.observed)
    assert (len(result.passes), len(result.poisoned), result.poison_error) == (2, passes, None)
    kinds = [(KINDS, False), (KINDS, True), (KINDS[:1], False)]
    assert [(each.kinds, each.finite) for each in result.poisoned] == kinds[:passes]
    assert (report.detected, report.inconclusive, report.padded) == (detected, None, padded)


@pytest.mark.parametrize(
    ("poisoned", "error", "detected"),
    [
        ("aborts", "CUDA error: an illegal memory access was encountered", True),
        ("is confused", "IndexError: index 2048 is out of bounds", True),
        ("out of memory", "RuntimeError: CUDA error: out of memory", False),
    ],
)
def test_an_error_with_poison_loses_nothing_of_the_result(
    poisoned: str, error: str, detected: bool, tmp_path: Path
) -> None:
    end = with_poison(tmp_path, "answers", poisoned)
    assert end.error is None
    assert end.result is not None
    assert [answer.tokens for answer in end.result.passes[0]] == [(3, 4, 5), (39, 40, 41, 42)]
    assert end.result.poison_error == error
    report = report_of(None, end.result.poison_error, end.result.observed)
    assert report.detected == detected
    assert detected or "was not done" in (report.inconclusive or "")


def test_answers_and_noise_are_those_of_passes_whose_replays_are_not_compared(tmp_path: Path) -> None:
    """A run without the graph leaves right entries in caches, which the graph has not written."""
    vllm = engine_double.install(tmp_path / "path")
    plain, healed = (
        ended(vllm, tmp_path, behaviour, poison_last=True, exact=True, environment={"PYTHONPATH": str(vllm)}).result
        for behaviour in ("wrong", "healed where compared")
    )
    assert plain is not None
    assert healed is not None
    assert [rank.compared for rank in healed.exact] == [1]
    assert [[answer.tokens for answer in each] for each in healed.passes] == [
        [answer.tokens for answer in each] for each in plain.passes
    ]


IMPATIENT = """
from vllm_graphfix.verify.engine import poisoned
from vllm_graphfix.verify.engine.probes import Probe as probe

poisoned._MIN_SECONDS_OF_A_CASE, poisoned._SLOWDOWN = 1.0, 1
"""


@pytest.mark.parametrize(
    ("behaviour", "poisoned", "error", "detected"),
    [
        ("answers", "hangs", "hangs with poison in padded rows, null block, unused blocks, freed memory", True),
        ("hangs when asked again", "", "hangs when it is asked again without poison", False),
    ],
)
def test_a_hang_is_bounded_and_named_and_no_poisons_doing_before_there_is_any(
    behaviour: str, poisoned: str, error: str, detected: bool, tmp_path: Path
) -> None:
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    end = with_poison(tmp_path, behaviour, poisoned, tmp_path, probe=("impatient:probe",))
    assert end.error is None
    assert end.result is not None
    assert len(end.result.passes) == 1
    assert end.result.poison_error == f"{error}: no answers in 1 s"
    assert report_of(None, end.result.poison_error, end.result.observed).detected == detected


class EveryAnswer(Probe):
    """Counts, and saves, as often as the engine is asked."""

    name = "answers"

    def in_the_engine(self, llm: Any) -> None:
        self._observed[self.name] = [0.0]
        generate: Callable[..., Any] = llm.generate

        def generated(*args: Any, **kwargs: Any) -> Any:
            self._observed[self.name][0] += 1
            self._save()
            return generate(*args, **kwargs)

        llm.generate = generated


def probe(observed: Observed, save: Callable[[], None]) -> Probe:
    return EveryAnswer(observed, save)


@pytest.mark.parametrize("poisoned", ["is wrong", "aborts"])
def test_what_a_probe_sees_in_poisoned_steps_is_no_part_of_the_proof(poisoned: str, tmp_path: Path) -> None:
    path = Path(__file__).parent, Path(__file__).parent / "support"
    end = with_poison(tmp_path, "answers", poisoned, *path, probe=(f"{Path(__file__).stem}:probe",))
    assert end.result is not None, (end.error, end.log.read_text())
    assert end.result.observed[EveryAnswer.name] == [1.0]
    assert end.result.observed[PASSES] == [2.0 if poisoned == "is wrong" else 1.0]


# What is concluded from it.


def a_pass(*kinds: str, worst: float = 0.0, finite: bool = False, **rank: Any) -> PoisonPass:
    of_rank = {
        "steps": 3,
        "findings": [],
        "most": {"padded rows": 9},
        "notes": [],
        "error": None,
        "padded": None,
    } | rank
    return PoisonPass(kinds or KINDS, None, finite, (0,) if worst else (), worst, (of_rank,))


WRITTEN = a_pass(findings=[[2, "layer 0: block 5, which nobody holds, was written to", True]])
PADDED = (a_pass(padded=2), a_pass(KINDS[0], padded=2))


def poisoned(mode: str, *passes: PoisonPass, error: str | None = None, begun: int = 1) -> JobResult:
    """The run of *mode*, poisoned after it had said what it says."""
    what = RUNS[mode].result
    assert what is not None
    again = () if error else what.passes
    observed = what.observed | {PASSES: [float(begun)]}
    what = replace(what, passes=what.passes + again, poisoned=passes, poison_error=error, observed=observed)
    return came_to_its_end(mode, from_builtins(json.loads(json.dumps(to_builtins(what))), EngineResult))


def proof_with(stock: JobResult, patched: JobResult, name: str = "mamba-padding") -> Proof:
    return proof_of(name, stock=stock, patched=patched)


SILENT = a_pass()


def test_poison_that_shows_on_stock_alone_is_reported_with_the_proof() -> None:
    proof = proof_with(poisoned("stock", WRITTEN), poisoned("patched", SILENT))
    assert (proof.outcome, proof.poison_notes) == ("proven", {})
    assert proof.poisoned == {
        "stock": (f"{', '.join(KINDS)}:", "step 2: layer 0: block 5, which nobody holds, was written to"),
        "patched": (),
    }
    assert "stock, poison: padded rows, null block, unused blocks, freed memory:; step 2: layer 0" in page(proof)
    assert "patched, poison: nothing" in page(proof)


@pytest.mark.parametrize(
    "patched",
    [poisoned("patched", WRITTEN), poisoned("patched", error=ILLEGAL_ACCESS), poisoned("patched", a_pass(worst=1.0))],
    ids=["written", "crash", "an answer"],
)
def test_poison_that_shows_with_the_fix_is_a_failure(patched: JobResult) -> None:
    proof = proof_with(poisoned("stock", WRITTEN), patched)
    assert (proof.outcome, proof.holds) == ("poison is still seen", False)


def test_a_crash_of_a_poisoned_stock_engine_shows_the_defect() -> None:
    proof = proof_with(poisoned("stock", error=ILLEGAL_ACCESS), poisoned("patched", SILENT))
    assert (proof.outcome, proof.stock and proof.stock.error) == ("proven", None)
    assert proof.poisoned["stock"] == (f"with poison the engine ends: {ILLEGAL_ACCESS} (log: engine.log)",)


def test_no_effect_on_stock_is_noted_and_no_failure() -> None:
    proof = proof_with(poisoned("stock", SILENT), poisoned("patched", SILENT))
    assert (proof.outcome, proof.poisoned) == ("proven", {"stock": (), "patched": ()})
    assert "the numbers alone prove" in proof.poison_notes["stock"]
    line = "stock, poison: nothing; 3 steps poisoned (at most padded rows 9)"
    assert line in page(proof)
    brief = io.StringIO()
    show(Report("0.20.0", "/somewhere", "a GPU", (proof,)), Console(file=brief, width=200))
    assert f"mamba-padding: {line}" in brief.getvalue(), "without being asked"


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (RUNS["patched"], "the engine ended before it was poisoned"),
        (poisoned("patched", a_pass(error="ValueError: no")), "poison was taken out of a running engine"),
        (poisoned("patched", error="hangs when it is asked again", begun=0), "ended before it was"),
        (poisoned("patched", error="CUDA error: out of memory"), "was not done: CUDA error: out of memory"),
    ],
    ids=["none", "taken out", "before", "no memory"],
)
def test_an_inconclusive_run_with_poison_has_a_note_and_no_entry(end: JobResult, why: str) -> None:
    proof = proof_with(poisoned("stock", WRITTEN), end)
    assert (proof.outcome, set(proof.poisoned)) == ("proven", {"stock"})
    assert why in proof.poison_notes["patched"]
    assert f"patched, poison: {proof.poison_notes['patched']}" in page(proof)


def test_nan_in_padded_rows_of_the_output_counts_for_cases_that_show_nothing_else() -> None:
    seen, right = {"empty-rows": [80.0, 80.0]}, {"empty-rows": [0.0, 80.0]}

    def with_observed(end: JobResult, observed: dict[str, list[float]]) -> JobResult:
        return replace(end, observed=observed)

    def proof(name: str, patched: tuple[PoisonPass, ...]) -> Proof:
        stock = with_observed(poisoned("stock", *PADDED), seen)
        return proof_with(stock, with_observed(poisoned("patched", *patched), right), name)

    shows = proof("triton-mla-padding", (SILENT,))
    assert shows.outcome == "proven"
    assert "padded rows of the model's output are NaN from step 2 on" in shows.poisoned["stock"][0]
    assert proof("triton-mla-padding", PADDED).outcome == "poison is still seen"
    assert proof("triton-mla-padding", (PADDED[0], a_pass(KINDS[0]))).outcome == "proven", "of NaN in a cache"
    elsewhere = proof("mamba-padding", PADDED)
    assert (elsewhere.outcome, elsewhere.poisoned) == ("proven", {"stock": (), "patched": ()})


def test_the_cases_of_what_poison_finds_are_poisoned_and_no_engine_is_added() -> None:
    assert {name for name, case in CASES.items() if case.poisoned} == POISONED
    for name in POISONED:
        jobs = CASES[name].jobs(Path("models"))
        assert [(job.poison, job.poison_last) for job in jobs] == [(False, False), (False, True), (False, True)]
        assert not any(job.poison_last for job in CASES[name].watched_jobs(Path("models")))
