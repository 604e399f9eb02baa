"""Functions of a source file: parts that match a pattern, and fingerprints."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from vllm_graphfix.source.patterns import canonical, is_anything, matches, parsed_pattern

T = TypeVar("T")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
_LEAVES = frozenset({ast.Name, ast.Constant})
"""Nodes with nothing below but a context; nearly half of all."""
_KNOWN_DECORATORS = frozenset(
    {
        "CustomOp",  # registers the class by name, and returns it
        "MULTIMODAL_REGISTRY",  # registers the processor of a model, and returns the class
        "abstractmethod",
        "classmethod",
        "config",  # vLLM's; makes a dataclass
        "contextlib",
        "contextmanager",
        "dataclass",
        "default_pooling_type",
        "final",
        "instrument",
        "override",  # typing's; returns the function
        "property",
        "staticmethod",
        "step_eplb_after",
        "torch",
        "triton",
    }
)
"""First words of decorators that call the decorated function each time, with the same arguments."""


class Function(NamedTuple):
    """A function, method or class of a source file."""

    path: str
    qualname: str
    node: Definition

    @property
    def where(self) -> str:
        return f"{self.path}:{self.node.lineno}"

    @property
    def _nodes(self) -> list[ast.AST]:
        """All nodes, cached on the first: walking them for each pattern takes longer than comparing them."""
        return cached_on(self.node, "graphfix_nodes", lambda: walk(self.node))

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(each.arg for each in parameters_of(self.node))

    @property
    def signature(self) -> str:
        """The parameters without annotations and defaults: ``self, a, /, b, *rest, c, **more``."""
        if isinstance(self.node, ast.ClassDef):
            return ""
        arguments = self.node.args
        marked = [
            *(a.arg for a in arguments.posonlyargs),
            *("/" for _ in arguments.posonlyargs[:1]),
            *(a.arg for a in arguments.args),
        ]
        if arguments.vararg or arguments.kwonlyargs:
            marked.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
        marked += [a.arg for a in arguments.kwonlyargs]
        return ", ".join([*marked, *([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])])

    def find(self, *patterns: str) -> list[ast.stmt | ast.expr]:
        """Return the parts that equal one of *patterns*, in their order and then that of the source.

        A pattern is Python code in which ``...`` stands for anything; ``f(...)`` is a call of ``f`` with any arguments,
        ``f(a, *..., b=c)`` one with these among others.
        """
        return [part for pattern in patterns for part in self._find(parsed_pattern(pattern))]

    def _find(self, pattern: ast.stmt | ast.expr) -> list[ast.stmt | ast.expr]:
        if is_anything(pattern):
            parts = [node for node in self._nodes if isinstance(node, (ast.stmt, ast.expr))]
        else:
            kind = type(pattern)  # few nodes have it: comparing the others would take most of the time
            parts = [node for node in self._nodes if isinstance(node, kind) and matches(node, pattern)]
        return sorted(parts, key=_position)

    def find_unique(self, pattern: str) -> ast.stmt | ast.expr | None:
        """Return the part that equals *pattern* if exactly one does."""
        parts = self.find(pattern)
        return parts[0] if len(parts) == 1 else None

    def find_each(self, *patterns: str) -> list[ast.stmt | ast.expr]:
        """Return one part for each of *patterns*, in their order; nothing unless each has exactly one."""
        parts = [self.find_unique(pattern) for pattern in patterns]
        return [part for part in parts if part is not None and None not in parts]

    def find_sequence(self, *patterns: str, at_once: bool = False) -> list[ast.stmt | ast.expr]:
        """Return what `find_each` does if these parts follow each other in one block; see `in_one_block`."""
        parts = self.find_each(*patterns)
        return parts if parts and self.in_one_block(*parts, at_once=at_once) else []

    def find_first_unique(self, patterns: Iterable[str]) -> ast.stmt | ast.expr | None:
        """Return the part that equals the first of *patterns* which exactly one part equals."""
        return next((part for part in map(self.find_unique, patterns) if part is not None), None)

    def call_has_keyword(self, call: str, keyword: str) -> bool:
        """Tell if the only *call*, ``f(...)``, has the argument *keyword*, ``name=value``."""
        keywords = getattr(self.find_unique(call), "keywords", [])
        wanted = getattr(parsed_pattern(f"f({keyword})"), "keywords", [])
        return any(matches(each, pattern) for each in keywords for pattern in wanted)

    def arguments(self, call: str) -> frozenset[str]:
        """Return the arguments of the only *call*, ``f(...)``, as written, without names; empty if there is none."""
        only = self.find_unique(call)
        arguments = [*getattr(only, "args", []), *(keyword.value for keyword in getattr(only, "keywords", []))]
        return frozenset(map(ast.unparse, arguments))

    def mentions(self, /, **times: int) -> bool:
        """Tell if each variable is read or assigned exactly that many times: `mentions(x=1)` means once."""
        counted = Counter(node.id for node in self._nodes if isinstance(node, ast.Name))
        return all(counted[name] == number for name, number in times.items())

    def used_only_in(self, name: str, *patterns: str) -> bool:
        """Tell if the variable or attribute *name* stands only in parts that equal one of *patterns*.

        A part counts if *name* stands in it as often as in its pattern.
        """
        known: set[int] = set()
        for pattern in patterns:
            times = len(_named_in(parsed_pattern(pattern), name))
            for part in self.find(pattern):
                here = _named_in(part, name)
                if len(here) == times:
                    known.update(map(id, here))
        return all(id(node) in known for node in _nodes_named(self._nodes, name))

    def always(self, pattern: str, aside: str = "") -> bool:
        """Tell if the only statement that equals *pattern* runs whenever the function is called.

        A return before it may skip it, except one in a statement that equals *aside*, a path of its own.
        """
        part = self.find_unique(pattern)
        return part is not None and part in self.node.body and not self.returns(0, part.lineno, aside)

    def returns(self, after: int, before: int, aside: str = "") -> bool:
        """Tell if the function itself, not one inside it, may return between the lines *after* and *before*."""
        excepted = self.find(aside) if aside else []
        nodes: list[ast.AST] = [*self.node.body]
        for node in nodes:
            if not isinstance(node, DEFINITIONS) and node not in excepted:
                nodes.extend(ast.iter_child_nodes(node))
        return any(isinstance(node, ast.Return) and after < node.lineno < before for node in nodes)

    def contains_name(self, name: str) -> bool:
        """Tell if the body has a variable or an attribute of this name."""
        return any(_named_in(statement, name) for statement in self.node.body)

    def reassigns(self, name: str) -> bool:
        """Tell if the parameter *name* is bound again: assigned, counted up, deleted, bound by a loop or ``as``."""
        return self.assigned(name) > 0

    def assigned(self, name: str) -> int:
        """Count how often the variable *name* is bound or deleted."""
        named = (node for node in self._nodes if isinstance(node, ast.Name) and node.id == name)
        return sum(isinstance(node.ctx, (ast.Store, ast.Del)) for node in named)

    def calls(self, first: ast.AST | None = None, last: ast.AST | None = None) -> frozenset[str]:
        """Return the names of the calls from the line of *first* up to that of *last*.

        For ``a.b(...)`` the name is ``b``; ``""`` for a call of anything without a name.
        """
        lines = range(getattr(first, "lineno", 0), getattr(last, "lineno", sys.maxsize))
        nodes = (node for statement in self.node.body for node in walk(statement))
        called = (node.func for node in nodes if isinstance(node, ast.Call) and node.lineno in lines)
        return frozenset(str(getattr(each, "attr", None) or getattr(each, "id", "")) for each in called)

    def own_calls(self) -> frozenset[str]:
        """Return the methods of ``self`` that the function calls."""
        called = (node.func for node in self._nodes if isinstance(node, ast.Call))
        return frozenset(
            func.attr
            for func in called
            if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "self"
        )

    def inner(self, name: str) -> Function | None:
        """Return the function *name* that is defined in this one, if exactly one is."""
        definitions = [node for node in self._nodes if isinstance(node, DEFINITIONS) and node.name == name]
        return Function(self.path, f"{self.qualname}.{name}", definitions[0]) if len(definitions) == 1 else None

    def assignments(self, name: str | None, value: str) -> list[ast.Assign]:
        """Return the assignments of *value*, a pattern, in source order: to *name*, or to any target with None.

        *name* is the only target, ``name = f(...)``, or the first, ``name, other = f(...)``.
        """
        wanted = parsed_pattern(value)
        assigned = (node for node in self._nodes if isinstance(node, ast.Assign) and matches(node.value, wanted))
        return sorted((node for node in assigned if name in {None, first_target(node)}), key=_position)

    def entering(self, context: str) -> list[ast.With]:
        """Return the ``with`` statements that enter *context*, a pattern, alone or among others."""
        wanted = parsed_pattern(context)
        return [
            node
            for node in self._nodes
            if isinstance(node, ast.With) and any(matches(item.context_expr, wanted) for item in node.items)
        ]

    def in_one_block(self, *parts: ast.stmt | ast.expr, at_once: bool = False) -> bool:
        """Tell if *parts*, statements or expression statements, follow each other in one block.

        With *at_once*, nothing stands between them.
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
        """Return the ``for`` loops over *iterated*, a pattern."""
        wanted = parsed_pattern(iterated)
        return [node for node in self._nodes if isinstance(node, ast.For) and matches(node.iter, wanted)]

    def repeats(self, pattern: str) -> bool:
        """Tell if a part that equals *pattern* is in a loop."""
        wanted = parsed_pattern(pattern)
        loops = (node for node in self._nodes if isinstance(node, LOOPS))
        return any(matches(node, wanted) for loop in loops for node in walk(loop))

    def at(self, node: ast.stmt | ast.expr) -> str:
        return f"{self.path}:{node.lineno}"

    def fingerprint(self) -> str:
        """Hash the syntax tree without positions, comments and docstrings, alike under every Python."""
        import hashlib

        def hashed() -> str:
            return hashlib.sha256(canonical(self.node).encode()).hexdigest()[:24]

        return cached_on(self.node, "graphfix_fingerprint", hashed)


def cached_on(node: ast.AST, name: str, make: Callable[[], T]) -> T:
    """Return the attribute *name* of *node*, which *make* makes once: several fixes inspect one syntax tree."""
    cached: dict[str, T] = vars(node)
    if name not in cached:
        cached[name] = make()
    return cached[name]


def parameters_of(node: Definition) -> list[ast.arg]:
    """Return the parameters in order, without ``*args`` and ``**kwargs``; a class has none."""
    if isinstance(node, ast.ClassDef):
        return []
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _position(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def first_target(node: ast.Assign) -> str | None:
    """Return the variable that an assignment with one ``=`` binds first; None for any other target."""
    target = node.targets[0]
    if isinstance(target, ast.Tuple) and target.elts:
        target = target.elts[0]
    return target.id if isinstance(target, ast.Name) and len(node.targets) == 1 else None


def _places(block: list[ast.stmt], parts: tuple[ast.stmt | ast.expr, ...]) -> list[int]:
    """Return the positions in *block* of those of *parts* that it contains."""
    return [
        position
        for part in parts
        for position, statement in enumerate(block)
        if statement is part or (isinstance(statement, ast.Expr) and statement.value is part)
    ]


def _named_in(tree: ast.AST, name: str) -> list[ast.Name | ast.Attribute]:
    """Return the variables and attributes of this name."""
    return _nodes_named(walk(tree), name)


def _nodes_named(nodes: Iterable[ast.AST], name: str) -> list[ast.Name | ast.Attribute]:
    return [
        node
        for node in nodes
        if (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)
    ]


def is_decorated(node: Definition) -> bool:
    """Tell if *node* has a decorator that is not known to call the function each time."""
    return any(_first_word(decorator) not in _KNOWN_DECORATORS for decorator in node.decorator_list)


def _first_word(node: ast.AST) -> str | None:
    while isinstance(node, (ast.Call, ast.Attribute)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def binds(statement: ast.stmt, name: str) -> bool:
    """Tell if *statement*, of a module or a class, binds *name*, or may bind any name.

    It does so by an assignment, an import or a definition in a branch.
    """
    if isinstance(statement, DEFINITIONS):
        return False  # it defines another name, or is the last definition
    if names_below(statement).isdisjoint((name, "*", "globals", "modules")):
        return False
    for node in walk(statement):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, (ast.Store, ast.Del)):
            return True
        if isinstance(node, DEFINITIONS) and node.name == name:
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"):
            return True
        if matches(node, parsed_pattern("globals()")) or matches(node, parsed_pattern("sys.modules")):
            return True
    return False


def assigns_to(statement: ast.stmt, qualname: str) -> bool:
    """Tell if *statement*, of a module, assigns to ``Class.method``, or calls ``setattr`` with both."""
    if isinstance(statement, DEFINITIONS):
        return False
    cls, _, method = qualname.rpartition(".")
    if method not in names_below(statement):
        return False
    call = parsed_pattern(f"setattr({cls}, {method!r}, ...)")
    return any(
        (
            isinstance(node, ast.Attribute)
            and node.attr == method
            and isinstance(node.ctx, ast.Store)
            and _first_word(node) == cls
        )
        or (isinstance(node, ast.Call) and matches(node, call))
        for node in walk(statement)
    )


def walk(node: ast.AST) -> list[ast.AST]:
    """Return *node* and all nodes below it in the order of `ast.walk`, without contexts, in less than half its time."""
    nodes = [node]
    for each in nodes:  # which grows meanwhile
        if type(each) not in _LEAVES:
            for field in each._fields:
                value = getattr(each, field, None)
                if isinstance(value, list):
                    nodes.extend([part for part in value if isinstance(part, ast.AST)])
                elif isinstance(value, ast.AST) and field != "ctx":
                    nodes.append(value)
    return nodes


def names_below(node: ast.AST) -> frozenset[str]:
    """Return all names in *node*. Those of a statement are cached on it: slices of several fixes share functions."""
    if not isinstance(node, _STATEMENTS):
        return frozenset(name for each in walk(node) for name in _names_of(each))
    names: frozenset[str] | None = vars(node).get("graphfix_names")
    if names is None:
        names = frozenset(_names_of(node)).union(*map(names_below, ast.iter_child_nodes(node)))
        vars(node)["graphfix_names"] = names
    return names


def _names_of(node: ast.AST) -> tuple[str, ...]:
    """Return the names of one node: variable, attribute, argument, import, definition, or string."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (node.attr,)
    if isinstance(node, (ast.arg, ast.keyword)):
        return (node.arg or "",)
    if isinstance(node, ast.alias):
        return (node.name.rpartition(".")[2], node.asname or "")
    if isinstance(node, DEFINITIONS):
        return (node.name,)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # getattr(self, "name"), vars()["name"]
        return (node.value,)
    return ()
