"""The shadow check on defects of stock releases: caught where the release has them, silent where it has not.

The scenarios are those of `verify` on the CPU double, with vLLM's own `CUDAGraphWrapper` around the layer, as model runner V1 has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shadow_double import affected, wrappers_on_the_double
from vllm.compilation import cuda_graph
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, create_forward_context, get_forward_context, override_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase

import vllm_graphfix
from vllm_graphfix.shadow import process
from vllm_graphfix.shadow.rate import Action, Rate


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    process.start(Rate(every=1), Action.REPORT)
    with wrappers_on_the_double():
        yield
    process.start(Rate(), Action.REPORT)


class Graphed:
    """A layer in a wrapper; `run` is a step of it."""

    def __init__(self, name: str, layer: Any, forward: Any, captured: int, block_size: int) -> None:
        self.name, self.captured = name, captured
        self.config = SimpleNamespace(
            compilation_config=SimpleNamespace(
                static_forward_context={name: layer}, fast_moe_cold_start=False, static_all_moe_layers=[]
            ),
            parallel_config=SimpleNamespace(data_parallel_size=1),
            cache_config=SimpleNamespace(block_size=block_size),
            use_cumem_cudagraph_pool=False,
        )
        self.wrapper = cuda_graph.CUDAGraphWrapper(forward, self.config, CUDAGraphMode.FULL)

    def run(self, metadata: Any, real: int, mode: CUDAGraphMode = CUDAGraphMode.FULL) -> Any:
        slots = torch.zeros(self.captured, dtype=torch.int64)
        slots[real:] = -1
        context = create_forward_context(
            {self.name: metadata},
            self.config,
            cudagraph_runtime_mode=mode,
            batch_descriptor=BatchDescriptor(self.captured),
            slot_mapping={self.name: slots},
        )
        with override_forward_context(context):
            return self.wrapper()


def found() -> Any:
    shadow = process.SHADOW
    assert shadow is not None
    assert shadow.stopped is None, shadow.stopped
    assert shadow.results.checks > 0
    return shadow.results


def test_every_fix_is_off() -> None:
    states = {name: state.state.value for name, state in vllm_graphfix.states().items() if name != "shadow"}
    assert set(states.values()) == {"off"}


def test_flashmla_fp8() -> None:
    from vllm_graphfix.verify.double.flashmla import FP8_BLOCK_SIZE
    from vllm_graphfix.verify.double.scenarios import flashmla_fp8 as scenario

    decode = scenario.DenseFP8Decode(captured_requests=3)
    graphed = Graphed(
        scenario.LAYER,
        SimpleNamespace(),
        lambda: decode._attention(get_forward_context().attn_metadata[scenario.LAYER], 3),
        3,
        FP8_BLOCK_SIZE,
    )
    graphed.run(decode._metadata([1, 1, 1], 3, for_cudagraph_capture=True), 3)
    for step in range(4):
        lengths = [60 + step, 127 + step, 200 + step]
        decode._query[:3] = torch.randn(decode._query[:3].shape, generator=decode._random).to(scenario.FP8)
        decode._block_table.commit_block_table(3)
        graphed.run(decode._metadata(lengths, 3), 3)
    results = found()
    assert bool(results.mismatches) == affected("flashmla-fp8")
    if results.mismatches:
        assert results.kept[0].graph.backends == ("FlashMLAMetadata",)
        assert results.kept[0].check <= 2


def test_mamba_padding() -> None:
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend

    from vllm_graphfix.verify.double.scenarios import mamba_padding as scenario

    class Layer(scenario.SelectiveStateStandIn, MambaBase):  # type: ignore[misc]
        get_state_shape = get_state_dtype = mamba_type = None

    with scenario._unpinned():
        runner, layer = scenario._runner(Mamba2AttentionBackend, CUDAGraphMode.FULL), Layer()
        layer.kv_cache = (layer._states,)

        def forward() -> torch.Tensor:
            output = torch.zeros(scenario.MAX_TOKENS, scenario.STATE_SIZE)
            tokens = layer.eager(get_forward_context().attn_metadata[scenario.LAYER])
            output[: len(tokens)] = tokens
            return output

        graphed = Graphed(scenario.LAYER, layer, forward, scenario.CAPTURED, scenario.MAX_MODEL_LEN)
        scenario._set_lengths(runner, [1] * scenario.CAPTURED, [1] * scenario.CAPTURED)
        graphed.run(scenario._metadata(runner, 4, 4, 1, for_cudagraph_capture=True), 4)
        random = torch.Generator().manual_seed(0)
        for scheduled in scenario.STEPS:
            scenario._update_batch(runner, scheduled)
            order = runner.input_batch.req_ids
            layer.hidden[: sum(scheduled.values())] = torch.randn(sum(scheduled.values()), 2, generator=random)
            counts = [scheduled[name] for name in order]
            computed = runner.input_batch.num_computed_tokens_cpu[: len(order)]
            scenario._set_lengths(runner, counts, computed + counts)
            if max(counts) == 1 and len(order) < scenario.CAPTURED:
                graphed.run(scenario._metadata(runner, len(order), 4, 1), len(order))
            else:
                metadata = scenario._metadata(runner, len(order), len(order), max(counts), num_tokens=sum(counts))
                graphed.run(metadata, len(order), CUDAGraphMode.NONE)
            for name, count in scheduled.items():
                runner.computed[name] += count
        assert bool(found().mismatches) == affected("mamba-padding")


def propose(
    self: Any, input_batch: Any, attn_metadata: Any, slot_mappings: Any, desc: Any, *, dummy_run: bool = False
) -> None:
    """Stands in for the speculator's method that replays a draft prefill, with its variables."""
    num_reqs, num_tokens_across_dp, mm_inputs = input_batch.num_reqs, None, None
    self.prefill_cudagraph_manager.run_fullgraph(desc)
    del num_reqs, num_tokens_across_dp, mm_inputs


def test_draft_prefill_state() -> None:
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    from vllm_graphfix.verify.double.scenarios import draft_prefill_state as scenario

    # After the scenario, which installs what these import.
    from vllm_graphfix.verify.double.decoding import DEVICE, MAX_TOKENS  # isort: skip

    drafting = scenario.Drafting()
    runner, speculator = drafting.runner, drafting.speculator
    speculator.max_num_tokens, speculator.draft_attn_layer_names = MAX_TOKENS, {scenario.DRAFT}
    mode = runner.config.compilation_config.cudagraph_mode
    target: Any = ModelCudaGraphManager(runner.config, DEVICE, mode, scenario.QUERY_TOKENS)
    speculator.init_cudagraph_manager(mode)
    speculator.capture(target.capture(model=drafting.target, intermediate_tensors=None, **runner.capture_inputs()))
    for step in scenario.STEPS:
        desc = target.dispatch(len(step.lengths), step.num_tokens, scenario.QUERY_TOKENS)
        metadata, slots = drafting.prepare(step, desc.num_reqs)
        batch = SimpleNamespace(
            num_reqs=len(step.lengths), num_reqs_after_padding=desc.num_reqs, num_tokens_after_padding=desc.num_tokens
        )
        propose(speculator, batch, metadata, slots, desc)
    results = found()
    assert bool(results.mismatches) == affected("draft-prefill-state")
    assert {each.graph.name.partition(",")[0] for each in results.kept} <= {"draft prefill"}
