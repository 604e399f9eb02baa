"""The language of the tree: names of verbs and objects, docstrings that are sentences (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent
BANNED = frozenset({"told", "found", "given", "said", "asked", "kept", "left", "shown"})
"""Participles that a name is no clearer for: a reader has to look up which value it holds."""
EXCEPTIONS = frozenset({"bisect_left", "given"})
"""Names of other libraries: the second is hypothesis's decorator."""
QUESTION = re.compile(r"(What|Whether|How|Where|Why)\b")
folders = pytest.mark.parametrize("folder", ["vllm_graphfix", "tools", "examples", "benchmarks", "tests"])


def identifiers(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each identifier."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
            yield token.start[0], token.string


def is_banned(name: str) -> bool:
    return name not in EXCEPTIONS and not BANNED.isdisjoint(name.lower().split("_"))


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and first line of each docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text.splitlines()[0]


@folders
def test_at_most_one_identifier_in_2000_is_banned(folder: str) -> None:
    names = [(path, *each) for path in (PROJECT / folder).rglob("*.py") for each in identifiers(path.read_text())]
    banned = [f"{path.relative_to(PROJECT)}:{line} {name}" for path, line, name in names if is_banned(name)]
    assert len(banned) * 2000 <= len(names), banned


@folders
def test_at_most_one_docstring_in_50_opens_with_a_question(folder: str) -> None:
    texts = [(path, *each) for path in (PROJECT / folder).rglob("*.py") for each in docstrings(path.read_text())]
    odd = [f"{path.relative_to(PROJECT)}:{line} {text}" for path, line, text in texts if QUESTION.match(text)]
    assert len(odd) * 50 <= len(texts), odd


def test_banned_is_a_part_of_a_name_and_a_question_opens_a_docstring() -> None:
    source = 'told = was_told = Told = toldyou\nprint("told")  # told\ndef f():\n    """What is so."""\n'
    assert [name for _, name in identifiers(source) if is_banned(name)] == ["told", "was_told", "Told"]
    assert [text for _, text in docstrings(source) if QUESTION.match(text)] == ["What is so."]
