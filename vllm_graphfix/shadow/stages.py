"""Agreement of pipeline stages on the step to check next, where each keeps a budget and has costs of its own.

A collective of the stages would hang: a stage comes to a step only when the one before has sent its output, so no stage
may wait for a later one. But what an earlier stage has written to torch.distributed's store at a step, a later one
finds when it comes to that step. So after a check each stage publishes its earliest step: the one from which on its
budget allows the next check. Some steps later the first stage takes the latest of these and publishes the plan, which
the others read at that very step. A stage whose check is over says so: the others plan without it, and if all stages
before it are over, a stage plans alone. A store that does not answer ends the check on this stage, and serving
continues, because nothing on the GPU depends on it.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_graphfix.ranks import common_store
from vllm_graphfix.shadow import ranks
from vllm_graphfix.shadow.coordinator import Coordinator, engine_numbers

_PATIENCE = 3.0
"""Seconds that a stage waits for the plan of an earlier one, which has made that step already: it is there in practice.
Less than the store's timeout."""
_PAUSE = 0.001
_TRIES = 4
"""Times that the first stage looks again for a missing earliest step before the check ends on all stages."""
_MAX_WINDOW = 1024
"""Steps."""
_NO_VALUE = "nothing"


class Place(NamedTuple):
    """The position of this rank in its pipeline."""

    stage: int
    stages: int
    pipeline: str
    """The name of the stages that belong together, in a store that may serve several engines."""
    speaks: bool = True
    """True if this rank uses the store: the ranks of a stage agree among themselves, and one speaks for them."""


class PipelineCoordinator(Coordinator):
    """This stage's part in the agreement. Steps are counted alike on all stages.

    The first replay from step `due` on is checked. At step `plan_at` the next `due` is fixed, whether or not there was
    such a replay: the steps up to there are the window of the one that is due.
    """

    def __init__(self, place: Place, share: float, due: int, store: Callable[[], Any] = common_store) -> None:
        super().__init__(place.pipeline, store)
        self._place = place
        # More than there can be batches between the first stage and the last, so that what is published at one step is
        # there at the next.
        self._distance = 16 + 2 * place.stages
        # A budget of that share cannot afford a check sooner, and the agreement costs far less than a check.
        self._window = max(self._distance, min(_MAX_WINDOW, math.ceil(1 / share)))
        self._earliest, self._tries = 0, 0
        self._error: Exception | None = None
        self._earliest_keys: list[str] = []
        self._plan_keys: list[str] = []
        self.move(due)

    def move(self, due: int) -> None:
        """Make step *due* the one that is checked next: a step, not a count of `Schedule`."""
        self.due, self.plan_at, self.has_published = due, due + self._window, False

    def wait(self, plan_at: int) -> None:
        self.plan_at = plan_at

    def publish_earliest(self, step: int) -> None:
        """Publish the *step* from which on this stage may check again.

        Raises nothing; `plan` raises where the store cannot be reached.
        """
        self.has_published, self._earliest = True, step
        if not self._place.speaks:
            return
        try:
            self._with_store(self._store_earliest)
        except Exception as error:
            self._error = error

    def _store_earliest(self, store: Any) -> None:
        key = self._key_of_earliest(self._place.stage)
        store.set(key, str(self._earliest))
        self._earliest_keys = _delete_all_but(1, [*self._earliest_keys, key], store)

    def plan(self, step: int) -> tuple[int, int]:
        """Return (next step that is due, 0), or (0, step at which to call this again); (0, 0) on a rank that is silent.

        Raises TimeoutError; RuntimeError if the check is over on all stages; and the store's errors.
        """
        if not self._place.speaks:
            return 0, 0
        if self._error is not None:
            raise self._error
        return self._with_store(lambda store: self._plan(store, step))

    def _plan(self, store: Any, step: int) -> tuple[int, int]:
        key = f"plan/{step}"
        plan = self._wait_for_earlier_stage(store, key, step)
        if plan is None:
            plan = self._decide(store, step)
            store.set(key, plan)
            self._plan_keys = _delete_all_but(2, [*self._plan_keys, key], store)
        verb, number = _parse_plan(plan, step)
        if verb == "over":
            raise RuntimeError(f"nothing is known of the check of step {self.due} on stage {number} of the pipeline")
        return (number, 0) if verb == "check" else (0, number)

    def end(self) -> None:
        """Tell the other stages that this one checks no more, so that none waits for it."""
        if self._place.speaks:
            self._with_store(lambda store: store.set(_key_of_end(self._place.stage), "1"))

    def _key_of_earliest(self, stage: int) -> str:
        return f"earliest/{self.due}/{stage}"

    def _wait_for_earlier_stage(self, store: Any, key: str, step: int) -> str | None:
        """Return the plan of an earlier stage; None if there is no such stage, or the check is over on all of them.

        Then this stage has to plan.
        """
        before = [_key_of_end(stage) for stage in range(self._place.stage)]
        if not before:
            return None
        until = time.monotonic() + _PATIENCE
        while True:
            over = store.check(before)
            plan = _value_in(store, key)  # read after the other: a stage may have planned, and have ended then
            if plan is not None or over:
                return plan
            if time.monotonic() > until:
                # Without this each stage behind this one would wait as long, one after the other.
                store.set(key, f"over {self._place.stage}")
                raise TimeoutError(f"no earlier stage of the pipeline has planned a check at step {step}")
            time.sleep(_PAUSE)

    def _decide(self, store: Any, step: int) -> str:
        latest, missing = max(self._earliest, step + 1), list[int]()
        for stage in range(self._place.stage + 1, self._place.stages):
            if (earliest := _value_in(store, self._key_of_earliest(stage))) is not None:
                latest = max(latest, int(earliest))
            elif not store.check([_key_of_end(stage)]):
                missing.append(stage)
        if not missing:
            self._tries = 0
            return f"check {latest}"
        self._tries += 1
        return f"plan {step + self._distance}" if self._tries <= _TRIES else f"over {missing[0]}"


def of_this_rank(share: float, due: int) -> PipelineCoordinator:
    place = Place(*ranks.place_in_pipeline())
    return PipelineCoordinator(place._replace(pipeline=f"{next(engine_numbers)}/{place.pipeline}"), share, due)


def _value_in(store: Any, key: str) -> str | None:
    """Return the value of *key* without waiting for it.

    Not by `get`, which waits half an hour if the key was deleted since somebody saw it. Compared with a value that no
    stage writes, nothing is set, and without the key the store returns the value to compare with.
    """
    value = str(store.compare_set(key, _NO_VALUE, _NO_VALUE).decode())
    return None if value == _NO_VALUE else value


def _parse_plan(text: str, step: int) -> tuple[str, int]:
    """Return ``check``, ``plan`` or ``over``, and the number behind it, from what an earlier stage wrote at *step*.

    Raises ValueError for anything else.
    """
    match = re.fullmatch(r"(check|plan|over) ([0-9]{1,18})", text)
    if match is None or (match[1] != "over" and int(match[2]) <= step):
        raise ValueError(f"the plan of an earlier stage of the pipeline at step {step} cannot be read")
    return match[1], int(match[2])


def _key_of_end(stage: int) -> str:
    return f"over/{stage}"


def _delete_all_but(last: int, keys: list[str], store: Any) -> list[str]:
    """Delete all but the *last* keys; whoever needed an older one has read it, or the next would not be there."""
    for key in keys[:-last]:
        store.delete_key(key)
    return keys[-last:]
