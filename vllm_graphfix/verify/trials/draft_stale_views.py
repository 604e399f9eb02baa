"""What draft-stale-views is tried with."""

from __future__ import annotations

from vllm_graphfix.verify.trial import Trial

TRIAL = Trial(
    unwatched="what a warm-up computes is thrown away, and replays read what their own step has prepared",
    engine="none: an engine that ends while it captures, and starts with the metadata built anew, was shown by hand",
    shows_in="the CPU double alone: starts and lengths of requests in the metadata of each warm-up",
)
