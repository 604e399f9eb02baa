"""The double of an engine (`engine_double`) with a command line, for tests of `compare`.

It makes of vLLM's flags what vLLM does.

``ENGINE_DOUBLE_EAGER``, ``ENGINE_DOUBLE_GRAPHS`` and ``ENGINE_DOUBLE_COMPILED`` say what the engine does in each mode.
"""

from __future__ import annotations

from pathlib import Path

import engine_double

MODES = ("EAGER", "GRAPHS", "COMPILED")


def install(folder: Path) -> Path:
    """Makes ``vllm`` and ``torch`` of *folder* doubles, and returns it: a folder for the Python path."""
    engine_double.install(folder)
    (folder / "vllm" / "__init__.py").rename(folder / "vllm" / "double.py")
    for module, source in MODULES.items():
        path = folder / "vllm" / module
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    return folder


ENGINE = """
import os
from types import SimpleNamespace
from vllm import double
from vllm.double import SamplingParams, __version__, current_platform

class LLM(double.LLM):
    def __init__(self, *, compilation_config, enforce_eager, **rest):
        mode = "EAGER" if enforce_eager else "GRAPHS" if compilation_config.cudagraph_mode else "COMPILED"
        os.environ["ENGINE_DOUBLE_EAGER"] = os.environ["ENGINE_DOUBLE_PATCHED"] = os.environ.get("ENGINE_DOUBLE_" + mode, "answers")
        config = SimpleNamespace(max_model_len=512, get_vocab_size=lambda: 64)
        self.llm_engine = SimpleNamespace(model_config=config)
        self.mode = compilation_config.cudagraph_mode
        self.passes_without_a_cache = 1
        super().__init__(enforce_eager=enforce_eager, **rest)

    def generate(self, *arguments, **rest):
        assert self.calls < self.passes_without_a_cache, "what was kept of the first pass hides the noise of the second"
        return super().generate(*arguments, **rest)

    def reset_prefix_cache(self):
        self.passes_without_a_cache += 1

    def collective_rpc(self, method):
        return [self.mode.name] if method == "graphfix_cudagraph_mode" else super().collective_rpc(method)
"""  # noqa: E501
CONFIG = """
from enum import Enum

class CUDAGraphMode(Enum):
    NONE = 0
    FULL = 2

    def __bool__(self):
        return self is not CUDAGraphMode.NONE
"""
ARGUMENTS = """
from dataclasses import dataclass, fields
from types import SimpleNamespace
from vllm.config import CUDAGraphMode

@dataclass
class EngineArgs:
    model: str
    compilation_config: object
    enforce_eager: bool = False
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    disable_log_stats: bool = False
    worker_extension_cls: str = ""

    @classmethod
    def from_cli_args(cls, given):
        return cls(given.model, SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL))

class AsyncEngineArgs(EngineArgs):
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model")
        return parser
"""
PARSER = "from argparse import ArgumentParser as FlexibleArgumentParser\n"
MODULES = {
    "__init__.py": ENGINE,
    "config.py": CONFIG,
    "engine/__init__.py": "",
    "engine/arg_utils.py": ARGUMENTS,
    "utils/__init__.py": "",
    "utils/argparse_utils.py": PARSER,
}
