"""What compressor-skip is tried with."""

from __future__ import annotations

from vllm_graphfix.verify.trial import Trial

TRIAL = Trial(
    unwatched="DeepSeek V4 is not checked, since it is not known whether a step can write its compressor's cache twice",
    engine="none",
    shows_in="the CPU double alone: the cache entries of groups that a decode or a prompt completes",
)
