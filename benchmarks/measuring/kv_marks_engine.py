"""Engines whose cache blocks are marked, for `kv_marks.py`: each in a process of its own, which prints its result.

python kv_marks_engine.py JSON
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MOST = 24
"""Requests at a time, at most; more than an engine takes, so that some wait."""
_IDLE_AFTER = 16
"""Steps after which a rank without work makes one."""


def silent(llm: Any, seconds: float, marks: int, **_: Any) -> dict[str, Any]:
    """Requests of all lengths that come, go and share prefixes, until so many blocks were marked."""
    llm.collective_rpc(_hurry)
    return _load(llm, seconds, lambda: _counts(llm).get("marks", 0) >= marks, idle=False)


def idle(llm: Any, seconds: float, **_: Any) -> dict[str, Any]:
    """The same with steps of a rank without work in between, until a block has changed."""
    return _load(llm, seconds, lambda: _counts(llm).get("changed", 0) > 0, idle=True)


def cost(llm: Any, rounds: int, batch: int, prompt: int, answer: int, every: int, **_: Any) -> dict[str, Any]:
    """Seconds for a batch of requests, without marks and with them in turns, in one engine."""
    from vllm import SamplingParams

    chance = random.Random(3)  # noqa: S311 - the same prompts in every run
    vocabulary = range(1, llm.llm_engine.model_config.get_vocab_size())
    sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
    taken: dict[str, list[float]] = {"off": [], "off again": [], "on": []}
    counted: dict[str, int] = {}
    for number in range(-1, rounds):  # the first does not count
        for mode in list(taken) if number % 2 else list(taken)[::-1]:
            llm.collective_rpc(_switch, args=(every if mode == "on" else None,))
            prompts = [{"prompt_token_ids": chance.choices(vocabulary, k=prompt)} for _ in range(batch)]
            begun = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - begun
            taken[mode] += [seconds] if number >= 0 else []
            if mode == "on":
                counted = _counts(llm)
    return {"seconds": taken, "counts of the last": counted}


def _hurry(_: Any) -> None:
    """What marks may cost is not what is asked."""
    import vllm_graphfix.marks.watch

    vllm_graphfix.marks.watch.SHARE = 1.0


def _switch(worker: Any, every: int | None) -> None:
    """Marks one of *every* blocks of *worker* from here on; none with None."""
    marks = _marks()
    marks.begin(every)
    marks.serve(worker)


def _load(llm: Any, seconds: float, enough: Any, *, idle: bool) -> dict[str, Any]:
    from vllm import SamplingParams

    chance = random.Random(7)  # noqa: S311 - the same load in every run
    engine = llm.llm_engine
    vocabulary = range(1, engine.model_config.get_vocab_size())
    shared = [chance.choices(vocabulary, k=200) for _ in range(4)]
    running: set[str] = set()
    begun, made, steps, wanted = time.monotonic(), 0, 0, _MOST
    while time.monotonic() - begun < seconds and not (steps % 8 == 0 and enough()):
        if chance.random() < 0.02:
            wanted = chance.randint(1, _MOST)
        while len(running) < wanted:
            prompt = chance.choices(vocabulary, k=chance.choice((1, 7, 64, 150, 250)))
            if chance.random() < 0.5:
                prompt = chance.choice(shared) + prompt
            tokens = chance.randint(1, 120)
            given = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            engine.add_request(f"r{made}", {"prompt_token_ids": prompt}, given)
            running.add(f"r{made}")
            made += 1
        running.difference_update(output.request_id for output in engine.step() if output.finished)
        steps += 1
        if running and chance.random() < 0.01:
            name = chance.choice(sorted(running))
            engine.abort_request([name])
            running.discard(name)
        if idle and steps % _IDLE_AFTER == 0:
            for _ in range(3):
                engine.engine_core.execute_dummy_batch()
    taken = time.monotonic() - begun
    return {"seconds": round(taken, 1), "steps": steps, "requests": made, **said(llm)}


def _marks() -> Any:
    import vllm_graphfix

    return vllm_graphfix._this_process().marks


def _counts(llm: Any) -> dict[str, int]:
    found: dict[str, int] = llm.collective_rpc(_counts_of_a_worker)[0]
    return found


def _counts_of_a_worker(_: Any) -> dict[str, int]:
    return dict(_marks().counts().get("kv-marks", {}))


def said(llm: Any) -> dict[str, Any]:
    found: dict[str, Any] = llm.collective_rpc(_said_by_a_worker)[0]
    return found


def _said_by_a_worker(_: Any) -> dict[str, Any]:
    state = _marks().states()["kv-marks"]
    return {
        "counts": _counts_of_a_worker(_),
        "state": f"{state.state.value}: {state.reason}",
        "found": [each._asdict() for each in _marks().overwritten()],
    }


async def ranks(arguments: dict[str, Any], seconds: float, **_: Any) -> dict[str, Any]:
    """Two data-parallel ranks: one decodes all the time, the other has bursts of requests with pauses.

    Until a record tells of a block that has changed; the records have what ranks in other processes say.
    """
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    known = {name: value for name, value in arguments.items() if hasattr(AsyncEngineArgs, name)}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**known))
    chance, number = random.Random(5), 0  # noqa: S311 - the same prompts in every run
    begun, first = time.monotonic(), None

    async def ask(prompt: list[int], rank: int, tokens: int) -> None:
        nonlocal number
        number += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        async for _ in engine.generate({"prompt_token_ids": prompt}, sampling, str(number), data_parallel_rank=rank):
            pass

    def prompt(length: int) -> list[int]:
        return chance.choices(range(1, 1000), k=length)

    try:
        while time.monotonic() - begun < seconds and first is None:
            busy = asyncio.create_task(ask(prompt(30), 0, 200))
            # The last token that is computed fills a block; with drafts, an idle step also writes where the last
            # prompt was.
            tokens = chance.choice((1, 5))
            await asyncio.gather(*(ask(prompt(chance.choice((28, 60, 92))), 1, tokens) for _ in range(4)))
            await busy  # the other rank has nothing to do meanwhile
            if any(each["changed"] for each in _recorded()):
                first = round(time.monotonic() - begun, 1)
        await asyncio.sleep(11)  # a heartbeat, which renews the counts
        return {"seconds": first, "load": round(time.monotonic() - begun, 1), "requests": number, "ranks": _recorded()}
    finally:
        engine.shutdown()


def _recorded() -> list[dict[str, Any]]:
    """What each rank's record has of its marks."""
    from vllm_graphfix import records

    found = [each.record for each in records.read(Path(os.environ["VLLM_GRAPHFIX_STATUS_DIR"]), own=True).found]
    return [
        {
            "rank": record.rank.data_parallel_rank,
            "state": record.fixes["kv-marks"].state if "kv-marks" in record.fixes else None,
            "changed": record.events.get("kv-marks", {}).get("changed", 0),
            "counts": record.events.get("kv-marks", {}),
            "found": [each._asdict() for each in record.overwritten],
        }
        for record in found
        if record.rank is not None
    ]


def main(order: dict[str, Any]) -> None:
    part = order["part"]
    if part == "ranks":
        found = asyncio.run(ranks(**order))
    else:
        import vllm_graphfix

        vllm_graphfix.register()  # where it lies on the path only, there is no entry point to find it by
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs

        llm = LLM(
            **{name: value for name, value in order["arguments"].items() if name in EngineArgs.__dataclass_fields__}
        )
        found = PARTS[part](llm, **order)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


PARTS: dict[str, Callable[..., dict[str, Any]]] = {"silent": silent, "idle": idle, "cost": cost}

if __name__ == "__main__":
    here = os.path.realpath(os.path.dirname(__file__))  # noqa: PTH120 - as in engine_worker.py
    # An engine must not find this folder.
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) != here]
    main(json.loads(sys.argv[1]))
