"""Waits of the shadow check that come to an end.

What ends is the process, with a message and a record, or the wait alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from stock import isolated_environment
from vllm_graphfix.shadow import watchdog


def in_a_process(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    head = """
    import logging, os, signal, threading, time
    logging.basicConfig(format="%(message)s")
    from vllm_graphfix.shadow import watchdog
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code)],
        env=isolated_environment(str(folder)) | {"VLLM_GRAPHFIX_SHADOW": "1/1", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_wait_that_cannot_be_interrupted_ends_the_process_with_a_reason(tmp_path: Path) -> None:
    code = """
    import vllm_graphfix
    vllm_graphfix.register()
    with watchdog.limit("it waits for a lock", 0.3):
        threading.Lock().acquire() and None
        lock = threading.Lock(); lock.acquire(); lock.acquire()
    """
    done = in_a_process(code, tmp_path)
    assert done.returncode == watchdog.EXIT_CODE, done.stderr
    assert "with it the engine: it waits for a lock, and 0 s were not enough" in done.stderr
    records = [json.loads(file.read_text()) for file in tmp_path.rglob("*.json")]
    assert [record["problem"] for record in records] == [
        "the shadow check ended this process: it waits for a lock, and 0 s were not enough"
    ]


def test_a_log_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    code = """
    watchdog._LAST_WORDS = 0.3
    class Hangs(logging.Handler):
        def emit(self, record): time.sleep(100)
    logging.getLogger("vllm").addHandler(Hangs())
    watchdog.end("planted")
    """
    begun = time.monotonic()
    assert in_a_process(code, tmp_path).returncode == watchdog.EXIT_CODE
    assert time.monotonic() - begun < 30


def test_what_comes_to_its_end_in_time_begins_the_time_of_what_is_around_it_anew(tmp_path: Path) -> None:
    code = """
    with watchdog.limit("all of it", 0.6):
        for _ in range(4):
            with watchdog.limit("a part", 0.6):
                time.sleep(0.3)
    time.sleep(1)
    print("through")
    """
    assert in_a_process(code, tmp_path).stdout == "through\n"


def test_while_the_process_itself_is_stopped_no_time_passes(tmp_path: Path) -> None:
    code = """
    import subprocess
    with watchdog.limit("it is stopped", 2.0):
        subprocess.Popen(["/bin/sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.2)
    print("through")
    """
    assert in_a_process(code, tmp_path).stdout == "through\n"


def test_a_child_of_a_fork_is_watched_too(tmp_path: Path) -> None:
    code = """
    with watchdog.limit("a part", 5.0):
        pass
    child = os.fork()
    if not child:
        with watchdog.limit("the child", 0.3):
            time.sleep(20)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert in_a_process(code, tmp_path).stdout == f"{watchdog.EXIT_CODE}\n"


def test_a_wait_that_nothing_depends_on_is_abandoned() -> None:
    assert watchdog.within(5.0, lambda: "answer") == "answer"
    with pytest.raises(ConnectionError, match="gone"):
        watchdog.within(5.0, lambda: (_ for _ in ()).throw(ConnectionError("gone")).__next__())
    ever = threading.Event()
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer for 0 s"):
        watchdog.within(0.2, ever.wait)
    assert time.monotonic() - begun < 5
    ever.set()


NO_THREADS = """
def start(thread):
    raise RuntimeError("can't start new thread")
stock, threading.Thread.start = threading.Thread.start, start
"""


def test_a_thread_that_could_not_be_started_is_started_by_the_next_limit(tmp_path: Path) -> None:
    code = """
    try:
        with watchdog.limit("the first", 0.2):
            pass
    except RuntimeError:
        threading.Thread.start = stock
    with watchdog.limit("the second", 0.2):
        time.sleep(30)
    """
    done = in_a_process(textwrap.dedent(NO_THREADS) + textwrap.dedent(code), tmp_path)
    assert done.returncode == watchdog.EXIT_CODE, done.stderr
    assert "with it the engine: the second, and 0 s were not enough" in done.stderr


def test_reading_a_call_raises_nothing_where_no_thread_can_be_started(tmp_path: Path) -> None:
    code = """
    from vllm_graphfix.settings.shadow_rate import Action, parse
    from vllm_graphfix.shadow import ranks
    from vllm_graphfix.shadow.check import Shadow
    ranks.is_single_rank = lambda: False
    shadow = Shadow(parse("1/1"), Action.REPORT, print)
    shadow.memory.measuring = False
    shadow.read("target model", lambda: True)
    """
    done = in_a_process(textwrap.dedent(NO_THREADS) + textwrap.dedent(code), tmp_path)
    assert done.returncode == watchdog.EXIT_CODE, done.stderr
    assert "the shadow check is now off; serving goes on: RuntimeError: can't start new thread" in done.stderr
