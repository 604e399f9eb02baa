"""Trial of flashmla-padding."""

from __future__ import annotations

import math
from dataclasses import replace

from vllm_graphfix.verify.engine.cases import MLA_FP8_PADDED
from vllm_graphfix.verify.engine.probe_verdict import Observed, ProbeVerdict
from vllm_graphfix.verify.trial import Trial


def judge(observed: Observed) -> ProbeVerdict:
    length, block = observed.get("padded-rows", (math.inf, math.inf))
    summary = f"dense fp8 FlashMLA was given lengths down to {length:.0f} and block ids down to {block:.0f}"
    seen = math.isfinite(length + block)
    return ProbeVerdict(
        "lowest length (at most 1) and block id (at most 0) given to dense fp8 FlashMLA",
        right=(1.0, 0.0),
        observed=(min(length, 1.0), min(block, 0.0)),
        summary=summary if seen else "",
        unseen=None if seen else "dense fp8 FlashMLA was not used",
    )


TRIAL = Trial(
    case=replace(MLA_FP8_PADDED, judge=judge),
    unwatched="padded rows alone read what is not the cache's; the rows of requests, which are compared, are right "
    "until a replay ends in an error",
    engine="as `flashmla-fp8`, a batch that shrinks through sizes between those captured",
    shows_in="the lowest length and block id that the planner and the kernel are given (must be at least 1 and 0); "
    "tokens",
)
