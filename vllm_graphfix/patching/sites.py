"""Puts fixes on vLLM's functions.

All targets of a fix are patched or none, read back, and taken back; somebody else's patch is left alone.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Patch, StockFunction, Wrap

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_graphfix.fix import Patchable
    from vllm_graphfix.source.files import Source

Read = Callable[[str], "bytes | None"]
Layer = Callable[[StockFunction], Callable[..., Any]]


class ConflictError(Exception):
    """The target is not vLLM's own function: somebody else has patched it."""


class DiagnosedFiles:
    """The files that diagnoses have read, by module: vLLM has to run these, or the diagnoses are of other code.

    Paths and texts, and not the `Source`: it holds syntax trees, which no engine should keep.
    """

    def __init__(self) -> None:
        self._paths: dict[str, Path] = {}
        self._texts: dict[str, bytes | None] = {}

    def add(self, fix: Patchable, source: Source, targets: Iterable[str]) -> None:
        """Keeps where *fix* was diagnosed from, and the text of the modules *targets* that it will be put on."""
        if source.folder is not None:
            self._paths.update({_module_of(path): source.folder / path for path in fix.reads})
        for module in targets:
            self._texts[module] = source.read(f"{module.replace('.', '/')}.py")

    def text(self, module: str) -> bytes | None:
        """The source of *module* as it was diagnosed; None for one that is not to be patched."""
        return self._texts.get(module)

    def refuse_others(self, fix: Patchable) -> None:
        """Raises ConflictError where Python has a module that the diagnosis read from a file elsewhere."""
        for module in map(_module_of, fix.reads):
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
        """For people: ``Class.method`` or ``module.function``."""
        owner = getattr(self.owner, "__qualname__", None) or self.owner.__name__.rpartition(".")[2]
        return f"{owner}.{self.attribute}"

    def current(self) -> object:
        return vars(self.owner).get(self.attribute)

    def set_layer(self, fix: str, new: Layer | None) -> None:
        """Adds (or, with None, takes away) the layer of *fix* and installs what results.

        If that fails, all is as before.
        """
        layers = {name: layer for name, layer in {**self.layers, fix: new}.items() if layer is not None}
        function = self.stock
        for layer in layers.values():
            outer = layer(function)
            if not isinstance(outer, FunctionType) or getattr(outer, "__wrapped__", None) is not function:
                raise TypeError(f"a wrapper around {self.attribute} is not a plain function that wraps it")
            function = outer
        codes = self._codes_of(function)
        if function is not self.stock:
            # Before it is installed: another thread may carry it into its module at once, by `from target import name`.
            _stock_of[function] = self.stock
        caller, name = self._called_from() or (self.owner, self.attribute)
        try:
            setattr(caller, name, function)
            if vars(caller).get(name) is not function:
                raise RuntimeError(f"{self.attribute} reads back as something other than what was set")
        except BaseException:  # an interrupt too: a layer that nobody knows of could never be taken back
            setattr(caller, name, self.installed)
            raise
        self.layers, self.installed, self._codes = layers, function, codes

    def _codes_of(self, function: FunctionType) -> dict[FunctionType, CodeType]:
        return {each: each.__code__ for each in (function, inspect.unwrap(self.stock))}

    def is_ours(self) -> bool:
        """Whether nothing is on top of what was installed, but for wrappers of the plugin's own hooks."""
        return self._called_from() is not None

    def _called_from(self) -> tuple[Any, str] | None:
        """What has what was installed, and by which name: the owner, or the hook's wrapper that was put right on it."""
        caller, name = self.owner, self.attribute
        called = self.current()
        while called is not self.installed:
            if type(called) is not FunctionType or called not in own_wrappers:
                return None
            caller, name = called, "__wrapped__"
            called = vars(caller).get(name)
        return caller, name

    def lost(self) -> str | None:
        """Why what was installed is no longer what is called.

        None if it is called, perhaps through a wrapper that came later.
        """
        after = "after the fix was applied"
        stands: Any = sys.modules.get(self.module)
        for name in self.classes:
            stands = getattr(stands, name, None)
        if stands is None:
            return f"{self.name} was removed {after}"
        if stands is not self.owner:
            return f"what {self.name} is in was replaced by {_author(stands)} {after}"
        for function, code in self._codes.items():
            if function.__code__ is not code:
                return f"{self.name} was given the code of {_location(function.__code__)} {after}"
        # A later wrapper that names ours as what it wraps still calls it: that is no conflict.
        called = self.current()
        for _ in range(_MOST_WRAPPERS):
            if called is self.installed:
                return None
            called = getattr(called, "__wrapped__", None)
        return f"{self.name} was replaced by {_author(self.current())} {after}"

    def holds(self) -> bool:
        return self.lost() is None


_DECORATORS = ("vllm", "torch", "contextlib", "functools")
"""Packages whose decorators a stock function may carry: `inference_mode`, `contextmanager`, vLLM's tracing."""

_MOST_WRAPPERS = 100
"""An object may answer to every name, ``__wrapped__`` included, without end."""

_sites: dict[tuple[int, str], Site] = {}
_stock_of: weakref.WeakKeyDictionary[FunctionType, FunctionType] = weakref.WeakKeyDictionary()
"""Our functions and what they wrap: `from target import name` may have carried one into another module."""

own_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Wrappers that the plugin's hooks have put on functions of vLLM. Each asks for what it wraps at each call."""

_as_diagnosed: dict[str, tuple[Any, int, int]] = {}
"""Modules that run the text that was diagnosed: the spec, and the hash and the length of that text."""


def apply(fix: str, patches: Iterable[Patch], activity: Activity, diagnosed: Read = lambda _: None) -> list[Site]:
    """Puts the layer of *fix* on every target, whose modules are imported, or on none.

    *diagnosed* takes the name of a module, and returns the source that its code must be of, or None.

    Raises ConflictError, and AttributeError where a target is gone.
    """
    # All are found and looked at before the first is touched.
    sites = [(_site(patch, diagnosed(patch.module)), patch.wrap) for patch in patches]
    try:
        for site, wrap in sites:
            site.set_layer(fix, _layer(wrap, activity))
    except BaseException:
        take_back(fix, [site for site, _ in sites])
        raise
    return [site for site, _ in sites]


def _layer(wrap: Wrap, activity: Activity) -> Layer:
    return lambda stock: wrap(stock, activity)


def take_back(fix: str, sites: Iterable[Site]) -> None:
    """Removes the layers of *fix*, wherever that can be done. Graphs captured before keep what they recorded.

    Raises ConflictError where somebody else's patch is on top.
    """
    stuck = []
    for site in sites:
        if fix not in site.layers:
            continue
        if site.is_ours():
            site.set_layer(fix, None)
        else:
            stuck.append(site)  # taking their wrapper away is not ours to do
    if stuck:
        patched = ", ".join(f"{site.name} was patched by {_author(site.current())}" for site in stuck)
        raise ConflictError(f"{patched} after the fix, whose wrapper is still underneath")


def drop_copies(patches: Iterable[Patch]) -> None:
    """Puts stock functions back where `from … import` has carried ours to, and where these patches would have gone.

    A fix that fails on the importing module is taken back from where it is, and has no site there.
    """
    for patch in patches:
        module = sys.modules.get(patch.module)
        found = getattr(module, patch.name, None)  # of a module: a method's name has a dot
        if type(found) is not FunctionType or (stock := _stock_of.get(found)) is None:
            continue
        site = _sites.get((id(module), patch.name))
        if site is None or found is not site.installed:
            setattr(module, patch.name, stock)


def _site(patch: Patch, diagnosed: bytes | None) -> Site:
    *classes, attribute = patch.name.split(".")
    owner = _owner(patch.module, classes)
    _refuse_foreign_owner(owner, patch)
    found = vars(owner).get(attribute)
    if found is None:
        raise AttributeError(f"{patch.module} has no {patch.name} of its own")
    known = _sites.get((id(owner), attribute))
    if known is not None and known.owner is owner and known.is_ours() and known.holds():
        return known
    stock = _stock_of.get(found, found) if type(found) is FunctionType else found
    _refuse_another_text(sys.modules[patch.module], diagnosed)
    _refuse_foreign_function(owner, patch, stock)
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
    # A layer on a copy of the module would be called by nobody: functions look names up in the module that they were
    # made in.
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
    """Bytecode of another source, or a file that was replaced since it was diagnosed."""
    spec: Any = module.__spec__
    if diagnosed is None or not hasattr(getattr(spec, "loader", None), "source_to_code"):
        return
    # Once: to compile a model runner takes 60 ms, and several fixes have targets there. What is loaded anew has another
    # spec.
    known, *text = _as_diagnosed.get(spec.name, (None,))
    if known is spec and text == [hash(diagnosed), len(diagnosed)]:
        return
    if spec.loader.get_code(spec.name) != spec.loader.source_to_code(diagnosed, spec.origin):
        raise ConflictError(
            f"{module.__name__} does not run the code that was diagnosed: {spec.origin} or its bytecode has changed"
        )
    _as_diagnosed[spec.name] = (spec, hash(diagnosed), len(diagnosed))


def _refuse_foreign_function(owner: Any, patch: Patch, function: Any) -> None:
    """Raises ConflictError unless *function* is stock.

    Stock means: vLLM's own function, under no wrapper but those of vLLM's, torch's and the standard library's
    decorators.
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
    # A name that a module imported is another vLLM module's function; a method is written where its class is.
    if not (written_in.startswith("vllm.") if isinstance(owner, ModuleType) else written_in == patch.module):
        raise ConflictError(f"{patch.name} was replaced by {_author(layer)}")
    for layer in layers:
        if not _is_as_written(layer):
            raise ConflictError(f"{patch.name} was given the code of {_location(layer.__code__)}")


def _is_as_written(function: FunctionType) -> bool:
    """Whether the file of its module has the code of *function*.

    An assignment to its ``__code__`` leaves no other trace.
    """
    spec: Any = function.__globals__.get("__spec__")
    if not hasattr(getattr(spec, "loader", None), "get_code"):
        return True
    codes = [spec.loader.get_code(spec.name)]  # from the bytecode that the import has left, where it could
    for code in codes:
        if code == function.__code__:
            return True
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return False


def _module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _author(found: object) -> str:
    if isinstance(found, type):
        return f"{found.__qualname__} of {found.__module__}"
    # wrapt's proxies tell of what they wrap, and a partial of nobody.
    theirs = getattr(found, "_self_wrapper", None) or getattr(found, "func", found)
    module = getattr(theirs, "__globals__", {}).get("__name__") or getattr(type(theirs), "__module__", "?")
    return f"{type(found).__name__} {getattr(theirs, '__qualname__', getattr(theirs, '__name__', '?'))} of {module}"


def _location(code: CodeType) -> str:
    return f"{code.co_filename}:{code.co_firstlineno}"
