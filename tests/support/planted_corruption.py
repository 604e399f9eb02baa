"""A planted corruption: a vLLM plugin that makes an engine's answers wrong, for tests of what has to find that.

It stands in for a defect of CUDA graphs that hits batches of one size, which no engine on a CPU has: wherever `ROWS`
requests are decoded together, the logits of each token are its neighbour's. Where it is on its path, vLLM loads it as
any plugin, by an entry point. The engine must be in one process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROWS = 3
VARIABLE = "PLANTED_CORRUPTION"
"""Modes of the engines to be hit, with commas."""


def plant() -> None:
    from vllm_graphfix.verify.engine.job import Job

    jobs = [Job.read(Path(argument)) for argument in sys.orig_argv if argument.endswith(".job")]
    hit = os.environ[VARIABLE].split(",")
    if not any(job.mode in hit for job in jobs):  # no job: vLLM looks at the model in a process of its own
        return
    from vllm.model_executor.models.llama import LlamaForCausalLM

    stock = LlamaForCausalLM.compute_logits

    def corrupted(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        logits = stock(self, hidden_states, *args, **kwargs)
        return logits.roll(1, dims=-1) if len(logits) == ROWS else logits

    LlamaForCausalLM.compute_logits = corrupted


class WorkerExtension:
    """A worker extension as users have their own."""
