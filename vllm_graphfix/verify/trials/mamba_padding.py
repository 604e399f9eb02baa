"""Trial of mamba-padding."""

from __future__ import annotations

from vllm_graphfix.verify.engine.cases import MAMBA2
from vllm_graphfix.verify.trial import Trial, Watched

TRIAL = Trial(
    watched=Watched(
        "shadow-v1",
        "vllm_graphfix.verify.double.scenarios.mamba_padding:watched",
        ("Mamba1AttentionMetadata", "Mamba2AttentionMetadata"),
    ),
    case=MAMBA2,
    engine="Mamba-2, chunked prefill, a request that ends early",
    shows_in="tokens",
)
