"""The table of defects: which stock release is affected by what. Written by hand; the diagnosis has to come to the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fetch_vllm import ALL_RELEASES

from vllm_graphfix.fix import variable
from vllm_graphfix.fixes import FIXES, OBSERVED_BY_DEFAULT

AFFECTED = {
    "capture-state": ("0.15.0", "0.21.0"),
    "draft-prefill-state": ("0.21.0", "0.22.1"),
    "draft-decode-mode": ("0.17.0", "0.17.1"),
    "mamba-padding": ("0.19.0", "0.21.0"),
    "flashmla-fp8": ("0.15.0", "0.18.1"),
    "flashmla-padding": ("0.15.0", "0.19.1"),
    "prefill-dispatch": ("0.14.1", "0.33.0"),
    "indexer-padding": ("0.20.0", "0.27.1"),
    "triton-mla-padding": ("0.22.0", "0.33.0"),
    "workspace-growth": ("0.14.1", "0.29.0"),
    "idle-rank": ("0.14.1", "0.33.0"),
    "prompt-logprobs": ("0.14.1", "0.33.0"),
}
"""First and last affected release of each fix."""

ABSENT = {
    "draft-prefill-state": ("0.14.1", "0.20.2"),
    "mamba-padding": ("0.14.1", "0.18.1"),
    "flashmla-fp8": ("0.14.1", "0.14.1"),
    "flashmla-padding": ("0.14.1", "0.14.1"),
    "indexer-padding": ("0.14.1", "0.19.1"),
}
"""First and last release in which the component is not there."""


def between(first: str, last: str) -> tuple[str, ...]:
    return ALL_RELEASES[ALL_RELEASES.index(first) : ALL_RELEASES.index(last) + 1]


def verdict(fix: str, release: str) -> str:
    if release in between(*AFFECTED[fix]):
        return "affected"
    if fix in ABSENT and release in between(*ABSENT[fix]):
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
    """What an engine that imports all that a fix concerns does about it."""
    if verdict(fix, release) != "affected":
        return "not-needed"
    return "observing" if fix in OBSERVED_BY_DEFAULT else "active"


SAMPLE = frozenset(
    {"0.15.0", "0.16.0", "0.17.1", "0.18.1", "0.19.1", "0.20.0", "0.21.0", "0.22.1", "0.25.0", "0.29.0", "0.33.0"}
)
"""One release of each shape of the code, first and last ones among them: what `make test` runs where a release costs seconds."""


def slow_but_for(some: Sequence[str], releases: Sequence[str]) -> list[Any]:
    """Parameters of a test; `make test` runs *some*."""
    return [pytest.param(release, marks=() if release in some else pytest.mark.slow) for release in releases]


def slow_but_for_the_sample(release: str) -> tuple[pytest.MarkDecorator, ...]:
    """`make test-all` runs all releases."""
    return () if release in SAMPLE else (pytest.mark.slow,)
