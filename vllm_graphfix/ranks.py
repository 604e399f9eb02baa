"""Facts of torch.distributed about the ranks of an engine: their number, their hosts and the store that they share."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

_GROUPS = ("", *(f"{number}//" for number in range(1, 9)))
"""Of the keys of torch's groups: the default group, and the first ones that are made after it, in their order.

Not by a list of the store's keys: one of a thousand ranks has tens of thousands of them.
"""


class StoreLostError(RuntimeError):
    """The store of the ranks does not answer, or has closed its connection: the host of rank 0 is gone or cut off."""


class _Loss(NamedTuple):
    message: str
    waiting: threading.Thread | None = None
    """The call that is not answered and holds the store's lock; None if the connection is closed."""

    def is_over(self) -> bool:
        """Tell if that call was answered after all: the host was cut off for a while."""
        return self.waiting is not None and not self.waiting.is_alive()


_losses: WeakKeyDictionary[Any, _Loss] = WeakKeyDictionary()
"""By store: a comparison must not wait again for what an earlier one has waited for in vain."""


class BoundedStore:
    """A `torch.distributed.Store` each of whose calls ends within *limit* seconds.

    If packets are lost without a sign, as when a host loses its power, a TCPStore waits as long as TCP sends its
    request again, a quarter of an hour on Linux, whatever timeout the call has: it also waits for the answer to the
    message by which it ends a wait. Once a call was not answered no other waits, whoever makes it.
    """

    def __init__(self, store: Any, limit: float, connection: Any = None) -> None:
        """*connection*: the store whose loss this one shares, by default *store* itself."""
        self._store, self._limit = store, limit
        self._connection = store if connection is None else connection

    @property
    def underlying_store(self) -> BoundedStore:
        """The store without its prefix, as bounded as this one."""
        return BoundedStore(self._store.underlying_store, self._limit, self._connection)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)
        return functools.partial(self._call, attribute) if callable(attribute) else attribute

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of *method*. Raises its error, or StoreLostError."""
        loss = _losses.get(self._connection)
        if loss is not None and not loss.is_over():
            raise StoreLostError(loss.message)
        import queue  # with a store, torch has imported it; `register` goes without

        outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                outcome.put((method(*args, **kwargs), None))
            except BaseException as error:
                outcome.put((None, error))

        # A daemon: the process must be able to end while this thread waits.
        thread = threading.Thread(target=run, name="graphfix-store", daemon=True)
        thread.start()
        try:
            result, error = outcome.get(timeout=self._limit)
        except queue.Empty:
            self._lose(f"has not answered for {self._limit:.0f} s: the host of rank 0, which holds it,", thread)
        if isinstance(error, _network_error()):
            self._lose("has closed its connection: the process of rank 0, which holds it, has ended, or its host", None)
        if error is not None:
            raise error
        return result

    def _lose(self, how: str, waiting: threading.Thread | None) -> NoReturn:
        loss = _losses[self._connection] = _Loss(
            f"The store in which ranks are compared {how} is gone or cut off.", waiting
        )
        raise StoreLostError(loss.message)


def _network_error() -> tuple[type[Exception], ...]:
    """Return the error of a store whose connection is closed, which it never makes anew."""
    from torch import distributed

    error = getattr(distributed, "DistNetworkError", None)
    return () if error is None else (error,)


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

    connection = distributed_c10d._get_default_store()
    store = distributed_c10d.PrefixStore("vllm_graphfix", connection)
    return store if limit is None else BoundedStore(store, limit, connection)


def host_in(store: Any, rank: int, world_size: int) -> str | None:
    """Return the host name that *rank* passed to gloo; None if that is not known.

    Every vLLM engine makes one gloo group of all ranks. For a rank that does not report, this is the only source of its
    host. Gloo stores it under a key that ends in the rank: the length of the name (u64, little-endian), then the name.
    """
    try:
        default = store.underlying_store  # without the namespace of this package
        for group in _GROUPS:
            keys = [f"{group}cpu//0/{other}" for other in range(world_size)]
            if default.check(keys):
                stored = default.get(keys[rank])
                host = stored[8 : 8 + int.from_bytes(stored[:8], "little")].decode("ascii")
                return host if re.fullmatch(r"[A-Za-z0-9._-]{1,255}", host) else None
    except Exception:
        return None
    return None
