"""Facts of torch.distributed about the ranks of an engine: their number, their hosts and the store that they share."""

from __future__ import annotations

import functools
import queue
import re
import threading
from collections.abc import Callable
from typing import Any


class StoreTimeoutError(RuntimeError):
    """The host of rank 0, which holds the store of the ranks, does not answer."""


class BoundedStore:
    """A `torch.distributed.Store` each of whose calls ends within *limit* seconds.

    If packets are lost without a sign, as when a host loses its power, a TCPStore waits as long as TCP sends its
    request again, a quarter of an hour on Linux, whatever timeout the call has: it also waits for the answer to the
    message by which it ends a wait.
    """

    def __init__(self, store: Any, limit: float) -> None:
        self._store, self._limit = store, limit
        self._is_lost = False

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)
        return functools.partial(self._call, attribute) if callable(attribute) else attribute

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of *method*. Raises its error, or StoreTimeoutError."""
        if self._is_lost:  # a thread still holds the store's lock
            raise StoreTimeoutError(self._message())
        outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                outcome.put((method(*args, **kwargs), None))
            except BaseException as error:
                outcome.put((None, error))

        # A daemon: the process must be able to end while this thread waits.
        threading.Thread(target=run, name="graphfix-store", daemon=True).start()
        try:
            result, error = outcome.get(timeout=self._limit)
        except queue.Empty:
            self._is_lost = True
            raise StoreTimeoutError(self._message()) from None
        if error is not None:
            raise error
        return result

    def _message(self) -> str:
        return (
            f"The store in which ranks are compared has not answered for {self._limit:.0f} s: the host of rank 0, "
            "which holds it, is gone or cut off."
        )


def world() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) where torch.distributed is not initialized."""
    from torch import distributed

    known = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if known else (0, 1)


def common_store(limit: float | None = None) -> Any:
    """Return the store that torch.distributed has for all ranks, in a namespace of this package.

    *limit*: seconds within which each of its calls ends (`BoundedStore`). Raises ValueError if there is no store.
    """
    from torch.distributed import distributed_c10d

    store = distributed_c10d.PrefixStore("vllm_graphfix", distributed_c10d._get_default_store())
    return store if limit is None else BoundedStore(store, limit)


def host_in(store: Any, rank: int, world_size: int) -> str | None:
    """Return the host name that *rank* passed to gloo; None if that is not known.

    Every vLLM engine makes one gloo group of all ranks. For a rank that does not report, this is the only source of its
    host. Gloo stores it under a key that ends in the rank: the length of the name (u64, little-endian), then the name.
    """
    try:
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        keys = set(store.list_keys())
        for group in {key.rpartition("/")[0] for key in keys if "/cpu/" in key}:
            if all(f"{group}/{other}" in keys for other in range(world_size)):
                stored = store.get(f"{group}/{rank}")
                host = stored[8 : 8 + int.from_bytes(stored[:8], "little")].decode("ascii")
                return host if re.fullmatch(r"[A-Za-z0-9._-]{1,255}", host) else None
    except Exception:
        return None
    return None
