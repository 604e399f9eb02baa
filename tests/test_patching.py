"""The patch engine on functions that look like vLLM's: whole or not at all, read back, taken back, never on foreign ground."""

from __future__ import annotations

import functools
import inspect
import itertools
import pickle
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest
import wrapt

from vllm_graphfix import patching
from vllm_graphfix.fix import Patch, StockFunction

TARGET = "vllm.standin_target"
IMPORTER = "vllm.standin_importer"

_TARGET_SOURCE = '''
import contextlib

def helper(value, *, twice=False):
    """Helps."""
    return value * (2 if twice else 1)

@contextlib.contextmanager
def context(value):
    yield value

class Manager:
    def __init__(self, size: int = 3) -> None:
        self.size = size

    def capture(self, count: int, *more: int) -> int:
        """Captures."""
        return helper(self.size + count)

class Special(Manager):
    def capture(self, count: int, *more: int) -> int:
        return super().capture(count) + 100

class Inheriting(Manager):
    pass
'''


def _module(name: str, source: str) -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, f"{name}.py", "exec"), module.__dict__)  # noqa: S102 - this very file's source
    return module


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))  # pickle imports the parent of a module
    yield _module(TARGET, _TARGET_SOURCE)
    sys.modules.pop(TARGET, None)
    sys.modules.pop(IMPORTER, None)


def adding(amount: int) -> Any:
    def wrap(stock: StockFunction) -> StockFunction:
        @functools.wraps(stock)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return stock(*args, **kwargs) + amount

        return wrapper

    return wrap


def capture(amount: int, module: str = TARGET) -> Patch:
    return Patch(module, "Manager.capture", adding(amount))


def test_a_patched_method_is_called_through_instances_subclasses_and_super(target: Any) -> None:
    patching.apply("one", [capture(10)])
    assert target.Manager().capture(1) == 14
    assert target.Inheriting().capture(1) == 14
    assert target.Special().capture(1) == 114


def test_a_patched_method_looks_like_the_stock_one(target: Any) -> None:
    stock = target.Manager.capture
    signature, source_file = inspect.signature(stock), inspect.getfile(stock)
    patching.apply("one", [capture(10)])
    patched = target.Manager.capture
    assert inspect.isfunction(patched)
    assert inspect.signature(patched) == signature
    assert inspect.unwrap(patched) is stock
    assert inspect.getfile(inspect.unwrap(patched)) == source_file
    assert (patched.__name__, patched.__qualname__, patched.__module__, patched.__doc__) == (
        "capture",
        "Manager.capture",
        TARGET,
        "Captures.",
    )


def test_instances_and_functions_pickle_as_before(target: Any) -> None:
    patching.apply("one", [capture(10), Patch(TARGET, "helper", adding(1))])
    again = pickle.loads(pickle.dumps(target.Manager(5)))
    assert isinstance(again, target.Manager)
    assert again.size == 5
    assert pickle.loads(pickle.dumps(target.helper)) is target.helper
    assert pickle.loads(pickle.dumps(target.Manager(5).capture))(1) == 17


def test_a_name_is_patched_where_it_is_looked_up(target: Any) -> None:
    patching.apply("one", [Patch(TARGET, "helper", adding(1))])
    assert target.Manager().capture(1) == 5


def test_applying_twice_is_applying_once(target: Any) -> None:
    for _ in range(10):
        patching.apply("one", [capture(10)])
    assert target.Manager().capture(1) == 14


def test_a_name_carried_into_another_module_before_or_after_is_wrapped_once(target: Any) -> None:
    before = _module("vllm.standin_before", f"from {TARGET} import helper")
    patching.apply("one", [Patch(TARGET, "helper", adding(1))])
    after = _module(IMPORTER, f"from {TARGET} import helper")
    sites = patching.apply(
        "one", [Patch("vllm.standin_before", "helper", adding(1)), Patch(IMPORTER, "helper", adding(1))]
    )
    assert before.helper(1) == after.helper(1) == target.helper(1) == 2
    patching.take_back("one", sites)
    assert before.helper(1) == after.helper(1) == 1
    assert target.helper(1) == 2
    del sys.modules["vllm.standin_before"]


@pytest.mark.parametrize("order", list(itertools.permutations(["one", "two", "three"])))
def test_layers_of_several_fixes_come_off_in_any_order(target: Any, order: tuple[str, ...]) -> None:
    stock = target.Manager.capture
    sites = {
        name: patching.apply(name, [capture(amount)]) for name, amount in (("one", 10), ("two", 20), ("three", 40))
    }
    assert target.Manager().capture(1) == 74
    left = 74
    for name in order:
        patching.take_back(name, sites[name])
        left -= {"one": 10, "two": 20, "three": 40}[name]
        assert target.Manager().capture(1) == left
    assert vars(target.Manager)["capture"] is stock


def test_a_fix_is_applied_whole_or_not_at_all(target: Any) -> None:
    stock = target.Manager.capture
    with pytest.raises(AttributeError, match=r"no Manager\.gone of its own"):
        patching.apply("one", [capture(10), Patch(TARGET, "Manager.gone", adding(1))])
    assert target.Manager.capture is stock

    def broken(_: StockFunction) -> StockFunction:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        patching.apply("one", [capture(10), Patch(TARGET, "helper", broken)])
    assert target.Manager.capture is stock


def test_what_does_not_read_back_is_an_error_and_undone(target: Any) -> None:
    class Stubborn(type):
        def __setattr__(cls, name: str, value: object) -> None:
            """Swallows what is set."""

    target.Manager = Stubborn("Manager", (), {"capture": target.Manager.capture, "__module__": TARGET})
    with pytest.raises(RuntimeError, match="does not read back"):
        patching.apply("one", [Patch(TARGET, "helper", adding(1)), capture(10)])
    assert target.helper(1) == 1


def test_a_layer_that_is_no_plain_wrapper_is_refused(target: Any) -> None:
    with pytest.raises(TypeError, match="not a plain function"):
        patching.apply("one", [Patch(TARGET, "helper", lambda stock: FunctionType(stock.__code__, {}))])
    assert target.helper(1) == 1


def test_a_method_that_a_subclass_inherits_is_not_the_subclass_s_own(target: Any) -> None:
    with pytest.raises(AttributeError, match="of its own"):
        patching.apply("one", [Patch(TARGET, "Inheriting.capture", adding(1))])


def test_decorators_of_the_standard_library_are_stock(target: Any) -> None:
    def passing_on(stock: StockFunction) -> StockFunction:
        @functools.wraps(stock)
        def wrapper(value: Any) -> Any:
            return stock(value + 1)

        return wrapper

    patching.apply("one", [Patch(TARGET, "context", passing_on)])
    with target.context(1) as value:
        assert value == 2


def _foreign_function(target: Any) -> None:
    target.Manager.capture = lambda self, count: 7


def _foreign_wrapper(target: Any) -> None:
    target.Manager.capture = adding(1)(target.Manager.capture)


def _foreign_proxy(target: Any) -> None:
    wrapt.wrap_function_wrapper(TARGET, "Manager.capture", lambda wrapped, _, args, kwargs: wrapped(*args, **kwargs))


def _foreign_partial(target: Any) -> None:
    target.Manager.capture = functools.partialmethod(target.Manager.capture, 1)


def _foreign_class(target: Any) -> None:
    target.Manager = type("Manager", (target.Manager,), {"capture": lambda self, count: 7})


@pytest.mark.parametrize(
    "foreign", [_foreign_function, _foreign_wrapper, _foreign_proxy, _foreign_partial, _foreign_class]
)
def test_somebody_else_s_patch_is_a_conflict_and_stays(target: Any, foreign: Any) -> None:
    foreign(target)
    theirs = vars(target.Manager)["capture"]
    with pytest.raises(patching.ConflictError, match="Manager"):
        patching.apply("one", [Patch(TARGET, "helper", adding(1)), capture(10)])
    assert vars(target.Manager)["capture"] is theirs
    assert target.helper(1) == 1


def test_a_patch_that_came_after_ours_is_seen_and_kept(target: Any) -> None:
    (site,) = patching.apply("one", [capture(10)])
    _foreign_wrapper(target)
    assert site.holds()
    theirs = target.Manager.capture
    with pytest.raises(patching.ConflictError, match="after the fix"):
        patching.take_back("one", [site])
    assert target.Manager.capture is theirs
    _foreign_function(target)
    assert not site.holds()
