"""Observations of probes, on vLLM's own classes if these run without a GPU."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from table import ALL_APPLIED, slow_but_for
from vllm_graphfix.verify.engine.probes import PROBES, probe_of
from warm_release import run_in_fork


def test_every_probe_has_its_name_in_the_registry() -> None:
    assert list(PROBES) == [
        "padded-rows",
        "indexer-lengths",
        "empty-rows",
        "planners-in-draft-graphs",
        "drafts",
        "piecewise-draft-decodes",
        "outgrown-workspace",
        "blocks-changed-by-an-idle-step",
    ]
    assert all(probe.name == name for name, probe in PROBES.items())


ON_REAL_CLASSES = """
import json
from types import SimpleNamespace
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins
install_flashmla_stand_ins()
from vllm_graphfix.verify.double.scenarios import {scenario} as scenario
from vllm_graphfix.verify.engine.probes import PROBES

observed, saved = {{}}, []
probe = PROBES[{probe!r}](observed, lambda: saved.append(json.dumps(observed)))
{attach}
measured = scenario.run()
print("told", json.dumps([observed, saved[-1:], measured.eager, measured.error]))
"""
"""A scenario of the CPU double, with a probe in it: vLLM's own builder, speculator and managers of graphs."""

IN_A_BUILDER = "probe.in_the_engine(None)\n"
IN_A_SPECULATOR = """
speculator_of = scenario._speculator

def watched(mode):
    speculator = speculator_of(mode)
    worker = SimpleNamespace(model_runner=SimpleNamespace(speculator=speculator))
    probe.in_the_engine(SimpleNamespace(collective_rpc=lambda method: [method(worker)]))
    return speculator

scenario._speculator = watched
"""
IN_GRAPHS = """
import torch
from pathlib import Path
from vllm_graphfix.verify.double import graph as cpu

class KeptGraph(cpu.CPUGraph):
    # With what `torch.cuda.CUDAGraph` has beyond: it tells what it has recorded.
    def instantiate(self):
        pass

    def enable_debug_mode(self):
        pass

    def debug_dump(self, path):
        names = (operation.name.replace("plan_stand_in", "get_mla_metadata") for operation in self.operations)
        Path(path).write_text("".join(f"KERNEL {name}\\n" for name in names))

torch.cuda.CUDAGraph = KeptGraph
probe.before_the_engine()
cpu.CPUGraph = torch.cuda.CUDAGraph
"""

BEHIND_A_CAPTURE = """
import torch
from unittest import mock

kind = scenario.RunnerStandIn
stock, served = kind.capture_model, scenario._serve

def captured(runner):
    stock(runner)
    engine = SimpleNamespace(collective_rpc=lambda method: [method(None)])
    # The probe's tensors, too, are in the memory of the device.
    with mock.patch.object(torch, "empty", scenario.workspace.torch.empty):
        probe.in_the_engine(engine)

def serve(*given, **named):
    numbers = served(*given, **named)
    probe.after_the_answers()
    return numbers

kind.capture_model, scenario._serve = captured, serve
"""


def test_a_case_may_name_a_probe_that_is_made_elsewhere() -> None:
    made = probe_of("vllm_graphfix.verify.engine.probes:Drafts")
    assert made is probe_of("drafts") is PROBES["drafts"]


def seen_on_real_classes(
    release: str, scenario: str, probe: str, attach: str, switch: str
) -> tuple[list[float], list[float], str | None]:
    """Return the observations, the eager numbers of the scenario, and the error that its graphs ended in."""
    code = ON_REAL_CLASSES.format(scenario=scenario, probe=probe, attach=attach)
    done = run_in_fork(release, code, ALL_APPLIED | {"VLLM_GRAPHFIX": switch})
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    observed, saved, eager, error = json.loads(line.removeprefix("told "))
    if saved:
        assert json.loads(saved[0]).keys() == observed.keys()
    return observed[probe], eager, error


@pytest.mark.parametrize(("switch", "lowest"), [("off", [0.0, -1.0]), ("on", [1.0, 0.0])])
@pytest.mark.xdist_group("0.19.1")
def test_arguments_of_dense_fp8_flashmla_for_padded_rows(switch: str, lowest: list[float]) -> None:
    seen, _, _ = seen_on_real_classes("0.19.1", "flashmla_padding", "padded-rows", IN_A_BUILDER, switch)
    assert seen == lowest


@pytest.mark.parametrize(("switch", "lowest"), [("off", -1.0), ("on", 0.0)])
@pytest.mark.parametrize("release", slow_but_for(("0.27.1",), ("0.20.0", "0.27.1")))
def test_lengths_of_the_sparse_indexer_for_padded_rows(release: str, switch: str, lowest: float) -> None:
    seen, _, error = seen_on_real_classes(release, "indexer_padding", "indexer-lengths", IN_A_BUILDER, switch)
    assert seen == [lowest]
    assert (error is None) == (lowest == 0.0)


@pytest.mark.parametrize(("switch", "planned"), [("off", 0.0), ("on", 3.0)])
@pytest.mark.xdist_group("0.21.0")
def test_the_planner_is_in_the_graphs_of_the_drafts_prefill_with_the_fix_alone(switch: str, planned: float) -> None:
    """The draft has a graph for each of the three capture sizes of the scenario."""
    seen, _, _ = seen_on_real_classes("0.21.0", "draft_prefill_state", "planners-in-draft-graphs", IN_GRAPHS, switch)
    assert seen == [planned, 3.0]


IN_TRITON_MLA = """
from types import SimpleNamespace
probe.before_the_engine()
run = scenario.run
engine = SimpleNamespace(generate=run)
probe.in_the_engine(engine)
scenario.run = lambda: engine.generate()
"""


@pytest.mark.parametrize(("switch", "wrong"), [("off", 6.0), ("on", 0.0)])
@pytest.mark.parametrize("release", slow_but_for(("0.33.0",), ("0.22.0", "0.33.0")))
def test_rows_of_length_0_are_counted_in_the_graphs(release: str, switch: str, wrong: float) -> None:
    """Two in each of three replays; neither in eager nor in the capture is there one."""
    seen, _, _ = seen_on_real_classes(release, "triton_mla_padding", "empty-rows", IN_TRITON_MLA, switch)
    assert seen == [wrong, 6.0]


@pytest.mark.xdist_group("0.17.1")
def test_draft_decodes_in_piecewise_graphs_are_counted_on_stock() -> None:
    """The scenario ends in the crash that users see; by then there was at least one."""
    (padded, decodes), _, error = seen_on_real_classes(
        "0.17.1", "draft_decode_mode", "piecewise-draft-decodes", IN_A_SPECULATOR, "off"
    )
    assert 0 < padded < decodes
    assert error is not None
    assert "kv_indptr" in error


@pytest.mark.xdist_group("0.17.1")
def test_draft_decodes_run_without_piecewise_graphs_with_the_fix() -> None:
    (padded, decodes), _, error = seen_on_real_classes(
        "0.17.1", "draft_decode_mode", "piecewise-draft-decodes", IN_A_SPECULATOR, "on"
    )
    assert (padded, error) == (0.0, None)
    assert decodes > 0


@pytest.mark.xdist_group("0.17.1")
def test_draft_tokens_are_recorded_in_order_with_the_size_of_each_batch() -> None:
    """In the scenario: a prefill of four requests, then four steps of three, three tokens each; eager first."""
    seen, eager, _ = seen_on_real_classes("0.17.1", "draft_decode_mode", "drafts", IN_A_SPECULATOR, "on")
    prefill, steps = seen[: 1 + 4 * 3], seen[1 + 4 * 3 : 1 + 4 * 3 + 4 * (1 + 3 * 3)]
    batches = [steps[start : start + 10] for start in range(0, len(steps), 10)]
    assert prefill[0] == 4.0
    assert [batch[0] for batch in batches] == [3.0] * 4
    assert [token for batch in batches for token in batch[1:]] == eager[: 4 * 9]


@pytest.mark.parametrize("switch", ["off", "on"])
@pytest.mark.parametrize("release", slow_but_for(("0.25.1",), ("0.18.1", "0.25.1")))
def test_others_memory_is_written_to_when_a_recorded_workspace_was_outgrown(release: str, switch: str) -> None:
    """On stock all of the old workspace, which is as large as one of the probe's tensors."""
    (written, looked), _, error = seen_on_real_classes(
        release, "workspace_growth", "outgrown-workspace", BEHIND_A_CAPTURE, switch
    )
    assert (looked, error) == (1.0, None)
    assert written == {"off": 4 * 64 * 4, "on": 0.0}[switch]


def test_an_engine_without_a_workspace_was_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = SimpleNamespace(_current_workspaces=[None, None])
    module = SimpleNamespace(current_workspace_manager=lambda: manager)
    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.workspace"):
        monkeypatch.setitem(sys.modules, name, module)
    observed: dict[str, list[float]] = {}
    probe = PROBES["outgrown-workspace"](observed, lambda: None)
    engine: Any = SimpleNamespace(collective_rpc=lambda method: [method(None)])
    probe.in_the_engine(engine)
    probe.after_the_answers()
    assert observed == {"outgrown-workspace": [0.0, 0.0]}


def test_probes_need_a_speculator_where_they_watch_one() -> None:
    """An engine without one ends in an error, and is not said to have drafted nothing."""
    worker = SimpleNamespace(model_runner=SimpleNamespace())
    engine: Any = SimpleNamespace(collective_rpc=lambda method: [method(worker)])
    for name in ("piecewise-draft-decodes", "drafts"):
        with pytest.raises(AttributeError):
            PROBES[name]({}, lambda: None).in_the_engine(engine)
