"""Compares the addresses of tensors with those in this rank's graphs, after calls that may move tensors.

Such calls are vLLM's functions that load weights, wake an engine, load an adapter or change the group of ranks, and
methods that a worker extension or a foreign worker class adds for loading. None of them is part of a step. A move
without such a call, as by ``parameter.data = tensor``, is noticed by the heartbeat, which reads addresses and changes
nothing. Any error in here turns the comparison off, with one warning.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
import time
import weakref
from collections.abc import Callable, Container, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any, NamedTuple

from vllm_graphfix.engine.graph_dispatch import Dispatch, count_graphs
from vllm_graphfix.engine.inventory import LASTING, Inventory, Kind, Moved, models
from vllm_graphfix.log import logger
from vllm_graphfix.patching.hooks import wrap
from vllm_graphfix.ranks import common_store, world
from vllm_graphfix.settings.environment import Addresses
from vllm_graphfix.text import first_of

PATIENCE = 60.0
"""Seconds that a rank waits for the others after a load of weights; they load at different speeds."""
_SLACK = 10.0
"""Seconds after that in which the store has to answer that the time is over."""
_LISTED = 5
"""Limit of tensors that the log or a record names."""
_BEGIN, _END = ("start_weight_update", "start_draft_weight_update"), "finish_weight_update"
"""Between these calls vLLM moves tensors away and back (0.21.0 and later)."""
_ELASTIC = ("reinitialize_distributed", "elastic_ep_execute")
"""Steps of one change, the last of which captures again; with NIXL's exchange none does, and a heartbeat compares."""
_LAYER = "process_weights_after_loading of a layer"
_UNFINISHED = ("load_weights", _LAYER)
"""May be called alone, while other tensors still have the form in which they are loaded."""
_ENDS_IF_IT_FAILS = ("update_weights", _END)
"""An update is over if one of these raises."""
_LOADS = re.compile("load|update|weight|param|lora|adapter|refit|wake|sleep")
"""Each method that verl, NeMo-RL, OpenRLHF and TRL add for loading has one of these words in its name."""
_SHARE = 50.0
"""After a comparison, loads of single tensors are not compared for so many times its duration: 2 % of their time."""
_REPAIRED = "repaired"


class _Moved(NamedTuple):
    """A tensor that has moved, as reported."""

    kind: Kind
    after: str
    outcome: str


class RankAddresses:
    """Watches the addresses of the rank that has captured last in this process."""

    def __init__(self, publish: Callable[[], None] = lambda: None) -> None:
        """*publish* is called when a tensor has moved."""
        self._publish = publish
        self.action = Addresses.OFF
        self._round = 0
        self._forget()

    def _forget(self) -> None:
        # Held to note tensors: the heartbeat does so in a thread of its own.
        self._lock = threading.Lock()
        self._depth = self._operations = 0
        self._counts: dict[str, int] | None = None
        """None before the first capture."""
        self._forget_capture()

    def _forget_capture(self) -> None:
        """Discard all but `_depth`: an elastic engine captures again inside a watched call."""
        self._inventory: Inventory | None = None
        self._worker: Any = None
        self._had_graphs = False
        """Graphs could be counted at the capture."""
        self._unfinished = False
        """An update in several calls has begun and not ended."""
        self._asleep: set[str] = set()
        self._moved: dict[str, _Moved] = {}
        """By name: tensors that have moved, including repaired ones."""
        self._pointers: dict[str, int] = {}
        """The new address of each of those: a tensor that moves again is counted again."""
        self._suspected: dict[str, int] = {}
        """Tensors that the last heartbeat saw elsewhere, and their addresses."""
        self._reported: set[str] = set()
        self._comparison_skipped = False
        """A call was not followed by a comparison, as another had just been: the next heartbeat makes up for it."""
        self._not_before = 0.0

    def begin(self, action: Addresses) -> None:
        """Watch from the next capture on; with `off` not at all."""
        if action is not self.action:
            self._forget()
        self.action = action

    # -- a rank that has captured --------------------------------------------------------------------------------

    def on_captured(self, worker: Any) -> None:
        """Record the addresses of the tensors of *worker*, which has captured its graphs."""
        if self.action is not Addresses.OFF:
            self._guarded(self._take_inventory, worker)

    def _take_inventory(self, worker: Any) -> None:
        again = self._worker is not None and self._worker() is worker
        self._forget_capture()
        if self._counts is None or not again:  # an engine that captures again continues its counts
            self._counts = {"comparisons": 0, "moved": 0, "repaired": 0, "graphs-taken-out": 0, "failures": 0}
        # Drop held tensors with their worker. The callback of an old worker must not drop a new inventory.
        self._worker = weakref.ref(worker, lambda ended: self._drop() if ended is self._worker else None)
        inventory = Inventory(worker, hold=self.action is Addresses.REPAIR)
        for _, model in models(worker.model_runner):
            self._hook_model(model)
        self._hook_others(type(worker))
        self._had_graphs = count_graphs(worker.model_runner) > 0
        # Last: from here on calls and the heartbeat compare.
        self._inventory = inventory

    def _drop(self) -> None:
        # One assignment: as a callback of garbage collection it may run in any thread, under any lock.
        self._inventory = None

    def _hook_model(self, model: Any) -> None:
        self._wrap_once(type(model), "load_weights", "load_weights", together=False)
        for kind in {
            type(part) for module in model.modules() for part in (module, getattr(module, "quant_method", None))
        }:
            self._wrap_once(kind, "process_weights_after_loading", _LAYER, together=False)

    def _hook_others(self, kind: type) -> None:
        """Wrap loading methods, by name, of a worker extension or a foreign worker class: all ranks call them."""
        vllms = {name for each in kind.__mro__ if each.__module__.startswith("vllm.") for name in vars(each)}
        for owner in kind.__mro__:
            if owner.__module__.startswith("vllm.") or owner is object:
                continue
            for name, value in list(vars(owner).items()):
                plain = isinstance(value, FunctionType) and not inspect.iscoroutinefunction(value)
                # No other method: it may be called in each step.
                if plain and name not in vllms and not name.startswith("_") and _LOADS.search(name):
                    self._wrap_once(owner, name, name, together=True)

    def _wrap_once(self, kind: type, method: str, name: str, *, together: bool) -> None:
        """Wrap *method* in the class from which *kind* inherits it; comparisons name it *name*."""
        owner = next((each for each in kind.__mro__ if method in vars(each)), None)
        if owner is not None and not getattr(vars(owner)[method], "_graphfix_addresses", False):
            wrap(owner, method, functools.partial(self.around, name, together))
            vars(owner)[method]._graphfix_addresses = True

    # -- what may move tensors -----------------------------------------------------------------------------------

    def around(self, name: str, together: bool, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call *stock*, vLLM's function *name*, and compare after it. *together*: all ranks call it."""
        if self._inventory is None:
            return stock(*args, **kwargs)
        # Some programs load tensor by tensor: thousands of comparisons would take longer than the loads.
        skipped = name in _UNFINISHED and self.action is not Addresses.REPAIR and time.monotonic() < self._not_before
        if self._depth == 0 and not skipped:
            self._guarded(self._before)
        self._depth += 1
        self._operations += 1
        try:
            result = stock(*args, **kwargs)
        except BaseException:
            if name in _ENDS_IF_IT_FAILS:
                self._unfinished = False
            raise
        else:
            self._guarded(self._note_sleep_and_update, name, args, kwargs)
            settled = self._depth == 1 and not self._unfinished and "weights" not in self._asleep
            if settled and skipped:
                self._comparison_skipped = True
            elif settled and name not in _ELASTIC:
                self._guarded(self._after, name, together)
            return result
        finally:
            self._depth -= 1

    def _note_sleep_and_update(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Track what is asleep, and an update in several calls."""
        tags = kwargs.get("tags", args[1] if len(args) > 1 else None)
        if name == "sleep":
            self._asleep = {"weights", "kv_cache"}
        elif name == "discard":
            self._asleep |= set(tags or ())
        elif name == "wake_up":
            self._asleep -= set(self._asleep if tags is None else tags)
        elif name in (*_BEGIN, _END):
            self._unfinished = name != _END

    def _before(self) -> None:
        """Forget tensors that steps have moved since the capture: no graph can hold them.

        Not after calls without a comparison: tensors that these have moved would be forgotten, too.
        """
        inventory, settled = self._inventory, not self._unfinished and "weights" not in self._asleep
        if inventory is not None and settled and not self._comparison_skipped:
            with self._lock:
                moved = inventory.moved(frozenset(Kind) - LASTING)
                inventory.forget(each for each in moved if each.entry.name not in self._moved)

    def _after(self, name: str, together: bool) -> None:
        inventory = self._inventory
        if inventory is None:
            return
        if self._graphs_are_gone():  # on all ranks: none of them goes on to an agreement
            self._drop()
            logger.info("graphfix: this rank has discarded its CUDA graphs; addresses are compared once it captures")
            return
        begun = time.monotonic()
        kinds = frozenset(Kind) - ({Kind.CACHE} if self._asleep else set())
        with self._lock:
            moved = inventory.moved(kinds)
            fresh = self._note_moved(moved, name, kinds)
        self._comparison_skipped = False
        self._not_before = time.monotonic() + _SHARE * (time.monotonic() - begun)
        if self.action is Addresses.REPAIR:
            hopeless = self._repair(inventory, moved)
            if name not in _UNFINISHED:
                self._take_out_of_use(hopeless, together)
        if fresh:
            self._warn(fresh, name)
            self._publish()

    def poll(self) -> None:
        """Compare the tensors that no step moves; called by the heartbeat's thread."""
        self._guarded(self._poll)

    def _poll(self) -> None:
        inventory, operations = self._inventory, self._operations
        if inventory is None or self._busy():
            return
        kinds = LASTING | {Kind.ATTRIBUTE} if self._comparison_skipped else LASTING
        moved = inventory.moved(kinds, unhurried=True)
        with self._lock:
            if self._busy() or operations != self._operations or self._inventory is not inventory:
                return  # a watched call moves tensors meanwhile, and compares itself
            if moved and self._graphs_are_gone():
                return
            # Only if seen there twice: a load that is not wrapped may be under way.
            suspected, self._suspected = self._suspected, {each.entry.name: _pointer(each) for each in moved}
            moved = [each for each in moved if suspected.get(each.entry.name) == _pointer(each)]
            fresh = self._note_moved(moved, "no call that is watched", kinds, elsewhere=self._suspected)
        self._warn(fresh, "no call that is watched")

    def _graphs_are_gone(self) -> bool:
        """Tell if the graphs of the capture have all been discarded: nothing has their addresses any more."""
        worker = self._worker() if self._had_graphs else None
        return worker is not None and not count_graphs(worker.model_runner)

    def _busy(self) -> bool:
        return bool(self._depth or self._unfinished or self._asleep)

    # -- what follows --------------------------------------------------------------------------------------------

    def _note_moved(
        self, moved: Sequence[Moved], after: str, kinds: frozenset[Kind], elsewhere: Container[str] = ()
    ) -> list[Moved]:
        """Count *moved* tensors of *kinds*; return those that were not reported before.

        Tensors named in *elsewhere* are not where they were, though they may not count as moved yet.
        """
        counts = self._counts
        if counts is None:
            return []
        counts["comparisons"] += 1
        counted = {each.entry.name for each in moved}
        for name, tensor in list(self._moved.items()):
            is_back = name not in counted and name not in elsewhere
            if is_back and tensor.outcome != _REPAIRED and tensor.kind in kinds:
                del self._moved[name], self._pointers[name]  # somebody has moved it back
        fresh = []
        for each in moved:
            name, pointer = each.entry.name, _pointer(each)
            if self._pointers.get(name) == pointer:
                continue
            self._pointers[name] = pointer
            counts["moved"] += 1
            self._moved[name] = _Moved(each.entry.kind, after, "reported")
            if name not in self._reported:
                fresh.append(each)
        return fresh

    def _repair(self, inventory: Inventory, moved: Sequence[Moved]) -> dict[str, str]:
        """Copy *moved* tensors to the addresses in the graphs; return the reason for each that cannot be copied."""
        hopeless = inventory.bring_back(moved) if moved else {}
        for each in moved:
            name = each.entry.name
            self._moved[name] = self._moved[name]._replace(outcome=hopeless.get(name, _REPAIRED))
            if name not in hopeless:
                del self._pointers[name]
        if self._counts is not None:
            self._counts["repaired"] += len(moved) - len(hopeless)
        return hopeless

    def _take_out_of_use(self, hopeless: dict[str, str], together: bool) -> None:
        """Take all graphs of all ranks out of dispatch if a tensor on any of them cannot be brought back."""
        worker = self._worker()
        rank, ranks = world()
        if _is_elastic(worker) or not (together if ranks > 1 else hopeless):
            # If other ranks may not be in this call, wait for the next call that all of them get.
            return
        dispatch = Dispatch(worker.model_runner)
        out = dispatch.can_leave_out
        if ranks > 1:
            out = self._ranks_agree(rank, ranks, needed=bool(hopeless), can=dispatch.can_leave_out)
        if not out:
            return
        names = dispatch.names()
        dispatch.leave_out(names)
        if self._counts is not None:
            self._counts["graphs-taken-out"] += len(names)
        self._drop()
        for name, why in hopeless.items():
            self._moved[name] = self._moved[name]._replace(outcome=f"{why}: no graph is used any more")
        logger.warning(
            "graphfix: no CUDA graph is used from now on, on any rank: %s. A new engine captures new ones",
            first_of([f"{name} cannot be brought back ({why})" for name, why in hopeless.items()], _LISTED)
            or "a tensor of another rank cannot be brought back",
        )

    def _ranks_agree(self, rank: int, ranks: int, *, needed: bool, can: bool) -> bool:
        """Tell if all ranks take their graphs out of use: if one of them has to, and all can.

        The first rank that has all answers writes the verdict for all; a rank that has waited too long writes `late`.
        Raises TimeoutError on all ranks then.
        """
        store = common_store(PATIENCE + _SLACK)
        place, before = f"addresses/{self._round}", f"addresses/{self._round - 1}"
        self._round += 1
        store.set(f"{place}/{rank}", f"{needed:d}{can:d}")
        keys = [f"{place}/{other}" for other in range(ranks)]
        try:
            store.wait(keys, timedelta(seconds=PATIENCE))
            answers = [bytes(each).decode() for each in store.multi_get(keys)]
            verdict = (
                "out" if any(each[0] == "1" for each in answers) and all(each[1] == "1" for each in answers) else "stay"
            )
        except RuntimeError:  # the store's timeout
            verdict = "late"
        verdict = bytes(store.compare_set(f"{place}/verdict", "", verdict)).decode()
        if verdict == "late":
            raise TimeoutError(f"a rank has not compared its addresses within {PATIENCE:.0f} s")
        # All ranks have read the round before. Delete it: a program may load its weights one by one, each a round.
        store.delete_key(f"{before}/{rank}")
        if rank == 0:
            store.delete_key(f"{before}/verdict")
        return verdict == "out"

    def _warn(self, fresh: Sequence[Moved], after: str) -> None:
        self._reported |= {each.entry.name for each in fresh}
        for repaired in (False, True):
            named = [
                f"{each.entry.name} ({each.entry.kind.value})"
                for each in fresh
                if each.entry.name in self._moved and (self._moved[each.entry.name].outcome == _REPAIRED) is repaired
            ]
            if named and repaired:
                logger.info(
                    "graphfix: moved by %s, and brought back to where the graphs have it: %s",
                    after,
                    first_of(named, _LISTED),
                )
            elif named:
                logger.warning(
                    "graphfix: moved by %s: %s. The CUDA graphs of this rank compute with what lies where these were "
                    "at the capture; docs/addresses.md says what to do",
                    after,
                    first_of(named, _LISTED),
                )

    # -- for others ----------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Return the counts of events; empty before a capture."""
        return {} if self._counts is None else dict(self._counts)

    def moved(self) -> tuple[Any, ...]:
        """Return the first tensors that have moved, for a record."""
        if not self._moved:
            return ()
        from vllm_graphfix.records.record import SHORT, MovedTensor

        moved = self._moved.copy()  # called by the heartbeat's thread, while a load may change it
        by_outcome = sorted(moved.items(), key=lambda each: each[1].outcome == _REPAIRED)
        return tuple(
            MovedTensor(ascii(name)[1:-1][:SHORT], what.kind.value, what.after[:SHORT], what.outcome[:SHORT])
            for name, what in by_outcome[:_LISTED]
        )

    def forked(self) -> None:
        """Discard the parent's capture; called in a forked child, which has no graphs yet."""
        self._forget()

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            self._drop()
            if self._counts is not None:
                self._counts["failures"] += 1
            logger.warning(
                "graphfix: addresses are not compared any more on this rank: %s: %s", type(error).__name__, error
            )


def _pointer(moved: Moved) -> int:
    return 0 if moved.now is None else int(moved.now.data_ptr())


def _is_elastic(worker: Any) -> bool:
    return bool(getattr(worker.vllm_config.parallel_config, "enable_elastic_ep", False))
