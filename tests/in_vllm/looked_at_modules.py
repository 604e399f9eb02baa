"""Drafts of several MTP modules: torch.compile keeps the module of the first draft token for all.

Real: DeepSeek's `forward` and the choice of the module in it, and vLLM's way of compiling it, which traces it once
and drops its guards. Stand-ins: the modules, each of which multiplies by a number of its own.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any
from unittest import mock

import torch
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.model_executor.models import deepseek_mtp

TOKENS, WIDTH = 6, 4


class Module(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, ids: Any, positions: Any, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
        return hidden_states * self.factor


class Modules(deepseek_mtp.DeepSeekMultiTokenPredictor):  # type: ignore[misc]
    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.mtp_start_layer_idx, self.num_mtp_layers = 0, 2
        self.layers = torch.nn.ModuleDict({"0": Module(2.0), "1": Module(3.0)})


@support_torch_compile
class Draft(deepseek_mtp.DeepSeekMTP):  # type: ignore[misc]
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        torch.nn.Module.__init__(self)
        self.model = Modules()


def factors(mode: CompilationMode) -> list[float]:
    """The factor of the module that each of four draft steps has run."""
    config = VllmConfig(
        device_config=DeviceConfig("cpu"),
        compilation_config=CompilationConfig(mode=mode, backend="eager", cudagraph_mode=CUDAGraphMode.NONE),
    )
    ones = torch.ones(TOKENS, WIDTH)
    inputs = {"input_ids": torch.zeros(TOKENS, dtype=torch.long), "positions": torch.arange(TOKENS)}
    with set_current_vllm_config(config), torch.inference_mode():
        draft = Draft(vllm_config=config)
        steps = [draft(**inputs, hidden_states=ones, inputs_embeds=ones, spec_step_idx=step) for step in (0, 1, 0, 1)]
    return [states[0, 0].item() for states in steps]


def test_compiled_each_draft_token_is_of_the_first_module() -> None:
    cache = {"VLLM_DISABLE_COMPILE_CACHE": "1", "VLLM_USE_AOT_COMPILE": "0"}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, cache | {"VLLM_CACHE_ROOT": folder}):
        assert factors(CompilationMode.NONE) == [2.0, 3.0, 2.0, 3.0]
        assert factors(CompilationMode.DYNAMO_TRACE_ONCE) == [2.0, 2.0, 2.0, 2.0]
