"""`compare --poison`: which poison it is that shows, the verdict, and a real engine on a CPU."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import planted_plugin
import planted_reader
from engine import check_compare, report, write_llama
from vllm_graphfix.commands.compare import CompareError, run
from vllm_graphfix.verify.codec import from_builtins, to_builtins
from vllm_graphfix.verify.comparison import Answer
from vllm_graphfix.verify.engine import poisoned
from vllm_graphfix.verify.engine.job import EngineResult, PoisonPass
from vllm_graphfix.verify.engine.poison_report import PoisonReport, report_of
from vllm_graphfix.verify.engine.poisoned import Session, ask_with_poison, gap_between
from vllm_graphfix.verify.poison.kinds import KINDS, NAN_IN_NULL_BLOCK

RIGHT = Answer((5, 6), ({5: -0.5, 7: -1.5}, {6: -0.25}))
OTHER = Answer((5, 7), ({5: -0.5, 7: -1.5}, {7: -0.25}))
NAMES = [f"runner.input_{number}" for number in range(10)]


class EngineStandIn:
    """Answers wrongly while what *reads* says of kinds, inputs and finite poison is poisoned."""

    def __init__(self, reads: Callable[[list[str], list[str] | None, bool], bool]) -> None:
        self._reads, self._poisoned, self.holding = reads, False, False
        self.calls: list[tuple[list[str], list[str] | None, bool]] = []

    def reset_prefix_cache(self) -> bool:
        return not self.holding

    def collective_rpc(self, name: str, args: Any = ()) -> list[Any]:
        if name == "graphfix_poison":
            self.calls.append(args)
            self._poisoned = self._reads(*args)
            return [None]
        self._poisoned = False
        return [{"steps": 3, "findings": [], "most": {}, "notes": [], "error": None, "buffers": NAMES}]

    def ask(self) -> tuple[Answer, ...]:
        return (OTHER if self._poisoned else RIGHT,)


def session(engine: Any, written: list[dict[str, Any]]) -> Session:
    return Session(engine, engine.ask, [(RIGHT,), (RIGHT,)], 0.0, {}, written.append)


def test_without_an_effect_there_is_one_pass() -> None:
    engine = EngineStandIn(lambda *_: False)
    written: list[dict[str, Any]] = []
    (passed,) = ask_with_poison(session(engine, written))
    assert (passed.kinds, passed.shows, passed.ranks[0]["steps"]) == (KINDS, False, 3)
    assert written == [{"observed": {poisoned.PASSES: [1.0]}, "error": ""}], "before what may crash"


def test_nothing_is_poisoned_while_blocks_are_held() -> None:
    engine = EngineStandIn(lambda *_: False)
    engine.holding = True
    written: list[dict[str, Any]] = []
    with pytest.raises(RuntimeError, match="holds blocks"):
        ask_with_poison(session(engine, written))
    assert not engine.calls
    assert not written, "the engine ended before it was poisoned"


def test_an_input_is_isolated_by_halves() -> None:
    engine = EngineStandIn(lambda kinds, names, _: KINDS[0] in kinds and (names is None or NAMES[6] in names))
    passes = ask_with_poison(session(engine, []))
    assert [each.kinds for each in passes[:5]] == [KINDS, *((kind,) for kind in KINDS)]
    assert [each.shows for each in passes[:5]] == [True, True, False, False, False]
    assert (passes[-1].buffers, passes[-1].shows) == ((NAMES[6],), True)
    assert len(passes) <= 5 + 5


def test_nan_in_blocks_is_tried_once_more_as_a_large_number() -> None:
    engine = EngineStandIn(lambda kinds, _, finite: KINDS[1] in kinds and not finite)
    passes = ask_with_poison(session(engine, []))
    assert [(each.kinds, each.shows) for each in passes if each.finite] == [((KINDS[1],), False)]


def test_a_hang_is_ended_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poisoned, "_MIN_SECONDS", 0.05)
    monkeypatch.setattr(poisoned, "_SLOWDOWN", 0)
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    engine = EngineStandIn(lambda *_: True)
    written: list[dict[str, Any]] = []

    def ask() -> tuple[Answer, ...]:
        while engine._poisoned and not ended:
            pass
        return (RIGHT,)

    engine.ask = ask  # type: ignore[method-assign]
    ask_with_poison(session(engine, written))
    assert ended[0] == 1
    assert next(each["error"] for each in written if each["error"]) == (
        "hangs with poison in padded rows, null block, unused blocks, freed memory: no answers in 0 s"
    )


@pytest.mark.parametrize(
    ("other", "gap"),
    [
        (RIGHT, 0.0),
        (OTHER, math.inf),
        (Answer((5, 6), ({5: -0.5, 7: -1.5}, {6: -0.25000001})), pytest.approx(1e-8)),
        (Answer((5, 6), ({5: -0.5, 7: -1.5}, {6: math.nan})), math.inf),
        (Answer((5, 6), ({5: -0.5, 8: -1.5}, {6: -0.25})), math.inf),
    ],
    ids=["equal", "token", "bit", "NaN", "runner-up"],
)
def test_answers_are_compared_to_the_last_bit(other: Answer, gap: Any) -> None:
    assert gap_between(RIGHT, other) == gap


def a_pass(
    *kinds: str, worst: float = 0.0, finite: bool = False, notes: tuple[str, ...] = (), written: bool | None = None
) -> PoisonPass:
    findings = [] if written is None else [[2, "layer: block 5", written]]
    rank = {"steps": 3, "findings": findings, "most": {"padded rows": 9}, "notes": list(notes), "error": None}
    return PoisonPass(kinds or KINDS, None, finite, (0,) if worst else (), worst, (rank,))


def judged(*passes: PoisonPass, again: Answer = RIGHT) -> PoisonReport:
    result = EngineResult(((RIGHT,), (again,)), {}, {}, None, {}, 1.0, poisoned=passes)
    return report_of(from_builtins(json.loads(json.dumps(to_builtins(result))), EngineResult), None, {})


QUIET = [a_pass(kind) for kind in (KINDS[0], KINDS[2], KINDS[3])]


@pytest.mark.parametrize(
    ("passes", "detected"),
    [
        ([a_pass()], False),
        ([a_pass(written=True), *QUIET], True),
        ([a_pass(worst=1e-9), a_pass(KINDS[0], worst=1e-9)], True),
        ([a_pass(worst=1.0), *QUIET], True),
        ([a_pass(worst=1.0), *QUIET, a_pass(KINDS[1], worst=1.0), a_pass(KINDS[1], finite=True)], False),
        ([a_pass(worst=1.0), *QUIET, a_pass(KINDS[1], worst=1.0), a_pass(KINDS[1], finite=True, worst=2.0)], True),
        (
            [
                a_pass(worst=1.0, notes=(f"{NAN_IN_NULL_BLOCK} (first in layer)",)),
                *QUIET,
                a_pass(KINDS[1], worst=1.0),
                a_pass(KINDS[1], finite=True),
            ],
            True,
        ),
    ],
    ids=["nothing", "written", "a bit", "all together alone", "times zero", "large too", "times zero and NaN there"],
)
def test_the_verdict(passes: list[PoisonPass], detected: bool) -> None:
    report = judged(*passes)
    assert report.detected == detected
    assert report.inconclusive is None
    assert report.as_json()["found"] == detected


def test_what_differs_without_poison_is_no_finding() -> None:
    a_bit_off = Answer((5, 6), ({5: -0.5, 7: -1.5}, {6: -0.26}))
    report = judged(a_pass(worst=0.05), a_pass(KINDS[0], worst=0.05), again=a_bit_off)
    assert not report.detected
    assert "beyond the engine's own noise of 0.01" in report.summary()
    assert judged(a_pass(worst=0.5), a_pass(KINDS[0], worst=0.5), again=a_bit_off).detected
    assert "differ in their tokens" in (judged(a_pass(worst=math.inf), again=OTHER).inconclusive or "")


def test_an_engine_that_ends_is_detected_only_if_it_was_poisoned() -> None:
    crashed = report_of(None, "CUDA error: an illegal memory access", {poisoned.PASSES: [1.0]})
    assert crashed.detected
    assert crashed.lines() == ["with poison the engine ends: CUDA error: an illegal memory access"]
    before = report_of(None, "no memory", {})
    assert (before.detected, before.lines()) == (False, [])
    assert "ended before it was: no memory" in (before.inconclusive or "")


def test_a_slow_engine_is_no_finding() -> None:
    slow = report_of(None, "did not finish in 3600 s", {poisoned.PASSES: [2.0]})
    assert (slow.detected, slow.inconclusive) == (
        False,
        "the engine to be poisoned was not done: did not finish in 3600 s",
    )
    assert report_of(None, "hangs with padded rows: no answers in 120 s", {poisoned.PASSES: [2.0]}).detected


def test_steps_that_were_not_poisoned_prove_nothing() -> None:
    passed = a_pass()
    passed.ranks[0]["steps"] = 0
    assert judged(passed).inconclusive == "no step was poisoned"
    passed.ranks[0].update(steps=2, error="ValueError: no")
    assert judged(passed).inconclusive == "poison was taken out of a running engine: ValueError: no"


def test_a_worker_extension_of_the_users_is_refused(tmp_path: Path) -> None:
    nobody: Any = SimpleNamespace()
    with pytest.raises(CompareError, match="leave out --worker-extension-cls"):
        run.run("m", ("--worker-extension-cls", "a.B"), run.Options(poison=True), nobody)


# What follows starts engines.

SMALL = ("-O0", "--max-model-len", "256", "--num-gpu-blocks-override", "64", "--skip-tokenizer-init")
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 300], [3, 4, 5], [900, 800, 700, 600, 500]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("poison")
    write_llama(made)
    planted_plugin.install(made / "planted", "planted_reader")
    (made / "ids.jsonl").write_text("".join(f"{json.dumps({'prompt_token_ids': ids})}\n" for ids in PROMPTS))
    return made


def poisoned_engine(folder: Path, plant: str, code: int) -> dict[str, Any]:
    """Return the poison report of `compare` on a real engine with *plant*, or on stock vLLM."""
    env, path = ({planted_reader.VARIABLE: plant}, (folder / "planted",)) if plant else ({}, ())
    command = ("./llama", "--poison", "--prompts", "ids.jsonl", "--max-tokens", "12", "--json", *SMALL)
    output: dict[str, Any] = report(check_compare(folder, *command, env=env, path=path, code=code))["poison"]
    return output


@pytest.mark.slow
@pytest.mark.xdist_group("poison")
def test_poison_is_silent_in_a_real_engine(folder: Path) -> None:
    """Without graphs there is no verdict on them."""
    output = poisoned_engine(folder, "", code=3)
    (passed,) = output["passes"]
    assert (output["found"], output["inconclusive"], output["noise"], passed["prompts"]) == (False, None, 0.0, [])
    (rank,) = passed["ranks"]
    assert rank["steps"] >= 12
    assert rank["most"]["padded rows"] >= 20
    assert rank["most"]["unused blocks"] > 50


@pytest.mark.slow
@pytest.mark.xdist_group("poison")
def test_a_reader_of_padded_rows_is_detected_with_the_input_that_it_reads(folder: Path) -> None:
    *_, last = poisoned_engine(folder, "padded_row", code=1)["passes"]
    assert (last["inputs"], last["shows"]) == (["runner.input_ids.cpu"], True)


@pytest.mark.slow
@pytest.mark.xdist_group("poison")
def test_a_block_that_nobody_holds_and_somebody_writes_to_is_named_with_its_layer(folder: Path) -> None:
    first, *_ = poisoned_engine(folder, "unused_block", code=1)["passes"]
    assert first["prompts"] == []
    ((step, output, written),) = first["ranks"][0]["findings"]
    assert (step, written) == (1, True)
    assert output == "model.layers.0.self_attn.attn: block 62, which nobody holds, was written to"


@pytest.mark.slow
@pytest.mark.xdist_group("poison")
def test_a_null_block_that_is_multiplied_by_zero_is_noted_and_no_defect(folder: Path) -> None:
    output = poisoned_engine(folder, "null_block", code=3)
    assert not output["found"]
    assert [(each["kinds"], each["finite"]) for each in output["passes"] if each["shows"]] == [
        (list(KINDS), False),
        (["null block"], False),
    ]
