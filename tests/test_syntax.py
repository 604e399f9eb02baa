"""Parts of functions found by patterns, and what a function takes."""

from __future__ import annotations

import ast
import textwrap

import pytest

from vllm_graphfix.source.functions import Function


def function(source: str) -> Function:
    node = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(node, ast.FunctionDef)
    return Function("there.py", node.name, node)


def body(*statements: str) -> Function:
    return function("def f():\n" + "".join(textwrap.indent(f"{each}\n", "    ") for each in statements))


@pytest.mark.parametrize(
    "takes",
    ["a", "a, /", "a, b, /", "a, b, /, c", "*rest", "*, c", "*rest, c", "a, /, b, *rest, c, **more", "**more", ""],
)
def test_what_a_function_takes_is_written_as_in_its_source(takes: str) -> None:
    assert function(f"def f({takes}): pass").takes == takes


def test_what_a_function_takes_is_without_annotations_and_defaults() -> None:
    assert function("def f(a: int = 1, *, b: str = '') -> None: pass").takes == "a, *, b"


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("f(...)", "f(1, b=2)", "g(1)"),
        ("f(..., a)", "f(1, a)", "f(1, b)"),
        ("f(..., a)", "f(b, a)", "f(b, a, c)"),
        ("f(a, ...)", "f(a, 1)", "f(b, 1)"),
        ("x = ...", "x = 1", "y = 1"),
        ("if c: ...", "if c:\n    a()\n    b()", "if d:\n    a()"),
        ("if c:\n    ...\n    b()", "if c:\n    a()\n    b()", "if c:\n    a()\n    d()"),
        ("a + b", "x = a + b", "x = a - b"),
    ],
)
def test_a_pattern_is_found_where_it_is_and_nowhere_else(pattern: str, matching: str, other: str) -> None:
    assert len(body(matching).find(pattern)) == 1
    assert body(other).find(pattern) == []


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("name = f(1)", True),
        ("name, other = f(1)", True),
        ("(name,) = f(1)", True),
        ("other, name = f(1)", False),
        ("name, last, other = f(1)", True),
        ("other, name, last = f(1)", False),
        ("name = last = f(1)", False),
        ("name[0] = f(1)", False),
        ("name = g(1)", False),
    ],
)
def test_an_assignment_is_to_the_name_alone_or_first(statement: str, found: bool) -> None:
    assert bool(body(statement).assignments("name", "f(...)")) == found


@pytest.mark.parametrize(
    ("statements", "in_order", "at_once"),
    [
        (("a()", "b()", "c()"), True, True),
        (("a()", "b()", "x()", "c()"), True, False),
        (("a()", "x()", "b()", "c()"), True, False),
        (("b()", "a()", "c()"), False, False),
        (("a()", "c()", "b()"), False, False),
        (("a()", "if x:\n    b()\n    c()"), False, False),
        (("if x:\n    pass\nelse:\n    a()\n    b()\n    c()",), True, True),
        (("try:\n    pass\nfinally:\n    a()\n    b()\n    c()",), True, True),
    ],
)
def test_statements_follow_each_other_in_one_block(statements: tuple[str, ...], in_order: bool, at_once: bool) -> None:
    found = body(*statements)
    parts = found.each("a()", "b()", "c()")
    assert len(parts) == 3
    assert found.in_one_block(*parts) == in_order
    assert found.in_one_block(*parts, at_once=True) == at_once


def test_a_part_is_the_only_one_or_none() -> None:
    assert body("a()", "b()").only("a()") is not None
    assert body("a()", "a()").only("a()") is None
    assert body("b()").only("a()") is None


def test_an_argument_is_given_by_name_and_value() -> None:
    given = body("f(1, a=b, c=2)")
    assert given.gives("f(...)", "a=b")
    assert given.gives("f(...)", "c=...")
    assert not given.gives("f(...)", "a=c")
    assert not given.gives("f(...)", "d=...")
    assert not body("f(a=b)", "f(a=b)").gives("f(...)", "a=b")


def test_names_are_counted() -> None:
    assert body("a = b", "a.b = c(a)").mentions(a=3, b=1, c=1, d=0)
    assert not body("a = b").mentions(a=2)


def test_a_fingerprint_sees_code_and_neither_comments_nor_docstrings() -> None:
    plain = function("def f(a):\n    return a")
    assert function('def f(a):\n    """Says."""\n    return a  # so').fingerprint() == plain.fingerprint()
    assert function("def f(a):\n    return -a").fingerprint() != plain.fingerprint()
    assert function("def f(b):\n    return b").fingerprint() != plain.fingerprint()
