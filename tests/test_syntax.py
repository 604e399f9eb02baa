"""Parts of functions found by patterns, and what a function takes."""

from __future__ import annotations

import ast
import textwrap

import pytest

from vllm_graphfix.source.functions import Function, assigns_to, binds


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
    assert function(f"def f({takes}): pass").signature == takes


def test_what_a_function_takes_is_without_annotations_and_defaults() -> None:
    assert function("def f(a: int = 1, *, b: str = '') -> None: pass").signature == "a, *, b"


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
def test_a_pattern_matches_where_it_is_and_nowhere_else(pattern: str, matching: str, other: str) -> None:
    assert len(body(matching).find(pattern)) == 1
    assert body(other).find(pattern) == []


@pytest.mark.parametrize(
    ("statement", "matching"),
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
def test_an_assignment_is_to_the_name_alone_or_first(statement: str, matching: bool) -> None:
    assert bool(body(statement).assignments("name", "f(...)")) == matching


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
    function_body = body(*statements)
    parts = function_body.find_each("a()", "b()", "c()")
    assert len(parts) == 3
    assert function_body.in_one_block(*parts) == in_order
    assert function_body.in_one_block(*parts, at_once=True) == at_once
    assert function_body.find_sequence("a()", "b()", "c()") == (parts if in_order else [])
    assert function_body.find_sequence("a()", "b()", "c()", at_once=True) == (parts if at_once else [])


def test_a_sequence_has_one_part_for_each_pattern() -> None:
    for at_once in (False, True):
        assert body("a()", "b()", "b()").find_sequence("a()", "b()", at_once=at_once) == []


def test_several_patterns_are_searched_one_after_the_other() -> None:
    function_body = body("b()", "a()", "c()", "a()")
    assert [part.lineno for part in function_body.find("a()", "b()")] == [3, 5, 2]


def test_the_first_pattern_with_one_part_is_taken() -> None:
    function_body = body("b()", "a()", "c()", "a()")
    assert function_body.find_first_unique(["a()", "d()", "c()", "b()"]) is function_body.find_unique("c()")
    assert function_body.find_first_unique(["a()", "d()"]) is None


@pytest.mark.parametrize(
    ("before", "is_always"),
    [
        ("b()", True),
        ("if c:\n    return", False),
        ("while c:\n    if d: return 1", False),
        ("if known:\n    return 1", True),
        ("def g():\n    return 1", True),
    ],
)
def test_a_statement_behind_a_return_is_not_always_carried_out(before: str, *, is_always: bool) -> None:
    assert body(before, "a = 1").always("a = 1", "if known: ...") is is_always


def test_a_part_is_the_only_one_or_none() -> None:
    assert body("a()", "b()").find_unique("a()") is not None
    assert body("a()", "a()").find_unique("a()") is None
    assert body("b()").find_unique("a()") is None


def test_a_keyword_argument_is_matched_by_name_and_value() -> None:
    caller = body("f(1, a=b, c=2)")
    assert caller.call_has_keyword("f(...)", "a=b")
    assert caller.call_has_keyword("f(...)", "c=...")
    assert not caller.call_has_keyword("f(...)", "a=c")
    assert not caller.call_has_keyword("f(...)", "d=...")
    assert not body("f(a=b)", "f(a=b)").call_has_keyword("f(...)", "a=b")


def test_arguments_are_returned_as_written() -> None:
    caller = body("f(1, a.b, c=d[0])", "g()")
    assert caller.arguments("f(...)") == {"1", "a.b", "d[0]"}
    assert caller.arguments("g()") == caller.arguments("h(...)") == frozenset()
    assert body("f(a)", "f(b)").arguments("f(...)") == frozenset()


def test_names_are_counted() -> None:
    assert body("a = b", "a.b = c(a)").mentions(a=3, b=1, c=1, d=0)
    assert not body("a = b").mentions(a=2)


@pytest.mark.parametrize(
    ("statement", "confined"),
    [("n = f(1)", True), ("n = f(n)", False), ("n += 1", False), ("n = f(a.n)", False), ("m = f(1)", True)],
)
def test_a_name_is_confined_to_a_part_that_has_it_as_often_as_the_pattern(statement: str, confined: bool) -> None:
    assert body(statement).used_only_in("n", "n = f(...)") == confined


@pytest.mark.parametrize(
    ("statement", "times"),
    [
        ("x = 1", 1),
        ("x += 1", 1),
        ("del x", 1),
        ("for x in y: pass", 1),
        ("with y as x: pass", 1),
        ("x = x = 1", 2),
        ("y = x", 0),
        ("x.y = 1", 0),
        ("x[0] = 1", 0),
    ],
)
def test_a_variable_is_set_wherever_it_gets_another_value(statement: str, times: int) -> None:
    assert body(statement).assigned("x") == times
    assert body(statement).reassigns("x") == (times > 0)


def test_an_inner_function_is_the_only_one_of_its_name_or_none() -> None:
    inner = body("def g(): a", "def h(): b").inner("h")
    assert inner is not None
    assert (inner.qualname, inner.contains_name("b")) == ("f.h", True)
    assert body("def g(): a", "def g(): b").inner("g") is None
    assert body("g = a").inner("g") is None


@pytest.mark.parametrize(
    ("statement", "bound"),
    [
        ("m = 1", True),
        ("del m", True),
        ("if c:\n    m = 1", True),
        ("if c:\n    def m(): pass", True),
        ("if c:\n    class m: pass", True),
        ("import m", True),
        ("import a as m", True),
        ("from m import a as m", True),
        ("a = m", False),
        ("m.a = 1", False),
        ("if c:\n    def a(): pass", False),
        ("import a, z", False),
        ("import m as a", False),
        ("from m import z", False),
        ("def a():\n    m = 1", False),
        ("class a:\n    m = 1", False),
    ],
)
def test_a_name_of_a_module_is_bound_by_assignment_import_and_definition_in_a_branch(
    statement: str, bound: bool
) -> None:
    assert binds(ast.parse(statement).body[0], "m") == bound


@pytest.mark.parametrize(
    ("statement", "replaced"),
    [
        ("M.m = f", True),
        ("if c:\n    M.m = f", True),
        ("setattr(M, 'm', f)", True),
        ("a = M.m", False),
        ("M.a = f", False),
        ("M.z = f", False),
        ("A.m = f", False),
        ("Z.m = f", False),
        ("setattr(M, 'a', f)", False),
        ("setattr(A, 'm', f)", False),
        ("def a():\n    M.m = f", False),
    ],
)
def test_a_method_is_replaced_by_assignment_to_its_class_and_setattr(statement: str, replaced: bool) -> None:
    assert assigns_to(ast.parse(statement).body[0], "M.m") == replaced


def test_a_fingerprint_sees_code_and_neither_comments_nor_docstrings() -> None:
    plain = function("def f(a):\n    return a")
    assert function('def f(a):\n    """Says."""\n    return a  # so').fingerprint() == plain.fingerprint()
    assert function("def f(a):\n    return -a").fingerprint() != plain.fingerprint()
    assert function("def f(b):\n    return b").fingerprint() != plain.fingerprint()
