"""Where the plugin comes in: hooks on vLLM's imports and wrappers of its functions.

What goes wrong in them stays in them.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from vllm_graphfix.log import logger
from vllm_graphfix.patching.sites import own_wrappers


def when_imported(module: str, hook: Callable[[ModuleType], None]) -> None:
    """Calls *hook* with the module once it is imported, or now if it is; whatever goes wrong stays here."""

    def run(imported: ModuleType) -> None:
        try:
            hook(imported)
        except Exception:
            logger.exception("graphfix: a hook on the import of %s failed; vLLM runs its own code there", module)

    loaded = sys.modules.get(module)
    if getattr(getattr(loaded, "__spec__", None), "_initializing", False):
        # Another thread is importing it, and wrapt would call the hook on what is there so far. This waits for that
        # thread.
        importlib.import_module(module)
    wrapt.register_post_import_hook(run, module)


def _renew_locks() -> None:
    """In a forked child: gives wrapt's import hooks new locks, whatever wrapt calls them.

    Every import takes such a lock. A thread that had it when the process was forked, because it imported a module that
    somebody waits for, is not in the child: there it would be held for ever.
    """
    importer = sys.modules[wrapt.register_post_import_hook.__module__]
    for name, value in list(vars(importer).items()):
        if type(value) in _LOCKS:
            setattr(importer, name, _LOCKS[type(value)]())


_LOCKS: dict[type, Callable[[], object]] = {type(make()): make for make in (threading.Lock, threading.RLock)}
os.register_at_fork(after_in_child=_renew_locks)


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Puts *around* on a function of vLLM, if it is there: called with what it wraps, then with its arguments.

    What it wraps is asked for at each call: a fix beneath may be taken back.
    """
    stock = getattr(owner, name, None)
    if stock is None:
        return

    @functools.wraps(stock)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(wrapper.__wrapped__, *args, **kwargs)

    own_wrappers.add(wrapper)
    setattr(owner, name, wrapper)


def guarded(function: Callable[..., Any], *args: Any) -> None:
    """Calls *function*, inside one of vLLM's functions; whatever goes wrong stays here."""
    try:
        function(*args)
    except Exception:
        logger.exception("graphfix: %s failed; vLLM itself is not affected", function.__name__)
