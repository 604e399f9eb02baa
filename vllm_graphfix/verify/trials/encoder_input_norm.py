"""Trial of encoder-input-norm."""

from __future__ import annotations

from vllm_graphfix.verify.trial import Trial

TRIAL = Trial(
    unwatched="a call of the encoder without its graph has the same buffers, and the same mapping of adapters",
    engine="none",
    shows_in="the CPU double, and engines of `benchmarks/image_encoder.py` at 9d2cfc5: embeddings of images",
)
