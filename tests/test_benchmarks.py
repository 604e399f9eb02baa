"""The benchmark of real engines, as far as it needs none.

What it runs where, how engines take turns and end, and its figures.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from stock import release_root

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import engine_cost
import prefill_dispatch_cost
import shadow_faults
from measuring import engine_cases, engine_figures, engine_plot, engine_process
from measuring.engine_cases import CASES, MLA, MLA_FP8, Site, find_sites, plan
from measuring.engine_process import DiedError, EngineProcess, Order
from measuring.engine_steps import STEPS, packed, step_plans, step_table
from measuring.wrappers import ORDER, Ratio, Switch, in_turns
from vllm_graphfix.fix import Activity, Patch, StockFunction, variable
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.patching import sites as patching
from vllm_graphfix.verify.engine.device import Device

STAND_IN = Path(__file__).parent / "support" / "engine_worker_stand_in.py"
GPU = Device("Double of a GPU", "", (9, 0), 100.0, 139.0, "0", "0", "0", "0")
Run = Callable[..., dict[str, Any]]


def sites(*releases: str) -> tuple[Site, ...]:
    return find_sites([f"{release}={release_root(release)}" for release in releases])


# -- what is run where


def test_a_case_runs_on_the_newest_affected_release_and_the_first_fixed_one_after_it() -> None:
    given = sites("0.22.1", "0.18.1", "0.33.0", "0.20.0", "0.21.0")
    plans = [plan(case, given) for case in CASES]
    releases = {made.case.name: {c.name: c.site.release for c in made.configurations} for made in plans if made}
    assert {name: (on["stock"], on["fixed"]) for name, on in releases.items()} == {
        "mla": ("0.21.0", "0.22.1"),
        "mla-fp8": ("0.18.1", "0.20.0"),
        "mamba2": ("0.21.0", "0.22.1"),
    }


def test_all_but_the_fixed_engine_are_of_the_affected_release() -> None:
    made = plan(MLA, sites("0.21.0", "0.22.1"))
    assert made is not None
    assert {c.name for c in made.configurations if c.site.release == "0.21.0"} == {
        "eager",
        "piecewise",
        "stock",
        "stock-again",
        "patched",
    }


def test_without_a_fixed_release_its_engine_is_listed_as_not_run() -> None:
    made = plan(MLA, sites("0.21.0"))
    assert made is not None
    assert "fixed" not in {c.name for c in made.configurations}
    assert made.not_run == ("no release with the upstream fix was given",)


def test_a_case_that_concerns_no_given_release_has_no_plan() -> None:
    assert plan(MLA_FP8, sites("0.21.0", "0.22.1")) is None


def test_a_folder_with_another_release_than_said_is_refused() -> None:
    with pytest.raises(ValueError, match=r"holds vLLM 0\.21\.0, not 0\.22\.1"):
        find_sites([f"0.22.1={release_root('0.21.0')}"])


def test_only_the_patched_engine_loads_the_plugin() -> None:
    made = plan(MLA, sites("0.21.0", "0.22.1"))
    assert made is not None
    plugins = {c.name: c.environment(MLA, (), Path())["VLLM_PLUGINS"] for c in made.configurations}
    assert [name for name, plugin in plugins.items() if plugin] == ["patched"]
    assert [c.name for c in made.configurations if c.plugin] == ["patched"]


def test_an_engine_finds_its_own_vllm_first_and_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given = sites("0.21.0", "0.22.1")
    other = str(release_root("0.22.1"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([other, "somewhere-else"]))
    made = plan(MLA, given)
    assert made is not None
    path = made["stock"].environment(MLA, given, Path())["PYTHONPATH"].split(os.pathsep)
    assert path == [str(release_root("0.21.0").resolve()), "somewhere-else"]


def test_no_setting_from_outside_reaches_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_GRAPHFIX", "off")
    made = plan(MLA, sites("0.21.0"))
    assert made is not None
    assert "VLLM_GRAPHFIX" not in made["patched"].environment(MLA, (), Path())


def test_the_largest_batch_is_prefilled_in_one_step_and_fits_the_largest_graph() -> None:
    source = (Path(engine_process.WORKER)).read_text()
    (prompt,) = (int(line.split("=")[1]) for line in source.splitlines() if line.startswith("PROMPT ="))
    assert prompt * max(engine_cases.SIZES) <= engine_cases._ENGINE["max_num_batched_tokens"]


# -- a decode step alone


def test_each_case_of_a_step_runs_on_each_release() -> None:
    plans = step_plans(sites("0.21.0", "0.33.0"), STEPS)
    assert [made.case.name for made in plans] == [
        f"{name}_{release}" for release in ("0.21.0", "0.33.0") for name in ("llama", "hybrid", "drafts", "flash")
    ]
    assert all(len({c.site for c in made.configurations}) == 1 for made in plans)


def test_a_step_is_patched_as_by_default_and_observed_by_every_fix() -> None:
    (made,) = step_plans(sites("0.21.0"), STEPS[:1])
    switches = {
        c.name: {name: value for name, value in c.environment(made.case, (), Path()).items() if "GRAPHFIX" in name}
        for c in made.configurations
    }
    assert switches == {"patched": {}, "observed": dict.fromkeys(map(variable, BY_NAME), "observe")}
    plugins = {c.environment(made.case, (), Path())["VLLM_PLUGINS"] for c in made.configurations}
    assert plugins == {"graphfix"}


@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.name)
def test_every_batch_of_a_step_is_in_a_full_graph(case: engine_cases.Case) -> None:
    (graphs,) = case.graphs["full"]
    drafts = case.arguments.get("speculative_config", {}).get("num_speculative_tokens", 0)
    assert graphs["cudagraph_capture_sizes"] == [size * (1 + drafts) for size in engine_cases.SIZES]
    assert graphs["cudagraph_mode"].startswith("FULL")


@pytest.mark.parametrize(
    ("free_gib", "cores", "groups"),
    [(100.0, 16, [4, 4]), (100.0, 4, [2, 2, 2, 2]), (40.0, 16, [2, 2, 2, 2]), (10.0, 2, [1] * 8)],
)
def test_as_many_engines_of_a_release_as_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, free_gib: float, cores: int, groups: list[int]
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert [len(group) for group in packed(step_plans(sites("0.21.0", "0.33.0"), STEPS), free_gib)] == groups


# -- one engine


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], EngineProcess]]:
    """Starts the stand-in of an engine that behaves as it is told."""
    monkeypatch.setattr(engine_process, "WORKER", STAND_IN)
    engines: list[EngineProcess] = []

    def start(behaviour: str) -> EngineProcess:
        environment = os.environ | {
            "VLLM_CACHE_ROOT": "cache-mla-stock",
            "ENGINE_WORKER_STAND_IN": json.dumps({"mla-stock": behaviour}),
        }
        order = Order(arguments={}, plugin=False, runner="V1", largest_batch=8)
        engines.append(EngineProcess(order, environment, tmp_path / "log"))
        return engines[-1]

    yield start
    for engine in engines:
        engine.end()


def test_an_engine_that_does_not_answer_in_time_is_given_up(started: Callable[[str], EngineProcess]) -> None:
    with pytest.raises(DiedError, match="did not answer in time"):
        started("hangs").ready(0.1)


def test_the_start_of_an_engine_ends_when_it_answers_and_not_when_it_is_asked_for(
    started: Callable[[str], EngineProcess],
) -> None:
    before = time.monotonic()
    engine = started("")
    assert engine._pipe.poll(60)
    answered = time.monotonic()
    started("").ready(60)
    assert engine.ready(60).seconds <= answered - before


def test_a_crash_is_told_in_the_words_of_the_log(started: Callable[[str], EngineProcess]) -> None:
    engine = started("crashes at batch 8")
    engine.ready(60)
    engine.tell(8, 9)
    with pytest.raises(DiedError, match="an illegal memory access was encountered"):
        engine.hear(60)


def test_an_engine_that_was_ended_leaves_no_process(started: Callable[[str], EngineProcess]) -> None:
    engine = started("hangs")
    engine.end()
    assert engine._process.returncode is not None


# -- all of them


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The whole benchmark with stand-ins of engines, some of which behave as *behaviours* says."""
    monkeypatch.setattr(engine_process, "WORKER", STAND_IN)

    def go(
        behaviours: Mapping[str, str],
        *arguments: str,
        device: Device = GPU,
        releases: tuple[str, ...] = ("0.21.0", "0.22.1"),
    ) -> dict[str, Any]:
        monkeypatch.setenv("ENGINE_WORKER_STAND_IN", json.dumps(behaviours))
        monkeypatch.setattr("vllm_graphfix.verify.engine.device.find", lambda: device)
        given = [part for site in sites(*releases) for part in ("--site", f"{site.release}={site.folder}")]
        monkeypatch.setattr(
            sys, "argv", ["engine_cost.py", *given, "--out", str(tmp_path), "--tokens", "5", *arguments]
        )
        engine_cost.main()
        result: dict[str, Any] = json.loads((tmp_path / engine_cost.RESULT).read_text())
        return result

    return go


def case_of(result: Mapping[str, Any], name: str) -> dict[str, Any]:
    return next(case for case in result["cases"] if case["name"] == name)


def test_every_engine_takes_its_turn_in_every_round(run: Run) -> None:
    case = case_of(run({}, "--only", "mla", "--rounds", "2", "--starts", "0"), "mla")
    everybody = {"eager", "piecewise", "stock", "stock-again", "patched", "fixed"}
    assert [turn["batch"] for turn in case["rounds"]] == [1, 8, 64] * 2
    assert all(set(turn["seconds"]) == everybody for turn in case["rounds"])


def test_rounds_alternate_in_their_order(run: Run) -> None:
    case = case_of(run({}, "--only", "mla", "--rounds", "2", "--starts", "0", "--batches", "1"), "mla")
    first, second = (list(turn["seconds"]) for turn in case["rounds"])
    assert first == second[::-1]


def test_an_engine_that_dies_is_reported_and_the_others_go_on(run: Run) -> None:
    result = run({"mla-stock": "crashes at batch 8"}, "--only", "mla", "--rounds", "2", "--starts", "0")
    case = case_of(result, "mla")
    (stock,) = (engine for engine in case["configurations"] if engine["name"] == "stock")
    assert "died while decoding batch 8: CUDA error: an illegal memory access" in stock["failure"]
    assert all(set(turn["seconds"]) >= {"eager", "patched", "fixed"} for turn in case["rounds"])
    assert any(stock["failure"] in note for note in engine_figures.notes(case))


def test_an_engine_whose_compiler_does_not_run_is_started_without_it(run: Run) -> None:
    case = case_of(run({"mla-fixed": "does not compile"}, "--only", "mla", "--rounds", "1", "--starts", "0"), "mla")
    (fixed,) = (engine for engine in case["configurations"] if engine["name"] == "fixed")
    assert (fixed["attempt"], fixed["failure"], fixed["told"]["cudagraph_mode"]) == (1, None, "FULL_DECODE_ONLY")
    assert any("no compiler here" in note for note in engine_figures.notes(case))


def test_stock_and_patched_start_in_pairs(run: Run) -> None:
    case = case_of(run({}, "--only", "mla", "--rounds", "1", "--starts", "2"), "mla")
    assert [set(pair) for pair in case["starts"]] == [{"stock", "patched"}] * 2
    assert [list(pair) for pair in case["starts"]] == [["patched", "stock"], ["stock", "patched"]]


def test_an_interruption_leaves_no_process_and_keeps_what_was_measured(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[EngineProcess] = []
    stock = EngineProcess.tell

    def interrupted(engine: EngineProcess, batch: int, tokens: int) -> None:
        engines.append(engine)
        if len(engines) == 3 * 6 * 2 + 1:  # the batches of all engines once to warm up, once measured
            raise KeyboardInterrupt
        stock(engine, batch, tokens)

    monkeypatch.setattr(EngineProcess, "tell", interrupted)
    case = case_of(run({}, "--only", "mla", "--rounds", "2"), "mla")
    assert all(engine._process.returncode is not None for engine in engines)
    assert len(case["rounds"]) == 3


def test_cases_of_several_releases_run_one_after_the_other(run: Run) -> None:
    result = run({}, "--rounds", "1", "--starts", "0", releases=("0.18.1", "0.20.0", "0.21.0", "0.22.1"))
    assert [(case["name"], len(case["rounds"])) for case in result["cases"]] == [
        ("mla", 3),
        ("mla-fp8", 3),
        ("mamba2", 3),
    ]


def test_the_engines_of_a_step_are_compared_with_themselves(run: Run) -> None:
    behaves = {"flash_0.33.0-patched": "slow with wrappers", "drafts_0.33.0-observed": "slow with wrappers"}
    result = run(behaves, "--steps", "--only", "drafts", "--only", "flash", "--count", "40", releases=("0.33.0",))
    assert [case["name"] for case in result["cases"]] == ["drafts_0.33.0", "flash_0.33.0"]
    drafts, flash = ([each["steps"] for each in case["configurations"]] for case in result["cases"])
    assert [[(each["batch"], each["compared"][0]) for each in engine] for engine in (*drafts, *flash)] == [
        [(1, 1.0), (8, 1.0), (64, 1.0)],
        [(1, 0.5), (8, 0.5), (64, 0.5)],
        [(1, 0.5), (8, 0.5), (64, 0.5)],
        [(1, 1.0), (8, 1.0), (64, 1.0)],
    ]
    # Stock is wrong with FlashAttention and `FULL`: there is no speed of it to reach.
    assert [row[-1] for row in step_table(result["cases"]).rows] == ["not met"] * 3 + ["–"] * 3


def test_each_case_of_a_step_has_a_share_of_the_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(engine_cost.Benchmark, "_steps", lambda self, made, engines, seconds: given.append(seconds))
    monkeypatch.setattr(engine_cost.Benchmark, "_left", lambda self: 120.0)
    run({}, "--steps", "--limit", "120", releases=("0.33.0",))
    assert given == [30.0, 40.0, 60.0, 120.0]


def test_where_time_is_up_nothing_more_is_begun(run: Run) -> None:
    case = case_of(run({}, "--only", "mla", "--limit", "1"), "mla")
    assert (case["rounds"], case["not_run"]) == ([], ["time was up", "starts: stock and patched did not start before"])


def test_another_gpu_runs_what_it_can(run: Run) -> None:
    older = GPU.__class__("Double of an older GPU", "", (8, 0), 100.0, 139.0, "0", "0", "0", "0")
    result = run({}, "--rounds", "1", "--starts", "0", device=older)
    assert case_of(result, "mla")["not_run"] == ["needs compute capability 9.0"]
    assert len(case_of(result, "mamba2")["rounds"]) == 3


def test_a_gpu_without_enough_free_memory_runs_nothing(run: Run) -> None:
    small = GPU.__class__("Double of a small GPU", "", (9, 0), 4.0, 8.0, "0", "0", "0", "0")
    case = case_of(run({}, "--only", "mla", device=small), "mla")
    assert case["not_run"] == ["needs 42 GiB of free GPU memory, 4.0 are"]


def test_without_a_gpu_one_line_says_so(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = GPU.__class__(None, "torch sees no GPU", (0, 0), 0.0, 0.0, "unknown", "0", "none", "0")
    with pytest.raises(FileNotFoundError):  # no result was written
        run({}, device=nothing)
    assert capsys.readouterr().err == (
        "not run: no GPU (torch sees no GPU); --rehearse runs this script on a CPU engine\n"
    )


# -- what prefill-dispatch leaves to stock


def cell(*, repeats: bool = True, patched: bool = True) -> dict[str, Any]:
    return {"eager repeats": repeats, "stock": False, "patched": patched, "taken": 1}


@pytest.mark.parametrize(
    ("tokens", "steps", "expected"),
    [
        ({"a": cell()}, {"b": {"taken": 0, "judged": "within noise"}}, "right"),
        ({"a": cell(patched=False)}, {}, "wrong"),
        ({"a": cell(patched=False, repeats=False)}, {}, "right"),
        ({"a": cell()}, {"b": {"taken": 0, "judged": "not met"}}, "wrong"),
        ({"a": cell()}, {"b": {"taken": 3, "judged": "not met"}}, "right"),
    ],
    ids=["as it should be", "another answer", "no answer to compare with", "a slow step", "a step that lost its graph"],
)
def test_prefill_dispatch_is_judged_by_its_answers_and_by_the_steps_that_it_leaves(
    tokens: dict[str, Any], steps: dict[str, Any], expected: str
) -> None:
    assert prefill_dispatch_cost.verdict(tokens, steps) == expected


def test_the_cost_of_prefill_dispatch_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nothing = GPU.__class__(None, "torch sees no GPU", (0, 0), 0.0, 0.0, "unknown", "0", "none", "0")
    monkeypatch.setattr("vllm_graphfix.verify.engine.device.find", lambda: nothing)
    given = ["--site", f"0.21.0={release_root('0.21.0')}", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["prefill_dispatch_cost.py", *given])
    assert prefill_dispatch_cost.main() == 2
    assert capsys.readouterr().err == "not run: no GPU; --rehearse runs this script on a CPU engine\n"


# -- its figures


def measured(**seconds: float) -> dict[str, Any]:
    """A case with one round of batch 1, in which the engines took *seconds*."""
    made = plan(MLA, sites("0.21.0", "0.22.1"))
    assert made is not None
    told = {"compilation_mode": "VLLM_COMPILE", "cudagraph_mode": "FULL_AND_PIECEWISE", "active": ["capture-state"]}
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
                "told": dict(told),
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
    (found,) = (t for t in engine_figures.targets(measured(eager=4.0, patched=patched)) if "eager" in t.what)
    assert found.met is met


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
    texts = [element.text or "" for element in ET.fromstring(engine_plot.svg(result)).iter() if element.text]  # noqa: S314
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
    told = {"compilation_mode": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY", "active": ["capture-state"]}
    engines: list[dict[str, Any]] = [
        {"name": c.name, "label": c.label, "graphs": c.graphs, "attempt": 0, "failure": None, "told": told}
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


# -- faults of a rank


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs `shadow_faults` with stand-ins for engines; the result is its exit code and what became of each fault."""
    monkeypatch.setattr(shadow_faults, "ENGINE", STAND_IN.with_name("shadow_faults_engine_stand_in.py"))
    monkeypatch.setattr("vllm_graphfix.verify.engine.models.write", lambda name, folder: folder / name)

    def go(behaviours: Mapping[str, str], *arguments: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setenv("SHADOW_FAULTS_STAND_IN", json.dumps(behaviours))
        which = [part for fault in behaviours for part in ("--fault", fault)]
        given = ["--out", str(tmp_path), "--mode", "check", "--limit", "4", *which, *arguments]
        monkeypatch.setattr(sys, "argv", ["shadow_faults.py", *given])
        code = shadow_faults.main()
        return code, {each["fault"]: each for each in json.loads((tmp_path / "result.json").read_text())}

    return go


def test_right_tokens_and_clean_stops_are_expected_of_an_engine_with_a_fault(faults: Any) -> None:
    code, found = faults(
        {"none": "serves", "exception": "stops", "killed": "stops", "slow": "serves"}, "--parallel", "tensor"
    )
    assert code == 0
    assert {fault: each["outcome"] for fault, each in found.items()} == {
        "none": "right",
        "exception": "clean stop",
        "killed": "clean stop",
        "slow": "right",
    }
    assert found["killed"]["seconds"] < 5


@pytest.mark.parametrize(
    ("behaviour", "fault", "outcome"),
    [
        ("is wrong", "exception", "wrong"),
        ("hangs", "exception", "hang"),
        ("leaves a rank behind", "exception", "hang"),
        ("stops late", "exception", "clean stop"),
        ("stops", "slow", "clean stop"),
        ("never comes to it", "exception", "not reached"),
    ],
)
def test_what_must_not_become_of_an_engine_with_a_fault_is_an_exit_code(
    faults: Any, behaviour: str, fault: str, outcome: str
) -> None:
    code, found = faults({fault: behaviour}, "--parallel", "tensor")
    assert (code, found[fault]["outcome"], found[fault]["as expected"]) == (1, outcome, False)


def test_a_stopped_stage_of_a_pipeline_is_waited_for_as_on_stock(faults: Any) -> None:
    assert faults({"stopped": "stops"}, "--parallel", "pipeline")[0] == 1
    assert faults({"stopped": "stops"}, "--parallel", "tensor")[0] == 0
