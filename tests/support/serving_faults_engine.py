"""A real engine with two ranks that serves while functions of the plugin fail: what came of each fault, as JSON lines.

    python serving_faults_engine.py MODEL

It prints its places first, then reads faults from its input, one JSON list a line: ``[process, place, error, times]``,
*process* ``scheduler`` or a rank, *times* 1 or null for always. Real are the engine with its scheduler, its two workers
in processes of their own (tensor parallel, gloo), and the plugin. A stand-in are graphs, which a CPU has not: those of
`aborted_engine.py`. In each fault's batch of three, the fifth replay has one wrong row.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import multiprocessing
import pkgutil
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest

import aborted_engine
import marked_engine
import statements

WRONG, STOCK = "1", "stock"
"""The rows that are wrong in one replay, as `aborted_engine` has it; the same in an engine that checks nothing."""
TOKENS, MORE_TOKENS = 8, 16
"""Of an answer; marks are looked at every few steps."""
WATCHED = ("shadow", "abort", "kv-marks")
PARTS = ("shadow", "marks", "records", "engine")
OF_ENGINE = (
    "abort",
    "abort_channel",
    "addresses",
    "ended_requests",
    "metrics",
    "rank_addresses",
    "status_record",
    "steps",
    "verdict",
)
"""The modules of the plugin's `engine` that run while it serves."""
ERRORS: dict[str, Callable[[], Exception]] = {
    "OSError": lambda: OSError(5, "Input/output error"),
    "MemoryError": lambda: MemoryError("no memory"),
    "RuntimeError": lambda: RuntimeError("a fault"),
}
BEAT = 0.05
"""Seconds between two heartbeats."""


class Faults:
    """The fault of this process, and what was seen of it."""

    seen: set[str] | None = None
    place: str | None = None
    error = ""
    remaining = 0
    fired = 0
    log: ClassVar[list[tuple[int, str]]] = []


def before(part: str, module: str, line: int) -> None:
    """Called before each statement of the plugin; raises the fault of this process at its place."""
    if Faults.seen is not None:
        Faults.seen.add(f"{part}/{module}.py:{line}")
    if Faults.place is not None and Faults.remaining and Faults.place == f"{part}/{module}.py:{line}":
        Faults.remaining -= 1
        Faults.fired += 1
        raise ERRORS[Faults.error]()  # noqa: RSE102 - a call


class Log(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        Faults.log.append((record.levelno, record.getMessage()))


def install() -> None:
    """Before the engine starts: what is nested in a function is made with the code that it has then."""
    from vllm_graphfix.records.reporter import Reporter

    patch = pytest.MonkeyPatch()
    for part in PARTS:
        package = importlib.import_module(f"vllm_graphfix.{part}")
        names = OF_ENGINE if part == "engine" else [each.name for each in pkgutil.iter_modules(package.__path__)]
        modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
        statements.call_before_each_statement(patch, modules, partial(before, part))
    Reporter.keep.__defaults__ = (BEAT,)


# -- in each process ---------------------------------------------------------------------------------------------------


def plugin() -> Any:
    import vllm_graphfix

    return vllm_graphfix._engine_process()


def arm(worker: Any, place: str | None = None, error: str = "", times: int | None = None) -> None:
    """Lets *place* fail from now on, so many *times* or always; without one, writes down what is called."""
    Faults.place, Faults.error, Faults.remaining, Faults.fired = place, error, times or sys.maxsize, 0
    Faults.seen = set() if place is None else None


def arm_rank(worker: Any, rank: int, *fault: Any) -> None:
    if worker.rank == rank:
        arm(worker, *fault)


def disarm(worker: Any = None) -> None:
    Faults.place = None


def beat() -> None:
    """Begins heartbeats anew where they have ended."""
    record = plugin().status_record
    reporter = record._reporter_here()
    if not (reporter._keeper is not None and reporter._keeper.is_alive()):
        record._reporter, record._has_heartbeat = None, False
        record.start_heartbeat()
    record._reporter_here()._warned = False


def overwrite(worker: Any) -> None:
    """One bit of a finished block on rank 0, where one is marked there."""
    ledger = plugin().component("kv-marks").marks._monitor._tracker
    if worker.rank == 0 and ledger is not None and any(block.place == 0 for block in ledger.marked.values()):
        marked_engine.overwrite_finished(worker, 0)


def begin_rank(worker: Any, wrong: str) -> None:
    """As if the engine had just started on this rank, with all that watches it."""
    from vllm_graphfix.marks import checks, watch
    from vllm_graphfix.shadow import process as shadow

    process, runner = plugin(), worker.model_runner
    runner.model = getattr(runner.model, "runnable", runner.model)
    for name in ("abort", "addresses", "steps"):
        process.component(name).after_fork()
    process._engage(process.decision)
    aborted_engine.GraphStandIn.replays = 0
    if wrong == STOCK:
        shadow.SHADOW = None
    aborted_engine.replay(worker, WRONG if wrong == STOCK else wrong)
    if wrong != STOCK:
        process.on_captured(worker, True)
        checks._PATIENCE, watch._MAX_DEFERRED = 0.0, 2
        serving = process.component("kv-marks").marks._monitor
        serving._checks.mark_budget.share = serving._checks.check_budget.share = 0.5
    beat()
    Faults.log.clear()


def begin_scheduler(core: Any) -> None:
    process = plugin()
    aborts = process.component("abort").aborts
    receiver, aborts._receiver = aborts._receiver, None
    if receiver is not None:
        receiver.close()
        receiver._thread.join()
    aborts._forget()
    process._engage(process.decision)
    aborts._begin(core.scheduler)
    beat()
    Faults.log.clear()


def process_report(worker: Any = None) -> dict[str, Any]:
    """Return this process's report of itself now: states, counts, and what its record and its log say."""
    record = plugin().status_record
    reporter, now = record._reporter_here(), record.record()
    return {
        "fired": Faults.fired,
        "states": {name: [each.state, each.reason] for name, each in now.fixes.items() if name in WATCHED},
        "events": {name: dict(counts) for name, counts in now.events.items() if name in (*WATCHED, "addresses")},
        "beats": reporter._keeper is not None and reporter._keeper.is_alive(),
        "log": list(Faults.log),
    }


def traced(worker: Any = None) -> list[str]:
    places, Faults.seen = Faults.seen or set(), None
    return sorted(places)


# -- the engine --------------------------------------------------------------------------------------------------------


def main(model: str) -> None:
    install()
    from vllm import LLM, SamplingParams
    from vllm.v1.executor import multiproc_executor

    from vllm_graphfix.engine import metrics

    # Forked, as on a GPU. On a CPU vLLM spawns workers for the sake of OpenMP's threads, of which there are none here.
    multiproc_executor.get_mp_context = partial(multiprocessing.get_context, "fork")
    logging.getLogger("vllm.graphfix").addHandler(Log())
    begun = time.monotonic()
    parallel = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
    llm = LLM(model=model, enforce_eager=True, dtype="float32", **parallel, **aborted_engine.SMALL)
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    chance = random.Random(7)  # noqa: S311 - the same prompts in every run
    prompts = [chance.choices(range(1, aborted_engine.VOCABULARY), k=length) for length in aborted_engine.LENGTHS]

    def on_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
        results: list[Any] = core.model_executor.collective_rpc(function, args=args)
        return results

    def begin(wrong: str) -> None:
        llm.reset_prefix_cache()
        begin_scheduler(core)
        on_ranks(begin_rank, wrong)

    def ask(tokens: int) -> list[list[Any]]:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False)
        return [[each.outputs[0].finish_reason, list(each.outputs[0].token_ids)] for each in outputs]

    def serve(result: dict[str, Any]) -> None:
        """Asks twice: in the first a replay is wrong, before the second a block of the prefix cache is overwritten."""
        at = time.monotonic()
        try:
            result["first"] = ask(TOKENS)
            on_ranks(overwrite)
            result["second"] = ask(MORE_TOKENS)
            for _ in range(2):  # of a rank without work
                core.execute_dummy_batch()
            time.sleep(2 * BEAT)
        except Exception as error:
            result["failed"] = f"{type(error).__name__}: {error}"
            with contextlib.suppress(Exception):
                engine.abort_request(list(engine.output_processor.request_states), internal=True)
        result["took"] = time.monotonic() - at

    def say(result: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()

    metrics.EVERY = BEAT
    plugin()._expose_metrics()
    eager = ask(MORE_TOKENS)
    begin(STOCK)
    start: dict[str, Any] = {"eager": eager, "stock": ask(TOKENS)}
    begin(WRONG)
    arm(None)
    on_ranks(arm, None)
    serve(start)
    start["places"] = {"scheduler": traced(), "0": on_ranks(traced)[0]}
    start |= {"scheduler": process_report(), "ranks": on_ranks(process_report), "start": time.monotonic() - begun}
    say(start)
    for line in sys.stdin:
        process, place, error, times = json.loads(line)
        begin(WRONG)
        if process == "scheduler":
            arm(None, place, error, times)
        else:
            on_ranks(arm_rank, int(process), place, error, times)
        result: dict[str, Any] = {}
        serve(result)
        disarm()
        result["scheduler"] = process_report()
        if "failed" in result and process != "scheduler":
            # As an engine core does, vLLM's executor would end the ranks now: the others wait in a collective.
            say(result | {"ended": result["failed"]})
            return
        try:
            on_ranks(disarm)
            result["ranks"] = on_ranks(process_report)
            begin("none")
            result["after"] = ask(TOKENS)
        except Exception as error:  # no ranks are left
            say(result | {"ended": f"{type(error).__name__}: {error}"})
            return
        say(result)


if __name__ == "__main__":
    import serving_faults_engine  # functions of which a worker in a process of its own knows the module

    serving_faults_engine.main(*sys.argv[1:])
