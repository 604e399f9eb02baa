"""The table of defects: which stock release is affected by what, as the fixes' records say.

The diagnosis has to come to the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from fetch_vllm import ALL_RELEASES
from vllm_graphfix.fix import variable
from vllm_graphfix.fixes import FIXES, OBSERVED_BY_DEFAULT, about


def between(first: str, last: str) -> tuple[str, ...]:
    return ALL_RELEASES[ALL_RELEASES.index(first) : ALL_RELEASES.index(last) + 1]


_SPAN = r"\d+\.\d+\.\d+(?: - \d+\.\d+\.\d+)?(?![-.\d])"


def _spans(releases: str) -> tuple[str, ...]:
    """``first - last``, or one release, and others behind a comma; whatever stands behind is for people."""
    match = re.match(rf"{_SPAN}(?:, {_SPAN})*", releases)
    assert match, f"{releases!r} does not begin with releases"
    spans = (span.partition(" - ") for span in match[0].split(", "))
    return tuple(release for first, _, last in spans for release in between(first, last or first))


AFFECTED = {fix.name: _spans(about(fix).releases) for fix in FIXES}
ABSENT = {fix.name: _spans(about(fix).absent) for fix in FIXES if about(fix).absent}
"""Releases without the component."""


def verdict(fix: str, release: str) -> str:
    if release in AFFECTED[fix]:
        return "affected"
    if release in ABSENT.get(fix, ()):
        return "absent"
    return "fixed"


def affected_by(release: str) -> tuple[str, ...]:
    """The fixes that *release* needs, in the order of application."""
    return tuple(fix.name for fix in FIXES if verdict(fix.name, release) == "affected")


AFFECTED_RELEASES = tuple(release for release in ALL_RELEASES if affected_by(release))
PAIRS = tuple((fix, release) for release in AFFECTED_RELEASES for fix in affected_by(release))
"""Every pair of a fix and a stock release that it is for."""

ALL_APPLIED = dict.fromkeys(map(variable, sorted(OBSERVED_BY_DEFAULT)), "auto")
"""The environment in which every fix that is needed is applied."""


def state_by_default(fix: str, release: str) -> str:
    """Return the state of the fix in an engine that imports all that it concerns."""
    if verdict(fix, release) != "affected":
        return "not-needed"
    return "observing" if fix in OBSERVED_BY_DEFAULT else "active"


SAMPLE = frozenset(
    {
        "0.15.0",
        "0.16.0",
        "0.17.1",
        "0.18.1",
        "0.19.1",
        "0.20.0",
        "0.21.0",
        "0.22.1",
        "0.25.0",
        "0.27.1",
        "0.29.0",
        "0.33.0",
    }
)
"""One release of each shape of the code, first and last ones among them: what `make test` runs where a release costs
seconds."""


FEW = frozenset({"0.15.0", "0.17.1", "0.19.1", "0.21.0", "0.27.1", "0.33.0"})
"""A part of the sample, as few as have each fix: what `make test` runs where a release costs half a minute."""


def slow_unless(release: str, some: Collection[str]) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a test on *release*: `make test` runs *some* alone."""
    return () if release in some else (pytest.mark.slow,)


def slow_but_for(some: Collection[str], releases: Sequence[str]) -> list[Any]:
    """Return a parameter for each of *releases*: `make test` runs *some* alone."""
    return [pytest.param(release, marks=slow_unless(release, some)) for release in releases]
