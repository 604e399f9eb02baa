"""A fix that fails while graphs are captured, on stock releases and in real process groups.

The outcome is right, stopped, or stock's, said aloud.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from behaviours import check_behaviours
from stock import run_in_release
from table import slow_but_for

FOLDER, SUPPORT = Path(__file__).parent / "in_vllm", Path(__file__).parent / "support"
SHAPES = ("0.16.0", "0.17.1", "0.18.1", "0.20.0", "0.21.0")
"""A release of each way in which model runner V2 captures, of those that need the fix."""


@pytest.mark.parametrize("release", slow_but_for(("0.17.1", "0.21.0"), SHAPES))
def test_the_graphs_that_a_fix_failed_in_are_not_dispatched(release: str) -> None:
    check_behaviours(release, "capture_failures")


@pytest.mark.parametrize("release", slow_but_for(("0.21.0",), SHAPES))
def test_strict_stops_the_engine_before_it_serves_them(release: str) -> None:
    check_behaviours(release, "capture_failures", {"VLLM_GRAPHFIX": "strict"})


@pytest.mark.parametrize(
    "release",
    slow_but_for(
        ("0.33.0",), ("0.14.1", "0.15.0", "0.17.1", "0.18.1", "0.21.0", "0.22.1", "0.25.1", "0.29.0", "0.33.0")
    ),
)
def test_each_release_has_a_way_to_leave_a_graph_out_of_dispatch(release: str) -> None:
    check_behaviours(release, "capture_failures_dispatch")


WORLDS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "nothing fails": ({}, {}),
    "one fails": ({}, {"FAILS": "1"}),
    "both fail, in other graphs": ({"FAILS": "3"}, {"FAILS": "1"}),
    "one fails, the other has no way": ({"NO_WAY": "1"}, {"FAILS": "1"}),
    "one fails, under strict": ({"VLLM_GRAPHFIX": "strict"}, {"VLLM_GRAPHFIX": "strict", "FAILS": "1"}),
    "one fails, and it is on": (
        {"VLLM_GRAPHFIX_CAPTURE_STATE": "on"},
        {"VLLM_GRAPHFIX_CAPTURE_STATE": "on", "FAILS": "1"},
    ),
    "one fails, and ranks come and go": ({"ELASTIC": "1"}, {"ELASTIC": "1", "FAILS": "1"}),
    "one fails, ranks come and go, under strict": (
        {"ELASTIC": "1", "VLLM_GRAPHFIX": "strict"},
        {"ELASTIC": "1", "VLLM_GRAPHFIX": "strict", "FAILS": "1"},
    ),
    "vLLM fails on one": ({}, {"ENDS": "1"}),
    "one is patched by somebody else meanwhile": ({}, {"PATCHED": "1"}),
    "one is killed": ({"VLLM_GRAPHFIX_AGREEMENT_TIMEOUT": "5"}, {"KILLED": "1"}),
}
"""Each rank's environment: which attention state, from 0, cannot be built, and what else happens while it captures."""

PROGRAM = """
import os, signal, sys, time
from types import SimpleNamespace
from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins
install_flashmla_stand_ins()
sys.path[:0] = [IN_VLLM, SUPPORT]
import torch
from rank_processes import run_worlds
from torch import distributed
import vllm.v1.attention.backends.mamba_attn
import vllm.v1.worker.gpu.cudagraph_utils  # once, which takes longer than all else that a rank does

def rank(world, number, size, port, env):
    os.environ.update({"VLLM_GRAPHFIX_AGREEMENT_TIMEOUT": "60"} | env)
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    import capture_failures as planted
    from vllm_graphfix import _this_process
    from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=size)
    with cpu_cuda_graphs():
        captured = planted.Capturing("target")
        planted.fail_at(captured, int(os.environ.get("FAILS", "-1")))
        runner = SimpleNamespace(cudagraph_manager=captured.manager)
        if "NO_WAY" in os.environ:
            runner.drafter = SimpleNamespace(use_cuda_graph=True)

        def capture():
            captured.capture()
            if "KILLED" in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)
            if "ENDS" in os.environ:
                raise ValueError("out of something")
            if "PATCHED" in os.environ:
                from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
                CudaGraphManager.capture = lambda self: None

        began = time.monotonic()
        try:
            planted.WorkerDouble(runner, capture).compile_or_warm_up_model()
            state = planted.state()
            graphs = [planted.graph_of(captured.manager, requests) for requests in (2, 4)]
            said = f"serves {graphs} {state.state.value} {state.reason}"
        except Exception as error:
            said = f"{type(error).__name__} {error}"
    return said.startswith("serves"), f"{time.monotonic() - began < 30} {said}"

run_worlds(WORLDS, rank)
"""


@pytest.fixture(scope="module")
def last_lines() -> dict[str, list[str]]:
    """Return the last line of each rank, by world: real process groups, and vLLM's own manager on the CPU double."""
    code = f"WORLDS = {WORLDS!r}\nIN_VLLM, SUPPORT = {str(FOLDER)!r}, {str(SUPPORT)!r}\n" + PROGRAM
    done = run_in_release("0.21.0", code, {"VLLM_LOGGING_LEVEL": "ERROR"}, libraries_loaded=True)
    lines = re.findall(r"^(.+): RANK (\d) True (.*)$", done.stdout, re.MULTILINE)
    return {world: [line for name, _, line in sorted(lines) if name == world] for world in WORLDS}


HOST = socket.gethostname()


@pytest.mark.parametrize(
    ("world", "graphs", "omitted"),
    [
        ("nothing fails", "[2, 4]", ""),
        (
            "one fails",
            "[2, None]",
            f"cudagraph_manager FULL 4; MemoryError: no room for a second state on rank 1 ({HOST})",
        ),
        (
            "both fail, in other graphs",
            "[None, None]",
            "cudagraph_manager FULL 2, cudagraph_manager FULL 4; MemoryError",
        ),
    ],
)
def test_all_ranks_leave_out_the_graphs_that_it_failed_in_on_any(
    world: str, graphs: str, omitted: str, last_lines: dict[str, list[str]]
) -> None:
    assert len(last_lines[world]) == 2
    for line in last_lines[world]:
        assert line.startswith(f"serves {graphs} active ")
        assert omitted in line


def test_where_one_rank_has_no_way_to_leave_it_out_none_does_and_all_say_failed(
    last_lines: dict[str, list[str]],
) -> None:
    lines = last_lines["one fails, the other has no way"]
    assert len(lines) == 2
    for each in lines:
        assert each.startswith("serves [2, 4] failed MemoryError: no room for a second state")
        assert f"on rank 1 ({HOST})" in each
        assert "the graphs that stock captures are served" in each


@pytest.mark.parametrize("world", ["one fails, under strict", "one fails, and it is on"])
def test_where_it_is_required_every_rank_stops_with_the_rank_that_it_failed_on(
    world: str, last_lines: dict[str, list[str]]
) -> None:
    assert len(last_lines[world]) == 2
    for line in last_lines[world]:
        assert line.startswith("GraphfixError vllm-graphfix stops this engine before it serves: capture-state failed")
        assert f"on rank 1 ({HOST}) while CUDA graphs were captured (cudagraph_manager FULL 4): MemoryError" in line


def test_where_ranks_come_and_go_none_dispatches_otherwise_and_the_one_says_failed(
    last_lines: dict[str, list[str]],
) -> None:
    first, second = last_lines["one fails, and ranks come and go"]
    assert first.startswith("serves [2, 4] active")
    assert second.startswith("serves [2, 4] failed MemoryError: no room for a second state")


def test_where_ranks_come_and_go_the_one_that_it_failed_on_stops_under_strict(last_lines: dict[str, list[str]]) -> None:
    first, second = last_lines["one fails, ranks come and go, under strict"]
    assert first.startswith("serves [2, 4] active")
    assert "stops this engine before it serves: capture-state failed" in second


def test_a_rank_whose_capture_ends_in_vllms_own_error_keeps_no_other_waiting(last_lines: dict[str, list[str]]) -> None:
    first, second = last_lines["vLLM fails on one"]
    assert first.startswith("serves [2, 4] active")  # vLLM ends the engine
    assert second == "ValueError out of something"


def test_ranks_that_no_longer_agree_after_the_capture_stop(last_lines: dict[str, list[str]]) -> None:
    lines = last_lines["one is patched by somebody else meanwhile"]
    assert len(lines) == 2
    for each in lines:
        assert "stops this engine before it serves: the ranks of this engine no longer agree." in each
        assert f"capture-state is 'active' on rank 0 ({HOST}); 'conflict' on rank 1 ({HOST})" in each


def test_a_rank_that_is_killed_while_it_captures_is_named_within_the_timeout(last_lines: dict[str, list[str]]) -> None:
    """By then vLLM has ended the engine, as a rule."""
    (first,) = last_lines["one is killed"]
    assert first.startswith("GraphfixError vllm-graphfix stops this engine before it serves: ")
    assert "No report within 5 s: rank 1 on " in first
