"""The process that holds the store of the ranks stops or ends: a real TCPStore in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from ranks import STAGE, report
from records import eventually
from vllm_graphfix.engine.rank_agreement import TIMEOUT_FOR_A_WARNING, compare, publish
from vllm_graphfix.ranks import StoreLostError, common_store, host_in

HOLDS = """
import sys, time
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
for rank in range(2):  # as gloo writes it
    host = b"node-%d" % rank
    store.set(f"default_pg/0//2//cpu//0/{rank}", (len(host).to_bytes(8, "little") + host).decode("latin-1"))
print(store.port, flush=True)
time.sleep(600)
"""
LIMIT = 1.0


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """The process of rank 0; this process is rank 1, whose torch.distributed has a connection to its store."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        connection: Any = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
        prefix: Any = distributed_c10d.PrefixStore
        default = prefix("0/", prefix("default_pg", connection))
        monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: default)
        yield process
        process.kill()


def seconds_of_a_loss(store: Any, how: str) -> float:
    """Return how long it takes until a call raises."""
    begun = time.monotonic()
    with pytest.raises(StoreLostError, match=how):
        store.get("key")
    return time.monotonic() - begun


def test_no_later_stage_waits_for_a_store_that_does_not_answer(holder: subprocess.Popen[str]) -> None:
    """Each stage asks for the store anew, and may wait ten minutes for it."""
    common_store(LIMIT).set("key", "value")
    os.kill(holder.pid, signal.SIGSTOP)
    how = f"has not answered for {LIMIT:.0f} s: the host of rank 0"
    assert seconds_of_a_loss(common_store(LIMIT), how) >= LIMIT
    for limit in (LIMIT, TIMEOUT_FOR_A_WARNING, 600.0):
        assert seconds_of_a_loss(common_store(limit), how) < LIMIT


def test_a_host_that_was_cut_off_for_a_while_is_compared_with(holder: subprocess.Popen[str]) -> None:
    store = common_store(LIMIT)
    store.set("key", "value")
    os.kill(holder.pid, signal.SIGSTOP)
    seconds_of_a_loss(store, "has not answered")
    os.kill(holder.pid, signal.SIGCONT)

    def answers() -> bool:
        try:
            return bool(common_store(LIMIT).get("key") == b"value")
        except StoreLostError:
            return False

    assert eventually(answers)


def test_no_stage_waits_for_a_process_that_has_ended(holder: subprocess.Popen[str]) -> None:
    """An error of one call only would be repeated, and an engine that requires nothing would go on without rank 0."""
    common_store(60.0).set("key", "value")
    holder.kill()
    holder.wait()
    for _ in range(3):
        assert seconds_of_a_loss(common_store(60.0), "the process of rank 0, which holds it, has ended") < 30


def test_a_store_that_stops_while_ranks_compare_is_waited_for_once(holder: subprocess.Popen[str]) -> None:
    store, mine = common_store(LIMIT), report()
    place = publish(store, STAGE, 1, mine)
    os.kill(holder.pid, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(StoreLostError, match="has not answered"):
        compare(store, place, 1, 2, mine, print, host_of=partial(host_in, store, world_size=2), timeout=600.0)
    assert time.monotonic() - begun < LIMIT + 30


def test_the_host_of_a_rank_is_read_within_the_limit(holder: subprocess.Popen[str]) -> None:
    store = common_store(LIMIT)
    assert [host_in(store, rank, 2) for rank in (0, 1)] == ["node-0", "node-1"]
    assert host_in(store, 0, 3) is None
    os.kill(holder.pid, signal.SIGSTOP)
    begun = time.monotonic()
    assert host_in(store, 0, 2) is None
    assert time.monotonic() - begun < LIMIT + 30
