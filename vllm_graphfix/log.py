"""The plugin's lines in vLLM's log. Handlers and filters there are other people's: what they raise ends here."""

from __future__ import annotations

import logging

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

    def exception(self, message: str, *values: object) -> None:
        """With the traceback of the error that is being handled."""
        self._say(logging.ERROR, message, values, True)

    @staticmethod
    def _say(level: int, message: str, values: tuple[object, ...], exc_info: BaseException | bool | None) -> None:
        try:  # noqa: SIM105 - to make a context manager is to call something that may fail
            _logger.log(level, message, *values, exc_info=exc_info, stacklevel=3)  # the caller's file and line
        except Exception:  # noqa: S110 - there is no other place to say it
            pass


logger = _Log()
