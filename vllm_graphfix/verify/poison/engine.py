"""Poison in a worker of a running engine: wraps methods of the model runner until it is removed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from types import SimpleNamespace
from typing import Any

import torch

from vllm_graphfix.shadow import layers as shadow_layers
from vllm_graphfix.verify.poison import memory
from vllm_graphfix.verify.poison.bits import LOUD, NAN
from vllm_graphfix.verify.poison.blocks import Blocks, caches_of
from vllm_graphfix.verify.poison.kinds import BLOCKS, KINDS, NAN_IN_NULL_BLOCK, NULL, ROWS
from vllm_graphfix.verify.poison.poison import NULL_BLOCK, Poison
from vllm_graphfix.verify.poison.rows import Buffer, Room, Rows, buffers_of
from vllm_graphfix.verify.poison.states import free_rows, states_of

_PREPARE = ("_prepare_inputs", "prepare_inputs")
"""The method that fills the persistent inputs of a step, of model runner V1 and V2."""


class Holders:
    """Blocks by request, from the scheduler's outputs."""

    def __init__(self, *, cached: bool) -> None:
        """With *cached*, blocks of a request that has ended stay held: the prefix cache may reuse them."""
        self._cached = cached
        self._of: dict[str, set[int]] = {}
        self._cached_blocks: set[int] = set()
        self.groups: dict[int, int] = {}
        """The number of the cache group that each block was last allocated for."""

    def update(self, scheduler_output: Any) -> None:
        for name in (*scheduler_output.finished_req_ids, *(getattr(scheduler_output, "preempted_req_ids", None) or ())):
            self._of.pop(name, None)
        for request in scheduler_output.scheduled_new_reqs:
            self._add(request.req_id, request.block_ids)
        cached = scheduler_output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self._add(name, blocks or ())

    def _add(self, name: str, groups: Iterable[Iterable[int]]) -> None:
        by_block = {block: number for number, group in enumerate(groups) for block in group}
        self.groups.update(by_block)
        blocks = by_block.keys()
        self._of.setdefault(name, set()).update(blocks)
        if self._cached:
            self._cached_blocks.update(blocks)

    @property
    def held(self) -> set[int]:
        return self._cached_blocks.union(*self._of.values())


class PoisonedRunner:
    """A model runner whose steps are poisoned until `remove`. No request may be running at the start."""

    def __init__(
        self,
        runner: Any,
        kinds: Collection[str] = KINDS,
        buffers: Collection[str] | None = None,
        *,
        worker: Any = None,
        finite: bool = False,
    ) -> None:
        """Poison with *kinds*, in the persistent inputs *buffers* or in all of them.

        *worker* is the runner's, if it has one. With *finite*, blocks hold large numbers in place of NaN.

        Raises LookupError if the runner has no known method that prepares its inputs.
        """
        self._runner = runner
        self.notes: list[str] = []
        """Reasons why something is not poisoned, and NaN that was there before."""
        self.error: str | None = None
        """First error of this object; poison was removed at once, and no later step has any."""
        self._live = 0
        self._idle = False
        self._tokens = 0
        self._padded: int | None = None
        """First step in which padded rows of the model's output were NaN."""
        config = runner.vllm_config
        chosen = frozenset(kinds)
        if getattr(config, "kv_transfer_config", None) is not None:
            self.notes.append("not poisoned: blocks, since workers are not told which a KV connector writes to")
            chosen -= {BLOCKS, NULL}
        self._holders = Holders(cached=bool(config.cache_config.enable_prefix_caching))
        all_buffers = buffers_of(_buffer_holders(runner), _room(runner))
        blocks, count = self._blocks(LOUD if finite else NAN)
        if count and (with_nan := blocks.with_nan([NULL_BLOCK])):
            self.notes.append(f"{NAN_IN_NULL_BLOCK} (first in {next(iter(with_nan))})")
        if count < 2:
            self.notes.append("not poisoned: blocks, of which this model has none")
            chosen -= {BLOCKS, NULL}
        self.poison = Poison(
            [each for each in all_buffers if buffers is None or each.name in buffers],
            blocks,
            length=max(1, min(runner.max_model_len, config.model_config.max_model_len) - 1),
            block_size=int(config.cache_config.block_size or 16),
            vocabulary=int(config.model_config.get_vocab_size()),
            kinds=chosen,
            fill_memory=memory.fill,
            states=functools.partial(self._states, buffers),
        )
        self._wrapped: list[tuple[Any, str]] = []
        self._wrap(runner, "execute_model", self._executing)
        prepare = next((name for name in _PREPARE if hasattr(runner, name)), None)
        if prepare is None:
            raise LookupError(f"{type(runner).__name__} prepares its inputs in a way that is not known")
        self._wrap(runner, prepare, self._preparing)
        if prepare == "_prepare_inputs":  # V2's step without work is an `execute_model`
            self._wrap(runner, "_dummy_run", self._idling)
        if hasattr(worker, "execute_dummy_batch"):
            # The step begins here, and `idle-rank` empties buffers here, which later poison would undo.
            self._wrap(worker, "execute_dummy_batch", self._idling)

    def _blocks(self, byte: int) -> tuple[Blocks, int]:
        layers = self._runner.vllm_config.compilation_config.static_forward_context
        tensors = {name: caches for name, layer in layers.items() if (caches := shadow_layers.caches_of(layer))}
        count = int(self._runner.kv_cache_config.num_blocks) if tensors else 0
        known, unknown = caches_of(tensors, count) if tensors else ([], [])
        if unknown:
            named = ", ".join(dict.fromkeys(unknown))
            self.notes.append(f"not poisoned: blocks of {named}, whose cache has an unknown shape")
        groups = getattr(self._runner.kv_cache_config, "kv_cache_groups", ())
        numbers = {name: number for number, group in enumerate(groups) for name in group.layer_names}
        known = [cache._replace(group=numbers.get(cache.layer)) for cache in known]
        return Blocks(known, count, byte, self._holders.groups), count

    def _states(self, chosen: Collection[str] | None = None) -> list[tuple[Buffer, list[int]]]:
        rows = free_rows(self._runner)
        states = states_of(self._runner) if rows else []
        return [(each, rows[: each.row_limit]) for each in states if chosen is None or each.name in chosen]

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        stock = getattr(owner, name)

        @functools.wraps(stock)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(stock, *args, **kwargs)

        # On this object alone: the class stays unchanged for other runners.
        setattr(owner, name, wrapped)
        self._wrapped.append((owner, name))

    def _executing(self, stock: Callable[..., Any], scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        dummy = bool(kwargs.get("dummy_run", len(args) > 1 and args[1]))

        def begin() -> None:
            if self._idle:
                return
            self._end_step()
            if dummy:
                self.poison.before_preparing(Rows(0, 0, self._live), self._holders.held)
            else:
                self._holders.update(scheduler_output)
                self.poison.allocate(self._holders.held)

        self._guarded(begin)
        self._tokens = 0
        output = stock(scheduler_output, *args, **kwargs)
        self._guarded(self._check_padding)
        return output

    def _check_padding(self) -> None:
        """Note NaN in padded rows of the model's output: they begin as valid tokens, so a kernel made or read NaN."""
        hidden = getattr(getattr(self._runner, "execute_model_state", None), "hidden_states", None)
        if self._padded is not None or not self._tokens or not isinstance(hidden, torch.Tensor):
            return
        if hidden.is_floating_point() and hidden[self._tokens :].isnan().any():
            self._padded = self.poison.steps

    def _preparing(self, stock: Callable[..., Any], scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        def poison() -> None:
            scheduled = scheduler_output.num_scheduled_tokens
            self._live, self._tokens = len(scheduled), scheduler_output.total_num_scheduled_tokens
            rows = Rows(len(scheduled), scheduler_output.total_num_scheduled_tokens, len(scheduled))
            self.poison.before_preparing(rows, self._holders.held)

        self._guarded(poison)
        return stock(scheduler_output, *args, **kwargs)

    def _idling(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def poison() -> None:
            self._end_step()
            batch = getattr(self._runner, "input_batch", None)  # V1's
            live = self._live if batch is None else int(batch.num_reqs)
            self.poison.before_preparing(Rows(0, 0, live), self._holders.held)

        if self._idle:  # the runner's part of a step that began in the worker
            return stock(*args, **kwargs)
        self._guarded(poison)
        self._idle = True
        try:
            return stock(*args, **kwargs)
        finally:
            self._idle = False

    def _end_step(self) -> None:
        if self.poison.steps:
            _wait_for_the_device()  # a copy to the device may not have read its host memory yet
            self.poison.after_running()
            self.poison.end_of_step()

    def _guarded(self, act: Callable[[], None]) -> None:
        if self.error is not None:
            return
        try:
            with torch.inference_mode():
                act()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            with torch.inference_mode():
                self.poison.remove()

    def remove(self) -> dict[str, Any]:
        """Remove poison and wrappers; return findings, amounts, notes and an error, as `PoisonPass.ranks` has them."""
        for owner, name in self._wrapped:
            delattr(owner, name)
        self._wrapped = []

        def end() -> None:
            _wait_for_the_device()
            self.poison.after_running()
            self.poison.remove()

        self._guarded(end)
        inputs = [*self.poison.buffers, *(state for state, _ in self._states())]
        return {
            "steps": self.poison.steps,
            "findings": [list(finding) for finding in self.poison.findings],
            "most": dict(self.poison.most),
            "buffers": sorted(each.name for each in inputs) if ROWS in self.poison.kinds else [],
            "padded": self._padded,
            "notes": self.notes,
            "error": self.error,
        }


def _wait_for_the_device() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _room(runner: Any) -> Room:
    return Room(int(runner.max_num_reqs), int(runner.max_num_tokens))


def _buffer_holders(runner: Any) -> dict[str, Any]:
    """Return the objects that hold the buffers of a step, by name."""
    if hasattr(runner, "input_batch"):
        return {"runner": runner}
    tables = runner.block_tables
    # Slots are numbered by the block size of a group of layers, and groups differ in it.
    groups = [
        SimpleNamespace(table=table, slots=slots, block_size=size)
        for table, slots, size in zip(tables.input_block_tables, tables.slot_mappings, tables.block_sizes, strict=True)
    ]
    speculator = getattr(runner, "speculator", None)
    return {
        "input_buffers": runner.input_buffers,
        "groups": groups,
        "attn_groups": runner.attn_groups,
        "speculator": SimpleNamespace(
            input_buffers=getattr(speculator, "input_buffers", None),
            hidden_states=getattr(speculator, "hidden_states", None),
        ),
    }
