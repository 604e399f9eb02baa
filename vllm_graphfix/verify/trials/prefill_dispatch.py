"""What prefill-dispatch is tried with."""

from __future__ import annotations

from dataclasses import replace

from vllm_graphfix.fixes.prefill_dispatch import _v2_serves_them_wrong
from vllm_graphfix.verify.engine.cases import LFM2_ONE_TOKEN, MAMBA2_ONE_TOKEN
from vllm_graphfix.verify.trial import Trial, Watched

TRIAL = Trial(
    watched=Watched("shadow-v1", "vllm_graphfix.verify.double.scenarios.prefill_dispatch:watched"),
    watched_further=(Watched("shadow-v2", "vllm_graphfix.verify.double.scenarios.prefill_dispatch:watched_v2"),),
    case=MAMBA2_ONE_TOKEN,
    further=(replace(LFM2_ONE_TOKEN, shows_on=_v2_serves_them_wrong),),
)
