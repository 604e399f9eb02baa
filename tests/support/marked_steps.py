"""Scheduler outputs, and marks in the KV cache whose checksums are stand-ins."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from vllm_graphfix.marks.last_step import LastStep
from vllm_graphfix.marks.ledger import BlockTracker
from vllm_graphfix.marks.sums import Batch, ChecksumResult
from vllm_graphfix.marks.watch import ChecksumMonitor


def step(
    new: tuple[Any, ...] = (), running: dict[str, Any] | None = None, resumed: tuple[str, ...] = (), **more: Any
) -> Any:
    """A `SchedulerOutput`.

    *new* requests have a name, blocks by group, tokens computed and scheduled; *running* ones, by name, new blocks,
    computed and scheduled.
    """
    running = running or {}
    cached = SimpleNamespace(
        req_ids=list(running),
        resumed_req_ids=set(resumed),
        new_block_ids=[blocks for blocks, _, _ in running.values()],
        num_computed_tokens=[computed for _, computed, _ in running.values()],
    )
    fresh = [
        SimpleNamespace(req_id=name, block_ids=blocks, num_computed_tokens=computed)
        for name, blocks, computed, _ in new
    ]
    scheduled = {name: tokens for name, _, _, tokens in new} | {
        name: tokens for name, (_, _, tokens) in running.items()
    }
    return SimpleNamespace(
        scheduled_new_reqs=fresh,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=scheduled,
        scheduled_spec_decode_tokens={name: [5] * (tokens - 1) for name, (_, _, tokens) in running.items()},
        **({"finished_req_ids": set(), "preempted_req_ids": None} | more),
    )


def mark_all(ledger: BlockTracker) -> set[int]:
    """Marks what is finished."""
    ledger.marked.update(ledger.finished)
    ledger.finished.clear()
    return set(ledger.marked)


def ledger_with_a_prompt(**arguments: Any) -> BlockTracker:
    """Of blocks of four tokens; after a prompt of nine in blocks 1, 2 and 3."""
    ledger = BlockTracker({0: 4}, 1, **arguments)
    ledger.step(step(new=(("a", ([1, 2, 3],), 0, 9),)))
    return ledger


class Scheduler:
    """Makes outputs for requests of two cache groups, one of blocks of four tokens and one that is not tracked.

    They begin, some with a hit in the prefix cache, get blocks, are left out of steps, lose their blocks, with a word
    or without, come back and end; some blocks are copied to, and for every other scheduler those that somebody gets are
    zeroed, as in models with recurrent layers; some steps are of no request.
    """

    def __init__(self, chance: random.Random) -> None:
        self._zeroes = chance.random() < 0.5
        self._chance, self._free, self._made = chance, list(range(1, 400)), 0
        self._computed: dict[str, int] = {}
        self._taken: set[str] = set()
        self._blocks: dict[str, list[int]] = {}
        self._hits: list[int] = []
        self.before: dict[str, int] = {}
        """The tokens of requests that were computed before the last step that they were in."""

    def step(self) -> Any:
        chance = self._chance
        if chance.random() < 0.05:
            return step()
        gone = {name for name in self._computed if chance.random() < 0.02}
        taken = {name for name in self._computed.keys() - gone if chance.random() < 0.01}
        self._free_all_of(gone | taken)
        if self._hits and chance.random() < 0.1 and not any(self._hits[0] in each for each in self._blocks.values()):
            self._free += self._hits
            self._hits = []
        self._free.sort()  # what was given back is given out again soon
        self._free.reverse()
        running = {
            name: self._run(name, chance.choice((1, 1, 1, 6)))
            for name in sorted(self._computed)
            if chance.random() < 0.9
        }
        back = {name for name in self._taken if chance.random() < 0.2}
        self._taken = self._taken - back | taken
        for name in sorted(back):
            self._computed[name], self._blocks[name] = 0, []
            running[name] = self._run(name, chance.randint(1, 9))
        new = []
        if len(self._computed) < 6 and chance.random() < 0.3:
            name, tokens = f"r{self._made}", chance.randint(1, 9)
            self._made += 1
            self._blocks[name] = [*self._hits] if chance.random() < 0.5 else []
            self._computed[name] = 4 * len(self._blocks[name])
            hits = [*self._blocks[name]]
            blocks, computed, _ = self._run(name, tokens)
            new.append((name, (hits + (blocks[0] if blocks else []), [0]), computed, tokens))
        more: dict[str, Any] = {"preempted_req_ids": taken if chance.random() < 0.5 else None}
        fresh = [number for blocks, _, _ in running.values() for number in (blocks or ((),))[0]]
        if self._zeroes:
            more["new_block_ids_to_zero"] = fresh + [
                number for _, groups, computed, _ in new for number in groups[0][computed // 4 :]
            ]
        if chance.random() < 0.02:
            more["kv_cache_block_copies"] = [SimpleNamespace(dst_block_id=number) for number in fresh[:1]]
        return step(tuple(new), running, tuple(back), finished_req_ids=gone, **more)

    def pause(self) -> Any:
        """A step of no request, in which all that run have ended, and those that wait are gone."""
        ended = {*self._computed}
        self._free_all_of(ended)
        self._taken = set()
        return step(finished_req_ids=ended)

    def blocks(self) -> dict[str, list[int]]:
        """Those of each request that runs."""
        return {name: [*blocks] for name, blocks in self._blocks.items() if name in self._computed}

    def _free_all_of(self, names: set[str]) -> None:
        for name in names:
            full = self._computed.pop(name) // 4
            blocks = self._blocks.pop(name)
            if not self._hits:
                self._hits = blocks[:full]  # nobody gets them but by a hit, for some time
            self._free += [each for each in blocks if each not in self._hits]

    def _run(self, name: str, tokens: int) -> tuple[Any, int, int]:
        computed = self.before[name] = self._computed[name]
        self._computed[name] += tokens
        fresh = [self._free.pop() for _ in range(-(-(computed + tokens) // 4) - len(self._blocks[name]))]
        self._blocks[name] += fresh
        return (fresh, []) if fresh else None, computed, tokens


def known(ledger: BlockTracker) -> Any:
    filling = {name: (each.computed, each.due, each.blocks) for name, each in ledger._filling.items()}
    newest = {block.number for block in ledger.newest}
    return ledger._tracked, filling, ledger.finished, ledger._lengths, ledger._readers, set(ledger._due), newest


COUNTED = ("marks", "looks", "changed", "passed-over", "rests", "rested", "failures")


class SumsStandIn:
    """Checksums of nothing: a check is over at once, and its result is *changed*."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.changed: dict[int, list[str]] = {}
        self.checks: list[ChecksumResult] = []

    def results(self) -> list[ChecksumResult]:
        over, self.checks = self.checks, []
        return over

    def mark(self, blocks: list[Any], group: Any, at: int) -> Batch:
        return Batch(blocks[:2], (), None, at)  # type: ignore[arg-type]

    def check(self, batch: Batch, at: int) -> bool:
        self.seen.append(batch.blocks[0].number)
        self.checks.append(ChecksumResult(batch, at, frozenset(batch.alive), self.changed))
        batch.checked_at = at
        return True

    def forget(self) -> None:
        self.checks = []


def watched(every: int = 1) -> tuple[ChecksumMonitor, SumsStandIn]:
    marks, sums = ChecksumMonitor(), SumsStandIn()
    marks._tracker, marks._counts = BlockTracker({0: 4}, every), dict.fromkeys(COUNTED, 0)
    marks._last_step = LastStep({0: 4}, 64, 0)
    marks._checksums = sums  # type: ignore[assignment]
    marks._checks.groups = {0: None}  # type: ignore[dict-item]
    return marks, sums


def decodes(marks: ChecksumMonitor, first: int, count: int) -> None:
    for computed in range(first, first + count):
        marks._before(step(running={"a": (None, computed, 1)}))
