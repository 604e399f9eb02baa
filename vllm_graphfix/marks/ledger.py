"""Finished cache blocks, tracked by what a worker learns of each step: no tensor is read here.

A block that a request gets is written once, token by token. From then on it is only read, also by other requests, also
after its request has ended. It may be written again once it is reallocated, which the worker learns no later than in
the step that writes it. So a block is tracked from one allocation to the next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, count
from operator import attrgetter
from typing import Any, NamedTuple

_FEW_READERS = 64
"""Names of requests that are not worth filtering."""


class Block(NamedTuple):
    """A tracked block of the cache."""

    number: int
    """The scheduler's; one pool has the blocks of all groups, and 0 is the null block."""
    group: int
    place: int
    """Its place among the blocks of its request."""
    request: str
    """The request that it was allocated for."""
    end: int
    """The number of tokens of the request with which it is full."""


_END = attrgetter("end")


class _Filling:
    """The tracked blocks of a request that are not full, in the order in which they will be."""

    __slots__ = ("blocks", "computed", "due")

    def __init__(self, computed: int) -> None:
        self.blocks: list[Block] = []
        self.computed = computed
        """Tokens of the request after all steps that are not deferred; with drafts, at most so many."""
        self.due = 0
        """The number of tokens with which the first block may be full."""


class BlockTracker:
    """The blocks that are tracked: those that are being filled, and those that are marked."""

    def __init__(self, tokens: Mapping[int, int], every: int, slack: int = 0, doubt: int = 0) -> None:
        """*tokens* of a block, by group, for the groups whose blocks are written once.

        *every*: the blocks of one of so many requests are tracked, which costs other requests next to nothing.
        *slack*: so many of the last tokens of a request may be computed again, since drafts were rejected; *doubt*: so
        many that the scheduler counts as computed may have been.
        """
        self._tokens = tokens
        self._every = every
        self._slack, self._doubt = slack, doubt
        self._last: Any = None
        """The `SchedulerOutput` of the step before."""
        self._count = 0
        self._running: set[str] = set()
        self._tracked: dict[int, Block] = {}
        """All tracked blocks, by number."""
        self._filling: dict[str, _Filling] = {}
        """By request."""
        self._due: list[str] = []
        """Requests whose first block may be full after the last step, where drafts may be rejected."""
        self._lengths: dict[str, list[int]] = {}
        """The number of blocks of each running request that is tracked, by group."""
        self._readers: dict[int, list[str]] = {}
        """Other requests that got a finished block from the prefix cache."""
        self.finished: dict[int, Block] = {}
        """Full blocks that are not marked yet."""
        self.newest: list[Block] = []
        """Those that the last step of requests has filled: the buffers still have its slots."""
        self.marked: dict[int, Block] = {}
        self.deferred: list[Mapping[str, int]] = []
        """The tokens of requests in steps that have begun, and whose progress is not noted yet."""
        self.may_defer = 0
        """So many more steps may be deferred."""

    def step(self, output: Any) -> list[Block]:
        """Track a step that is about to run, *output* a `SchedulerOutput`; return the marked blocks it may write.

        Afterwards `finished` has the blocks that were full before this step.
        """
        cached, scheduled = output.scheduled_cached_reqs, output.num_scheduled_tokens
        # Places of the tracked ones among the requests that go on: most are not tracked.
        places = [*compress(count(), map(self._lengths.__contains__, cached.req_ids))]
        if self.deferred:
            self.catch_up(cached, places)
        elif self._due:
            self._settle(cached)
        ended = output.finished_req_ids
        if preempted := getattr(output, "preempted_req_ids", None):
            ended = {*ended, *preempted}
        if ended:
            self._settle_at_rest(self._filling.keys() & ended)
            for request in ended:
                self._forget_request(request)
        dropped: list[Block] = []
        # Before new blocks are tracked: models with recurrent layers have each of their blocks zeroed in the step that
        # allocates it, before it runs.
        if zeroed := getattr(output, "new_block_ids_to_zero", None):
            dropped += self._drop(zeroed)
        if copies := getattr(output, "kv_cache_block_copies", None):
            dropped += self._drop(copy.dst_block_id for copy in copies)
        for new in output.scheduled_new_reqs:
            dropped += self._begin(new.req_id, new.block_ids, new.num_computed_tokens)
        if any(cached.new_block_ids):  # in most steps nobody gets one
            dropped += self._extend(cached, places)
        if self._slack:
            self._advance(scheduled)
            self._last = output
        elif scheduled:
            self.newest = []
            self.deferred.append(scheduled)
        return dropped

    def allow_deferring(self, steps: int) -> int:
        """Allow so many steps to be deferred, and return the number: 0 where a draft may be rejected."""
        self.may_defer = 0 if self._slack else steps
        return self.may_defer

    def try_defer(self, output: Any) -> bool:
        """Defer the step if that is safe; return whether it was. Its progress is noted with a later step then.

        A step can wait that has tokens, gives no block to a tracked request and no tracked block to another one, and in
        which no request begins, ends or comes back.

        One function, which touches as little as it can: Python that runs once in some milliseconds finds the
        processor's caches cold, and each object costs a tenth of a microsecond or more.
        """
        if not self.may_defer:
            return False
        cached, scheduled = output.scheduled_cached_reqs, output.num_scheduled_tokens
        if (
            not scheduled
            or output.scheduled_new_reqs
            or output.finished_req_ids
            or getattr(output, "preempted_req_ids", None)
            or getattr(output, "kv_cache_block_copies", None)
        ):
            return False
        zeroed = getattr(output, "new_block_ids_to_zero", None)
        if zeroed and not self._tracked.keys().isdisjoint(zeroed):
            return False
        fresh = cached.new_block_ids
        if any(fresh) and not (  # in most steps nobody gets a block, nor comes back
            not cached.resumed_req_ids
            and self._lengths.keys().isdisjoint(compress(cached.req_ids, fresh))
            and self._tracked.keys().isdisjoint(chain.from_iterable(chain.from_iterable(filter(None, fresh))))
        ):
            return False
        self.may_defer -= 1
        # Not the whole output: a `SchedulerOutput` may have all tokens of its requests.
        self.deferred.append(scheduled)
        return True

    def catch_up(self, cached: Any = None, places: Sequence[int] = ()) -> None:
        """Note the progress of the deferred steps; the last one's full blocks are the newest.

        For requests at *places*, the next step's *cached* has their computed tokens.
        """
        if not (deferred := self.deferred):
            return
        self.newest, last = [], deferred[-1]
        by_scheduler: dict[str, int] = {}
        if places and not cached.resumed_req_ids:  # a resumed request starts again, so its number says nothing
            names, computed = cached.req_ids, cached.num_computed_tokens
            by_scheduler = {names[at]: computed[at] for at in places}
        for request, filling in [*self._filling.items()]:
            tokens = by_scheduler.get(request)
            if tokens is None:
                tokens = filling.computed + sum(each.get(request, 0) for each in deferred)
            filling.computed = tokens
            if tokens >= filling.due:
                self._finish(request, tokens, tokens - last.get(request, 0))
        deferred.clear()

    def _advance(self, scheduled: Mapping[str, int]) -> None:
        """Add the *scheduled* tokens of each request, some of which may be rejected drafts."""
        due, tokens_of = [], scheduled.get
        for request, filling in self._filling.items():
            filling.computed = computed = filling.computed + tokens_of(request, 0)
            if computed >= filling.due:
                due.append(request)
        self._due = due
        if scheduled:
            self.newest = []

    def _extend(self, cached: Any, places: Sequence[int]) -> list[Block]:
        """Track new blocks of tracked running requests, at *places*; return the marked blocks among all new ones."""
        names, fresh, computed = cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
        dropped: list[Block] = []
        if resumed := cached.resumed_req_ids:
            fresh = list(fresh)
            for at, request in enumerate(names):
                if request in resumed and fresh[at] is not None:
                    dropped += self._begin(request, fresh[at], computed[at])
                    fresh[at] = None
        numbers = chain.from_iterable(chain.from_iterable(filter(None, fresh)))
        dropped += self._drop(self._tracked.keys() & numbers)
        for at in places:
            if (blocks := fresh[at]) is not None and names[at] in self._lengths:  # it may have ended meanwhile
                self._track(names[at], blocks, computed[at])
        return dropped

    def settle(self) -> None:
        """Note the full blocks after all steps so far, before a step without requests."""
        if self._slack:
            self._settle_at_rest(list(self._filling))
            self._last = None  # its data are used up
        else:
            self.catch_up()

    def _settle_at_rest(self, requests: Collection[str]) -> None:
        """Note the full blocks of *requests* that are in no step under way, where drafts may be rejected."""
        if not self._slack or self._last is None or not requests:
            return
        last = self._last
        cached = last.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in last.scheduled_new_reqs}
        for request in requests:
            if request in computed:
                drafts = len(last.scheduled_spec_decode_tokens.get(request, ()))
                ran = last.num_scheduled_tokens.get(request, 0) - drafts
                self._finish(request, computed[request] + ran - self._doubt)

    def _settle(self, cached: Any) -> None:
        """Note the full blocks of due requests where drafts may be rejected, by the scheduler's new numbers."""
        due, self._due = self._due, []
        for request in due:
            filling = self._filling.get(request)
            if filling is not None and request in cached.req_ids:  # else it was settled at rest, or is in no step now
                sure = filling.computed = cached.num_computed_tokens[cached.req_ids.index(request)]
                self._finish(request, sure - self._slack)

    def _finish(self, request: str, tokens: int, before: int = 0) -> None:
        """Note which blocks of *request* are full with so many *tokens*; it had so many *before* the last step."""
        filling = self._filling[request]
        full = [block for block in filling.blocks if block.end <= tokens]
        for block in full:
            if self._tracked.get(block.number) is block:
                self.finished[block.number] = block
                if block.end > before:
                    self.newest.append(block)
        del filling.blocks[: len(full)]
        if filling.blocks:
            filling.due = filling.blocks[0].end + self._slack
        else:
            del self._filling[request]

    def _forget_request(self, request: str) -> None:
        """Drop the blocks of *request* that are not full: it has ended, or lost its blocks."""
        self._running.discard(request)
        if filling := self._filling.pop(request, None):
            for block in filling.blocks:
                if self._tracked.get(block.number) is block:
                    del self._tracked[block.number]
        self._lengths.pop(request, None)

    def _begin(self, request: str, by_group: Sequence[Sequence[int]], computed: int) -> list[Block]:
        """Note all blocks of *request*, which is new or has come back; return the marked ones that it may write."""
        self._forget_request(request)
        self._running.add(request)
        dropped: list[Block] = []
        hits = []
        for group, numbers in enumerate(by_group):
            # Blocks that come with a request and are computed already are hits in the prefix cache.
            tokens = self._tokens.get(group)
            hits.append(computed // tokens if tokens else 0)
            if hits[-1]:
                dropped += self._drop_unlike(request, group, numbers[: hits[-1]])
            dropped += self._drop(self._tracked.keys() & numbers[hits[-1] :])
        self._count += 1
        if self._count % self._every == 0:
            self._lengths[request] = [min(first, len(numbers)) for first, numbers in zip(hits, by_group, strict=True)]
            fresh = [numbers[first:] for first, numbers in zip(hits, by_group, strict=True)]
            self._track(request, fresh, computed)
        return dropped

    def _track(self, request: str, by_group: Sequence[Sequence[int]], computed: int) -> None:
        """Track these further blocks of *request*."""
        lengths = self._lengths[request]
        fresh: list[Block] = []
        for group, numbers in enumerate(by_group):
            first = lengths[group]
            lengths[group] = first + len(numbers)
            if tokens := self._tokens.get(group):
                for at, number in enumerate(numbers, first):
                    if number:
                        block = self._tracked[number] = Block(number, group, at, request, (at + 1) * tokens)
                        fresh.append(block)
        if fresh:
            filling = self._filling.get(request)
            if filling is None:
                filling = self._filling[request] = _Filling(computed)
            filling.blocks += fresh
            if len(by_group) > 1:
                filling.blocks.sort(key=_END)
            filling.due = filling.blocks[0].end + self._slack

    def _drop(self, numbers: Iterable[int]) -> Iterator[Block]:
        """Track these blocks no more; yield those that were marked."""
        for number in numbers:
            if self._tracked.pop(number, None) is None:
                continue
            self.finished.pop(number, None)
            self._readers.pop(number, None)
            if number in self.marked:
                yield self.marked.pop(number)

    def _drop_unlike(self, request: str, group: int, numbers: Sequence[int]) -> Iterator[Block]:
        """Note *request* as a reader of its hits; drop blocks of another group or place, and yield the marked ones.

        Those were reallocated and the worker did not learn of it, for a reason that is not known.
        """
        for at, number in enumerate(numbers):
            block = self._tracked.get(number)
            if block is None:
                continue
            if (block.group, block.place) == (group, at):
                readers = self._readers.setdefault(number, [])
                if len(readers) > 2 * len(self._running) + _FEW_READERS:  # most have ended
                    readers[:] = [each for each in readers if each in self._running]
                readers.append(request)
            else:
                yield from self._drop((number,))

    def users(self, block: Block) -> list[str]:
        """Return the running requests that have *block*."""
        return [each for each in (block.request, *self._readers.get(block.number, ())) if each in self._running]

    def adopt(self, blocks: Iterable[Block]) -> None:
        """Track these full blocks, too, which the last step of requests has filled."""
        for block in blocks:
            if block.number not in self._tracked:
                self._tracked[block.number] = self.finished[block.number] = block
                self.newest.append(block)

    def forget(self, number: int) -> None:
        self._tracked.pop(number, None)
        self.finished.pop(number, None)
        self.marked.pop(number, None)
        self._readers.pop(number, None)

    def clear(self) -> None:
        """Forget all blocks: the cache was emptied, or is not there for a while."""
        self._filling.clear()
        self._due = []
        self._lengths.clear()
        self._last = None
        self._tracked.clear()
        self._running.clear()
        self.finished.clear()
        self.newest = []
        self._readers.clear()
        self.marked.clear()
        self.deferred.clear()
        self.may_defer = 0
