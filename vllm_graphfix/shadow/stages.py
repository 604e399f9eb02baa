"""Which step the stages of a pipeline check next, where they keep a budget and each of them has costs of its own.

A collective of the stages would hang: one comes to a step only when the one before has sent what it made of it, so that
none may wait for a later one. What an earlier one has left at a step in torch.distributed's store, a later one finds
when it comes to it. So after a check each stage leaves its wish, the step from which on its budget allows the next.
Some steps later the first stage takes the latest of these wishes, and leaves it for the others, who look for it at that
very step. A stage whose check is over says so: the others do without its wish, and if all before it are over, a stage
goes by its own decision. A store that does not answer, because the process that has it is stopped, is waited for as
long as a silent stage: nothing on the GPU depends on it, so that the check is over and serving goes on.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_graphfix.ranks import common_store
from vllm_graphfix.shadow import ranks
from vllm_graphfix.shadow.watchdog import within

_PATIENCE = 3.0
"""Seconds that a stage waits for the word of an earlier one about a step which that one has made already: in practice
it is there."""
_STORE = 5.0
"""Seconds for all that is done in the store at one time, that patience included."""
_PAUSE = 0.001
_TRIES = 4
"""Times that the first stage looks again later for a wish which is not there, before the check is over on all of
them."""
_LONGEST = 1024
"""Steps of the longest window."""
_NOTHING = "nothing"
_ENGINES = itertools.count(1)
"""Numbers the engines of this process: the next one may find the store of the one before, and the words in it."""


class Place(NamedTuple):
    """Where this rank is."""

    stage: int
    stages: int
    pipeline: str
    """Names the stages that belong together, in a store that may serve several engines."""
    tells: bool = True
    """Whether this rank tells the others: the ranks of a stage agree among themselves, and one of them tells."""


class Stages:
    """What this stage has to know of the others, and they of it. Steps are counted alike on all stages.

    One is *due*: the first replay from there on is checked. `plan_at` another is fixed, whether or not there was one:
    up to there is the window of the step that is due.
    """

    def __init__(self, place: Place, share: float, due: int, store: Callable[[], Any] = common_store) -> None:
        self._place, self._store = place, store
        # More than there can be batches between the first stage and the last, so that what is left at one is there at
        # the next.
        self._apart = 16 + 2 * place.stages
        # A budget of that share cannot afford a check sooner, and what is done to agree costs far less than one.
        self._window = max(self._apart, min(_LONGEST, math.ceil(1 / share)))
        self._wish, self._tries = 0, 0
        self._failed: Exception | None = None
        self._left: list[str] = []
        self._planned: list[str] = []
        self.move(due)

    def move(self, due: int) -> None:
        self.due, self.plan_at, self.told = due, due + self._window, False

    def wait(self, plan_at: int) -> None:
        self.plan_at = plan_at

    def leave(self, wish: int) -> None:
        """Leaves the step from which on this stage may check again.

        Raises nothing; `plan` does, if the store cannot be reached.
        """
        self.told, self._wish = True, wish
        if not self._place.tells:
            return
        try:
            within(_STORE, self._store_wish)
        except Exception as error:
            self._failed = error

    def _store_wish(self) -> None:
        store, key = self._in_store(), self._key_of_wish(self._place.stage)
        store.set(key, str(self._wish))
        self._left = _delete_older(store, [*self._left, key], 1)

    def plan(self, step: int) -> tuple[int, int]:
        """The step that is due next, and 0; or 0, and the step to `plan` at again.

        Both are 0 from a rank that tells nobody.

        Raises TimeoutError, a RuntimeError if the check is over for all stages, and what the store raises.
        """
        if not self._place.tells:
            return 0, 0
        if self._failed is not None:
            raise self._failed
        return within(_STORE, lambda: self._plan(step))

    def _plan(self, step: int) -> tuple[int, int]:
        store, key = self._in_store(), f"plan/{step}"
        found = self._wait_for_earlier_stage(store, key, step)
        if found is None:
            found = self._decide(store, step)
            store.set(key, found)
            self._planned = _delete_older(store, [*self._planned, key], 2)
        what, told = _parse_decision(found, step)
        if what == "over":
            raise RuntimeError(f"nothing is known of the check of step {self.due} on stage {told} of the pipeline")
        return (told, 0) if what == "check" else (0, told)

    def end(self) -> None:
        """No check on this stage any more: nobody has to wait for it."""
        if self._place.tells:
            within(_STORE, lambda: self._in_store().set(_key_of_end(self._place.stage), "1"))

    def _in_store(self) -> Any:
        from torch.distributed.distributed_c10d import PrefixStore

        return PrefixStore(f"shadow/{self._place.pipeline}", self._store())

    def _key_of_wish(self, stage: int) -> str:
        return f"wish/{self.due}/{stage}"

    def _wait_for_earlier_stage(self, store: Any, key: str, step: int) -> str | None:
        """What one has decided; None if there is none, or all of them are over, and this stage has to."""
        before = [_key_of_end(stage) for stage in range(self._place.stage)]
        if not before:
            return None
        until = time.monotonic() + _PATIENCE
        while True:
            over = store.check(before)
            found = _value_in(store, key)  # asked after the other: a stage may have decided, and been over then
            if found is not None or over:
                return found
            if time.monotonic() > until:
                # Or each stage behind this one would wait as long, after it.
                store.set(key, f"over {self._place.stage}")
                raise TimeoutError(f"no earlier stage of the pipeline has planned a check at step {step}")
            time.sleep(_PAUSE)

    def _decide(self, store: Any, step: int) -> str:
        latest, missing = max(self._wish, step + 1), list[int]()
        for stage in range(self._place.stage + 1, self._place.stages):
            if (wish := _value_in(store, self._key_of_wish(stage))) is not None:
                latest = max(latest, int(wish))
            elif not store.check([_key_of_end(stage)]):
                missing.append(stage)
        if not missing:
            self._tries = 0
            return f"check {latest}"
        self._tries += 1
        return f"plan {step + self._apart}" if self._tries <= _TRIES else f"over {missing[0]}"


def of_this_rank(share: float, due: int) -> Stages:
    place = Place(*ranks.place_in_pipeline())
    return Stages(place._replace(pipeline=f"{next(_ENGINES)}/{place.pipeline}"), share, due)


def _value_in(store: Any, key: str) -> str | None:
    """Without waiting for it, as `get` does, for half an hour, where the key has gone since somebody saw it.

    Compared with what nobody leaves, nothing is set, and where there is no key the store returns what it was to
    compare.
    """
    found = str(store.compare_set(key, _NOTHING, _NOTHING).decode())
    return None if found == _NOTHING else found


def _parse_decision(left: str, step: int) -> tuple[str, int]:
    """What an earlier stage has left at *step*, ``check``, ``plan`` or ``over``, and its number.

    Raises ValueError for anything else.
    """
    found = re.fullmatch(r"(check|plan|over) ([0-9]{1,18})", left)
    if found is None or (found[1] != "over" and int(found[2]) <= step):
        raise ValueError(f"what an earlier stage of the pipeline has left at step {step} is not understood")
    return found[1], int(found[2])


def _key_of_end(stage: int) -> str:
    return f"over/{stage}"


def _delete_older(store: Any, keys: list[str], kept: int) -> list[str]:
    """Deletes all but the last *kept*: whoever needed one has read it, or the next could not have been left."""
    for key in keys[:-kept]:
        store.delete_key(key)
    return keys[-kept:]
