"""Acceptance: drafts of checked replays, and of the same steps without a graph, by the tokens that the target samples.

Drafts that differ are a mismatch whatever they cost: the target may accept them as often, or hardly any, and then
answers are right and the speed-up is gone. Both drafts of a checked step are compared with what the target samples in
the step that verifies the replay's: accepted drafts, and one token more.

`Speculator.propose` is called after each step of the target, with the number of tokens that were sampled and rejected.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix.log import logger
from vllm_graphfix.shadow.failures import Attempt, description

if TYPE_CHECKING:
    from torch import Tensor

_MAX_STEPS = 64
"""Checked steps whose drafts wait for the target, and as many that wait for the next check to be counted."""
_MAX_PROPOSALS = 16
"""Proposals for other requests that a step waits for the next of its own: those of a pipeline take turns."""
_SIGNIFICANT = 2 * math.log(1e6)
"""The square of the difference, relative to the number, of pairs that are not equal: beyond it, Hoeffding's bound on a
sign test is below 1e-6. With a test at each of a million pairs a right graph comes beyond it once in 100,000."""


class Drafts(NamedTuple):
    """The drafts of one checked step, each by request, of the first token up to the last one that its graph drafts."""

    graph: str
    first: int
    """The number of tokens that other graphs have drafted, the same in both."""
    replayed: Mapping[str, Sequence[int]]
    eager: Mapping[str, Sequence[int]]
    proposals: int = 0
    """Proposals for other requests since then."""


@dataclass
class Counts:
    """Accepted drafts of one graph, of requests of checked steps; without those of other graphs."""

    requests: int = 0
    drafts: int = 0
    """Drafts of the replays that the target has verified."""
    accepted: int = 0
    accepted_eagerly: int = 0
    """Drafts of the same steps without the graph that the target would have accepted, at most one more than of the
    replay: what the target samples after its first rejection follows from another draft."""
    fewer: int = 0
    """Requests of which the replay has fewer accepted drafts than the step without the graph; copies in a step count
    once."""
    more: int = 0
    collapsed: bool = False

    def add(self, verified: int, accepted: int, accepted_eagerly: int, *, is_copy: bool = False) -> None:
        """Add the drafts of a request; *is_copy*: another request of this step has the same."""
        self.requests += 1
        self.drafts += verified
        self.accepted += accepted
        self.accepted_eagerly += accepted_eagerly
        if not is_copy:
            self.fewer += accepted < accepted_eagerly
            self.more += accepted > accepted_eagerly

    @property
    def is_collapse(self) -> bool:
        """Return whether the replays have less than half of the accepted drafts, and not by chance."""
        lead = self.fewer - self.more
        significant = lead > 0 and lead**2 > _SIGNIFICANT * (self.fewer + self.more)
        return significant and 2 * self.accepted < self.accepted_eagerly

    def __str__(self) -> str:
        return (
            f"{self.accepted} of {self.drafts} drafts accepted, {self.accepted_eagerly} without the graph, in "
            f"{self.requests} rows of checked steps"
        )


class Acceptance:
    """Accepted drafts of this process, by graph. Methods raise nothing: after an error nothing is counted any more."""

    def __init__(self) -> None:
        self.by_graph: dict[str, Counts] = {}
        self._waiting: deque[Drafts] = deque(maxlen=_MAX_STEPS)
        self._sampled: deque[tuple[Drafts, dict[str, int], Tensor]] = deque(maxlen=_MAX_STEPS)
        """Drafts that were verified, the row of each of their requests, and what the target has sampled."""
        self._observer: Callable[..., Any] | None = None
        """The latest wrapper."""
        self._is_over = False

    def add(self, describe: Callable[[], tuple[Any, Drafts]]) -> None:
        """Add the drafts of a checked step, and count those that the target has verified since the last one.

        *describe* returns the speculator and its drafts.
        """
        if not self._is_over:
            self._attempt(lambda: self._add(*describe()))

    def _attempt(self, function: Callable[[], None]) -> None:
        with Attempt() as attempt:
            function()
        if attempt.error is not None and not self._is_over:
            self._is_over = True
            self._waiting.clear()
            self._sampled.clear()
            logger.warning("graphfix: accepted drafts are not counted any more: %s", description(attempt.error))

    def _add(self, speculator: Any, drafts: Drafts) -> None:
        while self._sampled:
            verified, rows, sampled = self._sampled.popleft()
            self._count(verified, rows, sampled.tolist())
        self._waiting.append(drafts)
        if self._observer is None or vars(speculator).get("propose") is not self._observer:
            self._observer = self._observe(speculator)

    def _observe(self, speculator: Any) -> Callable[..., Any]:
        """Wrap the method `propose` of this instance until no drafts wait: steps that are not checked pay nothing."""
        stock, is_first = speculator.propose, "propose" not in vars(speculator)
        signature = inspect.signature(type(speculator).propose)

        @functools.wraps(stock)
        def propose(*args: Any, **kwargs: Any) -> Any:
            if self._waiting:
                self._attempt(lambda: self._save_sampled(signature.bind(speculator, *args, **kwargs).arguments))
            # Not if another patch has come in between, before this one or after it.
            if is_first and not self._waiting and vars(speculator).get("propose") is propose:
                del speculator.propose
            return stock(*args, **kwargs)

        speculator.propose = propose
        return propose

    def _save_sampled(self, proposal: Mapping[str, Any]) -> None:
        """Copy what the target has sampled, on its device: reading it here would wait for the step."""
        import torch

        if proposal.get("dummy_run"):
            return
        batch, sampled = proposal["input_batch"], None
        places = {name: row for row, name in enumerate(batch.req_ids)}
        # From 0.26.0 on vLLM may put placeholders for drafts behind the last token of a prompt, which is that of a
        # request that was preempted, too; the target rejects them. Earlier releases lack them, and mostly this array.
        of_prompt = getattr(batch, "is_prefilling_np", None)
        for drafts in [self._waiting.popleft() for _ in range(len(self._waiting))]:
            rows = {name: places[name] for name in drafts.replayed if name in places}
            if rows and sampled is None:
                last = proposal["last_sampled"].reshape(-1).index_select(0, batch.idx_mapping[: len(places)].long())
                numbers = (proposal[name][: len(places)].long() for name in ("num_sampled", "num_rejected"))
                sampled = torch.stack((*numbers, last.long()))
            if rows and sampled is not None:
                verified = {name: row for name, row in rows.items() if of_prompt is None or not of_prompt[row]}
                self._sampled.append((drafts, verified, sampled))
            elif drafts.proposals < _MAX_PROPOSALS:
                self._waiting.append(drafts._replace(proposals=drafts.proposals + 1))

    def _count(self, drafts: Drafts, rows: Mapping[str, int], sampled: Sequence[Sequence[int]]) -> None:
        # Copies of one prompt differ together, by one last bit: to the test they are one pair.
        pairs: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for name, row in rows.items():
            replayed, eager = drafts.replayed[name], drafts.eager[name]
            number, rejected, last = (each[row] for each in sampled)
            # A prompt's step verifies none, nor does one that vLLM scheduled without drafts.
            accepted, verified = number - 1, min(number - 1 + rejected, len(replayed))
            if accepted < drafts.first or verified <= drafts.first:
                continue
            alike = _common(eager[:verified], [*replayed[:accepted], last])
            counts = self.by_graph.setdefault(drafts.graph, Counts())
            pair = tuple(replayed), tuple(eager)
            numbers = (each - drafts.first for each in (verified, min(accepted, verified), alike))
            counts.add(*numbers, is_copy=pair in pairs)
            pairs.add(pair)
        counts = self.by_graph.get(drafts.graph, Counts())
        if counts.is_collapse and not counts.collapsed:
            counts.collapsed = True
            logger.warning(
                "graphfix: the target accepts far fewer drafts of a CUDA graph than of the same steps without it: "
                "%s: %s. Answers are right, and slower than they could be. VLLM_GRAPHFIX_SHADOW_ACTION=quarantine "
                "drafts without this graph, -cc.cudagraph_mode=PIECEWISE without any full graph",
                drafts.graph,
                counts,
            )

    def events(self) -> dict[str, int]:
        """Return the events of a record; none without drafts that were verified."""
        counts = list(self.by_graph.values())  # made by one call in C: the heartbeat asks
        if not counts:
            return {}
        return {
            "drafts-verified": sum(each.drafts for each in counts),
            "drafts-accepted": sum(each.accepted for each in counts),
            "drafts-accepted-without-graph": sum(each.accepted_eagerly for each in counts),
            "acceptance-collapses": sum(each.collapsed for each in counts),
        }


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common start."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (mine, its) in enumerate(pairs) if mine != its), min(len(one), len(other)))
