"""docs/claims.md: what builders claim and do on stock releases, and the detector that sees it in an engine."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours
from measure_claims import VERDICTS, false_claims, read
from stock import ALL_RELEASES
from table import between, slow_but_for

SHARED, UNMASKED = "drafts, context parallel", "drafts, not causal, Blackwell"


@pytest.mark.parametrize("release", slow_but_for(("0.19.1", "0.25.1", "0.33.0"), ALL_RELEASES))
def test_builders_claim_and_do_what_the_page_says(release: str) -> None:
    check_behaviours(release, "claims", {"VLLM_GRAPHFIX": "off"})


def test_claims_that_were_known_to_be_false_are() -> None:
    false: dict[tuple[str, str], set[str]] = {}
    for builder, case, _, releases in false_claims():
        false.setdefault((builder, case), set()).update(releases)
    assert false["TurboQuant", "drafts"] == {*between("0.20.0", "0.33.0")}
    assert false["FlashInfer", UNMASKED] >= {*between("0.24.0", "0.25.1")}
    assert false["TritonMLA", "drafts"] == {*between("0.22.0", "0.25.1")}
    assert false["FlashMLA", SHARED] == {*ALL_RELEASES}
    assert "0.25.1" in false["FlashInfer", f"{SHARED}, Blackwell"]


def test_triton_mla_takes_drafts_for_prompts_where_model_runner_v2_asks_nobody() -> None:
    of_drafts = read()["MLACommon"]["drafts"]  # its builder there
    prompts = {release for text, releases in of_drafts.items() if ": prompts" in text for release in releases}
    assert prompts >= {*between("0.17.0", "0.19.1")}


def test_no_claim_for_one_token_a_row_is_false() -> None:
    assert {case for _, case, _, _ in false_claims()} & {"one token", "one token, Blackwell"} == set()


def test_each_verdict_is_of_a_claim_that_is_false() -> None:
    assert VERDICTS.keys() <= {(builder, case) for builder, case, _, _ in false_claims()}
