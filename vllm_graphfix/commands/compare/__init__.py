"""Whether the user's own model gives the same tokens with CUDA graphs as without."""

from __future__ import annotations

from pathlib import Path


class CompareError(Exception):
    """The question could not be put; the message says what to do."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message if log is None else f"{message} (log: {log})")
        self.log = log
        """The log of the engine that failed; it is worth keeping."""
