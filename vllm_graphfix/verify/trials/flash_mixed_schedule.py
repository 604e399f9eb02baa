"""Trial of flash-mixed-schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_graphfix.verify.engine.cases import LLAMA_FULL_FLASH_V1, LLAMA_FULL_FLASH_V2
from vllm_graphfix.verify.trial import Trial, Watched

if TYPE_CHECKING:
    from vllm_graphfix.source.files import Source


def _v2_pads_before_it_schedules(source: Source) -> bool:
    """Return True if model runner V2 gets only the longest query wrong, as from 0.18.0 on."""
    return source.contains_word("vllm/v1/worker/gpu/model_states/default.py", "num_reqs_after_padding")


TRIAL = Trial(
    watched=Watched(
        "shadow-v1", "vllm_graphfix.verify.double.scenarios.flash_mixed_schedule:watched", ("FlashAttentionMetadata",)
    ),
    case=LLAMA_FULL_FLASH_V1,
    further=(replace(LLAMA_FULL_FLASH_V2, shows_on=_v2_pads_before_it_schedules),),
    engine="Llama, `cudagraph_mode=FULL`, model runner V1; V2 with prompts in chunks",
    shows_in="tokens",
)
