"""Trial of draft-idx-mapping."""

from __future__ import annotations

from vllm_graphfix.verify.engine.cases import MLA_MTP_SAMPLED
from vllm_graphfix.verify.trial import Trial, Watched

TRIAL = Trial(
    case=MLA_MTP_SAMPLED,
    watched=Watched("shadow-v2-drafter", "vllm_graphfix.verify.double.scenarios.draft_idx_mapping:watched"),
    engine="MLA and MTP, FlashMLA, bf16, model runner V2, drafts and answers drawn at temperature 1, a batch that "
    "shrinks through sizes between those captured",
    shows_in="tokens",
)
