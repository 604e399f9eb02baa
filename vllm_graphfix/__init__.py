"""CUDA-graph correctness fixes of vLLM for stock wheels, applied at run time.

vLLM calls `register` in each of its processes (entry point group ``vllm.general_plugins``). `states` says what came of it.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_graphfix.membership import Membership
    from vllm_graphfix.process import FixState

__version__ = "0.1.0"
__all__ = ["__version__", "register", "states"]


def register() -> None:
    """Engages the fixes that this vLLM needs, as the environment says. Never raises; calling it again changes nothing."""
    try:
        _this_process().start()
    except Exception as error:
        # vLLM does not guard the call of a plugin: what escapes here kills the server.
        import logging

        logging.getLogger("vllm.graphfix").exception("graphfix: could not start; vLLM runs as it was")
        if _insisted() and not _only_asked():
            raise RuntimeError(
                f"vllm-graphfix could not start ({type(error).__name__}: {error}), and VLLM_GRAPHFIX asks for it: "
                "reinstall vllm-graphfix, or unset VLLM_GRAPHFIX"
            ) from error


def states() -> dict[str, FixState]:
    """Mode, diagnosis, state and reason of every fix in this process, by name.

    Before `register` was called here every fix is as the environment wants it and `waiting`.
    """
    return _this_process().process.states()


def _insisted() -> bool:
    """Whether the environment says strict, read without a module of the package: one of them may be what is broken."""
    return os.environ.get("VLLM_GRAPHFIX", "").strip().lower() == "strict"


def _only_asked() -> bool:
    """Whether this process only tells of vLLM: its help, or the inspection of a model for another process."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return bool({"-h", "--help"} & set(sys.argv)) or getattr(main, "name", "") == "vllm.model_executor.models.registry"


@functools.cache
def _this_process() -> Membership:
    from vllm_graphfix.fixes import FIXES
    from vllm_graphfix.membership import Membership

    return Membership(FIXES)
