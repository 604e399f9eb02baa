"""Puts fixes on vLLM's functions: all targets of a fix or none, read back, taken back, somebody else's patch left alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

from vllm_graphfix.fix import Patch, Wrap


class ConflictError(Exception):
    """The target is not vLLM's own function: somebody else has patched it."""


class Site:
    """One attribute of a module or class: the stock function, and the layers that fixes have put around it."""

    def __init__(self, owner: Any, attribute: str, stock: FunctionType) -> None:
        self.owner = owner
        self.attribute = attribute
        self.stock = stock
        self.layers: dict[str, Wrap] = {}
        self.installed: FunctionType = stock

    @property
    def name(self) -> str:
        """For people: ``Class.method`` or ``module.function``."""
        owner = getattr(self.owner, "__qualname__", None) or self.owner.__name__.rpartition(".")[2]
        return f"{owner}.{self.attribute}"

    def current(self) -> object:
        return vars(self.owner).get(self.attribute)

    def set_layer(self, fix: str, wrap: Wrap | None) -> None:
        """Adds (or, with None, takes away) the layer of *fix* and installs what results."""
        layers = {**self.layers, fix: wrap}
        function = self.stock
        for layer in layers.values():
            if layer is not None:
                outer = layer(function)
                if not isinstance(outer, FunctionType) or getattr(outer, "__wrapped__", None) is not function:
                    raise TypeError(f"a layer around {self.attribute} is not a plain function that wraps it")
                function = outer
        setattr(self.owner, self.attribute, function)
        if self.current() is not function:
            setattr(self.owner, self.attribute, self.installed)
            raise RuntimeError(f"{self.attribute} does not read back as it was set")
        if function is not self.stock:
            _stock_of[function] = self.stock
        self.layers = {name: layer for name, layer in layers.items() if layer is not None}
        self.installed = function

    def holds(self) -> bool:
        """Whether what was installed is still what is called, perhaps through a wrapper that came later."""
        function = self.current()
        while function is not None:
            if function is self.installed:
                return True
            function = getattr(function, "__wrapped__", None)
        return False


_DECORATORS = ("vllm", "torch", "contextlib", "functools")
"""Packages whose decorators a stock function may carry: `inference_mode`, `contextmanager`, vLLM's tracing."""

_sites: dict[tuple[int, str], Site] = {}
_stock_of: dict[FunctionType, FunctionType] = {}
"""Our functions and what they wrap: `from target import name` may have carried one into another module."""


def apply(fix: str, patches: Iterable[Patch]) -> list[Site]:
    """Puts the layer of *fix* on every target, whose modules are imported, or on none.

    Raises ConflictError, and AttributeError where a target is gone.
    """
    sites = [(_site(patch), patch.wrap) for patch in patches]  # all are found and looked at before the first is touched
    done: list[Site] = []
    try:
        for site, wrap in sites:
            site.set_layer(fix, wrap)
            done.append(site)
    except BaseException:
        take_back(fix, done)
        raise
    return done


def take_back(fix: str, sites: Iterable[Site]) -> None:
    """Removes the layers of *fix*. Graphs captured before keep what they recorded."""
    for site in sites:
        if fix not in site.layers:
            continue
        if site.current() is site.installed:
            site.set_layer(fix, None)
        else:
            # Taking their wrapper away is not ours to do.
            raise ConflictError(
                f"{site.attribute} was wrapped by {_author(site.current())} after the fix, which is therefore still applied"
            )


def _site(patch: Patch) -> Site:
    owner: Any = sys.modules[patch.module]
    *classes, attribute = patch.name.split(".")
    for name in classes:
        owner = getattr(owner, name)
    found = vars(owner).get(attribute)
    if found is None:
        raise AttributeError(f"{patch.module} has no {patch.name} of its own")
    known = _sites.get((id(owner), attribute))
    if known is not None and known.owner is owner and known.current() is known.installed:
        return known
    stock = _stock_of.get(found, found) if type(found) is FunctionType else found
    _refuse_foreign(owner, patch, stock)
    site = _sites[id(owner), attribute] = Site(owner, attribute, stock)
    return site


def _refuse_foreign(owner: Any, patch: Patch, function: Any) -> None:
    """Stock means: vLLM's own function, under no wrapper but those of vLLM's, torch's and the standard library's decorators."""
    if not isinstance(owner, ModuleType) and owner.__module__ != patch.module:
        raise ConflictError(f"{owner.__qualname__} of {owner.__module__} stands in the place of {patch.module}'s class")
    layer = function
    while True:
        if type(layer) is not FunctionType:  # wrapt's proxies claim to be instances of what they wrap
            raise ConflictError(f"{patch.name} is {_author(layer)}, not a function of {patch.module}")
        written_in = layer.__globals__.get("__name__", "")
        inner = getattr(layer, "__wrapped__", None)
        if inner is None:
            break
        if written_in.split(".")[0] not in _DECORATORS:
            raise ConflictError(f"{patch.name} is wrapped by {_author(layer)}")
        layer = inner
    # A name that a module imported is another vLLM module's function; a method is written where its class is.
    if not (written_in.startswith("vllm.") if isinstance(owner, ModuleType) else written_in == patch.module):
        raise ConflictError(f"{patch.name} was replaced by {_author(layer)}")


def _author(found: object) -> str:
    module = getattr(found, "__globals__", {}).get("__name__") or getattr(type(found), "__module__", "?")
    return f"{type(found).__name__} {getattr(found, '__qualname__', '?')} of {module}"
