"""Which replays the shadow check takes: a fraction of them, or as many as a budget of the time allows."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_graphfix.settings import shadow_rate
from vllm_graphfix.settings.decision import decide, decode
from vllm_graphfix.settings.environment import SHADOW, SHADOW_ACTION, SHADOW_GRAPHS, read
from vllm_graphfix.settings.shadow_rate import Action, Rate, ShadowGraphs
from vllm_graphfix.shadow.schedule import Schedule, place

# -- how often


@pytest.mark.parametrize(
    ("text", "actual", "normal"),
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
def test_a_rate_is_a_fraction_of_the_replays_or_a_budget_of_the_time(text: str, actual: Rate, normal: str) -> None:
    assert shadow_rate.parse(text) == pytest.approx(actual)
    assert shadow_rate.normal(text) == normal
    assert shadow_rate.normal(normal) == normal
    assert bool(actual) == (normal != "off")


@pytest.mark.parametrize(
    "text", ["on", "1/0", "2/3", "0%", "101%", "0.1", "1/1e3", "x" * 9999, "1/\u0662", "-1%", "1/9999999999"]
)
def test_a_value_that_is_no_rate_is_reported_with_one_that_is(text: str) -> None:
    actual = read({SHADOW: text, SHADOW_ACTION: "quarantin"}, ())
    assert (actual.shadow, actual.shadow_action) == ("off", Action.REPORT)
    first, second = actual.problems
    assert shadow_rate.VALID in first
    assert "did you mean quarantine?" in second


@given(st.text(max_size=30))
def test_no_text_raises_anything_but_what_settings_expect(text: str) -> None:
    try:
        actual = shadow_rate.normal(text)
    except ValueError:
        return
    assert shadow_rate.normal(actual) == actual


def test_all_processes_of_an_engine_go_by_the_rate_of_the_first() -> None:
    wanted = {SHADOW: "1/50", SHADOW_ACTION: "Quarantine", SHADOW_GRAPHS: "All"}
    made = decide(read(wanted, ()), "0.21.0", host="one")
    assert (made.shadow, made.shadow_action, made.shadow_graphs) == ("1/50", Action.QUARANTINE, ShadowGraphs.ALL)
    assert decode(made.encode()) == made
    assert not made.same_choice(made._replace(shadow="off"))
    assert not made.same_choice(made._replace(shadow_graphs=ShadowGraphs.FULL))
    for forged in ({"shadow": "2/3"}, {"shadow": 5}, {"shadow_action": "reboot"}, {"shadow_graphs": "none"}):
        assert decode(json.dumps(json.loads(made.encode()) | forged)) is None


# -- which


def due_steps(schedule: Schedule, steps: int) -> list[int]:
    """The steps that are checked, counted from 1; ranks of one group do the same."""
    actual = []
    for _ in range(steps):
        schedule.count += 1
        if schedule.count >= schedule.due:
            actual.append(schedule.count)
            schedule.check_in(schedule.wanted(0.0))
    return actual


@given(st.integers(1, 300), st.integers(1, 20))
def test_of_a_fraction_each_window_has_one_check_wherever_it_is(every: int, windows: int) -> None:
    actual = due_steps(Schedule(Rate(every=every)), every * windows)
    assert [(step - 1) // every for step in actual] == list(range(windows))
    assert actual == due_steps(Schedule(Rate(every=every)), every * windows)  # on every rank


def test_a_batch_that_repeats_is_checked_at_all_its_places() -> None:
    assert {place(window, 8) for window in range(200)} == set(range(8))


def test_a_check_that_came_late_puts_the_next_into_its_own_window() -> None:
    schedule = Schedule(Rate(every=10))
    schedule.count = 57
    schedule.check_in(schedule.wanted(0.0))
    assert 60 < schedule.due <= 70


@given(
    share=st.sampled_from([0.0005, 0.001, 0.01, 0.05]),
    typical=st.floats(0.002, 0.05),
    load=st.lists(st.floats(0.7, 1.4), min_size=4, max_size=4),
    costs=st.lists(st.floats(0.01, 0.2), min_size=5, max_size=5),
)
def test_a_budget_holds_within_half_over_five_minutes(
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
        schedule.check_in(schedule.wanted(cost))
    # What is spent at once cannot be less than one check, and the first is before anything is known.
    assert share * now / 1.5 - 2 * max(costs) <= spent <= 1.5 * share * now + 2 * max(costs)


@pytest.mark.parametrize("first", [0.05, 0.15, 0.3])
@pytest.mark.parametrize("later", [0.008, 0.02])
@pytest.mark.parametrize("step", [0.0027, 0.02])
@pytest.mark.parametrize("replays", [1, 4])
def test_a_budget_of_a_thousandth_holds_after_five_minutes(
    first: float, later: float, step: float, replays: int
) -> None:
    """On a GPU it was measured so: kernels that only run without graphs are loaded in the first check.

    Of *replays* in a step three are a drafter's.
    """
    schedule = Schedule(Rate(share=0.001))
    now, spent = 0.0, 0.0
    while now + (steps := math.ceil((schedule.due - schedule.count) / replays)) * step < 300:
        schedule.count += steps * replays
        schedule._busy += steps * step
        now += steps * step
        cost = later if spent else first
        spent += cost
        schedule.check_in(schedule.wanted(cost))
    assert 1 / 1.5 < spent / (0.001 * 300) < 1.5


def test_steps_that_cannot_be_checked_are_not_tried_one_after_the_other() -> None:
    schedule = Schedule(Rate(share=0.001))
    tried = 0
    for _ in range(60_000):
        schedule.count += 1
        schedule._busy += 0.003
        if schedule.count >= schedule.due:
            tried += 1
            schedule.check_in(schedule.wanted_later(0.0001))
    assert tried == 12
    assert schedule._spent == pytest.approx(12 * 0.0001)


def test_what_an_agreement_took_is_spent_and_no_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_graphfix.shadow import schedule as module

    now = iter([0.0, 0.01, 0.04])
    monkeypatch.setattr(module, "perf_counter", lambda: next(now))
    schedule = Schedule(Rate(share=0.01))
    schedule.tick()
    schedule.add_planning(0.02)
    schedule.tick()
    assert schedule._busy == pytest.approx(0.02)
    assert schedule._spent == 0.02


def test_a_pause_of_the_engine_is_no_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_graphfix.shadow import schedule as module

    now = iter([0.0, 0.01, 0.02, 50.0, 50.01])
    monkeypatch.setattr(module, "perf_counter", lambda: next(now))
    schedule = Schedule(Rate(share=0.01))
    for _ in range(4):
        schedule.tick()
    assert schedule._busy == pytest.approx(0.03)
