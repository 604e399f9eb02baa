"""`compare --exact` and `--gap`, and answers without graphs in batches of the sizes of graphs."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import vllm_graphfix
from behaviours import check_behaviours
from compared import RESULT, UNHARMED, judgement, report
from vllm_graphfix.commands.compare import CompareError
from vllm_graphfix.commands.compare import run as compare_run
from vllm_graphfix.commands.compare.gap import measure, share
from vllm_graphfix.commands.compare.report import as_json, show
from vllm_graphfix.commands.compare.upstream_report import of_comparison
from vllm_graphfix.fix import Mode, State
from vllm_graphfix.patching.applied_fix import FixState
from vllm_graphfix.settings.environment import SHADOW
from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import process
from vllm_graphfix.shadow.check import Shadow
from vllm_graphfix.verify.comparison import Answer, Kind
from vllm_graphfix.verify.engine.exact import ENVIRONMENT, ExactRank, ExactReplays
from vllm_graphfix.verify.engine.exact_report import ExactReport
from vllm_graphfix.verify.engine.job import COMPILED, EAGER, GRAPHS, Job
from vllm_graphfix.verify.engine.poison_report import PoisonReport
from vllm_graphfix.verify.engine.processes import JobResult
from vllm_graphfix.verify.engine.questions import _filled, filled_lengths

RIGHT = ExactRank(800, 0, 0, 12, 0.0, 0.0, 0.0, {"target model, 8": 500, "target model, 4": 300}, (), None)
WRONG = replace(RIGHT, wrong=2, findings=("a replayed CUDA graph was wrong: target model, 8",))


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=20),
    st.lists(st.integers(1, 30), min_size=1, max_size=6, unique=True).map(sorted),
)
def test_filled_batches_have_the_sizes_of_graphs_after_every_token(lengths: list[int], sizes: list[int]) -> None:
    filled = filled_lengths(lengths, sizes)
    assert all(after >= before for before, after in zip(lengths, filled, strict=False))
    assert max(filled) == max(lengths)
    for token in range(max(lengths)):
        running = sum(length > token for length in lengths)
        padded = next((size for size in sizes if size >= running), running)
        assert sum(length > token for length in filled) == padded


def test_requests_that_fill_a_batch_fit_beside_prompts_as_long_as_the_context() -> None:
    """A text that is read from its end has more tokens, and the engine would refuse it."""
    config = SimpleNamespace(max_model_len=12, get_vocab_size=lambda: 50)
    llm: Any = SimpleNamespace(llm_engine=SimpleNamespace(model_config=config))
    texts = ("a text of twelve tokens", "another", "and a third one")
    job = Job("padded", COMPILED, max_tokens=(8, 7, 6), adapters=("a", None, "b"), batch_sizes=(2, 8))
    filled = _filled(llm, texts, job)
    others = filled.prompts[len(texts) :]
    assert filled.prompts[: len(texts)] == texts
    assert len(filled.prompts) == len(filled.lengths) == len(filled.adapters) == 8
    assert all(len(other) < config.max_model_len and set(other) <= set(range(50)) for other in others)
    assert len(set(others)) == len(others)  # else they are one in the prefix cache


@pytest.mark.parametrize(
    ("exact", "reason"),
    [
        (ExactReport([RIGHT]), None),
        (ExactReport([RIGHT, replace(RIGHT, skipped=3)]), "3 replays could not be judged"),
        (ExactReport([RIGHT, replace(RIGHT, reason="Ray")]), "not every replay was compared: Ray"),
        (ExactReport([replace(RIGHT, compared=0, graphs={})]), "no replay of a graph of the target model was"),
        (ExactReport([RIGHT, replace(RIGHT, graphs={"draft decode, 8": 800})]), "compared; 12 replays were not looked"),
        (ExactReport([]), "no replay of a graph of the target model was compared; 0 replays"),
        (ExactReport([], "OOM (log: /l)"), "the engine whose replays were to be compared ended: OOM (log: /l)"),
    ],
)
def test_only_replays_that_were_all_compared_prove_anything(exact: ExactReport, reason: str | None) -> None:
    made = report(exact=exact)
    assert not made.wrong
    assert made.inconclusive is None if reason is None else reason in str(made.inconclusive)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (State.NOT_NEEDED, "the shadow check is not-needed: shadow-v1: not-needed, there is no CUDAGraphWrapper"),
        (State.UNKNOWN, "the shadow check is unknown: shadow-v1: unknown, there is no CUDAGraphWrapper"),
        (State.WAITING, None),
        (State.ACTIVE, None),
    ],
)
def test_a_release_whose_graphs_are_not_wrapped_is_named_as_the_reason(
    monkeypatch: pytest.MonkeyPatch, state: State, reason: str | None
) -> None:
    why = f"shadow-v1: {state.value}, there is no CUDAGraphWrapper"
    of_check = FixState(process.NAME, Mode.AUTO, None, state, why)
    monkeypatch.setattr(process, "SHADOW", Shadow(Rate(every=1), Action.REPORT, process.refuse))
    monkeypatch.setattr(vllm_graphfix, "states", lambda: {process.NAME: of_check})
    assert ExactReplays().end().reason == reason


def test_an_engine_without_graphs_is_called_that_before_anything_else() -> None:
    without = report(graphs=replace(RESULT, cudagraph_mode="NONE"), exact=ExactReport([]))
    assert str(without.inconclusive).startswith("no CUDA graphs were used (cudagraph_mode NONE)")


def test_a_wrong_replay_on_one_rank_is_wrong_though_all_answers_are_equal() -> None:
    made = report(exact=ExactReport([RIGHT, WRONG]))
    assert (made.wrong, made.corrupt, made.inconclusive) == (True, False, None)
    text = page_of(made)
    assert "800 steps of 2 sizes compared with the same step without a graph: 2 wrong; 12 of other graphs" in text
    assert WRONG.findings[0] in text
    assert text.endswith("wrong replays: graphs differ from the same steps without them\n")
    assert as_json(made)["exact"]["ranks"][1]["findings"] == WRONG.findings


EARLY = judgement(Kind.TIE, 3)
SEEN = ExactReport([replace(RIGHT, unseen=0)])
CLEAN = PoisonReport(replace(RESULT, passes=((), ()), poisoned=(UNHARMED,)))


def test_right_replays_without_poison_are_enough_for_answers_that_diverge_at_ties() -> None:
    assert report(EARLY, exact=SEEN, poison=CLEAN).inconclusive is None


@pytest.mark.parametrize(("noise", "as_captured"), [(0.01, 0.05), (0.5, 0.46)])
def test_replays_that_equal_a_run_split_as_captured_are_right(noise: float, as_captured: float) -> None:
    """With large differences, if eager's own are large, too."""
    made = report(EARLY, exact=ExactReport([replace(SEEN.ranks[0], as_captured=as_captured)]), poison=CLEAN)
    assert made.comparison is not None
    assert replace(made, comparison=replace(made.comparison, noise=noise)).inconclusive is None


@pytest.mark.parametrize(
    ("judgements", "more"),
    [
        ([EARLY], {}),
        ([EARLY], {"poison": CLEAN}),
        # What a replay shares with the step without its graph, it does not see.
        ([EARLY], {"exact": SEEN}),
        # A piece of a mixed batch may be wrong behind the tie.
        ([EARLY], {"exact": ExactReport([*SEEN.ranks, RIGHT]), "poison": CLEAN}),
        # Where replays differ by rounding, cache entries are not compared: nothing is known of what its prompt left.
        (
            [EARLY, judgement(Kind.TIE, 0)],
            {"exact": ExactReport([replace(SEEN.ranks[0], rounding=0.1)]), "poison": CLEAN},
        ),
        # Kernels may be wrong where they split as captured; a model whose batches hardly differ does not explain it.
        (
            [EARLY, judgement(Kind.TIE, 0)],
            {"exact": ExactReport([replace(SEEN.ranks[0], as_captured=0.06)]), "poison": CLEAN},
        ),
    ],
)
def test_answers_that_diverge_at_ties_prove_nothing_else(judgements: list[Any], more: dict[str, Any]) -> None:
    assert "diverge early at ties" in str(report(*judgements, **more).inconclusive)


@pytest.mark.parametrize(
    ("noise", "rounding", "as_captured", "text"),
    [
        (0.0, 0.0, 0.0, "a graph: equal to the last bit; 12 of"),
        (0.001, 0.0, 0.0, "a graph: equal to the last bit (two runs without the graph: up to 0.001); 12 of"),
        (0.001, 0.004, 0.0, "0.004 apart at most, which counts as rounding (two runs without the graph: up to 0.001)"),
        (0.0, 0.02, 0.0, "a graph: 0.02 apart at most, which counts as rounding; 12 of"),
        (0.0, 0.0, 0.46, "longest request (up to 0.46 apart from one that splits by its own); 12 of"),
    ],
)
def test_rounding_of_replays_is_not_called_equality(
    noise: float, rounding: float, as_captured: float, text: str
) -> None:
    rank = replace(RIGHT, noise=noise, rounding=rounding, as_captured=as_captured)
    assert text in page_of(report(exact=ExactReport([RIGHT, rank])))


@pytest.mark.parametrize("error", ["OOM", "CUDA error: an illegal memory access was encountered"])
@pytest.mark.parametrize("alone", [True, False])
def test_where_the_comparison_of_replays_fails_the_engine_answers_without_it(
    tmp_path: Path, alone: bool, error: str
) -> None:
    ran: list[Job] = []

    def run(job: Job) -> JobResult:
        ran.append(job)
        fails = job.exact or (job.mode == GRAPHS and not alone)
        passes = ((Answer((5,), ({5: -0.1, 6: -9.0},)),),) * 2
        result = None if fails else replace(RESULT, passes=passes)
        return JobResult(job, result, error if fails else None, tmp_path / "log", 0.0)

    options = compare_run.Options(generated=1, exact=True)
    jobs = compare_run.in_one_engine(compare_run.jobs_for("a/twin", (), options), options)
    made = compare_run.judge("a/twin", (), jobs, run)
    assert [(job.name, job.exact) for job in ran] == [(EAGER, False), (GRAPHS, True), (f"{GRAPHS} alone", False)]
    assert ran[2].environment.get(SHADOW) is None
    assert made.logs == str(tmp_path)
    assert made.wrong == (not alone and error != "OOM"), "what ends the comparison alone is no crash of the engine"
    if not made.wrong:
        assert ("were to be compared ended" if alone else "the engine failed, but not") in (made.inconclusive or "")


def test_requests_begin_together_in_the_engine_whose_batches_are_filled(tmp_path: Path) -> None:
    ran: dict[str, Job] = {}

    def run(job: Job) -> JobResult:
        ran[job.name] = job
        token = 6 if job.name in (GRAPHS, "padded") else 5
        passes = ((Answer((token,), ({token: -0.1, 11 - token: -9.0},)),),) * 2
        return JobResult(job, replace(RESULT, passes=passes, batch_sizes=(1, 2, 4)), None, tmp_path, 0.0)

    jobs = compare_run.jobs_for("the/model", (), compare_run.Options(generated=1))
    made = compare_run.judge("the/model", (), jobs, run)
    assert made.comparison is not None
    assert (made.wrong, [each.kind for each in made.comparison.judgements]) == (False, [Kind.PADDED])
    assert list(ran) == [EAGER, GRAPHS, COMPILED, "padded"]
    assert (ran["padded"].mode, ran["padded"].batch_sizes) == (COMPILED, (1, 2, 4))
    assert ran["padded"].environment == {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def test_answers_of_batches_of_that_size_are_named_as_such() -> None:
    text = page_of(report(judgement(Kind.PADDED, 30)))
    assert "batch size, without graphs too" in text
    assert "1 equal to compiled and padded without graphs, 0 corrupt" in text


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        *(({"VLLM_GRAPHFIX": off}, "VLLM_GRAPHFIX=observe") for off in ("OFF", "0", "no", "false")),
        ({"VLLM_GRAPHFIX_ROLLOUT": "0"}, "off outside the rollout: bucket"),
        ({"VLLM_GRAPHFIX_ROLLOUT": "half"}, "VLLM_GRAPHFIX_ROLLOUT=half means nothing"),
    ],
)
def test_replays_cannot_be_compared_where_the_plugin_is_off(environment: dict[str, str], message: str) -> None:
    with pytest.raises(CompareError, match=message):
        compare_run.refuse_settings(environment, exact=True)


def page_of(made: Any) -> str:
    assert made.graphs is RESULT
    out = io.StringIO()
    show(made, Console(file=out, width=200))
    return out.getvalue()


def test_wrong_replays_are_reported_to_vllm_and_older_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "compared.json"
    output = as_json(report(exact=ExactReport([RIGHT, WRONG])))
    file.write_text(json.dumps(output))
    text = str(of_comparison(file))
    assert "# Replays of CUDA graphs differ from the same steps without them" in text
    assert "- rank 1: 2 of 800 replays are wrong\n- rank 1: a replayed CUDA graph was wrong: target model, 8\n" in text
    assert "rank 0" not in text
    file.write_text(json.dumps({name: value for name, value in output.items() if name != "exact"}))
    assert of_comparison(file) is None


BASE, COMPILED_ANSWERS, PADDED_ANSWERS = (
    (Answer((5, 6), ({5: -0.1 - by, 6: -3.0}, {6: -0.2 - by, 5: -3.0})),) for by in (0.0, 0.1, 0.4)
)


def engine(*passes: Any) -> Any:
    return replace(RESULT, passes=passes)


def test_the_gap_to_eager_is_split_by_what_it_comes_from() -> None:
    gaps = measure(engine(BASE, BASE), engine(COMPILED_ANSWERS), engine(PADDED_ANSWERS), engine(PADDED_ANSWERS))
    assert [(each.source, each.tokens, round(each.mean, 9), each.diverging) for each in gaps] == [
        ("eager itself, asked in another order", 2, 0.0, 0),
        ("torch.compile", 2, 0.1, 0),
        ("batch size and padding", 2, 0.3, 0),
        ("CUDA graphs", 2, 0.0, 0),
        ("all of these", 2, 0.4, 0),
    ]
    assert [share(each, gaps) for each in gaps] == [None, pytest.approx(0.25), pytest.approx(0.75), 0.0, None]
    text = page_of(report(gaps=gaps))
    (row,) = (line.split() for line in text.splitlines() if line.startswith("batch size and padding"))
    assert row[4:] == ["2", "0.3", "0.3", "0", "75%"]


def test_a_gap_that_is_no_number_has_no_share() -> None:
    lost = (Answer((5, 6), ({5: nan, 6: nan}, {6: nan, 5: nan})),)
    gaps = measure(engine(BASE, BASE), None, None, engine(lost))
    assert [each.source for each in gaps[1:-1]] == ["CUDA graphs"]
    assert as_json(report(gaps=gaps))["gap"][1] == {
        "source": "CUDA graphs",
        "tokens": 2,
        "mean": None,
        "largest": None,
        "diverging": 0,
        "share": None,
    }


@pytest.mark.parametrize("release", ["0.29.0", "0.33.0"])
def test_pieces_and_breakable_graphs_of_mixed_batches_are_compared(release: str) -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if value is not None}
    check_behaviours(release, "exact_mixed", {**environment, "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"})
