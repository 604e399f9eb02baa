"""Engines whose cache blocks are marked, for `kv_marks.py`: each in a process of its own, which prints its result.

python kv_marks_engine.py JSON

A line of JSON every now and then: the last one is the result, however the process ends.
"""

from __future__ import annotations

import asyncio
import gc
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
_ENOUGH = 5
"""Blocks that have changed, after which no more are looked for."""
PLANTED = {"marked": 0, "finished, not marked": 0}
"""Writes of `_plant` to blocks that were followed."""
_PATIENCE = 3.0
"""Seconds between two lines."""


class Result:
    """What is printed: as it is, now and then, and once more at the end."""

    def __init__(self, until: float, stop: str) -> None:
        self._until, self._stop = until, Path(stop)
        self._begun = self._said = time.time()

    def over(self) -> bool:
        return time.time() > self._until or self._stop.exists()

    def seconds(self) -> float:
        return round(time.time() - self._begun, 1)

    def is_due(self) -> bool:
        return time.time() - self._said > _PATIENCE

    def say(self, found: dict[str, Any]) -> None:
        self._said = time.time()
        sys.stdout.write(json.dumps({"load, s": self.seconds()} | found) + "\n")
        sys.stdout.flush()


def silent(llm: Any, result: Result, **_: Any) -> dict[str, Any]:
    """Requests of all lengths that come, go, are aborted and share prefixes."""
    llm.collective_rpc(_hurry)
    chance = random.Random(7)  # noqa: S311 - the same load in every run
    load, engine = Load(llm, chance), llm.llm_engine
    steps = 0
    wanted = _MOST
    while not (steps % 16 == 0 and result.over()):
        if chance.random() < 0.02:
            wanted = chance.randint(1, _MOST)
        while len(load.running) < wanted:
            load.add(chance.randint(1, 120))
        load.step()
        steps += 1
        if load.running and chance.random() < 0.01:
            name = chance.choice(sorted(load.running))
            engine.abort_request([name])
            load.running.discard(name)
        if result.is_due():
            result.say({"steps": steps, "requests": load.made, **said(llm)})
    return {"steps": steps, "requests": load.made, **said(llm)}


def idle(llm: Any, result: Result, planted: bool) -> dict[str, Any]:
    """Bursts of requests with pauses, in which the engine makes the steps of a rank without work.

    As an engine core of a data-parallel rank does while others have work: one after each of its own steps in which
    nothing was executed, as the one that tells the worker who has ended, or with asynchronous scheduling one before it.
    """
    if planted:
        llm.collective_rpc(_plant)
    chance = random.Random(7)  # noqa: S311 - the same load in every run
    load, engine = Load(llm, chance), llm.llm_engine
    core = engine.engine_core.engine_core
    stock = core.step_fn

    def step_fn() -> Any:
        outputs, executed = stock()
        if not executed:
            core.execute_dummy_batch()
        return outputs, executed

    core.step_fn = step_fn
    bursts = 0
    first: dict[str, Any] | None = None
    while not result.over():
        scores = chance.random() < 0.25  # or who wants a class: one token
        for _ in range(chance.randint(1, 8)):
            load.add(1 if scores else chance.randint(1, 40))
        while load.running:
            load.step()
        engine.step()
        for _ in range(chance.randint(1, 12)):
            engine.engine_core.execute_dummy_batch()
        bursts += 1
        changed = _counts(llm).get("changed", 0)
        if changed and first is None:
            first = {"seconds": result.seconds(), "bursts": bursts}
        if changed >= _ENOUGH:
            break
        if result.is_due():
            result.say({"first": first, "bursts": bursts, "requests": load.made, **said(llm)})
    return {"first": first, "bursts": bursts, "requests": load.made, **said(llm)}


class Load:
    """Requests of one engine in this process."""

    def __init__(self, llm: Any, chance: random.Random) -> None:
        self._engine, self._chance = llm.llm_engine, chance
        self._vocabulary = range(1, self._engine.model_config.get_vocab_size())
        self._shared = [chance.choices(self._vocabulary, k=200) for _ in range(4)]
        self.running: set[str] = set()
        self.made = 0

    def add(self, tokens: int) -> None:
        from vllm import SamplingParams

        chance = self._chance
        prompt = chance.choices(self._vocabulary, k=chance.choice((1, 7, 64, 150, 250)))
        if chance.random() < 0.5:
            prompt = chance.choice(self._shared) + prompt
        given = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(f"r{self.made}", {"prompt_token_ids": prompt}, given)
        self.running.add(f"r{self.made}")
        self.made += 1

    def step(self) -> None:
        self.running.difference_update(output.request_id for output in self._engine.step() if output.finished)


ORDER = (True, False, False, True)
"""Windows with marks, and without: what drifts cancels out."""


def cost(llm: Any, result: Result, batch: int, prompt: int, answer: int, every: int, **_: Any) -> dict[str, Any]:
    """Seconds for the same number of requests with marks and without, in `ORDER`, in one engine; and without in all.

    In turns of requests that get their blocks together, all in one step of sixteen, and apart, some in each. What marks
    may spend goes on from one window with marks to the next, as a rest does, and begins with nothing: together they are
    as a long time is.
    """
    from vllm import SamplingParams

    chance = random.Random(3)  # noqa: S311 - the same prompts in every run
    vocabulary = range(1, llm.llm_engine.model_config.get_vocab_size())
    sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
    found: dict[str, Any] = {
        load: {"seconds": {"control": [], "compared": []}, "with marks": dict.fromkeys(_ADDED, 0.0)} for load in _LOADS
    }
    begun_anew = True

    def window(load: str, *, on: bool, counts: bool) -> float:
        nonlocal begun_anew
        marked = found[load]["with marks"]
        llm.collective_rpc(_switch, args=(every if on else None, begun_anew))
        # 7 is prime to 16: those that are marked, every so many, get theirs in different steps, too.
        more = [(number // 16 * 7 + number) % 16 * (load == "apart") for number in range(batch)]
        prompts = [{"prompt_token_ids": chance.choices(vocabulary, k=prompt + each)} for each in more]
        gc.collect()
        begun = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun
        if on and counts:
            begun_anew = False
            known = _counts(llm)
            marked["seconds"] += seconds
            for name, spent in llm.collective_rpc(_spent_by_a_worker)[0].items():
                marked[name] += spent
            for name in _COUNTED:
                marked[name] += known[name]
        return seconds

    gc.disable()
    for load in _LOADS:
        for on in ORDER:
            window(load, on=on, counts=False)
    while not result.over():
        for load in _LOADS:
            for name in ("compared", "control", "compared"):
                found[load]["seconds"][name] += [
                    window(load, on=on and name == "compared", counts=True) for on in ORDER
                ]
                result.say(found)  # a round takes a minute, and the machine may be gone before it ends
    return found


_LOADS = ("together", "apart")
_COUNTED = ("marks", "looks", "passed-over", "rests")
_SPENT = ("of them following", "of them sums", "of them before the worker's own method", "of its steps", "rested")
_ADDED = ("seconds", *_SPENT, *_COUNTED)


def _hurry(_: Any) -> None:
    """What marks may cost is not what is asked."""
    watch = _marks()._watch
    if watch is not None:
        watch._for_marks.share = watch._for_looks.share = 1.0


CREDIT: list[float] = []
"""Seconds that marks, looks and following had left, or owed, at the end of the last window with marks."""
RESTS: list[bool] = [False]
"""Whether that was in a rest."""


class Outside:
    """The worker's steps, timed by somebody else: from the call of its method to that of the class's own."""

    seconds, steps, rested = 0.0, 0, 0
    _began: float | None = None

    @classmethod
    def watch(cls, worker: Any) -> None:
        """Begins anew, around the wrapper of *worker*."""
        cls.seconds, cls.steps, cls.rested, cls._began = 0.0, 0, 0, None
        ours = worker.execute_model
        kind: Any = next(each for each in type(worker).__mro__ if "execute_model" in vars(each))

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            cls.rested += _marks()._watch._rests
            cls._began = time.perf_counter()
            return ours(*args, **kwargs)

        worker.execute_model = execute_model
        if not hasattr(kind.execute_model, "timed"):
            stock = kind.execute_model

            def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
                if cls._began is not None:
                    cls.seconds += time.perf_counter() - cls._began
                    cls.steps += 1
                    cls._began = None
                return stock(self, *args, **kwargs)

            timed.timed = True  # type: ignore[attr-defined]
            kind.execute_model = timed


def _switch(worker: Any, every: int | None, anew: bool) -> None:
    """Marks one of *every* requests' blocks of *worker* from here on; none with None.

    What was spent stays spent, unless *anew*.
    """
    marks = _marks()
    worker = getattr(worker, "worker", worker)
    if anew:
        CREDIT[:], RESTS[:] = (0.0, 0.0, 0.0), (False,)
    elif marks._watch._ledger is not None:
        for budget in _budgets():
            budget.allows()  # has it earn for the window that is over
        CREDIT[:] = (budget._credit for budget in _budgets())
        RESTS[:] = (marks._watch._rests,)
    marks.begin(every)
    marks.serve(worker)
    if every is not None:
        for budget, credit in zip(_budgets(), CREDIT, strict=True):
            budget.allows()
            budget._credit = credit
        marks._watch._rests = RESTS[0]
        Outside.watch(worker)


def _budgets() -> tuple[Any, Any, Any]:
    watch = _marks()._watch
    return watch._for_marks, watch._for_looks, watch._for_following


def _spent_by_a_worker(_: Any) -> dict[str, float]:
    """Seconds of the host in this window, and the steps that they are of."""
    sums = sum(budget.spent for budget in _budgets()[:2])
    following = _marks()._watch.seconds() - sums
    return dict(zip(_SPENT, (following, sums, Outside.seconds, Outside.steps, Outside.rested), strict=True))


def _plant(worker: Any) -> None:
    """Has a step without work write to the slot that the last step's first token was written to, as 0.18.1's does."""
    kind = type(getattr(worker, "worker", worker))
    stock = kind.execute_dummy_batch

    def execute_dummy_batch(self: Any) -> Any:
        tables = self.model_runner.input_batch.block_table.block_tables
        slots = [int(table.slot_mapping.gpu[0]) for table in tables]
        told, ledger = stock(self), _marks()._watch._ledger
        for number, group in _marks()._watch._groups.items():
            block = slots[number] // group.tokens
            if slots[number] <= 0:
                continue
            for layer in group.caches:
                written = layer.memory.select(layer.axis, block * layer.parts).view(-1)[:1]
                fresh = int(written) != 1
                written.fill_(1)  # always the same, as an idle step's
            PLANTED["marked"] += fresh and block in ledger.marked
            PLANTED["finished, not marked"] += fresh and block in ledger.finished
        return told

    kind.execute_dummy_batch = execute_dummy_batch


def _marks() -> Any:
    import vllm_graphfix

    return vllm_graphfix._this_process().component("kv-marks").marks


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
        "planted": PLANTED,
        "state": f"{state.state.value}: {state.reason}",
        "found": [each._asdict() for each in _marks().overwritten()],
    }


async def ranks(arguments: dict[str, Any], result: Result, **_: Any) -> dict[str, Any]:
    """Two data-parallel ranks: one always has requests, more or fewer; the other has bursts of them with pauses.

    What ranks in other processes say is in their records.
    """
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    known = {name: value for name, value in arguments.items() if name in AsyncEngineArgs.__dataclass_fields__}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**known))
    chance, made, bursts = random.Random(5), 0, 0  # noqa: S311 - the same prompts in every run
    shared = [chance.choices(range(1, 1000), k=200) for _ in range(4)]
    result._begun = time.time()
    first: dict[str, Any] | None = None
    ended = False

    async def ask(rank: int, tokens: int) -> None:
        nonlocal made
        made += 1
        prompt = chance.choices(range(1, 1000), k=chance.choice((1, 7, 64, 150, 250, 500)))
        if chance.random() < 0.5:
            prompt = chance.choice(shared) + prompt
        given: Any = {"prompt_token_ids": prompt}
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        async for _ in engine.generate(given, sampling, f"r{made}", data_parallel_rank=rank):
            pass

    async def busy(place: int) -> None:
        while not ended:
            await ask(0, chance.randint(20, 200))
            if place:  # more or fewer of them
                await asyncio.sleep(chance.random() * place / 4)

    async def now_and_then() -> None:
        nonlocal bursts
        while not ended:
            scores = chance.random() < 0.25
            wanted = [1 if scores else chance.randint(1, 40) for _ in range(chance.randint(1, 8))]
            await asyncio.gather(*(ask(1, tokens) for tokens in wanted))
            bursts += 1
            await asyncio.sleep(chance.uniform(0.05, 0.3))  # nothing to do meanwhile

    def found() -> dict[str, Any]:
        return {"first": first, "bursts": bursts, "requests": made, "ranks": _recorded()}

    tasks = [asyncio.create_task(each) for each in (*map(busy, range(12)), now_and_then())]
    try:
        while not result.over():
            await asyncio.sleep(0.5)
            for task in tasks:
                if task.done():
                    task.result()
            changed = sum(each["changed"] for each in _recorded())
            if changed and first is None:
                first = {"seconds": result.seconds(), "bursts": bursts}
            if changed >= _ENOUGH:
                break
            if result.is_due():
                result.say(found())
        result.say(found())
        ended = True
        await asyncio.wait(tasks, timeout=10)
        await asyncio.sleep(11)  # a heartbeat, which renews the counts
        return found()
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
            "idle-rank": record.events.get("idle-rank", {}),
            "found": [each._asdict() for each in record.overwritten],
        }
        for record in found
        if record.rank is not None
    ]


def main(order: dict[str, Any]) -> None:
    part = order["part"]
    result = Result(order["until"], order["stop"])
    if part == "ranks":
        result.say(asyncio.run(ranks(order["arguments"], result)) | {"ended": True})
        return
    import vllm_graphfix

    vllm_graphfix.register()  # where it lies on the path only, there is no entry point to find it by
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    llm = LLM(**{name: value for name, value in order["arguments"].items() if name in EngineArgs.__dataclass_fields__})
    result._begun = time.time()
    result.say(PARTS[part](llm, result, **order["more"]) | {"ended": True})


PARTS: dict[str, Callable[..., dict[str, Any]]] = {"silent": silent, "idle": idle, "cost": cost}

if __name__ == "__main__":
    here = os.path.realpath(os.path.dirname(__file__))  # noqa: PTH120 - as in engine_worker.py
    # An engine must not find this folder.
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) != here]
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # what an engine does at its end is not asked, and may hang
