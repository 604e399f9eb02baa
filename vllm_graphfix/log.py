"""The plugin's lines in vLLM's log. Handlers and filters there are foreign code: their exceptions end here."""

from __future__ import annotations

import logging
import sys
import threading

# Below "vllm", the only logger that vLLM gives a handler; an INFO line of any other is lost. Its format omits the
# logger's name, so every message begins with "graphfix:".
_logger = logging.getLogger("vllm.graphfix")


class _Log:
    """A logger that never raises, for use inside vLLM's functions, imports and our own error handling."""

    def debug(self, message: str, *values: object, exc_info: BaseException | None = None) -> None:
        self._log(logging.DEBUG, message, values, exc_info)

    def info(self, message: str, *values: object) -> None:
        self._log(logging.INFO, message, values, None)

    def warning(self, message: str, *values: object, exc_info: BaseException | None = None) -> None:
        self._log(logging.WARNING, message, values, exc_info)

    def error(self, message: str, *values: object) -> None:
        self._log(logging.ERROR, message, values, None)

    def exception(self, message: str, *values: object) -> None:
        """Log an error with the traceback of the exception that is being handled."""
        self._log(logging.ERROR, message, values, True)

    def _log(self, level: int, message: str, values: tuple[object, ...], exc_info: BaseException | bool | None) -> None:
        try:  # noqa: SIM105 - a context manager is a call, which may fail
            _logger.log(level, message, *values, exc_info=exc_info, stacklevel=3)  # the caller's file and line
        except Exception:  # noqa: S110 - there is no other place to report it
            pass


_Line = tuple[int, str, tuple[object, ...], "BaseException | None"]
"""Level, message, its values, and the error."""


class HeldLog(_Log):
    """A logger that holds the lines of a thread until its `release`.

    A log handler may wait for another thread, so it must not run under a lock of ours.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def _lines(self) -> list[_Line]:
        lines: list[_Line] = self._of_thread.__dict__.setdefault("lines", [])
        return lines

    def _log(self, level: int, message: str, values: tuple[object, ...], exc_info: BaseException | bool | None) -> None:
        error = sys.exc_info()[1] if exc_info is True else exc_info or None
        try:  # noqa: SIM105 - as above
            self._lines().append((level, message, values, error))
        except Exception:  # noqa: S110 - a lost line must not cost a fix
            pass

    def release(self) -> None:
        """Log the held lines of this thread, in order. Call it only where the thread holds no lock of ours."""
        try:
            lines = self._lines()
            while lines:
                super()._log(*lines.pop(0))
        except Exception:  # noqa: S110 - the same
            pass

    def release_at_exit(self) -> None:
        """Log the held lines where a handler's stream may be closed, for which logging would print a traceback."""
        raising, logging.raiseExceptions = logging.raiseExceptions, False
        try:
            self.release()
        finally:
            logging.raiseExceptions = raising


logger = _Log()
