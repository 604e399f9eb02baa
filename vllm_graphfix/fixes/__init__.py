"""One module a fix, with its `FIX`, and a page of the same name for people; modules named ``_…`` are something else.

Every process of an engine knows all fixes by ``index.json`` alone, which ``make generated`` writes: a fix's module is
imported when one of its functions is called, in a process that vLLM imports an affected target in.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Companion, Event, Fix, Mode

if TYPE_CHECKING:
    from vllm_graphfix.fixes._about import About

INDEX = Path(__file__).with_name("index.json")
_FUNCTIONS = ("diagnose", "patches", "needs")
"""What of a fix its module does."""
_LEFT_OUT = (*_FUNCTIONS, "surroundings", "wordings")
"""What is not in the index: functions, and what only a diagnosis from structure asks for, in its module."""

_importing = threading.RLock()
"""A thread has it while it imports a module of ours in one of vLLM's imports; a fork waits for it.

Otherwise a child could inherit the lock of a half imported module, which nobody gives back there. Such a module imports
nothing of vLLM's, so that no thread that has this waits for whoever forks."""


def _renew_lock() -> None:
    global _importing  # noqa: PLW0603 - the thread that had it is not in the child
    _importing = threading.RLock()


def _before_a_fork() -> None:
    _importing.acquire()


def _after_a_fork() -> None:
    _importing.release()


os.register_at_fork(before=_before_a_fork, after_in_parent=_after_a_fork, after_in_child=_renew_lock)


def import_whole(name: str) -> ModuleType:
    """Imports a module of this package; no process is forked while it is half imported."""
    with _importing:
        return import_module(name)


def module_of(fix: str) -> ModuleType:
    """The module of the fix of that name, imported where it was not."""
    return import_whole(f"{__name__}.{fix.replace('-', '_')}")


def _imported_late(fix: str, function: str) -> Callable[..., Any]:
    """A function of a fix; its module is imported at the first call."""

    def call(*args: Any) -> Any:
        return getattr(module_of(fix).FIX, function)(*args)

    return call


def entry(fix: Fix) -> dict[str, Any]:
    """What the index says of *fix*."""
    return {name: value for name, value in fix._asdict().items() if name not in _LEFT_OUT}


def _read_index() -> tuple[Fix, ...]:
    try:
        return tuple(map(_from_entry, json.loads(INDEX.read_bytes())))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImportError(
            f"{INDEX.name} of vllm-graphfix cannot be read ({str(error)[:200]}); reinstall vllm-graphfix"
        ) from error


def _from_entry(said: dict[str, Any]) -> Fix:
    name = said["name"]
    return Fix(
        **said
        | {each: _imported_late(name, each) for each in _FUNCTIONS}
        | {each: tuple(said[each]) for each in ("inspected_files", "modules")}
        | {
            "events": tuple(Event(*event) for event in said["events"]),
            "requires": tuple(Companion(*other) for other in said["requires"]),
        }
    )


FIXES: tuple[Fix, ...] = _read_index()
"""In the order of application and of every table."""
BY_NAME: dict[str, Fix] = {fix.name: fix for fix in FIXES}
OBSERVED_BY_DEFAULT = frozenset(fix.name for fix in FIXES if fix.default is Mode.OBSERVE)


@functools.cache
def about(fix: Fix) -> About:
    """What people read of *fix*. Raises ValueError where its page is not in the form of one, OSError."""
    from vllm_graphfix.fixes._about import read_about

    return read_about(Path(__file__).with_name(f"{fix.name.replace('-', '_')}.md"))


@functools.cache
def flags() -> frozenset[str]:
    """Flags of `vllm serve` that fixes ask for, besides those that a `Deployment` needs."""
    return frozenset(flag for fix in FIXES for need in fix.needs() for flag in need.flags)
