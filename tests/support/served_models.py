"""Models to ask `status --for` about: models to serve, by name in a folder, and flags and GPUs that come up again."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from edited import stock_source
from stock import release_root
from vllm_graphfix.commands.status import status
from vllm_graphfix.deployment import Concern, hardware, read_deployment
from vllm_graphfix.deployment import flags as flags_of_lines
from vllm_graphfix.deployment.known_flags import flags_of
from vllm_graphfix.fixes import flags

MODELS: Mapping[str, Mapping[str, Any]] = {
    "v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "kv_lora_rank": 512,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "v32": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "kv_lora_rank": 512,
        "index_topk": 2048,
    },
    "v4": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "compress_ratios": [4],
        "head_dim": 512,
    },
    "kimi-vl": {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "text_config": {"model_type": "deepseek_v3", "kv_lora_rank": 512},
    },
    "v2-by-default": {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 8},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mamba2": {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "conv_kernel": 4},
    "qwen3-next": {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "linear_conv_kernel_dim": 4},
    "new-hybrid": {"architectures": ["NobodyKnowsForCausalLM"], "model_type": "nobody", "mamba_d_state": 16},
    "modelopt": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "kv_lora_rank": 512,
        "quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
    },
    "speculators": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "speculators_config": {"verifier": {}},
    },
    "nameless": {"model_type": "llama"},
}
V2 = "VLLM_USE_V2_MODEL_RUNNER=1 "
MTP = """ --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'"""
EAGLE = """ --speculative-config '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 3}'"""
HOPPER, AMPERE, BLACKWELL = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA B200"


_flags_of = functools.cache(flags_of)


@pytest.fixture(scope="session")
def served_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def among_models(served_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are named by `./name`, and this machine has no GPU. The flags of a release are read once."""
    monkeypatch.setattr(flags_of_lines, "flags_of", _flags_of)
    monkeypatch.chdir(served_models)
    monkeypatch.setattr(hardware, "gpus", lambda: ())


def answer(release: str, fix: str, line: str, gpu: str | None = None) -> tuple[Concern, str]:
    source = stock_source(release_root(release))
    result = status(source, {}, read_deployment(line, source, gpu, {}, flags()))
    (assessment,) = [row.answer for row in result.rows if row.fix.name == fix]
    assert assessment is not None
    return assessment.concern, assessment.reason
