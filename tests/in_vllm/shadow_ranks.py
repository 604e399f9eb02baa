"""The shadow check of two tensor-parallel ranks with a fault in one of them.

What is served is right, or both processes end, and nothing hangs.

Real are the processes, vLLM's own groups over gloo with its `all_reduce`, its `CUDAGraphWrapper`, and the watchdog,
whose limits are shorter. Stand-ins: the model, as in `wrapped_model`; graphs, which are the CPU double's; and for what
a GPU has queued, a thread.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import queue
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import wrapped_model
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.forward_context import BatchDescriptor, get_forward_context
from wrapped_model import CAPTURED, EVERY_STEP, ModelStandIn, Served

from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import memory, process, ranks, runner_v1, watchdog
from vllm_graphfix.shadow.check import Shadow
from vllm_graphfix.shadow.failures import Attempt
from vllm_graphfix.shadow.runs import Step
from vllm_graphfix.shadow.verdict import Graph
from vllm_graphfix.verify.double.model_runners import wrappers_on_the_double

LIMIT, DRAIN, SLOW = 3.0, 1.0, 1.0
STEPS = 6
FAULTY = 1
"""The rank that has the fault."""
AT = 3
"""The run without a graph that it is in."""
Say = Callable[..., None]


class Ended(NamedTuple):
    """One rank."""

    code: int
    """The exit code; negative for a signal."""
    messages: list[Any]
    log: str
    seconds: float


def two_ranks(
    scenario: Callable[[int, Say], None], patience: float = 40.0, *, may_hang: bool = False, run: Any = None
) -> list[Ended]:
    """Each rank in a process of its own. One that is stopped is killed once the other one has ended.

    *run* does what `tensor_parallel` does, the default.
    """
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        context = multiprocessing.get_context("fork")
        started = [
            context.Process(
                target=_rank, args=(rank, port, Path(folder), scenario, run or tensor_parallel), daemon=True
            )
            for rank in range(2)
        ]
        begun, took = time.monotonic(), [0.0, 0.0]
        for each in started:
            each.start()
        stopped = False
        while not all(took) and time.monotonic() - begun < patience:
            for rank, each in enumerate(started):
                if not took[rank] and not each.is_alive():
                    took[rank] = time.monotonic() - begun
            stopped = stopped or (Path(folder) / "stopped").exists()
            if stopped and not started[1 - FAULTY].is_alive():
                started[FAULTY].kill()
            time.sleep(0.02)
        hung = [rank for rank, each in enumerate(started) if each.is_alive()]
        for each in started:
            each.kill()
            each.join()
        logs = [(Path(folder) / f"log-{rank}").read_text() for rank in range(2)]
        assert may_hang or not hung, f"ranks {hung} hang: {logs}"
        messages = [
            [json.loads(line) for line in (Path(folder) / f"said-{rank}").read_text().splitlines()] for rank in range(2)
        ]
        return [Ended(started[rank].exitcode or 0, messages[rank], logs[rank], took[rank]) for rank in range(2)]


def tensor_parallel(rank: int, run: Callable[[], None]) -> None:
    """Calls *run* with a tensor-parallel group of both."""
    with mock.patch.object(parallel_state, "_TP", group_of(rank, [[0, 1]], "tp")):
        run()


def group_of(rank: int, ranks: list[list[int]], name: str) -> Any:
    group = parallel_state.init_model_parallel_group(ranks, rank, "gloo", group_name=name)
    group.use_custom_op_call = True  # as on a GPU: an operation that a graph records
    return group


def _rank(rank: int, port: int, folder: Path, scenario: Callable[[int, Say], None], run: Any) -> None:
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(log, standard)
    # pytest may have taken the stream that vLLM's handler writes to.
    logger = logging.getLogger("vllm.graphfix")
    logger.addHandler(logging.FileHandler(folder / f"log-{rank}"))
    logger.setLevel(logging.WARNING)
    os.environ["FAULT_FOLDER"] = str(folder)
    torch.set_num_threads(1)
    watchdog.LIMIT, watchdog.DRAIN = LIMIT, DRAIN
    with (folder / f"said-{rank}").open("w", buffering=1) as messages:

        def say(*what: Any) -> None:
            messages.write(json.dumps(what) + "\n")

        parallel_state.init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        with wrappers_on_the_double():
            run(rank, lambda: scenario(rank, say))
    torch.distributed.barrier()
    os._exit(0)


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("planted")


def raise_in_a_layer() -> None:
    raise ValueError("planted")


def be_slow() -> None:
    time.sleep(SLOW)


def be_stopped() -> None:
    (Path(os.environ["FAULT_FOLDER"]) / "stopped").touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class SummedStandIn(ModelStandIn):
    """A model of two ranks: each of its layers ends in a sum over both."""

    rank = 0
    fault: Callable[[], None] | None = None
    place = 0
    """The layer before which the fault is, or 2 behind the last sum."""
    everywhere = False

    def combined(self, hidden: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = parallel_state.get_tp_group().all_reduce(hidden * 0.25)
        return summed

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        eager = get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.NONE
        self.eager_runs += eager
        hidden = hidden * (self.rank + 1)
        for place, layer in enumerate([*self.layers.values(), None]):
            if self.fault and place == self.place and eager and (self.eager_runs == AT or self.everywhere):
                self.fault()
            if layer is not None:
                hidden = self.combined(layer(hidden))
        return hidden


@contextlib.contextmanager
def served(rank: int, action: Action, *, quarantined: bool) -> Iterator[tuple[Served, list[torch.Tensor]]]:
    """A model whose steps are checked or in quarantine, and what the same steps come to where nobody looks."""
    SummedStandIn.rank = rank
    with mock.patch.object(wrapped_model, "ModelStandIn", SummedStandIn):
        unwatched = Served(Rate())
        right = [unwatched.step() for _ in range(STEPS)]
        watched = Served(EVERY_STEP, action)
    if quarantined:
        watched.shadow.quarantined.add((id(watched.run), BatchDescriptor(CAPTURED)))
    yield watched, right


def with_fault(fault: Callable[[], None] | None, place: int, *, quarantined: bool, everywhere: bool = False) -> Any:
    """A scenario in which a rank, or each, has *fault*.

    It says of each step whether what was served is right, and how the check stands.
    """

    def scenario(rank: int, say: Say) -> None:
        action = Action.QUARANTINE if quarantined else Action.REPORT
        with served(rank, action, quarantined=quarantined) as (watched, right):
            if rank == FAULTY or everywhere:
                vars(watched.model).update(fault=fault, place=place, everywhere=everywhere)
            for expected in right:
                say(bool(torch.equal(watched.step(), expected)))
            shadow = watched.shadow
            say(shadow.results.checks, shadow.results.mismatches, shadow.stopped, watched.model.eager_runs)

    return scenario


def check_never_wrong(ended: list[Ended]) -> None:
    for each in ended:
        assert [False] not in each.messages, each
        assert each.messages[:1] == [[True]], each


def check_clean_stop(ended: list[Ended], *reasons: str) -> None:
    """All processes that still lived served nothing wrong, and the log gives one of *reasons* why it is over."""
    check_never_wrong(ended)
    remaining = [each for each in ended if each.code != -signal.SIGKILL]
    assert [each.code for each in remaining] == [watchdog.EXIT_CODE] * len(remaining), ended
    for each in remaining:
        assert "the shadow check ends this process, and with it the engine" in each.log, ended
        assert each.seconds < 2 * LIMIT + DRAIN + 15, ended  # with the start of a loaded machine
    assert any(reason in each.log for reason in reasons for each in remaining), ended


MODES = pytest.mark.parametrize("quarantined", [False, True], ids=["check", "quarantine"])


@MODES
@pytest.mark.parametrize("fault", [run_out_of_memory, raise_in_a_layer], ids=lambda fault: fault.__name__)
def test_a_rank_that_fails_in_the_middle_of_a_run_ends_all_ranks(fault: Callable[[], None], quarantined: bool) -> None:
    ended = two_ranks(with_fault(fault, 1, quarantined=quarantined))
    # The one waits in an agreement and the other in its run, both as long: which one ends first is chance.
    check_clean_stop(ended, "it waits for another rank of its group", "another rank of the group may have failed")
    assert [each.code for each in ended] == [watchdog.EXIT_CODE] * 2


@MODES
@pytest.mark.parametrize("fault", [run_out_of_memory, raise_in_a_layer], ids=lambda fault: fault.__name__)
def test_a_rank_that_fails_after_the_last_collective_ends_no_rank(fault: Callable[[], None], quarantined: bool) -> None:
    ended = two_ranks(with_fault(fault, 2, quarantined=quarantined))
    check_never_wrong(ended)
    assert [each.code for each in ended] == [0, 0], ended
    runs = [each.messages[-1][3] for each in ended]
    if quarantined:  # that step was replayed by both, and those after it are run again
        assert [each.messages[-1][2] for each in ended] == [None, None]
        assert runs == [STEPS, STEPS]
    else:
        assert all(each.messages[-1][2] for each in ended)
        assert runs[0] == runs[1] <= AT + 1


@MODES
def test_a_slow_rank_is_waited_for_and_the_check_goes_on(quarantined: bool) -> None:
    ended = two_ranks(with_fault(be_slow, 1, quarantined=quarantined))
    check_never_wrong(ended)
    for each in ended:
        assert each.code == 0, ended
        assert each.messages[-1][:3] == ([0, 0, None] if quarantined else [STEPS, 0, None])


@MODES
@pytest.mark.parametrize("fault", [be_stopped, be_killed], ids=lambda fault: fault.__name__)
def test_a_rank_that_is_stopped_or_gone_ends_the_other_one(fault: Callable[[], None], quarantined: bool) -> None:
    in_log = {
        be_stopped: "another rank of the group may have failed, and 3 s were not enough",
        be_killed: "the ranks of its group cannot agree any more",
    }
    check_clean_stop(two_ranks(with_fault(fault, 1, quarantined=quarantined)), in_log[fault])


def where_reading_fails(failing: range, *, captured: bool = True) -> list[Ended]:
    """Ranks of which one cannot tell, at the calls of these numbers, whether it is about to replay."""

    def scenario(rank: int, say: Say) -> None:
        with served(rank, Action.REPORT, quarantined=False) as (watched, right):
            calls, stock = itertools.count(), runner_v1._replays

            def replays(*call: Any) -> bool:
                if next(calls) in failing and rank == FAULTY:
                    raise ValueError("planted")
                return captured and stock(*call)

            watched.shadow.memory.measuring = not captured
            with mock.patch.object(runner_v1, "_replays", replays):
                for expected in right:
                    say(bool(torch.equal(watched.step(), expected)))
            say(watched.shadow.results.checks, watched.shadow.stopped)

    ended = two_ranks(scenario)
    check_never_wrong(ended)
    return ended


@pytest.mark.parametrize("failing", [range(1), range(STEPS)], ids=["once", "always"])
def test_a_rank_that_cannot_read_its_first_call_turns_the_check_off_on_both(failing: range) -> None:
    ended = where_reading_fails(failing)
    assert [each.code for each in ended] == [0, 0], ended
    reasons = ["it failed on another rank of the same group", "ValueError: planted"]
    assert [each.messages[-1] for each in ended] == [[0, reason] for reason in reasons]


def test_a_rank_that_cannot_read_a_later_call_ends_and_the_other_one_with_it() -> None:
    ended = where_reading_fails(range(3, STEPS))
    check_clean_stop(ended, "the check has failed on this rank: ValueError: planted")
    assert [each.code for each in ended] == [watchdog.EXIT_CODE] * 2


def test_nobody_waits_for_a_rank_that_cannot_read_a_call_before_the_capture() -> None:
    ended = where_reading_fails(range(STEPS), captured=False)
    assert [(each.code, each.messages[-1]) for each in ended] == [(0, [0, None])] * 2


def test_a_step_that_fails_alike_on_all_ranks_is_a_mismatch_as_on_one() -> None:
    ended = two_ranks(with_fault(raise_in_a_layer, 0, quarantined=False, everywhere=True))
    check_never_wrong(ended)
    assert [each.messages[-1][:3] for each in ended] == [[STEPS, STEPS, None]] * 2


# -- what a GPU has queued


class QueueStandIn:
    """Stands in for a GPU: what is queued runs in that order, while Python goes on."""

    def __init__(self) -> None:
        self._queued: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                self._queued.get()()

    def put(self, what: Callable[[], None]) -> None:
        self._queued.put(what)

    def synchronize(self) -> None:
        reached = threading.Event()
        self._queued.put(reached.set)
        reached.wait()


def queued_steps(rank: int, say: Say, *, sums: int, fails_after: int, quarantined: bool) -> None:
    """Steps of *sums* sums each over both ranks, all queued.

    In one run without its graph a rank fails after *fails_after* of them.
    """
    device, group = QueueStandIn(), parallel_state.get_tp_group()
    shadow: Any = Shadow(EVERY_STEP, Action.QUARANTINE if quarantined else Action.REPORT, process.refuse)
    memory_of_step = torch.zeros(1, 1)
    eager_runs = 0
    if quarantined:
        shadow.quarantined.add("graph")

    def forward(step: int, last: int) -> torch.Tensor:
        value = float(10 * step + rank)

        def add(number: int) -> None:
            summed = group.all_reduce(torch.full((1, 1), value + number))
            memory_of_step.copy_(summed)

        for number in range(last):
            device.put(lambda number=number: add(number))  # type: ignore[misc]
        return memory_of_step

    def eager(step: int) -> torch.Tensor:
        nonlocal eager_runs
        eager_runs += 1
        if rank == FAULTY and eager_runs == AT:
            forward(step, fails_after)
            raise ValueError("planted")
        return forward(step, sums)

    def results() -> list[torch.Tensor]:
        device.synchronize()
        return [memory_of_step]

    with mock.patch.object(ranks, "_synchronize", device.synchronize):
        for number in range(STEPS):
            step = Step(
                *(Graph("graph", 1, ()), lambda number=number: eager(number), lambda: 1, {}, (), (), list),
                results=results,
            )
            run = shadow.run_without_graph if quarantined else shadow.check
            run("graph", lambda step=step: step, lambda number=number: forward(number, sums))
            device.synchronize()
            say(float(memory_of_step) == 20.0 * number + 1 + 2 * (sums - 1))


@MODES
@pytest.mark.parametrize("fails_after", [0, 1])
def test_unpaired_collectives_on_a_gpu_end_all_ranks(quarantined: bool, fails_after: int) -> None:
    def scenario(rank: int, say: Say) -> None:
        queued_steps(rank, say, sums=2, fails_after=fails_after, quarantined=quarantined)

    ended = two_ranks(scenario)
    check_clean_stop(ended, "The collectives of the other ranks have found no partner, and 1 s were not enough")
    assert "failed here: ValueError: planted" in ended[FAULTY].log or "cannot agree any more" in ended[FAULTY].log


@MODES
def test_without_unpaired_collectives_on_a_gpu_the_ranks_go_on(quarantined: bool) -> None:
    def scenario(rank: int, say: Say) -> None:
        queued_steps(rank, say, sums=2, fails_after=2, quarantined=quarantined)

    ended = two_ranks(scenario)
    assert [(each.code, each.messages) for each in ended] == [(0, [[True]] * STEPS)] * 2


def test_ranks_that_did_not_wait_would_serve_sums_of_two_steps() -> None:
    """The tests above would see wrong sums if ranks waited for less than that."""

    def paired(prepare: Callable[[], object], run: Callable[[], Any], *seconds: float) -> Any:
        with Attempt() as attempt:
            prepare()
        assert not ranks.all_reduce_max(attempt.error is not None)[0]
        with Attempt() as attempt:
            output = run()
        if ranks.all_reduce_max(attempt.error is not None)[0]:
            raise attempt.error or RuntimeError("elsewhere")
        return output

    def scenario(rank: int, say: Say) -> None:
        with mock.patch.object(ranks, "run_collectively", paired):
            queued_steps(rank, say, sums=2, fails_after=1, quarantined=True)

    ended = two_ranks(scenario, 2 * LIMIT, may_hang=True)
    assert any([False] in each.messages for each in ended), ended


# -- memory


def short_of_memory(free: dict[int, int], *, need: int | None, quarantined: bool) -> Any:
    """Each rank has so much *free*; a run without its graph was measured to take *need*."""

    def scenario(rank: int, say: Say) -> None:
        with (
            mock.patch.object(memory, "_reset_peak", return_value=None if need is None else 1000),
            mock.patch.object(memory, "_peak", return_value=1000 + (need or 0)),
            mock.patch.object(memory, "_free_and_unused", return_value=(free[rank], 0)),
            served(rank, Action.QUARANTINE, quarantined=quarantined) as (watched, right),
        ):
            for expected in right:
                say(bool(torch.equal(watched.step(), expected)))
            say(watched.shadow.results.skipped, watched.shadow.stopped, watched.model.eager_runs)

    return scenario


MIB = 1 << 20
MAX_FAILURES = 3
"""Steps after which a graph whose steps cannot run without it is no longer in quarantine, and its replays are
checked."""
ENOUGH, NOT_ENOUGH = memory.RESERVE + 101 * MIB, memory.RESERVE + 99 * MIB


@MODES
@pytest.mark.parametrize(
    ("free", "need"),
    [({0: ENOUGH, 1: NOT_ENOUGH}, 100 * MIB), ({0: NOT_ENOUGH, 1: ENOUGH}, 100 * MIB), ({0: ENOUGH, 1: ENOUGH}, None)],
    ids=["one lacks", "the other lacks", "not measured"],
)
def test_no_rank_runs_without_its_graph_unless_all_have_the_memory_for_it(
    quarantined: bool, free: dict[int, int], need: int | None
) -> None:
    ended = two_ranks(short_of_memory(free, need=need, quarantined=quarantined))
    check_never_wrong(ended)
    for each in ended:
        assert each.code == 0
        assert each.messages[-1] == [STEPS - MAX_FAILURES if quarantined else STEPS, None, 0]


def test_with_enough_memory_on_all_ranks_every_step_is_checked() -> None:
    ended = two_ranks(short_of_memory({0: ENOUGH, 1: ENOUGH}, need=100 * MIB, quarantined=False))
    check_never_wrong(ended)
    assert [each.messages[-1][:2] for each in ended] == [[0, None]] * 2
    assert ended[0].messages[-1][2] >= STEPS
