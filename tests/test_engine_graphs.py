"""Probes of captured graphs, for kernels and the capturing class, on a double of CUDA's graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_graphfix.verify.engine.probes import PlannersInDraftGraphs, capturing, nodes_of

PLANNER = "_ZN5flash23get_mla_metadata_kernelE27Mla_metadata_params"
OTHER = "_ZN2at6native29vectorized_elementwise_kernelILi4EEEvi"


class GraphDouble:
    """A double of `torch.cuda.CUDAGraph`.

    A captured graph is there to be looked at until it is instantiated, or if it is kept.

    What is written down has the form in which CUDA describes a graph.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self.keep_graph = keep_graph
        self.kernels: list[str] = []
        self.captured = self.instantiated = self.debugged = False

    def capture_end(self) -> None:
        self.captured = True
        if not self.keep_graph:
            self.instantiate()

    def instantiate(self) -> None:
        assert self.captured
        assert not self.instantiated
        self.instantiated = True

    def enable_debug_mode(self) -> None:
        self.debugged = True

    def debug_dump(self, path: str) -> None:
        if not (self.debugged and self.captured and self.keep_graph):
            return
        nodes = "\n".join(
            f'"graph_1_node_{number}"[style="bold" shape="record" label="{{KERNEL\n'
            f"| {{ID | {number} | {kernel}\\<\\<\\<1,32,0\\>\\>\\>}}\n"
            f"| {{{{node handle | func handle}} | {{0x5573 | 0x5574}}}}\n"
            '}"];'
            for number, kernel in enumerate(self.kernels)
        )
        memset = '"graph_1_node_9"[style="solid" shape="record" label="{MEMSET\n| {ID | 9 | get_mla_metadata}\n}"];'
        Path(path).write_text(f'digraph dot {{\nsubgraph cluster_1 {{\nlabel="graph_1"\n{nodes}\n{memset}\n}}\n}}\n')


def with_nodes(*kernels: str) -> GraphDouble:
    graph = GraphDouble(keep_graph=True)
    graph.kernels += kernels
    graph.captured = True
    return graph


def test_the_kernels_of_a_graph_with_nodes_are_named() -> None:
    text = "\n".join(nodes_of(with_nodes(OTHER, PLANNER)))
    assert OTHER in text
    assert PLANNER in text


def test_what_is_no_kernel_is_none() -> None:
    assert not any("MEMSET" in line or "metadata}" in line for line in nodes_of(with_nodes(OTHER)))


def test_a_graph_without_kernels_has_none() -> None:
    assert nodes_of(with_nodes()) == []


def test_a_graph_that_cannot_be_looked_at_is_an_error() -> None:
    """Not a graph without the planner."""
    gone = GraphDouble()
    gone.capture_end()
    with pytest.raises(RuntimeError, match="did not list"):
        nodes_of(gone)


class Manager:
    """Captures as vLLM's managers of CUDA graphs do: one class's `capture` calls that of the class above it."""

    def __init__(self, kernels: list[str] | None = None) -> None:
        self.kernels = kernels or []
        self.seen: str | None = None

    def capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.kernels += self.kernels  # type: ignore[attr-defined] # a double
        graph.capture_end()
        assert graph.instantiated, "vLLM replays it"  # type: ignore[attr-defined]
        self.seen = capturing()


class ModelCudaGraphManager(Manager):
    pass


class PrefillEagleCudaGraphManager(Manager):
    def capture(self) -> None:
        super().capture()


class Speculator:
    def __init__(self, *managers: Manager) -> None:
        self.managers = managers

    def capture(self) -> None:
        for manager in self.managers:
            manager.capture()


@pytest.fixture
def _graph_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", GraphDouble)


@pytest.mark.usefixtures("_graph_double")
def test_who_captures_is_the_innermost_object_that_does() -> None:
    prefill, model = PrefillEagleCudaGraphManager(), ModelCudaGraphManager()
    Speculator(prefill, model).capture()
    assert (prefill.seen, model.seen) == ("PrefillEagleCudaGraphManager", "ModelCudaGraphManager")


def test_nobody_captures_where_no_object_does() -> None:
    def capture() -> str | None:
        return capturing()

    assert capturing() is None
    assert capture() is None, "a function is no object"


@pytest.fixture
def observed(_graph_double: None) -> tuple[dict[str, list[float]], list[str]]:
    """Return what a probe of the draft's graphs observed, and what it saved."""
    seen: dict[str, list[float]] = {}
    saved: list[str] = []
    PlannersInDraftGraphs(seen, lambda: saved.append(json.dumps(seen))).before_the_engine()
    return seen, saved


def test_graphs_of_the_drafts_prefill_are_counted_with_and_without_the_planner(
    observed: tuple[dict[str, list[float]], list[str]],
) -> None:
    seen, saved = observed
    assert seen == {"planners-in-draft-graphs": [0.0, 0.0]}, "none until one is captured"
    Speculator(
        *(PrefillEagleCudaGraphManager(kernels) for kernels in ([OTHER], [PLANNER, OTHER], [], [PLANNER]))
    ).capture()
    assert seen == {"planners-in-draft-graphs": [2.0, 4.0]}
    assert len(saved) == 4
    assert json.loads(saved[-1]) == seen, "what comes next may end in a crash"


def test_graphs_of_the_target_are_not_counted(observed: tuple[dict[str, list[float]], list[str]]) -> None:
    seen, saved = observed
    ModelCudaGraphManager([PLANNER]).capture()
    graph: Any = torch.cuda.CUDAGraph()
    graph.capture_end()
    assert graph.instantiated
    assert (seen, saved) == ({"planners-in-draft-graphs": [0.0, 0.0]}, [])
