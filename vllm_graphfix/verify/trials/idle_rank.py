"""Trial of idle-rank."""

from __future__ import annotations

from dataclasses import replace

from vllm_graphfix.verify.engine.cases import MAMBA2_IDLE
from vllm_graphfix.verify.engine.probe_verdict import Observed, ProbeVerdict
from vllm_graphfix.verify.trial import Trial


def judge(observed: Observed) -> ProbeVerdict:
    changed, blocks = observed.get("blocks-changed-by-an-idle-step", (0.0, 0.0))
    return ProbeVerdict(
        "cache blocks that steps without work changed",
        right=(0.0,),
        observed=(changed,),
        summary=f"steps without work changed {changed:.0f} of {blocks:.0f} cache blocks",
        unseen=None if blocks else "no rank ran a step without work",
    )


TRIAL = Trial(
    case=replace(MAMBA2_IDLE, judge=judge),
    unwatched="an idle rank's step has no request to compare, and without a graph it writes to the same blocks",
    engine="Mamba-2, model runner V1, with an idle rank's step after every sixteenth step",
    shows_in="cache blocks that such a step changed; tokens",
)
