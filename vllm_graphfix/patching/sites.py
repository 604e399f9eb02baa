"""Layers of fixes around vLLM's functions.

All targets of a fix are patched or none, and read back. Patches of others are left alone.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Patch, StockFunction, Wrap
from vllm_graphfix.source.part import module_name

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_graphfix.fix import Patchable
    from vllm_graphfix.source.files import Source

Read = Callable[[str], "bytes | None"]
Layer = Callable[[StockFunction], Callable[..., Any]]


class ConflictError(Exception):
    """The target is not stock: other code has patched or replaced it."""


class DiagnosedFiles:
    """The files that diagnoses have read, by module: a diagnosis holds only if vLLM runs these files.

    Paths and texts, not the `Source`: its syntax trees must not stay in an engine's memory.
    """

    def __init__(self) -> None:
        self._paths: dict[str, Path] = {}
        self._texts: dict[str, bytes | None] = {}

    def add(self, fix: Patchable, source: Source, targets: Iterable[str]) -> None:
        """Record the files that *fix* was diagnosed from, and the text of the modules *targets* to be patched."""
        if source.folder is not None:
            self._paths.update({module_name(path): source.folder / path for path in fix.inspected_files})
        for module in targets:
            self._texts[module] = source.read(f"{module.replace('.', '/')}.py")

    def text(self, module: str) -> bytes | None:
        """Return the source of *module* as it was diagnosed; None for one that is not to be patched."""
        return self._texts.get(module)

    def refuse_others(self, fix: Patchable) -> None:
        """Raise `ConflictError` where Python has loaded an inspected module from another file."""
        for module in map(module_name, fix.inspected_files):
            origin = getattr(getattr(sys.modules.get(module), "__spec__", None), "origin", None)
            if origin and module in self._paths and not self._paths[module].samefile(origin):
                raise ConflictError(f"{origin} runs instead of {self._paths[module]}, which was diagnosed")


class Site:
    """One attribute of a module or class: the stock function, and the layers that fixes have put around it."""

    def __init__(self, patch: Patch, owner: Any, stock: FunctionType) -> None:
        self.module = patch.module
        *self.classes, self.attribute = patch.name.split(".")
        self.owner = owner
        self.stock = stock
        self.layers: dict[str, Layer] = {}
        self.installed = stock
        self._codes = self._codes_of(stock)

    @property
    def name(self) -> str:
        """``Class.method`` or ``module.function``, for reports."""
        owner = getattr(self.owner, "__qualname__", None) or self.owner.__name__.rpartition(".")[2]
        return f"{owner}.{self.attribute}"

    def current(self) -> object:
        return vars(self.owner).get(self.attribute)

    def set_layer(self, fix: str, new: Layer | None) -> None:
        """Set the layer of *fix*, or remove it with None, and install the resulting function.

        All layers are made anew, so that none refers to one that is gone; what their wrappers remember is lost.
        Raises TypeError for a wrapper that is no plain function, RuntimeError where the attribute reads back as
        something else. After an error all is as before.
        """
        layers = {name: layer for name, layer in {**self.layers, fix: new}.items() if layer is not None}
        function = self.stock
        for name, layer in layers.items():
            outer = layer(function)
            if not isinstance(outer, FunctionType) or getattr(outer, "__wrapped__", None) is not function:
                raise TypeError(f"a wrapper around {self.attribute} is not a plain function that wraps it")
            function = outer
            fix_of_layer[function] = name
        codes = self._codes_of(function)
        if function is not self.stock:
            # Before it is installed: at once another thread may copy it by `from target import name`.
            _stock_of[function] = self.stock
        caller, name = self._called_from() or (self.owner, self.attribute)
        try:
            setattr(caller, name, function)
            if vars(caller).get(name) is not function:
                raise RuntimeError(f"{self.attribute} reads back as something other than what was set")
        except BaseException:  # an interrupt too: an unrecorded layer could never be removed
            setattr(caller, name, self.installed)
            raise
        self.layers, self.installed, self._codes = layers, function, codes

    def _codes_of(self, function: FunctionType) -> dict[FunctionType, CodeType]:
        return {each: each.__code__ for each in (function, inspect.unwrap(self.stock))}

    def is_ours(self) -> bool:
        """Tell if nothing but wrappers of the plugin's own hooks is on top of the installed function."""
        return self._called_from() is not None

    def _called_from(self) -> tuple[Any, str] | None:
        """Return the holder of the installed function, the owner or our innermost hook, and the attribute's name."""
        caller, name = self.owner, self.attribute
        called = self.current()
        while called is not self.installed:
            if type(called) is not FunctionType or called not in own_wrappers:
                return None
            caller, name = called, "__wrapped__"
            called = vars(caller).get(name)
        return caller, name

    def lost(self) -> str | None:
        """Return the reason for which the installed function is no longer called.

        None if it is, perhaps through a wrapper that came later.
        """
        after = "after the fix was applied"
        owner: Any = sys.modules.get(self.module)
        for name in self.classes:
            owner = getattr(owner, name, None)
        if owner is None:
            return f"{self.name} was removed {after}"
        if owner is not self.owner:
            return f"what {self.name} is in was replaced by {_author(owner)} {after}"
        for function, code in self._codes.items():
            if function.__code__ is not code:
                return f"{self.name} was given the code of {_location(function.__code__)} {after}"
        # A later wrapper whose `__wrapped__` is ours still calls it: no conflict.
        called = self.current()
        for _ in range(_MOST_WRAPPERS):
            if called is self.installed:
                return None
            called = getattr(called, "__wrapped__", None)
        return f"{self.name} was replaced by {_author(self.current())} {after}"

    def is_in_place(self) -> bool:
        return self.lost() is None


_DECORATORS = ("vllm", "torch", "contextlib", "functools")
"""Packages whose decorators a stock function may carry: `inference_mode`, `contextmanager`, vLLM's tracing."""

_MOST_WRAPPERS = 100
"""An object may answer to every name, ``__wrapped__`` included, without end."""

_sites: dict[tuple[int, str], Site] = {}
_stock_of: weakref.WeakKeyDictionary[FunctionType, FunctionType] = weakref.WeakKeyDictionary()
"""The stock function of each of ours, of which `from target import name` may have put copies into other modules."""

fix_of_layer: weakref.WeakKeyDictionary[FunctionType, str] = weakref.WeakKeyDictionary()
"""The name of the fix that each function of ours is of."""

own_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Wrappers of the plugin's hooks. Each looks up its wrapped function at each call."""

_as_diagnosed: dict[str, tuple[Any, int, int]] = {}
"""Modules known to run the diagnosed text: the spec, and the hash and length of that text."""


def apply(fix: str, patches: Iterable[Patch], activity: Activity, diagnosed: Read = lambda _: None) -> list[Site]:
    """Put the layer of *fix* on the targets of all *patches*, whose modules are imported, or on none.

    *diagnosed* maps the name of a module to the source that it must run, or to None.

    Raises `ConflictError`, and AttributeError where a target is missing.
    """
    # All targets are checked before the first is touched.
    sites = [(_site(patch, diagnosed(patch.module)), patch.wrap) for patch in patches]
    try:
        for site, wrap in sites:
            site.set_layer(fix, _layer(wrap, activity))
    except BaseException:
        # After an interrupt, too: part of a fix may be worse than none.
        revert(fix, [site for site, _ in sites])
        raise
    return [site for site, _ in sites]


def _layer(wrap: Wrap, activity: Activity) -> Layer:
    return lambda stock: wrap(stock, activity)


def revert(fix: str, sites: Iterable[Site]) -> None:
    """Remove the layers of *fix* wherever that is possible. Graphs captured before keep what they recorded.

    Raises `ConflictError` where a foreign patch is on top.
    """
    stuck = []
    for site in sites:
        if fix not in site.layers:
            continue
        if site.is_ours():
            site.set_layer(fix, None)
        else:
            stuck.append(site)  # a foreign wrapper must not be removed
    if stuck:
        patched = ", ".join(f"{site.name} was patched by {_author(site.current())}" for site in stuck)
        raise ConflictError(f"{patched} after the fix, whose wrapper is still underneath")


def drop_copies(patches: Iterable[Patch]) -> None:
    """Replace copies of our functions, made by `from … import`, by stock's at the targets of *patches*.

    A fix that fails on the importing module has no `Site` there through which `revert` would do so.
    """
    for patch in patches:
        module = sys.modules.get(patch.module)
        function = getattr(module, patch.name, None)  # of a module: a method's name has a dot
        if type(function) is not FunctionType or (stock := _stock_of.get(function)) is None:
            continue
        site = _sites.get((id(module), patch.name))
        if site is None or function is not site.installed:
            setattr(module, patch.name, stock)


def _site(patch: Patch, diagnosed: bytes | None) -> Site:
    *classes, attribute = patch.name.split(".")
    owner = _owner(patch.module, classes)
    _refuse_foreign_owner(owner, patch)
    function = vars(owner).get(attribute)
    if function is None:
        raise AttributeError(f"{patch.module} has no {patch.name} of its own")
    known = _sites.get((id(owner), attribute))
    if known is not None and known.owner is owner and known.is_ours() and known.is_in_place():
        return known
    stock = _stock_of.get(function, function) if type(function) is FunctionType else function
    _refuse_another_text(sys.modules[patch.module], diagnosed)
    _refuse_foreign_function(owner, patch, stock)
    # By id, since an owner need not be hashable; the site refers to it, so that no other object gets its id.
    site = _sites[id(owner), attribute] = Site(patch, owner, stock)
    return site


def _owner(module: str, classes: Sequence[str]) -> Any:
    owner: Any = sys.modules[module]
    for name in classes:
        owner = getattr(owner, name)
    return owner


def _refuse_foreign_owner(owner: Any, patch: Patch) -> None:
    if not isinstance(owner, ModuleType):
        if owner.__module__ != patch.module:
            raise ConflictError(f"{_author(owner)} replaces {patch.module}'s class")
        return
    # A layer on a copy of the module would never be called: functions look names up in the module that defines them.
    members = [vars(thing).values() if isinstance(thing, type) else (thing,) for thing in vars(owner).values()]
    written_here = [
        function.__globals__ is vars(owner)
        for inside in members
        for function in inside
        if type(function) is FunctionType
        and function.__module__ == patch.module
        and not hasattr(function, "__wrapped__")
    ]
    if written_here and not any(written_here):
        raise ConflictError(f"{patch.module} was replaced by another module with its name")


def _refuse_another_text(module: ModuleType, diagnosed: bytes | None) -> None:
    """Raise `ConflictError` for bytecode of another source, or a file that was replaced after its diagnosis."""
    spec: Any = module.__spec__
    if diagnosed is None or not hasattr(getattr(spec, "loader", None), "source_to_code"):
        return
    # Once per spec, which a reload renews: compiling a model runner takes 60 ms, and several fixes have targets there.
    known, *text = _as_diagnosed.get(spec.name, (None,))
    if known is spec and text == [hash(diagnosed), len(diagnosed)]:
        return
    if spec.loader.get_code(spec.name) != spec.loader.source_to_code(diagnosed, spec.origin):
        raise ConflictError(
            f"{module.__name__} does not run the code that was diagnosed: {spec.origin} or its bytecode has changed"
        )
    _as_diagnosed[spec.name] = (spec, hash(diagnosed), len(diagnosed))


def _refuse_foreign_function(owner: Any, patch: Patch, function: Any) -> None:
    """Raise `ConflictError` unless *function* is stock.

    That is vLLM's own function, under decorators of vLLM, torch and the standard library alone.
    """
    layer = function
    layers = []
    while True:
        if type(layer) is not FunctionType:  # wrapt's proxies claim to be instances of what they wrap
            raise ConflictError(f"{patch.name} is {_author(layer)}, not a function of {patch.module}")
        layers.append(layer)
        written_in = layer.__globals__.get("__name__", "")
        inner = getattr(layer, "__wrapped__", None)
        if inner is None:
            break
        if written_in.split(".")[0] not in _DECORATORS:
            raise ConflictError(f"{patch.name} is wrapped by {_author(layer)}")
        layer = inner
    # A name that a module imports is a function of another vLLM module; a method is defined with its class.
    if not (written_in.startswith("vllm.") if isinstance(owner, ModuleType) else written_in == patch.module):
        raise ConflictError(f"{patch.name} was replaced by {_author(layer)}")
    for layer in layers:
        if not _is_as_written(layer):
            raise ConflictError(f"{patch.name} was given the code of {_location(layer.__code__)}")


def _is_as_written(function: FunctionType) -> bool:
    """Tell if the file of its module contains the code of *function*: the only trace of an assigned ``__code__``."""
    spec: Any = function.__globals__.get("__spec__")
    if not hasattr(getattr(spec, "loader", None), "get_code"):
        return True
    codes = [spec.loader.get_code(spec.name)]  # from the cached bytecode where there is some
    for code in codes:
        if code == function.__code__:
            return True
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return False


def _author(thing: object) -> str:
    if isinstance(thing, type):
        return f"{thing.__qualname__} of {thing.__module__}"
    # wrapt's proxies pretend to be the wrapped function, and a partial has no module.
    theirs = getattr(thing, "_self_wrapper", None) or getattr(thing, "func", thing)
    module = getattr(theirs, "__globals__", {}).get("__name__") or getattr(type(theirs), "__module__", "?")
    return f"{type(thing).__name__} {getattr(theirs, '__qualname__', getattr(theirs, '__name__', '?'))} of {module}"


def _location(code: CodeType) -> str:
    return f"{code.co_filename}:{code.co_firstlineno}"
