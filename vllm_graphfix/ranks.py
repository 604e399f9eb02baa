"""What torch.distributed knows of the ranks of an engine.

It knows how many there are, where they run, and the store that they share.
"""

from __future__ import annotations

import re
from typing import Any


def world() -> tuple[int, int]:
    """This rank, and how many there are."""
    from torch import distributed

    known = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if known else (0, 1)


def common_store() -> Any:
    """The store that torch.distributed has for all ranks, in a namespace of this package.

    Raises ValueError where there is none.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d.PrefixStore("vllm_graphfix", distributed_c10d._get_default_store())


def host_in(store: Any, rank: int, world_size: int) -> str | None:
    """The host name that *rank* gave to gloo; None if it cannot be told.

    Every vLLM engine makes one gloo group of all ranks.

    For a rank that says nothing this is the only word of where it runs. Gloo leaves it under a key that ends in the
    rank: its length (u64, little-endian), then the name.
    """
    try:
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        keys = set(store.list_keys())
        for group in {key.rpartition("/")[0] for key in keys if "/cpu/" in key}:
            if all(f"{group}/{other}" in keys for other in range(world_size)):
                left = store.get(f"{group}/{rank}")
                host = left[8 : 8 + int.from_bytes(left[:8], "little")].decode("ascii")
                return host if re.fullmatch(r"[A-Za-z0-9._-]{1,255}", host) else None
    except Exception:
        return None
    return None
