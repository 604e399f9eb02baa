"""Calls of a wrapper of graphs go on, whatever fails in what the shadow check does around them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graphfix.fix import Activity
from vllm_graphfix.shadow import drafter_v2, encoder, pieces, process, runner_v1, runner_v2
from vllm_graphfix.shadow.check import Shadow
from vllm_graphfix.shadow.memory import Memory


class Wrapper:
    runnable = None

    def __call__(self, value: int) -> int:
        return value


@pytest.mark.parametrize(("has_full", "counted"), [(True, 1), (False, 0)])
@pytest.mark.parametrize("fails", ["the flag", "vLLM's context"])
def test_a_call_goes_on_and_is_counted_where_it_cannot_be_read_whether_it_is_a_warm_up(
    fails: str, has_full: bool, counted: int
) -> None:
    """An error on one rank alone would leave the others in a collective."""

    class Unreadable:
        @property
        def measuring(self) -> bool:
            raise OSError("planted")

    schedule = SimpleNamespace(count=0, due=9, timed=False)
    measurements: Any = Unreadable() if fails == "the flag" else Memory()
    shadow: Any = SimpleNamespace(schedule=schedule, quarantined=(), memory=measurements)
    wrapper: Any = Wrapper()
    wrapper.__class__ = runner_v1._measuring_class(Wrapper, shadow, has_full=has_full)
    assert wrapper(3) == 3
    assert schedule.count == counted


class Failing:
    """Fails when it is asked for what *fails* names."""

    timed, due, count, within = False, 1, 0, 0

    def __init__(self, fails: str) -> None:
        self._fails = fails

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "_fails"):
            raise OSError("planted")
        return object.__getattribute__(self, name)


class ShadowStandIn(Failing):
    """A check whose next step is due, and of which nothing is read."""

    quarantined: tuple[str, ...] = ()
    lockstep = None
    checks_pieces = False
    is_due_in_pieces = Shadow.is_due_in_pieces

    def __init__(self, fails: str, schedule: Failing) -> None:
        super().__init__(fails)
        self.schedule = schedule
        self.stopped: list[Exception] = []

    def plan_next(self) -> None: ...

    def read(self, *_: object) -> None: ...

    def stop_on_this_rank(self, error: Exception) -> None:
        self.stopped.append(error)


@pytest.mark.parametrize("fails", ["", "count", "due", "plan_next", "read", "lockstep"])
def test_a_check_that_fails_around_a_call_stops_and_the_call_goes_on(fails: str) -> None:
    shadow: Any = ShadowStandIn(fails, Failing(fails))
    wrapper: Any = runner_v1._checking_class(Wrapper, shadow)()
    assert wrapper(3) == 3
    assert [str(error) for error in shadow.stopped] == (["planted"] if fails else [])


@pytest.mark.parametrize("fails", ["", "count", "due", "plan_next", "read", "quarantined"])
def test_a_check_that_fails_around_a_replay_of_v2_stops_and_the_replay_goes_on(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow: Any = ShadowStandIn(fails, Failing(fails))
    if fails == "quarantined":
        shadow.schedule.due = 9
    monkeypatch.setattr(process, "SHADOW", shadow)
    replay: Any = runner_v2._check_replays(lambda _, desc: desc, SimpleNamespace())  # type: ignore[arg-type]
    assert replay(SimpleNamespace(), 3) == 3
    assert [str(error) for error in shadow.stopped] == (["planted"] if fails else [])


@pytest.mark.parametrize("fails", ["", "count", "due", "plan_next", "read"])
@pytest.mark.parametrize("runner", ["V1", "V1 beside full", "V2"])
def test_a_check_that_fails_around_a_step_in_pieces_stops_and_the_step_goes_on(
    runner: str, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow: Any = ShadowStandIn(fails, Failing(fails))
    shadow.checks_pieces = True
    context: Any = SimpleNamespace(cudagraph_runtime_mode=SimpleNamespace(name="PIECEWISE"))
    monkeypatch.setitem(sys.modules, "vllm.forward_context", SimpleNamespace(_forward_context=context))
    monkeypatch.setattr(process, "SHADOW", shadow)
    activity: Any = SimpleNamespace()
    if runner == "V2":
        manager = SimpleNamespace(use_breakable_cg=False)
        run: Any = pieces._check_calls(lambda _, model, inputs: inputs, activity)
        assert run(manager, None, 3) == 3
    elif runner == "V1":
        run = pieces._check_steps(lambda _, value: value, activity)
        assert run(SimpleNamespace(model=None), 3) == 3
    else:
        run = runner_v1._checking_class(Wrapper, shadow)()
        assert run(3) == 3
    assert [str(error) for error in shadow.stopped] == (["planted"] if fails else [])


@pytest.mark.parametrize("fails", ["", "count", "due", "read"])
def test_a_check_that_fails_around_a_replay_of_a_drafter_stops_and_the_replay_goes_on(fails: str) -> None:
    shadow: Any = ShadowStandIn(fails, Failing(fails))
    replay = drafter_v2._counting_replay(lambda desc: desc, drafter_v2._Drafter(None, None, {}), shadow)
    assert replay(3) == 3
    assert [str(error) for error in shadow.stopped] == (["planted"] if fails else [])


def test_an_encoder_goes_on_where_its_manager_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[Exception] = []
    shadow: Any = SimpleNamespace(checks_encoder=True, stop_on_this_rank=stops.append)
    monkeypatch.setattr(process, "SHADOW", shadow)
    run = encoder._check_replays(lambda self, images, budget, path, **axes: (images, budget, path, axes), Activity())
    assert run(SimpleNamespace(), "images", 8, axis_keys=("a",)) == ("images", 8, "default", {"axis_keys": ("a",)})
    assert [type(each) for each in stops] == [AttributeError]


@pytest.mark.parametrize(("slots", "ranks"), [({}, 1), ({"layer": [0, 1, 2, -1]}, 1), ({"layer": [0, -1, -1, -1]}, 2)])
def test_padded_rows_are_known_by_slots_and_else_by_the_end_of_the_last_request(
    slots: dict[str, list[int]], ranks: int
) -> None:
    """An encoder's layers have no slots, and a rank of several has those of its own tokens alone."""
    import torch

    context = SimpleNamespace(
        slot_mapping={layer: torch.tensor(each) for layer, each in slots.items()},
        attn_metadata={"layer": SimpleNamespace(query_start_loc=torch.tensor([0, 1, 3]))},
    )
    config = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=ranks))
    assert runner_v1.real_rows(context, config) == 3
