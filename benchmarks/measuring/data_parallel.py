"""An engine of several data-parallel ranks, asked from one process: each request says which rank has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any


def started(arguments: dict[str, Any]) -> Any:
    """vLLM's `AsyncLLM`; to be called where an event loop runs."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


async def on_all_ranks(engine: Any, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What *function* returns on every worker of every rank: its arguments are the worker and *args*.

    The engine's own way has the answers of the first rank alone.
    """
    core = engine.engine_core
    answers: Iterable[list[Any]] = await asyncio.gather(
        *(
            core._call_utility_async("collective_rpc", function, None, args, None, engine=each)
            for each in core.core_engines
        )
    )
    return [answer for of_rank in answers for answer in of_rank]


async def tokens_of(engine: Any, name: str, prompt: list[int], rank: int, sampling: Any) -> list[int]:
    """The answer of *rank* to *prompt*."""
    last = None
    async for output in engine.generate({"prompt_token_ids": prompt}, sampling, name, data_parallel_rank=rank):
        last = output
    return list(last.outputs[0].token_ids) if last is not None else []
