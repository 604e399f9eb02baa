"""A planted corruption: a vLLM plugin that makes an engine's answers wrong, for tests of what has to find that.

It stands in for a defect of CUDA graphs that hits batches of one size, which no engine on a CPU has: wherever `ROWS`
requests are decoded together, the logits of each token are its neighbour's. Where it is on its path, vLLM loads it as
any plugin, by an entry point. The engine must be in one process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from vllm_graphfix.verify.engine.job import GRAPHS, Job

ROWS, PADDED_ROWS = 3, 4
VARIABLE = "PLANTED_CORRUPTION"
"""Modes of the engines to be hit, with commas."""
ROUNDING = "PLANTED_ROUNDING"
"""If set, a batch of `PADDED_ROWS` gives other tokens in every engine, and one of `ROWS` is padded to it by graphs."""


def plant() -> None:
    jobs = list(_running_jobs())
    hit = os.environ.get(VARIABLE, GRAPHS).split(",")
    rows = {ROWS} if any(job.mode in hit for job in jobs) else set()
    if jobs and ROUNDING in os.environ:
        rows.add(PADDED_ROWS)
    if not rows:  # no job: vLLM looks at the model in a process of its own
        return
    if PADDED_ROWS in rows:
        _name_sizes()
    from vllm.model_executor.models.llama import LlamaForCausalLM

    stock = LlamaForCausalLM.compute_logits

    def corrupted(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        logits = stock(self, hidden_states, *args, **kwargs)
        return logits.roll(1, dims=-1) if len(logits) in rows else logits

    LlamaForCausalLM.compute_logits = corrupted


def _running_jobs() -> Iterator[Job]:
    """Yield the job of this process from the frames in which it runs, as a forked engine has no command line."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if isinstance(job := frame.f_locals.get("job"), Job):
            yield job
        frame = frame.f_back


def _name_sizes() -> None:
    """Name sizes of graphs in the engine's configuration, from which vLLM removes them on a CPU."""
    from vllm import LLM

    stock = LLM.generate

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.llm_engine.vllm_config.compilation_config.cudagraph_capture_sizes = [1, 2, PADDED_ROWS]
        return stock(self, *args, **kwargs)

    LLM.generate = generate


class WorkerExtension:
    """A worker extension as users have their own."""
