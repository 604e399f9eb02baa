"""What dcp-context-lens is tried with."""

from __future__ import annotations

from vllm_graphfix.verify.trial import Trial, Watched

TRIAL = Trial(
    watched=Watched("shadow-v1", "vllm_graphfix.verify.double.scenarios.dcp_context_lens:watched"),
)
