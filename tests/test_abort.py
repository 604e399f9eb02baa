"""The way of a rank's verdict to the scheduler, with real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

import abort_ranks
from abort_ranks import AnyRequest, SchedulerStandIn, ended_by, flood, process, rank, steps, until
from records import elsewhere, eventually, record
from stock import ALL_RELEASES, release_root
from table import SAMPLE, slow_but_for
from vllm_graphfix.commands.fleet import look
from vllm_graphfix.engine import abort, abort_channel
from vllm_graphfix.engine.abort import Aborts
from vllm_graphfix.engine.context import EngineContext
from vllm_graphfix.engine.verdict import Verdict
from vllm_graphfix.fix import State
from vllm_graphfix.patching.applied_fix import Policy
from vllm_graphfix.patching.manager import FixManager
from vllm_graphfix.records import FixReport, write
from vllm_graphfix.settings.environment import Master
from vllm_graphfix.settings.json_object import JsonError
from vllm_graphfix.settings.shadow_rate import Action, parse
from vllm_graphfix.shadow import process as shadow
from vllm_graphfix.shadow.check import Shadow
from vllm_graphfix.source.files import open_source

# As are processes of vLLM's that fork.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

ENGINE = "0123456789abcdef"
SPAWN = multiprocessing.get_context("spawn")
MOST = abort_channel.MOST_PENDING


@pytest.fixture
def its(monkeypatch: pytest.MonkeyPatch) -> Iterator[Aborts]:
    """Of this process, which has the scheduler."""
    for name in ("finished_error", "hand_out"):
        monkeypatch.setattr(abort, name, getattr(abort, name))
    made = ended_by(Aborts())
    made.begin(os.urandom(8).hex())
    yield made
    if made._receiver is not None:
        made._receiver.close()


def state_of(aborts: Aborts) -> tuple[State, str]:
    abort_state = aborts.states()["abort"]
    return abort_state.state, abort_state.reason


def settled(of_rank: Connection, number: int, each: Callable[[], object]) -> tuple[dict[str, int], str, str]:
    """Counts, state and reason of a rank once it knows of all *number* verdicts what became of them."""
    answers = []

    def is_settled() -> bool:
        if of_rank.poll():
            answers.append(of_rank.recv())
            if sum(answers[-1][0].values()) < number:
                of_rank.send((0, 0))
        return bool(answers) and sum(answers[-1][0].values()) == number

    until(is_settled, each)
    counts, state, reason, *_ = answers[-1]
    return counts, state, reason


@pytest.mark.parametrize(("method", "number"), [("fork", 20_000), ("spawn", 4_000), ("forkserver", 4_000)])
def test_of_thousands_of_verdicts_each_ends_its_request_or_is_known_not_to(
    its: Aborts, method: str, number: int
) -> None:
    """B1: the file was read up to a megabyte, and the ranks never knew."""
    scheduler = SchedulerStandIn()
    scheduler.requests = AnyRequest()
    starts = multiprocessing.get_context(method)
    here, there = starts.Pipe()
    with process(starts, rank, its._engine, there):
        assert here.recv() == "there is a rank"
        its._begin(scheduler)  # after its ranks were started, as vLLM does
        here.send((0, number))
        counts, state, reason = settled(here, number, lambda: steps(its, scheduler))
        assert (state == "failed", "go on" in reason) == 2 * (counts["undelivered"] > 0,)
        until(lambda: its.ended["shadow"] == counts["delivered"], lambda: steps(its, scheduler))
        here.send(None)
    assert len(set(scheduler.ended)) == len(scheduler.ended) == counts["delivered"] > number // 2
    assert its.counts()["shadow"] == {"aborted": counts["delivered"]}


def test_a_stopped_scheduler_lets_no_rank_wait_and_each_verdict_is_accounted_for() -> None:
    here, there = SPAWN.Pipe()
    to_rank, of_rank = SPAWN.Pipe()
    with process(SPAWN, abort_ranks.scheduler_that_stops, ENGINE, SPAWN, there, of_rank) as stopped:
        assert to_rank.recv() == "there is a rank"
        child = here.recv()
        try:
            assert os.waitpid(stopped.pid, os.WUNTRACED)[0] == stopped.pid
            to_rank.send((0, 20_000))
            assert to_rank.poll(abort_ranks.PATIENCE)
            counts, state, _, failed, longest, _ = to_rank.recv()
            # What the kernel holds of it is bounded, and nobody waits for a reader that has let one wait.
            assert counts["delivered"] == 0
            assert 0 < 20_000 - counts["undelivered"] < 2000
            assert (state, "cannot be told: Resource temporarily unavailable" in failed) == ("failed", True)
            assert longest < 20.0
            os.kill(stopped.pid, signal.SIGCONT)
            assert here.recv() == "goes on"
            to_rank.send((0, 0))
            assert settled(to_rank, 20_000, lambda: None)[0]["undelivered"] == counts["undelivered"]
            here.send("that is all")
            to_rank.send(None)
            here.recv()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_rank_that_floods_and_dies_leaves_the_scheduler_bounded_and_others_heard(its: Aborts) -> None:
    scheduler = SchedulerStandIn()
    scheduler.requests = AnyRequest()
    here, there = SPAWN.Pipe()
    calm, of_calm = SPAWN.Pipe()
    its._begin(scheduler)
    with process(SPAWN, rank, its._engine, of_calm), process(SPAWN, flood, its._engine, os.getpid(), there) as flooding:
        assert here.recv() == "floods"
        until(lambda: len(its._pending) >= MOST)
        assert len(its._pending) == MOST
        calm.recv()
        calm.send((0, 50))
        counts = settled(calm, 50, lambda: steps(its, scheduler))[0]
        until(lambda: len(scheduler.ended) > counts["delivered"], lambda: steps(its, scheduler))  # "nobody", too
        flooding.kill()
        flooding.join()
        receiver = its._receiver
        assert receiver is not None
        until(lambda: len(receiver._ranks) == 1, lambda: steps(its, scheduler))
        calm.send((50, 1))
        until(lambda: "request-50" in scheduler.ended, lambda: steps(its, scheduler))
    until(lambda: not receiver._ranks)
    assert receiver.alive


def calls(function: Any) -> set[str]:
    """The C functions that *function* calls."""
    names: set[str] = set()

    def profile(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call":
            names.add(f"{getattr(called, '__module__', None)}.{called.__qualname__}")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return names - {"sys.setprofile"}


def test_an_idle_step_calls_nothing_and_one_with_a_verdict_no_system(its: Aborts) -> None:
    """B2, B11: no folder is on the scheduler's way, so that one which hangs, or is swept, does not matter."""
    scheduler = SchedulerStandIn()
    its._begin(scheduler)
    assert calls(lambda: steps(its, scheduler)) == set()
    its.of("shadow").deliver(["a"], [3], "wrong")
    made = calls(lambda: steps(its, scheduler))
    assert scheduler.ended == ["a"]
    of_the_log = {"posix.fspath", "posix.getpid", "time.time"}
    assert not {
        name for name in made - of_the_log if name.startswith(("posix", "_io", "io", "_socket", "select", "time"))
    }


def test_another_user_is_not_heard(its: Aborts, caplog: pytest.LogCaptureFixture) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    scheduler = SchedulerStandIn()
    its._begin(scheduler)
    here, there = SPAWN.Pipe()
    with process(SPAWN, abort_ranks.another_user, its._engine, os.getpid(), 65534, there):
        assert here.recv() == "refused"
    steps(its, scheduler)
    assert (scheduler.ended, "of uid 65534 is no rank of this engine's" in caplog.text) == ([], True)


def test_a_process_of_this_user_that_the_scheduler_has_not_started_is_not_heard() -> None:
    here, there = SPAWN.Pipe()
    to_rank, of_rank = SPAWN.Pipe()
    with process(SPAWN, abort_ranks.scheduler_that_stops, ENGINE, SPAWN, there, of_rank) as its_process:
        assert to_rank.recv() == "there is a rank"
        child = here.recv()
        try:
            os.waitpid(its_process.pid, os.WUNTRACED)
            os.kill(its_process.pid, signal.SIGCONT)
            assert here.recv() == "goes on"
            assert abort_ranks.outcome(ENGINE, its_process.pid) == "refused"
            to_rank.send((0, 1))
            assert settled(to_rank, 1, lambda: None)[0] == {"delivered": 1, "undelivered": 0}
        finally:
            os.kill(child, signal.SIGKILL)


def test_whoever_listens_in_the_scheduler_s_place_learns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Aborts()
    mine.begin(os.urandom(8).hex())
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=os.getppid()))
    listener = abort_channel._socket()
    with listener:
        listener.bind(abort_channel._address(mine._engine, os.getppid()))
        listener.listen()
        with pytest.raises(OSError, match="cannot be told: another process listens in its place"):
            mine.deliver("shadow", ["a"], [], "wrong")
    assert mine.counts()["abort"] == {"delivered": 0, "undelivered": 1}


def test_a_rank_that_the_scheduler_has_not_started_is_refused_with_the_reason() -> None:
    mine = Aborts()
    mine.begin(ENGINE)
    assert state_of(mine)[0] is State.WAITING
    mine.on_captured()
    mine.poll()
    assert state_of(mine)[0] is State.WAITING  # a scheduler may still come
    assert "was not started by the scheduler's process (Ray, another launcher)" in str(mine.why_not())
    assert state_of(mine) == (State.INCOMPATIBLE, mine.why_not())
    with pytest.raises(OSError, match="Ray"):
        mine.deliver("kv-marks", [], [3], "wrong")
    assert state_of(mine)[0] is State.FAILED  # of which there was a verdict
    assert mine.counts()["abort"] == {"delivered": 0, "undelivered": 1}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_config": SimpleNamespace(runner_type="pooling")}, "answers with vectors or scores"),
        (
            {"parallel_config": SimpleNamespace(distributed_executor_backend="external_launcher", world_size=2)},
            "each rank has a scheduler of its own",
        ),
    ],
)
def test_a_scheduler_that_cannot_end_requests_listens_to_nobody(
    its: Aborts, config: dict[str, Any], reason: str
) -> None:
    its._begin(SchedulerStandIn())
    first = its._receiver
    scheduler: Any = SchedulerStandIn()
    scheduler.vllm_config = SimpleNamespace(**config)
    its._begin(scheduler)
    assert its._receiver is None
    assert first is not None
    until(lambda: not first.alive)
    assert reason in str(its.why_not())
    assert state_of(its)[0] is State.INCOMPATIBLE
    assert reason in state_of(its)[1]
    with pytest.raises(ConnectionRefusedError):
        abort_channel.Sender(its._engine, os.getpid())


def test_one_process_needs_no_socket_and_no_thread_and_is_bounded_too(its: Aborts) -> None:
    scheduler: Any = SchedulerStandIn()
    scheduler.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend="uni"))
    its._begin(scheduler)
    assert its._receiver is None
    for number in range(MOST):
        its.deliver("shadow", [str(number)], [], "")
    with pytest.raises(OSError, match="cannot be told: Resource temporarily unavailable"):
        its.deliver("shadow", ["b"], [], "")
    assert its.counts()["abort"] == {"delivered": MOST, "undelivered": 1}
    assert state_of(its)[0] is State.FAILED
    steps(its, scheduler)
    its.deliver("shadow", ["b"], [], "")
    steps(its, scheduler)
    assert scheduler.ended == ["b"]


@pytest.mark.parametrize("times", [1, 99])
@pytest.mark.parametrize("failing", ["evict", "finished_error", "finish_requests"])
def test_what_fails_while_requests_end_is_tried_again_and_then_counted(
    failing: str, times: int, its: Aborts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler: Any = SchedulerStandIn()
    owner = scheduler if failing == "finish_requests" else abort
    stock, failures = getattr(owner, failing), iter(range(times))

    def fail(*args: Any) -> Any:
        if next(failures, None) is not None:
            raise MemoryError("no memory")
        return stock(*args)

    monkeypatch.setattr(owner, failing, fail)
    its._begin(scheduler)
    its.deliver("shadow", ["a"], [3], "wrong")
    its.deliver("shadow", ["b"], [3], "wrong")
    handed: list[Any] = []
    monkeypatch.setattr(abort, "hand_out", lambda outputs, ended: handed.extend(ended))
    steps(its, scheduler)
    assert not its._pending
    assert not its._waiting
    assert "requests are not ended" in caplog.text
    if times == 1:
        assert (scheduler.ended, len(handed)) == (["a", "b"], 2)
        assert state_of(its)[0] is State.ACTIVE
    else:
        assert (scheduler.ended, its.counts()["abort"]["undelivered"]) == ([], 2)
        assert state_of(its) == (
            State.FAILED,
            "verdicts could not be carried out, and their requests go on (event undelivered)",
        )
        caplog.clear()
        steps(its, scheduler)
        assert caplog.text == ""


def test_a_request_whose_end_cannot_be_reported_stops_the_engine_and_does_not_hang(
    its: Aborts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a release whose outputs have other fields, say: its client would wait for ever."""
    scheduler: Any = SchedulerStandIn()
    its._begin(scheduler)
    tries = []

    def fail(outputs: Any, ended: Any) -> None:
        if ended:
            tries.append(ended)
            raise TypeError("unexpected keyword argument")

    monkeypatch.setattr(abort, "hand_out", fail)
    its.deliver("shadow", ["a"], [3], "wrong")
    with pytest.raises(TypeError):
        steps(its, scheduler)
    assert (scheduler.ended, len(tries)) == (["a"], 2)


def test_one_engine_after_another_has_a_socket_of_its_own(its: Aborts) -> None:
    receivers = []
    for engine in (its._engine, its._engine, os.urandom(8).hex()):
        its.begin(engine)
        scheduler = SchedulerStandIn()
        its._begin(scheduler)
        receivers.append(its._receiver)
        sender = abort_channel.Sender(engine, os.getpid())
        sender.send(Verdict("shadow", ("=a",), (), "").encode())
        until(scheduler.ended.copy, partial(steps, its, scheduler))
        sender.close()
    first, again, other = receivers
    assert first is again is not None is not other
    assert first is not None
    assert other is not None
    until(lambda: not first.alive)
    assert other.alive
    assert state_of(its) == (State.ACTIVE, "the scheduler of this process ends requests by verdicts of ranks")


def test_a_forked_child_has_neither_thread_nor_socket_and_its_parent_goes_on(its: Aborts) -> None:
    scheduler = SchedulerStandIn()
    its._begin(scheduler)
    sender = abort_channel.Sender(its._engine, os.getpid())
    sender.send(Verdict("shadow", ("=b",), (), "").encode())
    receiver = its._receiver
    assert receiver is not None
    until(lambda: its._pending)
    child = os.fork()
    if not child:
        code = 1
        try:
            its.forked()
            sockets = [receiver._listener, *(each for each, _ in receiver._ranks.values())]
            closed = len(sockets) == 2 and all(each.fileno() == -1 for each in sockets)
            code = int(not (closed and its.states()["abort"].state is State.WAITING and not its._pending))
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    sender.send(Verdict("shadow", ("=a",), (), "").encode())
    until(lambda: scheduler.ended == ["b", "a"], lambda: steps(its, scheduler))
    sender.close()


def test_where_the_thread_ends_both_sides_say_so(its: Aborts, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(message: bytes) -> Verdict:
        raise MemoryError

    its._begin(SchedulerStandIn())
    receiver = its._receiver
    assert receiver is not None
    mine = Aborts()
    mine.begin(its._engine)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=os.getpid()))
    assert mine.why_not() is None
    monkeypatch.setattr(Verdict, "decode", decode)
    mine.deliver("shadow", ["a"], [], "wrong")
    until(lambda: not receiver.alive)
    assert state_of(its)[0] is State.FAILED
    assert "the thread that hears of them has ended" in state_of(its)[1]
    assert "does not listen" in str(mine.why_not())
    assert state_of(mine)[0] is State.FAILED
    # What was sent and not read is known not to have been.
    assert mine.counts()["abort"] == {"delivered": 0, "undelivered": 1}


def rank_here(aborts: Aborts, monkeypatch: pytest.MonkeyPatch) -> tuple[Aborts, list[abort_channel.Sender]]:
    """A rank that serves in this process, as if *aborts*' process had started it, and the connections that it makes."""
    made: list[abort_channel.Sender] = []

    class Noted(abort_channel.Sender):
        def __init__(self, engine: str, pid: int) -> None:
            super().__init__(engine, pid)
            made.append(self)

    monkeypatch.setattr(abort_channel, "Sender", Noted)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=os.getpid()))
    mine = Aborts()
    mine.begin(aborts._engine)
    mine.on_captured()
    return mine, made


def test_a_rank_that_is_not_admitted_says_so_before_its_first_verdict_and_once_it_is(
    its: Aborts, monkeypatch: pytest.MonkeyPatch
) -> None:
    its._begin(SchedulerStandIn())
    mine, made = rank_here(its, monkeypatch)
    monkeypatch.setattr(abort_channel, "_is_ours", lambda pid: False)
    mine.poll()
    assert state_of(mine)[0] is State.WAITING  # connected, and not answered yet
    until(lambda: state_of(mine)[0] is State.INCOMPATIBLE, mine.poll)
    assert "has closed the connection" in state_of(mine)[1]
    for _ in range(100):
        mine.poll()
    assert (len(made), state_of(mine)[0]) == (1, State.INCOMPATIBLE)
    monkeypatch.setattr(mine, "_reconnect_at", 1.0)  # the time has come
    until(lambda: len(made) == 2, mine.poll)
    assert state_of(mine)[0] is State.INCOMPATIBLE  # until it knows better
    monkeypatch.setattr(abort_channel, "_is_ours", lambda pid: True)
    monkeypatch.setattr(abort_channel, "UNANSWERED", 0.0)
    until(lambda: state_of(mine)[0] is State.ACTIVE, mine.poll)
    assert mine.counts()["abort"] == {"delivered": 0, "undelivered": 0}
    mine.begin("")


def test_verdicts_of_a_rank_that_is_not_admitted_are_counted_without_a_wait(
    its: Aborts, monkeypatch: pytest.MonkeyPatch
) -> None:
    its._begin(SchedulerStandIn())
    mine, made = rank_here(its, monkeypatch)
    monkeypatch.setattr(abort_channel, "_is_ours", lambda pid: False)
    monkeypatch.setattr(abort_channel, "UNANSWERED", abort_ranks.PATIENCE)
    until(lambda: mine.why_not() is not None)
    begun = time.monotonic()
    for _ in range(10_000):
        with pytest.raises(OSError, match="cannot be told: the process that started it has closed the connection"):
            mine.deliver("shadow", ["a"], [], "wrong")
    assert time.monotonic() - begun < 20.0 < 10_000 * abort_channel._PATIENCE
    assert (len(made), mine.counts()["abort"]) == (1, {"delivered": 0, "undelivered": 10_000})
    assert state_of(mine)[0] is State.FAILED
    mine.begin("")


def test_a_process_that_listens_and_never_answers_is_reported_not_to_read(
    its: Aborts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was stopped before its thread has come to this rank: the kernel connects in its place."""
    mine, _ = rank_here(its, monkeypatch)
    monkeypatch.setattr(abort_channel, "UNANSWERED", 0.0)
    listener = abort_channel._socket()
    with listener:
        listener.bind(abort_channel._address(its._engine, os.getpid()))
        listener.listen()
        mine.poll()
        assert state_of(mine) == (State.FAILED, "the scheduler's process does not read verdicts")
        mine.begin("")


def test_an_address_in_use_is_a_state_and_the_rank_s_own_scheduler_still_reads(its: Aborts) -> None:
    scheduler = SchedulerStandIn()
    taken = abort_channel._socket()
    with taken:
        taken.bind(abort_channel._address(its._engine, os.getpid()))
        its._begin(scheduler)
    assert state_of(its) == (State.FAILED, "verdicts of ranks in other processes are not heard: Address already in use")
    its.deliver("shadow", ["a"], [], "wrong")
    steps(its, scheduler)
    assert scheduler.ended == ["a"]


def test_no_message_is_longer_than_what_is_read() -> None:
    wide = "\U0001f600" * 900
    verdict = Verdict("kv-marks", tuple(f"={wide[:256]}" for _ in range(50)), tuple(range(1, 10_000)), wide)
    parts = [*verdict.parts()]
    assert max(len(part.encode()) for part in parts) <= abort_channel.MOST_BYTES
    assert [name for part in parts for name in part.requests] == [*verdict.requests]
    assert [block for part in parts for block in part.blocks] == [*verdict.blocks]
    assert [Verdict.decode(part.encode()) for part in parts] == parts
    with pytest.raises(JsonError):
        Verdict.decode(verdict.encode()[: abort_channel.MOST_BYTES])


def test_what_is_longer_than_a_message_or_no_verdict_closes_its_connection_and_is_warned_of_once(
    its: Aborts, caplog: pytest.LogCaptureFixture
) -> None:
    its._begin(SchedulerStandIn())
    content = Verdict("shadow", ("=a",), (), "").encode()
    for message in (content.ljust(abort_channel.MOST_BYTES + 1), b"{}", b"[]"):
        sender = abort_channel.Sender(its._engine, os.getpid())
        sender.send(message)
        until(partial(getattr, sender, "closed"), sender.catch_up)
        sender.close()
    assert not its._pending
    assert sum("is not understood" in each.getMessage() for each in caplog.records) == 1


def test_no_message_is_read_beyond_the_limit_whatever_number_of_ranks_send_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(abort_channel, "MOST_PENDING", 2)
    read: list[bytes] = []
    held = False
    receiver = abort_channel.Receiver(os.urandom(8).hex(), read.append, lambda: 99 if held else len(read))
    senders = [abort_channel.Sender(receiver.engine, os.getpid()) for _ in range(9)]
    until(lambda: all(sender.admitted for sender in senders), lambda: [sender.catch_up() for sender in senders])
    held = True
    for number, sender in enumerate(senders):
        sender._socket.send(b"%d" % number)
    held = False
    until(lambda: len(read) >= 2)
    time.sleep(3 * abort_channel._BEHIND)
    assert len(read) == 2
    taken: set[bytes] = set()
    until(lambda: len(taken) == len(senders), lambda: taken.update(read.pop() for _ in [*read]))
    receiver.close()
    for sender in senders:
        sender.close()


# -- what is told of it ----------------------------------------------------------------------------------------------


def test_an_engine_whose_verdicts_are_lost_is_not_in_order(tmp_path: Path) -> None:
    """B11: it was in order, with exit code 0, and the reason in a state that nobody looked at."""
    for state, wrong in (
        (State.ACTIVE, []),
        (State.WAITING, []),
        (State.INCOMPATIBLE, ["abort is incompatible on rank 0: why"]),
    ):
        write(tmp_path, record(rank=0, fixes={"abort": FixReport("auto", state.value, "why")}))
        (engine,) = look(tmp_path).engines
        assert [each for each in engine.wrong if "abort" in each] == wrong


def test_fleet_counts_requests_that_a_scheduler_ended_which_is_no_rank(tmp_path: Path) -> None:
    counts = {"mismatches": 0, "aborted": 0}
    fixes = {"shadow": FixReport("auto", "active", "")}
    for number, pid in enumerate((101, 102)):
        write(tmp_path, record(elsewhere(pid), rank=number, world_size=2, fixes=fixes, events={"shadow": counts}))
    write(tmp_path, record(elsewhere(200), role="engine-core", events={"shadow": {"mismatches": 9, "aborted": 5}}))
    (engine,) = look(tmp_path).engines
    assert engine.counts("shadow") == {"mismatches": 0, "aborted": 5}


def process_with(monkeypatch: pytest.MonkeyPatch, aborts: Aborts | None) -> EngineContext:
    fixes = FixManager((), Policy(Master.ON, {}, None))
    context = EngineContext((), {}, fixes)
    context.make_components(lambda: None, lambda: None, lambda why: None)
    context.component("abort").aborts = aborts
    monkeypatch.setattr(context.component("shadow"), "counts", shadow.counts)
    monkeypatch.setattr(shadow, "SHADOW", Shadow(parse("1/9"), Action.ABORT, lambda why: None))
    return context


def test_requests_count_where_they_end(its: Aborts, monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_with(monkeypatch, None).events()["shadow"]["aborted"] == 0
    context = process_with(monkeypatch, its)
    scheduler = SchedulerStandIn()
    its._begin(scheduler)
    its.of("shadow").deliver(["a", "gone"], [], "wrong")
    assert context.events()["shadow"]["aborted"] == 0
    assert context.states()["abort"].state is State.ACTIVE
    steps(its, scheduler)
    events = context.events()
    assert events["shadow"] == {**shadow.counts()["shadow"], "aborted": 1}
    assert events["abort"] == {"delivered": 1, "undelivered": 0}
    assert "kv-marks" not in events
    its.begin("")
    assert "abort" not in {**context.states(), **context.events()}


def test_who_has_ended_somebody_keeps_its_record_up_to_date(its: Aborts) -> None:
    called: list[str] = []
    its._on_ended = lambda: called.append("kept")
    scheduler = SchedulerStandIn()
    its._begin(scheduler)
    its.deliver("shadow", ["gone"], [3], "wrong")
    steps(its, scheduler)
    assert not called
    its.deliver("shadow", ["a"], [3], "wrong")
    steps(its, scheduler)
    assert called == ["kept"]


@pytest.mark.parametrize("release", slow_but_for(SAMPLE, ALL_RELEASES))
def test_a_scheduler_is_made_after_the_ranks_it_hears(release: str) -> None:
    """So no rank is forked from a process with the thread, and none could be handed what the scheduler makes."""
    core = (open_source(release_root(release)).read("vllm/v1/engine/core.py") or b"").decode()
    ranks, scheduler = (
        "self.model_executor = executor_class(vllm_config)",
        "self.scheduler: SchedulerInterface = Scheduler(",
    )
    assert 0 < core.index(ranks) < core.index(scheduler)


def test_what_a_rank_has_sent_before_it_died_ends_its_requests(its: Aborts, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = SchedulerStandIn()
    scheduler.requests = AnyRequest()
    here, there = SPAWN.Pipe()
    monkeypatch.setattr(abort_channel, "MOST_PENDING", 5)  # most of it is unread when the rank dies, and answers are
    its._begin(scheduler)
    with process(SPAWN, abort_ranks.die, its._engine, os.getpid(), 50, there) as dying:
        assert here.recv() == "has sent"
        here.send("now")
        dying.join(abort_ranks.PATIENCE)
        assert dying.exitcode == -signal.SIGKILL
    until(lambda: len(scheduler.ended) == 50, lambda: steps(its, scheduler))


@pytest.mark.parametrize("decided_again", [False, True])
def test_a_later_engine_of_the_process_does_not_begin_with_lost_verdicts(its: Aborts, decided_again: bool) -> None:
    first: Any = SchedulerStandIn()
    first.finish_requests = lambda *args: 1 / 0
    its._begin(first)
    its.deliver("shadow", ["a"], [3], "wrong")
    steps(its, first)
    assert state_of(its)[0] is State.FAILED
    if decided_again:
        its.begin(os.urandom(8).hex())
        assert state_of(its)[0] is not State.FAILED
    second: Any = SchedulerStandIn()
    its._begin(second)
    assert state_of(its)[0] is State.ACTIVE
    assert its.counts()["abort"]["undelivered"] == 1  # of this process, whose counts only rise
    second.finish_requests = first.finish_requests
    its.deliver("shadow", ["a"], [3], "wrong")
    steps(its, second)
    assert (state_of(its)[0], its.counts()["abort"]["undelivered"]) == (State.FAILED, 2)


def test_a_later_engine_begins_without_verdicts_for_which_there_was_no_room(its: Aborts) -> None:
    its._begin(SchedulerStandIn())
    for _ in range(MOST):
        its.deliver("shadow", ["a"], [3], "wrong")
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        its.deliver("shadow", ["a"], [3], "wrong")
    assert state_of(its)[0] is State.FAILED
    its._begin(SchedulerStandIn())
    assert state_of(its)[0] is State.ACTIVE


def test_a_rank_beyond_the_most_that_are_heard_is_not_called_a_stranger(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(abort_channel, "_MOST_RANKS", 1)
    engine = os.urandom(8).hex()
    receiver = abort_channel.Receiver(engine, lambda message: None, lambda: 0)
    first = abort_channel.Sender(engine, os.getpid())
    second = abort_channel.Sender(engine, os.getpid())
    try:
        assert eventually(lambda: "not heard" in caplog.text)
        assert "comes after 1 ranks and is not heard" in caplog.text
        assert "no rank of this engine" not in caplog.text
    finally:
        for each in (first, second, receiver):
            each.close()
