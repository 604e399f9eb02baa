"""The host's time that marks in the KV cache add to a step to follow blocks, without the sums of marks.

A figure is one call of the worker's wrapped method; the method itself does nothing.

    python benchmarks/kv_marks_step.py [--rounds N]

Its argument is a `SchedulerOutput` of vLLM's own class, unpickled as from a pipe: prompts of 64 tokens, 256 decodes
each, blocks of 16 tokens. All requests get their blocks in one step of 16, or "apart", some in each step; a figure is
the mean of 16 steps, as minimum and median. The time for sums is used up, so that marks wait; up to 256 batches of
marks exist. Cold: other memory is read between two steps, more than the processor's caches hold, as a model's step does
on the host; the `SchedulerOutput`, unpickled after that, is in the caches.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import time
import weakref
from collections.abc import Iterator
from typing import Any

from measuring import console, elsewhere, environment, machine, run, table, verdict

import fetch_vllm  # isort: skip - measuring has put tools/ on the path

RELEASES = ("0.18.1", "0.33.0")
REQUESTS = (1, 8, 64, 256)
EVERY = (16, 1)
TOKENS, PROMPT, ANSWER, POOL = 16, 64, 256, 1 << 14
TARGET = 5.0
"""Microseconds for a step of 64 requests, one in 16 followed: 0.1 % of a step of 5 ms."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="of requests, from first to last (4)")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # in a process that has this vLLM
    options = parser.parse_args()
    if options.measure:
        print(json.dumps([measure(what[0], what[1], what[2], bool(what[3:]), options.rounds) for what in CASES]))
        return
    columns = ("requests, followed, batches", "min", "median", "target", "cold: min", "median")
    out = console()
    out.print(machine(), highlight=False)
    for release in RELEASES:
        made = table(f"vLLM {release}: microseconds a step", *columns)
        env = environment(fetch_vllm.release(release), OMP_NUM_THREADS="1", VLLM_GRAPHFIX="off")
        lines = run([__file__, "--measure", "--rounds", str(options.rounds)], env).output.splitlines()
        for (requests, every, batches, *apart), figures in zip(CASES, json.loads(lines[-1]), strict=True):
            least, median, *cold = (f"{each:.2f}" for each in figures)
            judged = verdict(figures[0], TARGET, "µs") if (requests, every) == (64, 16) else ""
            made.add_row(f"{requests}{' apart' * bool(apart)}, 1/{every}, {batches}", least, median, judged, *cold)
        out.print(made)


CASES: list[tuple[int, ...]] = [
    *((requests, every, batches) for every in EVERY for requests in REQUESTS for batches in (0, 256)),
    *((64, 64, batches) for batches in (0, 256)),
    *((64, every, 0, 1) for every in (16, 64)),
]
"""Requests; N, if one request in N is marked; batches; and 1 if requests get their blocks apart."""


class Worker:
    """Stands in for vLLM's: a step takes no time."""

    def execute_model(self, scheduler_output: Any) -> None:
        pass


def measure(requests: int, every: int, batches: int, apart: bool, rounds: int) -> list[float]:
    """Return microseconds a step: minimum and median with warm caches, and with cold ones."""
    from vllm_graphfix.marks import checks, watch

    checks.SHARE = checks.IDLE_SHARE = watch.TRACKING = 0.0
    cool = elsewhere()
    figures: list[float] = []
    for cold in (False, True):
        marks = marks_of(every)
        if batches:
            with_batches(marks, batches)
        marks._checks.mark_budget._credit = marks._checks.check_budget._credit = -1.0
        worker = Worker()
        execute_model = marks._around_steps(marks._tracker, weakref.ref(worker))
        taken: list[float] = []
        for pickled in outputs(requests, 1 if cold else max(rounds, -(-2 * rounds // requests)), apart):
            if cold:
                cool()
            output = pickle.loads(pickled)  # noqa: S301 - our own
            began = time.perf_counter_ns()
            execute_model(output)
            if output.scheduled_cached_reqs.req_ids:
                taken.append((time.perf_counter_ns() - began) / 1000)
        means = [sum(taken[at : at + TOKENS]) / TOKENS for at in range(0, len(taken), TOKENS)]
        figures += [min(means), statistics.median(means)]
    return figures


def marks_of(every: int) -> Any:
    import torch

    from vllm_graphfix.marks import groups, ledger, sums, watch

    marks = watch.ChecksumMonitor()
    marks._tracker, marks._checksums = ledger.BlockTracker({0: TOKENS}, every), sums.BlockChecksums(torch.device("cpu"))
    marks._counts = {"marks": 0, "looks": 0, "changed": 0, "passed-over": 0}
    cache = torch.zeros(POOL + 1, TOKENS, dtype=torch.int64)
    marks._checks.groups = {0: groups.Group(TOKENS, (groups.LayerCache("layer", cache, 0, 1),))}
    return marks


def with_batches(marks: Any, batches: int) -> None:
    """Make *batches* batches of blocks that no request gets later."""
    from vllm_graphfix.marks.ledger import Block

    for number in range(batches):
        block = Block(POOL + 1 + number, 0, 0, "ended", TOKENS)
        batch = marks._checksums.mark([block._replace(number=POOL)], marks._checks.groups[0], 0)
        batch.blocks = (block,)
        marks._tracker._tracked[block.number] = marks._tracker.marked[block.number] = block
        marks._checks.queue.where[block.number] = batch, 0
        marks._checks.queue.others.append(batch)


def outputs(requests: int, rounds: int, apart: bool) -> Iterator[bytes]:
    """Yield a worker's pickled `SchedulerOutput`s for *rounds* batches of requests, one after the other."""
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    fields = set(SchedulerOutput.__dataclass_fields__)
    free = 0

    def allocate(count: int) -> tuple[list[int]]:
        nonlocal free
        free += count
        return ([1 + number % (POOL - 1) for number in range(free - count, free)],)

    def output(names: list[str], new: list[Any], cached: Any, scheduled: list[int], ended: set[str]) -> bytes:
        known = {
            "scheduled_new_reqs": new,
            "scheduled_cached_reqs": cached,
            "num_scheduled_tokens": dict(zip(names, scheduled, strict=True)),
            "total_num_scheduled_tokens": sum(scheduled),
            "scheduled_spec_decode_tokens": {},
            "scheduled_encoder_inputs": {},
            "num_common_prefix_blocks": [0],
            "finished_req_ids": ended,
            "free_encoder_mm_hashes": [],
        }
        made = SchedulerOutput(**{name: value for name, value in known.items() if name in fields})
        return pickle.dumps(made)

    # 7 is prime to 16, so that marked requests, one in N, get their blocks in different steps, too.
    prompts = [PROMPT + (number // 16 * 7 + number) % TOKENS * apart for number in range(requests)]
    ended: set[str] = set()
    for each in range(rounds):
        names = [f"cmpl-{each}-{number}-0123456789abcdef" for number in range(requests)]
        new = [
            NewRequestData(
                req_id=name,
                prompt_token_ids=[1] * tokens,
                mm_features=[],
                sampling_params=None,
                pooling_params=None,
                block_ids=allocate(-(-tokens // TOKENS)),
                num_computed_tokens=0,
                lora_request=None,
            )
            for name, tokens in zip(names, prompts, strict=True)
        ]
        yield output(names, new, CachedRequestData.make_empty(), prompts, ended)
        for answered in range(ANSWER):
            computed = [tokens + answered for tokens in prompts]
            cached = CachedRequestData(
                req_ids=names,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[None if tokens % TOKENS else allocate(1) for tokens in computed],
                num_computed_tokens=computed,
                num_output_tokens=[answered + 1] * requests,
            )
            yield output(names, [], cached, [1] * requests, set())
        ended = set(names)


if __name__ == "__main__":
    main()
