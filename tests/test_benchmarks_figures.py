"""The figures of the benchmark of real engines, and the wrappers that a step is measured with and without."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from benchmarked import sites

# isort: split
import engine_cost
from measuring import engine_figures, engine_plot
from measuring.engine_cases import MLA, plan
from measuring.engine_steps import STEPS, step_plans, step_table
from measuring.wrappers import ORDER, Ratio, Switch, in_turns
from vllm_graphfix.fix import Activity, Patch, StockFunction
from vllm_graphfix.patching import sites as patching


def measured(**seconds: float) -> dict[str, Any]:
    """A case with one round of batch 1, in which the engines took *seconds*."""
    made = plan(MLA, sites("0.21.0", "0.22.1"))
    assert made is not None
    facts = {"compilation_mode": "VLLM_COMPILE", "cudagraph_mode": "FULL_AND_PIECEWISE", "active": ["capture-state"]}
    return {
        "name": "mla",
        "title": "MLA",
        "fixes": ["capture-state"],
        "tokens": 11,
        "not_run": [],
        "configurations": [
            {
                "name": c.name,
                "label": c.label,
                "release": c.site.release,
                "graphs": c.graphs,
                "attempt": 0,
                "failure": None,
                "told": dict(facts),
            }
            for c in made.configurations
        ],
        "rounds": [{"batch": 1, "seconds": seconds}],
        "starts": [],
    }


def start(seconds: float, mib: float) -> dict[str, Any]:
    held = int(mib * engine_figures.MIB)
    return {"seconds": seconds, "cpu_seconds": 1.0, "capture_seconds": None, "used_bytes": held, "reserved_bytes": held}


def test_a_ratio_is_of_the_same_round() -> None:
    case = measured(eager=4.0, patched=2.0)
    case["rounds"].append({"batch": 1, "seconds": {"eager": 40.0, "patched": 10.0}})
    assert engine_figures.throughput(case, "patched", "eager", 1) == (3.0, 2.0, 4.0, 2)


def test_a_round_in_which_one_is_missing_counts_for_neither() -> None:
    case = measured(eager=4.0)
    assert engine_figures.throughput(case, "patched", "eager", 1) is None


@pytest.mark.parametrize(("patched", "met"), [(1.0, True), (1.005, True), (1.02, False)])
def test_patched_may_be_slower_than_stock_by_one_percent(patched: float, met: bool) -> None:
    first = engine_figures.targets(measured(stock=1.0, patched=patched))[0]
    assert first.met is met


@pytest.mark.parametrize(("patched", "met"), [(2.0, True), (3.0, False)])
def test_patched_is_to_be_half_as_fast_again_as_eager(patched: float, met: bool) -> None:
    (target,) = (t for t in engine_figures.targets(measured(eager=4.0, patched=patched)) if "eager" in t.what)
    assert target.met is met


@pytest.mark.parametrize(
    ("seconds", "mib", "met"),
    [(20.0, 5000.0, [True, True]), (22.0, 5010.0, [False, True]), (20.0, 5017.0, [True, False])],
)
def test_start_up_and_memory_have_their_targets(seconds: float, mib: float, met: list[bool]) -> None:
    case = measured(stock=1.0, patched=1.0)
    case["starts"] = [{"stock": start(20.0, 5000.0), "patched": start(seconds, mib)}]
    assert [target.met for target in engine_figures.targets(case)[-2:]] == met


def test_engines_that_were_not_started_alike_are_not_compared() -> None:
    case = measured(stock=1.0, patched=1.0)
    next(engine for engine in case["configurations"] if engine["name"] == "stock")["attempt"] = 1
    assert engine_figures.targets(case)[0].met is None


def test_a_patched_engine_without_its_fix_is_called_out() -> None:
    case = measured(stock=1.0, patched=1.0)
    next(engine for engine in case["configurations"] if engine["name"] == "patched")["told"]["active"] = []
    assert "NOT at work: capture-state; the patched engine is not one" in engine_figures.notes(case)


def test_full_graphs_that_vllm_made_something_else_are_called_out() -> None:
    case = measured(stock=1.0, patched=1.0)
    next(engine for engine in case["configurations"] if engine["name"] == "fixed")["told"]["cudagraph_mode"] = (
        "PIECEWISE"
    )
    assert any("vLLM made it PIECEWISE" in note for note in engine_figures.notes(case))


def test_tokens_a_second_are_those_of_the_whole_batch() -> None:
    case = measured(eager=2.0)
    case["rounds"] = [{"batch": 8, "seconds": {"eager": 2.0}}]
    assert engine_figures.tokens_a_second(case, "eager", 8) == 8 * 10 / 2.0


def test_the_picture_names_the_stock_engine_as_wrong_and_is_well_formed() -> None:
    result = {
        "date": "2026-11-21T00:00:00+00:00",
        "device": {"name": "Double of a GPU", "driver": "0", "torch": "0"},
        "cases": [measured(eager=4.0, stock=2.0, patched=2.0, fixed=1.0)],
    }
    drawn = ET.fromstring(engine_plot.svg(result))  # noqa: S314 - our own
    texts = [element.text or "" for element in drawn.iter() if element.text]
    assert "full graphs, stock (wrong tokens)" in texts
    assert "did not run" in texts  # the piecewise engine
    assert "4.00×" in texts


def test_a_table_for_a_page_has_a_line_for_each_engine() -> None:
    decoding = engine_figures.tables(measured(eager=4.0, patched=2.0))[0]
    assert (
        engine_figures.markdown(decoding)
        .splitlines()[-1]
        .startswith("| 1 | full graphs, patched | 200.000 | 5 | 2.000")
    )


def step_measured(**ratios: Ratio) -> dict[str, Any]:
    """A case of `--steps` of batch 1, with the ratios of its engines."""
    (made,) = step_plans(sites("0.33.0"), STEPS[:1])
    facts = {"compilation_mode": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY", "active": ["capture-state"]}
    engines: list[dict[str, Any]] = [
        {"name": c.name, "label": c.label, "graphs": c.graphs, "attempt": 0, "failure": None, "told": facts}
        for c in made.configurations
    ]
    for engine in engines:
        if engine["name"] in ratios:
            both = {"compared": ratios[engine["name"]], "control": Ratio(1.0, 0.999, 1.001)}
            engine["steps"] = [{"batch": 1, "steps": 40, "milliseconds": 1.5, **both}]
    shared: dict[str, Any] = {"fixes": [], "not_run": [], "rounds": [], "starts": [], "tokens": 11}
    return {"title": made.case.title, "target": made.case.target, "configurations": engines, **shared}


AS_STOCK = Ratio(1.0, 0.99, 1.01)


@pytest.mark.parametrize(
    ("patched", "observed", "judged"),
    [
        (AS_STOCK, AS_STOCK, "met"),
        (Ratio(0.995, 0.99, 0.999), AS_STOCK, "met"),
        (Ratio(0.994, 0.99, 0.996), AS_STOCK, "within noise"),
        (AS_STOCK, Ratio(0.994, 0.99, 0.996), "within noise"),
        (Ratio(0.99, 0.985, 0.994), AS_STOCK, "not met"),
        (AS_STOCK, Ratio(0.99, 0.985, 0.994), "not met"),
    ],
)
def test_a_step_may_be_slower_than_stock_by_half_a_percent(patched: Ratio, observed: Ratio, judged: str) -> None:
    (row,) = step_table([step_measured(patched=patched, observed=observed)]).rows
    assert (row[0], row[2], row[-1]) == ("Llama, V2: no fix acts, 0.33.0", "1.500", judged)


def test_a_step_without_one_of_its_engines_is_not_compared() -> None:
    (row,) = step_table([step_measured(patched=AS_STOCK)]).rows
    assert row[-2:] == ("", "not compared")


def test_what_drifts_from_step_to_step_is_no_difference() -> None:
    seconds = [1.0 + number / 1000 for number in range(400)]
    ratio = Ratio.of(seconds)
    assert ratio.median == pytest.approx(1.0, abs=1e-6)
    assert ratio.low <= ratio.median <= ratio.high
    slower = [each * (1.1 if on else 1.0) for each, on in zip(seconds, ORDER * 100, strict=True)]
    assert Ratio.of(slower).median == pytest.approx(1 / 1.1, abs=1e-3)
    with pytest.raises(ValueError, match="4 steps"):
        Ratio.of(seconds[:3])


def test_wrappers_are_off_and_on_again_where_they_were_put_and_carried_to(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm.of_this_test")
    text = "def target():\n    return 'stock'\nclass Runner:\n    def step(self):\n        return 'stock'"
    exec(text, vars(module))  # noqa: S102
    module.__spec__ = None
    other = ModuleType("vllm.that_imports_it")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, other.__name__, other)
    monkeypatch.setattr(patching, "_sites", {})
    monkeypatch.setattr(patching.Site, "lost", patching.Site.lost)  # to be put back

    def ours(stock: StockFunction, activity: Activity) -> Callable[..., Any]:
        @functools.wraps(stock)
        def wrapper(*args: Any) -> Any:
            return f"patched {stock(*args)}"

        return wrapper

    patches = [Patch(module.__name__, name, ours) for name in ("target", "Runner.step")]
    patching.apply("a-fix", patches, Activity((), corrects=True))
    other.target = module.target  # type: ignore[attr-defined]

    def answers() -> list[str]:
        return [module.target(), module.Runner().step(), other.target()]

    switch = Switch()
    assert switch.functions == ["Runner.step", "of_this_test.target"]
    seen: list[list[str]] = []

    def step() -> float:
        seen.append(answers())
        return 1.0

    assert in_turns(switch, step, 4) == [1.0] * 4
    patched, stock = ["patched stock"] * 3, ["stock"] * 3
    assert [*seen, answers()] == [patched, stock, stock, patched, patched]
    switch.set(on=False)
    assert all(site.lost() is None for site in patching._sites.values())  # or the plugin would give its fixes up
    seen.clear()
    in_turns(switch, step, 4, control=True)
    assert [*seen, answers()] == [stock] * 4 + [patched]


def test_results_of_several_releases_are_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name in ("a", "b"):
        case = step_measured(patched=AS_STOCK, observed=AS_STOCK)
        device = {"name": "Double of a GPU", "driver": "0", "torch": "0"}
        whole = {"device": device, "graphfix": "0", "date": "2026-11-24", "machine": "a machine", "cases": [case]}
        files.append(tmp_path / name)
        files[-1].write_text(json.dumps(whole))
    monkeypatch.setattr(sys, "argv", ["engine_cost.py", "--markdown", "--from", *map(str, files)])
    assert engine_cost.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("| Llama, V2")]) == 2
    assert len([line for line in lines if line.startswith("| engine")]) == 1
    assert any("fixes at work in the patched engine: capture-state" in line for line in lines)
