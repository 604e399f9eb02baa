"""Output of commands: consoles, messages that end a command, and standard streams that may be closed."""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, NoReturn, TextIO, cast

import typer

from vllm_graphfix.text import printable

if TYPE_CHECKING:
    from rich.console import Console

EXIT_NOT_PROVEN = 1
EXIT_NOT_PRINTED = 1
EXIT_HIT = 1
EXIT_USAGE = 2
EXIT_INCOMPLETE = 3
EXIT_CANNOT_TELL = 4
EXIT_INTERRUPTED = 130

PIPE_WIDTH = 140
"""Columns if the output is no terminal."""


def console(*, stderr: bool = False) -> Console:
    """Return a console on standard output, or on standard error."""
    from rich.console import Console

    # Rich honours NO_COLOR and a terminal's width. It would wrap tables in a pipe, such as `| less`, at 80 columns.
    stream = sys.stderr if stderr else sys.stdout
    if stream is None or stream.isatty():
        return Console(stderr=stderr, soft_wrap=False)
    return Console(file=cast("IO[str]", _Unpadded(stream)), stderr=stderr, width=PIPE_WIDTH, soft_wrap=False)


def say(console: Console, text: str, *, markup: bool = True) -> None:
    """Print *text* as it is: without colours of numbers, and without line breaks at the console's width."""
    console.print(text, markup=markup, highlight=False, soft_wrap=True)


class _Unpadded:
    """A text stream that writes to *stream*, less the blanks with which Rich fills the last column of a table."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._stream.write(re.sub(r" +(?=\n)", "", text))


def stop(message: str, code: int = EXIT_USAGE) -> NoReturn:
    """End the command with *message* on standard error."""
    typer.echo(f"vllm-graphfix: {printable(message)}", err=True)
    raise typer.Exit(code)


def prepare_streams() -> None:
    """Make any text printable on the standard streams; end the process if standard output is closed."""
    if not os.environ.get("COLUMNS", "80").strip("0"):  # Rich would print nothing in a width of 0
        del os.environ["COLUMNS"]
    if sys.stdout is None:
        end_unprinted("standard output is closed")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal may know ASCII only, and a path may hold bytes that are no text.
            stream.reconfigure(errors="backslashreplace")


def end_unprinted(why: str | None) -> NoReturn:
    """End the process with *why* on standard error, if that can be written; silently if *why* is None."""
    if why is not None:
        with suppress(OSError):
            typer.echo(f"vllm-graphfix: cannot write the output: {why}", err=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:  # Python would flush again at its end, and print a traceback
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(EXIT_NOT_PRINTED)
