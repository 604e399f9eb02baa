"""The patch engine on functions that look like vLLM's.

Patches are whole or not at all, read back, taken back, never on foreign ground.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import pickle
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import wrapt

from vllm_graphfix.fix import Activity, Patch, StockFunction
from vllm_graphfix.patching import sites as patching
from vllm_graphfix.patching.hooks import wrap

TARGET = "vllm.standin_target"
IMPORTER = "vllm.user_after"

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


def apply(fix: str, patches: Iterable[Patch], diagnosed: patching.Read = lambda _: None) -> list[patching.Site]:
    return patching.apply(fix, patches, Activity(), diagnosed)


def adding(amount: int) -> Any:
    def wrap(stock: StockFunction, _: Activity) -> StockFunction:
        @functools.wraps(stock)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return stock(*args, **kwargs) + amount

        return wrapper

    return wrap


def capture(amount: int, module: str = TARGET) -> Patch:
    return Patch(module, "Manager.capture", adding(amount))


def test_a_patched_method_is_called_through_instances_subclasses_and_super(target: Any) -> None:
    apply("one", [capture(10)])
    assert target.Manager().capture(1) == 14
    assert target.Inheriting().capture(1) == 14
    assert target.Special().capture(1) == 114


def test_a_patched_method_looks_like_the_stock_one(target: Any) -> None:
    stock = target.Manager.capture
    signature, source_file = inspect.signature(stock), inspect.getfile(stock)
    apply("one", [capture(10)])
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
    apply("one", [capture(10), Patch(TARGET, "helper", adding(1))])
    again = pickle.loads(pickle.dumps(target.Manager(5)))
    assert isinstance(again, target.Manager)
    assert again.size == 5
    assert pickle.loads(pickle.dumps(target.helper)) is target.helper
    assert pickle.loads(pickle.dumps(target.Manager(5).capture))(1) == 17


def test_a_name_is_patched_where_it_is_looked_up(target: Any) -> None:
    apply("one", [Patch(TARGET, "helper", adding(1))])
    assert target.Manager().capture(1) == 5


def test_applying_twice_is_applying_once(target: Any) -> None:
    for _ in range(10):
        apply("one", [capture(10)])
    assert target.Manager().capture(1) == 14


@pytest.mark.parametrize("name", ["vllm.a_user", "vllm.user"])
def test_a_name_carried_into_another_module_before_or_after_is_wrapped_once(target: Any, name: str) -> None:
    before = _module(name, f"from {TARGET} import helper")
    apply("one", [Patch(TARGET, "helper", adding(1))])
    after = _module(IMPORTER, f"from {TARGET} import helper")
    sites = apply("one", [Patch(name, "helper", adding(1)), Patch(IMPORTER, "helper", adding(1))])
    assert before.helper(1) == after.helper(1) == target.helper(1) == 2
    patching.revert("one", sites)
    assert before.helper(1) == after.helper(1) == 1
    assert target.helper(1) == 2
    del sys.modules[name]


def test_copies_of_our_function_are_dropped_except_in_patched_modules(target: Any) -> None:
    stock = target.helper
    patches = [Patch(TARGET, "helper", adding(1)), Patch(IMPORTER, "helper", adding(1))]
    sites = apply("one", patches[:1])
    copied = _module(IMPORTER, f"from {TARGET} import helper")
    elsewhere = [Patch("vllm.not_imported", "helper", adding(1)), capture(1)]
    patching.drop_copies([*elsewhere, *patches])
    assert (target.helper(1), copied.helper(1)) == (2, 1)
    patching.revert("one", sites)
    patching.drop_copies([*elsewhere, *patches])
    assert target.helper is copied.helper is stock


@pytest.mark.parametrize("order", list(itertools.permutations(["one", "two", "three"])))
def test_layers_of_several_fixes_come_off_in_any_order(target: Any, order: tuple[str, ...]) -> None:
    stock = target.Manager.capture
    sites = {name: apply(name, [capture(amount)]) for name, amount in (("one", 10), ("two", 20), ("three", 40))}
    assert target.Manager().capture(1) == 74
    remaining = 74
    for name in order:
        patching.revert(name, sites[name])
        remaining -= {"one": 10, "two": 20, "three": 40}[name]
        assert target.Manager().capture(1) == remaining
    assert vars(target.Manager)["capture"] is stock


def test_what_was_taken_back_in_part_is_taken_back_whole(target: Any) -> None:
    sites = apply("one", [Patch(TARGET, "helper", adding(1)), capture(10)])
    patching.revert("one", sites[:1])
    patching.revert("one", sites)
    assert target.Manager().capture(1) == 4


def test_layers_come_and_go_beneath_our_own_wrapper_and_stay_beneath_another_one(target: Any) -> None:
    """As the gate is put on a function that a fix has patched."""
    stock, wrapped = target.Manager.capture, []

    def around(beneath: Any, *args: Any) -> Any:
        wrapped.append(beneath)
        return beneath(*args)

    one = apply("one", [capture(10)])
    for _ in range(2):
        wrap(target.Manager, "capture", around)
    assert (target.Manager().capture(1), one[0].is_in_place()) == (14, True)
    two = apply("two", [capture(20)])
    assert (target.Manager().capture(1), two[0].is_in_place()) == (34, True)
    patching.revert("one", one)
    assert target.Manager().capture(1) == 24
    patching.revert("two", two)
    assert target.Manager().capture(1) == 4
    assert inspect.unwrap(target.Manager.capture) is wrapped[-1] is stock
    three = apply("three", [capture(30)])
    target.Manager.capture = functools.wraps(target.Manager.capture)(lambda *args: 1000)
    with pytest.raises(patching.ConflictError, match="wrapper is still underneath"):
        patching.revert("three", three)


def test_a_fix_is_applied_whole_or_not_at_all(target: Any) -> None:
    stock = target.Manager.capture
    with pytest.raises(AttributeError, match=r"no Manager\.gone of its own"):
        apply("one", [capture(10), Patch(TARGET, "Manager.gone", adding(1))])
    assert target.Manager.capture is stock

    def broken(stock: StockFunction, _: Activity) -> StockFunction:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        apply("one", [capture(10), Patch(TARGET, "helper", broken)])
    assert target.Manager.capture is stock


def test_what_does_not_read_back_is_an_error_and_undone(target: Any) -> None:
    class Stubborn(type):
        def __setattr__(cls, name: str, value: object) -> None:
            """Swallows what is set."""

    target.Manager = Stubborn("Manager", (), {"capture": target.Manager.capture, "__module__": TARGET})
    with pytest.raises(RuntimeError, match="reads back as something other than what was set"):
        apply("one", [Patch(TARGET, "helper", adding(1)), capture(10)])
    assert target.helper(1) == 1


def test_a_layer_that_is_no_plain_wrapper_is_refused(target: Any) -> None:
    with pytest.raises(TypeError, match="not a plain function"):
        apply("one", [Patch(TARGET, "helper", lambda stock, _: FunctionType(stock.__code__, {}))])
    assert target.helper(1) == 1


def test_a_method_that_a_subclass_inherits_is_not_the_subclass_s_own(target: Any) -> None:
    with pytest.raises(AttributeError, match="of its own"):
        apply("one", [Patch(TARGET, "Inheriting.capture", adding(1))])


def test_decorators_of_the_standard_library_are_stock(target: Any) -> None:
    def passing_on(stock: StockFunction, _: Activity) -> StockFunction:
        @functools.wraps(stock)
        def wrapper(value: Any) -> Any:
            return stock(value + 1)

        return wrapper

    apply("one", [Patch(TARGET, "context", passing_on)])
    with target.context(1) as value:
        assert value == 2


def _foreign_function(target: Any) -> None:
    target.Manager.capture = lambda self, count: 7


def _foreign_wrapper(target: Any) -> None:
    target.Manager.capture = adding(1)(target.Manager.capture, Activity())


def _foreign_proxy(target: Any) -> None:
    wrapt.wrap_function_wrapper(TARGET, "Manager.capture", lambda wrapped, _, args, kwargs: wrapped(*args, **kwargs))


def _foreign_partial(target: Any) -> None:
    target.Manager.capture = functools.partialmethod(target.Manager.capture, 1)


def _foreign_class(target: Any) -> None:
    target.Manager = type("Manager", (target.Manager,), {"capture": lambda self, count: 7})


def _foreign_class_of_another_package(target: Any) -> None:
    target.Manager = type("Manager", (target.Manager,), {"capture": lambda self, count: 7, "__module__": "zoo.plugin"})


def _foreign_function_of_another_package(target: Any) -> None:
    target.Manager.capture = _module("zoo", "def capture(self, count): return 7").capture
    del sys.modules["zoo"]


FOREIGN = {
    _foreign_function: "function _foreign_function.<locals>.<lambda> of test_patching",
    _foreign_wrapper: "is wrapped by function Manager.capture of test_patching",
    _foreign_proxy: "FunctionWrapper _foreign_proxy.<locals>.<lambda> of test_patching",
    _foreign_partial: "partialmethod Manager.capture of vllm.standin_target",  # it is not known who made it
    _foreign_class: "Manager of test_patching replaces vllm.standin_target's class",
    _foreign_class_of_another_package: "Manager of zoo.plugin replaces",
    _foreign_function_of_another_package: "was replaced by function capture of zoo",
}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_somebody_else_s_patch_is_a_conflict_that_names_them_and_stays(target: Any, foreign: Any) -> None:
    foreign(target)
    theirs = vars(target.Manager)["capture"]
    with pytest.raises(patching.ConflictError, match=re.escape(FOREIGN[foreign])):
        apply("one", [Patch(TARGET, "helper", adding(1)), capture(10)])
    assert vars(target.Manager)["capture"] is theirs
    assert target.helper(1) == 1


def test_a_patch_that_came_after_ours_is_noticed_and_not_removed(target: Any) -> None:
    (site,) = apply("one", [capture(10)])
    _foreign_wrapper(target)
    assert site.is_in_place()
    theirs = target.Manager.capture
    with pytest.raises(patching.ConflictError, match="after the fix"):
        patching.revert("one", [site])
    assert target.Manager.capture is theirs
    _foreign_function(target)
    assert not site.is_in_place()


def test_a_target_is_named_as_people_write_it(target: Any) -> None:
    sites = apply("one", [Patch(TARGET, "helper", adding(1)), capture(10)])
    assert [site.name for site in sites] == ["standin_target.helper", "Manager.capture"]


@pytest.mark.parametrize("package", ["vllm.tracing.standin", "torch.utils.standin", "contextlib", "functools"])
def test_decorators_of_vllm_and_of_torch_are_stock(target: Any, package: str) -> None:
    code = adding(1)(target.helper, Activity()).__code__
    decorated = FunctionType(code, {"__name__": package}, closure=_closure(target.helper))
    target.helper = functools.wraps(target.helper)(decorated)
    apply("one", [Patch(TARGET, "helper", adding(1))])
    assert target.helper(1) == 3


def _closure(stock: Any) -> Any:
    return adding(1)(stock, Activity()).__closure__


def test_a_module_in_the_place_of_vllms_is_a_conflict_as_nobody_looks_names_up_there(target: Any) -> None:
    sys.modules[TARGET] = copied = ModuleType(TARGET)
    vars(copied).update(vars(target))
    with pytest.raises(patching.ConflictError, match="another module with its name"):
        apply("one", [Patch(TARGET, "helper", adding(1))])
    assert copied.helper is target.helper


# What happens to a target after it was patched


def _take_away(target: Any) -> None:
    del target.Manager


def _take_the_module_away(target: Any) -> None:
    del sys.modules[TARGET]


def _exchange_the_class(target: Any) -> None:
    target.Manager = type("Manager", (), {"capture": target.Manager.capture})


def _exchange_the_function(target: Any) -> None:
    target.Manager.capture = len


def _exchange_the_code(target: Any) -> None:
    target.Manager.capture.__code__ = _foreign_function.__code__.replace(co_freevars=("amount", "stock"))


def _exchange_the_code_of_stock(target: Any) -> None:
    target.Manager.capture.__wrapped__.__code__ = (lambda self, count: 7).__code__


def _put_what_answers_to_every_name(target: Any) -> None:
    class Endless:
        def __getattr__(self, name: str) -> Any:
            if name != "__wrapped__":
                raise AttributeError(name)
            return self

    target.Manager.capture = Endless()


@pytest.mark.parametrize(
    ("happens", "message"),
    [
        (_take_away, "Manager.capture was removed"),
        (_take_the_module_away, "Manager.capture was removed"),
        (_exchange_the_class, "what Manager.capture is in was replaced by Manager of test_patching"),
        (_exchange_the_function, "Manager.capture was replaced by builtin_function_or_method len of builtins"),
        (_exchange_the_code, f"Manager.capture was given the code of {__file__}:"),
        (_exchange_the_code_of_stock, f"Manager.capture was given the code of {__file__}:"),
        (_put_what_answers_to_every_name, "Manager.capture was replaced by Endless"),
    ],
)
def test_a_patch_that_is_no_longer_called_is_reported_with_its_cause(target: Any, happens: Any, message: str) -> None:
    (site,) = apply("one", [capture(10)])
    assert site.lost() is None
    happens(target)
    assert str(site.lost()).startswith(message)
    assert str(site.lost()).endswith("after the fix was applied")


def _from_a_file(folder: Path) -> Any:
    """The stand-in as vLLM's modules are: with a file, and a loader that knows its code."""
    (folder / "standin_target.py").write_text(_TARGET_SOURCE)
    spec = importlib.util.spec_from_file_location(TARGET, folder / "standin_target.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[TARGET] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_functions_are_known_by_the_code_in_their_file(target: Any, tmp_path: Path) -> None:
    target = _from_a_file(tmp_path)
    apply("one", [Patch(TARGET, "helper", adding(1)), capture(10)])
    assert target.Manager().capture(1) == 15


def test_other_code_in_a_function_is_a_conflict_that_says_where_it_is_from(target: Any, tmp_path: Path) -> None:
    target = _from_a_file(tmp_path)
    target.Manager.capture.__code__ = (lambda self, count: 7).__code__
    with pytest.raises(patching.ConflictError, match=rf"given the code of {re.escape(__file__)}:\d+"):
        apply("one", [Patch(TARGET, "helper", adding(1)), capture(10)])
    assert target.helper(1) == 1


def test_functions_that_have_run_often_are_known_by_their_code_too(target: Any, tmp_path: Path) -> None:
    target = _from_a_file(tmp_path)
    for _ in range(1000):  # the interpreter rewrites the bytecode of what is run often
        target.Manager().capture(1)
    apply("one", [capture(10)])
    assert target.Manager().capture(1) == 14


def test_a_patch_on_one_target_keeps_no_layer_on_the_others(target: Any) -> None:
    sites = apply("one", [capture(10), Patch(TARGET, "helper", adding(1))])
    _foreign_wrapper(target)
    with pytest.raises(
        patching.ConflictError, match=r"Manager\.capture was patched by function Manager\.capture of test_patching"
    ):
        patching.revert("one", sites)
    assert target.helper(1) == 1


@pytest.mark.parametrize(("diagnosed", "applied"), [("as it is", True), ("another", False), (None, True)])
def test_only_a_module_of_the_source_that_was_diagnosed_is_patched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, diagnosed: str | None, applied: bool
) -> None:
    text = _TARGET_SOURCE.encode()
    file = tmp_path / "vllm_standin_on_disk.py"
    file.write_bytes(text)
    spec = importlib.util.spec_from_file_location("vllm.standin_on_disk", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "vllm.standin_on_disk", module)
    spec.loader.exec_module(module)

    def wrap(stock: StockFunction, _: Activity) -> Any:
        @functools.wraps(stock)
        def layer(*args: Any) -> Any:
            return stock(*args)

        return layer

    patch = Patch("vllm.standin_on_disk", "Manager.capture", wrap)
    source = {"as it is": text, "another": text + b"\nMORE = 1\n", None: None}[diagnosed]
    if applied:
        assert apply("one", [patch], lambda _: source)
    else:
        with pytest.raises(patching.ConflictError, match="does not run the code that was diagnosed"):
            apply("one", [patch], lambda _: source)
        assert module.Manager.capture.__code__.co_filename == str(file)


def test_a_module_is_compared_again_only_after_a_reload_or_with_another_text(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # or whoever asks for the code of the file compiles it, too
    target, text = _from_a_file(tmp_path), _TARGET_SOURCE.encode()
    compiled: list[bytes] = []
    stocks = type(target.__spec__.loader).source_to_code

    def source_to_code(self: Any, data: bytes, path: str) -> Any:
        compiled.append(data)
        return stocks(self, data, path)

    monkeypatch.setattr(type(target.__spec__.loader), "source_to_code", source_to_code)
    apply("one", [capture(10), Patch(TARGET, "helper", adding(1))], lambda _: text)
    assert compiled == [text]
    for number in range(8):  # texts are told apart by their hashes
        more = text + f"MORE = {number}\n".encode()
        with pytest.raises(patching.ConflictError, match="does not run the code that was diagnosed"):
            apply("two", [Patch(TARGET, "context", adding(1))], {f"{TARGET}": more}.get)
    other = _from_a_file(tmp_path)
    compiled.clear()
    Path(other.__spec__.origin).write_bytes(text + b"MORE = 1\n")
    with pytest.raises(patching.ConflictError, match="does not run the code that was diagnosed"):
        apply("one", [capture(10)], lambda _: text)
    assert text in compiled


def test_a_module_that_python_has_from_elsewhere_than_the_diagnosis_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overlay. What is not imported, or is in an archive, which has no folder, cannot be told."""
    fix: Any = SimpleNamespace(inspected_files=("vllm/a_stand_in.py", "vllm/b_stand_in.py"))
    for folder in ("diagnosed", "elsewhere"):
        (tmp_path / folder / "vllm").mkdir(parents=True)
        for path in fix.inspected_files:
            (tmp_path / folder / path).write_text(f"# {folder}\n")

    def files(folder: Path | None) -> patching.DiagnosedFiles:
        made, source = patching.DiagnosedFiles(), SimpleNamespace(folder=folder, read=lambda path: path.encode())
        made.add(fix, source, ["vllm.a_stand_in"])  # type: ignore[arg-type]
        return made

    def imported(module: str, folder: str) -> None:
        origin = str(tmp_path / folder / "vllm" / f"{module}.py")
        spec = importlib.util.spec_from_file_location(f"vllm.{module}", origin)
        assert spec is not None
        monkeypatch.setitem(sys.modules, f"vllm.{module}", importlib.util.module_from_spec(spec))

    diagnosed, archive = files(tmp_path / "diagnosed"), files(None)
    assert (diagnosed.text("vllm.a_stand_in"), diagnosed.text("vllm.b_stand_in")) == (b"vllm/a_stand_in.py", None)
    imported("a_stand_in", "diagnosed")
    diagnosed.refuse_others(fix)
    imported("b_stand_in", "elsewhere")
    archive.refuse_others(fix)
    with pytest.raises(patching.ConflictError, match=r"elsewhere/vllm/b_stand_in\.py runs instead of .*/diagnosed/"):
        diagnosed.refuse_others(fix)
