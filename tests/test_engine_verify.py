"""`verify` on engines: what it concludes from how three of them ended, and the whole of it with a double of vLLM."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import engine_double
import pytest
from edited import edited
from rich.console import Console
from stock import release_root
from test_engine_device import H200
from test_engine_processes import SOON, all_end, started
from typer.testing import CliRunner

from vllm_graphfix.cli import app
from vllm_graphfix.fix import Diagnosis, Verdict
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.verify.comparison import Answer, compare
from vllm_graphfix.verify.engine import device as devices
from vllm_graphfix.verify.engine import verify as engine
from vllm_graphfix.verify.engine.cases import CASES
from vllm_graphfix.verify.engine.device import Device
from vllm_graphfix.verify.engine.job import EAGER, GRAPHS, Job, Said, from_json, to_json
from vllm_graphfix.verify.engine.processes import Ended
from vllm_graphfix.verify.engine.verify import described, measure, prove
from vllm_graphfix.verify.report import Proof, Report, show

AFFECTED = Diagnosis(Verdict.AFFECTED, "affected")
LOG = Path("engine.log")
ILLEGAL_ACCESS = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"


def answer(*tokens: int) -> Answer:
    return Answer(tokens, tuple({token: -0.1, token + 1: -3.0} for token in tokens))


RIGHT = (answer(1, 2, 3, 4), answer(5, 6, 7))
WRONG = (answer(1, 9, 9, 9), answer(5, 6, 7))


def said(
    answers: tuple[Answer, ...],
    *states: str,
    again: tuple[Answer, ...] | None = None,
    observed: dict[str, list[float]] | None = None,
) -> Said:
    return Said(
        passes=(answers,) if again is None else (answers, again),
        states={str(rank): dict.fromkeys(BY_NAME, state) for rank, state in enumerate(states)},
        observed=observed or {},
        drafts=None,
        facts={},
        start_seconds=1.0,
    )


def came_to_its_end(mode: str, what: Said) -> Ended:
    return Ended(Job(mode, GRAPHS), what, None, LOG, 1.0, what.observed)


def failed(mode: str, error: str, observed: dict[str, list[float]] | None = None) -> Ended:
    return Ended(Job(mode, GRAPHS), None, error, LOG, 1.0, observed or {})


RUNS = {
    "eager": came_to_its_end("eager", said(RIGHT, "off", again=RIGHT)),
    "stock": came_to_its_end("stock", said(WRONG, "off")),
    "patched": came_to_its_end("patched", said(RIGHT, "active")),
}
"""Of a fix whose defect shows in tokens."""


def proof_of(name: str, **runs: Ended) -> Proof:
    return prove(BY_NAME[name], AFFECTED, CASES[name], RUNS | runs)


def with_(**changes: Any) -> dict[str, Ended]:
    return {mode: came_to_its_end(mode, what) for mode, what in changes.items()}


def test_wrong_tokens_on_stock_and_eagers_with_the_fix_prove_it() -> None:
    proof = proof_of("capture-state")
    assert (proof.outcome, proof.failure, proof.skipped) == ("proven", None, None)
    assert proof.stock is not None
    assert proof.patched is not None
    assert (proof.stock.numbers, proof.stock.eager) == ("tokens before corruption, of 7", (7.0,))
    assert (proof.stock.graphed, proof.patched.graphed) == ((4.0,), (7.0,))
    assert proof.stock.details[1] == (
        "stock: corrupt prompts: 1 of 2, the first at token 1 of prompt 0, 9 instead of 2; eager's two best are 2.9 apart there"
    )


CRASHES = [
    ILLEGAL_ACCESS,
    "RuntimeError: CUDA error: unspecified launch failure",
    "CUDA error: device-side assert triggered",
    "RuntimeError: CUDA error (/src/splitkv_mla.cu:73): invalid configuration argument",
    "RuntimeError: CUDA error: operation not permitted when stream is capturing",
    "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    "ValueError: kv_indptr[3] - kv_indptr[2] should be non-negative, got -4",
    "RuntimeError: CUDA error: misaligned address",
]
OTHER_ERRORS = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB",
    "torch.AcceleratorError: CUDA error: out of memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
    "ImportError: libcudart.so.13: cannot open shared object file: No such file or directory",
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    "AssertionError",
    "did not come to its end in 600 s",
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
    proof = proof_of("capture-state", **with_(eager=said(broken, "off", again=broken)))
    assert (proof.outcome, proof.failure) == ("scenario failed", "eager: log-probabilities that are not finite numbers")


def test_a_crash_with_the_fix_is_the_defect_that_is_still_there() -> None:
    proof = proof_of("capture-state", patched=failed("patched", ILLEGAL_ACCESS))
    assert proof.outcome == "defect still there"
    assert ILLEGAL_ACCESS in shown(proof)


def test_right_tokens_on_stock_prove_nothing() -> None:
    proof = proof_of("capture-state", **with_(stock=said(RIGHT, "off")))
    assert proof.outcome == "defect not shown on stock"


def test_wrong_tokens_with_the_fix_are_the_defect_that_is_still_there() -> None:
    assert proof_of("capture-state", **with_(patched=said(WRONG, "active"))).outcome == "defect still there"


def test_a_tie_with_the_fix_is_rounding_and_a_tie_on_stock_no_defect() -> None:
    close = Answer((1, 2), ({1: -0.1}, {2: -0.70, 3: -0.71}))
    tied = Answer((1, 3), ({1: -0.1}, {3: -0.70, 2: -0.71}))
    wrong = answer(8, 9)
    runs = with_(
        eager=said((close,), "off", again=(close,)), stock=said((wrong,), "off"), patched=said((tied,), "active")
    )
    proof = proof_of("capture-state", **runs)
    assert proof.outcome == "proven"
    assert proof.patched is not None
    assert proof.patched.details[-1] == "patched: prompts that go apart at a tie: 1"
    assert proof_of("capture-state", **runs | with_(stock=said((tied,), "off"))).outcome == "defect not shown on stock"


def test_the_noise_of_eager_is_allowed_to_graphs() -> None:
    """Log-probabilities that move by 0.1 from one eager pass to the other; the tokens stay."""
    again = tuple(
        Answer(each.tokens, tuple({t: v - 0.1 for t, v in top.items()} for top in each.top)) for each in RIGHT
    )
    moved = tuple(
        Answer(each.tokens, tuple({t: v + 0.1 for t, v in top.items()} for top in each.top)) for each in RIGHT
    )
    patched = with_(patched=said(moved, "active"))
    assert proof_of("capture-state", **patched).outcome == "defect still there"
    assert proof_of("capture-state", **patched, **with_(eager=said(RIGHT, "off", again=again))).outcome == "proven"


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
    assert proof_of("capture-state", **with_(**{mode: said(answers, *states)})).outcome == outcome


def test_a_fix_that_an_engine_does_not_know_is_not_active() -> None:
    unknown = replace(said(RIGHT, "active"), states={"0": {"mamba-padding": "active"}})
    assert proof_of("capture-state", **with_(patched=unknown)).outcome == "unknown in the patched process"


def observing(
    name: str, on_stock: list[float] | None, with_the_fix: list[float] | None, patched: tuple[Answer, ...] = RIGHT
) -> Proof:
    """The proof of *name*, whose probe has seen that in each engine; stock's tokens are eager's."""
    probe = CASES[name].probes[0]
    seen, seen_with_the_fix = ({} if it is None else {probe: it} for it in (on_stock, with_the_fix))
    return proof_of(
        name,
        **with_(stock=said(RIGHT, "off", observed=seen), patched=said(patched, "active", observed=seen_with_the_fix)),
    )


OBSERVATIONS = {
    "draft-prefill-state": ([0.0, 4.0], [4.0, 4.0]),
    "draft-decode-mode": ([30.0, 90.0], [0.0, 90.0]),
    "flashmla-padding": ([0.0, -1.0], [1.0, 0.0]),
    "indexer-padding": ([-1.0], [0.0]),
    "triton-mla-padding": ([80.0, 80.0], [0.0, 80.0]),
    "workspace-growth": ([4096.0, 1.0], [0.0, 1.0]),
    "idle-rank": ([4.0, 900.0], [0.0, 900.0]),
}
"""What the probes see on stock, and with the fix."""


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_what_a_probe_saw_proves_it_where_tokens_do_not_show_it(name: str) -> None:
    proof = observing(name, *OBSERVATIONS[name])
    assert proof.outcome == "proven"
    assert proof.stock is not None
    assert proof.stock.graphed[-1] == proof.stock.eager[-1] == 7.0, "the tokens are equal"
    assert proof.stock.numbers.endswith("; tokens before corruption, of 7")


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_wrong_tokens_on_stock_or_a_crash_that_another_defect_may_have_made_do_not_prove_it(
    name: str, crash: bool
) -> None:
    """On stock all fixes are off: what is fixed by another one must not pass for the proof of this one."""
    _, right = OBSERVATIONS[name]
    observed = {CASES[name].probes[0]: right}
    stock = (
        failed("stock", ILLEGAL_ACCESS, observed)
        if crash
        else came_to_its_end("stock", said(WRONG, "off", observed=observed))
    )
    proof = proof_of(name, stock=stock, **with_(patched=said(RIGHT, "active", observed=observed)))
    assert proof.outcome == "defect not shown on stock"


def test_answers_that_part_at_ties_at_once_prove_nothing() -> None:
    """Nothing is said of what follows a tie."""
    tied = Answer((2, 3, 4), ({2: -0.70, 1: -0.71}, {3: -0.1}, {4: -0.1}))
    close = Answer((1, 2, 3), ({1: -0.70, 2: -0.71}, {2: -0.1}, {3: -0.1}))
    runs = with_(
        eager=said((close,), "off", again=(close,)),
        stock=said((answer(8, 9, 9),), "off"),
        patched=said((tied,), "active"),
    )
    proof = proof_of("capture-state", **runs)
    assert proof.outcome == "scenario failed"
    assert proof.failure == "patched: answers part early at ties, 0 of 3 tokens were compared"


@pytest.mark.parametrize("mode", ["stock", "patched"])
def test_an_engine_that_used_no_graphs_proves_nothing(mode: str) -> None:
    """It equals eager because it is."""
    ran = RUNS[mode].said
    assert ran is not None
    proof = proof_of("capture-state", **with_(**{mode: replace(ran, cudagraph_mode="NONE")}))
    assert (proof.outcome, proof.failure) == ("scenario failed", f"{mode}: the engine used no graphs")


def test_an_eager_engine_that_is_far_from_itself_proves_nothing() -> None:
    again = tuple(
        Answer(each.tokens, tuple({t: v - 0.3 for t, v in top.items()} for top in each.top)) for each in RIGHT
    )
    proof = proof_of("capture-state", **with_(eager=said(RIGHT, "off", again=again)))
    assert proof.outcome == "scenario failed"
    assert "differ from themselves by up to 0.3" in (proof.failure or "")


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
        ("idle-rank", [0.0, 0.0], "no step without work was made"),
        ("idle-rank", None, "no step without work was made"),
        ("draft-prefill-state", None, "no full graph of the draft's prefill was captured"),
        ("draft-decode-mode", None, "no draft was decoded"),
        ("flashmla-padding", None, "dense fp8 FlashMLA was not used"),
        ("indexer-padding", None, "no decode batch was prepared for the sparse indexer"),
        ("triton-mla-padding", [0.0, 0.0], "no row of length 0 came to Triton's MLA decode"),
        ("triton-mla-padding", None, "no row of length 0 came to Triton's MLA decode"),
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
            **with_(patched=said(RIGHT, "active", observed={probe: patched})),
        )
        assert proof.outcome == "proven"
        assert "inf" not in shown(proof)


def test_the_length_that_a_row_may_have_is_any_from_one_on() -> None:
    """A workload whose shortest batch is longer is as right; a block other than the first is, too."""
    assert observing("flashmla-padding", [0.0, -1.0], [5.0, 3.0]).outcome == "proven"


HANGS = "did not come to its end in 300 s"


def hanging(on_stock: list[float] | None, **patched: Any) -> Proof:
    """The proof of a stock engine that hangs after its probe has seen that."""
    seen = {} if on_stock is None else {"indexer-lengths": on_stock}
    runs = with_(patched=said(RIGHT, "active", observed={"indexer-lengths": [0.0]}))
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
    proof = proof_of("flashmla-padding", stock=stock, **with_(patched=said(RIGHT, "active", observed=observed)))
    assert proof.outcome == "scenario failed"


def test_what_drafts_were_like_is_told() -> None:
    eager = said(RIGHT, "off", again=RIGHT, observed={"drafts": [1.0, 11.0, 12.0]})
    observed = {"planners-in-draft-graphs": [0.0, 2.0], "drafts": [1.0, 11.0, 99.0]}
    runs = RUNS | with_(eager=eager, stock=said(RIGHT, "off", observed=observed))
    assert measure(CASES["draft-prefill-state"], runs, "stock").details == (
        "stock: FlashMLA's planner is recorded in 0 of 2 full graphs of the draft's prefill",
        "stock: 7 of 7 tokens compared and equal to eager's; log-probabilities up to 0 apart (eager from itself 0; rounding ends at 0.062)",
        "stock: draft tokens equal to eager's up to number 2 of 3",
    )


def test_corruption_of_log_probabilities_alone_is_told_as_such() -> None:
    drifted = Answer((1, 2), ({1: -0.1, 7: -3.0}, {2: -1.5, 7: -3.0}))
    (_, line) = described(compare([answer(1, 2)], [drifted], 0.0))
    assert line == (
        "corrupt prompts: 1 of 1, the first at token 1 of prompt 0, in its log-probability; eager's two best are 2.9 apart there"
    )


def test_a_skipped_fix_is_not_proven() -> None:
    proof = prove(BY_NAME["capture-state"], AFFECTED, None, None, "no GPU for it")
    assert (proof.outcome, proof.holds, proof.skipped) == ("skipped", False, "no GPU for it")


@pytest.mark.parametrize(
    "what", [said(RIGHT, "off", "active", again=WRONG, observed={"drafts": [1.0]}), said((), "off")]
)
def test_what_an_engine_said_is_read_as_it_was_written(what: Said) -> None:
    assert from_json(json.loads(json.dumps(to_json(what)))) == what


def shown(*proofs: Proof) -> str:
    written = io.StringIO()
    show(Report("0.18.1", "/somewhere", "a GPU", proofs), Console(file=written, width=200))
    return written.getvalue()


@pytest.mark.parametrize(
    ("proof", "line"),
    [
        (proof_of("capture-state", eager=failed("eager", "E: x")), "scenario failed: eager: E: x (log: engine.log)"),
        (proof_of("capture-state", patched=failed("patched", ILLEGAL_ACCESS)), f"defect still there: {ILLEGAL_ACCESS}"),
        (proof_of("capture-state", **with_(patched=said(WRONG, "active"))), "defect still there"),
        (proof_of("capture-state", **with_(stock=said(RIGHT, "off"))), "defect not shown on stock"),
        (proof_of("capture-state", **with_(patched=said(RIGHT, "off"))), "off in the patched process"),
        (observing("flashmla-padding", None, None), "scenario failed: stock: dense fp8 FlashMLA was not used"),
    ],
)
def test_people_get_a_line_for_whatever_went_wrong(proof: Proof, line: str) -> None:
    assert f"! {proof.fix.name}: {line}\n" in shown(proof)


# The whole of it, with a double of vLLM in the engines and of the GPU that is found. Diagnosis is of the stock release.


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A 0.18.1 whose code is the stock one's but for what engines are made of."""
    changes = {
        "vllm/__init__.py": lambda text: engine_double.SOURCE,
        "vllm/platforms/__init__.py": lambda text: engine_double.PLATFORMS,
    }
    root = edited(release_root("0.18.1"), tmp_path / "release", changes, anonymous=False)
    (root / "torch.py").write_text(engine_double.TORCH)
    (root / "vllm" / "_C.abi3.so").write_bytes(b"compiled for a GPU")
    return root


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def find_h200(monkeypatch: pytest.MonkeyPatch, found: Device = H200) -> None:
    """What is found; the models are made as they would be."""
    make = devices.find
    monkeypatch.setattr(devices, "find", lambda folder=None, names=(): found if folder is None else make(folder, names))


def verified(release: Path, *names: str, code: int, env: dict[str, str] | None = None) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["verify", *names, "--vllm", str(release), "--json"], env=env or {})
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    written: dict[str, Any] = json.loads(done.stdout)
    return written


def test_a_fix_is_proven_by_three_engines(release: Path, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_h200(monkeypatch)
    found = verified(
        release,
        "flashmla-fp8",
        code=0,
        env={
            "ENGINE_DOUBLE_STOCK": "wrong",
            # None of it reaches the engines: it would decide in place of the proof.
            "VLLM_GRAPHFIX": "off",
            "VLLM_GRAPHFIX_FLASHMLA_FP8": "off",
            "VLLM_GRAPHFIX_ROLLOUT": "1%",
        },
    )
    assert (found["vllm"], found["device"], found["holds"], found["complete"]) == (
        "0.18.1",
        "Double of an H200",
        True,
        True,
    )
    assert found["environment"] == {
        "compute capability": "9.0",
        "driver": "unknown",
        "CUDA": "13.0",
        "torch": "2.11.0+cu130",
        "Python": "3.11.7",
        "modes": "VLLM_GRAPHFIX=off (stock), every fix auto (patched)",
        "seed": "7",
    }
    (row,) = found["fixes"]
    assert (row["outcome"], row["state"]) == ("proven", "active")
    assert (row["eager"], row["stock"], row["patched"]) == ([520], [16], [520])
    assert any(line.startswith("stock: corrupt prompts: 8 of 8") for line in row["details"])
    assert any(line.startswith("patched: 520 of 520 tokens") for line in row["details"])
    assert (found["logs"], list(folders.iterdir())) == (None, [])


def test_an_engine_that_crashes_on_stock_proves_it_and_leaves_its_log(
    release: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_h200(monkeypatch)
    found = verified(release, "flashmla-fp8", code=0, env={"ENGINE_DOUBLE_STOCK": "illegal access"})
    (row,) = found["fixes"]
    assert row["outcome"] == "proven"
    assert row["stock_error"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert found["logs"] == str(next(folders.iterdir()))
    assert "illegal memory access" in (Path(found["logs"]) / "mla-fp8-stock.log").read_text()


@pytest.mark.parametrize(
    ("kind", "behaviour", "failure"),
    [
        ("STOCK", "out of memory", "stock: RuntimeError: CUDA error: out of memory"),
        ("STOCK", "fails in a worker", f"stock: {engine_double.WORKER_FAILED}"),
        ("EAGER", "illegal access", "eager: RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("EAGER", "no numbers", "eager: log-probabilities that are not finite numbers"),
        ("PATCHED", "ends without a word", "patched: INFO 11-21 10:00:00"),
    ],
)
def test_an_engine_that_fails_otherwise_proves_nothing_and_leaves_its_log(
    kind: str, behaviour: str, failure: str, release: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_h200(monkeypatch)
    env = {"ENGINE_DOUBLE_STOCK": "wrong"} | {f"ENGINE_DOUBLE_{kind}": behaviour}
    found = verified(release, "flashmla-fp8", code=1, env=env)
    (row,) = found["fixes"]
    assert (row["outcome"], found["holds"]) == ("scenario failed", False)
    assert row["failure"].startswith(failure)
    assert Path(found["logs"]).parent == folders


def test_what_lacks_a_gpu_of_its_kind_is_skipped_and_the_rest_is_run(
    release: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_h200(monkeypatch, replace(H200, name="Double of an A100", capability=(8, 0)))
    monkeypatch.setattr(engine, "_run_cases", lambda *given: pytest.fail("nothing to run") if given[1] else {})
    found = verified(release, "flashmla-fp8", "capture-state", code=3)
    assert (found["holds"], found["complete"], found["logs"]) == (False, False, None)
    assert {row["outcome"] for row in found["fixes"]} == {"skipped"}
    assert "Double of an A100 has 8.0" in found["fixes"][0]["skipped"]
    assert list(folders.iterdir()) == []


def test_what_is_not_needed_is_looked_at_beside_and_keeps_its_place(
    release: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the stock classes, without engines: the order is that of the question."""
    for name in ("vllm/__init__.py", "vllm/platforms/__init__.py"):
        shutil.copy(release_root("0.18.1") / name, release / name)
    (release / "torch.py").unlink()
    find_h200(monkeypatch, replace(H200, capability=(8, 0)))
    found = verified(release, "mamba-padding", "flashmla-fp8", "draft-prefill-state", code=3)
    assert [(row["name"], row["outcome"]) for row in found["fixes"]] == [
        ("mamba-padding", "nothing patched"),
        ("flashmla-fp8", "skipped"),
        ("draft-prefill-state", "nothing patched"),
    ]


COMMAND = """
import dataclasses, sys
from vllm_graphfix.verify.engine import device

make = device.find
h200 = device.Device("Double of an H200", "", (9, 0), 100.0, 140.0, "", "", "", "")
device.find = lambda folder=None, names=(): h200 if folder is None else make(folder, names)
from vllm_graphfix.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_interrupted_it_leaves_no_process_and_no_folder(release: Path, tmp_path: Path, number: signal.Signals) -> None:
    folders = tmp_path / "temporary"
    folders.mkdir()
    env = os.environ | {"TMPDIR": str(folders)}
    env |= {f"ENGINE_DOUBLE_{kind}": "hangs with a child" for kind in ("EAGER", "STOCK", "PATCHED")}
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "verify", "flashmla-fp8", "--vllm", str(release)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            pids = started(folders, 1, "*/pids of *")
            process.send_signal(number)
            out, err = process.communicate(timeout=SOON)
        finally:
            process.kill()  # where the test fails
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "vllm-graphfix: interrupted; every process that was started has ended"
    assert "Traceback" not in err
    assert all_end(pids)
    assert list(folders.iterdir()) == []


def test_one_engine_for_each_mode_is_told_to_whoever_has_no_terminal(
    release: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_h200(monkeypatch)
    env = {"ENGINE_DOUBLE_STOCK": "wrong"}
    done = CliRunner().invoke(app, ["verify", "flashmla-fp8", "--vllm", str(release)], env=env)
    assert done.exit_code == 0
    assert sorted(line.split(":")[0] for line in done.stderr.splitlines()) == [
        "mla-fp8 eager",
        "mla-fp8 patched",
        "mla-fp8 stock",
    ]
    assert "verified on the Double of an H200" in done.stdout
    assert "proven" in done.stdout


def test_eager_alone_asks_twice() -> None:
    assert {job.mode: job.again for job in CASES["flashmla-fp8"].jobs(Path("models"))} == {EAGER: True, GRAPHS: False}
