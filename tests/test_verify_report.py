"""Outcomes of two measurements, equality of numbers, and the report of them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from math import inf, nan

import pytest
from rich.console import Console

from vllm_graphfix.fix import Diagnosis, Verdict
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.verify.measurement import Measurement, Watch
from vllm_graphfix.verify.proof import Proof, differing
from vllm_graphfix.verify.report import Report, as_json, show
from vllm_graphfix.verify.trial import trial_of

RIGHT = Measurement("three numbers", (1.0, 2.0, 3.0), (1.0, 2.0, 3.0))
WRONG = replace(RIGHT, graphed=(1.0, 2.5, nan))
CRASH = replace(RIGHT, graphed=(), error="illegal [memory] access")
PROVEN = Proof(
    fix=BY_NAME["mamba-padding"],
    diagnosis=Diagnosis(Verdict.AFFECTED, "affected", known=True),
    stock=WRONG,
    patched=RIGHT,
    failure=None,
    stock_state=("off", "VLLM_GRAPHFIX=off"),
    patched_state=("active", "applied"),
)
NOTHING_PATCHED = replace(
    PROVEN, diagnosis=Diagnosis(Verdict.FIXED, "fixed"), stock=None, patched=None, patched_state=("not-needed", "fixed")
)
NOT_RUN = "attention backend FLASHMLA needs compute capability [9.0]"
SKIPPED = replace(
    PROVEN, stock=None, patched=None, stock_state=("", NOT_RUN), patched_state=("", NOT_RUN), skipped=NOT_RUN
)
INCOMPATIBLE = ("incompatible", "not recognised")
OUTCOMES = [
    (PROVEN, "proven"),
    (replace(PROVEN, stock=CRASH), "proven"),
    (NOTHING_PATCHED, "nothing patched"),
    (replace(NOTHING_PATCHED, diagnosis=Diagnosis(Verdict.ABSENT, "absent")), "nothing patched"),
    (replace(NOTHING_PATCHED, patched_state=("active", "applied")), "active, not not-needed"),
    (
        replace(NOTHING_PATCHED, diagnosis=Diagnosis(Verdict.UNRECOGNISED, "?"), patched_state=INCOMPATIBLE),
        "not decided",
    ),
    (replace(PROVEN, failure="KeyError: 'x'", patched=None), "scenario failed"),
    (replace(PROVEN, stock=None), "scenario failed"),
    (replace(PROVEN, patched=None), "scenario failed"),
    (replace(PROVEN, stock_state=("active", "applied")), "active in the stock process"),
    (replace(PROVEN, patched_state=("waiting", "not imported")), "waiting in the patched process"),
    (replace(PROVEN, patched=replace(RIGHT, eager=(1.0, 2.0, 4.0))), "the references differ"),
    (replace(PROVEN, stock=RIGHT), "defect not shown on stock"),
    (replace(PROVEN, patched=WRONG), "defect still there"),
    (replace(PROVEN, patched=CRASH), "defect still there"),
    (replace(PROVEN, patched=replace(RIGHT, error="ended in the middle")), "defect still there"),
    (replace(PROVEN, patched=replace(RIGHT, graphed=(1.0, 2.0))), "defect still there"),
    (replace(PROVEN, patched=replace(RIGHT, counted={"a": 2}, events={"a": 2, "b": 7})), "proven"),
    (replace(PROVEN, patched=replace(RIGHT, counted={"a": 2}, events={"a": 1})), "miscounted"),
    (replace(PROVEN, patched=replace(RIGHT, counted={"a": 0}, events={"a": 1})), "miscounted"),
    (replace(PROVEN, patched=replace(RIGHT, counted={"a": 2})), "miscounted"),
    (SKIPPED, "skipped"),
]


@pytest.mark.parametrize(("proof", "outcome"), OUTCOMES)
def test_every_outcome(proof: Proof, outcome: str) -> None:
    """Two outcomes hold; each of the others names what does not."""
    assert proof.outcome == outcome
    assert proof.holds == (outcome in ("proven", "nothing patched"))


CAUGHT, SILENT = (Watch(9, 4, 2, "active", graphs="shadow-v1"), Watch(8, 0, None, "active", graphs="shadow-v1"))


@pytest.mark.parametrize(
    ("stock", "patched", "outcome"),
    [
        (CAUGHT, SILENT, "proven"),
        (SILENT, SILENT, "missed by the shadow check"),
        (CAUGHT, CAUGHT, "false alarm of the shadow check"),
        (CAUGHT, replace(SILENT, checks=0), "nothing was checked by the shadow check"),
        (CAUGHT, replace(SILENT, error="KeyError: 'x'"), "the shadow check failed"),
    ],
)
def test_the_shadow_checks_verdict_on_each_kind_of_graphs_is_judged_and_printed(
    stock: Watch, patched: Watch, outcome: str
) -> None:
    stock, patched = (replace(each, graphs="shadow-v2") for each in (stock, patched))
    further = {"stock": replace(CAUGHT, further=(stock,)), "patched": replace(SILENT, further=(patched,))}
    proof = replace(PROVEN, watched=further)
    report = Report("0.21.0", "/somewhere", "CPU double", (proof,))
    assert proof.outcome == outcome
    assert f"  stock, shadow check (shadow-v2): {stock.sentence}\n" in page(report)
    assert f"  patched, shadow check (shadow-v2): {patched.sentence}\n" in page(report)
    expected = as_json(report)["fixes"][0]["shadow"]["stock"]
    assert (expected["graphs"], expected["further"][0]["graphs"]) == ("shadow-v1", "shadow-v2")


@pytest.mark.parametrize(
    ("poisoned", "outcome"),
    [
        ({"stock": ("a block was written to",), "patched": ()}, "proven"),
        ({"stock": (), "patched": ()}, "missed by poison"),
        ({"stock": ("x",), "patched": ("with graphs: 3 of 4 numbers differ",)}, "poison is still seen"),
        ({}, "proven"),
    ],
    ids=["found", "missed", "false alarm", "not tried"],
)
def test_effects_of_poison_are_judged_and_printed(poisoned: dict[str, tuple[str, ...]], outcome: str) -> None:
    proof = replace(PROVEN, poisoned=poisoned)
    report = Report("0.21.0", "/somewhere", "CPU double", (proof,))
    assert proof.outcome == outcome
    assert as_json(report)["fixes"][0]["poison"] == (
        {mode: list(expected) for mode, expected in poisoned.items()} or None
    )
    for mode, expected in poisoned.items():
        assert f"  {mode}, poison: {'; '.join(expected) or 'nothing'}\n" in page(report)


@pytest.mark.parametrize(
    ("proof", "expected"),
    [
        (replace(PROVEN, fix=BY_NAME["idle-rank"], why_unwatched=trial_of("idle-rank").unwatched), True),
        (replace(PROVEN, fix=BY_NAME["idle-rank"], watched={"stock": CAUGHT, "patched": SILENT}), False),
        (replace(SKIPPED, fix=BY_NAME["idle-rank"]), False),
        (PROVEN, False),
    ],
    ids=["not watched", "watched", "not tried", "to be watched"],
)
def test_a_proof_tells_why_the_shadow_check_cannot_see_the_defect(proof: Proof, expected: bool) -> None:
    report = Report("0.21.0", "/somewhere", "CPU double", (proof,))
    reason = trial_of("idle-rank").unwatched
    assert as_json(report)["fixes"][0]["unwatched"] == (reason if expected else None)
    assert ("the shadow check cannot see it: an idle rank's step" in page(report)) == expected


def test_a_report_holds_only_if_every_proof_does() -> None:
    good = Report("0.19.0", "/somewhere", "CPU double", (PROVEN, NOTHING_PATCHED))
    assert good.holds
    assert not replace(good, proofs=(PROVEN, replace(PROVEN, patched=WRONG))).holds


def test_what_was_not_run_makes_a_report_incomplete_and_does_not_make_it_fail() -> None:
    some = Report("0.19.0", "/somewhere", "a GPU", (PROVEN, SKIPPED))
    assert (some.holds, some.complete) == (True, False)
    assert not replace(some, proofs=(replace(PROVEN, patched=WRONG), SKIPPED)).holds
    assert replace(some, proofs=(PROVEN,)).complete


@pytest.mark.parametrize(
    ("reference", "actual", "wrong"),
    [
        ((1.0, 2.0), (1.0, 2.0), 0),
        ((1.0, 2.0), (1.0, 2.5), 1),
        ((1.0, 2.0), (1.0, nan), 1),
        ((1.0, nan), (1.0, nan), 1),
        ((1.0, inf), (1.0, inf), 1),
        ((1.0, 2.0), (1.0,), 2),
        ((1.0,), (1.0, 2.0, 3.0), 3),
        ((1.0, 2.0), (), 2),
    ],
    ids=["equal", "one", "nan", "nan twice", "inf twice", "fewer", "more", "none"],
)
def test_what_is_counted_as_wrong(reference: tuple[float, ...], actual: tuple[float, ...], wrong: int) -> None:
    """A number that is none is never right, and with another count none is."""
    assert differing(reference, actual) == wrong


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_the_tolerance_is_relative_to_the_largest_number_and_to_one_at_least(scale: float) -> None:
    reference = (scale, 0.0)
    unit = max(scale, 1.0)
    assert differing(reference, (scale, 0.9e-6 * unit)) == 0
    assert differing(reference, (scale, 1.1e-6 * unit)) == 1


def test_json_has_every_fix_and_no_number_that_json_has_not() -> None:
    report = Report("0.19.0", "/somewhere", "CPU double", (PROVEN, NOTHING_PATCHED, replace(PROVEN, stock=CRASH)))
    written = json.loads(json.dumps(as_json(report), allow_nan=False))
    assert (written["schema"], written["vllm"], written["device"], written["holds"]) == (
        1,
        "0.19.0",
        "CPU double",
        True,
    )
    proven, nothing, crash = written["fixes"]
    assert proven["further"] == []
    assert (proven["name"], proven["pr"], proven["outcome"]) == ("mamba-padding", 41873, "proven")
    assert (proven["eager"], proven["stock"], proven["patched"]) == ([1, 2, 3], [1, 2.5, None], [1, 2, 3])
    assert (nothing["outcome"], nothing["eager"], nothing["state"]) == ("nothing patched", None, "not-needed")
    assert (crash["stock"], crash["stock_error"]) == ([], "illegal [memory] access")


@pytest.mark.parametrize("proofs", [(PROVEN, SKIPPED), (SKIPPED,)], ids=["some", "all"])
def test_json_never_says_that_everything_holds_if_something_was_not_run(proofs: tuple[Proof, ...]) -> None:
    written = as_json(Report("0.19.0", "/somewhere", "a GPU", proofs))
    assert (written["holds"], written["complete"]) == (False, False)
    skipped = written["fixes"][-1]
    assert (skipped["outcome"], skipped["holds"], skipped["skipped"]) == ("skipped", False, NOT_RUN)
    assert (skipped["eager"], skipped["stock"], skipped["patched"], skipped["failure"]) == (None, None, None, None)


def test_json_has_what_a_verdict_depends_on_and_where_to_look_further() -> None:
    detailed = replace(
        PROVEN,
        stock=replace(WRONG, details=("stock: 1 of 3 tokens",)),
        patched=replace(RIGHT, details=("patched: 3 of 3 tokens", "patched: no tie")),
    )
    report = Report(
        "0.19.0", "/somewhere", "a GPU", (detailed, NOTHING_PATCHED), {"driver": "580.1", "seed": "7"}, "/logs"
    )
    written = json.loads(json.dumps(as_json(report), allow_nan=False))
    assert (written["holds"], written["complete"]) == (True, True)
    assert (written["environment"], written["logs"]) == ({"driver": "580.1", "seed": "7"}, "/logs")
    assert written["fixes"][0]["details"] == ["stock: 1 of 3 tokens", "patched: 3 of 3 tokens", "patched: no tie"]
    assert (written["fixes"][1]["details"], written["fixes"][1]["skipped"]) == ([], None)


def page(report: Report, *, verbose: bool = True) -> str:
    written = io.StringIO()
    show(report, Console(file=written, width=160), verbose=verbose)
    return written.getvalue()


def test_people_see_the_numbers_how_many_are_wrong_and_the_device() -> None:
    text = page(Report(None, "/some [where]", "CPU double", (PROVEN, NOTHING_PATCHED, replace(PROVEN, stock=CRASH))))
    assert "2 of 2 defects shown on stock, all gone with the fixes (CPU double).\n" in text
    assert "(version unknown) in /some [where]\n" in text
    assert "2 of 3 wrong" in text
    assert "equal" in text
    assert "illegal [memory] access" in text
    assert "mamba-padding: three numbers" in text


def test_what_is_in_order_is_a_row_and_no_more_without_asking() -> None:
    detailed = replace(PROVEN, stock=replace(WRONG, details=("stock: the first at token [4]",)))
    text = page(Report("0.19.0", "/somewhere", "CPU double", (detailed, NOTHING_PATCHED)), verbose=False)
    assert "the first at token" not in text
    assert "three numbers" not in text
    assert "not in this vLLM, nothing patched: 1 (--verbose)" in text
    failed = replace(PROVEN, patched=None, failure="KeyError: 'x'")
    assert "KeyError" in page(Report("0.19.0", "/somewhere", "CPU double", (failed,)), verbose=False)


def test_people_see_why_a_proof_does_not_hold() -> None:
    failed = replace(PROVEN, patched=None, failure="KeyError: 'x' (in the patched process; log: /tmp/it.log)")
    lost = replace(PROVEN, patched_state=("conflict", "was replaced"))
    text = page(Report("0.19.0", "/somewhere", "CPU double", (failed, lost)))
    assert "! mamba-padding: scenario failed: KeyError: 'x' (in the patched process; log: /tmp/it.log)" in text
    assert "! mamba-padding: conflict in the patched process: was replaced" in text


def test_people_and_machines_see_what_was_counted_of_what_had_to_be() -> None:
    wrong = replace(PROVEN, patched=replace(RIGHT, counted={"a": 2, "b": 0}, events={"a": 1, "b": 0, "c": 5}))
    report = Report("0.18.1", "a tree", "CPU double", (wrong,))
    (fix,) = as_json(report)["fixes"]
    assert fix["counted"] == {"a": {"expected": 2, "counted": 1}, "b": {"expected": 0, "counted": 0}}
    assert as_json(Report("0.18.1", "a tree", "CPU double", (PROVEN,)))["fixes"][0]["counted"] is None
    console = Console(file=io.StringIO(), width=200)
    show(report, console)
    assert isinstance(console.file, io.StringIO)
    assert "patched, counted: a 1, 2 expected" in console.file.getvalue()


def test_people_see_what_was_not_run_and_why() -> None:
    text = page(Report("0.19.0", "/somewhere", "a GPU", (PROVEN, SKIPPED)))
    assert "! mamba-padding: skipped: attention backend FLASHMLA needs compute capability [9.0]" in text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("mamba-padding  ")] == [
        "proven",
        "skipped",
    ]


def test_people_see_the_machine_the_details_and_the_logs() -> None:
    detailed = replace(PROVEN, stock=replace(WRONG, details=("stock: the first at token [4]",)))
    report = Report("0.19.0", "/somewhere", "GPU [x]", (detailed,), {"driver": "580.1 [open]"}, "/logs/[x]")
    text = page(report)
    assert text.startswith("1 of 1 defects shown on stock, gone with the fixes (GPU [x]).\n")
    assert "driver 580.1 [open]" in text
    assert "  stock: the first at token [4]\n" in text
    assert "Engine logs: /logs/[x]\n" in text


def test_a_verdict_that_needs_no_reason_is_a_line_without_one() -> None:
    text = page(Report("0.19.0", "/somewhere", "a GPU", (replace(PROVEN, stock=RIGHT, patched_state=("active", "")),)))
    assert "! mamba-padding: defect not shown on stock\n" in text
