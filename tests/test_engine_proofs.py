"""`verify` on engines: what it concludes from the answers of three of them, or from the error with which one ended."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan

import pytest

from engine_proofs import (
    AFFECTED,
    CASES,
    ILLEGAL_ACCESS,
    LOG,
    RIGHT,
    RUNS,
    WRONG,
    answer,
    came_to_its_end,
    failed,
    observing,
    page,
    proof_of,
    result_of,
    with_,
)
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.verify.codec import from_builtins, to_builtins
from vllm_graphfix.verify.comparison import Answer, compare, comparison_lines
from vllm_graphfix.verify.engine.job import EngineResult
from vllm_graphfix.verify.engine.processes import JobResult
from vllm_graphfix.verify.gpu_proof import prove
from vllm_graphfix.verify.proof import Proof


def test_wrong_tokens_on_stock_and_eagers_with_the_fix_prove_it() -> None:
    proof = proof_of("capture-state")
    assert (proof.outcome, proof.failure, proof.skipped) == ("proven", None, None)
    assert proof.stock is not None
    assert proof.patched is not None
    assert (proof.stock.numbers, proof.stock.eager) == ("tokens before corruption, of 7", (7.0,))
    assert (proof.stock.graphed, proof.patched.graphed) == ((4.0,), (7.0,))
    assert proof.stock.details[1] == (
        "stock: corrupt prompts: 1 of 2, the first at token 1 of prompt 0, 9 instead of 2; eager's top two "
        "are 2.9 apart there"
    )


def checked(checks: int, mismatches: int = 0, state: str = "active") -> JobResult:
    """An engine in which every replay was checked."""
    counted = {"checks": checks, "mismatches": mismatches} | ({"first mismatch in check": 3} if mismatches else {})
    observed = {f"shadow: {name}": [float(count)] for name, count in counted.items()}
    return came_to_its_end(
        "stock", replace(result_of(WRONG, "off", observed=observed), states={"0": {"shadow": state}})
    )


@pytest.mark.parametrize(
    ("stock", "patched", "outcome", "line"),
    [
        (checked(192, 190), checked(192), "proven", "190 of 192 replays were found wrong, the first one in check 3"),
        (failed("stock", ILLEGAL_ACCESS), checked(192), "proven", f"the engine ended in {ILLEGAL_ACCESS}"),
        (
            checked(0, state="incompatible"),
            checked(0, state="not-needed"),
            "proven",
            "nothing was checked (incompatible)",
        ),
        (checked(0), checked(192), "nothing was checked by the shadow check", "nothing was checked (active)"),
        (checked(192, 190), checked(0), "nothing was checked by the shadow check", "190 of 192"),
        (checked(192, 190), checked(9, state="failed"), "the shadow check failed", "190 of 192"),
        (checked(192, 190), failed("patched", ILLEGAL_ACCESS), "the shadow check failed", "190 of 192"),
        (checked(129), checked(192), "missed by the shadow check", "no replay of 129 was found wrong"),
        (checked(192, 190), checked(192, 1), "false alarm of the shadow check", "190 of 192"),
    ],
)
def test_the_shadow_check_must_catch_the_defect_on_stock_and_nothing_with_the_fix(
    stock: JobResult, patched: JobResult, outcome: str, line: str
) -> None:
    watched = {"stock": stock, "patched": patched}
    proof = prove(BY_NAME["capture-state"], AFFECTED, CASES["capture-state"], RUNS, watched=watched)
    assert (proof.outcome, proof.holds) == (outcome, outcome == "proven")
    assert f"stock, shadow check: {line}" in page(proof)
    assert "patched, shadow check: " in page(proof)


CRASHES = [
    ILLEGAL_ACCESS,
    "RuntimeError: CUDA error: unspecified launch failure",
    "CUDA error: device-side assert triggered",
    "RuntimeError: CUDA error (/src/splitkv_mla.cu:73): invalid configuration argument",
    "RuntimeError: CUDA error: operation not permitted when stream is capturing",
    "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    "ValueError: kv_indptr[3] - kv_indptr[2] should be non-negative, got -4",
    "RuntimeError: CUDA error: misaligned address",
    "RuntimeError: CUDA error: operation not supported on global/shared address space",
]
OTHER_ERRORS = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB",
    "torch.AcceleratorError: CUDA error: out of memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "torch.AcceleratorError: CUDA error: operation not supported",
    "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
    "ImportError: libcudart.so.13: cannot open shared object file: No such file or directory",
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    "AssertionError",
    "did not finish in 600 s",
    "ended with signal 9",
    "was not started",
]


@pytest.mark.parametrize("error", CRASHES)
def test_a_crash_that_the_defect_leads_to_on_stock_proves_it(error: str) -> None:
    proof = proof_of("capture-state", stock=failed("stock", error))
    assert (proof.outcome, proof.stock and proof.stock.error) == ("proven", error)


@pytest.mark.parametrize("error", OTHER_ERRORS)
@pytest.mark.parametrize("mode", ["stock", "patched"])
def test_any_other_error_proves_nothing(mode: str, error: str) -> None:
    proof = proof_of("capture-state", **{mode: failed(mode, error)})
    assert (proof.outcome, proof.failure) == ("scenario failed", f"{mode}: {error} (log: {LOG})")
    assert (proof.stock, proof.patched) == (None, None)


@pytest.mark.parametrize("error", [ILLEGAL_ACCESS, OTHER_ERRORS[0]])
def test_a_reference_that_fails_proves_nothing(error: str) -> None:
    proof = proof_of("capture-state", eager=failed("eager", error))
    assert (proof.outcome, proof.failure) == ("scenario failed", f"eager: {error} (log: {LOG})")


def test_a_reference_that_fails_as_everything_does_is_what_is_named() -> None:
    proof = proof_of("capture-state", **{mode: failed(mode, f"{mode} failed") for mode in RUNS})
    assert (proof.failure or "").startswith("eager: eager failed")


@pytest.mark.parametrize("number", [nan, -inf])
def test_a_reference_without_numbers_proves_nothing(number: float) -> None:
    """Everything would differ from it, with the fix and without."""
    broken = (Answer((1, 2, 3, 4), ({1: number},) * 4), RIGHT[1])
    proof = proof_of("capture-state", **with_(eager=result_of(broken, "off", again=broken)))
    assert (proof.outcome, proof.failure) == ("scenario failed", "eager: some log-probabilities are not finite")


def test_a_crash_with_the_fix_is_the_defect_that_is_still_there() -> None:
    proof = proof_of("capture-state", patched=failed("patched", ILLEGAL_ACCESS))
    assert proof.outcome == "defect still there"
    assert ILLEGAL_ACCESS in page(proof)


def test_right_tokens_on_stock_prove_nothing() -> None:
    proof = proof_of("capture-state", **with_(stock=result_of(RIGHT, "off")))
    assert proof.outcome == "defect not shown on stock"


def test_wrong_tokens_with_the_fix_are_the_defect_that_is_still_there() -> None:
    assert proof_of("capture-state", **with_(patched=result_of(WRONG, "active"))).outcome == "defect still there"


def test_a_tie_with_the_fix_is_rounding_and_a_tie_on_stock_no_defect() -> None:
    close = Answer((1, 2), ({1: -0.1}, {2: -0.70, 3: -0.71}))
    tied = Answer((1, 3), ({1: -0.1}, {3: -0.70, 2: -0.71}))
    wrong = answer(8, 9)
    runs = with_(
        eager=result_of((close,), "off", again=(close,)),
        stock=result_of((wrong,), "off"),
        patched=result_of((tied,), "active"),
    )
    proof = proof_of("capture-state", **runs)
    assert proof.outcome == "proven"
    assert proof.patched is not None
    assert proof.patched.details[-1] == "patched: prompts that diverge at a tie: 1"
    assert (
        proof_of("capture-state", **runs | with_(stock=result_of((tied,), "off"))).outcome
        == "defect not shown on stock"
    )


def test_the_noise_of_eager_is_allowed_to_graphs() -> None:
    """Log-probabilities that move by 0.1 from one eager pass to the other; the tokens stay."""
    again = tuple(
        Answer(each.tokens, tuple({t: v - 0.1 for t, v in top.items()} for top in each.top)) for each in RIGHT
    )
    moved = tuple(
        Answer(each.tokens, tuple({t: v + 0.1 for t, v in top.items()} for top in each.top)) for each in RIGHT
    )
    patched = with_(patched=result_of(moved, "active"))
    assert proof_of("capture-state", **patched).outcome == "defect still there"
    assert proof_of("capture-state", **patched, **with_(eager=result_of(RIGHT, "off", again=again))).outcome == "proven"


@pytest.mark.parametrize(
    ("mode", "states", "outcome"),
    [
        ("patched", ("waiting",), "waiting in the patched process"),
        ("patched", ("active", "off"), "active and off in the patched process"),
        ("patched", ("active", "active"), "proven"),
        ("patched", (), " in the patched process"),
        ("stock", ("active",), "active in the stock process"),
        ("stock", ("off", "active"), "active and off in the stock process"),
    ],
)
def test_the_fix_must_be_on_where_it_should_and_off_where_it_should_on_every_rank(
    mode: str, states: tuple[str, ...], outcome: str
) -> None:
    answers = RIGHT if mode == "patched" else WRONG
    assert proof_of("capture-state", **with_(**{mode: result_of(answers, *states)})).outcome == outcome


def test_a_fix_that_an_engine_does_not_know_is_not_active() -> None:
    unknown = replace(result_of(RIGHT, "active"), states={"0": {"mamba-padding": "active"}})
    assert proof_of("capture-state", **with_(patched=unknown)).outcome == "unknown in the patched process"


def test_answers_that_part_at_ties_at_once_prove_nothing() -> None:
    """Nothing is said of what follows a tie."""
    tied = Answer((2, 3, 4), ({2: -0.70, 1: -0.71}, {3: -0.1}, {4: -0.1}))
    close = Answer((1, 2, 3), ({1: -0.70, 2: -0.71}, {2: -0.1}, {3: -0.1}))
    runs = with_(
        eager=result_of((close,), "off", again=(close,)),
        stock=result_of((answer(8, 9, 9),), "off"),
        patched=result_of((tied,), "active"),
    )
    proof = proof_of("capture-state", **runs)
    assert proof.outcome == "scenario failed"
    assert proof.failure == "patched: answers diverge early at ties, so only 0 of 3 tokens could be compared"


@pytest.mark.parametrize("mode", ["stock", "patched"])
def test_an_engine_that_used_no_graphs_proves_nothing(mode: str) -> None:
    """It equals eager because it is."""
    ran = RUNS[mode].result
    assert ran is not None
    proof = proof_of("capture-state", **with_(**{mode: replace(ran, cudagraph_mode="NONE")}))
    assert (proof.outcome, proof.failure) == ("scenario failed", f"{mode}: the engine used no graphs")


def test_an_eager_engine_that_is_far_from_itself_proves_nothing() -> None:
    again = tuple(
        Answer(each.tokens, tuple({t: v - 0.3 for t, v in top.items()} for top in each.top)) for each in RIGHT
    )
    proof = proof_of("capture-state", **with_(eager=result_of(RIGHT, "off", again=again)))
    assert proof.outcome == "scenario failed"
    assert "differ in log-probability by up to 0.3" in (proof.failure or "")


def test_corruption_of_log_probabilities_alone_is_reported_as_such() -> None:
    drifted = Answer((1, 2), ({1: -0.1, 7: -3.0}, {2: -1.5, 7: -3.0}))
    (_, line) = comparison_lines(compare([answer(1, 2)], [drifted], 0.0))
    assert line == (
        "corrupt prompts: 1 of 1, the first at token 1 of prompt 0, in its log-probability; eager's top two "
        "are 2.9 apart there"
    )


def test_a_skipped_fix_is_not_proven() -> None:
    proof = prove(BY_NAME["capture-state"], AFFECTED, None, None, "no GPU for it")
    assert (proof.outcome, proof.holds, proof.skipped) == ("skipped", False, "no GPU for it")


@pytest.mark.parametrize(
    "what", [result_of(RIGHT, "off", "active", again=WRONG, observed={"drafts": [1.0]}), result_of((), "off")]
)
def test_a_result_is_read_as_it_was_written(what: EngineResult) -> None:
    assert from_builtins(json.loads(json.dumps(to_builtins(what))), EngineResult) == what


@pytest.mark.parametrize(
    ("proof", "line"),
    [
        (proof_of("capture-state", eager=failed("eager", "E: x")), "scenario failed: eager: E: x (log: engine.log)"),
        (proof_of("capture-state", patched=failed("patched", ILLEGAL_ACCESS)), f"defect still there: {ILLEGAL_ACCESS}"),
        (proof_of("capture-state", **with_(patched=result_of(WRONG, "active"))), "defect still there"),
        (proof_of("capture-state", **with_(stock=result_of(RIGHT, "off"))), "defect not shown on stock"),
        (proof_of("capture-state", **with_(patched=result_of(RIGHT, "off"))), "off in the patched process"),
        (observing("flashmla-padding", None, None), "scenario failed: stock: dense fp8 FlashMLA was not used"),
    ],
)
def test_people_get_a_line_for_whatever_went_wrong(proof: Proof, line: str) -> None:
    assert f"! {proof.fix.name}: {line}\n" in page(proof)
