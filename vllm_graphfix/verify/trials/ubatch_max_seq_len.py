"""Trial of ubatch-max-seq-len."""

from __future__ import annotations

from vllm_graphfix.verify.trial import Trial

TRIAL = Trial(
    unwatched="the check refuses `--enable-dbo`",
    engine="none",
    shows_in="the CPU double alone: attention of layers with a sliding window",
)
