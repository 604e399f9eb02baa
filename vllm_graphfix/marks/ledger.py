"""Which cache blocks are finished, by what a worker is told of each step: no tensor is looked at here.

A block that a request was given is written once, token by token, and from then on it is read only, also by other
requests, also after its request has ended. It may be written again when it is allocated anew, and the worker is told of
that no later than in the step that writes it. So a block is followed from its allocation to its next one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, count
from operator import attrgetter
from typing import Any, NamedTuple

_FEW_READERS = 64
"""Names of requests that are not worth looking through."""


class Block(NamedTuple):
    """A block of the cache that is followed."""

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
    """The followed blocks of a request that are still being filled, in the order in which they will be full."""

    __slots__ = ("blocks", "computed", "due")

    def __init__(self, computed: int) -> None:
        self.blocks: list[Block] = []
        self.computed = computed
        """Tokens of the request when all steps that do not wait have run; with drafts, at most so many."""
        self.due = 0
        """The number of them with which it has to be looked at: the first block may be full."""


class Ledger:
    """The blocks that are followed: those that are still being filled, and those that are marked."""

    def __init__(self, tokens: Mapping[int, int], every: int, slack: int = 0, doubt: int = 0) -> None:
        """*tokens* of a block, by group: of those whose blocks are written once; other groups have none.

        *every*: the blocks of one of so many requests are followed, which costs other requests next to nothing.
        *slack*: so many of the last tokens of a request may be computed again, since drafts were refused; *doubt*: so
        many that the scheduler counts as computed may have been.
        """
        self._tokens = tokens
        self._every = every
        self._slack, self._doubt = slack, doubt
        self._last: Any = None
        """The `SchedulerOutput` of the step before."""
        self._count = 0
        self._running: set[str] = set()
        self._followed: dict[int, Block] = {}
        """All that are followed, by number."""
        self._filling: dict[str, _Filling] = {}
        """By request."""
        self._due: list[str] = []
        """Requests in it that the last step has made due, where drafts may be refused."""
        self._lengths: dict[str, list[int]] = {}
        """The number of blocks of each running request that is followed, by group."""
        self._readers: dict[int, list[str]] = {}
        """Other requests that got a finished block from the prefix cache."""
        self.finished: dict[int, Block] = {}
        """Full, and not marked yet."""
        self.newest: list[Block] = []
        """Those that the last step of requests has filled: its slots are in the buffers still."""
        self.marked: dict[int, Block] = {}
        self.waiting: list[Mapping[str, int]] = []
        """The tokens of requests in steps that have been begun, in which it is not noted yet how far they got."""
        self.may_wait = 0
        """So many more steps may be put off."""

    def step(self, output: Any) -> list[Block]:
        """Follows a step that is about to run, *output* a `SchedulerOutput`; returns the marked ones it may write.

        From here on `finished` has what was full before this step.
        """
        cached, scheduled = output.scheduled_cached_reqs, output.num_scheduled_tokens
        # Of those that are followed among the requests that go on: most are not.
        places = [*compress(count(), map(self._lengths.__contains__, cached.req_ids))]
        if self.waiting:
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
        # Before what is new is followed: models with recurrent layers have each block of theirs zeroed in the step that
        # gives it to somebody, before it runs.
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
            self.waiting.append(scheduled)
        return dropped

    def let_wait(self, steps: int) -> int:
        """Allows so many steps to be put off, and returns how many may be: none where a draft may be refused."""
        self.may_wait = 0 if self._slack else steps
        return self.may_wait

    def put_off(self, output: Any) -> bool:
        """Whether it is enough to note how far requests get in this step with a later one; then it waits.

        It has tokens; it gives no block to a request that is followed, and none that is followed to another; nobody
        begins, ends or comes back.

        All in one function, which touches as little as it can: Python that runs once in some milliseconds finds the
        processor's caches cold, and each object costs a tenth of a microsecond or more.
        """
        if not self.may_wait:
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
        if zeroed and not self._followed.keys().isdisjoint(zeroed):
            return False
        given = cached.new_block_ids
        if any(given) and not (  # in most steps nobody gets one, nor comes back
            not cached.resumed_req_ids
            and self._lengths.keys().isdisjoint(compress(cached.req_ids, given))
            and self._followed.keys().isdisjoint(chain.from_iterable(chain.from_iterable(filter(None, given))))
        ):
            return False
        self.may_wait -= 1
        # No more of it: a `SchedulerOutput` may have all tokens of its requests.
        self.waiting.append(scheduled)
        return True

    def catch_up(self, cached: Any = None, places: Sequence[int] = ()) -> None:
        """Notes how far requests got with the steps that wait; of some, at *places*, the next step tells in *cached*.

        What the last of them fills is the newest.
        """
        if not (waiting := self.waiting):
            return
        self.newest, last = [], waiting[-1]
        told: dict[str, int] = {}
        if places and not cached.resumed_req_ids:  # who comes back is told to be at the beginning
            names, computed = cached.req_ids, cached.num_computed_tokens
            told = {names[at]: computed[at] for at in places}
        for request, filling in [*self._filling.items()]:
            tokens = told.get(request)
            if tokens is None:
                tokens = filling.computed + sum(each.get(request, 0) for each in waiting)
            filling.computed = tokens
            if tokens >= filling.due:
                self._finish(request, tokens, tokens - last.get(request, 0))
        waiting.clear()

    def _advance(self, scheduled: Mapping[str, int]) -> None:
        """Notes so many tokens of requests, of which some may be refused drafts."""
        due, tokens_of = [], scheduled.get
        for request, filling in self._filling.items():
            filling.computed = computed = filling.computed + tokens_of(request, 0)
            if computed >= filling.due:
                due.append(request)
        self._due = due
        if scheduled:
            self.newest = []

    def _extend(self, cached: Any, places: Sequence[int]) -> list[Block]:
        """Notes what running requests were given, at *places* those that are followed; returns the marked among it."""
        names, given, computed = cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
        dropped: list[Block] = []
        if resumed := cached.resumed_req_ids:
            given = list(given)
            for at, request in enumerate(names):
                if request in resumed and given[at] is not None:
                    dropped += self._begin(request, given[at], computed[at])
                    given[at] = None
        numbers = chain.from_iterable(chain.from_iterable(filter(None, given)))
        dropped += self._drop(self._followed.keys() & numbers)
        for at in places:
            if (blocks := given[at]) is not None and names[at] in self._lengths:  # it may have ended meanwhile
                self._follow(names[at], blocks, computed[at])
        return dropped

    def settle(self) -> None:
        """Notes what is full with all steps so far, before a step of no request."""
        if self._slack:
            self._settle_at_rest(list(self._filling))
            self._last = None  # all that it tells is noted
        else:
            self.catch_up()

    def _settle_at_rest(self, requests: Collection[str]) -> None:
        """The same of *requests* that are in no step which is under way, where drafts may be refused."""
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
        """Notes what is full where drafts may be refused: what has been counted of them is not sure.

        Only what the scheduler says now is.
        """
        due, self._due = self._due, []
        for request in due:
            filling = self._filling.get(request)
            if filling is not None and request in cached.req_ids:  # else settled at rest, or in no step now
                sure = filling.computed = cached.num_computed_tokens[cached.req_ids.index(request)]
                self._finish(request, sure - self._slack)

    def _finish(self, request: str, tokens: int, before: int = 0) -> None:
        """Notes which blocks of *request* are full with so many *tokens*; it had so many *before* the last step."""
        filling = self._filling[request]
        full = [block for block in filling.blocks if block.end <= tokens]
        for block in full:
            if self._followed.get(block.number) is block:
                self.finished[block.number] = block
                if block.end > before:
                    self.newest.append(block)
        del filling.blocks[: len(full)]
        if filling.blocks:
            filling.due = filling.blocks[0].end + self._slack
        else:
            del self._filling[request]

    def _forget_request(self, request: str) -> None:
        """It has ended, or its blocks were taken: what is full of it stays so."""
        self._running.discard(request)
        if filling := self._filling.pop(request, None):
            for block in filling.blocks:
                if self._followed.get(block.number) is block:
                    del self._followed[block.number]
        self._lengths.pop(request, None)

    def _begin(self, request: str, by_group: Sequence[Sequence[int]], computed: int) -> list[Block]:
        """Notes all blocks that *request* has, new or come back; returns the marked ones that it may write."""
        self._forget_request(request)
        self._running.add(request)
        dropped: list[Block] = []
        hits = []
        for group, numbers in enumerate(by_group):
            # What comes with a request and is computed already is a hit in the prefix cache.
            tokens = self._tokens.get(group)
            hits.append(computed // tokens if tokens else 0)
            if hits[-1]:
                dropped += self._drop_unlike(request, group, numbers[: hits[-1]])
            dropped += self._drop(self._followed.keys() & numbers[hits[-1] :])
        self._count += 1
        if self._count % self._every == 0:
            self._lengths[request] = [min(first, len(numbers)) for first, numbers in zip(hits, by_group, strict=True)]
            fresh = [numbers[first:] for first, numbers in zip(hits, by_group, strict=True)]
            self._follow(request, fresh, computed)
        return dropped

    def _follow(self, request: str, by_group: Sequence[Sequence[int]], computed: int) -> None:
        """Follows these further blocks of *request*."""
        lengths = self._lengths[request]
        fresh: list[Block] = []
        for group, numbers in enumerate(by_group):
            first = lengths[group]
            lengths[group] = first + len(numbers)
            if tokens := self._tokens.get(group):
                for at, number in enumerate(numbers, first):
                    if number:
                        block = self._followed[number] = Block(number, group, at, request, (at + 1) * tokens)
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
        for number in numbers:
            if self._followed.pop(number, None) is None:
                continue
            self.finished.pop(number, None)
            self._readers.pop(number, None)
            if number in self.marked:
                yield self.marked.pop(number)

    def _drop_unlike(self, request: str, group: int, numbers: Sequence[int]) -> Iterator[Block]:
        """Notes who reads which hits.

        Those of another group or place were allocated anew without a word, and that is not understood.
        """
        for at, number in enumerate(numbers):
            known = self._followed.get(number)
            if known is None:
                continue
            if (known.group, known.place) == (group, at):
                readers = self._readers.setdefault(number, [])
                if len(readers) > 2 * len(self._running) + _FEW_READERS:  # most have ended
                    readers[:] = [each for each in readers if each in self._running]
                readers.append(request)
            else:
                yield from self._drop((number,))

    def users(self, block: Block) -> list[str]:
        """The requests that have *block*, and have not ended."""
        return [each for each in (block.request, *self._readers.get(block.number, ())) if each in self._running]

    def adopt(self, blocks: Iterable[Block]) -> None:
        """Follows these blocks, too, which the last step of requests has filled."""
        for block in blocks:
            if block.number not in self._followed:
                self._followed[block.number] = self.finished[block.number] = block
                self.newest.append(block)

    def forget(self, number: int) -> None:
        """Marks this block no more."""
        self._followed.pop(number, None)
        self.finished.pop(number, None)
        self.marked.pop(number, None)
        self._readers.pop(number, None)

    def clear(self) -> None:
        """The cache was emptied, or is not there for a while."""
        self._filling.clear()
        self._due = []
        self._lengths.clear()
        self._last = None
        self._followed.clear()
        self._running.clear()
        self.finished.clear()
        self.newest = []
        self._readers.clear()
        self.marked.clear()
        self.waiting.clear()
        self.may_wait = 0
