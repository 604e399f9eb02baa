"""What active-lora-count is tried with."""

from __future__ import annotations

from vllm_graphfix.verify.trial import Trial, Watched

TRIAL = Trial(
    watched=Watched("shadow-v1", "vllm_graphfix.verify.double.scenarios.active_lora_count:watched"),
    engine="none",
    shows_in="the CPU double alone: outputs of a layer with adapters",
)
