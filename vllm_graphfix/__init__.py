"""CUDA-graph correctness fixes of vLLM for stock wheels, applied at run time.

vLLM calls `register` in each of its processes (entry point group ``vllm.general_plugins``). `states` says what came of
it, `events` how often it mattered.
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
    """Engages the fixes that this vLLM needs, as the environment says.

    Never raises; calling it again changes nothing.
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
    """Mode, diagnosis, state and reason of every fix in this process, by name; of `shadow`, too, where it is on.

    Before `register` was called here every fix is as the environment wants it and `waiting`.
    """
    return _this_process().states()


def registered() -> bool:
    """Whether `register` has run in this process; where it has not, vLLM does not load the plugin (VLLM_PLUGINS?)."""
    return _this_process().started


def events() -> dict[str, dict[str, int]]:
    """How often each fix acted, or met its defect, in this process, by its name and that of the event.

    `shadow` is among them where the shadow check is on: its checks and mismatches, say.
    """
    return _this_process().events()


def _report_and_take_back(error: Exception) -> None:
    """Says that the plugin could not start, and sees to it that this is so: a part of it may have."""
    try:
        import logging

        logging.getLogger("vllm.graphfix").error(
            "graphfix: could not start; vLLM runs without the plugin", exc_info=error
        )
    except Exception:  # noqa: S110 - the log is not ours
        pass
    try:  # noqa: SIM105 - a context manager is one more thing that may be broken
        _this_process().manager.give_up(error)
    except Exception:  # noqa: S110 - what is broken is broken here too, and nothing was patched
        pass


def _requires_a_fix() -> bool:
    """Whether the environment says strict, or on for a fix.

    It is read without any module that this one has not imported, because one of them may be what is broken.
    """
    told = {name: value.strip().lower() for name, value in os.environ.items() if name.startswith(PREFIX)}
    master = told.get(PREFIX, "")
    if master not in ("", "on", "1", "true", "yes", "observe", "strict"):
        return False  # off, or a value that means nothing
    if not re.fullmatch(r"100(?:\.0{1,6})?\s*%?", told.get(ROLLOUT, "100")):
        return False  # an engine may be outside the rollout, and nobody insists there
    if any(asks_for_less(name, value) for name, value in os.environ.items()):
        return False  # a mistyped name counts as off
    on = [name for name, value in told.items() if re.fullmatch("on|1|true|yes|on:[0-9a-f]{16}", value)]
    return master == "strict" or any(map(_is_a_fix, on))


def _is_a_fix(variable: str) -> bool:
    # os.path, because pathlib is one more module that may be broken
    folder = os.path.join(os.path.dirname(__file__), "fixes")  # noqa: PTH118, PTH120
    name = variable.removeprefix(f"{PREFIX}_").lower()
    return not os.path.isdir(folder) or os.path.isfile(  # noqa: PTH112, PTH113
        os.path.join(folder, f"{name}.py")  # noqa: PTH118
    )


def _starts_no_engine() -> bool:
    """Whether this process only tells of vLLM: its help, or the inspection of a model for another process."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    asked = any(
        word in ("-h", "--help") for word in getattr(sys, "argv", ())
    )  # not of `role`, which may be what is broken
    return asked or getattr(main, "name", "") == "vllm.model_executor.models.registry"


_lock = threading.RLock()
"""`functools.cache` would let two threads make one each."""


def _this_process() -> EngineProcess:
    with _lock:
        return _engine_process()


@functools.cache
def _engine_process() -> EngineProcess:
    from vllm_graphfix.engine.process import EngineProcess
    from vllm_graphfix.fixes import FIXES

    return EngineProcess(FIXES, report=_report)


def _report() -> str:
    """What `vllm-graphfix doctor` says, for the end of vLLM's own report."""
    from vllm_graphfix.commands.doctor import beside_vllms_own

    return beside_vllms_own()


def _forked() -> None:
    global _lock  # noqa: PLW0603 - the thread that held it is not in the child
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)
