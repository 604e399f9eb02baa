"""Engines in processes of their own, with a double of vLLM in them: results, errors, and that none is left behind."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

import engine_double
from engines_run import (  # noqa: F401 - fixtures among them
    ERRORS,
    SOON,
    all_end,
    ended,
    fresh_logs,
    installed_double,
    job_of,
    parent,
    started,
)
from vllm_graphfix.verify.engine import device, processes
from vllm_graphfix.verify.engine.job import EAGER, Job
from vllm_graphfix.verify.engine.processes import (
    HANG,
    Engines,
    JobResult,
    last_line,
    root_cause,
    terminated_like_interrupted,
)


def test_what_an_engine_says_is_read(vllm: Path, logs: Path) -> None:
    end = ended(vllm, logs, "answers", name="the model eager", mode=EAGER, extra_passes=1)
    assert end.error is None
    assert end.result is not None
    first, again = end.result.passes
    assert [answer.tokens for answer in first] == [(3, 4, 5), (39, 40, 41, 42)]
    assert [answer.tokens for answer in again] == [answer.tokens for answer in first], "in the order of the prompts"
    assert first[0].top[0] == {3: -0.1, 4: -3.1}
    assert again[0].top[0] == {3: pytest.approx(-0.11), 4: pytest.approx(-3.11)}
    assert end.result.states["0"]["mamba-padding"] == "active"
    assert end.result.drafts == (8, 8)
    assert (end.result.facts["vllm"], end.result.facts["device"]) == (engine_double.__version__, engine_double.DEVICE)
    assert end.log.parent == logs
    assert "starts, EAGER answers" in end.log.read_text()


def test_where_prompts_are_scored_an_answer_begins_with_the_prompts_second_token(vllm: Path, logs: Path) -> None:
    end = ended(vllm, logs, "answers", prompt_logprobs=True, extra_passes=1)
    assert end.result is not None
    first, again = end.result.passes
    assert [answer.tokens for answer in first] == [(2, 3, 4, 5), (4, 5, 39, 40, 41, 42)]
    assert [len(answer.top) for answer in first] == [4, 6]
    assert (first[0].top[0], first[0].top[1]) == ({2: -0.1}, {3: -0.1, 4: -3.1})
    assert again[1].top[1] == {5: pytest.approx(-0.11)}


@pytest.mark.parametrize("behaviour", ERRORS)
def test_an_engine_that_fails_is_known_by_its_own_error(vllm: Path, logs: Path, behaviour: str) -> None:
    end = ended(vllm, logs, behaviour)
    assert (end.error, end.result) == (ERRORS[behaviour], None)
    assert end.log.is_file()


def test_an_engine_without_an_error_of_its_own_is_reported_by_its_last_line(vllm: Path, logs: Path) -> None:
    end = ended(vllm, logs, "ends without a word")
    assert end.result is None
    assert (end.error or "").endswith("the double of an engine starts, PATCHED ends without a word")


def test_a_killed_engine_without_output_is_reported_by_the_signal(vllm: Path, logs: Path) -> None:
    assert ended(vllm, logs, "drafts and is killed").error == "ended with signal 9"


def test_what_probes_saw_outlives_a_crash(vllm: Path, logs: Path) -> None:
    end = ended(vllm, logs, "drafts and is killed", probes=("piecewise-draft-decodes",))
    assert end.result is None
    assert end.observed == {"piecewise-draft-decodes": [2.0, 3.0]}


def test_an_engine_inherits_the_environment_but_for_what_the_job_changes(
    vllm: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TEST_KEPT", "TEST_REPLACED", "TEST_LEFT_OUT"):
        monkeypatch.setenv(name, "before")
    changes = {"PYTHONPATH": str(vllm), "TEST_REPLACED": "after", "TEST_LEFT_OUT": None, "TEST_ADDED": "after"}
    end = ended(vllm, logs, "tells of its environment", environment=changes)
    assert end.error == "LookupError: TEST_ADDED=after TEST_KEPT=before TEST_REPLACED=after"


def test_the_requested_vllm_is_used_though_another_is_installed_beside_the_plugin(
    vllm: Path, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    (installed / "vllm").mkdir(parents=True)
    (installed / "vllm" / "__init__.py").write_text("raise AssertionError('this is another one')\n")
    for part in device.PACKAGE.glob("vllm_graphfix*"):
        (installed / part.name).symlink_to(part)
    monkeypatch.setattr(processes, "PACKAGE", installed)
    assert ended(vllm, logs, "answers").error is None


def test_the_plugin_is_installed_in_an_engine_wherever_its_copy_lies(vllm: Path, logs: Path) -> None:
    """By its metadata, in processes that an engine starts, which are vLLM's alone."""
    (vllm / "sitecustomize.py").write_text(
        "import importlib.metadata\n"
        "points = importlib.metadata.entry_points(group='vllm.general_plugins', name='graphfix')\n"
        "print('found', [str(point.dist.locate_file('')) for point in points])\n"
    )
    assert f"found ['{logs / 'plugin'}']" in ended(vllm, logs, "answers").log.read_text()


def test_engines_are_named_and_no_more_run_at_a_time_than_may(vllm: Path, logs: Path) -> None:
    jobs = [job_of(vllm, "is alone", name=f"engine {number}") for number in range(3)]
    results = Engines(logs, 60.0).run(jobs, 1)
    assert {name: end.error for name, end in results.items()} == dict.fromkeys(["engine 0", "engine 1", "engine 2"])
    assert sorted(path.name for path in logs.glob("*.log")) == ["engine-0.log", "engine-1.log", "engine-2.log"]


def test_progress_is_the_last_line_and_then_the_end(vllm: Path, logs: Path) -> None:
    doing: list[tuple[str, str]] = []
    done: list[tuple[str, str]] = []
    job = job_of(vllm, "hangs with a child")
    engines = Engines(
        logs, 2.0, lambda job, line: doing.append((job.name, line)), lambda job, how: done.append((job.name, how))
    )
    engines.run([job], 1)
    assert doing[0] == (job.name, "")
    assert doing[-1][1].endswith("the double of an engine starts, PATCHED hangs with a child")
    ((name, how),) = done
    assert name == job.name
    assert how.startswith("did not finish in 2 s, ")


def test_an_engine_that_takes_too_long_ends_with_its_children(vllm: Path, logs: Path) -> None:
    end = ended(vllm, logs, "hangs with a child", timeout=2.0)
    assert (end.result, end.error) == (None, "did not finish in 2 s")
    assert all_end(started(logs, 1))


def test_a_job_may_shorten_the_time_limit_from_the_last_observation_not_extend_it(vllm: Path, logs: Path) -> None:
    name = "engine that hangs"
    seen, saw = logs / "engine-that-hangs.json", '{"observed": {"lengths": [-1.0]}, "error": ""}'

    def see() -> None:
        """Write what the engine has seen, half a second after its start."""
        threading.Timer(0.5, seen.write_text, [saw]).start()

    see()
    end = ended(vllm, logs, "hangs with a child", name=name, seconds=2.0)
    assert HANG.fullmatch(end.error or "")
    assert (end.observed, end.seconds < 20) == ({"lengths": [-1.0]}, True)
    see()
    assert (
        ended(vllm, logs, "hangs with a child", timeout=2.0, name=name, seconds=60.0).error == "did not finish in 2 s"
    )
    assert ended(vllm, logs, "hangs with a child", timeout=2.0, name=name, seconds=0.1).error == "did not finish in 2 s"


def test_a_watcher_that_fails_leaves_no_engine(vllm: Path, logs: Path) -> None:
    """A terminal that is gone, say."""

    def watch(job: Job, line: str) -> None:
        if any(logs.glob("pids of *")):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        Engines(logs, 60.0, watch).run([job_of(vllm, "hangs with a child")], 1)
    assert all_end(started(logs, 1))


def test_engines_run_in_a_thread_too(vllm: Path, logs: Path) -> None:
    """Signals are the main thread's, which then is somebody else's."""
    results: list[JobResult] = []
    thread = threading.Thread(target=lambda: results.append(ended(vllm, logs, "answers")))
    thread.start()
    thread.join(60.0)
    assert [end.error for end in results] == [None]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_interrupted_it_ends_all_engines_and_starts_none(vllm: Path, logs: Path, number: signal.Signals) -> None:
    with parent(vllm, logs) as process:
        pids = started(logs, 2)
        process.send_signal(number)
        assert process.communicate(timeout=SOON)[1] == "interrupted\n"
    assert all_end(pids)
    assert len(list(logs.glob("pids of *"))) == 2
    assert not (logs / "three.json").exists()


def test_interrupted_again_and_again_it_ends_all_engines_too(vllm: Path, logs: Path) -> None:
    with parent(vllm, logs) as process:
        pids = started(logs, 2)
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        process.communicate(timeout=SOON)
    assert all_end(pids)


def test_killed_outright_it_leaves_no_engine_nor_what_an_engine_started(vllm: Path, logs: Path) -> None:
    """Nothing of it runs any more: the engines have to notice."""
    with parent(vllm, logs) as process:
        pids = started(logs, 2)
        process.kill()
    assert all_end(pids)


def test_a_terminal_that_is_closed_does_not_end_what_nohup_has_started() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminated_like_interrupted():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


DEAD_LOG = """\
(EngineCore_DP0 pid=7) ERROR 11-21 12:10:58 [core.py:1] EngineCore encountered a fatal error.
(EngineCore_DP0 pid=7) ERROR 11-21 12:10:58 [core.py:1] torch.AcceleratorError: CUDA error: unspecified launch failure
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
"""
LOGS = [
    ("", None),
    ("INFO 11-21 12:10:33 [a.py:4] all is well\n", None),
    (engine_double.ENGINE_LOG, engine_double.WORKER_FAILED),
    (engine_double.CORE_FAILED, None),
    (engine_double.ABORTED_LOG, "CUDA error: an illegal memory access was encountered"),
    (DEAD_LOG, "torch.AcceleratorError: CUDA error: unspecified launch failure"),
    ("RuntimeError: Worker failed with error 'boom', please check the stack trace above for the root cause\n", None),
    (
        "WARNING 11-21 12:10:34 [moe.py:45] tried: ImportError: no such kernels\nKeyError: 'model.layers.0'\n",
        "KeyError: 'model.layers.0'",
    ),
    ("\x1b[31mOSError: [Errno 28] No space left on device\x1b[0m\r\n", "OSError: [Errno 28] No space left on device"),
    ("in a sentence, an Error: is nothing\n", None),
]


@pytest.mark.parametrize(("log", "cause"), LOGS, ids=[str(cause) for _, cause in LOGS])
def test_the_cause_is_the_first_exception_that_is_not_about_another_process(log: str, cause: str | None) -> None:
    assert root_cause(log) == cause


LINES = [
    (b"", ""),
    (b"\n\n", ""),
    (b"one\ntwo\n", "two"),
    (b"one\n  two  \n\n", "two"),
    (b"shards:   0%\rshards:  50%\rshards: 100%", "shards: 100%"),
    (b"shards: 100%\r\n", "shards: 100%"),
    (b"\x1b[0;36m(Worker pid=7)\x1b[0;0m INFO ready\x1b[K\n", "(Worker pid=7) INFO ready"),
    (b"graphs: 7/8\n\x1b[A\x1b[2K\x1b[?25l", "graphs: 7/8"),
    (b"\x1b]0;vllm serve\x07loads\n", "loads"),
    (b"rings\x07 and \x00 goes back\x08\n", "rings and  goes back"),
    (b"\xff\xfe caf\xc3\xa9", "\ufffd\ufffd caf\u00e9"),
    (b"x" * 5_000_000 + b"\nlast\n", "last"),
    (b"x" * 5_000_000, "x" * 2000),
]


@pytest.mark.parametrize(("written", "line"), LINES, ids=range(len(LINES)))
def test_the_last_line_of_a_log_is_what_people_would_see(tmp_path: Path, written: bytes, line: str) -> None:
    log = tmp_path / "log"
    log.write_bytes(written)
    assert last_line(log) == line


def test_signals_are_handled_as_before_when_engines_have_ended(vllm: Path, logs: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    ended(vllm, logs, "answers")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)] == before


def test_all_descriptors_are_closed(vllm: Path, logs: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    ended(vllm, logs, "answers")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
