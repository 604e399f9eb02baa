"""What draft-idx-mapping is tried with."""

from __future__ import annotations

from vllm_graphfix.verify.engine.cases import MLA_MTP_SAMPLED
from vllm_graphfix.verify.trial import Trial, Watched

TRIAL = Trial(
    case=MLA_MTP_SAMPLED,
    watched=Watched("shadow-v2-drafter", "vllm_graphfix.verify.double.scenarios.draft_idx_mapping:watched"),
)
