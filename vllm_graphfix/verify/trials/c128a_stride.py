"""What c128a-stride is tried with."""

from __future__ import annotations

from vllm_graphfix.verify.trial import Trial

TRIAL = Trial(
    unwatched="DeepSeek V4 is not checked, since it is not known whether a step can write its compressor's cache twice",
    engine="none",
    shows_in="the CPU double alone: compressed attention of the second request and those after it",
)
