"""Ranks find out that they disagree before they capture a graph, by a store with a timeout. Real stores, real process groups."""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stock import release_root, run_in_release
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from vllm_graphfix import agreement, gate, rollout, settings
from vllm_graphfix.agreement import Agreement, Word, compare, leave
from vllm_graphfix.fix import Mode, State
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.gate import STOPS, GraphfixError
from vllm_graphfix.hooks import guarded
from vllm_graphfix.membership import Membership
from vllm_graphfix.progress import FixState

STAGE = "start"


def word(host: str = "node-a", **changed: Any) -> Word:
    said = Word(
        host=host,
        pid=1,
        engine="e" * 16,
        graphfix="0.1.0",
        vllm="0.21.0",
        canary=True,
        master="on",
        modes={"mamba-padding": "auto", "capture-state": "auto"},
        states={"mamba-padding": "active", "capture-state": "active"},
        token=agreement.new_token(),
    )
    return said._replace(**changed)


def compared(words: dict[int, Word], world_size: int, timeout: float = 20.0) -> tuple[dict[int, Agreement], list[str]]:
    """What each of the ranks in *words* found, each with a connection of its own to one store; and the warnings of all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stores = [TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))]
    stores += [TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30)) for _ in words][1:]
    found: dict[int, Agreement] = {}
    warnings: list[str] = []

    def run(store: TCPStore, rank: int, said: Word) -> None:
        mine = PrefixStore("vllm_graphfix", store)
        hosts: Callable[[int], str | None] = {3: "10.0.0.3"}.get
        place = leave(mine, STAGE, rank, said)
        found[rank] = compare(mine, place, rank, world_size, said, warnings.append, silent_host=hosts, timeout=timeout)

    threads = [
        threading.Thread(target=run, args=(store, rank, said))
        for store, (rank, said) in zip(stores, words.items(), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 30)
    return found, warnings


def test_ranks_that_say_the_same_agree() -> None:
    words = {rank: word(f"node-{rank // 2}") for rank in range(4)}
    found, warnings = compared(words, 4)
    for rank in words:
        assert (found[rank].world_size, found[rank].agreeing, found[rank].difference) == (4, 4, None)
        assert (found[rank].group, found[rank].leader) == (words[0].token, words[0].engine)
    assert warnings == []


def test_nodes_that_started_on_their_own_agree_although_each_has_an_engine_of_its_own() -> None:
    found, _ = compared({0: word(engine="a" * 16), 1: word("node-b", engine="b" * 16)}, 2)
    assert {each.difference for each in found.values()} == {None}
    assert {each.leader for each in found.values()} == {"a" * 16}


def test_code_that_a_rank_does_not_run_differs_from_nothing() -> None:
    """A drafter is on the last stage of a pipeline only; elsewhere its fix waits for an import that never comes."""
    states = {"mamba-padding": "active", "capture-state": "waiting"}
    found, _ = compared({0: word(states=states), 1: word()}, 2)
    assert found[1].difference is None
    assert found[0].agreeing == 2


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"canary": False}, "in the rollout is 'yes' on ranks 0-1, 3 (node-a); 'no' on rank 2 (node-b)."),
        ({"master": "off"}, "VLLM_GRAPHFIX is 'on' on ranks 0-1, 3 (node-a); 'off' on rank 2 (node-b)."),
        ({"graphfix": "0.2.0"}, "vllm-graphfix is '0.1.0' on ranks 0-1, 3 (node-a); '0.2.0' on rank 2 (node-b)."),
        ({"vllm": "0.20.0"}, "vLLM is '0.21.0' on ranks 0-1, 3 (node-a); '0.20.0' on rank 2 (node-b)."),
        (
            {"modes": {"mamba-padding": "off", "capture-state": "auto"}},
            "the mode of mamba-padding is 'auto' on ranks 0-1, 3 (node-a); 'off' on rank 2 (node-b).",
        ),
        (
            {"states": {"mamba-padding": "failed", "capture-state": "active"}},
            "mamba-padding is 'active' on ranks 0-1, 3 (node-a); 'failed' on rank 2 (node-b).",
        ),
    ],
)
def test_a_difference_names_what_differs_and_the_ranks_with_their_hosts(changed: dict[str, Any], what: str) -> None:
    words = {rank: word() for rank in (0, 1, 3)} | {2: word("node-b", **changed)}
    found, _ = compared(words, 4)
    assert {each.difference for each in found.values()} == {what}
    assert {each.agreeing for each in found.values()} == {3}


@pytest.mark.parametrize("silent", [0, 3], ids=["rank 0", "another rank"])
def test_a_rank_without_the_plugin_is_named_after_a_time_and_nobody_hangs(silent: int) -> None:
    words = {rank: word() for rank in range(4) if rank != silent}
    started = time.monotonic()
    found, _ = compared(words, 4, timeout=2.0)
    assert time.monotonic() - started < 25
    for each in found.values():
        assert each.difference is not None
        host = "10.0.0.3" if silent == 3 else "a host that is not known here"
        assert each.difference.startswith(f"Without a word in 2 s: rank {silent} on {host}.")
        assert "VLLM_PLUGINS" in each.difference
        assert "or it failed before it could say what" in each.difference
        assert each.agreeing == 3


def test_a_rank_that_is_late_is_waited_for_and_named_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "WARN_AFTER", 0.2)
    monkeypatch.setattr(Word, "compared", slow_on_rank_1(Word.compared))
    found, warnings = compared({0: word(), 1: word("late")}, 2)
    assert found[0].difference is None
    assert any("waiting for rank 1" in warning for warning in warnings)


def slow_on_rank_1(real: Callable[[Word], dict[str, str]]) -> Callable[[Word], dict[str, str]]:
    def compared(self: Word) -> dict[str, str]:
        if self.host == "late":
            time.sleep(1.0)
        return real(self)

    return compared


def test_ranks_that_are_all_switched_off_say_so() -> None:
    found, _ = compared({0: word(master="off"), 1: word(master="off")}, 3, timeout=0.5)
    assert all(each.all_off and each.difference is not None for each in found.values())
    found, _ = compared({0: word(master="off"), 1: word()}, 2)
    assert not any(each.all_off for each in found.values())


def test_a_word_is_there_for_whoever_compares_later() -> None:
    """While memory is measured some ranks compare and others do not: none waits for one that has spoken and gone on."""
    store = HashStore()
    leave(store, STAGE, 1, word())
    mine = word()
    found = compare(store, leave(store, STAGE, 0, mine), 0, 2, mine, lambda text: None, timeout=1.0)
    assert found.difference is None


def test_ranks_that_join_later_are_compared_in_the_store_that_they_share() -> None:
    """As when vLLM scales expert parallelism up: groups are made anew, and with them the store."""
    old, new = word(), word("node-b")
    leave(HashStore(), STAGE, 0, old)
    shared = HashStore()
    places = {leave(shared, STAGE, 0, old), leave(shared, STAGE, 1, new)}
    assert len(places) == 1
    assert compare(shared, places.pop(), 0, 2, old, lambda text: None, timeout=1.0).difference is None


def test_a_rank_s_words_are_counted_in_the_store() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stores = HashStore(), TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for store in stores:
        mine = PrefixStore("vllm_graphfix", store)
        assert [leave(mine, STAGE, rank, word()) for rank in (0, 0, 1, 0)] == [f"{STAGE}-{n}" for n in (1, 2, 1, 3)]


def test_a_word_of_another_version_is_a_difference_and_no_crash() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    mine = word()
    place = leave(store, STAGE, 0, mine)
    store.set(f"{place}/1", "another digest")
    store.set(f"{place}/word/1", json.dumps({"something": "else"}))
    found = compare(store, place, 0, 2, mine, lambda text: None, timeout=1.0)
    assert found.difference == "Another version of vllm-graphfix spoke for rank 1."
    assert found.agreeing == 1


def test_a_digest_without_a_word_is_a_difference_and_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_LAST_READERS", 0.1)
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    mine = word()
    place = leave(store, STAGE, 0, mine)
    store.set(f"{place}/1", "a digest")
    started = time.monotonic()
    found = compare(store, place, 0, 2, mine, lambda text: None, timeout=1.0)
    assert time.monotonic() - started < 4
    assert found.difference == "Another version of vllm-graphfix spoke for rank 1."


def test_ranks_that_cannot_tell_their_states_do_not_agree_though_they_say_the_same() -> None:
    found, _ = compared({rank: word(states={}, fault="OSError: no files.") for rank in (0, 1)}, 2)
    what = "Which fixes are there cannot be told on ranks 0-1 (node-a): OSError: no files."
    assert {(each.difference, each.agreeing) for each in found.values()} == {(what, 0)}


def test_a_rank_that_cannot_tell_its_states_is_told_apart_from_ranks_that_can() -> None:
    found, _ = compared({0: word(), 1: word("node-b", states={}, fault="OSError: no files")}, 2)
    what = "Which fixes are there cannot be told on rank 1 (node-b): OSError: no files."
    assert {(each.difference, each.agreeing) for each in found.values()} == {(what, 1)}


def test_a_fix_that_failed_on_some_ranks_is_told_with_the_reason() -> None:
    reasons = {"mamba-padding": "OSError: no files", "capture-state": "OSError: no files"}
    failed = word("node-b", states=dict.fromkeys(reasons, "failed"), reasons=reasons)
    found, _ = compared({0: word(), 1: failed, 2: failed}, 3)
    assert found[0].difference is not None
    assert found[0].difference.endswith(
        "'failed' on ranks 1-2 (node-b). "
        "The reason on ranks 1-2 (node-b) for capture-state, mamba-padding: OSError: no files."
    )
    assert {each.difference for each in found.values()} == {found[0].difference}


def test_a_reason_is_no_difference() -> None:
    states = {"mamba-padding": "failed", "capture-state": "active"}
    words = {
        rank: word(states=states, reasons={"mamba-padding": f"OSError: /proc/{rank}", "capture-state": ""})
        for rank in (0, 1)
    }
    found, _ = compared(words, 2)
    assert {each.difference for each in found.values()} == {None}


# -- faults on one rank of two: the gate itself, around a double of a worker ----------------------------------------


class Faults:
    """One fault in what the plugin asks of the store or the system; *number* None is a fault of each call."""

    def __init__(self, rank: int, operation: str, number: int | None, error: Exception) -> None:
        self.rank, self.operation, self.number, self.error = rank, operation, number, error
        self.calls = 0
        self.fired = False
        self.here = threading.local()

    def around(self, operation: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if operation == self.operation and getattr(self.here, "rank", None) == self.rank:
                self.calls += 1
                if self.number in (None, self.calls):
                    self.fired = True
                    raise self.error
            return call(*args, **kwargs)

        called.__name__ = operation
        return called


STORE = ("add", "set", "wait", "check", "multi_get", "get", "list_keys")
SYSTEM = ("host_name", "urandom", "monotonic", "states")


class FailingStore:
    """A real store, with faults."""

    def __init__(self, store: Any, faults: Faults) -> None:
        for operation in STORE:
            setattr(self, operation, faults.around(operation, getattr(store, operation)))


def gate_of_two(
    monkeypatch: pytest.MonkeyPatch, faults: Faults, *, master: str = "auto", differ: bool = False, ended: float = 20.0
) -> dict[int, str]:
    """What becomes of two ranks on their way from profiling to the last gate; where one stops, the engine ends the other."""
    shared = HashStore()
    shared.set_timeout(timedelta(seconds=5))
    real, barrier, outcomes = distributed_c10d.PrefixStore, threading.Barrier(2), dict[int, str]()
    world = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_rank=0),
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL")),
    )

    def run(rank: int) -> None:
        faults.here.rank = rank
        environment = {} if master == "auto" else {"VLLM_GRAPHFIX": master}
        me = Membership(FIXES, environment)
        me.decision = rollout.decide(settings.read(environment, tuple(fix.name for fix in FIXES)), "0.21.0")
        state = State.OFF if differ and rank == 1 else State.ACTIVE
        states_double = {fix.name: FixState(fix.name, Mode.AUTO, None, state, "") for fix in FIXES}
        vars(me.process)["states"] = faults.around("states", lambda **_: states_double)
        vars(me.process)["left_undone"] = lambda **_: ()
        nothing = {name: lambda: None for name in ("tell", "keep", "finish")}
        me.telling = SimpleNamespace(rank=None, agreement=None, problem=None, **nothing)  # type: ignore[assignment]  # a double
        worker_double = SimpleNamespace(local_rank=rank, use_v2_model_runner=False, vllm_config=world)
        try:
            guarded(me.gate.leave, "profiling")
            barrier.wait()
            me.gate.before_capture(worker_double, "profile_cudagraph_memory")
            barrier.wait()
            me.gate.before_capture(worker_double, "compile_or_warm_up_model")
            barrier.wait()
            outcomes[rank] = "starts"
        except GraphfixError as error:
            outcomes[rank] = str(error)
            barrier.abort()
        except threading.BrokenBarrierError:
            outcomes[rank] = "is ended"

    with monkeypatch.context() as patched:
        patched.setattr(distributed_c10d, "_get_default_store", lambda: shared)
        patched.setattr(distributed_c10d, "PrefixStore", lambda name, store: FailingStore(real(name, store), faults))
        patched.setattr(gate, "_world", lambda: (faults.here.rank, 2))
        patched.setattr(gate, "host_name", faults.around("host_name", lambda: f"node-{faults.here.rank}"))
        patched.setattr(agreement, "os", SimpleNamespace(urandom=faults.around("urandom", os.urandom)))
        patched.setattr(agreement, "time", SimpleNamespace(monotonic=faults.around("monotonic", time.monotonic)))
        patched.setattr(agreement, "_LAST_READERS", 0.1)
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ended)
    return outcomes


def sweep(rank: int, operation: str) -> Iterator[Faults]:
    """Each call to *operation* that *rank* makes, failing in three ways."""
    for number in itertools.count(1):
        faults = [
            Faults(rank, operation, number, error)
            for error in (OSError(errno.EMFILE, "injected"), RuntimeError("injected"), MemoryError("injected"))
        ]
        yield from faults
        if not any(fault.fired for fault in faults):
            return


@pytest.mark.parametrize("master", ["auto", "strict"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("operation", [*STORE[:-1], *SYSTEM])
def test_where_one_call_fails_on_one_rank_nobody_hangs_and_who_stops_says_why(
    operation: str, rank: int, master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that are alike start, or stop for what failed; ranks that are not never start."""
    monkeypatch.setattr(agreement, "TIMEOUT", 3.0)
    fired = 0
    for differ in (False, True):
        for faults in sweep(rank, operation):
            outcomes = gate_of_two(monkeypatch, faults, master=master, differ=differ)
            fired += faults.fired
            stopped = [told for told in outcomes.values() if told.startswith(STOPS)]
            assert len(outcomes) == 2, (outcomes, faults.calls)
            assert stopped if differ else stopped or set(outcomes.values()) == {"starts"}
            hosts = [f"node-{each}" for each in (0, 1)]
            if operation == "host_name" and faults.fired:
                hosts[rank] = "an unknown host"
            fault = f"cannot be told on rank {rank} (node-{rank}): {type(faults.error).__name__}: "
            difference = f"capture-state is 'active' on rank 0 ({hosts[0]}); 'off' on rank 1 ({hosts[1]})."
            for told in stopped:
                assert fault in told or (differ and difference in told)
                assert "Without a word" not in told
    assert fired


def test_what_no_two_ranks_have_to_agree_about_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "TIMEOUT", 3.0)
    for operation in ("host_name", "urandom"):
        faults = Faults(1, operation, None, OSError(errno.EMFILE, "injected"))
        assert gate_of_two(monkeypatch, faults) == {0: "starts", 1: "starts"}
        assert faults.fired


def test_a_rank_that_cannot_tell_its_states_stops_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its word is there before anybody waits."""
    faults = Faults(1, "states", None, OSError(errno.EMFILE, "injected"))
    started = time.monotonic()
    outcomes = gate_of_two(monkeypatch, faults)
    assert time.monotonic() - started < 5
    said = "Which fixes are there cannot be told on rank 1 (node-1): OSError: [Errno 24] injected. Give all"
    stopped = [told for told in outcomes.values() if told != "is ended"]
    assert stopped
    assert all(said in told for told in stopped)


def test_where_a_rank_cannot_leave_a_word_the_others_name_that_among_the_causes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agreement, "TIMEOUT", 1.0)
    outcomes = gate_of_two(monkeypatch, Faults(1, "set", None, RuntimeError("injected")))
    assert "Without a word in 1 s: rank 1 on a host that is not known here." in outcomes[0]
    assert "or it failed before it could say what (that process's log does)" in outcomes[0]
    assert outcomes[1] == "is ended"


def test_a_host_that_cannot_be_told_hides_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "TIMEOUT", 1.0)
    store, mine = HashStore(), word()
    failing: Any = FailingStore(store, faults := Faults(0, "list_keys", None, OSError("injected")))
    faults.here.rank = 0
    place = leave(failing, STAGE, 0, mine)
    host = partial(agreement.host_in, failing, world_size=2)
    found = compare(failing, place, 0, 2, mine, lambda text: None, silent_host=host, timeout=0.2)
    assert faults.fired
    assert (found.difference or "").startswith("Without a word in 0 s: rank 1 on a host that is not known here.")


WORLDS: dict[str, tuple[tuple[dict[str, str], bool], ...]] = {
    "agrees": (({}, True), ({}, True)),
    "differs": (({}, True), ({"VLLM_GRAPHFIX_MAMBA_PADDING": "off"}, True)),
    "one is off": (({"VLLM_GRAPHFIX": "off"}, True), ({}, True)),
    "one lacks the plugin": (({}, True), ({}, False)),
    "all are off, one lacks the plugin": (({"VLLM_GRAPHFIX": "off"}, True), ({"VLLM_GRAPHFIX": "off"}, False)),
    "one cannot make a token": (({}, True), ({"FAULT": "token"}, True)),
    "one cannot tell its states": (({}, True), ({"FAULT": "states"}, True)),
    "one has given up": (({}, True), ({"FAULT": "give up"}, True)),
    "all are off, one cannot tell its states": (
        ({"VLLM_GRAPHFIX": "off"}, True),
        ({"VLLM_GRAPHFIX": "off", "FAULT": "states"}, True),
    ),
    "differs, without graphs": (
        ({"GRAPHS": "NONE"}, True),
        ({"GRAPHS": "NONE", "VLLM_GRAPHFIX_MAMBA_PADDING": "off"}, True),
    ),
}
"""Each rank's environment, and whether it has the plugin."""

PROGRAM = """
import errno, multiprocessing, os, socket, sys
from types import SimpleNamespace
import torch
from torch import distributed
import vllm.v1.attention.backends.mamba_attn
import vllm.v1.worker.gpu_worker as workers

def put_a_fault(fault, agreement):
    from vllm_graphfix import _this_process
    error, process = OSError(errno.EMFILE, "Too many open files"), _this_process().process
    def fail(*args, **kwargs):
        raise error
    if fault == "token":
        agreement.new_token = fail
    elif fault == "states":
        process.states = fail
    elif fault == "give up":
        process.give_up(error)

def rank(world, number, size, port, env, plugin):
    os.environ.update(env)
    if not plugin:
        os.environ["VLLM_PLUGINS"] = ""
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=size)
    distributed.new_group(list(range(size)), backend="gloo")
    if plugin:
        from vllm_graphfix import agreement
        agreement.TIMEOUT = agreement.TIMEOUT_FOR_A_WARNING = 4.0 if "lacks" in world else 60.0
        put_a_fault(os.environ.get("FAULT"), agreement)
    mode = SimpleNamespace(name=os.environ.get("GRAPHS", "FULL"))
    worker_double = SimpleNamespace(local_rank=number, use_v2_model_runner=False, vllm_config=SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_rank=0), model_config=SimpleNamespace(enforce_eager=mode.name == "NONE"),
        compilation_config=SimpleNamespace(cudagraph_mode=mode)))
    try:
        workers.Worker.compile_or_warm_up_model(worker_double)
        said = "returned"
    except AttributeError:
        said = "STARTS"  # the stock start-up was called, with an object that is no worker
    except RuntimeError as error:
        said = f"{type(error).__name__} {error}"
    os.write(1, f"{world}: RANK {number} {said}\\n".encode())  # at once: the other rank writes too
    os._exit(0)

def run(world, ranks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank, args=(world, n, len(ranks), port, *each)) for n, each in enumerate(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()

for world, ranks in WORLDS.items():
    run(world, ranks)
"""


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    """What each rank of each world of `WORLDS` said: real process groups of stock 0.21.0, around a double of a worker."""
    done = run_in_release("0.21.0", f"WORLDS = {WORLDS!r}\n" + PROGRAM, {"VLLM_LOGGING_LEVEL": "WARNING"})
    lines = [line.partition(": RANK ") for line in done.stdout.splitlines() if ": RANK " in line]
    return {world: sorted(told for name, _, told in lines if name == world) for world in WORLDS}


@pytest.mark.parametrize(
    "world",
    [
        "agrees",
        "one cannot make a token",
        "all are off, one lacks the plugin",
        "all are off, one cannot tell its states",
        "differs, without graphs",
    ],
)
def test_ranks_start(world: str, said: dict[str, list[str]]) -> None:
    """Where they agree; and where a difference cannot hang: the kill switch brings an engine up in any case."""
    assert said[world] == ["0 STARTS", "1 STARTS"]


@pytest.mark.parametrize(
    ("world", "what"),
    [
        ("differs", "mamba-padding is 'active' on rank 0 ({host}); 'off' on rank 1 ({host})"),
        ("one is off", "VLLM_GRAPHFIX is 'off' on rank 0 ({host}); 'on' on rank 1 ({host})"),
        (
            "one cannot tell its states",
            "Which fixes are there cannot be told on rank 1 ({host}): OSError: [Errno 24] Too many open files.",
        ),
        ("one has given up", "mamba-padding is 'active' on rank 0 ({host}); 'failed' on rank 1 ({host})."),
        (
            "one has given up",
            "The reason on rank 1 ({host}) for capture-state, draft-prefill-state, ",
        ),
        (
            "one has given up",  # without what this process has not imported
            "mamba-padding, prefill-dispatch, workspace-growth: OSError: [Errno 24] Too many open files.",
        ),
    ],
)
def test_all_ranks_stop_before_they_capture_where_one_is_set_up_otherwise(
    world: str, what: str, said: dict[str, list[str]]
) -> None:
    assert len(said[world]) == 2
    for line in said[world]:
        assert "GraphfixError vllm-graphfix stops this engine before it captures its CUDA graphs" in line
        assert what.format(host=socket.gethostname()) in line


def test_a_rank_whose_process_keeps_the_plugin_out_is_named_with_its_host(said: dict[str, list[str]]) -> None:
    with_plugin, without = said["one lacks the plugin"]
    assert without == "1 STARTS"
    assert "GraphfixError" in with_plugin
    assert f"Without a word in 4 s: rank 1 on {socket.gethostname()}." in with_plugin


def test_a_fix_taken_back_for_want_of_a_companion_is_no_difference_between_pipeline_stages() -> None:
    """Only the last stage imports the drafter's code, for which `capture-state` needs the companion."""
    code = """
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    import vllm.v1.worker.gpu.cudagraph_utils
    from vllm_graphfix import _this_process
    first = _this_process().gate.word()
    import vllm.v1.worker.gpu.spec_decode.eagle.cudagraph
    last = _this_process().gate.word()
    states = _this_process().process.states()
    print("SAID", first.states["capture-state"], last.states["capture-state"], states["capture-state"].state.value)
    """
    said = run_in_release("0.21.0", code, {"VLLM_GRAPHFIX_DRAFT_PREFILL_STATE": "observe"}).stdout
    assert "SAID active waiting incompatible" in said


@pytest.mark.parametrize(
    ("error", "ended"),
    [("vllm-graphfix stops this engine before it captures its CUDA graphs: …", True), ("out of memory", False)],
)
def test_a_core_whose_ranks_stop_it_ends_its_executor(error: str, ended: bool) -> None:
    """A silent rank waits in a collective by then, and the core would wait for that rank when it ends."""
    code = f"""
    from types import SimpleNamespace
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from vllm.v1.engine.core import EngineCore
    def fail(*args, **kwargs):
        raise RuntimeError({error!r})
    executor_double = SimpleNamespace(get_kv_cache_specs=fail, shutdown=lambda: print("ENDED"))
    try:
        EngineCore._initialize_kv_caches(SimpleNamespace(model_executor=executor_double), SimpleNamespace())
    except RuntimeError as raised:
        print("RAISED", raised)
    """
    said = run_in_release("0.21.0", code).stdout
    assert f"RAISED {error}" in said
    assert ("ENDED" in said) == ended


@pytest.mark.parametrize("release", ["0.15.0", "0.18.1", "0.21.0", "0.26.0", "0.33.0"])
def test_what_the_gate_stands_on_is_in_vllm(release: str) -> None:
    """The methods that it is put around, by name; and, from 0.18.0 on, the one that measures graphs."""
    root = release_root(release)
    assert "def compile_or_warm_up_model(self" in read(root, "gpu_worker.py")
    assert "def determine_available_memory(self" in read(root, "gpu_worker.py")
    assert "def compile_or_warm_up_model(self" in read(root, "cpu_worker.py")
    assert "def _initialize_kv_caches(" in (root / "vllm" / "v1" / "engine" / "core.py").read_text(encoding="utf-8")
    assert ("def profile_cudagraph_memory(self" in read(root, "gpu_model_runner.py")) == (release >= "0.18")


def read(root: Path, name: str) -> str:
    return (root / "vllm" / "v1" / "worker" / name).read_text(encoding="utf-8")
