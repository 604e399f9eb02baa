"""Observations of the probes of DeepSeek V4's entries, on vLLM's own compressor, builder and attention, on a CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from table import ALL_APPLIED, slow_but_for
from warm_release import run_in_fork

WITH_A_PROBE = """
import json
from contextlib import ExitStack
from types import SimpleNamespace
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm_graphfix.verify.engine.probes import probe_of

observed = {{}}
probe = probe_of("vllm_graphfix.verify.engine.compressed:{probe}")(observed, lambda: None)
{code}
print("told", json.dumps(observed))
"""
IN_A_COMPRESSOR = """
import sys
import torch
from unittest import mock
from vllm.config import CUDAGraphMode
from vllm.forward_context import override_forward_context
from vllm_graphfix.verify.double.compressor import LAYER, STATES, LayerStandIn, compressor_stand_ins

def write(*, kv_cache, k_cache_metadata, **_):
    for slot in k_cache_metadata.slot_mapping.tolist():
        if slot >= 0:
            kv_cache.view(-1, 512)[slot] += 1.0

with ExitStack() as stack:
    stack.enter_context(compressor_stand_ins())
    stack.enter_context(torch.inference_mode())
    kernels = sys.modules["vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl"]
    kernels._SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL = kernels.compress_norm_rope_store_cutedsl = write
    probe.before_the_engine()
    model = LayerStandIn()

    def step(slots, boundary):
        states = SimpleNamespace(
            token_to_req_indices=None,
            slot_mapping=torch.arange(8, 8 + len(slots)),
            block_table=None,
            block_size=8,
            num_decode_tokens=None,
            c128_boundary=boundary,
        )
        entries = SimpleNamespace(slot_mapping=torch.tensor(slots))
        context = SimpleNamespace(
            attn_metadata={STATES: states, LAYER: entries}, cudagraph_runtime_mode=CUDAGraphMode.NONE
        )
        with override_forward_context(context):
            model(torch.arange(len(slots)), torch.arange(len(slots)))

    step([2, -1, 3], boundary=None)  # while the engine starts
    step([-1, -1, -1], boundary=False)

    def generate():
        step([-1, 2, -1], boundary=True)
        step([-1, -1, -1], boundary=False)
        step([4, -1, 9], boundary=False)  # as a graph without the kernel
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            step([5, 6, 7], boundary=False)  # what a capture records

    engine = SimpleNamespace(generate=generate)
    probe.in_the_engine(engine)
    engine.generate()
"""
IN_A_DECODE = """
from vllm_graphfix.verify.double.scenarios import c128a_stride as scenario

probe.before_the_engine()
engine = SimpleNamespace(generate=scenario.run)
probe.in_the_engine(engine)
engine.generate()
"""


def seen(release: str, probe: str, code: str, switch: str) -> list[float]:
    done = run_in_fork(release, WITH_A_PROBE.format(probe=probe, code=code), ALL_APPLIED | {"VLLM_GRAPHFIX": switch})
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    observed: dict[str, Any] = json.loads(line.removeprefix("told "))
    (numbers,) = observed.values()
    return [float(number) for number in numbers]


@pytest.mark.parametrize(("switch", "unwritten"), [("off", 5.0), ("on", 2.0)])
@pytest.mark.parametrize("release", slow_but_for(("0.32.0",), ("0.30.0", "0.32.0")))
def test_entries_that_a_step_completes_and_does_not_write_are_counted(
    release: str, switch: str, unwritten: float
) -> None:
    """Steps before the engine is there do not count, and in a capture the fix writes."""
    assert seen(release, "UnwrittenEntries", IN_A_COMPRESSOR, switch) == [unwritten, 6.0]


@pytest.mark.parametrize(("switch", "foreign"), [("off", 6.0), ("on", 0.0)])
@pytest.mark.parametrize("release", slow_but_for(("0.27.1",), ("0.27.0", "0.27.1")))
def test_rows_with_slots_of_others_are_counted_in_the_graphs(release: str, switch: str, foreign: float) -> None:
    """Of three requests the second and the third, in each of three replays; in eager, which has as many rows, none."""
    assert seen(release, "ForeignSlots", IN_A_DECODE, switch) == [foreign, 18.0]
