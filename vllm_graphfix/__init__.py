"""CUDA-graph correctness fixes of vLLM for stock wheels, applied at run time.

vLLM calls `register` in each of its processes (entry point group ``vllm.general_plugins``). `states` returns the
state of each fix, `events` counts its effects.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
from typing import TYPE_CHECKING

from vllm_graphfix._variable_names import PREFIX, ROLLOUT, asks_for_less
from vllm_graphfix._version import __version__

if TYPE_CHECKING:
    from vllm_graphfix.engine.process import EngineProcess
    from vllm_graphfix.patching.manager import FixState

__all__ = ["__version__", "events", "register", "registered", "states"]


def register() -> None:
    """Engage the fixes that this vLLM needs, according to the environment.

    A second call changes nothing. Raises RuntimeError only if the plugin cannot start although the environment insists
    on a fix.
    """
    try:
        _this_process().start()
    except Exception as error:
        # vLLM does not guard the call of a plugin: what escapes here kills the server.
        _report_and_take_back(error)
        if _requires_a_fix() and not _starts_no_engine():
            raise RuntimeError(
                f"vllm-graphfix could not start ({type(error).__name__}: {error}), and the environment insists on it: "
                "reinstall vllm-graphfix, or unset the VLLM_GRAPHFIX variables that are strict or on"
            ) from error


def states() -> dict[str, FixState]:
    """Return mode, diagnosis, state and reason of every fix in this process, by name; also of `shadow` if it is on.

    Before `register` was called, every fix has the mode that the environment sets, and is `waiting`.
    """
    return _this_process().states()


def registered() -> bool:
    """Tell if `register` has run in this process; if not, vLLM does not load the plugin (VLLM_PLUGINS?)."""
    return _this_process().started


def events() -> dict[str, dict[str, int]]:
    """Count how often each fix acted, or met its defect, in this process: by name of the fix and of the event.

    If the shadow check is on, `shadow` is among the names, with its checks and mismatches.
    """
    return _this_process().events()


def _report_and_take_back(error: Exception) -> None:
    """Log that the plugin could not start, and revert the part of it that did."""
    try:
        import logging

        logging.getLogger("vllm.graphfix").error(
            "graphfix: could not start; vLLM runs without the plugin", exc_info=error
        )
    except Exception:  # noqa: S110 - a logging handler of somebody else may raise
        pass
    try:  # noqa: SIM105 - a context manager is one more thing that may be broken
        _this_process().manager.give_up(error)
    except Exception:  # noqa: S110 - the same defect stops this too; then nothing was patched
        pass


def _requires_a_fix() -> bool:
    """Tell if the environment sets `strict`, or `on` for a fix.

    Reads it with nothing but the modules imported above: any other module may be the broken one.
    """
    variables = {name: value.strip().lower() for name, value in os.environ.items() if name.startswith(PREFIX)}
    master = variables.get(PREFIX, "")
    if master not in ("", "on", "1", "true", "yes", "observe", "strict"):
        return False  # off, or a value that means nothing
    if not re.fullmatch(r"100(?:\.0{1,6})?\s*%?", variables.get(ROLLOUT, "100")):
        return False  # an engine may be outside the rollout, and nobody insists there
    if any(asks_for_less(name, value) for name, value in os.environ.items()):
        return False  # a mistyped name counts as off
    for entry in filter(None, map(str.strip, variables.pop(f"{PREFIX}_FIXES", "").split(","))):
        name, _, mode = entry.partition("=")
        name = f"{PREFIX}_{name.strip().upper().replace('-', '_')}"
        if not mode.strip() or not _is_a_fix(name):
            return False  # an entry that means nothing counts as off
        variables[name] = variables.get(name) or mode.strip()
    on = [name for name, value in variables.items() if re.fullmatch("on|1|true|yes|on:[0-9a-f]{16}", value)]
    return master == "strict" or any(map(_is_a_fix, on))


def _is_a_fix(variable: str) -> bool:
    # os.path, because pathlib is one more module that may be broken
    folder = os.path.join(os.path.dirname(__file__), "fixes")  # noqa: PTH118, PTH120
    name = variable.removeprefix(f"{PREFIX}_").lower()
    if not re.fullmatch("[a-z0-9][a-z0-9_]*", name):
        return False  # no module of a fix, or none in that folder
    return not os.path.isdir(folder) or os.path.isfile(  # noqa: PTH112, PTH113
        os.path.join(folder, f"{name}.py")  # noqa: PTH118
    )


def _starts_no_engine() -> bool:
    """Tell if this process starts no engine: it prints help, or inspects a model for another process."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    # Not by `role.prints_help`: that module may be the broken one.
    prints_help = any(word in ("-h", "--help") for word in getattr(sys, "argv", ()))
    return prints_help or getattr(main, "name", "") == "vllm.model_executor.models.registry"


_lock = threading.RLock()
"""Without it `functools.cache` would let two threads make one `EngineProcess` each."""


def _this_process() -> EngineProcess:
    with _lock:
        return _engine_process()


@functools.cache
def _engine_process() -> EngineProcess:
    from vllm_graphfix.engine.process import EngineProcess
    from vllm_graphfix.fixes import FIXES

    return EngineProcess(FIXES, report=_report)


def _report() -> str:
    """Return the report of `vllm-graphfix doctor`, for the end of vLLM's own report."""
    from vllm_graphfix.commands.doctor import beside_vllms_own

    return beside_vllms_own()


def _forked() -> None:
    global _lock  # noqa: PLW0603 - the thread that held it is not in the child
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)
