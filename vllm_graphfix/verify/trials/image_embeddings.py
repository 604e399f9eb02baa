"""Trial of image-embeddings."""

from __future__ import annotations

from vllm_graphfix.verify.trial import Trial

TRIAL = Trial(
    unwatched="a run without the graph runs the same compiled code, which leaves the embeddings out, too",
    engine="none",
    shows_in="the CPU double alone: hidden states of steps with an image",
)
