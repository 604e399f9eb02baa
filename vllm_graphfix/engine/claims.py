"""Watches builders of attention metadata while vLLM captures full graphs of decodes with drafts.

A builder that takes such rows for prompts does so at the capture, too, and the graph then holds the path of prompts
with the lengths, plans and tensors of its dummy batch. Model runners go by what the builder's class claims to support,
which it may do without knowing its threshold. During the capture the methods of each builder instance that build have a
wrapper in their place. The check never calls a builder itself, since builders keep state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from vllm_graphfix.engine.graph_dispatch import builders_of, graph_being_captured
from vllm_graphfix.log import logger
from vllm_graphfix.records.record import SHORT, FalseClaim
from vllm_graphfix.text import PAGES

NAME = "claims"
"""Its name in records and metrics, which hold its counts like those of a fix."""
_LISTED = 5
"""Limit of builders that a record names."""
_BUILDS = ("build_for_cudagraph_capture", "build")
"""Model runner V2 calls the second for its captures, too, up to 0.20.2."""
_HARMLESS_BUILDERS = frozenset({"KpoolTailMetadataBuilder", "RocmOctaveMetadataBuilder"})
"""They count such rows as prompts, and their kernels read all that changes from tensors that stay (docs/claims.md)."""


class ClaimCheck:
    """Watches the captures of one process."""

    def __init__(self, publish: Callable[[], None] = lambda: None) -> None:
        """*publish* is called when a claim is not true."""
        self._publish = publish
        self._failures = 0
        self._longest = 0
        """Tokens of a decode with all its drafts."""
        self._watched: list[tuple[Any, str]] = []
        self._inside = False
        """One of them builds: what it calls of its own is not counted."""
        self._count: int | None = None
        """Builds for full graphs in which decodes were prompts; None before a capture with drafts."""
        self._first: dict[str, FalseClaim] = {}

    def begin_capture(self, worker: Any) -> None:
        """Watch the builders of *worker*, which is about to capture its graphs."""
        if self._failures:
            return
        try:
            drafts = getattr(getattr(worker.vllm_config, "speculative_config", None), "num_speculative_tokens", None)
            if not drafts:
                return
            self._count, self._longest = self._count or 0, 1 + int(drafts)
            for builder in _builders(worker.model_runner):
                for name in _BUILDS:
                    if name not in vars(builder) and callable(getattr(builder, name, None)):
                        setattr(builder, name, functools.partial(self._around, builder, getattr(builder, name)))
                        self._watched.append((builder, name))
        except Exception as error:
            self._fail(error)

    def end_capture(self) -> None:
        """Watch no builder any more."""
        watched, self._watched = self._watched, []
        for builder, name in watched:
            vars(builder).pop(name, None)

    def _around(self, builder: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside or not self._watched:
            return stock(*args, **kwargs)
        self._inside = True
        try:
            metadata = stock(*args, **kwargs)
        except AssertionError:
            self._judge(builder, (*args, *kwargs.values()), None, refuses=True)
            raise
        finally:
            self._inside = False
        self._judge(builder, (*args, *kwargs.values()), metadata)
        return metadata

    def _judge(self, builder: Any, arguments: tuple[Any, ...], metadata: Any, *, refuses: bool = False) -> None:
        """Report decodes with drafts for a full graph that *builder* took for prompts, or *refuses* as too long."""
        if self._failures:
            return
        try:
            if not refuses and not takes_for_prompts(metadata):
                return
            graph = graph_being_captured()
            if graph is None or graph.mode != "FULL" or not graph.serves:
                return
            length = self._length_of_decodes(arguments, graph.longest)
            # Builders refuse by assert. With a threshold of at least *length* it refused something else.
            if length is not None and not (refuses and builder.reorder_batch_threshold >= length):
                self._see(type(builder).__name__, graph.tokens, refuses=refuses)
        except Exception as error:
            self._fail(error)

    def _length_of_decodes(self, arguments: tuple[Any, ...], longest: int | None) -> int | None:
        """Return the length of the rows of the batch among *arguments* if they may be decodes with drafts.

        They are, whatever their lengths, in a graph for decodes of at most *longest* tokens.
        """
        batch = next((each for each in arguments if hasattr(each, "max_query_len")), None)
        if batch is None:
            return None
        length = int(batch.max_query_len)
        is_meant = length == longest or batch.num_actual_tokens == batch.num_reqs * length
        return length if 1 < length <= self._longest and is_meant else None

    def _see(self, builder: str, tokens: int, *, refuses: bool) -> None:
        claim = FalseClaim(builder[:SHORT], f"FULL {tokens}")
        if refuses:
            logger.warning(
                "graphfix: %s claims full graphs of decodes with drafts, and refuses to be captured with them, in the "
                "graph of %d tokens: %s. See %s/claims.md",
                builder,
                tokens,
                claim.advice,
                PAGES,
            )
            return
        if builder in _HARMLESS_BUILDERS:
            return
        self._count = (self._count or 0) + 1
        if builder not in self._first:
            self._first[builder] = claim
            logger.warning(
                "graphfix: %s takes decodes with drafts for prompts, and vLLM captures them so in full graphs, which "
                "may answer wrongly; the graph of %d tokens is the first of them: %s. See %s/claims.md",
                builder,
                tokens,
                claim.advice,
                PAGES,
            )
            self._publish()

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        self.end_capture()
        logger.warning("graphfix: claims of builders are not checked: %s: %s", type(error).__name__, error)

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the events for a record; empty before a capture with drafts."""
        if self._count is None and not self._failures:
            return {}
        return {NAME: {"prompts-in-graphs": self._count or 0, "failures": self._failures}}

    def findings(self) -> tuple[FalseClaim, ...]:
        """Return the first builders whose claims are not true, for a record."""
        return tuple(self._first.values())[:_LISTED]

    def reset(self) -> None:
        """Discard what was watched: in a forked child, which has no graphs yet, or when the setting changes."""
        self.end_capture()
        self._failures, self._count, self._first = 0, None, {}


def takes_for_prompts(metadata: Any) -> bool:
    """Tell if a builder has counted rows of a batch of decodes as prompts."""
    counts = {name: getattr(metadata, name, None) for name in ("num_prefills", "num_extends", "is_prefill")}
    if any(isinstance(count, int) and count for count in counts.values()):
        return True
    decodes = getattr(metadata, "num_decodes", None)
    return isinstance(decodes, int) and not decodes and not getattr(metadata, "num_spec_decodes", 0)


def _builders(runner: Any) -> Iterator[Any]:
    """Yield the builders of the model and of a drafter that has graphs of its own, each once."""
    seen: set[int] = set()
    for owner in (runner, getattr(runner, "speculator", None)):
        for builder in builders_of(owner):
            if id(builder) not in seen:
                seen.add(id(builder))
                yield builder
