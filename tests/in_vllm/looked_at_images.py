"""Issue 35917: model runner V2 of 0.15.0 to 0.16.0 serves no image where torch.compile is on.

Real: the runner's `execute_model`, its dummy batch, the buffer of embeddings, Qwen2's `forward`, and vLLM's way of
compiling it, which traces it once and drops its guards. Stand-ins: layers, norm and embeddings of the model, the
batch of a real step, the encoder, and a manager without graphs.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.model_executor.models import qwen2
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

from vllm_graphfix.verify.double.scenarios.deepstack_features import LayerStandIn, NormStandIn

TOKENS, WIDTH, MOST = 6, 4, 16
CPU = torch.device("cpu")
NO_CACHE = {"VLLM_DISABLE_COMPILE_CACHE": "1", "VLLM_USE_AOT_COMPILE": "0"}
ALONE = SimpleNamespace(is_first_rank=True, is_last_rank=True)


def one_rank() -> Any:
    return ALONE


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": -1, "inputs_embeds": 0})
class Model(qwen2.Qwen2Model):  # type: ignore[misc]
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        torch.nn.Module.__init__(self)
        self.embed_tokens = torch.nn.Embedding(32, WIDTH)
        torch.nn.init.ones_(self.embed_tokens.weight)
        self.layers = torch.nn.ModuleList([LayerStandIn()])
        self.start_layer, self.end_layer, self.norm, self.aux_hidden_state_layers = 0, 1, NormStandIn(), ()


def batch(buffers: Any) -> InputBatch:
    made: InputBatch = InputBatch.make_dummy(num_reqs=1, num_tokens=TOKENS, input_buffers=buffers, device=CPU)
    made.input_ids.fill_(3)
    return made


def hidden_states(mode: CompilationMode) -> torch.Tensor:
    """Profile, then serve a prompt whose embeddings are an image's; return its hidden states, (tokens, width)."""
    config = VllmConfig(
        device_config=DeviceConfig("cpu"),
        compilation_config=CompilationConfig(mode=mode, backend="eager", cudagraph_mode=CUDAGraphMode.NONE),
    )
    runner = object.__new__(model_runner.GPUModelRunner)
    runner.input_buffers = SimpleNamespace(
        **{name: torch.zeros(MOST, dtype=torch.int32) for name in ("input_ids", "positions", "seq_lens")},
        query_start_loc=torch.zeros(MOST + 1, dtype=torch.int32),
    )
    runner.encoder_runner = object.__new__(EncoderRunner)
    runner.encoder_runner.inputs_embeds = torch.zeros(MOST, WIDTH)
    runner.cudagraph_manager = SimpleNamespace(get_cudagraph_size=lambda *_: None)
    runner.kv_connector = mock.MagicMock()
    runner.block_tables = mock.MagicMock()
    runner.parallel_config = config.parallel_config
    runner.vllm_config, runner.device, runner.max_num_reqs = config, CPU, 4
    runner.lora_config, runner.uses_mrope, runner.supports_mm_inputs = None, False, True
    for name in ("finish_requests", "free_states", "add_requests", "update_requests"):
        setattr(runner, name, lambda _: None)
    runner.prepare_inputs = lambda *_: batch(runner.input_buffers)
    image = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    runner.get_mm_embeddings = lambda *_: ([image], torch.ones(TOKENS, dtype=torch.bool))
    step = SimpleNamespace(
        total_num_scheduled_tokens=TOKENS, num_scheduled_tokens={"0": TOKENS}, scheduled_encoder_inputs={}
    )
    with (
        mock.patch.object(qwen2, "get_pp_group", one_rank),
        mock.patch.object(model_runner, "set_forward_context", return_value=nullcontext()),
        set_current_vllm_config(config),
    ):
        model = Model(vllm_config=config)
        runner.model = mock.MagicMock(side_effect=model)
        runner.model.embed_input_ids = lambda ids, multimodal_embeddings, **_: multimodal_embeddings[0]
        runner.execute_model(step, dummy_run=True, skip_attn_for_dummy_run=True)
        runner.execute_model(step)
    states: torch.Tensor = runner.execute_model_state[0]
    return states


def test_the_compiled_model_of_runner_v2_ignores_the_embeddings_of_an_image() -> None:
    """It computes the answer of the placeholders' tokens, whose embeddings are ones here."""
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, NO_CACHE | {"VLLM_CACHE_ROOT": cache}):
        eager = hidden_states(CompilationMode.NONE)
        compiled = hidden_states(CompilationMode.DYNAMO_TRACE_ONCE)
    placeholders = torch.ones(TOKENS, WIDTH)
    assert torch.allclose(compiled, placeholders + torch.tanh(placeholders))
    assert not torch.allclose(eager, compiled)
