"""An all-clear is proven or not given: on trees that a maintainer or a fork would leave, with the defect in them.

The seed is `fork_trees.SEED`. A sample runs here; `make test-all` tries all of it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fork_trees import RELEASES, ForkTree, dishonest_moves, dishonest_renames, moves, renames, stock_verdict
from reader_edits import EDITS, LICENCE, STATEMENT, with_a_line
from vllm_graphfix.fix import Verdict

MOVES, RENAMES = 3, 5
"""Of each release, in the sample."""


@pytest.mark.parametrize("release", RELEASES)
def test_a_file_that_was_moved_is_no_all_clear(release: str) -> None:
    tried, dishonest = dishonest_moves(release, moves(release)[:MOVES])
    assert tried
    assert not dishonest


@pytest.mark.parametrize("release", RELEASES)
def test_an_identifier_that_was_renamed_is_no_all_clear(release: str) -> None:
    tried, dishonest = dishonest_renames(release, renames(release)[:RENAMES])
    assert tried
    assert not dishonest


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_no_file_that_was_moved_is_an_all_clear(release: str, record_property: Callable[[str, object], None]) -> None:
    tried, dishonest = dishonest_moves(release, moves(release))
    record_property("counted", ("moved files", release, "verdicts", tried))
    assert not dishonest


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_no_identifier_that_was_renamed_is_an_all_clear(
    release: str, record_property: Callable[[str, object], None]
) -> None:
    tried, dishonest = dishonest_renames(release, renames(release))
    record_property("counted", ("renamed identifiers", release, "verdicts", tried))
    assert not dishonest


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_away_from_the_defect_is_no_all_clear_and_is_not_patched(name: str) -> None:
    release, fixes, edit = EDITS[name]
    tree = ForkTree(release)
    edit(tree)
    assert {fix: tree.verdict(fix).verdict for fix in fixes} == dict.fromkeys(fixes, Verdict.UNRECOGNISED)


def test_a_licence_in_each_file_hides_no_edit() -> None:
    release, (fix,), edit = EDITS["a backend that claims more than it can"]
    tree = ForkTree(release)
    with_a_line(tree, LICENCE)
    assert tree.verdict(fix).verdict is stock_verdict(fix, release)
    edit(tree)
    assert tree.verdict(fix).verdict is Verdict.UNRECOGNISED


def test_a_fork_of_which_no_file_is_known_is_no_all_clear() -> None:
    """Nothing tells what was edited in it, as where all of it was formatted anew."""
    tree = ForkTree("0.30.0")
    with_a_line(tree, STATEMENT)
    assert tree.verdict("workspace-growth").verdict is Verdict.UNRECOGNISED
