"""Trial of turboquant-drafts."""

from __future__ import annotations

from vllm_graphfix.verify.engine.cases import LLAMA_TURBOQUANT_EAGLE, LLAMA_TURBOQUANT_NGRAM
from vllm_graphfix.verify.trial import Trial, Watched

_SCENARIO = "vllm_graphfix.verify.double.scenarios.turboquant_drafts"

TRIAL = Trial(
    watched=Watched("shadow-v1", f"{_SCENARIO}:watched", ("TurboQuantMetadata",)),
    watched_further=(Watched("shadow-v2", f"{_SCENARIO}:watched_v2", ("TurboQuantMetadata",)),),
    case=LLAMA_TURBOQUANT_NGRAM,
    further=(LLAMA_TURBOQUANT_EAGLE,),
    engine="Llama of eight layers, TurboQuant cache, n-gram drafts, model runner V1; V2 with an Eagle head",
    shows_in="tokens",
)
