"""Each fix on stock vLLM, beyond the numbers of its scenario: `in_vllm/<fix>.py` on a release of each shape."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours
from table import ALL_APPLIED, slow_but_for, slow_unless

RELEASES = {
    "active-lora-count": "0.16.0 0.23.0 0.33.0",
    "adaptive-schedule": "0.28.0 0.33.0",
    "c128a-stride": "0.27.1",
    "capture-state": "0.17.1 0.21.0",
    "compressor-skip": "0.32.0",
    "cutlass-mla-padding": "0.33.0",
    "dcp-context-lens": "0.14.1 0.19.1",
    "draft-decode-mode": "0.17.1",
    "draft-graph-support": "0.17.1 0.18.1 0.19.1",
    "draft-idx-mapping": "0.24.0",
    "draft-prefill-state": "0.22.1 0.21.0",
    "draft-stale-views": "0.23.0 0.25.1",
    "encoder-adapters": "0.20.0 0.33.0",
    "encoder-input-norm": "0.28.0 0.29.0",
    "encoder-padding": "0.21.0",
    "flash-mixed-schedule": "0.14.1 0.25.1 0.33.0",
    "flashmla-fp8": "0.15.0 0.18.1",
    "flashmla-padding": "0.15.0 0.19.1",
    "hidden-states-padding": "0.24.0",
    "idle-rank": "0.14.1 0.18.1 0.21.0 0.30.0 0.33.0",
    "indexer-padding": "0.20.0 0.27.1",
    "mamba-all-mode": "0.14.1 0.16.0",
    "mamba-padding": "0.19.1 0.21.0",
    "prompt-logprobs": "0.14.1 0.18.1 0.25.1 0.33.0",
    "roberta-positions": "0.18.1",
    "triton-mla-padding": "0.22.0 0.27.1 0.33.0",
    "ubatch-max-seq-len": "0.19.1",
}
SLOW = {"c128a-stride": "0.27.0", "capture-state": "0.16.0 0.18.1"}
PAIRS = [(fix, releases.split()[-1]) for fix, releases in RELEASES.items()]
"""What `make test` runs: the newest, but for releases that no other test of it starts."""
PAIRS_SLOW = [
    *((fix, release) for fix, releases in RELEASES.items() for release in releases.split()[:-1]),
    *((fix, release) for fix, releases in SLOW.items() for release in releases.split()),
]


@pytest.mark.parametrize(
    ("fix", "release"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS_SLOW)]
)
def test_a_fix_changes_what_its_defect_concerns_and_nothing_else(fix: str, release: str) -> None:
    check_behaviours(release, fix.replace("-", "_"), ALL_APPLIED, active=[fix])


ALL_LANES = "not trial and not capture_state"
"""Tests of workspace-growth that run where the workspace has lanes, which releases before 0.28.0 lack."""


@pytest.mark.parametrize(
    ("fix", "release", "select"),
    [
        ("draft-idx-mapping", "0.19.1", "not dflash"),
        *(
            pytest.param("workspace-growth", each, f"not lane and {ALL_LANES}", marks=slow_unless(each, ("0.22.1",)))
            for each in ("0.14.1", "0.19.1", "0.22.1", "0.25.0")
        ),
        pytest.param("workspace-growth", "0.28.0", ALL_LANES, marks=pytest.mark.slow),
        ("workspace-growth", "0.29.0", "not capture_state"),
    ],
)
def test_the_same_where_a_release_lacks_a_part(fix: str, release: str, select: str) -> None:
    check_behaviours(release, fix.replace("-", "_"), active=[fix], select=select)


@pytest.mark.parametrize(
    ("fix", "release", "other", "select"),
    [
        ("capture-state", "0.21.0", "draft-prefill-state", "not draft"),
        ("draft-prefill-state", "0.21.0", "capture-state", ""),
    ],
)
def test_a_fix_needs_no_companion(fix: str, release: str, other: str, select: str) -> None:
    without = {f"VLLM_GRAPHFIX_{other.replace('-', '_').upper()}": "off"}
    check_behaviours(release, fix.replace("-", "_"), without, active=[fix], select=select)


@pytest.mark.parametrize("release", slow_but_for(("0.21.0",), ("0.15.0", "0.17.1", "0.18.1", "0.21.0")))
def test_workspace_growth_and_capture_state_are_right_together(release: str) -> None:
    both = ("workspace-growth", "capture-state")
    check_behaviours(release, "workspace_growth", active=both, select="capture_state")
    check_behaviours(release, "capture_state", active=both)
