"""Compiled models that are called with other arguments than torch.compile traced: the detector `traced`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from behaviours import check_behaviours
from records import record
from stock import ALL_RELEASES
from table import slow_but_for
from vllm_graphfix.commands.fleet import look
from vllm_graphfix.engine.components import Services
from vllm_graphfix.engine.components.traced import TracedComponent
from vllm_graphfix.engine.traced import MODULE, TracedCheck
from vllm_graphfix.records import TracedArgument, write
from vllm_graphfix.settings.decision import decide, decode
from vllm_graphfix.settings.environment import TRACED, Traced, read

OFF = {"VLLM_GRAPHFIX": "off"}


@pytest.mark.parametrize("release", slow_but_for(("0.16.0", "0.22.1", "0.33.0"), ALL_RELEASES))
def test_stock_releases_differ_where_they_have_a_defect_and_nowhere_else(release: str) -> None:
    check_behaviours(release, "traced", OFF)


@pytest.mark.parametrize("release", slow_but_for(("0.22.1",), ("0.20.0", "0.20.2", "0.21.0", "0.22.0", "0.22.1")))
def test_with_the_fix_nothing_differs(release: str) -> None:
    check_behaviours(release, "traced", active=("deepstack-features",))


@pytest.mark.parametrize("release", slow_but_for(("0.16.0",), ("0.15.0", "0.15.1", "0.16.0")))
def test_with_the_fix_of_model_runner_v2_nothing_differs(release: str) -> None:
    check_behaviours(release, "traced", {"VLLM_GRAPHFIX_IMAGE_EMBEDDINGS": "on"}, active=("image-embeddings",))


def component(settings: dict[str, str]) -> TracedComponent:
    nothing: Any = lambda *_: None  # noqa: E731 - for five fields
    one = TracedComponent(Services(nothing, nothing, nothing, nothing, nothing))
    policy: Any = None
    one.start(decide(read(settings, ()), "0.33.0"), policy)
    return one


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module of wrappers around compiled models, with a constructor alone."""

    class Wrapper:
        def __init__(self) -> None: ...

    module = ModuleType(MODULE)
    vars(module).update(TorchCompileWithNoGuardsWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def test_off_it_is_not_even_made(wrapper: Any) -> None:
    stock = wrapper.TorchCompileWithNoGuardsWrapper.__init__
    off = component({})
    assert (off.check, off.counts(), off.findings()) == (None, {}, {})
    assert wrapper.TorchCompileWithNoGuardsWrapper.__init__ is stock
    on = component({TRACED: "report"})
    assert wrapper.TorchCompileWithNoGuardsWrapper.__init__ is not stock
    on.after_fork()
    assert (on.counts(), on.findings()) == ({}, {"traced": ()})


class ModelDouble:
    compiled = False

    def __init__(self) -> None:
        self.compiled = False
        self.called: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.compiled = True
        self.called.append((args, kwargs))

    def forward(self, states: Any, **others: Any) -> None: ...


def test_an_error_ends_the_comparison_and_vllm_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    check = TracedCheck()
    check.begin(is_on=True)
    model = ModelDouble()
    for states in ((), (1,), (1,), (2,)):  # the first does not fit `forward`
        check._call(ModelDouble.__call__, model, states, {})
    assert [args for args, _ in model.called] == [(), (1,), (1,), (2,)]
    assert check.counts() == {"traced": {"compared": 0, "differing": 0, "failures": 1}}
    assert len([record for record in caplog.records if "are not compared" in record.message]) == 1


def test_a_decision_holds_the_setting() -> None:
    decision = decide(read({TRACED: "report"}, ()), "0.33.0")
    assert decision.compares_traces
    assert decode(decision.encode()) == decision
    assert not decision.same_choice(decision._replace(traced=Traced.OFF))


def test_fleet_calls_such_an_engine_not_in_order(tmp_path: Path) -> None:
    counts = {"compared": 9, "differing": 4, "failures": 0}
    written = record(rank=0, traced=(TracedArgument("Model", "added", "None", "a tensor"),), events={"traced": counts})
    write(tmp_path, written)
    (engine,) = look(tmp_path).engines
    (wrong,) = engine.wrong
    assert "in 4 of 9 calls: added of Model is a tensor, and was None. Serve with -cc.mode=0" in wrong
    write(tmp_path, record(rank=0, events={"traced": counts | {"differing": 0, "failures": 1}}))
    (engine,) = look(tmp_path).engines
    assert not engine.wrong
    assert [note for note in engine.notes if "arguments of compiled models are not compared" in note]
