"""The plugin in real servers: `vllm serve` 0.21.0 on a CPU, from the first process to the last, as an operator sees it.

A server takes half a minute to start and 2 GB. So each is started once, asked for everything that is to be known of it,
and ended; the tests look at what was seen. `make test` starts all but one as forks of one Python, in a third of the
time. One group: they share the installed plugin, and no two servers run at the same time.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine import environment
from server import MODEL, NOBODY, RELEASE, Answer, Installed, Server, cpu_release, install, serve, started
from table import affected_by, state_by_default
from vllm_graphfix import __version__
from vllm_graphfix.fixes import BY_NAME, FIXES

pytestmark = pytest.mark.xdist_group("servers")

PROMPT = [3, 4, 5]
_NOT_IMPORTED = (
    *(".gpu.spec_decode.", ".backends.flash_attn", ".worker.encoder_cudagraph", ".lora.punica_wrapper."),
    ".models.qwen3_",
)
WAITING = {
    fix.name for fix in FIXES if all(any(part in module for part in _NOT_IMPORTED) for module in fix.modules)
} & {*affected_by("0.21.0")}
"""Fixes of V2's speculators alone, of FlashAttention, encoders' graphs, adapters or models of images: these servers
import none."""
STATES = {fix.name: "waiting" if fix.name in WAITING else state_by_default(fix.name, "0.21.0") for fix in FIXES}
NEEDED = tuple(name for name in affected_by("0.21.0") if name not in WAITING)
"""What 0.21.0 needs, on a CPU as elsewhere."""
NO_PLUGINS = {"VLLM_PLUGINS": ""}


@dataclasses.dataclass
class Seen:
    """A server as it was when it served, and what it left behind."""

    pids: dict[int, str]
    text: str
    words: str
    metrics: dict[str, str]
    """By the process that answered."""
    records: list[dict[str, Any]]
    fleet: Answer
    log: str
    records_after: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Records, when no process was left."""
    fleet_after: Answer | None = None

    def role(self, role: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["role"] == role]

    def states(self) -> list[dict[str, str]]:
        """State by fix, in each process."""
        return [{name: fix["state"] for name, fix in record["fixes"].items()} for record in self.records]


def samples(text: str, family: str) -> list[tuple[dict[str, str], float]]:
    """Labels and value of each series of *family* in the text of /metrics."""
    return [
        (sample.labels, sample.value)
        for metric in text_string_to_metric_families(text)
        if metric.name == family
        for sample in metric.samples
        if not sample.name.endswith("_created")
    ]


def value(text: str, name: str) -> float:
    """The value of the only series of this name."""
    ((labels, number),) = samples(text, name)
    assert labels == {}
    return number


def look(server: Server, *, until: str = "graphfix_ranks_agreeing") -> Seen:
    """Asks *server* for everything, when *until* is on its /metrics: the records are read every few seconds."""
    text, words = server.completions(PROMPT), server.completions("w3 w4 w5")
    latest = time.monotonic() + 60
    metrics = server.metrics_of_each()
    while not all(until in page for page in metrics.values()) and time.monotonic() < latest:
        time.sleep(1)
        metrics = server.metrics_of_each()
    return Seen(server.pids(), text, words, metrics, server.records(), server.fleet(), server.log)


def look_after(seen: Seen, server: Server) -> Seen:
    seen.records_after, seen.fleet_after = server.records(), server.fleet()
    return seen


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(tmp_path_factory.mktemp("servers"))


@pytest.fixture(scope="module")
def plain(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """One rank, nothing set; the kernel kills its engine core in the end."""
    with serve(installed, tmp_path_factory.mktemp("plain")) as server:
        seen = look(server)
        server.kill_engine()
        return look_after(seen, server)


@pytest.fixture(scope="module")
def two_of_each(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Two API servers and two ranks, tensor parallel; stopped with SIGTERM in the end, as a supervisor does."""
    flags = ("--api-server-count=2", "--tensor-parallel-size=2")
    with serve(installed, tmp_path_factory.mktemp("two-of-each"), *flags, forks=True) as server:
        seen = look(server)
        server.stop()
        return look_after(seen, server)


@pytest.fixture(scope="module")
def filtered_out(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """vLLM is told to load no plugin: stock."""
    with serve(installed, tmp_path_factory.mktemp("filtered-out"), env=NO_PLUGINS, forks=True) as server:
        return look(server, until="vllm:")


@pytest.fixture(scope="module")
def outside(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Not in the rollout, and in its folder is what is no record.

    All of its processes are killed at once in the end, as by a power cut.
    """
    folder = tmp_path_factory.mktemp("outside")
    records = folder / "status" / f"vllm-graphfix-{os.getuid()}"
    records.mkdir(parents=True, mode=0o700)
    name = f"{NOBODY}-elsewhere-{{}}.json"
    os.mkfifo(records / name.format(1))
    (records / name.format(2)).symlink_to("/dev/zero")
    (records / name.format(3)).write_bytes(b"\xff" * 1_000_000)
    (records / name.format(4)).write_text("{}")
    (records / name.format(5)).write_text("[" * 60_000)
    (records / name.format(6)).mkdir()
    with serve(installed, folder, env={"VLLM_GRAPHFIX_ROLLOUT": "0"}, forks=True) as server:
        seen = look(server)
        server.end()
        return look_after(seen, server)


@pytest.fixture(scope="module")
def without_folder(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Its status folder is one that nobody can write to, root neither."""
    folder = tmp_path_factory.mktemp("without-folder")
    with serve(installed, folder, env={"VLLM_GRAPHFIX_STATUS_DIR": "/proc"}, forks=True) as server:
        return look(server, until="graphfix_canary")


# -- one rank, nothing set ---------------------------------------------------------------------------------------------


def test_answers_are_those_of_a_stock_server(plain: Seen, filtered_out: Seen) -> None:
    assert len(plain.text.split()) == 8
    assert (plain.text, plain.words) == (filtered_out.text, filtered_out.words)


def test_each_process_of_the_server_leaves_one_record(plain: Seen) -> None:
    roles = {record["pid"]: record["role"] for record in plain.records}
    named = {pid: title for pid, title in plain.pids.items() if "resource_tracker" not in title}
    assert roles.keys() == named.keys()
    assert Counter(roles.values()) == {"front-end": 1, "engine-core": 1, "worker": 1}
    assert {title for pid, title in named.items() if roles[pid] == "engine-core"} == {"VLLM::EngineCore"}
    assert {title for pid, title in named.items() if roles[pid] == "worker"} == {"VLLM::Worker"}


def test_all_processes_belong_to_one_engine_and_go_by_its_decision(plain: Seen) -> None:
    assert len({record["engine"] for record in plain.records}) == 1
    inherited = {record["role"]: record["decision"]["inherited"] for record in plain.records}
    assert inherited == {"front-end": False, "engine-core": True, "worker": True}


def test_processes_of_an_engine_keep_their_records_and_no_longer_start(plain: Seen) -> None:
    flags = {record["role"]: (record["kept"], record["starting"]) for record in plain.records}
    assert flags == dict.fromkeys(("front-end", "engine-core", "worker"), (True, False))


def test_records_say_what_runs(plain: Seen) -> None:
    assert {(record["vllm"], record["graphfix"]) for record in plain.records} == {(RELEASE, __version__)}
    assert {record["model"] for record in plain.records} == {MODEL}


def test_the_worker_has_applied_what_the_release_needs(plain: Seen) -> None:
    (worker,) = plain.role("worker")
    assert {name: fix["state"] for name, fix in worker["fixes"].items()} == STATES
    assert worker["rank"] == {"rank": 0, "local_rank": 0, "world_size": 1, "data_parallel_rank": 0}


def test_metrics_show_each_fix(plain: Seen) -> None:
    (text,) = plain.metrics.values()
    rows = {
        labels["fix"]: (labels["state"], labels["mode"], ranks) for labels, ranks in samples(text, "graphfix_fix_state")
    }
    assert rows == {fix.name: (STATES[fix.name], fix.default.value, 1.0) for fix in FIXES}
    for labels, _ in samples(text, "graphfix_fix_state"):
        assert (labels["vllm"], labels["graphfix"]) == (RELEASE, __version__)
        assert labels["reason"]


def test_metrics_show_the_events_of_each_fix(plain: Seen) -> None:
    (text,) = plain.metrics.values()
    counts = {(labels["fix"], labels["event"]): count for labels, count in samples(text, "graphfix_events")}
    assert counts == {(name, event.name): 0.0 for name in NEEDED for event in BY_NAME[name].events}


def test_metrics_show_the_ranks_and_the_rollout(plain: Seen) -> None:
    (text,) = plain.metrics.values()
    assert value(text, "graphfix_ranks_expected") == 1
    assert value(text, "graphfix_ranks_agreeing") == 1
    assert value(text, "graphfix_ranks_unrecorded") == 0
    assert value(text, "graphfix_canary") == 1
    assert value(text, "graphfix_rollout_percent") == 100
    assert time.time() - value(text, "graphfix_records_read_timestamp_seconds") < 300


def test_metrics_of_vllm_are_there_as_before(plain: Seen, filtered_out: Seen) -> None:
    (ours,), (stock,) = plain.metrics.values(), filtered_out.metrics.values()
    names = [{metric.name for metric in text_string_to_metric_families(text)} for text in (ours, stock)]
    assert {name for name in names[0] if not name.startswith("graphfix_")} == names[1]
    assert any(name.startswith("vllm:") for name in names[1])


def test_fleet_shows_the_engine_in_order(plain: Seen) -> None:
    engine = plain.fleet.engine
    assert (engine["status"], engine["wrong"], engine["model"]) == ("in order", [], MODEL)
    assert (engine["vllm"], engine["graphfix"], engine["canary"]) == ([RELEASE], [__version__], True)
    assert engine["ranks"] == {"expected": 1, "recorded": 1, "agreeing": 1, "missing": [], "unreadable": []}
    assert {one["pid"]: one["liveness"] for one in engine["processes"]} == dict.fromkeys(
        (record["pid"] for record in plain.records), "alive"
    )
    assert not plain.fleet.without_record.keys() & plain.pids.keys()
    assert plain.fleet.report["problems"] == []


def test_exit_code_of_fleet_is_0(plain: Seen) -> None:
    assert plain.fleet.code == plain.fleet.report["exit_code"] == spoilt(plain.fleet)


def spoilt(answer: Answer) -> int:
    """Other tests' processes do not count; one that it cannot look into would."""
    others = [one for one in answer.report["unrecorded"] if not one["elsewhere"]]
    return 1 if any(not one["starting"] for one in others) else 4 if others else 0


def test_each_process_that_imports_what_a_fix_concerns_logs_one_line(plain: Seen) -> None:
    lines = [line for line in plain.log.splitlines() if "graphfix:" in line]
    by_process = Counter(line.partition("INFO")[0] for line in lines)
    # Without a name: the front-end, and the process in which vLLM looks at the model's class.
    assert all(count == 1 or (not name and count == 2) for name, count in by_process.items())
    assert 1 <= len(lines) <= 4, "these, engine core, worker"
    for line in lines:
        assert "INFO" in line
        assert all(fix in line for fix in NEEDED)


def test_a_killed_engine_core_reads_as_dead(plain: Seen) -> None:
    (core,) = plain.role("engine-core")
    assert core["pid"] in {record["pid"] for record in plain.records_after}
    assert plain.fleet_after is not None
    engine = plain.fleet_after.engine
    assert (engine["status"], engine["live"]) == ("ended", False)
    # The others ended in good order, or, on a slow machine, as in the test of one that is stopped.
    assert {one["pid"]: one["liveness"] for one in engine["processes"]} == dict.fromkeys(
        (record["pid"] for record in plain.records_after), "dead"
    )


@pytest.mark.slow
def test_a_server_starts_and_serves_and_is_not_in_order_while_its_worker_is_stopped(
    installed: Installed, tmp_path: Path
) -> None:
    with started(installed, tmp_path) as server:
        seen: list[Answer] = []
        server.wait_until_up(lambda: seen.append(server.fleet()))
        statuses = [(one.engine["status"], *one.engine["wrong"]) for one in seen if one.report["engines"]]
        assert [*dict.fromkeys(statuses)][:1] == [("starting",)]
        assert {*statuses} <= {("starting",), ("in order",)}
        for one in seen:
            if one.report["engines"] and one.engine["status"] == "starting":
                assert one.code == (spoilt(one) or 4)
        stopped = {*server.named("VLLM::EngineCore"), *server.named("VLLM::Worker")}
        assert len(stopped) == 2
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            assert wait_for(server, "not in order", 90)
            until = time.monotonic() + 30
            silent: set[int] = set()
            while silent != stopped and time.monotonic() < until:  # the last heartbeat of one is up to 10 s younger
                fleet = server.fleet()
                liveness = {one["pid"]: one["liveness"] for one in fleet.engine["processes"]}
                silent = {pid for pid, state in liveness.items() if state == "silent"}
            assert silent == stopped
            assert (fleet.code, liveness[server.pid]) == (1, "alive")
            assert re.search(r"not heard from for \d+ s: rank 0, engine-core \d+ on \S+\. ", fleet.engine["wrong"][0])
            until = time.monotonic() + 10
            while value(server.metrics(), "graphfix_ranks_silent") != 1:
                assert time.monotonic() < until
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        assert wait_for(server, "in order", 30)
        assert len(server.completions(PROMPT).split()) == 8


HANGS = """
import os, time, wrapt

def wait_less(steps):
    steps.STUCK_AFTER = 10.0

def hang(runner):
    stock = runner.GPUModelRunner.execute_model
    def execute_model(self, *args, **kwargs):
        while os.path.exists({flag!r}):
            time.sleep(0.1)
        return stock(self, *args, **kwargs)
    runner.GPUModelRunner.execute_model = execute_model

wrapt.register_post_import_hook(wait_less, "vllm_graphfix.engine.steps")
wrapt.register_post_import_hook(hang, "vllm.v1.worker.gpu_model_runner")
"""
"""A sitecustomize: a step does not end as long as there is a file, and ten seconds count as five minutes."""


@pytest.mark.slow
def test_a_server_is_not_in_order_while_a_step_of_its_worker_does_not_end(installed: Installed, tmp_path: Path) -> None:
    flag, hook = tmp_path / "flag", tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HANGS.format(flag=str(flag)), encoding="utf-8")
    path = environment(installed.scratch, installed.plugin, cpu_release())["PYTHONPATH"]
    env = {"PYTHONPATH": os.pathsep.join([str(hook), path]), "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "600"}
    with serve(installed, tmp_path, env=env) as server, ThreadPoolExecutor() as pool:
        assert server.fleet().engine["status"] == "in order"
        flag.touch()
        answer = pool.submit(server.completions, PROMPT)
        try:
            assert wait_for(server, "not in order", 90)
            until = time.monotonic() + 30
            while value(server.metrics(), "graphfix_steps_stuck") != 2:  # its engine core waits for it
                assert time.monotonic() < until
                time.sleep(1)
            fleet = server.fleet()
            assert fleet.code == 1
            assert {one["liveness"] for one in fleet.engine["processes"]} == {"alive"}
            assert re.match(r"in one step for \d+ s: rank 0, engine-core \d+ on \S+\. ", fleet.engine["wrong"][0])
        finally:
            flag.unlink()
        assert len(answer.result(60).split()) == 8
        assert wait_for(server, "in order", 30)


def wait_for(server: Server, status: str, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while server.fleet().engine["status"] != status:
        if time.monotonic() > until:
            return False
        time.sleep(2)
    return True


# -- two ranks behind two API servers ----------------------------------------------------------------------------------


def test_two_ranks_agree(two_of_each: Seen) -> None:
    workers = two_of_each.role("worker")
    assert sorted(worker["rank"]["rank"] for worker in workers) == [0, 1]
    assert len({worker["agreement"]["group"] for worker in workers}) == 1
    for worker in workers:
        assert {key: worker["agreement"][key] for key in ("world_size", "agreeing", "difference")} == {
            "world_size": 2,
            "agreeing": 2,
            "difference": None,
        }


def test_fleet_shows_both_ranks(two_of_each: Seen) -> None:
    engine = two_of_each.fleet.engine
    assert (engine["status"], engine["wrong"]) == ("in order", [])
    assert engine["ranks"] == {"expected": 2, "recorded": 2, "agreeing": 2, "missing": [], "unreadable": []}
    assert engine["fixes"]["mamba-padding"]["states"] == {"active": ["rank 0", "rank 1"]}


def test_two_ranks_answer(two_of_each: Seen) -> None:
    assert len(two_of_each.text.split()) == 8


def test_two_api_servers_have_records_below_one_front_end(two_of_each: Seen) -> None:
    roles = Counter(record["role"] for record in two_of_each.records)
    assert roles == {"front-end": 1, "api-server": 2, "engine-core": 1, "worker": 2}
    assert len({record["engine"] for record in two_of_each.records}) == 1
    assert {record["role"]: record["kept"] for record in two_of_each.records} == {
        "front-end": False,  # it serves nothing itself, and forks
        **dict.fromkeys(("api-server", "engine-core", "worker"), True),
    }


def test_metrics_of_both_api_servers_are_complete_and_count_both_ranks(two_of_each: Seen) -> None:
    assert two_of_each.metrics.keys() == {"ApiServer_0", "ApiServer_1"}
    for text in two_of_each.metrics.values():
        states = {labels["fix"]: (labels["state"], n) for labels, n in samples(text, "graphfix_fix_state")}
        assert states == {name: (state, 2.0) for name, state in STATES.items()}
        assert (value(text, "graphfix_ranks_expected"), value(text, "graphfix_ranks_agreeing")) == (2, 2)
        assert value(text, "graphfix_ranks_unrecorded") == 0
        assert len(samples(text, "graphfix_events")) == sum(len(BY_NAME[name].events) for name in NEEDED)
        assert value(text, "graphfix_canary") == 1


def test_fleet_shows_both_api_servers(two_of_each: Seen) -> None:
    assert sum(one["role"] == "api-server" for one in two_of_each.fleet.engine["processes"]) == 2


def test_a_server_that_is_stopped_leaves_no_record_that_seems_to_live(two_of_each: Seen) -> None:
    """On a slow machine some stay: vLLM kills what has not ended 5 s after SIGTERM, and an end waits 1 s for a disk.

    `test_reporter.py` has the removal itself, without a limit.
    """
    assert two_of_each.fleet_after is not None
    engines = two_of_each.fleet_after.report["engines"]
    liveness = {one["pid"]: one["liveness"] for engine in engines for one in engine["processes"]}
    assert liveness == dict.fromkeys((record["pid"] for record in two_of_each.records_after), "dead")


# -- VLLM_PLUGINS that filters it out ----------------------------------------------------------------------------------


def test_a_server_without_the_plugin_has_neither_records_nor_metrics(filtered_out: Seen) -> None:
    assert filtered_out.records == []
    assert not any("graphfix" in text for text in filtered_out.metrics.values())
    assert "graphfix" not in filtered_out.log


@pytest.mark.slow
def test_fleet_shows_it_and_says_why(installed: Installed, tmp_path: Path) -> None:
    """In no fork, whose environment the kernel does not show; `test_fleet_unrecorded.py` has each reason."""
    with serve(installed, tmp_path, env=NO_PLUGINS) as server:
        seen = look(server, until="vllm:")
    processes = {pid for pid, title in seen.pids.items() if "resource_tracker" not in title}
    reasons = {pid: seen.fleet.without_record.get(pid, "") for pid in processes}
    assert len(reasons) == 3
    assert all(re.search(r"VLLM_PLUGINS='' .* add graphfix", reason) for reason in reasons.values()), reasons
    assert seen.fleet.code == seen.fleet.report["exit_code"] == 1


# -- outside the rollout, in a hostile folder --------------------------------------------------------------------------


def test_outside_the_rollout_nothing_is_applied(outside: Seen) -> None:
    assert len(outside.records) == 3
    for states in outside.states():
        assert states == {fix.name: "not-in-canary" for fix in FIXES}
    assert {record["decision"]["canary"] for record in outside.records} == {False}


def test_metrics_say_that_it_is_outside(outside: Seen) -> None:
    (text,) = outside.metrics.values()
    assert (value(text, "graphfix_canary"), value(text, "graphfix_rollout_percent")) == (0, 0)
    states = {labels["fix"]: (labels["state"], n) for labels, n in samples(text, "graphfix_fix_state")}
    assert states == {fix.name: ("not-in-canary", 1.0) for fix in FIXES}


def test_outside_the_rollout_answers_are_the_same(outside: Seen, filtered_out: Seen) -> None:
    assert outside.text == filtered_out.text


def test_fleet_reads_past_what_is_no_record(outside: Seen) -> None:
    engine = outside.fleet.engine
    assert (engine["status"], engine["canary"], engine["percentage"]) == ("in order", False, 0.0)
    assert len(outside.fleet.report["problems"]) == 1
    assert "6 files" in outside.fleet.report["problems"][0]


def test_what_is_no_record_is_no_warning_in_the_log(outside: Seen) -> None:
    assert not [line for line in outside.log.splitlines() if "graphfix" in line and "INFO" not in line]


def test_all_processes_killed_at_once_read_as_dead(outside: Seen) -> None:
    assert outside.fleet_after is not None
    engine = outside.fleet_after.engine
    assert engine["status"] == "ended"
    assert {one["pid"]: one["liveness"] for one in engine["processes"]} == dict.fromkeys(
        (record["pid"] for record in outside.records), "dead"
    )


# -- a folder that cannot be written to --------------------------------------------------------------------------------


def test_without_a_folder_it_serves_as_ever(without_folder: Seen, filtered_out: Seen) -> None:
    assert without_folder.text == filtered_out.text


def test_without_a_folder_each_process_warns_once(without_folder: Seen) -> None:
    warned = [line for line in without_folder.log.splitlines() if "graphfix:" in line and "WARNING" in line]
    assert len(warned) == 3
    for line in warned:
        assert "cannot write a status record in /proc/" in line
        assert "VLLM_GRAPHFIX_STATUS_DIR" in line


def test_without_a_folder_metrics_leave_out_what_is_not_known(without_folder: Seen) -> None:
    (text,) = without_folder.metrics.values()
    assert value(text, "graphfix_ranks_expected") == 1
    assert samples(text, "graphfix_ranks_agreeing") == []
    assert samples(text, "graphfix_fix_state") == []
