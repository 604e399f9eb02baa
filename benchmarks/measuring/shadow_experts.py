"""One engine of two data-parallel ranks that share experts, in a process of its own, under the load of many users.

    python shadow_experts.py DESCRIPTOR

As `shadow_load.py`, but for what is asked: each ``{"seconds": …, "seed": …}`` is answered with what `_load` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import random
import time
from typing import Any

_RANKS = 2
_MOST = 6
"""Requests of a rank at a time, at most."""
_ABORT = 0.05
"""The share of the requests that are aborted."""


def serve(parent: Any, order: dict[str, Any]) -> None:
    asyncio.run(_serve(parent, order))


async def _serve(parent: Any, order: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from measuring.data_parallel import started

    arguments = dict(order["arguments"])
    arguments |= {
        name: value for name, value in order["where_known"].items() if name in AsyncEngineArgs.__dataclass_fields__
    }
    engine = started(arguments)
    try:
        parent.send(time.monotonic())  # one clock for all processes of a machine
        parent.send({})
        while True:
            parent.send(await _load(engine, **parent.recv()))
    finally:
        engine.shutdown()


async def _load(engine: Any, seconds: float, seed: int) -> dict[str, Any]:
    """Requests of all lengths that come, go and are aborted, on each rank as it happens: now and then it has none."""
    from measuring.data_parallel import on_all_ranks

    begun = time.monotonic()
    counted = {"requests": 0, "aborted": 0, "pauses": 0}

    async def users_of(rank: int) -> None:
        chance = random.Random(100 * seed + rank)  # noqa: S311 - the same load in every run
        while time.monotonic() - begun < seconds:
            if chance.random() < 0.2:
                counted["pauses"] += 1
                await asyncio.sleep(chance.random() / 2)
            few = [_ask(engine, chance, rank, counted) for _ in range(chance.randint(1, _MOST))]
            await asyncio.gather(*few)

    await asyncio.gather(*map(users_of, range(_RANKS)))
    taken = time.monotonic() - begun
    ranks = await on_all_ranks(engine, _found_by_a_worker, taken)
    return {"seconds": round(taken, 1), **counted, "ranks": ranks}


async def _ask(engine: Any, chance: random.Random, rank: int, counted: dict[str, int]) -> None:
    from measuring.data_parallel import tokens_of
    from measuring.shadow_load import sampling

    counted["requests"] += 1
    prompt = chance.choices(range(1, 1000), k=chance.choice((1, 2, 7, 64, 250, 500, 500, 700)))
    asked = tokens_of(engine, f"{rank}-{counted['requests']}", prompt, rank, sampling(chance))
    if chance.random() < _ABORT:
        counted["aborted"] += 1
        with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(asked, chance.random() / 10)
    else:
        await asked


def _found_by_a_worker(worker: Any, taken: float) -> dict[str, Any]:
    import vllm_graphfix
    from measuring.shadow_load import found_here

    found = found_here(taken)
    if found:
        state = vllm_graphfix.states()["shadow"]
        found["state"] = f"{state.state.value}: {state.reason}"
    return {"rank": worker.vllm_config.parallel_config.data_parallel_rank, **found}


if __name__ == "__main__":
    importlib.import_module("asked_engine").begin(serve, above=True)
