"""Short texts of values, ranks and durations for one line of a log or a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

PAGES = "https://github.com/vllm-graphfix/vllm-graphfix/blob/main/docs"
"""The address of `docs/` on the main branch of the repository that pyproject.toml names as Source."""


def brief_repr(value: str) -> str:
    """Quote *value* for one line of a log, 40 characters at most before escapes."""
    return repr(value if len(value) <= 40 else value[:37] + "...")


def printable(text: str) -> str:
    """Return *text* on one line, without control characters and marks of writing direction."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else " " if letter.isspace() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def error_text(error: BaseException) -> str:
    """Return class and message of *error* on one line, 300 characters at most: torch adds pages of C++ frames."""
    return printable(f"{type(error).__name__}: {error}")[:300]


def ranks_named(ranks: Iterable[int]) -> str:
    """Format *ranks* as ``rank 3`` or ``ranks 0, 2-5``."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}"


def first_of(names: Sequence[str], most: int) -> str:
    """Join the first *most* of *names*, and count the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def lasting(seconds: float) -> str:
    """Format a duration in one unit: ``45 s``, ``3 min``, ``5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def ago(seconds: float) -> str:
    """Format an age: ``3 min ago``."""
    return f"{lasting(seconds)} ago"
