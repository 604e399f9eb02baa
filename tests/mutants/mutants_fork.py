"""Forks that change a defect: its remedy, or the want of it, takes effect elsewhere than where the code stands.

A fork of a vLLM with the defect is right: the remedied functions take the place of stock's. A fork of one with the
remedy is wrong: functions without it take the place of those that have it, and these are still there to be seen. Each
fix has both, drawn by `SEED` from all ways that there are.
"""

from __future__ import annotations

import ast
import copy
import functools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mutants_bases import bases
from mutants_made import Base, Mutant

SEED = 47
RIGHT, WRONG = "right elsewhere", "wrong elsewhere"
OF_EACH = 5
"""Edits of one fix that come out right, and as many that come out wrong."""


class Unit(NamedTuple):
    """A function that the remedy changes, as it stands in a file, and the one that takes its place."""

    owner: str
    name: str
    effective: ast.FunctionDef

    @property
    def attribute(self) -> str:
        return ".".join(filter(None, (self.owner, self.name)))


class Fork(NamedTuple):
    """One file of a fork: the tree that stands there, and the one that is to take effect."""

    path: str
    standing: ast.Module
    effective: ast.Module

    @property
    def own_path(self) -> str:
        return f"{self.path.removesuffix('.py')}_own.py"

    def units(self) -> list[Unit] | None:
        """The functions that differ, or are there in *effective* alone; None where something else differs."""
        ours, theirs = (dict(_functions(tree)) for tree in (self.standing, self.effective))
        if dict(_rests(self.standing)) != dict(_rests(self.effective)):
            return None
        return [Unit(*place, each) for place, each in theirs.items() if place not in ours or _differ(ours[place], each)]


Way = Callable[[Fork, list[Unit]], tuple[list[ast.stmt], str | None]]
"""The statements of the file, and the text of a file of its own."""


def fork_edits(fix: str) -> Iterator[tuple[str, Mutant]]:
    """`RIGHT` or `WRONG`, and the edit: of each in turn, in an order that the seed gives."""
    chance = random.Random(f"{SEED} {fix}")  # noqa: S311 - to choose the same again
    defective = [where.base for where in bases(fix) if where.base.remedy]
    chance.shuffle(defective)
    for base in defective:
        ways = list(WAYS)
        chance.shuffle(ways)
        for way in ways:
            for intent in (RIGHT, WRONG):
                mutant = _mutant(fix, base, way, intent)
                if mutant is not None:
                    yield intent, mutant


def _mutant(fix: str, base: Base, way: str, intent: str) -> Mutant | None:
    """None where the remedy is not of functions alone, and the *way* is."""
    by_hand: list[tuple[str, Callable[[str], str]]] = []
    moved: list[tuple[str, str]] = []
    for path in dict.fromkeys(path for path, _ in base.remedy):
        without, remedied = (ast.parse(base.text(path, remedied=each)) for each in (False, True))
        fork = Fork(path, *((without, remedied) if intent == RIGHT else (remedied, without)))
        units = fork.units()
        if units is None and way not in OF_FILES:
            return None
        if not units and way not in OF_FILES:
            by_hand.append((path, lambda text: text))  # it defines more than what takes effect calls
            continue
        statements, own = WAYS[way](fork, units or [])
        text = ast.unparse(ast.fix_missing_locations(ast.Module(statements, [])))
        by_hand.append((path, functools.partial(_replaced_by, text)))
        if own is not None:
            moved.append((fork.own_path, own))
    start = base if intent == RIGHT else _remedied(fix, base)
    return Mutant(fix, start, (), (), tuple(by_hand), tuple(moved), name=f"{intent}: {way}", kind=intent)


def _replaced_by(text: str, _: str) -> str:
    return text


def _remedied(fix: str, base: Base) -> Base:
    return next(where.base for where in bases(fix) if where.twin == base)


# -- ways --------------------------------------------------------------------------------------------------------


def assigned_behind(fork: Fork, units: list[Unit]) -> tuple[list[ast.stmt], None]:
    new = [_renamed(unit, f"_own_{number}") for number, unit in enumerate(units)]
    assigned = [f"{unit.attribute} = _own_{number}" for number, unit in enumerate(units)]
    return [*fork.standing.body, *new, *_parsed("\n".join(assigned))], None


def subclass_of_the_same_name(fork: Fork, units: list[Unit]) -> tuple[list[ast.stmt], None]:
    """Functions of the module are defined again."""
    behind: list[ast.stmt] = []
    for unit in units:
        if not unit.owner:
            behind.append(unit.effective)
            continue
        behind += _parsed(f"_Stock{unit.owner} = {unit.owner}\nclass {unit.owner}(_Stock{unit.owner}):\n    pass")
        own = behind[-1]
        assert isinstance(own, ast.ClassDef)
        own.body = [_with_super_of(unit.effective, f"_Stock{unit.owner}")]
    return [*fork.standing.body, *behind], None


def defined_again_in_the_class(fork: Fork, units: list[Unit]) -> tuple[list[ast.stmt], None]:
    tree = copy.deepcopy(fork.standing)
    for unit in units:
        body = _body_of(tree, unit.owner)
        at = max((at for at, each in enumerate(body) if getattr(each, "name", "") == unit.name), default=len(body))
        body.insert(at + 1, unit.effective)
    return tree.body, None


def decorated(fork: Fork, units: list[Unit]) -> tuple[list[ast.stmt], None]:
    tree = copy.deepcopy(fork.standing)
    decorators: list[ast.stmt] = []
    for number, unit in enumerate(units):
        body = _body_of(tree, unit.owner)
        stock = next((each for each in body if getattr(each, "name", "") == unit.name), None)
        if stock is None:
            body.append(unit.effective)
            continue
        assert isinstance(stock, ast.FunctionDef)
        stock.decorator_list.insert(0, ast.Name(f"_own_{number}", ast.Load()))
        decorators += _parsed(f"def _own_{number}(stock):\n    return {unit.name}")
        decorator = decorators[-1]
        assert isinstance(decorator, ast.FunctionDef)
        effective = _with_super_of(unit.effective, unit.owner) if unit.owner else unit.effective
        decorator.body.insert(0, effective)
    first = next(at for at, each in enumerate(tree.body) if isinstance(each, (ast.ClassDef, ast.FunctionDef)))
    return [*tree.body[:first], *decorators, *tree.body[first:]], None


def assigned_from_another_file(fork: Fork, units: list[Unit], by: str = "{0} = {1}") -> tuple[list[ast.stmt], str]:
    module = _module(fork.path)
    new = [_renamed(unit, f"_own_{number}") for number, unit in enumerate(units)]
    lines = [
        f"import sys\nstock = sys.modules[{module!r}]\nglobals().update(vars(stock))",
        *(ast.unparse(ast.fix_missing_locations(each)) for each in new),
        *(
            by.format(f"stock.{unit.attribute}", f"_own_{number}", *f"stock.{unit.attribute}".rpartition(".")[::2])
            for number, unit in enumerate(units)
        ),
    ]
    return [*fork.standing.body, *_parsed(f"import {_module(fork.own_path)}")], "\n\n\n".join(lines) + "\n"


def set_from_another_file(fork: Fork, units: list[Unit]) -> tuple[list[ast.stmt], str]:
    return assigned_from_another_file(fork, units, "setattr({2}, '{3}', {1})")


def redefined_under_a_flag(fork: Fork, units: list[Unit]) -> tuple[list[ast.stmt], None]:
    statements, _ = subclass_of_the_same_name(fork, units)
    behind = statements[len(fork.standing.body) :]
    flag = ast.parse("import os\nif os.environ.get('VLLM_OWN', '1') == '1':\n    pass").body
    assert isinstance(flag[1], ast.If)
    flag[1].body = behind
    return [*fork.standing.body, *flag], None


def whole_file_behind(fork: Fork, _: list[Unit]) -> tuple[list[ast.stmt], None]:
    return [*fork.standing.body, *_without_future(fork.effective)], None


def names_from_another_file(fork: Fork, _: list[Unit]) -> tuple[list[ast.stmt], str]:
    names = sorted({name for each in fork.effective.body for name in _defined(each)})
    imported = f"from {_module(fork.own_path)} import {', '.join(names)}"
    return [*fork.standing.body, *_parsed(imported)], ast.unparse(fork.effective)


def all_of_another_file(fork: Fork, _: list[Unit]) -> tuple[list[ast.stmt], str]:
    taken = f"import {_module(fork.own_path)} as _own\nglobals().update(vars(_own))"
    return [*fork.standing.body, *_parsed(taken)], ast.unparse(fork.effective)


def each_name_of_another_file(fork: Fork, _: list[Unit]) -> tuple[list[ast.stmt], str]:
    taken = (
        f"import {_module(fork.own_path)} as _own\nfor _name in dir(_own):\n    globals()[_name] = getattr(_own, _name)"
    )
    return [*fork.standing.body, *_parsed(taken)], ast.unparse(fork.effective)


def another_file_in_its_place(fork: Fork, _: list[Unit]) -> tuple[list[ast.stmt], str]:
    module = _module(fork.own_path)
    swapped = f"import sys\nimport {module}\nsys.modules[__name__] = sys.modules[{module!r}]"
    return [*fork.standing.body, *_parsed(swapped)], ast.unparse(fork.effective)


OF_FILES: dict[str, Way] = {
    "the whole file behind it": whole_file_behind,
    "names imported from another file": names_from_another_file,
    "all names of another file": all_of_another_file,
    "each name of another file": each_name_of_another_file,
    "another module in its place": another_file_in_its_place,
}
WAYS: dict[str, Way] = {
    "assigned behind it": assigned_behind,
    "a subclass of the same name": subclass_of_the_same_name,
    "defined again in the class": defined_again_in_the_class,
    "a decorator that gives another function": decorated,
    "assigned from another file": assigned_from_another_file,
    "set from another file": set_from_another_file,
    "redefined under a flag": redefined_under_a_flag,
    **OF_FILES,
}


# -- trees -------------------------------------------------------------------------------------------------------


def _functions(tree: ast.Module) -> Iterator[tuple[tuple[str, str], ast.FunctionDef]]:
    for each in tree.body:
        if isinstance(each, ast.FunctionDef):
            yield ("", each.name), each
        elif isinstance(each, ast.ClassDef):
            yield from (((each.name, own.name), own) for own in each.body if isinstance(own, ast.FunctionDef))


def _rests(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield the statements that are no functions: of the file, and of each class."""
    classes = ((each.name, each.body) for each in tree.body if isinstance(each, ast.ClassDef))
    for name, body in (("", tree.body), *classes):
        yield name, [ast.dump(each) for each in body if not isinstance(each, (ast.FunctionDef, ast.ClassDef))]


def _differ(one: ast.AST, other: ast.AST) -> bool:
    return ast.dump(one) != ast.dump(other)


def _body_of(tree: ast.Module, owner: str) -> list[ast.stmt]:
    """The statements of the class *owner*, or of the file."""
    bodies = (each.body for each in tree.body if isinstance(each, ast.ClassDef) and each.name == owner)
    return next(bodies) if owner else tree.body


def _renamed(unit: Unit, name: str) -> ast.FunctionDef:
    node = _with_super_of(unit.effective, unit.owner) if unit.owner else copy.deepcopy(unit.effective)
    node.name = name
    return node


def _with_super_of(node: ast.FunctionDef, owner: str) -> ast.FunctionDef:
    """*node* with ``super()`` that works outside of the class."""
    node = copy.deepcopy(node)
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "super" and not each.args:
            each.args = [ast.Name(owner, ast.Load()), ast.Name(node.args.args[0].arg, ast.Load())]
    return node


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name


def _without_future(tree: ast.Module) -> list[ast.stmt]:
    return [each for each in tree.body if not (isinstance(each, ast.ImportFrom) and each.module == "__future__")]


def _parsed(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")
