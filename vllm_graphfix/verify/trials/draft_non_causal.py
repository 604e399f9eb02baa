"""Trial of draft-non-causal."""

from __future__ import annotations

from vllm_graphfix.verify.trial import Trial

TRIAL = Trial(
    unwatched="DFlash replays its graphs by itself, and the check looks at those of the target and of Eagle's drafts",
    engine="none",
    shows_in="the CPU double alone: draft tokens",
)
