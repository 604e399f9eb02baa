"""Announcements of a scenario's steps, made before their inputs are in the persistent buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from vllm_graphfix.verify.poison.blocks import Blocks, Cache
from vllm_graphfix.verify.poison.kinds import KINDS
from vllm_graphfix.verify.poison.poison import Finding, Poison
from vllm_graphfix.verify.poison.rows import Room, Rows, buffers_of


class Engine(NamedTuple):
    """The parts of an engine that a scenario has."""

    owner: object
    """Identity of the engine."""
    holders: Mapping[str, object]
    """Owners of persistent buffers, by name: a model runner, its inputs, metadata builders."""
    room: Room
    caches: Mapping[str, torch.Tensor]
    """Cache of each layer, (blocks, …)."""
    length: int
    """Tokens of the longest sequence."""
    block_size: int = 1


_poisoners: list[StepPoisoner] = []


def begin_step(engine: Engine, rows: Rows, held: Collection[int]) -> None:
    """Announce a step of *rows*; live requests, and finished ones whose prefix stays cached, have the blocks *held*."""
    for poisoner in _poisoners:
        poisoner.begin_step(engine, rows, held)


def end_step() -> None:
    """Announce the end of the step, after which the batch may change."""
    for poisoner in _poisoners:
        poisoner.end_step()


class StepPoisoner:
    """Poisons the buffers and free blocks of every engine of a scenario."""

    def __init__(self, kinds: Collection[str] = KINDS) -> None:
        self._kinds = frozenset(kinds)
        self._engines: dict[int, tuple[object, Poison]] = {}
        self._last: Poison | None = None

    def begin_step(self, engine: Engine, rows: Rows, held: Collection[int]) -> None:
        self.end_step()
        with torch.inference_mode():
            # By id, for owners need not be hashable; the tuple keeps the owner alive, so that no id comes again.
            if id(engine.owner) not in self._engines:
                self._engines[id(engine.owner)] = (engine.owner, self._poison(engine))
            poison = self._engines[id(engine.owner)][1]
            poison.before_preparing(rows, held)
            self._last = poison

    def _poison(self, engine: Engine) -> Poison:
        (count,) = {len(cache) for cache in engine.caches.values()}
        return Poison(
            buffers_of(engine.holders, engine.room),
            Blocks([Cache(name, tensor) for name, tensor in engine.caches.items()], count),
            length=engine.length,
            block_size=engine.block_size,
            kinds=self._kinds,
        )

    def end_step(self) -> None:
        if self._last is not None:
            with torch.inference_mode():
                self._last.after_running()
                self._last.end_of_step()
            self._last = None

    def findings(self) -> list[Finding]:
        self.end_step()
        return [finding for _, poison in self._engines.values() for finding in poison.findings]

    @property
    def steps(self) -> int:
        return sum(poison.steps for _, poison in self._engines.values())


@contextmanager
def poisoned(kinds: Collection[str] = KINDS) -> Iterator[StepPoisoner]:
    """Poison the engines of scenarios within the block."""
    poisoner = StepPoisoner(kinds)
    _poisoners.append(poisoner)
    try:
        yield poisoner
    finally:
        _poisoners.remove(poisoner)
