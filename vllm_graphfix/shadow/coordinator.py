"""The store through which ranks agree on a check where a collective would hang."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from vllm_graphfix.ranks import common_store
from vllm_graphfix.shadow.watchdog import within

T = TypeVar("T")
_STORE_TIMEOUT = 5.0
"""Seconds for all that is done in the store at one time."""
engine_numbers = itertools.count(1)
"""Numbers of the engines of this process: the next engine may find the same store, with the keys of the one before."""


class Coordinator:
    """A folder of torch.distributed's store that the ranks of one engine share."""

    def __init__(self, folder: str, store: Callable[[], Any] = common_store) -> None:
        self._folder, self._store = folder, store

    def _with_store(self, function: Callable[[Any], T]) -> T:
        """Return what *function* makes of the store.

        Raises TimeoutError where the store does not answer, because the process that keeps it is stopped, and the
        store's own errors.
        """
        return within(_STORE_TIMEOUT, lambda: function(self._open()))

    def _open(self) -> Any:
        from torch.distributed.distributed_c10d import PrefixStore

        return PrefixStore(f"shadow/{self._folder}", self._store())
