"""Trial of encoder-input-norm."""

from __future__ import annotations

from vllm_graphfix.verify.trial import Trial

TRIAL = Trial(
    unwatched="graphs of encoders are none of the language model's, and the check looks at these",
    engine="none",
    shows_in="the CPU double, and engines of `benchmarks/image_encoder.py` at 9d2cfc5: embeddings of images",
)
