"""An all-clear is proven or not given: on trees that a maintainer or a fork would leave, with the defect in them.

The seed is `fork_trees.SEED`. A sample runs here; `make test-all` tries all of it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fork_trees import RELEASES, dishonest_moves, dishonest_renames, moves, renames

SAMPLE = 25


@pytest.mark.parametrize("release", RELEASES)
def test_a_file_that_was_moved_is_no_all_clear(release: str) -> None:
    tried, found = dishonest_moves([move for move in moves() if move[0] == release][: SAMPLE // len(RELEASES)])
    assert tried
    assert not found


@pytest.mark.parametrize("release", RELEASES)
def test_an_identifier_that_was_renamed_is_no_all_clear(release: str) -> None:
    chosen = [rename for rename in renames() if rename[0] == release][: 2 * SAMPLE // len(RELEASES)]
    tried, found = dishonest_renames(chosen)
    assert tried
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_no_file_that_was_moved_is_an_all_clear(release: str, record_property: Callable[[str, object], None]) -> None:
    tried, found = dishonest_moves([move for move in moves() if move[0] == release])
    record_property("counted", ("moved files", release, "verdicts", tried))
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_no_identifier_that_was_renamed_is_an_all_clear(
    release: str, record_property: Callable[[str, object], None]
) -> None:
    tried, found = dishonest_renames([rename for rename in renames() if rename[0] == release])
    record_property("counted", ("renamed identifiers", release, "verdicts", tried))
    assert not found
