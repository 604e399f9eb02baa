"""Trial of cutlass-mla-padding."""

from __future__ import annotations

from vllm_graphfix.verify.trial import Trial

TRIAL = Trial(
    unwatched="a run without the graph has the same padded rows, and takes what lies in them",
    engine="none",
    shows_in="the CPU double alone: rows of length 0 of the attention output, by a scale that the batch shares",
)
