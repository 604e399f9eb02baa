"""The benchmark of real engines, as far as it needs none: what it runs where, how engines take turns and end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarked import GPU, sites
from stock import release_root

# isort: split
import engine_cost
from measuring import engine_cases, engine_figures, engine_process, engine_run
from measuring.engine_cases import CASES, MLA, MLA_FP8, find_sites, plan, plan_of_detectors
from measuring.engine_process import DiedError, EngineProcess, Order
from measuring.engine_steps import STEPS, packed, step_plans, step_table
from vllm_graphfix.fix import variable
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.verify.engine.device import Device

STAND_IN = Path(__file__).parent / "support" / "engine_worker_stand_in.py"
Run = Callable[..., dict[str, Any]]


# -- what is run where


def test_a_case_runs_on_the_newest_affected_release_and_the_first_fixed_one_after_it() -> None:
    installed = sites("0.22.1", "0.18.1", "0.33.0", "0.20.0", "0.21.0")
    plans = [plan(case, installed) for case in CASES]
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


def test_a_case_that_concerns_no_release_at_hand_has_no_plan() -> None:
    assert plan(MLA_FP8, sites("0.21.0", "0.22.1")) is None


def test_a_folder_with_another_release_than_named_is_refused() -> None:
    with pytest.raises(ValueError, match=r"holds vLLM 0\.21\.0, not 0\.22\.1"):
        find_sites([f"0.22.1={release_root('0.21.0')}"])


def test_only_the_patched_engine_loads_the_plugin() -> None:
    made = plan(MLA, sites("0.21.0", "0.22.1"))
    assert made is not None
    plugins = {c.name: c.environment(MLA, (), Path())["VLLM_PLUGINS"] for c in made.configurations}
    assert [name for name, plugin in plugins.items() if plugin] == ["patched"]
    assert [c.name for c in made.configurations if c.plugin] == ["patched"]


def test_an_engine_finds_its_own_vllm_first_and_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = sites("0.21.0", "0.22.1")
    other = str(release_root("0.22.1"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([other, "somewhere-else"]))
    made = plan(MLA, installed)
    assert made is not None
    path = made["stock"].environment(MLA, installed, Path())["PYTHONPATH"].split(os.pathsep)
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


def test_all_detectors_are_on_in_one_engine_of_the_newest_release() -> None:
    made = plan_of_detectors(MLA, sites("0.21.0", "0.33.0"), "0.1%")
    assert {c.site.release for c in made.configurations} == {"0.33.0"}
    switches = {
        c.name: {name for name in c.environment(made.case, (), Path()) if "GRAPHFIX" in name}
        for c in made.configurations
    }
    assert switches.pop("patched") == {"VLLM_GRAPHFIX_SHADOW", *engine_cases.ALL_DETECTORS}
    assert not any(switches.values())


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


def test_an_engine_that_does_not_answer_in_time_raises(started: Callable[[str], EngineProcess]) -> None:
    with pytest.raises(DiedError, match="did not answer in time"):
        started("hangs").ready(0.1)


def test_the_start_of_an_engine_ends_when_it_answers_and_not_when_it_is_awaited(
    started: Callable[[str], EngineProcess],
) -> None:
    before = time.monotonic()
    engine = started("")
    assert engine._pipe.poll(60)
    answered = time.monotonic()
    started("").ready(60)
    assert engine.ready(60).seconds <= answered - before


def test_a_crash_is_reported_in_the_words_of_the_log(started: Callable[[str], EngineProcess]) -> None:
    engine = started("crashes at batch 8")
    engine.ready(60)
    engine.tell(8, 9)
    with pytest.raises(DiedError, match="an illegal memory access was encountered"):
        engine.hear(60)


def test_an_engine_that_ends_before_it_is_sent_its_order_is_one_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is killed while it starts."""
    worker = tmp_path / "worker.py"
    worker.write_text("raise SystemExit(3)\n")
    begin = subprocess.Popen

    def ended(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = begin(*args, **kwargs)
        process.wait(60)  # so that it cannot take its order
        return process

    monkeypatch.setattr(subprocess, "Popen", ended)
    order = Order(arguments={}, plugin=False, runner="V1", largest_batch=8)
    engine = EngineProcess(order, os.environ, tmp_path / "log", worker)
    with pytest.raises(DiedError, match="ended with exit code 3"):
        engine.ready(60)
    engine.end()


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
        options = [part for site in sites(*releases) for part in ("--site", f"{site.release}={site.folder}")]
        monkeypatch.setattr(
            sys, "argv", ["engine_cost.py", *options, "--out", str(tmp_path), "--tokens", "5", *arguments]
        )
        engine_cost.main()
        result: dict[str, Any] = json.loads((tmp_path / engine_run.RESULT).read_text())
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
    shares: list[float] = []
    monkeypatch.setattr(engine_run.Benchmark, "_steps", lambda self, made, engines, seconds: shares.append(seconds))
    monkeypatch.setattr(engine_run.Benchmark, "_remaining", lambda self: 120.0)
    run({}, "--steps", "--limit", "120", releases=("0.33.0",))
    assert shares == [30.0, 40.0, 60.0, 120.0]


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
