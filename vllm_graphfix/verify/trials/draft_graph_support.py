"""Trial of draft-graph-support."""

from __future__ import annotations

from vllm_graphfix.verify.engine.cases import MLA_TRITON_MTP
from vllm_graphfix.verify.trial import Trial, Watched

TRIAL = Trial(
    watched=Watched(
        "shadow-v2", "vllm_graphfix.verify.double.scenarios.draft_graph_support:watched", ("MLACommonMetadata",)
    ),
    case=MLA_TRITON_MTP,
    engine="MLA and MTP of one draft token, Triton MLA, bf16, model runner V2",
    shows_in="tokens",
)
