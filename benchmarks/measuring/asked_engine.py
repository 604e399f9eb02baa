"""The worker's end of `engine_process.py`'s pipe, for every script here that runs an engine.

`begin` takes the scripts' folder off the path of imports, so that vLLM imports none of their names. Therefore scripts
import this module only when they are run: a process that the engine spawns imports them without that folder.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn


def begin(serve: Callable[[Any, dict[str, Any]], int | None]) -> NoReturn:
    """Call *serve* with the pipe and the first message, the order, and exit with the code that it returns.

    The command line's argument is the pipe's descriptor. EOFError is a normal end: the parent closed the pipe. Any
    other error is sent as the last answer, ``{"error": …}``.
    """
    here = os.path.realpath(os.path.dirname(__file__))  # noqa: PTH120 - a stock engine must not pay for pathlib
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) != here]
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # or processes that the engine starts would hold the pipe open
    code = _served(serve, Connection(descriptor))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `sys.exit`: the interpreter's teardown may hang after an illegal memory access, or when a rank has died.
    os._exit(code)


def _served(serve: Callable[[Any, dict[str, Any]], int | None], parent: Any) -> int:
    try:
        return serve(parent, parent.recv()) or 0
    except EOFError:
        return 0
    except BaseException as error:  # an engine may end in SystemExit
        traceback.print_exc()
        parent.send({"error": in_one_line(error)})
        return 1


def in_one_line(error: BaseException, causes: int = 3) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    line = f"{type(error).__name__}: {first}"
    if error.__cause__ is None or not causes:
        return line
    return f"{line}, from {in_one_line(error.__cause__, causes - 1)}"
