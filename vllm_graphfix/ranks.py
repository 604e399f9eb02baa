"""Facts of torch.distributed about the ranks of an engine: their number, their hosts and the store that they share."""

from __future__ import annotations

import re
from typing import Any


def world() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) where torch.distributed is not initialized."""
    from torch import distributed

    known = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if known else (0, 1)


def common_store() -> Any:
    """Return the store that torch.distributed has for all ranks, in a namespace of this package.

    Raises ValueError if there is none.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d.PrefixStore("vllm_graphfix", distributed_c10d._get_default_store())


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
