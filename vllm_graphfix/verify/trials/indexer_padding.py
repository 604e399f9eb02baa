"""Trial of indexer-padding."""

from __future__ import annotations

import math
from dataclasses import replace

from vllm_graphfix.verify.engine.cases import SPARSE_MTP
from vllm_graphfix.verify.engine.probe_verdict import Observed, ProbeVerdict
from vllm_graphfix.verify.trial import Trial


def judge(observed: Observed) -> ProbeVerdict:
    (length,) = observed.get("indexer-lengths", (math.inf,))
    seen = math.isfinite(length)
    return ProbeVerdict(
        "lowest length (at most 0) given to the sparse indexer",
        right=(0.0,),
        observed=(min(length, 0.0),),
        summary=f"the sparse indexer was given lengths down to {length:.0f}" if seen else "",
        unseen=None if seen else "no decode batch was prepared for the sparse indexer",
        hangs=length < 0,
    )


TRIAL = Trial(
    case=replace(SPARSE_MTP, judge=judge),
    unwatched="a replay that hangs puts nothing out, and a run without the graph is given the same lengths",
    engine="DeepSeek V3.2's sparse attention and MTP, one draft token, FlashMLA, bf16, a batch that shrinks in the "
    "same way",
    shows_in="the lowest length that the indexer's builder prepares (must be at least 0); on stock a hang, which is an "
    "engine that is not done 40 s after a negative one; tokens",
)
