"""Stages of a pipeline that keep a budget check the same steps, whatever a check costs each of them.

None waits for a stage that is behind it.

The counting and checking is that of model runner V1; stand-ins are the step, which always comes to the same, and the
calls of the stages.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from vllm_graphfix.engine.capture_hooks import CaptureHooks
from vllm_graphfix.engine.process import EngineProcess
from vllm_graphfix.fix import Activity
from vllm_graphfix.patching.manager import FixManager, Policy
from vllm_graphfix.settings.environment import Master
from vllm_graphfix.settings.shadow_rate import NEVER, Action, Rate
from vllm_graphfix.shadow import coordinator, drafter_v2, process, ranks, runner_v1, runner_v2, stages, watchdog
from vllm_graphfix.shadow.check import Shadow
from vllm_graphfix.shadow.failures import StepNotCheckable, UnsafeError
from vllm_graphfix.shadow.runs import Step
from vllm_graphfix.shadow.schedule import Schedule
from vllm_graphfix.shadow.stages import PipelineCoordinator, Place
from vllm_graphfix.shadow.verdict import Graph


class ModelStandIn:
    def __call__(self) -> torch.Tensor:
        return torch.zeros(1, 1)


class StageStandIn:
    """One stage: its check, and a model whose calls are counted."""

    def __init__(self, share: float, wanted: Callable[[int], int]) -> None:
        self.shadow: Any = Shadow(Rate(share=share), Action.REPORT, process.refuse)
        self.calls = 0
        self.replays = True
        self.checked: list[int] = []
        self.fails: Exception | None = None
        self.model = runner_v1._checking_class(ModelStandIn, self.shadow)()
        self.model.stage = self.model.runnable = self
        self.model.vllm_config = None
        vars(self.shadow.schedule)["wanted"] = lambda cost: wanted(self.calls)

    def call(self) -> None:
        self.calls += 1
        self.model()

    def describe(self) -> Step:
        self.checked.append(self.calls)
        if self.fails is not None:
            raise self.fails
        return Step(Graph("a graph", 1, ()), lambda: torch.zeros(1, 1), lambda: 1, {}, (), (), list)


class StageV2StandIn(StageStandIn):
    """The same of model runner V2, with *drafts* replays of a drafter after each of the target model's."""

    now: StageV2StandIn
    """The one whose call it is."""

    def __init__(self, share: float, wanted: Callable[[int], int], drafts: int) -> None:
        super().__init__(share, wanted)
        manager: Any = SimpleNamespace(vllm_config=None, rows=1, stage=self)
        drafter = drafter_v2._Drafter(None, manager, {})
        replay = runner_v2._check_replays(lambda manager, desc: torch.zeros(1, 1), Activity())
        self.in_turn = [
            functools.partial(replay, manager, "target"),
            *drafts
            * [
                functools.partial(
                    drafter_v2._counting_replay(lambda desc: torch.zeros(1, 1), drafter, self.shadow), "draft"
                )
            ],
        ]
        self.within: list[int] = []

    def call(self) -> None:
        process.SHADOW, StageV2StandIn.now = self.shadow, self
        self.calls += 1
        for place, replay in enumerate(self.in_turn):
            before = len(self.checked)
            replay()
            self.within += [place] * (len(self.checked) - before)


class PipelineStandIn:
    """PipelineCoordinator that make the same calls one after the other, and up to *in_flight* batches at once."""

    def __init__(self, *members: StageStandIn, in_flight: int = 3) -> None:
        self.stages, self.in_flight = members, in_flight
        self.store = HashStore()
        for number, stage in enumerate(members):
            place = Place(number, len(members), "0")
            with pytest.MonkeyPatch.context() as patched:
                made = functools.partial(PipelineCoordinator, place, store=self.in_store)
                patched.setattr(stages, "of_this_rank", made)
                stage.shadow.start_in_pipeline(drafts=isinstance(stage, StageV2StandIn))

    def in_store(self) -> Any:
        return self.store

    def run(self, calls: int, seed: int = 0) -> None:
        chance = Random(seed)  # noqa: S311 - the same order in every run
        until = self.stages[-1].calls + calls
        while self.stages[-1].calls < until:
            stage = chance.choice(range(len(self.stages)))
            mine = self.stages[stage].calls
            before = self.stages[stage - 1].calls if stage else self.stages[-1].calls + self.in_flight
            if mine < min(before, until):
                self.stages[stage].call()


def _stand_in_for_vllm(patched: pytest.MonkeyPatch) -> None:
    context: Any = ModuleType("vllm.forward_context")
    context._forward_context = SimpleNamespace(batch_descriptor="a descriptor")
    patched.setitem(sys.modules, "vllm.forward_context", context)
    patched.setattr(runner_v1, "_replays", lambda wrapper, _: wrapper.stage.replays)
    patched.setattr(runner_v1, "step", lambda _, config, context, stage, *__: stage.describe())
    patched.setattr(runner_v2, "unsafe", lambda config: None)
    patched.setattr(
        runner_v2,
        "_variables_of_caller",
        lambda frame: {"dummy_run": not StageV2StandIn.now.replays, "attn_metadata": True},
    )
    patched.setattr(runner_v2, "_step", lambda manager, *_: manager.stage.describe())
    patched.setattr(
        drafter_v2, "_call_in_frames", lambda drafter, *_: drafter.manager if StageV2StandIn.now.replays else None
    )
    patched.setattr(drafter_v2, "_step", lambda call, rows: call.stage.describe())


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _stand_in_for_vllm(monkeypatch)
    monkeypatch.setattr(ranks, "all_reduce_max", lambda *values: values)
    monkeypatch.setattr(stages, "_PATIENCE", 0.2)
    yield
    process.start(Rate(), Action.REPORT)


@pytest.mark.parametrize("number", [2, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_stages_check_the_same_steps_as_seldom_as_the_dearest_one(number: int, seed: int) -> None:
    def wanted(stage: int) -> Callable[[int], int]:
        return lambda calls: 150 + 40 * ((calls + stage) % number)

    pipeline = PipelineStandIn(*(StageStandIn(0.05, wanted(stage)) for stage in range(number)), in_flight=number + 1)
    pipeline.run(3000, seed)
    first = pipeline.stages[0].checked
    assert len(first) > 5
    for stage in pipeline.stages:
        assert stage.checked == list(stage.shadow.results.steps) == first
        assert stage.shadow.stopped is None
    for step, later in itertools.pairwise(first):
        assert later == step + max(wanted(stage)(step) for stage in range(number))
    assert pipeline.store.num_keys() <= 2 * number  # what was read is gone


def pair(*wanted: int) -> PipelineStandIn:
    """Two stages, or more, each with a cost that stays."""

    def always(steps: int) -> Callable[[int], int]:
        return lambda calls: steps

    return PipelineStandIn(*(StageStandIn(0.05, always(each)) for each in wanted or (150, 200)))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("error", [ValueError("planted"), UnsafeError("planted")])
def test_a_stage_whose_check_fails_or_is_refused_lets_the_others_go_on(which: int, error: Exception) -> None:
    pipeline = pair(300, 200, 210)
    pipeline.run(500)
    ended = pipeline.stages[which]
    others = [stage for stage in pipeline.stages if stage is not ended]
    ended.fails = error
    pipeline.run(1500)
    assert ended.shadow.schedule.due == NEVER
    assert len(ended.checked) == 3
    assert others[0].checked == others[1].checked
    assert len(others[0].checked) > 6
    assert [stage.shadow.stopped for stage in others] == [None, None]
    # From then on they go by their own costs alone.
    assert others[0].checked[-1] - others[0].checked[-2] == (300 if which else 210)


def test_a_stage_that_was_refused_before_the_first_step_is_not_waited_for() -> None:
    one, other = (StageStandIn(0.05, lambda _: 200) for _ in range(2))
    one.shadow.stop(RuntimeError("planted"))
    pipeline = PipelineStandIn(one, other)
    pipeline.run(500)
    assert (one.checked, other.checked) == ([], [100, 300, 500])


@pytest.mark.parametrize("before", [True, False])
def test_a_stage_whose_engine_is_refused_says_so(monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    store, begun = HashStore(), Shadow(Rate(share=0.05), Action.REPORT, process.refuse)
    monkeypatch.setattr(process, "SHADOW", begun)
    monkeypatch.setattr(process, "REFUSED", None)
    monkeypatch.setattr(
        stages, "of_this_rank", functools.partial(PipelineCoordinator, Place(1, 2, "0"), store=lambda: store)
    )
    worker = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=2)))
    if before:
        process.refuse("planted")
    process.on_captured(worker)
    process.refuse("planted")  # the first time that it is said counts
    assert begun.schedule.due == NEVER
    assert PrefixStore("shadow/0", store).check(["over/1"])


def test_a_step_that_one_stage_cannot_check_is_followed_by_one_that_all_check() -> None:
    pipeline = pair()
    first, last = pipeline.stages
    last.shadow.schedule.wanted_later = lambda cost: 400
    last.fails = StepNotCheckable("planted")
    pipeline.run(120)
    last.fails = None
    pipeline.run(700)
    assert first.checked == last.checked == [100, 500, 700]
    assert (first.shadow.results.checks, last.shadow.results.skipped) == (3, 1)


@pytest.mark.parametrize("runner", ["V1", "V1 with a graph in quarantine", "V2"])
def test_steps_that_replay_nothing_are_waited_out_by_all_alike(runner: str) -> None:
    pipeline = pair()
    if runner == "V2":
        pipeline = PipelineStandIn(*(StageV2StandIn(0.05, lambda calls: 150, drafts) for drafts in (0, 3)))
    for stage in pipeline.stages:
        stage.replays = False
        if "quarantine" in runner:
            stage.shadow.quarantined.add("another graph")
    pipeline.run(400)
    for stage in pipeline.stages:
        stage.replays = True
    pipeline.run(600)
    first, last = pipeline.stages
    assert first.checked == last.checked
    assert 400 < first.checked[0] <= 402
    assert len(first.checked) > 2
    assert (first.shadow.stopped, last.shadow.stopped) == (None, None)


@pytest.mark.parametrize(("share", "window"), [(1.0, 20), (0.05, 20), (0.01, 100), (0.001, 1000), (0.00001, 1024)])
def test_a_replay_is_sought_for_as_many_steps_as_the_budget_of_one(share: float, window: int) -> None:
    assert PipelineCoordinator(Place(0, 2, "0"), share, due=500).plan_at == 500 + window


def test_a_stage_that_checks_no_more_plans_no_more_though_a_graph_is_in_quarantine() -> None:
    pipeline = pair()
    _, last = pipeline.stages
    last.shadow.quarantined.add("another graph")
    pipeline.run(110)
    last.shadow.end()
    pipeline.run(500)
    assert (last.shadow.schedule.due, last.checked) == (NEVER, [100])


def test_where_one_stage_replays_nothing_the_other_is_checked_all_the_same() -> None:
    pipeline = pair()
    first, last = pipeline.stages
    first.replays = False
    pipeline.run(1000)
    assert (first.checked, first.shadow.stopped) == ([], None)
    assert last.checked == [100, 300, 500, 700, 900]


def test_a_stage_that_never_tells_what_it_wants_ends_the_check_of_all() -> None:
    pipeline = pair(150, 150, 150)
    silent = pipeline.stages[1].shadow._pipeline
    silent._place = silent._place._replace(speaks=False)
    pipeline.run(400)
    assert [stage.checked for stage in (pipeline.stages[0], pipeline.stages[2])] == [[100]] * 2
    for stage in (pipeline.stages[0], pipeline.stages[2]):
        assert "nothing is known of the check of step 100 on stage 1 of the pipeline" in (stage.shadow.stopped or "")


def test_a_stage_waits_for_the_first_one_so_long_and_no_longer() -> None:
    pipeline = pair()
    first, last = pipeline.stages
    pipeline.run(100)
    first.shadow.schedule.due = NEVER  # it ends, and cannot say so
    pipeline.run(200)
    assert "no earlier stage of the pipeline has planned" in (last.shadow.stopped or "")
    assert last.checked == [100]


@pytest.mark.parametrize("which", [0, 1])
def test_a_store_that_fails_ends_the_check_and_serving_goes_on(which: int) -> None:
    pipeline = pair()
    pipeline.run(100)
    stage = pipeline.stages[which]

    def fail() -> Any:
        raise ConnectionError("the store is gone")

    stage.shadow._pipeline._store = fail
    pipeline.run(400)
    assert max(len(each.checked) for each in pipeline.stages) <= 2  # what was left before holds
    assert stage.shadow.stopped == "ConnectionError: the store is gone"
    assert all(each.shadow.stopped for each in pipeline.stages)


def test_a_stage_that_could_not_tell_what_it_wants_says_that_it_is_over() -> None:
    pipeline = pair()
    first, last = pipeline.stages
    pipeline.run(90)
    with mock.patch.object(last.shadow._pipeline, "_store", side_effect=ConnectionError("for a moment")):
        pipeline.run(20)
    pipeline.run(500)
    assert (last.shadow.stopped, last.checked) == ("ConnectionError: for a moment", [100])
    assert first.shadow.stopped is None
    assert len(first.checked) > 3


@pytest.mark.parametrize("which", [0, 1])
def test_nobody_waits_for_a_word_that_goes_between_two_looks_at_the_store(which: int) -> None:
    """`Store.get` of a key that is not there waits as long as vLLM gives a collective: half an hour."""

    class ForgetfulStoreStandIn:
        def __init__(self, store: Any) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def check(self, keys: list[str]) -> bool:
            actual = self._store.check(keys)
            for key in keys:
                if not key.startswith("over"):
                    self._store.delete_key(key)
            return bool(actual)

        def get(self, key: str) -> bytes:
            assert self._store.check([key]), f"waits for {key}"
            return bytes(self._store.get(key))

    pipeline = pair()
    others = pipeline.stages[which].shadow._pipeline
    store = ForgetfulStoreStandIn(others._open())
    with mock.patch.object(others, "_open", return_value=store):
        pipeline.run(500)
    assert [stage.shadow.stopped for stage in pipeline.stages] == [None, None]
    assert [stage.checked for stage in pipeline.stages] == [[100, 300, 500]] * 2


def test_stages_wait_in_vain_for_the_first_one_all_at_once() -> None:
    pipeline = pair(150, 150, 150, 150)
    pipeline.run(100)
    pipeline.stages[0].shadow.schedule.due = NEVER  # it ends, and cannot say so
    pipeline.run(200)
    reasons = [str(stage.shadow.stopped) for stage in pipeline.stages[1:]]
    assert ["TimeoutError" in reason for reason in reasons] == [True, False, False]
    assert ["on stage 1 of the pipeline" in reason for reason in reasons] == [False, True, True]


def test_an_engine_finds_nothing_of_one_before_it_in_the_same_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process may make one engine after the other, in process groups that somebody else has made."""
    store = HashStore()
    monkeypatch.setattr(ranks, "place_in_pipeline", lambda: (1, 2, "0", True))
    first, second = (stages.of_this_rank(0.05, 100) for _ in range(2))
    for each in (first, second):
        monkeypatch.setattr(each, "_store", lambda: store)
    first.end()
    assert first._open().check(["over/1"])
    assert not second._open().check(["over/1"])


@pytest.mark.parametrize("over", [True, False])
def test_an_engine_that_serves_for_years_is_not_checked_at_every_step(over: bool) -> None:
    pipeline = PipelineStandIn(*(StageV2StandIn(0.05, lambda calls: 150, drafts) for drafts in (0, 3)))
    for stage in pipeline.stages:
        schedule, steps = stage.shadow.schedule, 10**11  # of 1 ms, three years of them
        schedule.count = steps * (schedule.within + 1)
        if over:
            stage.shadow.stop(RuntimeError("planted"))
        else:
            schedule.move(steps + 10)
            stage.shadow._pipeline.move(steps + 10)
    pipeline.run(60)
    first, last = pipeline.stages
    assert first.checked == last.checked == ([] if over else [10])


@pytest.mark.parametrize(
    "plan", ["check 100", "check -1", "plan 1", "check 1e9", "over", "over 1\n", "", "check " + "9" * 19]
)
def test_a_forged_plan_in_the_store_ends_the_check_and_nothing_else(plan: str) -> None:
    pipeline = pair()
    pipeline.run(100)
    first, last = pipeline.stages
    first.shadow.schedule.due = NEVER
    PrefixStore("shadow/0", pipeline.store).set("plan/120", plan)
    pipeline.run(100)
    assert "at step 120 cannot be read" in (last.shadow.stopped or "")
    assert last.checked == [100]


def _keep_a_store(port: Any) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.put(store.port)
    time.sleep(120)


@pytest.mark.parametrize("which", [0, 1])
def test_a_stopped_store_ends_the_check_of_a_stage_without_a_wait(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    """A real store, in a process of its own; its clients wait without a limit."""
    monkeypatch.setattr(coordinator, "_STORE_TIMEOUT", 0.5)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    ports = context.Queue()
    keeper = context.Process(target=_keep_a_store, args=(ports,), daemon=True)
    keeper.start()
    try:
        store = TCPStore("127.0.0.1", ports.get(timeout=60), is_master=False, timeout=timedelta(seconds=60))
        pipeline = pair()
        stage = pipeline.stages[which]
        monkeypatch.setattr(stage.shadow._pipeline, "_store", lambda: store)
        pipeline.run(90)
        os.kill(keeper.pid or 0, signal.SIGSTOP)
        begun = time.monotonic()
        pipeline.run(200)
        assert time.monotonic() - begun < 10
        assert stage.calls >= 290
        assert "TimeoutError: no answer for" in (stage.shadow.stopped or "")
    finally:
        keeper.kill()


# -- what is counted


def test_a_last_stage_checks_the_common_steps_and_its_drafts_in_turns() -> None:
    first, last = (StageV2StandIn(0.05, lambda calls: 60 + calls % 3, drafts) for drafts in (0, 3))
    PipelineStandIn(first, last).run(2000)
    assert first.checked == last.checked
    assert len(first.checked) > 25
    assert set(first.within) == {0}
    assert {place: last.within.count(place) >= 6 for place in range(4)} == dict.fromkeys(range(4), True)
    assert (first.shadow.stopped, last.shadow.stopped) == (None, None)


@pytest.mark.parametrize("size", [1, 2])
def test_stages_count_from_the_end_of_their_start_on(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """During its start, V1's last stage makes one call more than the others.

    An engine that is no pipeline counts on, and asks nobody.
    """
    begun = Shadow(Rate(share=0.05), Action.REPORT, process.refuse)
    monkeypatch.setattr(process, "SHADOW", begun)
    monkeypatch.setattr(stages, "of_this_rank", lambda share, due: PipelineCoordinator(Place(0, size, "0"), share, due))

    class WorkerStandIn:
        vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(pipeline_parallel_size=size),
            model_config=SimpleNamespace(enforce_eager=False),
            compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL")),
        )
        use_v2_model_runner = True

        def compile_or_warm_up_model(self) -> str:
            begun.schedule.count += 17
            return "warm"

    member = EngineProcess((), {})
    member.component("shadow").manager = FixManager((), Policy(Master.ON, {}))
    worker: Any = SimpleNamespace(Worker=WorkerStandIn)
    CaptureHooks(member.gate).watch_capture("Worker", "compile_or_warm_up_model", worker)
    assert worker.Worker().compile_or_warm_up_model() == "warm"
    assert (begun.schedule.count, begun.schedule.step, begun._pipeline is None) == (
        (17, 17, True) if size == 1 else (0, 0, False)
    )
    assert (begun.schedule.within > 0) == (size > 1)


def steps_checked(rate: Rate, drafts: int, steps: int) -> list[tuple[int, int]]:
    """The steps of a stage on model runner V2 that are checked; and which replay of them, 0 for the target model's."""
    schedule = Schedule(rate)
    schedule.count = 12 + drafts  # of its start, which is another number on each stage
    schedule.restart(drafts=True)
    actual = []
    for step in range(1, steps + 1):
        before = schedule.count
        for replay in range(drafts + 1):
            if replay:
                schedule.count += 1
            else:
                schedule.count = (before | schedule.within) + 1
            if schedule.count >= schedule.due:
                if not replay:
                    schedule.drafts = before & schedule.within
                actual.append((step, replay))
                schedule.check_in(schedule.wanted(0.0))
    return actual


def test_replays_of_a_drafter_that_one_stage_alone_has_do_not_count_as_steps() -> None:
    first, last = (steps_checked(Rate(every=7), drafts, 700) for drafts in (0, 3))
    assert [step for step, _ in first] == [step for step, _ in last]
    assert len(first) == 100
    assert {replay for _, replay in first} == {0}
    assert {replay for _, replay in last} == {0, 1, 2, 3}


# -- real ranks


def _rank(rank: int, port: int, answers: Any) -> None:
    """One of four: two stages of two tensor-parallel ranks, and then two pipelines of two stages of one."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    halves = [torch.distributed.new_group(members) for members in ([0, 1], [2, 3])]
    state: Any = ModuleType("vllm.distributed.parallel_state")
    patched = pytest.MonkeyPatch()
    for name, module in (
        ("vllm", ModuleType("vllm")),
        ("vllm.distributed", ModuleType("vllm.distributed")),
        (state.__name__, state),
    ):
        patched.setitem(sys.modules, name, module)
    _stand_in_for_vllm(patched)
    patched.setattr(stages, "_PATIENCE", 2.0)
    stage = rank // 2

    def served(what: str, calls: int, tensor_parallel: int = 2, fails: int = -1) -> StageStandIn:
        state.get_tp_group = lambda: SimpleNamespace(
            world_size=tensor_parallel, rank_in_group=rank % tensor_parallel, cpu_group=halves[stage]
        )
        state.get_pp_group = lambda: SimpleNamespace(
            world_size=2, rank_in_group=stage, ranks=[f"{what} {rank % 2 if tensor_parallel == 1 else 0}"]
        )
        actual = StageStandIn(0.05, lambda call: 40 + 13 * rank + call % 5)
        actual.shadow.start_in_pipeline(drafts=False)
        if what == "silent" and stage == 1:
            actual.shadow._pipeline._place = actual.shadow._pipeline._place._replace(speaks=False)
        sent: list[Any] = []
        for call in range(1, calls + 1):
            if stage:
                torch.distributed.recv(torch.zeros(1), rank - 2)
            if rank == fails and call == calls // 2:
                actual.fails = ValueError("planted")
            actual.call()
            if not stage:
                sent.append(torch.distributed.isend(torch.zeros(1), rank + 2))
                if len(sent) > 3:
                    sent.pop(0).wait()
        for each in sent:
            each.wait()
        return actual

    actual = {
        "agreed": served("agreed", 500),
        "alone": served("alone", 500, tensor_parallel=1),
        "failed": served("failed", 800, fails=3),
    }
    begun = time.monotonic()
    actual["silent"] = served("silent", 300)
    reported = {what: (each.checked, each.shadow.stopped) for what, each in actual.items()}
    answers.put((rank, reported, time.monotonic() - begun))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_real_ranks_of_two_stages_check_the_same_steps() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    answers = context.Queue()
    started = [context.Process(target=_rank, args=(rank, port, answers), daemon=True) for rank in range(4)]
    for each in started:
        each.start()
    reported: dict[int, Any] = {}
    try:
        for _ in started:
            rank, actual, taken = answers.get(timeout=120)
            reported[rank] = actual
            assert taken < 20
    except queue.Empty:
        pytest.fail(f"only ranks {sorted(reported)} have come to an end")
    finally:
        for each in started:
            each.join(10)
            each.kill()
    checked = {what: [reported[rank][what][0] for rank in range(4)] for what in reported[0]}
    stopped = {what: [reported[rank][what][1] for rank in range(4)] for what in reported[0]}
    expected = [100]
    while (later := expected[-1] + 40 + 13 * 3 + expected[-1] % 5) <= 500:
        expected.append(later)
    assert checked["agreed"] == [expected] * 4
    # Two pipelines in one store: each goes by the dearest of its own ranks.
    assert checked["alone"][0] == checked["alone"][2] != checked["alone"][1] == checked["alone"][3]
    assert stopped["agreed"] == stopped["alone"] == [None] * 4
    assert checked["failed"][0] == checked["failed"][1]
    assert checked["failed"][2] == checked["failed"][3] == checked["failed"][0][: len(checked["failed"][2])]
    assert len(checked["failed"][0]) > len(checked["failed"][2]) + 3
    assert stopped["failed"][:2] == [None, None]
    assert stopped["failed"][2:] == ["it failed on another rank of the same group", "ValueError: planted"]
    assert [steps[0] for steps in checked["silent"]] == [100] * 4
    assert all(stopped["silent"][:2])


@pytest.mark.parametrize("alone", [True, False])
def test_a_plan_or_check_that_fails_ends_a_rank_for_which_others_wait(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    ends: list[str] = []
    monkeypatch.setattr(watchdog, "end", ends.append)
    monkeypatch.setattr(ranks, "deadline", fail)
    monkeypatch.setattr(ranks, "is_single_rank", lambda: alone)
    calls: list[Callable[[Any], Any]] = [
        lambda begun: begun.plan_next(),
        lambda begun: begun.check("key", fail, lambda: "replayed"),
    ]
    for call in calls:
        begun: Any = Shadow(Rate(share=0.05), Action.REPORT, process.refuse)
        begun._pipeline = SimpleNamespace(plan_at=0, has_published=True, end=lambda: None)
        begun.schedule.due = 1
        assert call(begun) in (None, "replayed")
        assert (begun.stopped, begun.schedule.due) == ("RuntimeError: can't start new thread", NEVER)
    assert ends == ([] if alone else ["the check has failed on this rank: RuntimeError: can't start new thread"] * 2)
