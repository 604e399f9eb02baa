"""Import hooks and wrappers. No exception escapes into vLLM."""

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
    """Call *hook* with the module when it is imported, or now if it is. Errors of *hook* are logged."""

    def run(imported: ModuleType) -> None:
        try:
            hook(imported)
        except Exception:
            logger.exception("graphfix: a hook on the import of %s failed; vLLM runs its own code there", module)

    loaded = sys.modules.get(module)
    if getattr(getattr(loaded, "__spec__", None), "_initializing", False):
        # Another thread is importing it, and wrapt would call the hook on half a module: wait for that thread.
        importlib.import_module(module)
    wrapt.register_post_import_hook(run, module)


def _renew_locks() -> None:
    """Replace the locks of wrapt's import hooks in a forked child.

    Every import takes such a lock. The thread that held one at the fork does not exist in the child, so nobody would
    release it. By type, since wrapt's names for them are private.
    """
    importer = sys.modules[wrapt.register_post_import_hook.__module__]
    for name, value in list(vars(importer).items()):
        if type(value) in _LOCKS:
            setattr(importer, name, _LOCKS[type(value)]())


_LOCKS: dict[type, Callable[[], object]] = {type(make()): make for make in (threading.Lock, threading.RLock)}
os.register_at_fork(after_in_child=_renew_locks)


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Wrap the function *name* of *owner*, if there is one, in *around*.

    *around* is called with the wrapped function and the arguments of the call. The wrapped function is looked up at
    each call, since a fix beneath may be reverted.
    """
    stock = getattr(owner, name, None)
    if stock is None:
        return

    @functools.wraps(stock)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(wrapper.__wrapped__, *args, **kwargs)

    # Before it is installed: a fix applied in another thread would take it for somebody else's patch.
    own_wrappers.add(wrapper)
    setattr(owner, name, wrapper)


def guarded(function: Callable[..., Any], *args: Any) -> None:
    """Call *function* inside one of vLLM's. Errors are logged and end here."""
    try:
        function(*args)
    except Exception:
        logger.exception("graphfix: %s failed; vLLM itself is not affected", function.__name__)
