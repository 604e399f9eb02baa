"""Trial of encoder-padding."""

from __future__ import annotations

from vllm_graphfix.verify.trial import Trial

TRIAL = Trial(
    unwatched="an encoder's graphs are checked with VLLM_GRAPHFIX_SHADOW_GRAPHS=all alone",
    engine="none",
    shows_in="the CPU double, and engines of `benchmarks/image_encoder.py` at 9d2cfc5: embeddings of images",
)
