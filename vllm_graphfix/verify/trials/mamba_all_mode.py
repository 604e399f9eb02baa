"""What mamba-all-mode is tried with."""

from __future__ import annotations

from vllm_graphfix.verify.trial import Trial, Watched

TRIAL = Trial(
    watched=Watched("shadow-v1", "vllm_graphfix.verify.double.scenarios.mamba_all_mode:watched"),
    engine="none",
    shows_in="the CPU double alone: outputs of the second group of layers",
)
