"""Trial of deepstack-features."""

from __future__ import annotations

from vllm_graphfix.verify.trial import Trial

TRIAL = Trial(
    unwatched="a run without the graph runs the same compiled code, which leaves the features out, too",
    engine="none",
    shows_in="the CPU double, and engines of `benchmarks/image_features.py`: steps with an image",
)
