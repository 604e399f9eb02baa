"""Trial of mamba-all-mode."""

from __future__ import annotations

from vllm_graphfix.verify.engine.cases import GRANITE_ALL_MODE
from vllm_graphfix.verify.trial import Trial, Watched

TRIAL = Trial(
    case=GRANITE_ALL_MODE,
    watched=Watched(
        "shadow-v1", "vllm_graphfix.verify.double.scenarios.mamba_all_mode:watched", ("Mamba2AttentionMetadata",)
    ),
    engine="Granite 4 of three layers, two of them Mamba-2 in a group each, prefix caching with a state for each "
    "block, model runner V1",
    shows_in="tokens",
)
