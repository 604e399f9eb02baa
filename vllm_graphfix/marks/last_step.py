"""What the last step of requests filled, whoever's it is: of finished blocks, steps of a rank without work write to it.

Which blocks a request has is asked of the model runner, and only once a rank runs out of work: nothing has to be
followed for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_graphfix.marks.ledger import Block


class LastStep:
    """The last step of requests on a rank."""

    def __init__(self, tokens: Mapping[int, int], most: int, doubt: int) -> None:
        """*tokens* of a block, by group; of each group no more than *most* blocks are of use.

        *doubt*: so many tokens that are counted as computed may be drafts that were refused, besides those of the step.
        """
        self._tokens, self._most, self._doubt = tokens, most, doubt
        self.output: Any = None
        """Its `SchedulerOutput`, set before each step that has tokens; None once it is over."""
        self._filled: list[Block] = []

    def ends(self, runner: Any) -> None:
        """Notes what it filled, before a step without tokens: *runner* still has all requests that were in it.

        Whether they have ended is not told yet where scheduling is asynchronous. A block of theirs that is full for
        sure is not written again either way, until it is given to somebody with a word. Model runner V2 has the numbers
        of blocks on the device alone, and there is nothing to be asked.
        """
        output, self.output = self.output, None  # which may hold images
        requests = getattr(runner, "requests", None)
        if output is None or not isinstance(requests, dict):
            return
        self._filled = []
        ran, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        # In the order of the batch: the first slots of it are written to first.
        rows = [name for name in runner.input_batch.req_ids if name in ran]
        for group, size in self._tokens.items():
            found: list[Block] = []
            for name in rows:
                computed, numbers = requests[name].num_computed_tokens, requests[name].block_ids[group]
                sure = computed + ran[name] - len(drafts.get(name, ())) - self._doubt
                found += [
                    Block(numbers[at], group, at, name, (at + 1) * size)
                    for at in range(computed // size, min(sure // size, len(numbers)))
                    if numbers[at]
                ]
                if len(found) >= self._most:
                    break
            self._filled += found[: self._most]

    def forget(self) -> None:
        """There is another cache."""
        self.output, self._filled = None, []

    def has_filled(self) -> bool:
        """Whether it is over, and something is noted."""
        return bool(self._filled) and self.output is None

    def take(self) -> list[Block]:
        """What is noted, once."""
        found = self._filled if self.has_filled() else []
        self._filled = []
        return found
