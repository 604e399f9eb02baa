"""Somebody else's plugin of vLLM.

It puts a patch of its own on the function that the environment names, in one of the ways that people use.

Not imported by tests: `other_packages.install_plugin` makes a distribution of it, with an entry point in
``vllm.general_plugins``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import unittest.mock
from collections.abc import Callable
from types import FunctionType, ModuleType, new_class
from typing import Any

import wrapt

CALLS = 0
"""The number of calls of the patch."""


def register() -> None:
    """The entry point: patches now, or (``OTHER_WHEN=import``) when vLLM imports the target."""
    module = os.environ["OTHER_TARGET"].split(":")[0]
    if os.environ["OTHER_WHEN"] == "import":
        wrapt.register_post_import_hook(_patch, module)
    else:
        _patch(importlib.import_module(module))


def _patch(module: ModuleType) -> None:
    owner: Any = module
    *classes, name = os.environ["OTHER_TARGET"].split(":")[1].split(".")
    for part in classes:
        owner = getattr(owner, part)
    WAYS[os.environ["OTHER_WAY"]](module, owner, name)


def _called() -> None:
    global CALLS  # noqa: PLW0603 - counted where it happens
    CALLS += 1


def _own(*args: Any, **kwargs: Any) -> None:
    _called()


def _around(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    _called()
    return wrapped(*args, **kwargs)


def _calling(there: Callable[..., Any]) -> Callable[..., Any]:
    def patched(*args: Any, **kwargs: Any) -> Any:
        _called()
        return there(*args, **kwargs)

    return patched


def _code_with(variables: tuple[str, ...]) -> Any:
    """Code that does what `_own` does and closes over as many variables."""
    cells = "".join(f"    {name} = None\n" for name in variables)
    held = f"        ({', '.join(variables)},)\n" if variables else ""
    source = (
        f"def outer():\n{cells}    def _own(*args, **kwargs):\n        import other_plugin\n"
        f"{held}        other_plugin._called()\n    return _own"
    )
    made: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), made)  # noqa: S102 - as tools that inject bytecode do
    return made["outer"]().__code__


def _derived(owner: Any, inside: dict[str, Any], *, by: Any = None) -> Any:
    """A class below *owner*, made by the metaclass *by*, or as *owner* was.

    It is generic where *owner* is: vLLM subscripts what stands there.
    """
    parameters = getattr(owner, "__parameters__", ())
    base = owner[parameters] if parameters else owner
    made_by = {"metaclass": by or type(owner)}
    return new_class(owner.__name__, (base,), made_by, lambda body: body.update({"__module__": __name__, **inside}))


def _closure(module: ModuleType, owner: Any, name: str) -> None:
    there = vars(owner)[name]
    setattr(owner, name, functools.wraps(there)(_calling(there)))


def _bare_closure(module: ModuleType, owner: Any, name: str) -> None:
    setattr(owner, name, _calling(inspect.getattr_static(owner, name)))  # inherited or not


def _own_function(module: ModuleType, owner: Any, name: str) -> None:
    setattr(owner, name, _own)


def _partial(module: ModuleType, owner: Any, name: str) -> None:
    kind = functools.partialmethod if isinstance(owner, type) else functools.partial
    setattr(owner, name, kind(_calling(vars(owner)[name])))


def _wrapt_path(module: ModuleType, owner: Any, name: str) -> None:
    wrapt.patch_function_wrapper(module.__name__, os.environ["OTHER_TARGET"].split(":")[1])(_around)


def _wrapt_attribute(module: ModuleType, owner: Any, name: str) -> None:
    setattr(owner, name, wrapt.FunctionWrapper(vars(owner)[name], _around))


def _wrapt_decorator(module: ModuleType, owner: Any, name: str) -> None:
    setattr(owner, name, wrapt.decorator(_around)(vars(owner)[name]))


def _mock(module: ModuleType, owner: Any, name: str) -> None:
    unittest.mock.patch.object(owner, name, side_effect=_own).start()


def _autospec(module: ModuleType, owner: Any, name: str) -> None:
    unittest.mock.patch.object(owner, name, autospec=True, side_effect=_own).start()


def _code(module: ModuleType, owner: Any, name: str) -> None:
    function = vars(owner)[name]
    function.__code__ = _code_with(function.__code__.co_freevars)


def _innermost_code(module: ModuleType, owner: Any, name: str) -> None:
    function = inspect.unwrap(vars(owner)[name])
    function.__code__ = _code_with(function.__code__.co_freevars)


def _subclass_instead(module: ModuleType, owner: Any, name: str) -> None:
    setattr(module, owner.__name__, _derived(owner, {name: _own}))


def _subclass_that_calls(module: ModuleType, owner: Any, name: str) -> None:
    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        _called()
        return getattr(super(made, self), name)(*args, **kwargs)

    made = _derived(owner, {name: patched})
    setattr(module, owner.__name__, made)


def _subclass_that_inherits(module: ModuleType, owner: Any, name: str) -> None:
    setattr(module, owner.__name__, _derived(owner, {}))


def _metaclass(module: ModuleType, owner: Any, name: str) -> None:
    """The class gives its place to one that says it is vLLM's and makes of each class below it what it wants."""

    class Meta(type(owner)):  # type: ignore[misc] # whatever the class is made by
        def __new__(cls, of: str, bases: Any, inside: dict[str, Any]) -> Any:
            return super().__new__(cls, of, bases, {**inside, name: _own})

    setattr(module, owner.__name__, _derived(owner, {"__module__": owner.__module__}, by=Meta))


def _init_subclass(module: ModuleType, owner: Any, name: str) -> None:
    """Classes that are derived from now on are patched, this one is not."""

    def patching(cls: Any, /, **kwargs: Any) -> None:
        if name in vars(cls):
            setattr(cls, name, _calling(vars(cls)[name]))

    owner.__init_subclass__ = classmethod(patching)


def _elsewhere(module: ModuleType, owner: Any, name: str) -> None:
    """The name where a third module imported it; the target keeps its own."""
    importer = sys.modules["vllm"]
    setattr(importer, name, _calling(vars(owner)[name]))


def _copied_module(module: ModuleType, owner: Any, name: str) -> None:
    sys.modules[module.__name__] = copy = ModuleType(module.__name__)
    vars(copy).update(vars(module))


def _other_module(module: ModuleType, owner: Any, name: str) -> None:
    """A module in its place, in which the target is theirs."""
    _copied_module(module, owner, name)
    copy = sys.modules[module.__name__]
    if isinstance(owner, type):
        setattr(copy, owner.__name__, _derived(owner, {name: _own}))
    else:
        setattr(copy, name, FunctionType(_own.__code__, globals()))


def _reloaded(module: ModuleType, owner: Any, name: str) -> None:
    importlib.reload(module)


WAYS: dict[str, Callable[[ModuleType, Any, str], None]] = {
    "closure": _closure,
    "closure that does not say what it wraps": _bare_closure,
    "own function": _own_function,
    "functools.partial": _partial,
    "wrapt.patch_function_wrapper": _wrapt_path,
    "wrapt.FunctionWrapper": _wrapt_attribute,
    "wrapt.decorator": _wrapt_decorator,
    "mock.patch": _mock,
    "mock.patch with autospec": _autospec,
    "__code__": _code,
    "__code__ of the innermost function": _innermost_code,
    "subclass": _subclass_instead,
    "subclass that calls": _subclass_that_calls,
    "subclass that inherits": _subclass_that_inherits,
    "metaclass": _metaclass,
    "__init_subclass__": _init_subclass,
    "name elsewhere": _elsewhere,
    "copied module": _copied_module,
    "other module": _other_module,
    "reloaded module": _reloaded,
}
