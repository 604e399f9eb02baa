"""What prompt-logprobs is tried with."""

from __future__ import annotations

from vllm_graphfix.verify.engine.cases import LLAMA_EAGLE_SCORED
from vllm_graphfix.verify.trial import Trial

TRIAL = Trial(
    case=LLAMA_EAGLE_SCORED,
    unwatched="what the target model's graph puts out is right; a drafter's piecewise graphs, which are not checked, "
    "overwrite it later",
)
