"""Ranks and times in few words."""

from __future__ import annotations

from collections.abc import Iterable


def ranks_named(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 2-5``."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    told = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {told}" if len(ordered) == 1 else f"ranks {told}"


def lasting(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def ago(seconds: float) -> str:
    return f"{lasting(seconds)} ago"
