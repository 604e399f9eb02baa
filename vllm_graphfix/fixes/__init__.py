"""The fixes: one module each, with its `FIX`, and a page of the same name for people. Modules named ``_…`` are shared.

Every process of an engine knows all fixes by ``index.json`` alone, which ``make generated`` writes. A fix's module is
imported at the first call of one of its functions, in a process in which vLLM imports an affected target.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_graphfix._version import __version__
from vllm_graphfix.fix import Companion, Event, Fix, Mode

if TYPE_CHECKING:
    from vllm_graphfix.fixes._about import About

INDEX = Path(__file__).with_name("index.json")
_VERSION_FILE = Path(__file__).parents[1] / "_version.py"
_FUNCTIONS = ("diagnose", "patches", "needs")
"""Fields of `Fix` that only the fix's module provides."""
_NOT_IN_INDEX = (*_FUNCTIONS, "surroundings", "recognised")
"""Fields that are not in the index: functions, and those that only a diagnosis from structure needs."""

_importing = threading.RLock()
"""Held by a thread that imports a module of ours inside one of vLLM's imports; a fork waits for it.

Otherwise a child could inherit the import lock of a half imported module, which nobody would release. No deadlock: such
a module imports nothing of vLLM, so the holder never waits for the forking thread."""
# The forking thread holds the lock, and is the one that exists in the child, which can therefore release it.
os.register_at_fork(before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release)


def import_whole(name: str) -> ModuleType:
    """Import a module of this package, with forks of this process held up until it is complete.

    Raises ImportError if the files are those of another version by now.
    """
    with _importing:
        if name not in sys.modules:
            _refuse_other_version()
        return import_module(name)


def _refuse_other_version() -> None:
    # pip may have replaced the files under this process: a module of one version in the other would be neither.
    try:
        text = _VERSION_FILE.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    version = re.search(r'^__version__ = "([^"]*)"', text, re.MULTILINE)
    if version and version[1] != __version__:
        raise ImportError(
            f"the files of vllm-graphfix are now those of {version[1][:20]!r}, and this process runs {__version__}; "
            "restart the engine"
        )


def module_of(fix: str) -> ModuleType:
    """Return the module of the fix of that name; import it if necessary."""
    return import_whole(f"{__name__}.{fix.replace('-', '_')}")


def _imported_late(fix: str, function: str) -> Callable[..., Any]:
    """Return a stand-in for a function of a fix that imports its module at the first call."""

    def call(*args: Any) -> Any:
        return getattr(module_of(fix).FIX, function)(*args)

    return call


def entry(fix: Fix) -> dict[str, Any]:
    """Return the entry of *fix* in the index."""
    return {name: value for name, value in fix._asdict().items() if name not in _NOT_IN_INDEX}


def _read_index() -> tuple[Fix, ...]:
    try:
        return tuple(map(_from_entry, json.loads(INDEX.read_bytes())))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImportError(
            f"{INDEX.name} of vllm-graphfix cannot be read ({str(error)[:200]}); reinstall vllm-graphfix"
        ) from error


def _from_entry(entry: dict[str, Any]) -> Fix:
    name = entry["name"]
    return Fix(
        **entry
        | {each: _imported_late(name, each) for each in _FUNCTIONS}
        | {each: tuple(entry[each]) for each in ("inspected_files", "modules")}
        | {
            "events": tuple(Event(*event) for event in entry["events"]),
            "requires": tuple(Companion(*other) for other in entry["requires"]),
        }
    )


FIXES: tuple[Fix, ...] = _read_index()
"""In the order of application and of every table."""
BY_NAME: dict[str, Fix] = {fix.name: fix for fix in FIXES}
OBSERVED_BY_DEFAULT = frozenset(fix.name for fix in FIXES if fix.default is Mode.OBSERVE)


@functools.cache
def about(fix: Fix, decode: str = "one token") -> About:
    """Read the page of *fix*, for decodes of that length. Raises ValueError for a page of another form, OSError."""
    from vllm_graphfix.fixes._about import read_about

    return read_about(Path(__file__).with_name(f"{fix.name.replace('-', '_')}.md"), decode)


@functools.cache
def flags() -> frozenset[str]:
    """Return the flags of `vllm serve` that conditions of fixes depend on, besides those of `Deployment`."""
    return frozenset(flag for fix in FIXES for need in fix.needs() for flag in need.flags)
