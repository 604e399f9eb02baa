"""What an engine in a process of its own does, whatever a benchmark asks of it: one end of `engine_process.py`'s pipe.

The scripts beside this file begin with it. It leaves with their folder the path of imports, which an engine must not
find; so they import it only as what is run, and not where a process of the engine imports them.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn


def begin(serve: Callable[[Any, dict[str, Any]], int | None], *, above: bool = False) -> NoReturn:
    """Calls *serve* with the pipe and the first message, the order, and ends this process with what it returns.

    The pipe's descriptor is the argument of the command line. An EOFError is the end: nobody asks any more. Any other
    error is the last answer: ``{"error": …}``. *above*: the folder above stays on the path, behind all others.
    """
    here = os.path.realpath(os.path.dirname(__file__))  # noqa: PTH120 - a stock engine must not pay for pathlib
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) != here]
    if above:
        sys.path.append(os.path.dirname(here))  # noqa: PTH120
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # its end is this process's end, whatever it has started
    code = _served(serve, Connection(descriptor))
    sys.stdout.flush()
    sys.stderr.flush()
    # What is torn down at the end of an interpreter hangs now and then after an illegal memory access, or without a
    # rank that is gone.
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
