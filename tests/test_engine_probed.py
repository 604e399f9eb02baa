"""`verify` on engines: what it concludes where answers do not show the defect, from what a probe saw in the engines."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from engine_proofs import (
    CASES,
    ILLEGAL_ACCESS,
    RIGHT,
    RUNS,
    WRONG,
    came_to_its_end,
    failed,
    observing,
    page,
    proof_of,
    result_of,
    with_,
)
from trial_rows import observed_of
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.verify.gpu_proof import measure
from vllm_graphfix.verify.proof import Proof

OBSERVATIONS = {name: observed for name in BY_NAME if (observed := observed_of(name)) is not None}
"""The values of the probes on stock, and with the fix."""


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_what_a_probe_saw_proves_it_where_tokens_do_not_show_it(name: str) -> None:
    proof = observing(name, *OBSERVATIONS[name])
    assert proof.outcome == "proven"
    assert proof.stock is not None
    assert proof.stock.graphed[-1] == proof.stock.eager[-1] == 7.0, "the tokens are equal"
    assert proof.stock.numbers.endswith("; tokens before corruption, of 7")


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_wrong_tokens_or_a_crash_that_another_defect_explains_prove_nothing(name: str, crash: bool) -> None:
    """On stock all fixes are off: what is fixed by another one must not pass for the proof of this one."""
    _, right = OBSERVATIONS[name]
    observed = {CASES[name].probes[0]: right}
    stock = (
        failed("stock", ILLEGAL_ACCESS, observed)
        if crash
        else came_to_its_end("stock", result_of(WRONG, "off", observed=observed))
    )
    proof = proof_of(name, stock=stock, **with_(patched=result_of(RIGHT, "active", observed=observed)))
    assert proof.outcome == "defect not shown on stock"


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_what_a_probe_saw_does_not_excuse_wrong_tokens_with_the_fix(name: str) -> None:
    assert observing(name, *OBSERVATIONS[name], patched=WRONG).outcome == "defect still there"


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_a_probe_that_sees_on_stock_what_is_right_proves_nothing(name: str) -> None:
    _, right = OBSERVATIONS[name]
    assert observing(name, right, right).outcome == "defect not shown on stock"


@pytest.mark.parametrize(
    ("name", "patched"),
    [
        ("draft-prefill-state", [0.0, 4.0]),
        ("draft-prefill-state", [3.0, 4.0]),
        ("draft-decode-mode", [1.0, 90.0]),
        ("flashmla-padding", [0.0, 0.0]),
        ("flashmla-padding", [1.0, -1.0]),
        ("indexer-padding", [-1.0]),
        ("triton-mla-padding", [1.0, 80.0]),
        ("workspace-growth", [8.0, 1.0]),
        ("idle-rank", [1.0, 900.0]),
    ],
)
def test_a_probe_that_sees_the_defect_with_the_fix_does_not_prove_it(name: str, patched: list[float]) -> None:
    assert observing(name, OBSERVATIONS[name][0], patched).outcome == "defect still there"


@pytest.mark.parametrize(
    ("name", "nothing", "why"),
    [
        ("draft-prefill-state", [0.0, 0.0], "no full graph of the draft's prefill was captured"),
        ("draft-decode-mode", [0.0, 0.0], "no draft was decoded"),
        ("flashmla-padding", [inf, inf], "dense fp8 FlashMLA was not used"),
        ("indexer-padding", [inf], "no decode batch was prepared for the sparse indexer"),
        ("idle-rank", [0.0, 0.0], "no rank ran a step without work"),
        ("idle-rank", None, "no rank ran a step without work"),
        ("draft-prefill-state", None, "no full graph of the draft's prefill was captured"),
        ("draft-decode-mode", None, "no draft was decoded"),
        ("flashmla-padding", None, "dense fp8 FlashMLA was not used"),
        ("indexer-padding", None, "no decode batch was prepared for the sparse indexer"),
        ("triton-mla-padding", [0.0, 0.0], "no row of length 0 reached Triton's MLA decode"),
        ("triton-mla-padding", None, "no row of length 0 reached Triton's MLA decode"),
        ("workspace-growth", [0.0, 0.0], "no workspace was outgrown"),
        ("workspace-growth", None, "no workspace was outgrown"),
    ],
)
@pytest.mark.parametrize("mode", ["stock", "patched"])
def test_a_probe_that_saw_nothing_proves_nothing(mode: str, name: str, nothing: list[float] | None, why: str) -> None:
    stock, patched = OBSERVATIONS[name]
    proof = observing(name, nothing, patched) if mode == "stock" else observing(name, stock, nothing)
    assert (proof.outcome, proof.failure) == ("scenario failed", f"{mode}: {why}")


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_a_crash_on_stock_proves_it_before_or_after_the_probe_saw_something(name: str) -> None:
    stock, patched = OBSERVATIONS[name]
    probe = CASES[name].probes[0]
    for observed in ({}, {probe: stock}):
        proof = proof_of(
            name,
            stock=failed("stock", ILLEGAL_ACCESS, observed),
            **with_(patched=result_of(RIGHT, "active", observed={probe: patched})),
        )
        assert proof.outcome == "proven"
        assert "inf" not in page(proof)


def test_the_length_that_a_row_may_have_is_any_from_one_on() -> None:
    """A workload whose shortest batch is longer is as right; a block other than the first is, too."""
    assert observing("flashmla-padding", [0.0, -1.0], [5.0, 3.0]).outcome == "proven"


HANGS = "did not finish in 300 s"


def hanging(on_stock: list[float] | None, **patched: Any) -> Proof:
    """The proof of a stock engine that hangs after its probe has seen that."""
    seen = {} if on_stock is None else {"indexer-lengths": on_stock}
    runs = with_(patched=result_of(RIGHT, "active", observed={"indexer-lengths": [0.0]}))
    return proof_of("indexer-padding", **{**runs, "stock": failed("stock", HANGS, seen), **patched})


def test_a_hang_on_stock_proves_it_after_its_cause_was_seen() -> None:
    proof = hanging([-1.0])
    assert proof.outcome == "proven"
    assert proof.stock is not None
    assert (proof.stock.error, proof.stock.graphed) == (HANGS, (-1.0,))


@pytest.mark.parametrize("on_stock", [None, [inf], [0.0], [1.0]], ids=str)
def test_a_hang_on_stock_without_its_cause_is_a_machine_that_is_slow(on_stock: list[float] | None) -> None:
    proof = hanging(on_stock)
    assert (proof.outcome, proof.failure) == ("scenario failed", f"stock: {HANGS} (log: engine.log)")


@pytest.mark.parametrize(
    ("observed", "outcome"),
    [([-1.0], "defect still there"), ([0.0], "scenario failed")],
    ids=["the defect's", "another"],
)
def test_a_hang_with_the_fix_is_no_proof(observed: list[float], outcome: str) -> None:
    patched = failed("patched", HANGS, {"indexer-lengths": observed})
    assert hanging([-1.0], patched=patched).outcome == outcome


def test_a_hang_is_no_other_defects_sign() -> None:
    stock = failed("stock", HANGS, {"padded-rows": [0.0, -1.0], "indexer-lengths": [-1.0]})
    observed = {"padded-rows": [1.0, 0.0]}
    proof = proof_of("flashmla-padding", stock=stock, **with_(patched=result_of(RIGHT, "active", observed=observed)))
    assert proof.outcome == "scenario failed"


def test_equal_draft_tokens_are_reported() -> None:
    eager = result_of(RIGHT, "off", again=RIGHT, observed={"drafts": [1.0, 11.0, 12.0]})
    observed = {"planners-in-draft-graphs": [0.0, 2.0], "drafts": [1.0, 11.0, 99.0]}
    runs = RUNS | with_(eager=eager, stock=result_of(RIGHT, "off", observed=observed))
    assert measure(CASES["draft-prefill-state"], runs, "stock").details == (
        "stock: FlashMLA's planner is recorded in 0 of 2 full graphs of the draft's prefill",
        (
            "stock: 7 of 7 tokens compared and equal to eager's; log-probabilities up to 0 apart (eager against "
            "itself 0; up to 0.062 counts as rounding)"
        ),
        "stock: draft tokens equal to eager's up to number 2 of 3",
    )
