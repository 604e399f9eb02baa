"""The plugin's lines in vLLM's log. Handlers and filters there are other people's: what they raise ends here."""

from __future__ import annotations

import logging
import sys
import threading

# Below "vllm", the one logger that vLLM gives a handler; anywhere else an INFO line is lost. Its format leaves
# the logger's name out, so every message says whose it is.
_logger = logging.getLogger("vllm.graphfix")


class _Log:
    """Called inside vLLM's functions, imports and our own handling of errors, where nothing may be raised."""

    def debug(self, message: str, *values: object, exc_info: BaseException | None = None) -> None:
        self._say(logging.DEBUG, message, values, exc_info)

    def info(self, message: str, *values: object) -> None:
        self._say(logging.INFO, message, values, None)

    def warning(self, message: str, *values: object, exc_info: BaseException | None = None) -> None:
        self._say(logging.WARNING, message, values, exc_info)

    def error(self, message: str, *values: object) -> None:
        self._say(logging.ERROR, message, values, None)

    def exception(self, message: str, *values: object) -> None:
        """With the traceback of the error that is being handled."""
        self._say(logging.ERROR, message, values, True)

    def _say(self, level: int, message: str, values: tuple[object, ...], exc_info: BaseException | bool | None) -> None:
        try:  # noqa: SIM105 - to make a context manager is to call something that may fail
            _logger.log(level, message, *values, exc_info=exc_info, stacklevel=3)  # the caller's file and line
        except Exception:  # noqa: S110 - there is no other place to say it
            pass


_Line = tuple[int, str, tuple[object, ...], "BaseException | None"]
"""Level, message, its values, and the error that it tells of."""


class HeldLog(_Log):
    """Keeps the lines of a thread until its `release`.

    A handler may wait for another thread, so nobody who holds a lock may call it.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def _lines(self) -> list[_Line]:
        lines: list[_Line] = self._of_thread.__dict__.setdefault("lines", [])
        return lines

    def _say(self, level: int, message: str, values: tuple[object, ...], exc_info: BaseException | bool | None) -> None:
        error = sys.exc_info()[1] if exc_info is True else exc_info or None
        try:  # noqa: SIM105 - as above
            self._lines().append((level, message, values, error))
        except Exception:  # noqa: S110 - what is only told must not take a fix away
            pass

    def release(self) -> None:
        """Logs what this thread has said, in order; called where the thread holds no lock of ours."""
        try:
            lines = self._lines()
            while lines:
                super()._say(*lines.pop(0))
        except Exception:  # noqa: S110 - the same
            pass

    def release_at_exit(self) -> None:
        """Where the stream of a handler may be closed: logging itself would print a traceback."""
        raising, logging.raiseExceptions = logging.raiseExceptions, False
        try:
            self.release()
        finally:
            logging.raiseExceptions = raising


logger = _Log()
