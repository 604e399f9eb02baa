"""The blocks that the last step of requests filled: steps of a rank without work write to them.

The model runner knows which blocks a request has. It is asked once a rank runs out of work, so that nothing has to be
tracked for this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_graphfix.marks.ledger import Block


class LastStep:
    """The last step of requests on a rank, whether they are followed or not."""

    def __init__(self, tokens: Mapping[int, int], most: int, doubt: int) -> None:
        """*tokens* of a block, by group; of each group at most *most* blocks are of use.

        *doubt*: so many tokens that count as computed may be drafts that were rejected, besides those of the step.
        """
        self._tokens, self._most, self._doubt = tokens, most, doubt
        self.output: Any = None
        """Its `SchedulerOutput`, set before each step that has tokens; None once it is over."""
        self._filled: list[Block] = []

    def finish(self, runner: Any) -> None:
        """Note the filled blocks, before a step without tokens: *runner* still has all requests of the last step.

        With asynchronous scheduling it is not known yet whether they have ended. Either way a block that is full for
        sure is not written again until it is reallocated, which the worker learns. Model runner V2 has the numbers of
        blocks on the device alone, and nothing is noted there.
        """
        output, self.output = self.output, None  # release it: it may hold images
        requests = getattr(runner, "requests", None)
        if output is None or not isinstance(requests, dict):
            return
        self._filled = []
        scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        # In the order of the batch: its first slots are written to first.
        rows = [name for name in runner.input_batch.req_ids if name in scheduled]
        for group, size in self._tokens.items():
            filled: list[Block] = []
            for name in rows:
                computed, numbers = requests[name].num_computed_tokens, requests[name].block_ids[group]
                sure = computed + scheduled[name] - len(drafts.get(name, ())) - self._doubt
                filled += [
                    Block(numbers[at], group, at, name, (at + 1) * size)
                    for at in range(computed // size, min(sure // size, len(numbers)))
                    if numbers[at]
                ]
                if len(filled) >= self._most:
                    break
            self._filled += filled[: self._most]

    def forget(self) -> None:
        """Drop all notes: there is another cache."""
        self.output, self._filled = None, []

    def has_filled(self) -> bool:
        """Tell whether the step is over and has filled blocks that nobody has taken."""
        return bool(self._filled) and self.output is None

    def take(self) -> list[Block]:
        """Return the filled blocks, once."""
        filled = self._filled if self.has_filled() else []
        self._filled = []
        return filled
