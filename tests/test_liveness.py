"""PyTorch's check that inputs of graphs live until a replay, in engines of `verify` and `compare`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from vllm_graphfix.verify.engine import liveness


class TrackerDouble:
    def __init__(self) -> None:
        self.dead = False
        self.checks = 0

    def check_alive(self, pool: object) -> None:
        self.checks += 1
        if self.dead:
            raise RuntimeError("CUDA graph replay detected 1 dead tensor(s).\nDead tensor #1")


class GraphDouble:
    """A graph of a PyTorch with the keyword, which checks and raises at a replay."""

    def __init__(self) -> None:
        self._tracker: TrackerDouble | None = None
        self.replays = 0

    def capture_begin(self, pool: Any = None, check_input_liveness: bool = False) -> None:
        self._tracker = TrackerDouble() if check_input_liveness else None

    def replay(self) -> None:
        if self._tracker is not None:
            self._tracker.check_alive(None)
        self.replays += 1

    def pool(self) -> None: ...


class OldGraphDouble(GraphDouble):
    def capture_begin(self, pool: Any = None) -> None: ...  # type: ignore[override]


@pytest.fixture(autouse=True)
def nothing_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils, "get_cpp_backtrace", None, raising=False)
    liveness.freed.clear()


def graph(monkeypatch: pytest.MonkeyPatch, base: type[GraphDouble] = GraphDouble) -> GraphDouble:
    kind: type[GraphDouble] = type("Graph", (base,), {"capture_begin": base.capture_begin, "replay": base.replay})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", kind)
    assert liveness.watch_captures() is (base is GraphDouble)
    assert liveness.watch_captures() is False, "once"
    made: GraphDouble = kind()
    return made


def test_a_freed_input_is_counted_once_and_the_replay_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    one = graph(monkeypatch)
    one.capture_begin(None, check_input_liveness=False)
    tracker = one._tracker
    assert tracker is not None
    one.replay()
    assert (tracker.checks, liveness.freed) == (1, {})
    tracker.dead = True
    one.replay()
    one.replay()
    assert liveness.freed == {"CUDA graph replay detected 1 dead tensor(s).": 1}
    assert one.replays == 3


def test_a_pytorch_without_the_keyword_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    one = graph(monkeypatch, OldGraphDouble)
    one.capture_begin()
    one.replay()
    assert (one.replays, liveness.freed) == (1, {})


def test_this_pytorch_has_what_is_relied_on() -> None:
    import inspect

    if liveness.KEYWORD not in inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters:
        pytest.skip("from 2.13 on")
    from torch.utils import _cuda_debug

    assert callable(_cuda_debug._CUDAGraphInputLivenessTracker.check_alive)
    assert "_tracker" in inspect.getsource(torch.cuda.CUDAGraph)


def test_only_a_rank_is_changed_by_importing_the_extension() -> None:
    code = """
import sys, types, torch
before = torch.cuda.CUDAGraph.replay
{worker}
from vllm_graphfix.verify.engine import extension
sys.exit(torch.cuda.CUDAGraph.replay is before)
"""
    worker = 'sys.modules["vllm.v1.worker.worker_base"] = types.ModuleType("worker_base")'
    codes = [
        subprocess.run([sys.executable, "-c", code.format(worker=each)], check=False).returncode
        for each in ("", worker)
    ]
    assert codes == [1, 0]
