"""Endurance: what the plugin holds does not grow, in a server under load and in a million calls."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from endurance_calls import CASES
from endurance_growth import Growth, growth_by
from endurance_server import Endured, Sample, endure, print_summary, sample, trend, write_csv
from records import record
from server import install, serve
from stock import run_in_release
from vllm_graphfix import records
from vllm_graphfix.fix import Activity, Patch
from vllm_graphfix.patching import sites
from warm_release import run_in_fork

# -- many calls --------------------------------------------------------------------------------------------------------

ALLOWED = Growth(ours=4096, blocks=200, objects=30, garbage=30)
"""Some for whatever Python does once in a while; less than one for each call."""
_CODE = "import sys; sys.path.append({tests!r}); import endurance_calls; endurance_calls.main({calls!r})"


def flat(growth: Growth) -> bool:
    return all(measured <= allowed for measured, allowed in zip(growth, ALLOWED, strict=True))


@cache
def called(release: str | None, *, often: bool) -> dict[str, dict[str, Any]]:
    """Return the result of each case of *release*, all of them called in one process."""
    calls = {name: planned.calls[often] for name, planned in CASES.items() if planned.release == release}
    tests = Path(__file__).parent / "support"
    code = _CODE.format(tests=str(tests), calls=calls)
    limit = 7200 if often else 300
    if release is None:
        done = run_in_release(tests, code, timeout=limit, libraries_loaded=True)
    else:
        done = run_in_fork(release, code, timeout=limit)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {result["case"]: result for result in lines}


each_case = pytest.mark.parametrize(
    ("name", "often"),
    [
        pytest.param(
            *(name, often),
            marks=[
                pytest.mark.xdist_group(f"many calls {planned.release}" if often else planned.release or "calls"),
                *([pytest.mark.slow] if often else []),
            ],
            id=f"{name}, {planned.calls[often]} times",
        )
        for name, planned in CASES.items()
        for often in (False, True)
    ],
)


@each_case
def test_calls_leave_nothing_behind(name: str, often: bool) -> None:
    result = called(CASES[name].release, often=often)[name]
    assert flat(Growth(**result["left"])), result


@each_case
def test_each_call_is_counted_once(name: str, often: bool) -> None:
    result = called(CASES[name].release, often=often)[name]
    assert result["counted"] == result["expected"]
    assert result["failing"] == result["expected_failing"]


def _held_in_a_list(stock: Callable[..., Any]) -> Callable[..., Any]:
    held: list[object] = []

    @functools.wraps(stock)
    def layer(metadata: Any) -> Any:
        held.append(metadata)
        return stock(metadata)

    return layer


def _held_by_number(stock: Callable[..., Any]) -> Callable[..., Any]:
    held: dict[int, object] = {}

    @functools.wraps(stock)
    def layer(metadata: Any) -> Any:
        if metadata % 100 == 0:
            held[metadata] = [metadata]
        return stock(metadata)

    return layer


def _held_in_a_cycle(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def layer(metadata: Any) -> Any:
        state: dict[str, object] = {"metadata": metadata}
        state["state"] = state
        return stock(metadata)

    return layer


def _held_nowhere(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def layer(metadata: Any) -> Any:
        return stock([metadata])

    return layer


def _growth_by_planted(wrap: Callable[..., Any]) -> Growth:
    numbers = iter(range(1_000_000))
    layer = wrap(lambda metadata: metadata)
    return growth_by(lambda: layer(next(numbers)), 4_000)


@pytest.mark.parametrize("leak", [_held_in_a_list, _held_by_number, _held_in_a_cycle])
def test_a_layer_that_keeps_something_is_noticed(leak: Callable[..., Any]) -> None:
    assert not flat(_growth_by_planted(leak))


def test_a_layer_that_keeps_nothing_is_not() -> None:
    assert flat(_growth_by_planted(_held_nowhere))


def test_a_program_that_makes_one_engine_after_the_other_keeps_few_records(tmp_path: Path) -> None:
    """All of them are its own process's, which lives: nobody else would remove them."""
    reporter = records.Reporter(tmp_path, pytest.fail)
    made = [record(engine=f"{number:016x}") for number in range(100)]
    for one in made:
        reporter.publish(one)
        reporter.flush(60)
    remaining = sorted(path.name for path in records.own_folder(tmp_path).iterdir())
    assert remaining == sorted(one.file_name for one in made[-64:])
    reporter.close(60)
    assert list(records.own_folder(tmp_path).iterdir()) == []


def test_layers_that_were_taken_back_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that configures one engine after the other, with other switches each time."""
    name = "vllm.endurance_stand_in"
    module = ModuleType(name)
    exec("def target(value): return value", vars(module))  # noqa: S102 - a function of that module
    monkeypatch.setitem(sys.modules, name, module)
    known, patch = len(sites._stock_of), Patch(name, "target", lambda stock, _: _held_nowhere(stock))
    for _ in range(100):
        sites.revert("a-fix", sites.apply("a-fix", [patch], Activity()))
    assert len(sites._stock_of) <= known + 1


# -- a server under load -----------------------------------------------------------------------------------------------

MINUTES = float(os.environ.get("ENDURANCE_MINUTES", "30"))
"""Less than that is for whoever works on this: so short a time tells little."""
GROWTH = {"front-end": 512.0, "engine-core": 512.0, "worker": 2048.0}
"""KiB beyond stock's, in the second half of that time: what two servers of one kind may differ by. A worker's kernels
keep memory by the megabyte."""


@pytest.fixture(scope="module")
def endured(tmp_path_factory: pytest.TempPathFactory) -> Endured:
    """Two servers, one of them stock: what vLLM itself does to memory is not the plugin's."""
    folder = tmp_path_factory.mktemp("endurance")
    installed = install(folder)
    # Without a bound oneDNN keeps a kernel for each length of a batch, 300 MB in a minute.
    both = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
    with (
        serve(installed, tmp_path_factory.mktemp("with-plugin"), env=both) as plugin,
        serve(installed, tmp_path_factory.mktemp("stock"), env=both | {"VLLM_PLUGINS": ""}) as stock,
    ):
        result = endure({"plugin": plugin, "stock": stock}, 60 * MINUTES)
    write_csv(folder / "samples.csv", result.samples)
    print_summary(result)
    return result


each_role = pytest.mark.parametrize("role", ["front-end", "engine-core", "worker"])


@pytest.mark.slow
@pytest.mark.xdist_group("servers")
@each_role
@pytest.mark.parametrize("field", ["rss", "pss", "anonymous"])
def test_memory_grows_no_more_than_that_of_stock(endured: Endured, role: str, field: str) -> None:
    plugin, stock = (endured.trend(server, role, field) for server in ("plugin", "stock"))
    assert plugin.growth - stock.growth < GROWTH[role]


@pytest.mark.slow
@pytest.mark.xdist_group("servers")
@each_role
@pytest.mark.parametrize("field", ["descriptors", "threads"])
def test_descriptors_and_threads_do_not_grow(endured: Endured, role: str, field: str) -> None:
    fitted = endured.trend("plugin", role, field)
    assert fitted.growth < 1
    assert fitted.last - fitted.first <= 1


@pytest.mark.slow
@pytest.mark.xdist_group("servers")
def test_records_do_not_grow(endured: Endured) -> None:
    """One is missing from its removal to the next heartbeat, and a temporary file is there for a moment."""
    folders = endured.folders
    assert {folder.records for folder in folders} <= {2, 3}
    assert folders[-1].records == 3
    assert abs(folders[-1].record_bytes - folders[0].record_bytes) < 100
    assert sum(folder.others for folder in folders) <= len(folders) / 100
    assert folders[-1].others == 0


@pytest.mark.slow
@pytest.mark.xdist_group("servers")
def test_the_plugin_is_at_work_to_the_end(endured: Endured) -> None:
    assert set(endured.fleet) == {"in order"}
    families = {family.name: family.samples for family in text_string_to_metric_families(endured.metrics)}
    (read,), (agreeing,) = (
        families[f"graphfix_{name}"] for name in ("records_read_timestamp_seconds", "ranks_agreeing")
    )
    assert endured.ended - read.value < 60
    assert agreeing.value == 1


@pytest.mark.slow
@pytest.mark.xdist_group("servers")
def test_both_servers_were_under_load(endured: Endured) -> None:
    for calls in (endured.answered, endured.scraped):
        assert min(calls.values()) > 30 * MINUTES


# -- how a leak shows --------------------------------------------------------------------------------------------------

_PROGRAM = """
import os, sys, threading, time
print(flush=True)
kept, began = [], time.monotonic()
while time.monotonic() - began < 60:
    {leak}
    time.sleep(0.005)
"""
LEAKS = {
    "nothing": "bytearray(100_000)",
    "rss": "kept.append(bytearray(os.urandom(100_000)))",
    "anonymous": "kept.append(bytearray(os.urandom(100_000)))",
    "descriptors": "kept.append(os.open(os.devnull, os.O_RDONLY))",
    "threads": "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
}


def sampled(leak: str) -> list[Sample]:
    """Samples of a small program, for a second from when it runs."""
    command = [sys.executable, "-c", _PROGRAM.format(leak=leak)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout
        program.stdout.readline()
        try:
            process, began = psutil.Process(program.pid), time.monotonic()
            samples = []
            while (seconds := time.monotonic() - began) < 1:
                samples.append(sample(seconds, "planted", "program", process))
                time.sleep(0.05)
        finally:
            program.kill()
    return samples


@pytest.mark.parametrize("field", list(LEAKS)[1:])
def test_what_a_process_leaks_is_noticed(field: str) -> None:
    grown = trend([(one.seconds, getattr(one, field)) for one in sampled(LEAKS[field])]).growth
    assert grown > (max(GROWTH.values()) if field in ("rss", "anonymous") else 5)


def test_a_process_that_leaks_nothing_does_not_grow() -> None:
    samples = sampled(LEAKS["nothing"])
    for field in list(LEAKS)[1:]:
        assert trend([(one.seconds, getattr(one, field)) for one in samples]).growth < 1, field
