"""Functions in syntax trees: parts that match a pattern, and fingerprints."""

from __future__ import annotations

import ast
import functools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_LONGEST_INTEGER = 10_000
"""Bits; of more than 4,300 decimal digits Python writes none."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_KNOWN_DECORATORS = frozenset(
    {
        "CustomOp",  # notes the class by a name, and gives it back
        "MULTIMODAL_REGISTRY",  # notes which processor a model has, and gives the class back
        "abstractmethod",
        "classmethod",
        "contextlib",
        "contextmanager",
        "dataclass",
        "default_pooling_type",
        "final",
        "instrument",
        "override",  # typing's; gives the function back
        "property",
        "staticmethod",
        "step_eplb_after",
        "torch",
        "triton",
    }
)
"""First words of those that call what stands below them each time, with what they are given."""


class Function(NamedTuple):
    """A function, method or class found in a source file."""

    path: str
    qualname: str
    node: Definition

    @property
    def where(self) -> str:
        return f"{self.path}:{self.node.lineno}"

    @property
    def _nodes(self) -> list[ast.AST]:
        """All nodes, kept with the first of them.

        To walk them again for each pattern takes longer than to compare them.
        """
        kept: list[ast.AST] | None = getattr(self.node, "graphfix_nodes", None)
        if kept is None:
            kept = list(ast.walk(self.node))
            self.node.graphfix_nodes = kept  # type: ignore[union-attr]
        return kept

    @property
    def parameters(self) -> tuple[str, ...]:
        if isinstance(self.node, ast.ClassDef):
            return ()
        arguments = self.node.args
        return tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))

    @property
    def takes(self) -> str:
        """The parameters without annotations and defaults: ``self, a, /, b, *rest, c, **more``."""
        if isinstance(self.node, ast.ClassDef):
            return ""
        given = self.node.args
        marked = [
            *(a.arg for a in given.posonlyargs),
            *("/" for _ in given.posonlyargs[:1]),
            *(a.arg for a in given.args),
        ]
        if given.vararg or given.kwonlyargs:
            marked.append(f"*{given.vararg.arg if given.vararg else ''}")
        marked += [a.arg for a in given.kwonlyargs]
        return ", ".join([*marked, *([f"**{given.kwarg.arg}"] if given.kwarg else [])])

    def find(self, pattern: str) -> list[ast.stmt | ast.expr]:
        """The parts that equal *pattern*, Python code in which ``...`` stands for anything; in source order.

        ``f(...)`` is a call of ``f`` with any arguments, ``f(a, *..., b=c)`` one with these among them.
        """
        wanted = _pattern(pattern)
        if _is_anything(wanted):
            found = [node for node in self._nodes if isinstance(node, (ast.stmt, ast.expr))]
        else:
            kind = type(wanted)  # that of few nodes: to compare the others would take most of the time
            found = [node for node in self._nodes if isinstance(node, kind) and _matches(node, wanted)]
        return sorted(found, key=lambda node: (node.lineno, node.col_offset))

    def only(self, pattern: str) -> ast.stmt | ast.expr | None:
        """The part that equals *pattern*, if there is one and no other."""
        found = self.find(pattern)
        return found[0] if len(found) == 1 else None

    def each(self, *patterns: str) -> list[ast.stmt | ast.expr]:
        """The parts that equal *patterns*, in their order, if there is one for each and no other."""
        found = [self.only(pattern) for pattern in patterns]
        return [part for part in found if part is not None and None not in found]

    def gives(self, call: str, keyword: str) -> bool:
        """Whether the only *call*, ``f(...)``, has the argument *keyword*, ``name=value``."""
        given = getattr(self.only(call), "keywords", [])
        return any(
            _matches(each, wanted) for each in given for wanted in getattr(_pattern(f"f({keyword})"), "keywords", [])
        )

    def arguments(self, call: str) -> frozenset[str]:
        """What the only *call*, ``f(...)``, is given, by position or by name, as written; empty if there is no such."""
        found = self.only(call)
        given = [*getattr(found, "args", []), *(keyword.value for keyword in getattr(found, "keywords", []))]
        return frozenset(map(ast.unparse, given))

    def mentions(self, /, **times: int) -> bool:
        """Whether these variables are read or assigned so many times.

        Another number says that there is more to it than what was found.
        """
        counted = Counter(node.id for node in self._nodes if isinstance(node, ast.Name))
        return all(counted[name] == number for name, number in times.items())

    def confines(self, name: str, *patterns: str) -> bool:
        """Whether the variable or attribute *name* is nowhere but in parts that equal one of *patterns*.

        In such a part it stands as often as in the pattern.

        More general than `mentions`: whatever else is done with it says that there is more to it than what was found.
        """
        known: set[int] = set()
        for pattern in patterns:
            times = len(_named_in(_pattern(pattern), name))
            for part in self.find(pattern):
                here = _named_in(part, name)
                if len(here) == times:
                    known.update(map(id, here))
        return all(id(node) in known for node in _nodes_named(self._nodes, name))

    def always(self, pattern: str) -> bool:
        """Whether the one part that equals *pattern* is carried out whenever the function runs to its end.

        The part is a statement.
        """
        return self.only(pattern) in self.node.body

    def names(self, name: str) -> bool:
        """Whether the body has a variable or an attribute of this name."""
        return any(_named_in(statement, name) for statement in self.node.body)

    def sets(self, name: str) -> bool:
        """Whether the variable *name*, a parameter, is given another value.

        That is: assigned, counted up, deleted, bound by a loop or ``as``.
        """
        return self.assigned(name) > 0

    def assigned(self, name: str) -> int:
        """How often the variable *name* is."""
        named = (node for node in self._nodes if isinstance(node, ast.Name) and node.id == name)
        return sum(isinstance(node.ctx, (ast.Store, ast.Del)) for node in named)

    def calls(self, first: ast.AST | None = None, last: ast.AST | None = None) -> frozenset[str]:
        """The names of what the function calls from the line of *first* to that of *last*.

        For ``a.b(...)`` the name is ``b``; for what has no name, ``""``.
        """
        lines = range(getattr(first, "lineno", 0), getattr(last, "lineno", sys.maxsize))
        nodes = (node for statement in self.node.body for node in ast.walk(statement))
        called = (node.func for node in nodes if isinstance(node, ast.Call) and node.lineno in lines)
        return frozenset(str(getattr(each, "attr", None) or getattr(each, "id", "")) for each in called)

    def own_calls(self) -> frozenset[str]:
        """The methods of ``self`` that the function calls."""
        called = (node.func for node in self._nodes if isinstance(node, ast.Call))
        return frozenset(
            func.attr
            for func in called
            if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "self"
        )

    def inner(self, name: str) -> Function | None:
        """The function *name* that is defined in this one, if there is one and no other."""
        found = [node for node in self._nodes if isinstance(node, DEFINITIONS) and node.name == name]
        return Function(self.path, f"{self.qualname}.{name}", found[0]) if len(found) == 1 else None

    def assignments(self, name: str | None, value: str) -> list[ast.Assign]:
        """The assignments of *value*, a pattern, to *name* alone or first, in source order; None: to any.

        Examples: ``name = f(...)``, ``name, other = f(...)``.
        """
        wanted = _pattern(value)
        return [
            node
            for node in self.find("...")
            if isinstance(node, ast.Assign) and name in {None, first_target(node)} and _matches(node.value, wanted)
        ]

    def entering(self, context: str) -> list[ast.With]:
        """The ``with`` statements that enter *context*, a pattern, alone or among others."""
        wanted = _pattern(context)
        return [
            node
            for node in self._nodes
            if isinstance(node, ast.With) and any(_matches(item.context_expr, wanted) for item in node.items)
        ]

    def in_one_block(self, *parts: ast.stmt | ast.expr, at_once: bool = False) -> bool:
        """Whether these, statements or expressions that are one, follow each other in one block.

        *at_once*: with nothing between.
        """
        for node in self._nodes:
            for field in ("body", "orelse", "finalbody"):
                block = getattr(node, field, None)
                places = _places(block, parts) if isinstance(block, list) else []
                if len(places) == len(parts):
                    last = places[0] + len(places) - 1
                    return places == sorted(places) and (not at_once or places[-1] == last)
        return False

    def loops_over(self, iterated: str) -> list[ast.For]:
        """The ``for`` loops over *iterated*, a pattern."""
        wanted = _pattern(iterated)
        return [node for node in self._nodes if isinstance(node, ast.For) and _matches(node.iter, wanted)]

    def repeats(self, pattern: str) -> bool:
        """Whether a part that equals *pattern* is in a loop."""
        wanted = _pattern(pattern)
        loops = (node for node in self._nodes if isinstance(node, _LOOPS))
        return any(_matches(node, wanted) for loop in loops for node in ast.walk(loop))

    def loops(self) -> int:
        """How many loops the function has."""
        return sum(isinstance(node, _LOOPS) for node in self._nodes)

    def at(self, node: ast.stmt | ast.expr) -> str:
        return f"{self.path}:{node.lineno}"

    def fingerprint(self) -> str:
        """Hash of the syntax tree without positions, comments and docstrings; the same under every Python."""
        import hashlib

        kept: str | None = getattr(self.node, "graphfix_fingerprint", None)  # several fixes look at one function
        if kept is None:
            kept = hashlib.sha256(canonical(self.node).encode()).hexdigest()[:24]
            self.node.graphfix_fingerprint = kept  # type: ignore[union-attr]
        return kept


def first_target(node: ast.Assign) -> str | None:
    target = node.targets[0]
    if isinstance(target, ast.Tuple) and target.elts:
        target = target.elts[0]
    return target.id if isinstance(target, ast.Name) and len(node.targets) == 1 else None


def _places(block: list[ast.stmt], parts: tuple[ast.stmt | ast.expr, ...]) -> list[int]:
    """Where in *block* each of *parts* is, as far as it is there."""
    return [
        position
        for part in parts
        for position, statement in enumerate(block)
        if statement is part or (isinstance(statement, ast.Expr) and statement.value is part)
    ]


@functools.cache
def _pattern(text: str) -> ast.stmt | ast.expr:
    node = ast.parse(text).body[0]
    return node.value if isinstance(node, ast.Expr) else node


def _is_anything(pattern: object) -> bool:
    return isinstance(pattern, ast.Constant) and pattern.value is Ellipsis


def _allows_more_arguments(pattern: ast.Call) -> bool:
    last = pattern.args[-1] if pattern.args else None
    return isinstance(last, ast.Starred) and _is_anything(last.value)


def _named_in(tree: ast.AST, name: str) -> list[ast.Name | ast.Attribute]:
    """Variables and attributes of this name."""
    return _nodes_named(ast.walk(tree), name)


def _nodes_named(nodes: Iterable[ast.AST], name: str) -> list[ast.Name | ast.Attribute]:
    return [
        node
        for node in nodes
        if (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)
    ]


def is_decorated(node: Definition) -> bool:
    """Whether by something of which it is not known that it runs the function each time."""
    return any(_first_word(decorator) not in _KNOWN_DECORATORS for decorator in node.decorator_list)


def _first_word(node: ast.AST) -> str | None:
    while isinstance(node, (ast.Call, ast.Attribute)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def binds(statement: ast.stmt, name: str) -> bool:
    """Whether *statement*, of a module or a class, gives *name* a value, or may give one to every name.

    It may do so by assignment, import or a definition in a branch.
    """
    if isinstance(statement, DEFINITIONS):
        return False  # what it defines has another name, or is the last definition
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, (ast.Store, ast.Del)):
            return True
        if isinstance(node, DEFINITIONS) and node.name == name:
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"):
            return True
        if _matches(node, _pattern("globals()")) or _matches(node, _pattern("sys.modules")):
            return True
    return False


def sets(statement: ast.stmt, qualname: str) -> bool:
    """Whether *statement*, of a module, assigns to ``Class.method``, or calls ``setattr`` with both."""
    if isinstance(statement, DEFINITIONS):
        return False
    cls, _, method = qualname.rpartition(".")
    call = _pattern(f"setattr({cls}, {method!r}, ...)")
    return any(
        (
            isinstance(node, ast.Attribute)
            and node.attr == method
            and isinstance(node.ctx, ast.Store)
            and _first_word(node) == cls
        )
        or (isinstance(node, ast.Call) and _matches(node, call))
        for node in ast.walk(statement)
    )


def _matches(node: object, pattern: object) -> bool:
    if _is_anything(pattern):
        return True
    if isinstance(pattern, ast.AST):
        if type(node) is not type(pattern):
            return False
        if (
            isinstance(pattern, ast.Call)
            and len(pattern.args) == 1
            and _is_anything(pattern.args[0])
            and not pattern.keywords
        ):
            return _matches(getattr(node, "func", None), pattern.func)
        if isinstance(pattern, ast.Call) and isinstance(node, ast.Call) and _allows_more_arguments(pattern):
            first = pattern.args[:-1]
            return (
                _matches(node.func, pattern.func)
                and _matches(node.args[: len(first)], first)
                and all(any(_matches(given, wanted) for given in node.keywords) for wanted in pattern.keywords)
            )
        return all(
            _matches(getattr(node, field, None), getattr(pattern, field, None))
            for field in pattern._fields
            if field not in ("ctx", "type_comment", "kind")
        )
    if isinstance(pattern, list):
        if len(pattern) == 1 and isinstance(pattern[0], ast.Expr) and _is_anything(pattern[0].value):
            return True  # the body of a statement
        return isinstance(node, list) and len(node) == len(pattern) and all(map(_matches, node, pattern))
    return bool(node == pattern)


def matches_any(node: ast.AST, patterns: Iterable[str]) -> bool:
    """Whether *node*, a statement or an expression, equals one of *patterns*."""
    node = node.value if isinstance(node, ast.Expr) else node
    kind = type(node)  # that of few patterns: to compare with the others would take most of the time
    wanted = map(_pattern, patterns)
    return any(_matches(node, pattern) for pattern in wanted if type(pattern) is kind)


def canonical(node: object) -> str:
    """Like `ast.dump`, whose text differs between Python releases; empty fields and docstrings left out."""
    if isinstance(node, ast.AST):
        return f"{type(node).__name__}({','.join(_canonical_fields(node))})"
    if isinstance(node, list):
        return f"[{','.join(map(canonical, node))}]"
    if isinstance(node, int) and node.bit_length() > _LONGEST_INTEGER:
        return hex(node)
    return repr(node)


def _canonical_fields(node: ast.AST) -> Iterator[str]:
    for field in node._fields:
        value = getattr(node, field, None)
        if field in ("ctx", "kind", "type_comment"):
            continue
        if field == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            value = node.body[ast.get_docstring(node, clean=False) is not None :]
        if value is None or value == []:
            continue
        yield f"{field}={canonical(value)}"
