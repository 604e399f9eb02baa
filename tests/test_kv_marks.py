"""Marks in the KV cache: finished blocks that change are named, and who has them is ended."""

from __future__ import annotations

import multiprocessing
import os
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import engine as cpu
from abort_ranks import SchedulerStandIn
from behaviours import check_behaviours
from marked_steps import step, watched
from records import record
from stock import ALL_RELEASES, release_root
from table import SAMPLE, slow_but_for
from vllm_graphfix.commands.fleet import look
from vllm_graphfix.engine.abort import Aborts, DetectorAborts
from vllm_graphfix.engine.metrics_snapshot import snapshot_of
from vllm_graphfix.engine.verdict import Verdict
from vllm_graphfix.marks.budget import Budget
from vllm_graphfix.marks.checks import MAX_CREDIT
from vllm_graphfix.marks.turns import CheckQueue
from vllm_graphfix.marks.watch import ChecksumMonitor
from vllm_graphfix.records import OverwrittenBlock, Record, RecordError, write
from vllm_graphfix.settings.decision import decide, decode
from vllm_graphfix.settings.environment import read
from vllm_graphfix.settings.json_object import JsonError
from vllm_graphfix.settings.shadow_rate import Action, MarksAction
from vllm_graphfix.source.files import open_source

WRITES = {
    "0.18.1": "Rank,DraftingRank",
    "0.19.1": "Rank,DraftingRank",
    "0.21.0": "DraftingRank",
    "0.33.0": "DraftingRank",
}
"""Releases, and which ranks of the CPU double write to finished blocks in a step without work."""
ON = {"VLLM_GRAPHFIX_KV_MARKS": "1/1", "VLLM_GRAPHFIX_KV_MARKS_ACTION": "abort"}


@pytest.mark.parametrize("fix", ["off", "auto"])
@pytest.mark.parametrize("release", slow_but_for(("0.18.1", "0.33.0"), tuple(WRITES)))
def test_idle_steps_of_stock_are_caught_and_patched_ones_are_silent(release: str, fix: str) -> None:
    check_behaviours(release, "cache_marks", {"VLLM_GRAPHFIX_IDLE_RANK": fix, "WRITES": WRITES[release]})


# -- a real engine ---------------------------------------------------------------------------------------------------


def served(folder: Path, plant: str, executor: str, **environment: str) -> dict[str, Any]:
    """Return the report of `marked_engine` about an engine whose cache *plant* has overwritten."""
    actual = cpu.check_answer("marked_engine.py", folder, plant, executor, env=ON | environment)
    assert actual["state"] == "active"
    assert actual["counts"]["failures"] == actual["counts"]["passed-over"] == 0
    assert actual["counts"]["marks"] > 50
    assert actual["counts"]["looks"] > 5 * actual["counts"]["marks"]
    return actual


@pytest.mark.parametrize("executor", ["uni", pytest.param("mp", marks=pytest.mark.slow)])
def test_who_has_an_overwritten_block_ends_with_an_error_and_nobody_else_does(tmp_path: Path, executor: str) -> None:
    """In one process, and with the scheduler in another one than the worker."""
    actual = served(tmp_path, "finished", executor)
    assert (actual["counts"]["changed"], actual["counts"]["aborted"]) == (1, 2)
    (block,) = actual["found"]
    assert (block["block"], block["layers"]) == (actual["planted"]["block"], actual["planted"]["layer"])
    first, second, third = actual["asked"]
    for reason, why, cached in (first[0], first[2]):
        assert (reason, cached) == ("error", 80)
        assert f"block {block['block']} of cache group 0 has changed although it was finished" in why
    assert [reason for reason, _, _ in (first[1], *second, *third)] == 7 * ["length"]
    assert second[0][2] == 0  # what they had has left the prefix cache
    assert third[0][2] == 80  # and is there again
    assert not list(tmp_path.rglob("*.aborts"))


@pytest.mark.slow
@pytest.mark.parametrize("plant", ["nothing", "unused"])
def test_an_engine_that_nobody_meddles_with_is_silent(tmp_path: Path, plant: str) -> None:
    actual = served(tmp_path, plant, "uni")
    assert (actual["counts"]["changed"], actual["found"]) == (0, [])
    assert {reason for answers in actual["asked"] for reason, _, _ in answers} == {"length"}


@pytest.mark.slow
def test_with_report_nobody_is_ended(tmp_path: Path) -> None:
    actual = served(tmp_path, "finished", "uni", VLLM_GRAPHFIX_KV_MARKS_ACTION="report")
    assert (actual["counts"]["changed"], actual["counts"]["aborted"]) == (1, 0)
    assert {reason for answers in actual["asked"] for reason, _, _ in answers} == {"length"}


# -- who is told -----------------------------------------------------------------------------------------------------


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[DetectorAborts, Aborts, SchedulerStandIn]]:
    """A rank, the process of its scheduler, and the scheduler, all in this process; `test_abort.py` has real ones."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=os.getpid()))
    monkeypatch.setattr("vllm_graphfix.engine.abort_channel._PATIENCE", 60.0)  # or a slow machine is one that hangs
    monkeypatch.setattr("vllm_graphfix.engine.abort.finished_error", lambda: "error")
    scheduler, rank, its = SchedulerStandIn(), Aborts(), Aborts()
    for each in (rank, its):
        each.begin(os.urandom(8).hex() if each is rank else rank._engine)
    yield rank.of("kv-marks"), its, scheduler
    for each in (rank, its):
        if each._receiver is not None:
            each._receiver.close()
        each.begin("")


def test_a_rank_tells_the_scheduler_by_its_process(two: Any) -> None:
    rank, its, scheduler = two
    assert "does not listen" in rank.why_not()
    its._begin(scheduler)
    assert rank.why_not() is None
    rank.deliver(["b", "gone"], [3, 10**6], "block 3 has changed")
    its._take_out(scheduler)
    assert (scheduler.evicted, scheduler.ended) == ({3, 5}, [])
    ended: list[Any] = []
    its._end_requests(scheduler, ended)
    assert (scheduler.ended, [why for _, why in ended]) == (["b"], ["block 3 has changed"])
    its._end_requests(scheduler, ended)
    assert len(ended) == 1
    names = [f"request-{number}" for number in range(1000)]
    rank.deliver([*names, "a"], [3], "again")
    its._end_requests(scheduler, ended)
    assert scheduler.ended == ["b", "a"]


@pytest.mark.parametrize(
    "name",
    ["\u4e00" * 2000, "\ud800" * 10**6, "#", "", "\U0001f600" * 256],
    ids=("long", "no text", "#", "none", "wide"),
)
def test_a_request_ends_whatever_a_client_has_called_it(two: Any, name: str) -> None:
    rank, its, scheduler = two
    its._begin(scheduler)
    scheduler.requests |= {other: SimpleNamespace(is_finished=lambda: False) for other in ("=", name[:300] + "x")}
    scheduler.requests[name] = SimpleNamespace(is_finished=lambda: False)
    rank.deliver([name], [3], "block 3 has changed")
    its._end_requests(scheduler, [])
    assert (scheduler.ended, 3 in scheduler.evicted) == ([name], True)
    assert its.counts()["kv-marks"] == {"aborted": 1}


def test_blocks_that_a_request_gets_before_it_ends_leave_the_cache_too(two: Any) -> None:
    rank, its, scheduler = two
    its._begin(scheduler)
    rank.deliver(["a"], [3], "")
    its._take_out(scheduler)
    scheduler.kv_cache_manager.get_block_ids = lambda name: ([3, 4, 6],)  # the step that is scheduled now
    its._end_requests(scheduler, [])
    assert scheduler.evicted == {3, 4, 6}


def test_nobody_is_ended_where_an_end_without_a_result_ends_the_front_end(
    two: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rank, its, scheduler = two
    scheduler.vllm_config = SimpleNamespace(model_config=SimpleNamespace(runner_type="pooling"))
    its._begin(scheduler)
    assert "cannot be told" in rank.why_not()
    assert "cannot be told" in its.why_not()
    assert "answers with vectors or scores" in caplog.text


def test_a_verdict_is_for_the_scheduler_that_was_made_last(two: Any) -> None:
    _, its, scheduler = two
    its._begin(SchedulerStandIn())
    its._begin(scheduler)
    its.of("kv-marks").deliver(["a"], [3], "")
    its._end_requests(SchedulerStandIn(), [])
    its._end_requests(scheduler, [])
    assert scheduler.ended == ["a"]


def test_a_worker_with_a_foreign_wrapper_is_refused() -> None:
    parallel = SimpleNamespace(distributed_executor_backend="mp")
    config = SimpleNamespace(parallel_config=parallel, model_config=None, scheduler_config=None)
    theirs = object()
    runner = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    worker = SimpleNamespace(vllm_config=config, model_runner=runner, execute_model=theirs)
    marks = ChecksumMonitor()
    marks.start(1)
    marks.on_captured(worker)
    assert (marks.refused, worker.execute_model) == ("execute_model of this worker is somebody else's wrapper", theirs)


class WorkerStandIn:
    """Has the steps that its class has run."""

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.model_runner = SimpleNamespace(requests={})

    def execute_model(self, scheduler_output: Any) -> int:
        self.ran.append(scheduler_output)
        return len(self.ran)


def wrapped_worker() -> tuple[ChecksumMonitor, WorkerStandIn]:
    marks, _ = watched()
    worker = WorkerStandIn()
    assert marks._tracker is not None
    marks._worker = weakref.ref(worker)
    worker.execute_model = marks._around_steps(marks._tracker, marks._worker)  # type: ignore[method-assign]
    return marks, worker


def test_a_step_that_waits_is_run_as_any_other_by_whatever_the_class_has_then(monkeypatch: pytest.MonkeyPatch) -> None:
    marks, worker = wrapped_worker()
    steps = [step(new=(("a", ([1, 2, 3],), 0, 9),)), *(step(running={"a": (None, at, 1)}) for at in (9, 10, 11))]
    assert worker.execute_model(steps[0]) == 1
    assert worker.execute_model(scheduler_output=steps[1]) == 2
    assert worker.execute_model(steps[2]) == 3
    monkeypatch.setattr(WorkerStandIn, "execute_model", lambda self, scheduler_output: "somebody else's")
    assert worker.execute_model(steps[3]) == "somebody else's"  # type: ignore[comparison-overlap]
    assert worker.ran == steps[:3]
    assert marks._tracker is not None
    assert (len(marks._tracker.deferred), marks._timed_steps) == (4, 1)  # the first of three is timed


@pytest.mark.parametrize("wait", [False, True])
def test_a_step_that_is_not_understood_runs_once_and_ends_the_marks(
    wait: bool, caplog: pytest.LogCaptureFixture
) -> None:
    marks, worker = wrapped_worker()
    if wait:
        worker.execute_model(step(new=(("a", ([1, 2, 3],), 0, 9),)))
        worker.execute_model(step(running={"a": (None, 9, 1)}))
    worker.ran.clear()
    wrapper = worker.execute_model
    assert wrapper("not a step") == 1
    assert marks.stopped == "AttributeError: 'str' object has no attribute 'num_scheduled_tokens'"
    assert "execute_model" not in vars(worker)
    assert wrapper("not a step") == 2  # somebody may have kept it
    assert len(caplog.records) == 1


def test_marks_are_looked_at_in_turns_the_newest_and_that_of_the_longest_ago() -> None:
    def batch(name: str, checked_at: int, alive: int = 1) -> Any:
        return SimpleNamespace(name=name, checked_at=checked_at, alive=set(range(alive)))

    turns = CheckQueue()
    turns.fresh.extend([batch("new", 7), batch("newer", 8), batch("given away", 8, alive=0), batch("of now", 9)])
    turns.others.extend([batch("old", 2), batch("older than none", 3)])
    actual: list[Any] = [turns.next(9) for _ in range(5)]
    assert [each.name if each else None for each in actual] == ["old", "older than none", None, None, None]
    actual = [turns.next(10) for _ in range(4)]
    assert [each.name if each else None for each in actual] == ["of now", "newer", "new", None]


def test_blocks_in_danger_are_checked_before_all_others() -> None:
    marks, sums = watched()
    for name in ("a", "b"):  # five full blocks of each
        first = {"a": 1, "b": 11}[name]
        marks._before(step(new=((name, (list(range(first, first + 5)),), 0, 20),)))
    marks._checks.check_budget._credit = -0.02  # all that looks may cost is spent
    marks._before(None)
    for _ in range(20):
        marks._before(None)
    assert sums.seen == []
    marks._before(step(new=(("c", ([15, 16],), 0, 4),)))
    assert sums.seen == [15, 13, 11, 4, 2]  # what "b" filled in the last step, the newest first, and then the others


def test_what_sums_may_cost_is_saved_up_and_owed_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("vllm_graphfix.marks.budget.time.perf_counter", lambda: now[0])
    budget, spent = Budget(0.001, MAX_CREDIT, 0.01), 0.0
    while budget.allows(debt=True):
        now[0] += 0.001
        budget.spend()
        spent += 0.001
    assert 2 * MAX_CREDIT <= spent < 2 * MAX_CREDIT + 0.002
    now[0] += spent / 2 / 0.01
    budget.repay()
    assert budget.allows(debt=True)
    assert not budget.allows()
    now[0] += 2 * spent / 0.01
    budget.repay()  # what is owed, and no more
    assert budget._credit == 0
    now[0] += 1.0
    budget.spend()  # one that took so long does not end all for minutes
    now[0] += 1.1 * MAX_CREDIT / 0.01
    budget.repay()
    assert budget.allows(debt=True)
    budget._credit, budget._credited = MAX_CREDIT - spent, now[0]
    now[0] += 0.9 * (spent - MAX_CREDIT) / 0.001
    assert not budget.allows()
    now[0] += 0.2 * spent / 0.001
    assert budget.allows()


def test_all_batches_have_one_shape_and_their_padding_is_ignored() -> None:
    import torch

    from vllm_graphfix.marks.groups import Group, LayerCache
    from vllm_graphfix.marks.ledger import Block
    from vllm_graphfix.marks.sums import BATCH, BlockChecksums

    memory = torch.zeros(2, 9, 4, dtype=torch.int16)
    layers = tuple(LayerCache(name, memory.clone(), 1, 1) for name in ("first", "second"))
    shapes = set()

    class Seen(BlockChecksums):
        def _checksums(self, batch: Any) -> Any:
            made = super()._checksums(batch)
            shapes.add(made.shape)
            return made

    sums = Seen(torch.device("cpu"))
    sums.warm_up({0: Group(4, layers)})
    batch = sums.mark([Block(number, 0, number, "a", 4) for number in (3, 5, 7)], Group(4, layers), 1)
    assert batch is not None
    layers[0].memory[:, 0] += 1  # the null block is written again and again
    layers[1].memory[1, 5] += 1
    assert sums.check(batch, 2)
    (looked,) = sums.results()
    assert looked.changed == {1: ["second"]}
    assert shapes == {(2, BATCH)}


NONE_OF_A_RANK = (
    b"",
    b"[]",
    b"not JSON",
    b"[" * 10**5,
    b'{"detector": "kv-marks", "requests": ["=a"], "blocks": [-1], "why": ""}',
    b'{"detector": "kv-marks", "requests": [""], "blocks": [], "why": ""}',
    b'{"detector": "kv-marks", "requests": ["a"], "blocks": [], "why": ""}',
    b'{"detector": "another", "requests": ["=a"], "blocks": [], "why": ""}',
    b'{"detector": "kv-marks", "requests": ["=b"], "bl',
)


@pytest.mark.parametrize("message", NONE_OF_A_RANK, ids=lambda message: repr(message[:80]))
def test_what_is_no_verdict_is_refused(message: bytes) -> None:
    with pytest.raises(JsonError):
        Verdict.decode(message)


def test_a_rank_that_says_what_is_no_verdict_is_heard_no_more(two: Any, caplog: pytest.LogCaptureFixture) -> None:
    rank, its, scheduler = two
    its._begin(scheduler)
    assert rank.why_not() is None
    rank._aborts._sender.send(b"not JSON")
    assert rank._aborts._sender.closed
    assert "is not understood" in caplog.text
    rank.deliver(["a"], [3], "")  # by a new connection
    its._end_requests(scheduler, [])
    assert (scheduler.ended, rank._aborts.counts()["abort"]) == (["a"], {"delivered": 1, "undelivered": 1})


@pytest.mark.parametrize("release", slow_but_for(SAMPLE, ALL_RELEASES))
def test_what_is_relied_on_is_there_in_every_release(release: str) -> None:
    source = open_source(release_root(release))
    scheduler, manager = "vllm/v1/core/sched/scheduler.py", "vllm/v1/core/kv_cache_manager.py"
    for name in ("__init__", "schedule", "update_from_output"):
        assert source.function(scheduler, f"Scheduler.{name}") is not None
    finish = source.function(scheduler, "Scheduler.finish_requests")
    assert finish is not None
    assert finish.signature == "self, request_ids, finished_status"
    for name in ("evict_blocks", "get_block_ids"):
        assert source.function(manager, f"KVCacheManager.{name}") is not None
    for runner in ("vllm/v1/worker/gpu_model_runner.py", "vllm/v1/worker/gpu/model_runner.py"):
        execute = source.function(runner, "GPUModelRunner.execute_model")
        assert execute is not None
        assert execute.signature.startswith("self, scheduler_output")
        text = (source.read(runner) or b"").decode()
        # What is asked for the last step: of V2 nothing, and not by mistake.
        assert ("self.requests: dict[str, CachedRequestState] = {}" in text) is runner.endswith("gpu_model_runner.py")
        assert ("self.requests" in text) is runner.endswith("gpu_model_runner.py")
        assert "self.kv_cache_config = " in text
        assert "self.device = " in text
    output = (source.read("vllm/v1/core/sched/output.py") or b"").decode()
    for name in ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "finished_req_ids",
                 "preempted_req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"):  # fmt: skip
        assert f"    {name}: " in output
    state = (source.read("vllm/v1/worker/gpu_input_batch.py") or b"").decode().partition("class CachedRequestState")[2]
    assert "    block_ids: tuple[list[int], ...]\n" in state
    assert "    num_computed_tokens: int\n" in state
    assert source.function("vllm/v1/worker/gpu_input_batch.py", "InputBatch.req_ids") is not None
    worker = "vllm/v1/worker/gpu_worker.py"
    for name in ("execute_model", "execute_dummy_batch", "sleep", "wake_up"):
        assert source.function(worker, f"Worker.{name}") is not None


# -- settings, records -----------------------------------------------------------------------------------------------


def test_what_is_set_is_handed_on_and_is_off_outside_of_the_rollout() -> None:
    assert decide(read({}, ()), "0.21.0").marks == "off"
    made = decode(decide(read(ON | {"VLLM_GRAPHFIX_SHADOW_ACTION": "abort"}, ()), "0.21.0").encode())
    assert made is not None
    assert (made.marks, made.kv_marks_action, made.shadow_action) == ("1/1", MarksAction.ABORT, Action.ABORT)
    assert made.aborts
    assert made._replace(canary=False).marks == "off"
    assert not made._replace(canary=False).aborts
    only_shadow = read({"VLLM_GRAPHFIX_SHADOW": "1/9", "VLLM_GRAPHFIX_SHADOW_ACTION": "abort"}, ())
    assert decide(only_shadow, "0.21.0").aborts
    for switch in ({"VLLM_GRAPHFIX": "off"}, {"VLLM_GRAPHFIX_KV_MARKS": "0.1%"}, {"VLLM_GRAPHFIX_KV_MARKS": "off"}):
        assert decide(read(ON | switch, ()), "0.21.0").marks == "off"


OVERWRITTEN = OverwrittenBlock(17, 1, 3, "model.layers.0.self_attn.attn", "3 with requests, 2 of an idle rank")
COUNTS = {"marks": 9, "looks": 40, "changed": 2, "aborted": 1, "passed-over": 0, "failures": 0, "milliseconds": 3}


def test_records_have_the_first_blocks_that_have_changed_and_fleet_and_metrics_tell(
    tmp_path: Path, alone: Callable[[], None]
) -> None:
    reported = record(rank=0, events={"kv-marks": COUNTS}, overwritten=(OVERWRITTEN,))
    written = reported.as_json()
    assert Record.from_json(written) == reported
    write(tmp_path, reported)
    (engine,) = look(tmp_path).engines
    (line,) = [what for what in engine.wrong if "cache blocks have changed, 2 times: block 17 of cache group 1" in what]
    assert OVERWRITTEN.layers in line
    (events,) = snapshot_of([reported], 0.0).events.values()
    assert {event: count for (fix, event), count in events.items() if fix == "kv-marks"} == COUNTS
    written["overwritten"]["0"]["block"] = "many"
    with pytest.raises(RecordError, match=r"overwritten\.0"):
        Record.from_json(written)


# -- other wrappers on a worker, and checks for which there is no transfer ---------------------------------------------


class WorkerWithoutCaches(WorkerStandIn):
    """No group of its cache can be marked, which the test has the monitor accept."""

    def __init__(self) -> None:
        super().__init__()
        self.vllm_config = None
        self.model_runner.device = SimpleNamespace(type="cpu")

    def execute_dummy_batch(self) -> str:
        return "idle"

    def sleep(self, level: int) -> int:
        return level


def test_a_wrapper_on_top_of_ours_stays_and_ours_only_passes_calls_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the marks go on in the next engine of this process."""
    for name, result in (("unsafe", None), ("groups", {}), ("slack_and_doubt", (0, 0))):
        monkeypatch.setattr(f"vllm_graphfix.marks.watch.{name}", lambda _, result=result: result)
    worker, second = WorkerWithoutCaches(), WorkerWithoutCaches()
    calls: list[Any] = []

    def profiled(ours: Callable[..., Any], *args: Any) -> Any:
        calls.append(args)
        return ours(*args)

    marks = ChecksumMonitor()
    marks.start(1)
    marks.on_captured(worker)
    assert {"execute_model", "execute_dummy_batch", "sleep"} <= vars(worker).keys()
    for name in ("execute_model", "execute_dummy_batch"):
        setattr(worker, name, partial(profiled, getattr(worker, name)))
    held_by_somebody = worker.sleep
    wrappers, last, output = {**vars(worker)}, marks._last_step, step(new=(("a", ([1, 2, 3],), 0, 9),))
    assert (worker.execute_model(output), last.output) == (1, output)
    marks._stop(RuntimeError("planted"))
    assert "sleep" not in vars(worker)
    for engine in (None, second):
        if engine is not None:
            marks.on_captured(engine)
            marks._checks.queue = queue = CheckQueue()
        for name in ("execute_model", "execute_dummy_batch"):
            assert getattr(worker, name) is wrappers[name]
        ran = len(worker.ran)
        assert (worker.execute_model(output), worker.execute_model("not a step")) == (ran + 1, ran + 2)
        assert (worker.execute_dummy_batch(), held_by_somebody(2)) == ("idle", 2)
        assert (last.output, marks._last_step.output, marks._step, list(marks._idle)) == (None, None, 0, [])
    assert marks._checks.queue is queue
    assert (marks.stopped, len(calls)) == ("RuntimeError: planted", 7)
    second.execute_dummy_batch()
    assert marks._step == 1


def test_a_batch_that_cannot_be_checked_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_graphfix.marks.ledger import Block
    from vllm_graphfix.marks.sums import Batch

    marks, sums = watched()
    batches: list[Any] = [Batch([Block(number, 0, 0, "a", 4)], (), None, 0) for number in (1, 2, 3, 4)]  # type: ignore[arg-type]
    for batch in batches:
        marks._checks.queue.add(batch)
    for batch in batches[:2]:
        marks._checks.queue.put_last(batch)
    marks._step = 5
    with monkeypatch.context() as under_way:
        under_way.setattr(sums, "check", lambda *_: False)
        for _ in range(3):
            marks._checks.check_next(sums, marks._step)  # type: ignore[arg-type]
            assert ([*marks._checks.queue.others], [*marks._checks.queue.fresh]) == (batches[:2], batches[2:])
    assert marks._checks.check_budget.spent == 0
    for _ in range(5):
        marks._checks.check_next(sums, marks._step)  # type: ignore[arg-type]
    assert sums.seen == [4, 1, 3, 2]


@pytest.mark.parametrize("under_way", [False, True])
def test_a_last_check_that_cannot_be_made_is_counted(under_way: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    marks, sums = watched()
    marks._before(step(new=(("a", ([1, 2, 3, 4, 5],), 0, 20),)))
    if under_way:
        monkeypatch.setattr(sums, "check", lambda *_: False)
    for _ in range(20):
        marks._before(None)
    assert (marks.counts()["marks"], marks.counts()["passed-over"]) == (5, 0)
    marks._before(step(new=(("b", ([3, 4, 6],), 0, 9),)))  # of two batches
    assert marks.counts()["passed-over"] == (2 if under_way else 0)
