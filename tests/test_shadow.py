"""The shadow check: what is checked how often, what counts as a difference, and the check itself on stock releases."""

from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from behaviours import check_behaviours
from hypothesis import given
from hypothesis import strategies as st
from records import record
from typer.testing import CliRunner

from vllm_graphfix.cli import app
from vllm_graphfix.fix import Mode, State, Verdict, variable
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.fleet import look
from vllm_graphfix.process import FixState
from vllm_graphfix.records import FixReport, Record, RecordError, Wrong, write
from vllm_graphfix.records.record import SHORT
from vllm_graphfix.rollout import decide, decode
from vllm_graphfix.settings import SHADOW, SHADOW_ACTION, read
from vllm_graphfix.shadow import process, rate
from vllm_graphfix.shadow.check import Shadow
from vllm_graphfix.shadow.rate import Action, Rate
from vllm_graphfix.shadow.report import markdown
from vllm_graphfix.shadow.runners import RUNNERS
from vllm_graphfix.shadow.schedule import Schedule, place
from vllm_graphfix.shadow.verdict import Graph, Mismatch
from vllm_graphfix.source import open_source

# -- how often


@pytest.mark.parametrize(
    ("text", "found", "normal"),
    [
        ("", Rate(), "off"),
        ("Off", Rate(), "off"),
        ("0", Rate(), "off"),
        ("1/2000", Rate(every=2000), "1/2000"),
        (" 1 / 0020 ", Rate(every=20), "1/20"),
        ("0.1%", Rate(share=0.001), "0.1%"),
        ("100 %", Rate(share=1.0), "100%"),
        ("0.000001%", Rate(share=1e-8), "0.000001%"),
    ],
)
def test_a_rate_is_a_fraction_of_the_replays_or_a_budget_of_the_time(text: str, found: Rate, normal: str) -> None:
    assert rate.parse(text) == pytest.approx(found)
    assert rate.normal(text) == normal
    assert rate.normal(normal) == normal
    assert bool(found) == (normal != "off")


@pytest.mark.parametrize(
    "text", ["on", "1/0", "2/3", "0%", "101%", "0.1", "1/1e3", "x" * 9999, "1/\u0662", "-1%", "1/9999999999"]
)
def test_what_is_no_rate_is_told_with_what_would_be_one_and_changes_nothing(text: str) -> None:
    found = read({SHADOW: text, SHADOW_ACTION: "quarantin"}, ())
    assert (found.shadow, found.shadow_action) == ("off", Action.REPORT)
    first, second = found.problems
    assert rate.VALID in first
    assert "did you mean quarantine?" in second


@given(st.text(max_size=30))
def test_no_text_raises_anything_but_what_settings_expect(text: str) -> None:
    try:
        found = rate.normal(text)
    except ValueError:
        return
    assert rate.normal(found) == found


def test_all_processes_of_an_engine_go_by_the_rate_of_the_first() -> None:
    made = decide(read({SHADOW: "1/50", SHADOW_ACTION: "Quarantine"}, ()), "0.21.0", host="one")
    assert (made.shadow, made.shadow_action) == ("1/50", Action.QUARANTINE)
    assert decode(made.encode()) == made
    assert not made.same_choice(made._replace(shadow="off"))
    for forged in ({"shadow": "2/3"}, {"shadow": 5}, {"shadow_action": "reboot"}):
        assert decode(json.dumps(json.loads(made.encode()) | forged)) is None


# -- which


def due_steps(schedule: Schedule, steps: int, cost: float = 0.0, monkeypatch: Any = None) -> list[int]:
    """The steps that are checked, counted from 1; ranks of one group do the same."""
    found = []
    for _ in range(steps):
        schedule.count += 1
        if schedule.count >= schedule.due:
            found.append(schedule.count)
            schedule.checked(schedule.wanted(cost))
    return found


@given(st.integers(1, 300), st.integers(1, 20))
def test_of_a_fraction_each_window_has_one_check_wherever_it_is(every: int, windows: int) -> None:
    found = due_steps(Schedule(Rate(every=every)), every * windows)
    assert [(step - 1) // every for step in found] == list(range(windows))
    assert found == due_steps(Schedule(Rate(every=every)), every * windows)  # on every rank


def test_a_batch_that_repeats_is_checked_at_all_its_places() -> None:
    assert {place(window, 8) for window in range(200)} == set(range(8))


def test_a_check_that_came_late_puts_the_next_into_its_own_window() -> None:
    schedule = Schedule(Rate(every=10))
    schedule.count = 57
    schedule.checked(schedule.wanted(0.0))
    assert 60 < schedule.due <= 70


@given(
    share=st.sampled_from([0.0005, 0.001, 0.01, 0.05]),
    typical=st.floats(0.002, 0.05),
    load=st.lists(st.floats(0.7, 1.4), min_size=4, max_size=4),
    costs=st.lists(st.floats(0.01, 0.2), min_size=5, max_size=5),
)
def test_a_budget_is_kept_within_half_over_five_minutes(
    share: float, typical: float, load: list[float], costs: list[float]
) -> None:
    now, spent, checks = 0.0, 0.0, 0
    schedule = Schedule(Rate(share=share))
    while now < 300 or checks < 30:
        # The time that passes is that of the steps up to the one that is due.
        steps = schedule.due - schedule.count
        schedule.count += steps
        schedule._busy += steps * typical * load[checks % 4]
        now += steps * typical * load[checks % 4]
        cost = costs[checks % 5]
        checks += 1
        spent += cost
        schedule.checked(schedule.wanted(cost))
    # What is spent at once cannot be less than one check, and the first is before anything is known.
    assert share * now / 1.5 - 2 * max(costs) <= spent <= 1.5 * share * now + 2 * max(costs)


@pytest.mark.parametrize("first", [0.05, 0.15, 0.3])
@pytest.mark.parametrize("later", [0.008, 0.02])
@pytest.mark.parametrize("step", [0.0027, 0.02])
@pytest.mark.parametrize("replays", [1, 4])
def test_five_minutes_are_enough_for_a_budget_of_a_thousandth_though_the_first_check_is_slow(
    first: float, later: float, step: float, replays: int
) -> None:
    """As measured on a GPU: kernels that only run without graphs are loaded in the first. Of *replays* in a step three are a drafter's."""
    schedule = Schedule(Rate(share=0.001))
    now, spent = 0.0, 0.0
    while now + (steps := math.ceil((schedule.due - schedule.count) / replays)) * step < 300:
        schedule.count += steps * replays
        schedule._busy += steps * step
        now += steps * step
        cost = later if spent else first
        spent += cost
        schedule.checked(schedule.wanted(cost))
    assert 1 / 1.5 < spent / (0.001 * 300) < 1.5


def test_steps_that_cannot_be_checked_are_not_tried_one_after_the_other() -> None:
    schedule = Schedule(Rate(share=0.001))
    tried = 0
    for _ in range(60_000):
        schedule.count += 1
        schedule._busy += 0.003
        if schedule.count >= schedule.due:
            tried += 1
            schedule.checked(schedule.wanted_later(0.0001))
    assert tried == 12
    assert schedule._spent == pytest.approx(12 * 0.0001)


def test_a_pause_of_the_engine_is_no_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_graphfix.shadow import schedule as module

    now = iter([0.0, 0.01, 0.02, 50.0, 50.01])
    monkeypatch.setattr(module, "perf_counter", lambda: next(now))
    schedule = Schedule(Rate(share=0.01))
    for _ in range(4):
        schedule.tick()
    assert schedule._busy == pytest.approx(0.03)


# -- what differs


def test_an_error_is_relative_to_the_largest_value_of_its_row_and_padding_is_not_looked_at() -> None:
    import torch

    from vllm_graphfix.shadow.comparison import row_errors

    expected = torch.tensor([[4.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    found = torch.tensor([[4.0, 2.0], [1.0, 0.0], [9.0, 9.0]])
    assert row_errors([found], [expected], 2).tolist() == [0.25, 0.0]


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        (math.nan, math.nan, 0.0),
        (math.inf, math.inf, 0.0),
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (math.inf, -math.inf, math.inf),
        (-0.0, 0.0, 0.0),
        (1e-30, 0.0, 1e-30 / 1.1754943508222875e-38),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_is_a_difference_where_it_is_on_one_side_alone(
    found: float, expected: float, error: float, dtype: str
) -> None:
    import torch

    from vllm_graphfix.shadow.comparison import row_errors

    one, other = (torch.tensor([[value, 0.0]], dtype=getattr(torch, dtype)) for value in (found, expected))
    assert row_errors([one], [other], 1).item() == pytest.approx(error, rel=0.01)


def test_tuples_stages_of_a_pipeline_and_tokens_are_compared() -> None:
    import torch

    from vllm_graphfix.shadow.comparison import row_errors, tensors

    class IntermediateTensors:
        def __init__(self, **given: torch.Tensor) -> None:
            self.tensors = given

    hidden, tokens = torch.ones(2, 3), torch.tensor([5, 6])
    given = (hidden, [IntermediateTensors(residual=hidden * 2, hidden=hidden)], tokens, None)
    found = list(tensors(given))
    assert [tuple(tensor.shape) for tensor in found] == [(2, 3)] * 3 + [(2,)]
    assert row_errors(found, [*found[:3], torch.tensor([5, 7])], 2).tolist() == [0.0, 1 / 7]
    assert row_errors(found, found[:3], 2).tolist() == [math.inf] * 2
    assert row_errors([hidden], [hidden[:1]], 2).tolist() == [math.inf] * 2
    with pytest.raises(TypeError, match="str"):
        list(tensors("text"))


def test_numbers_of_many_rows_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from vllm_graphfix.shadow import comparison

    monkeypatch.setattr(comparison, "_AT_ONCE", 7)
    expected = torch.arange(1.0, 41.0).view(10, 4)
    found = expected.clone()
    found[9, 3] = 0
    assert comparison.row_errors([found], [expected], 10).tolist() == [0.0] * 9 + [1.0]
    assert comparison.row_errors([found], [expected], 9).tolist() == [0.0] * 9


def drafts_checked(runs: list[tuple[list[float], list[int]]], learned: float = 0.0) -> int:
    """Mismatches of a replay, the first of *runs*, that two others are compared with: each of numbers and drawn tokens."""
    import torch

    from vllm_graphfix.shadow.check import Step

    values, tokens = torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int64)
    left = iter(runs)

    def run() -> None:
        numbers, drawn = next(left)
        values[:, 0], tokens[:, 0] = torch.tensor(numbers), torch.tensor(drawn)

    step = Step(
        Graph("draft decode", 2, ()),
        run,
        lambda: 2,
        {"values": values, "tokens": tokens},
        (),
        (),
        list,
        results=lambda: [values, tokens],
    )
    shadow = Shadow(Rate(every=1), Action.REPORT)
    shadow._noise = learned
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("vllm_graphfix.shadow.ranks.largest", lambda *given: given)
        shadow.check("graph", lambda: step, run)
    assert shadow.stopped is None
    assert (values[:, 0].tolist(), tokens[:, 0].tolist()) == runs[0]
    return shadow.results.mismatches


@pytest.mark.parametrize(
    ("replay", "eager", "again", "learned", "mismatches"),
    [
        (([1.0, 1.0], [5, 6]), ([1.0, 1.0], [5, 6]), ([1.0, 1.0], [5, 6]), 0.0, 0),
        (([1.0, 1.0], [5, 7]), ([1.0, 1.0], [5, 6]), ([1.0, 1.0], [5, 6]), 0.0, 1),
        (([1.0, 1.0], [5, 7]), ([1.0, 1.25], [5, 6]), ([1.0, 1.0], [5, 6]), 0.0, 0),
        (([1.0, 9.0], [5, 7]), ([1.0, 1.0], [5, 6]), ([1.0, 1.0], [5, 6]), 0.001, 0),
        (([1.0, 9.0], [5, 6]), ([1.0, 1.0], [5, 6]), ([1.0, 1.0], [5, 6]), 0.001, 1),
        (([9.0, 1.0], [5, 6]), ([1.0, 9.0], [5, 7]), ([1.0, 1.0], [5, 6]), 0.0, 1),
    ],
    ids=[
        "equal",
        "another token",
        "runs differ",
        "a token by noise",
        "wrong beyond noise",
        "a row that is drawn alike",
    ],
)
def test_another_token_is_a_difference_where_runs_without_graph_never_differ(
    replay: Any, eager: Any, again: Any, learned: float, mismatches: int
) -> None:
    assert drafts_checked([replay, eager, again], learned) == mismatches


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool"])
def test_the_same_bits_are_the_same_however_they_lie_in_memory(dtype: str) -> None:
    import torch

    from vllm_graphfix.shadow.snapshot import same_bits

    table = torch.arange(12).view(3, 4).to(getattr(torch, dtype))
    for part in (table[:1, 1], table[:, 1], table[1, 2], table[:0], table.T):
        assert same_bits(part, part.clone())
    assert not same_bits(table[:, 1], table[:, 0])
    nan = torch.tensor([math.nan])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


# -- ranks


def _ask(rank: int, port: int, answers: Any) -> None:
    import sys
    from types import ModuleType, SimpleNamespace

    import torch

    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    state: Any = ModuleType("vllm.distributed.parallel_state")
    state.get_tp_group = lambda: SimpleNamespace(world_size=2, cpu_group=torch.distributed.group.WORLD)
    sys.modules |= {"vllm": ModuleType("vllm"), "vllm.distributed": ModuleType("vllm.distributed")}
    sys.modules["vllm.distributed.parallel_state"] = state
    from vllm_graphfix.shadow.ranks import largest

    answers.put(largest(float(rank), 3.0 - rank, math.inf * rank if rank else 0.0))


def test_ranks_of_a_group_come_to_the_largest_that_one_of_them_found() -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    started = [context.Process(target=_ask, args=(rank, port, answers)) for rank in range(2)]
    for each in started:
        each.start()
    assert [answers.get(timeout=300) for _ in started] == [(1.0, 3.0, math.inf)] * 2
    for each in started:
        each.join()


# -- on stock releases


@pytest.mark.parametrize("runner", RUNNERS, ids=lambda runner: runner.name)
def test_the_code_of_every_release_from_0_18_on_is_known(runner: Any, release: str) -> None:
    from stock import release_root

    found = runner.diagnose(open_source(release_root(release)))
    first = (0, 19) if runner.name == "shadow-v2-drafter" else (0, 18)
    if tuple(map(int, release.split("."))) >= first:
        assert found.verdict is Verdict.AFFECTED, found.reason
    elif runner.name == "shadow-v2-drafter":
        assert found.verdict is Verdict.ABSENT, found.reason


@pytest.mark.parametrize("release", ["0.18.0", "0.21.0", "0.30.0", "0.33.0"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_model_runner(release: str, runner: str) -> None:
    check_behaviours(release, f"shadow_{runner}", {SHADOW: "1/1"})


CAPTURES_OFF = {"capture-state": "off", "draft-prefill-state": "off"}


@pytest.mark.parametrize("release", ["0.19.1", "0.20.2", "0.22.1", "0.24.0", "0.28.0", "0.31.0", "0.33.0"])
def test_drafters_of_model_runner_v2(release: str) -> None:
    """A release of each shape, with the fixes that are applied by default."""
    check_behaviours(release, "shadow_drafter", {SHADOW: "1/1"})


@pytest.mark.parametrize(
    ("release", "fixes", "behaviours"),
    [
        *((release, {"draft-idx-mapping": "off"}, "sampled") for release in ("0.19.1", "0.20.2", "0.22.1", "0.24.0")),
        *((release, CAPTURES_OFF, "plan") for release in ("0.19.1", "0.20.2", "0.22.1")),
    ],
)
def test_drafts_of_stock_releases_that_are_wrong_are_mismatches(
    release: str, fixes: dict[str, str], behaviours: str
) -> None:
    modes = {variable(fix): mode for fix, mode in fixes.items()}
    check_behaviours(release, "shadow_drafter", {SHADOW: "1/1", **modes}, select=behaviours)


@pytest.mark.parametrize("release", ["0.21.0", "0.22.1"])
def test_a_draft_prefill_that_is_mended_is_no_mismatch(release: str) -> None:
    check_behaviours(release, "shadow_defects", {SHADOW: "1/1"}, select="draft_prefill_state")


@pytest.mark.parametrize(("release", "scenarios"), [("0.18.1", "flashmla_fp8 or off"), ("0.21.0", ""), ("0.22.1", "")])
def test_defects_of_stock_releases_are_caught_and_releases_without_them_are_silent(
    release: str, scenarios: str
) -> None:
    """The scenario of mamba-padding begins with 0.19.0."""
    off = {variable(fix): "off" for fix in BY_NAME}
    check_behaviours(release, "shadow_defects", {SHADOW: "1/1", **off}, select=scenarios)


# -- what it tells


WRONG = Wrong(
    "target model, BatchDescriptor(num_tokens=4)", 4, 3, "FlashMLAMetadata", "0 0.31 inf", "0", "model.layers.1", 7
)
COUNTS = {"checks": 90, "mismatches": 4, "quarantined-graphs": 1, "steps-left-out": 0, "milliseconds": 1200}


def rank_with(wrong: tuple[Wrong, ...]) -> Record:
    """A rank that checks, with what it has found."""
    shadow = FixReport("auto", "active", "shadow-v1: active")
    return record(rank=0, fixes={"shadow": shadow}, events={"shadow": COUNTS}, wrong=wrong)


def test_a_record_brings_what_was_found_wrong_and_older_ones_have_none() -> None:
    told = rank_with((WRONG,) * 5)
    written = told.as_json()
    assert Record.from_json(written) == told
    del written["wrong"]
    assert Record.from_json(written).wrong == ()
    longest = Wrong("g" * SHORT, 2**62, 2**62, "b" * SHORT, "e" * SHORT, "n" * SHORT, "l" * SHORT, 2**62)
    assert len(json.dumps(rank_with((longest,) * 5).as_json())) < 8000


@pytest.mark.parametrize("broken", [{"rows": -1}, {"graph": None}, {"errors": "x" * 2000}, {"check": "1"}])
def test_a_record_that_somebody_has_forged_is_refused(broken: dict[str, Any]) -> None:
    written = rank_with((WRONG,)).as_json()
    written["wrong"]["0"] |= broken
    with pytest.raises(RecordError, match=r"wrong\.0"):
        Record.from_json(written)


@pytest.mark.usefixtures("alone")
def test_fleet_says_that_graphs_are_wrong_and_report_writes_it_down(tmp_path: Path) -> None:
    write(tmp_path, rank_with((WRONG,)))
    (engine,) = look(tmp_path).engines
    assert [what for what in engine.wrong if "4 in 90 checks; graphs no longer replayed: 1" in what]
    text = markdown(look(tmp_path)) or ""
    for part in (
        "vLLM 0.21.0",
        "`some/model`",
        "0 0.31 inf",
        "BatchDescriptor(num_tokens=4)",
        "`model.layers.1`",
        "rank 0",
    ):
        assert part in text
    reported = CliRunner().invoke(app, ["report", "--dir", str(tmp_path)])
    assert (reported.exit_code, reported.stdout) == (0, text)
    write(tmp_path, record(rank=0))
    assert markdown(look(tmp_path)) is None
    assert CliRunner().invoke(app, ["report", "--dir", str(tmp_path)]).exit_code == 3


def test_a_rank_tells_its_first_mismatch_of_each_graph_with_the_layer_once_it_is_known(monkeypatch: Any) -> None:
    shadow = Shadow(Rate(every=1), Action.REPORT)
    monkeypatch.setattr(process, "SHADOW", shadow)
    results = shadow.results
    graphs = [Graph(f"target model, {number}", 4, ("Metadata",)) for number in range(7)]
    for graph in graphs:
        for layer in (None, "layer.1", None):
            results.add(Mismatch(graph, 2, (0.0, math.inf), 0.0, layer, 1, 0.0, here=True))
    results.add(Mismatch(graphs[0], 2, (), 0.0, None, 1, 0.0, here=False))
    assert [(wrong.graph, wrong.layer) for wrong in process.wrong()] == [
        (graph.name, "layer.1") for graph in graphs[:5]
    ]
    assert process.wrong()[0].errors == "0 inf"
    assert process.counts()["shadow"]["mismatches"] == 22


@pytest.mark.parametrize(
    ("refused", "stopped", "state", "reason"),
    [
        (None, None, "active", "shadow-v1: active"),
        ("a KV connector", None, "incompatible", "a KV connector"),
        (None, "RuntimeError: x", "failed", "nothing is checked any more: RuntimeError: x"),
    ],
)
def test_one_state_tells_of_both_runners_and_of_the_check(
    monkeypatch: Any, refused: str | None, stopped: str | None, state: str, reason: str
) -> None:
    shadow = Shadow(Rate(every=1), Action.REPORT)
    shadow.stopped = stopped
    monkeypatch.setattr(process, "SHADOW", shadow)
    monkeypatch.setattr(process, "REFUSED", refused)
    runners = {
        "shadow-v1": FixState("shadow-v1", Mode.AUTO, None, State.ACTIVE, "applied"),
        "shadow-v2": FixState("shadow-v2", Mode.AUTO, None, State.WAITING, "to be diagnosed"),
    }
    for order in (list(runners.items()), list(runners.items())[::-1]):
        found = process.state(dict(order))
        assert (found.name, found.state.value) == ("shadow", state)
        assert reason in found.reason


def test_an_engine_of_which_drafts_alone_could_be_checked_is_not_said_to_be_checked() -> None:
    runners = {
        "shadow-v2": FixState("shadow-v2", Mode.AUTO, None, State.INCOMPATIBLE, "unrecognised"),
        "shadow-v2-drafter": FixState("shadow-v2-drafter", Mode.AUTO, None, State.ACTIVE, "applied"),
    }
    for order in (list(runners.items()), list(runners.items())[::-1]):
        assert process.state(dict(order)).state is State.INCOMPATIBLE
