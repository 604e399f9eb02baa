"""A fix that graphs go past: full graphs of vLLM's own manager that hold the build of metadata, and stock ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backends import flash_attn
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.utils import AttentionGroup

from vllm_graphfix.engine.bypass import REPLAYS, BypassWatch
from vllm_graphfix.patching.applied_fix import Proof
from vllm_graphfix.patching.sites import _sites
from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.double.decoding import MAX_REQUESTS, RunnerStandIn, Step, configuration
from vllm_graphfix.verify.double.flash_attention import LAYER, flash_attention_stand_ins, metadata_builder
from vllm_graphfix.verify.double.graph import CPUStream, cpu_cuda_graphs
from vllm_graphfix.verify.double.unpinned import unpinned

FIX = "flash-mixed-schedule"
BUILD = flash_attn.FlashAttentionMetadataBuilder


class LengthsOfRows(torch.nn.Module):
    """Stands in for a model: its output is the length of each request, by the attention metadata."""

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        lengths: torch.Tensor = get_forward_context().attn_metadata[LAYER].seq_lens
        return lengths[:, None].float()


class Worker(SimpleNamespace):
    """A plain namespace takes no weak reference."""


class Engine:
    """Model runner V2's buffers, model state and manager of graphs, FlashAttention's builder, and the watch."""

    def __init__(self) -> None:
        self.config = configuration(CUDAGraphMode.FULL_DECODE_ONLY, [MAX_REQUESTS])
        self.runner = RunnerStandIn(self.config, [LAYER])
        self.builder = metadata_builder(CUDAGraphMode.FULL_DECODE_ONLY, MAX_REQUESTS, [MAX_REQUESTS])
        vars(self.runner.model_state).update(
            prompt_embeds_state=None, encoder_cache=None, model_config=self.config.model_config
        )
        self.runner.block_tables._num_dirty_rows = 0
        group = AttentionGroup(flash_attn.FlashAttentionBackend, [LAYER], SimpleNamespace(block_size=4), 0)
        group.metadata_builders = [self.builder]
        self.runner.attn_groups = [[group]]
        arguments = {"decode_query_len": 1, "cudagraph_mode": CUDAGraphMode.FULL_DECODE_ONLY}
        self.manager = cudagraph_utils.ModelCudaGraphManager(self.config, torch.device("cpu"), **arguments)
        self.config.use_cumem_cudagraph_pool = False
        vars(self.runner)["cudagraph_manager"] = self.manager
        sites = [(site, Proof.STEP) for site in _sites.values() if FIX in site.layers]
        self.watch = BypassWatch(lambda: {FIX: sites})
        self.worker = Worker(model_runner=self.runner, vllm_config=self.config)

    def capture(self) -> None:
        self.watch.begin_capture(self.worker)
        inputs = self.runner.capture_inputs() | {"model": LengthsOfRows(), "intermediate_tensors": None}
        self.manager.capture(**supported_kwargs(self.manager.capture, inputs))
        self.watch.on_captured(self.worker)

    def step(self, lengths: tuple[int, ...]) -> list[float]:
        self.runner.prepare(Step(lengths), padded_requests=MAX_REQUESTS)
        (descriptor,) = self.manager.graphs
        output: list[float] = self.manager.run_fullgraph(descriptor).flatten().tolist()
        return output


@contextmanager
def engine() -> Iterator[Engine]:
    streams = mock.patch.object(cudagraph_utils, "current_stream", CPUStream, create=True)
    with cpu_cuda_graphs(), streams, unpinned(), flash_attention_stand_ins(3), torch.inference_mode():
        made = Engine()
        made.capture()
        yield made


@contextmanager
def counted_builds() -> Iterator[Any]:
    with mock.patch.object(BUILD, "build", autospec=True, side_effect=BUILD.build) as build:
        yield build


LENGTHS = [5.0, 9.0, 3.0, 0.0]


def test_stock_builds_before_each_replay_and_no_fix_is_bypassed() -> None:
    with engine() as one:
        own = vars(one.builder).keys() - {"build"}
        with counted_builds() as build:
            for _ in range(REPLAYS):
                assert one.step((5, 9, 3)) == LENGTHS
        assert build.call_count == REPLAYS
        one.watch.poll()
        assert one.watch.bypassed == {}
        assert vars(one.builder).keys() == own
        assert all("replay" not in vars(graph) for graph in one.manager.graphs.values())


def test_where_the_build_is_captured_wrappers_see_no_call_and_the_fix_is_bypassed() -> None:
    with engine() as one:
        with counted_builds() as build:
            assert [one.step((5, 9, 3)) for _ in range(REPLAYS)][-1] == LENGTHS, "right: the graph builds"
        assert build.call_count == 0
        assert "build" in vars(one.builder)
        one.watch.poll()
        assert one.watch.bypassed == {
            FIX: f"the engine goes past it: it has replayed full graphs {REPLAYS} times without a call of build"
        }
        assert "build" not in vars(one.builder)
