"""Compares the answers of the user's own model with CUDA graphs and without."""

from __future__ import annotations

from pathlib import Path


class CompareError(Exception):
    """The comparison could not be made; the message says what to do."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message if log is None else f"{message} (log: {log})")
        self.log = log
        """Log of the engine that failed, which is not deleted then."""
