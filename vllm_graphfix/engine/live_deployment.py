"""The deployment of the engine that runs in this process, in the form in which fixes state their conditions."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from vllm_graphfix.log import logger


def concerns(fix: str, worker: Any) -> bool:
    """Tell if the engine of *worker* may have the defect of *fix*; True where that is not known.

    It reads vLLM's source, and is meant for a moment at which something is wrong anyway.
    """
    try:
        from vllm_graphfix import manifest
        from vllm_graphfix.deployment import Concern, read_deployment
        from vllm_graphfix.deployment.needs import judge
        from vllm_graphfix.fixes import BY_NAME, flags
        from vllm_graphfix.source.files import open_source

        source, config, one = open_source(), worker.vllm_config, BY_NAME[fix]
        as_file = config.model_config.hf_config.to_json_string().encode()
        environment = {"VLLM_USE_V2_MODEL_RUNNER": str(int(type(worker.model_runner).__module__.endswith(_V2)))}

        def read(path: Path, most: int) -> bytes | None:
            return as_file[:most] if path.name == "config.json" else None

        deployment = read_deployment(line_of(config, flags()), source, _gpu(), environment, flags(), read)
        answer = judge(one.needs(), deployment, manifest.diagnose(one, source).shape)
    except Exception as error:
        logger.debug("graphfix: conditions of %s are not known", fix, exc_info=error)
        return True
    return answer.concern is not Concern.DOES_NOT


_V2 = ".gpu.model_runner"
_SIZES = ("--tensor-parallel-size", "--data-parallel-size", "--decode-context-parallel-size", "--block-size")
_SWITCHES = ("--enable-expert-parallel",)
_OF_DRAFTS = ("method", "num_speculative_tokens", "enable_adaptive_verification")


def line_of(config: Any, flags: Collection[str]) -> str:
    """Return a command line with the values of *config*, a `VllmConfig`, for what facts read and for *flags*."""
    parts = [part for part in vars(config).values() if hasattr(part, "__dict__")]

    def value_of(flag: str) -> Any:
        name = flag.strip("-=").replace("-", "_")
        return next((vars(part)[name] for part in parts if name in vars(part)), None)

    speculative, attention = (getattr(config, f"{name}_config", None) for name in ("speculative", "attention"))
    values = {flag: value_of(flag) for flag in (*_SIZES, *(flag for flag in flags if flag.endswith("=")))} | {
        "--kv-cache-dtype": config.cache_config.cache_dtype,
        "--compilation-config": json.dumps({"cudagraph_mode": config.compilation_config.cudagraph_mode.name}),
        "--attention-backend": getattr(getattr(attention, "backend", None), "name", None),
        "--speculative-config": speculative
        and json.dumps({name: vars(speculative)[name] for name in _OF_DRAFTS if name in vars(speculative)}),
    }
    switches = {flag: value_of(flag) for flag in (*_SWITCHES, *(flag for flag in flags if not flag.endswith("=")))}
    switches["--enable-lora"] = getattr(config, "lora_config", None)
    line = [config.model_config.model, *(flag for flag, on in switches.items() if on)]
    return shlex.join([*line, *(f"{flag.strip('=')}={value}" for flag, value in values.items() if value is not None)])


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
