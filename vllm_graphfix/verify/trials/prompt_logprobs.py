"""Trial of prompt-logprobs."""

from __future__ import annotations

from vllm_graphfix.verify.engine.cases import LLAMA_EAGLE_SCORED
from vllm_graphfix.verify.trial import Trial

TRIAL = Trial(
    case=LLAMA_EAGLE_SCORED,
    unwatched="what the target model's graph puts out is right; a drafter's piecewise graphs, which are not checked, "
    "overwrite it later",
    engine="Llama and an Eagle head, piecewise graphs, model runner V1; four prompts, one after the other, as long as "
    "graph sizes. Three draft tokens, and up to 0.18.1 one: there more of them change the lengths that the target "
    "attends with, also without graphs",
    shows_in="log-probabilities of the prompts' own tokens, which are compared like an answer's",
)
