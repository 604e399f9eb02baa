"""The metrics on /metrics, from the records of an engine's ranks.

They are exposed with the real prometheus_client; on servers: ``test_server.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from records import ENGINE, elsewhere, leave, of, record
from vllm_graphfix.engine import metrics
from vllm_graphfix.engine.metrics import DEPRECATED, NAMES, Exposition, Watcher
from vllm_graphfix.engine.metrics_snapshot import ServedEngine
from vllm_graphfix.fixes import BY_NAME, FIXES
from vllm_graphfix.records import AgreementReport, FixReport, Identity, Record, identity, own_folder, touch_outdated

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

SERVED = ServedEngine(
    ENGINE,
    canary=True,
    percentage=25.0,
    ranks=2,
    misconfigured={"VLLM_GRAPHFIX_SHADOW_ACTION": "quarantin"},
    graphfix="0.2.0",
    vllm="0.21.0",
)


def samples_of(text: bytes | str, name: str) -> list[Sample]:
    decoded = text if isinstance(text, str) else text.decode()
    return [each for family in text_string_to_metric_families(decoded) for each in family.samples if each.name == name]


class Scraped:
    """An engine's metrics in a registry of their own, read from records in a folder."""

    def __init__(self, base: Path, engine: ServedEngine = SERVED) -> None:
        self.registry = CollectorRegistry()
        self.watcher = Watcher(base, engine, Exposition(self.registry))

    def look(self) -> None:
        self.watcher.look()

    def samples(self, name: str) -> list[Sample]:
        return samples_of(generate_latest(self.registry), name)

    def values(self, name: str) -> list[float]:
        return [sample.value for sample in self.samples(name)]

    def value(self, name: str) -> float:
        (value,) = self.values(name)
        return value

    def now(self, name: str) -> float:
        """Its value when the records have been read once more."""
        self.look()
        return self.value(name)


@pytest.fixture
def scraped(tmp_path: Path) -> Scraped:
    return Scraped(tmp_path)


def ranks(base: Path, *counts: int, **changes: object) -> None:
    """A record of each rank, with so many events."""
    for rank, count in enumerate(counts):
        one = record(elsewhere(100 + rank), rank=rank, world_size=len(counts), **changes)
        leave(base, one._replace(events=counted(count)))


def counted(count: int) -> dict[str, dict[str, int]]:
    return {"capture-state": {"state-consumed": count}}


def test_every_series_is_there_once_ranks_have_reported(scraped: Scraped, tmp_path: Path) -> None:
    ranks(tmp_path, 3, 4)
    marks = {"kv-marks": {"marks": 7, "milliseconds": 1500}}
    leave(tmp_path, record(elsewhere(102), rank=2, world_size=2, fixes={}, events=marks))
    scraped.look()
    assert [name for name in (*NAMES, *DEPRECATED) if not scraped.samples(name)] == []
    (build,) = scraped.samples("graphfix_build_info")
    assert build.labels == {"version": "0.2.0", "vllm": "0.21.0"}
    (seconds,) = scraped.samples("graphfix_detector_seconds_total")
    assert (seconds.labels, seconds.value) == ({"fix": "kv-marks"}, 1.5)
    assert scraped.value("graphfix_rollout_ratio") == 0.25
    (wrong,) = scraped.samples("graphfix_misconfigured_variable")
    assert (wrong.labels, wrong.value) == ({"variable": "VLLM_GRAPHFIX_SHADOW_ACTION"}, 1)
    assert scraped.value("graphfix_ranks_expected") == 2
    assert scraped.value("graphfix_ranks_agreeing") == 2
    assert scraped.value("graphfix_canary") == 1
    assert scraped.value("graphfix_rollout_percent") == 25
    assert time.time() - scraped.value("graphfix_records_read_timestamp_seconds") < 60


def test_states_count_ranks(scraped: Scraped, tmp_path: Path) -> None:
    ranks(tmp_path, 0, 0)
    scraped.look()
    (sample,) = scraped.samples("graphfix_fix_state")
    assert sample.value == 2
    assert sample.labels == {
        "fix": "capture-state",
        "mode": "auto",
        "state": "active",
        "reason": "none",
        "vllm": "0.21.0",
        "graphfix": "0.1.0",
    }


def test_a_state_that_no_rank_is_in_any_more_has_no_series(scraped: Scraped, tmp_path: Path) -> None:
    ranks(tmp_path, 0)
    scraped.look()
    ranks(tmp_path, 0, fixes={"capture-state": FixReport("auto", "conflict", "somebody else's patch")})
    scraped.look()
    for name in ("graphfix_fix_ranks", "graphfix_fix_state"):
        states = {sample.labels["state"]: sample.value for sample in scraped.samples(name)}
        assert states == {"conflict": 1}


def test_a_state_without_ranks_is_0_where_prometheus_client_removes_no_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    scraped = Scraped(tmp_path)
    ranks(tmp_path, 0)
    scraped.look()
    ranks(tmp_path, 0, fixes={"capture-state": FixReport("auto", "conflict", "somebody else's patch", "foreign-patch")})
    scraped.look()
    states = {
        (sample.labels["state"], sample.labels["code"]): sample.value
        for sample in scraped.samples("graphfix_fix_ranks")
    }
    assert states == {("active", "none"): 0, ("conflict", "foreign-patch"): 1}


def all_needed(reason: str) -> dict[str, FixReport]:
    """Each fix, needed and applied, and the three detectors with a state."""
    return {name: FixReport("auto", "active", reason) for name in (*BY_NAME, "shadow", "kv-marks", "abort")}


def test_the_number_of_series_does_not_grow_with_reasons_or_ranks(scraped: Scraped, tmp_path: Path) -> None:
    """33 fixes, all needed, of which no release has as many: at most so many series, whatever goes on."""
    events = {fix.name: {event.name: 0 for event in fix.events} for fix in FIXES}
    assert len(FIXES) == 33
    for reason in ("one", "another, with the number 7"):
        for one in (record(elsewhere(100 + rank), rank=rank, world_size=16) for rank in range(16)):
            leave(tmp_path, one._replace(fixes=all_needed(reason), events=events))
        scraped.look()
        assert len(scraped.samples("graphfix_fix_ranks")) == 36
        assert {sample.value for sample in scraped.samples("graphfix_fix_ranks")} == {16}
        series = {name: len(scraped.samples(name)) for name in NAMES}
        of_events = series.pop("graphfix_events_total")
        assert of_events == sum(map(len, events.values()))
        # The versions, the variable that is wrong here, and 11 numbers of the engine.
        assert sum(series.values()) == 36 + 1 + 1 + 11
        assert sum(len(scraped.samples(name)) for name in DEPRECATED) == 36 + 1 + 1


def test_a_fix_that_is_not_needed_has_no_series(scraped: Scraped, tmp_path: Path) -> None:
    fixes = {"capture-state": FixReport("auto", "not-needed", "upstream has it")}
    ranks(tmp_path, 0, fixes=fixes | {"mamba-padding": FixReport("auto", "failed", "KeyError: 1", "error")})
    scraped.look()
    (sample,) = scraped.samples("graphfix_fix_ranks")
    assert sample.labels == {"fix": "mamba-padding", "mode": "auto", "state": "failed", "code": "error"}


def test_a_scheduler_that_hears_no_verdicts_is_counted_though_it_is_no_rank(scraped: Scraped, tmp_path: Path) -> None:
    """Its ranks may not know: what they have sent may not have been due yet."""
    ranks(tmp_path, 0, fixes={"abort": FixReport("auto", "active", "the scheduler hears this rank's verdicts")})
    for state, code, number in (("active", "none", 0), ("failed", "undelivered", 1)):
        core = record(elsewhere(200), role="engine-core", fixes={"abort": FixReport("auto", state, "as it is", code)})
        leave(tmp_path, core)
        scraped.look()
        states = {each.labels["state"]: each.value for each in scraped.samples("graphfix_fix_ranks")}
        assert states == {"active": 1} | ({"failed": number} if number else {})


def test_promtool_finds_nothing_against_the_names_and_units(scraped: Scraped, tmp_path: Path, promtool: Path) -> None:
    ranks(tmp_path, 3, 4, events={"shadow": {"checks": 3, "milliseconds": 20}})
    leave(tmp_path, record(elsewhere(102), rank=2, world_size=2, fixes={}, events={"kv-marks": {"milliseconds": 7}}))
    scraped.look()
    done = subprocess.run(
        [promtool, "check", "metrics"], input=generate_latest(scraped.registry), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_events_of_all_ranks_are_added_up_and_those_of_a_rank_that_has_ended_stay(
    scraped: Scraped, tmp_path: Path
) -> None:
    for counts, total in (((3, 4), 7), ((3, 4), 7), ((5, 4), 9), ((5,), 9), ((5, 5), 10), ((6,), 11)):
        for path in own_folder(tmp_path).glob("*.json"):
            path.unlink()
        ranks(tmp_path, *counts)
        assert scraped.now("graphfix_events_total") == total


def test_a_rank_that_is_not_heard_of_shows_and_stays_in_its_last_report(scraped: Scraped, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        one = record(of(process.pid), rank=1, world_size=2, kept=True)
        leave(tmp_path, record(rank=0, world_size=2, kept=True), one)
        assert scraped.now("graphfix_ranks_silent") == 0
        leave(tmp_path, one, age=75.0)
        assert scraped.now("graphfix_ranks_silent") == 1
        assert scraped.value("graphfix_ranks_agreeing") == 2
        assert scraped.values("graphfix_fix_state") == [2]
        process.communicate()


def test_ranks_that_could_not_be_checked_show_until_they_are(scraped: Scraped, tmp_path: Path) -> None:
    for why, number in (("whether its ranks agree is not known (OSError: no store)", 2), (None, 0)):
        ranks(tmp_path, 0, 0, unchecked=why)
        assert scraped.now("graphfix_ranks_unchecked") == number


def test_a_worker_that_could_not_be_checked_before_it_knew_its_rank_shows(scraped: Scraped, tmp_path: Path) -> None:
    leave(tmp_path, record(kept=True)._replace(role="worker", unchecked="AttributeError: no parallel_config"))
    assert scraped.now("graphfix_ranks_unchecked") == 1


def test_a_rank_that_cannot_write_its_record_shows_until_it_can(scraped: Scraped, tmp_path: Path) -> None:
    ranks(tmp_path, 3, 4)
    touch_outdated(tmp_path, record(elsewhere(101), rank=1, world_size=2))
    for expected in (1, 0):
        assert scraped.now("graphfix_ranks_outdated") == expected
        assert scraped.value("graphfix_ranks_silent") == 0
        ranks(tmp_path, 3, 5)


def test_a_step_that_does_not_end_shows_of_an_engine_core_too(scraped: Scraped, tmp_path: Path) -> None:
    ranks(tmp_path, 3)
    core = record(elsewhere(99), role="engine-core", in_step_since=time.time() - 400)
    leave(tmp_path, core, record(elsewhere(98), role="engine-core", engine="f" * 16, in_step_since=time.time() - 400))
    ranks(tmp_path, 3, in_step_since=time.time() - 400)
    assert scraped.now("graphfix_steps_stuck") == 2
    ranks(tmp_path, 3)
    leave(tmp_path, core, age=75.0)  # it has no heartbeat any more, which is another number
    scraped.look()
    assert (scraped.value("graphfix_steps_stuck"), scraped.value("graphfix_ranks_silent")) == (1, 1)


def test_a_rank_that_has_ended_shows_while_another_one_runs(scraped: Scraped, tmp_path: Path) -> None:
    scraped.watcher.engine = scraped.watcher.engine._replace(ranks=2)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        leave(
            tmp_path, record(rank=0, world_size=2, kept=True), record(of(process.pid), rank=1, world_size=2, kept=True)
        )
        assert scraped.now("graphfix_ranks_silent") == 0
        process.communicate()
    assert scraped.now("graphfix_ranks_silent") == 1
    scraped.watcher.engine = scraped.watcher.engine._replace(ranks=None)  # elastic: ranks come and go
    assert scraped.now("graphfix_ranks_silent") == 0


def test_a_worker_in_one_step_that_never_knew_its_rank_counts_once(scraped: Scraped, tmp_path: Path) -> None:
    leave(tmp_path, record(role="worker", unchecked="OSError: no store", in_step_since=time.time() - 400))
    assert scraped.now("graphfix_steps_stuck") == 1


def test_records_that_cannot_be_read_show_also_where_there_is_no_other(scraped: Scraped, tmp_path: Path) -> None:
    ranks(tmp_path, 3)
    (damaged,) = own_folder(tmp_path).iterdir()
    content = damaged.read_text()
    damaged.write_text(content[:100])
    damaged.with_name(f"{'f' * 16}-node-b-7.json").write_text("{}")  # another engine's
    damaged.with_name(f"{ENGINE}-{identity().host}-{2**22 + 1}.json").write_text("{}")  # of a process that is gone
    assert scraped.now("graphfix_records_unreadable") == 1
    assert scraped.samples("graphfix_fix_state") == []
    own_folder(tmp_path).rename(tmp_path / "away")
    assert scraped.now("graphfix_records_unreadable") == 1  # nobody knows better
    (tmp_path / "away").rename(own_folder(tmp_path))
    damaged.write_text(content)
    assert scraped.now("graphfix_records_unreadable") == 0


def test_a_rank_that_is_heard_of_is_not_silent_by_a_clock_that_is_behind(scraped: Scraped, tmp_path: Path) -> None:
    for behind, silent in ((70.0, 1), (69.9, 0)):  # that a date changes is known from the second one on
        leave(tmp_path, record(rank=0, kept=True), age=behind)
        assert scraped.now("graphfix_ranks_silent") == silent


HERE, BESIDE = identity(), of(os.getppid())
"""Two processes of this machine that live."""


def one_of(size: int, rank: int, process: Identity, group: str = "a-token", **changes: Any) -> Record:
    return record(process, rank, size, agreement=AgreementReport(group, size, size, None), **changes)


UNRECORDED: dict[str, tuple[int, int | None, list[Record], int | None]] = {
    "all of this host": (2, 2, [one_of(2, 0, HERE), one_of(2, 1, BESIDE)], 0),
    "one of this host alone, though it agreed": (2, 2, [one_of(2, 0, HERE)], 1),
    "one of two that were never compared": (2, 2, [one_of(1, 0, HERE)], 1),
    "one that is not up yet": (2, 2, [one_of(2, 0, HERE, starting=True)], None),
    "those of this host, of two without a shared folder": (4, 2, [one_of(4, 0, HERE), one_of(4, 1, BESIDE)], 0),
    "three of two hosts with a shared folder": (4, 2, [one_of(4, n, elsewhere(n, "node-b")) for n in (1, 2, 3)], 1),
    "Ray, on hosts that are not known": (4, None, [one_of(4, 0, HERE)], None),
    "Ray, all of them": (2, None, [one_of(2, 0, HERE), one_of(2, 1, elsewhere(7))], 0),
    "a front-end among others": (
        4,
        1,
        [one_of(4, 0, HERE), one_of(4, 1, elsewhere(7)), record(elsewhere(8), engine="f" * 16, serves_metrics=True)],
        0,
    ),
}
"""Ranks of the engine, of these on this host, the records, and the ranks that should have one and have none."""


@pytest.mark.parametrize(("size", "here", "there", "number"), UNRECORDED.values(), ids=UNRECORDED)
def test_ranks_that_should_have_a_record_and_have_none_show_where_that_is_known(
    size: int, here: int | None, there: list[Record], number: int | None, tmp_path: Path
) -> None:
    scraped = Scraped(tmp_path, SERVED._replace(ranks=size, ranks_here=here))
    leave(tmp_path, there[0]._replace(followers=("f" * 16,)), *there[1:])
    scraped.look()
    assert scraped.values("graphfix_ranks_unrecorded") == [*([] if number is None else [number])]


def test_a_rank_whose_record_cannot_be_read_has_one(tmp_path: Path) -> None:
    scraped = Scraped(tmp_path, SERVED._replace(ranks_here=2))
    leave(tmp_path, one_of(2, 0, HERE))
    (own_folder(tmp_path) / f"{ENGINE}-{HERE.host}-{BESIDE.pid}.json").write_text("{}")
    scraped.look()
    assert (scraped.value("graphfix_records_unreadable"), scraped.value("graphfix_ranks_unrecorded")) == (1, 0)


def test_ranks_of_which_nothing_is_known_do_not_count_as_ranks_that_differ(tmp_path: Path) -> None:
    """Data-parallel ranks of a dense model are compared with nobody."""
    scraped = Scraped(tmp_path, SERVED._replace(ranks_here=2))
    leave(tmp_path, one_of(1, 0, HERE))
    scraped.look()
    assert scraped.samples("graphfix_ranks_agreeing") == []
    leave(tmp_path, one_of(1, 0, BESIDE, "another-token"))
    assert scraped.now("graphfix_ranks_agreeing") == 2


def test_ranks_all_on_other_hosts_are_not_expected_before_one_has_a_record_here(tmp_path: Path) -> None:
    scraped = Scraped(tmp_path, SERVED._replace(ranks_here=0))
    leave(tmp_path, record())
    scraped.look()
    assert scraped.samples("graphfix_ranks_expected") == []
    ranks(tmp_path, 3, 4)
    for _ in range(2):
        scraped.look()
    assert scraped.value("graphfix_ranks_expected") == 2


def test_a_disagreement_shows(scraped: Scraped, tmp_path: Path) -> None:
    ranks(
        tmp_path,
        0,
        0,
        agreement=AgreementReport("a-token", 2, 1, "capture-state is 'active' on rank 0; 'off' on rank 1."),
    )
    assert scraped.now("graphfix_ranks_agreeing") == 1


def test_before_a_rank_has_reported_there_is_no_sample_of_ranks_that_agree(scraped: Scraped, tmp_path: Path) -> None:
    leave(tmp_path, record())
    assert scraped.now("graphfix_ranks_expected") == 2
    assert scraped.samples("graphfix_ranks_agreeing") == []
    assert scraped.samples("graphfix_fix_state") == []


def test_other_engines_and_dead_processes_have_no_samples(scraped: Scraped, tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = of(gone.pid)
    gone.communicate()
    leave(tmp_path, record(process, rank=0), record(elsewhere(7), rank=0, engine="f" * 16))
    scraped.look()
    assert scraped.samples("graphfix_fix_state") == []


def test_events_of_a_rank_that_has_ended_are_counted_though_it_is_in_no_state(scraped: Scraped, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        one = record(of(process.pid), rank=1, world_size=2)
        leave(tmp_path, record(rank=0, world_size=2, events={}), one._replace(events=counted(3)))
        assert scraped.now("graphfix_events_total") == 3
        leave(tmp_path, one._replace(events=counted(7)))
        process.communicate()
    assert scraped.now("graphfix_events_total") == 7
    assert scraped.values("graphfix_fix_state") == [1]


def test_a_process_that_serves_another_engine_later_goes_on_counting(scraped: Scraped, tmp_path: Path) -> None:
    one = record(rank=0, events=counted(10))
    leave(tmp_path, one)
    scraped.look()
    leave(tmp_path, one._replace(engine="e" * 16, events=counted(15)))
    scraped.watcher.serve(scraped.watcher.engine._replace(id="e" * 16))
    assert scraped.now("graphfix_events_total") == 15


def test_ranks_of_nodes_that_started_on_their_own_belong_to_the_engine_of_rank_0(
    scraped: Scraped, tmp_path: Path
) -> None:
    leave(tmp_path, record(elsewhere(7), rank=1, world_size=2, engine="f" * 16, leader=ENGINE))
    first = record(rank=0, world_size=2, leader=ENGINE, followers=("f" * 16,))
    leave(tmp_path, first)
    scraped.look()
    assert scraped.values("graphfix_fix_state") == [2]
    (own_folder(tmp_path) / first.file_name).write_text("{}")
    scraped.look()
    assert scraped.values("graphfix_fix_state") == [1]
    assert scraped.value("graphfix_records_unreadable") == 1


def test_the_last_samples_stay_with_their_time_when_the_folder_is_gone(scraped: Scraped, tmp_path: Path) -> None:
    ranks(tmp_path, 3)
    scraped.look()
    before = generate_latest(scraped.registry)
    own_folder(tmp_path).rename(tmp_path / "away")
    scraped.look()
    assert samples_of(generate_latest(scraped.registry), "graphfix_records_read_timestamp_seconds") == samples_of(
        before, "graphfix_records_read_timestamp_seconds"
    )
    assert scraped.values("graphfix_fix_state") == [1]


def test_several_api_servers_tell_of_one_engine_once(tmp_path: Path) -> None:
    """prometheus_client adds counters of processes up, and takes the latest of the gauges.

    That is how vLLM runs it with --api-server-count 2.
    """
    server = f"""
    import multiprocessing, sys
    from pathlib import Path
    from prometheus_client import REGISTRY
    from vllm_graphfix.engine.metrics import Exposition, Watcher
    from vllm_graphfix.engine.metrics_snapshot import ServedEngine
    multiprocessing.current_process().name = sys.argv[2]
    from vllm_graphfix.engine import metrics
    metrics.EVERY = 0.05
    from vllm_graphfix.settings import decision as rollout
    from vllm_graphfix.settings import environment as settings
    decision = rollout.decide(settings.read({{}}, ["capture-state"]), "0.21.0")._replace(engine={ENGINE!r})
    metrics.expose(Path(sys.argv[1]), decision, 2)
    import time
    time.sleep(1)
    """
    multiprocess = tmp_path / "multiprocess"
    multiprocess.mkdir()
    ranks(tmp_path, 3, 4)
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(multiprocess)}
    command = [sys.executable, "-c", textwrap.dedent(server), str(tmp_path)]
    started = [subprocess.Popen([*command, f"ApiServer_{number}"], env=environment) for number in (0, 1)]
    assert [process.wait(60) for process in started] == [0, 0]
    scrape = """
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
    """
    text = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(scrape)], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert [sample.value for sample in samples_of(text, "graphfix_events_total")] == [7]
    assert [sample.value for sample in samples_of(text, "graphfix_fix_state")] == [2]
    assert [sample.value for sample in samples_of(text, "graphfix_ranks_agreeing")] == [2]
    assert [sample.value for sample in samples_of(text, "graphfix_ranks_expected")] == [2]


def test_vllm_does_not_take_them_away_with_its_own() -> None:
    """It unregisters what has vLLM's name in it, each time an engine is made in a process."""
    assert not any("vllm" in name for name in NAMES)


def test_a_scrape_reads_no_file(scraped: Scraped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM renders /metrics in the event loop that serves requests."""
    ranks(tmp_path, 1)
    scraped.look()

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a scrape has touched a file")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        patch.setattr("builtins.open", refuse)
        patch.setattr(os, "scandir", refuse)
        assert b"graphfix_fix_state{" in generate_latest(scraped.registry)


FLEETS: list[tuple[dict[str, str], float, float, dict[str, str]]] = [
    ({}, 1, 100, {}),
    ({"VLLM_GRAPHFIX": "off"}, 0, 0, {}),
    ({"VLLM_GRAPHFIX": "observe"}, 0, 0, {}),
    ({"VLLM_GRAPHFIX": "observ"}, 0, 0, {"VLLM_GRAPHFIX": "observ"}),
    ({"VLLM_GRAPHFIX_CAPTURE_STATE": "onn"}, 1, 100, {"VLLM_GRAPHFIX_CAPTURE_STATE": "onn"}),
    ({"VLLM_GRAPHFIX_ROLLOUT": "none"}, 0, 0, {"VLLM_GRAPHFIX_ROLLOUT": "none"}),
    ({"VLLM_GRAPHFIX_ROLLOUT": ""}, 0, 0, {"VLLM_GRAPHFIX_ROLLOUT": ""}),
    ({"VLLM_GRAPHFIX_ROLOUT": "5"}, 0, 0, {"VLLM_GRAPHFIX_ROLOUT": "5"}),
    ({"VLLM_GRAPFIX_MAMBA_PADDING": "off"}, 1, 100, {"VLLM_GRAPFIX_MAMBA_PADDING": "off"}),
    ({"VLLM_GRAPHFIX_ROLLOUT": "7.5", "VLLM_GRAPHFIX_ROLLOUT_KEY": "node-a"}, 0, 7.5, {}),
    ({"VLLM_GRAPHFIX_ROLLOUT": "7.5", "VLLM_GRAPHFIX_ROLLOUT_KEY": "node-a", "VLLM_GRAPHFIX": "off"}, 0, 0, {}),
]
"""An engine's environment; `graphfix_canary`, `graphfix_rollout_percent`; and what `graphfix_misconfigured` is 1
for."""


@pytest.mark.parametrize(("environment", "canary", "percentage", "wrong"), FLEETS, ids=[str(row[0]) for row in FLEETS])
def test_who_has_the_fixes_shows(
    environment: dict[str, str],
    canary: float,
    percentage: float,
    wrong: dict[str, str],
    scraped: Scraped,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`Questions of a rollout` asks for it: a kill switch is not 100 % with the fixes."""
    from vllm_graphfix.settings import decision as rollout
    from vllm_graphfix.settings import environment as settings

    monkeypatch.setattr(metrics, "_watcher", scraped.watcher)
    scraped.look()  # of another engine, whose process serves this one now
    decision = rollout.decide(settings.read(environment, ["capture-state", "flashmla-fp8"]), "0.21.0")
    metrics.expose(tmp_path, decision, 2)
    assert scraped.now("graphfix_canary") == canary
    assert scraped.value("graphfix_rollout_percent") == percentage
    assert scraped.value("graphfix_rollout_ratio") == percentage / 100
    assert {each.labels["variable"] for each in scraped.samples("graphfix_misconfigured_variable")} == wrong.keys()
    misconfigured = {
        (each.labels["variable"], each.labels["value"])
        for each in scraped.samples("graphfix_misconfigured")
        if each.value
    }
    assert misconfigured == set(wrong.items())


def test_records_of_other_engines_are_never_opened(
    scraped: Scraped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On shared storage they are those of a whole fleet, and this process serves requests."""
    from vllm_graphfix.records import reading

    theirs = [record(elsewhere(pid), rank=0, engine="f" * 16, leader="f" * 16) for pid in range(1, 6)]
    leave(tmp_path, *theirs)
    ranks(tmp_path, 1)
    read: list[str] = []
    real = reading._read_record

    def noted(folder: int, path: Path, name: str, uid: int) -> reading.StoredRecord:
        read.append(name)
        return real(folder, path, name, uid)

    monkeypatch.setattr(reading, "_read_record", noted)
    leave(tmp_path, record(elsewhere(6), engine="e" * 16), record(elsewhere(7), rank=0, engine="d" * 16, leader=ENGINE))
    scraped.look()
    assert read == [record(elsewhere(100)).file_name]
    scraped.watcher.serve(SERVED._replace(id="f" * 16))
    scraped.look()
    assert sum(scraped.values("graphfix_fix_state")) == 5


def test_a_rank_that_is_compared_later_is_counted_from_then_on(scraped: Scraped, tmp_path: Path) -> None:
    follower = record(elsewhere(7), rank=1, world_size=2, engine="f" * 16)
    leave(tmp_path, follower)
    scraped.look()
    assert scraped.samples("graphfix_fix_state") == []
    leave(tmp_path, follower._replace(leader=ENGINE), record(rank=0, world_size=2, followers=("f" * 16,)))
    scraped.look()
    assert scraped.values("graphfix_fix_state") == [2]


def test_ranks_whose_own_front_end_serves_metrics_are_counted_there_only(scraped: Scraped, tmp_path: Path) -> None:
    """With a load balancer of one's own each data-parallel rank is a server, and all follow one rank 0."""
    ranks(tmp_path, 1, followers=("f" * 16,))
    follower = record(elsewhere(7), rank=1, world_size=2, engine="f" * 16, leader=ENGINE)
    leave(tmp_path, follower, record(elsewhere(8), engine="f" * 16, serves_metrics=True))
    (own_folder(tmp_path) / f"{'f' * 16}-node-b-9.json").write_text("{}")
    assert scraped.now("graphfix_records_unreadable") == 0
    assert sum(scraped.values("graphfix_fix_state")) == 1


def test_where_ranks_come_and_go_none_are_expected(tmp_path: Path) -> None:
    scraped = Scraped(tmp_path, SERVED._replace(ranks=None))
    ranks(tmp_path, 1)
    scraped.look()
    assert scraped.samples("graphfix_ranks_expected") == []


def test_requests_that_a_scheduler_ended_are_counted_though_it_is_no_rank(scraped: Scraped, tmp_path: Path) -> None:
    ranks(tmp_path, 3, 4)
    core = record(elsewhere(200), role="engine-core")
    its = {"shadow": {"checks": 9, "aborted": 5}, "abort": {"delivered": 7, "undelivered": 0}}
    leave(tmp_path, core._replace(events=its))
    leave(tmp_path, core._replace(engine="f" * 16, events={"shadow": {"aborted": 50}}))
    for _ in range(2):
        scraped.look()
    events = {
        (each.labels["fix"], each.labels["event"]): each.value for each in scraped.samples("graphfix_events_total")
    }
    assert events == {("capture-state", "state-consumed"): 7, ("shadow", "aborted"): 5}


OF_ONE_ENGINE = (
    "graphfix_ranks_expected",
    "graphfix_ranks_agreeing",
    "graphfix_ranks_silent",
    "graphfix_ranks_unrecorded",
    "graphfix_ranks_unchecked",
    "graphfix_ranks_outdated",
    "graphfix_steps_stuck",
    "graphfix_records_unreadable",
)


@pytest.mark.parametrize("engine", [ENGINE, "e" * 16])
def test_numbers_of_ranks_end_with_their_engine(scraped: Scraped, tmp_path: Path, engine: str) -> None:
    ranks(tmp_path, 3, 4)
    scraped.look()
    assert [name for name in OF_ONE_ENGINE if not scraped.samples(name)] == []
    for written in own_folder(tmp_path).glob("*.json"):
        written.unlink()
    scraped.watcher.serve(SERVED._replace(id=engine, ranks=None))
    scraped.look()
    assert [name for name in OF_ONE_ENGINE if scraped.samples(name)] == []
    leave(tmp_path, record(rank=0, engine=engine))
    assert scraped.now("graphfix_ranks_agreeing") == 1
    unknown = {"graphfix_ranks_expected", "graphfix_ranks_unrecorded"}
    assert {name for name in OF_ONE_ENGINE if not scraped.samples(name)} == unknown
    scraped.watcher.serve(SERVED._replace(id=engine, ranks=1))
    assert scraped.now("graphfix_ranks_expected") == 1


def test_numbers_of_an_earlier_engine_are_none_where_prometheus_client_removes_no_series(tmp_path: Path) -> None:
    """The values of a process in multiprocess mode stay in its file; what is not a number fires no alert."""
    program = f"""
    import sys
    from pathlib import Path
    from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector
    from vllm_graphfix.engine.metrics import Exposition, Watcher
    from vllm_graphfix.engine.metrics_snapshot import ServedEngine
    engine = ServedEngine({ENGINE!r}, True, 25.0, 2)
    watcher = Watcher(Path(sys.argv[1]), engine, Exposition(REGISTRY))
    watcher.look()
    watcher.serve(engine._replace(id="e" * 16, ranks=None))
    watcher.look()
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
    """
    multiprocess = tmp_path / "multiprocess"
    multiprocess.mkdir()
    ranks(tmp_path, 3, 4)
    text = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(multiprocess)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in OF_ONE_ENGINE:
        assert [str(sample.value) for sample in samples_of(text, name)] == ["nan"], name


WORDS = {
    "not-in-canary": "bucket 9000 of 10,000 is not among the first 5 % (VLLM_GRAPHFIX_ROLLOUT, key 'tenant-{}')",
    "failed": "OSError: no route to tenant-{}",
}


@pytest.mark.parametrize("state", WORDS)
def test_ranks_are_one_series_whatever_their_reason_in_words(scraped: Scraped, tmp_path: Path, state: str) -> None:
    for number in range(2):
        fixes = {"capture-state": FixReport("auto", state, WORDS[state].format(number))}
        leave(tmp_path, record(elsewhere(100 + number), rank=number, world_size=2, fixes=fixes))
    scraped.look()
    (sample,) = scraped.samples("graphfix_fix_state")
    assert (sample.labels["state"], sample.labels["reason"], sample.value) == (state, "none", 2)
    assert b"tenant" not in generate_latest(scraped.registry)


@pytest.mark.parametrize("multiprocess", [False, True])
def test_the_number_of_series_and_of_followers_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, multiprocess: bool
) -> None:
    """Whoever has the same uid can write records with any names."""
    monkeypatch.setattr(metrics, "MOST_SERIES", 70)
    monkeypatch.setattr("vllm_graphfix.records.MOST_FOLLOWERS", 3)
    if multiprocess:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    scraped = Scraped(tmp_path)
    for turn in range(3):
        fixes = {f"fix-{turn}-{number}": FixReport("auto", "active", "") for number in range(60)}
        events = {name: {"event": 1} for name in fixes}
        followers = tuple(f"{turn}{number}".rjust(16, "0") for number in range(3))
        leave(tmp_path, record(rank=0, fixes=fixes, events=events, followers=followers))
        scraped.look()
        assert scraped.watcher._followers == {*followers}
    for name in ("graphfix_fix_ranks", "graphfix_fix_state"):
        assert len(scraped.samples(name)) == (70 if multiprocess else 60)
    assert len(scraped.samples("graphfix_events_total")) == 70
