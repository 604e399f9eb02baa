"""Slices: what changes the fingerprint of the code around a defect, and what does not."""

from __future__ import annotations

import pytest

from vllm_graphfix.fix import Slice
from vllm_graphfix.source import slices
from vllm_graphfix.source.files import Source

PATH = "vllm/runner.py"
CODE = """
import torch
from vllm.marks import make as make_marks

class Runner:
    def build(self, rows, padded):
        counted = self.count(rows)
        if self.is_odd:
            counted += 1
        marks = self.computed[:padded] < self.prompts[:padded]
        if rows == 0:
            return None
        for group in self.groups:
            group.take(Metadata(rows=rows, marks=marks, counted=counted))
        with self.timed("build", rows=rows):
            self.published = marks
        self.log(counted)
        return counted
"""
MARKS = Slice(PATH, "Runner.build", "marks prompts")


def source(text: str) -> Source:
    return Source("test", lambda path: text.encode() if path == PATH else None, lambda: None)


def fingerprint(text: str, part: Slice = MARKS, *excluded: str) -> str:
    return slices.fingerprint(source(text), part, excluded)


STOCK = fingerprint(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("counted = self.count(rows)", "counted = self.count(rows, padded)"),
        ("counted=counted))", "counted=counted, extra=1))"),
        ("self.log(counted)", "self.log(counted)\n        return 1"),
        ("        counted = ", '        """A docstring."""\n        counted = '),
        ("            counted += 1", "            raise ValueError(counted)"),
        ("        marks = ", "        # a comment\n        marks = "),
        ("rows=rows):", "rows=padded, extra=1):"),
        ("self.computed[:padded] <", "(self.computed[:padded]) <"),
        ("        if self.is_odd:", "        if self.odd():\n            return None\n        if self.is_odd:"),
    ],
)
def test_what_does_not_name_the_data_changes_nothing(old: str, new: str) -> None:
    assert fingerprint(CODE.replace(old, new)) == STOCK


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        if rows == 0:", "        marks[rows:] = False\n        if rows == 0:"),
        ("< self.prompts[:padded]", "<= self.prompts[:padded]"),
        ("        marks = ", "        if self.is_odd:\n            return None\n        marks = "),
        ("        for group in self.groups:", "        for group in self.others:"),
        ("rows == 0", "rows < 2"),
        ("marks=marks", "marks=None"),
        ("self.timed(", "self.captured("),
        ('"build", rows=rows', '"built", rows=rows'),
        ("rows=rows):", "rows=rows, marks=None):"),
        ("        self.log(counted)", "        marks.fill_(1)\n        self.log(counted)"),
        ("        self.log(counted)", '        setattr(self, "marks", 1)\n        self.log(counted)'),
        ("        self.log(counted)", "        self.log(counted, self.marks)"),
        ("            group.take", "            if group.done:\n                continue\n            group.take"),
        ("def build(self, rows, padded)", "def build(self, rows, padded, marks=None)"),
    ],
)
def test_what_names_the_data_or_parts_their_uses_changes_it(old: str, new: str) -> None:
    changed = CODE.replace(old, new)
    assert changed != CODE
    if "return None" in new and new.startswith("        if self.is_odd"):
        assert fingerprint(changed) == STOCK, "a way out before the data are first named parts nothing"
    else:
        assert fingerprint(changed) != STOCK


def test_a_method_of_the_data_is_identified_by_its_constants() -> None:
    for zero, one in (("fill_(0)", "fill_(1)"), ("clamp(min=0)", "clamp(min=-1)")):
        texts = [CODE.replace("        self.log", f"        marks.{call}\n        self.log") for call in (zero, one)]
        assert fingerprint(texts[0]) != fingerprint(texts[1])


def test_recognised_statements_are_removed_with_conditions_that_hold_nothing_else() -> None:
    cleared = "marks[rows:] = False"
    for remedy in (f"        {cleared}\n", f"        if rows < padded:\n            {cleared}\n"):
        changed = CODE.replace("        if rows == 0:", f"{remedy}        if rows == 0:")
        assert fingerprint(changed, MARKS, cleared) == fingerprint(CODE, MARKS, cleared) == STOCK


def test_a_recognised_statement_is_removed_once() -> None:
    cleared = "marks[rows:] = False"
    twice = CODE.replace("        if rows == 0:", f"        {cleared}\n        {cleared}\n        if rows == 0:")
    assert fingerprint(twice, MARKS, cleared) != STOCK


@pytest.mark.parametrize(
    ("statement", "is_seen"),
    [
        ("marks -= 1", True),
        ("marks[0] = 1", True),
        ("marks = marks - 1", True),
        ("marks = marks.clamp(min=1)", True),
        ("marks.zero_()", True),
        ("marks = self.share(marks)", False),
        ("marks = self.others", False),
        ("self.log(marks)", False),
    ],
)
def test_what_changes_the_data_in_a_recognised_branch_is_seen(statement: str, *, is_seen: bool) -> None:
    branch = "        if self.is_odd:\n            counted += 1\n"
    changed = CODE.replace(branch, f"{branch}            {statement}\n")
    assert (fingerprint(changed, MARKS, "if self.is_odd:\n    ...") != STOCK) is is_seen


def test_a_way_out_before_the_first_use_counts_where_a_slice_asks_for_it() -> None:
    early = CODE.replace("        marks = ", "        if self.off:\n            return 0\n        marks = ")
    late = CODE.replace("        self.log(counted)", "        if self.off:\n            return 0")
    part = MARKS._replace(names=f"return {MARKS.names}")
    assert fingerprint(early) == STOCK
    assert fingerprint(early, part) != fingerprint(CODE, part) == fingerprint(late, part)


def test_a_whole_file_is_all_statements_that_name_the_data() -> None:
    whole = Slice(PATH, "", "marks make_marks")
    assert fingerprint(CODE, whole) != fingerprint(CODE.replace("as make_marks", "as made"), whole)
    assert fingerprint(CODE, whole) != fingerprint(f"{CODE}\n    def more(self):\n        self.marks = 1\n", whole)
    assert fingerprint(CODE, whole) == fingerprint(f"{CODE}\n    def more(self):\n        self.other = 1\n", whole)


def test_without_names_it_is_the_function_whole() -> None:
    whole = MARKS._replace(names="")
    assert fingerprint(CODE, whole) != fingerprint(CODE.replace("counted += 1", "counted += 2"), whole)
    assert fingerprint(CODE, whole) == fingerprint(CODE.replace("import torch", ""), whole)


def test_missing_code_is_distinguished_from_code_that_does_not_name_the_data() -> None:
    assert fingerprint(CODE, MARKS._replace(function="Runner.other")) == slices.MISSING
    assert fingerprint(CODE, MARKS._replace(path="vllm/other.py")) == slices.MISSING
    assert fingerprint(CODE, MARKS._replace(names="nobody")) == slices.EMPTY
    assert slices.joined({"a": slices.MISSING, "b": slices.EMPTY}, {"b": "whole"}) == "", "no evidence is no proof"
    assert slices.joined({"a": slices.MISSING, "b": STOCK}, {}) != ""
