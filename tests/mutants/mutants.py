"""Mutants of functions of vLLM: what upstream could do to them, as edits of the syntax trees of real releases.

An operator lists edits of one function, each with a label; an edit is carried out on a `Draft`, a copy of that
function. Deterministic: the same source gives the same edits in the same order under the same labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import mutants_of_expressions
import mutants_of_names
import mutants_of_places
import mutants_of_statements
import mutants_of_values

if TYPE_CHECKING:
    from mutants_draft import Draft, Edit, Operator

OPERATORS: dict[str, Operator] = {
    **mutants_of_statements.OPERATORS,
    **mutants_of_expressions.OPERATORS,
    **mutants_of_names.OPERATORS,
    **mutants_of_places.OPERATORS,
}
"""By the kind of change; their order decides which mutants there are."""
ELSEWHERE: dict[str, Operator] = {**OPERATORS, **mutants_of_values.OPERATORS}
"""For functions that no fix patches: also what they take and give."""


def edits(kind: str, draft: Draft) -> dict[str, Edit]:
    """All edits of this kind, by labels that stay the same as long as the place that they are about does."""
    by_label: dict[str, Edit] = {}
    for text, edit in ELSEWHERE[kind](draft):
        first = " ".join(text.split())[:70]
        label = next(name for name in _numbered(first) if name not in by_label)
        by_label[label] = edit
    return by_label


def _numbered(text: str) -> Iterator[str]:
    yield text
    number = 2
    while True:
        yield f"{text} #{number}"
        number += 1
