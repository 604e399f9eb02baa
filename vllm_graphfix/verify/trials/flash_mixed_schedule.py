"""What flash-mixed-schedule is tried with."""

from __future__ import annotations

from dataclasses import replace

from vllm_graphfix.fixes.flash_mixed_schedule import _v2_pads_before_it_schedules
from vllm_graphfix.verify.engine.cases import LLAMA_FULL_FLASH_V1, LLAMA_FULL_FLASH_V2
from vllm_graphfix.verify.trial import Trial, Watched

TRIAL = Trial(
    watched=Watched("shadow-v1", "vllm_graphfix.verify.double.scenarios.flash_mixed_schedule:watched"),
    case=LLAMA_FULL_FLASH_V1,
    further=(replace(LLAMA_FULL_FLASH_V2, shows_on=_v2_pads_before_it_schedules),),
    engine="Llama, `cudagraph_mode=FULL`, model runner V1; V2 with prompts in chunks",
    shows_in="tokens",
)
