"""Trial of idle-rank."""

from __future__ import annotations

from dataclasses import replace

from vllm_graphfix.verify.engine.cases import MAMBA2_IDLE
from vllm_graphfix.verify.engine.probe_verdict import none_may_be
from vllm_graphfix.verify.trial import Trial

JUDGE = none_may_be(
    "blocks-changed-by-an-idle-step",
    "cache blocks that steps without work changed",
    "steps without work changed {wrong} of {all} cache blocks",
    "no rank ran a step without work",
)
TRIAL = Trial(
    case=replace(MAMBA2_IDLE, judge=JUDGE),
    unwatched="an idle rank's step has no request to compare, and without a graph it writes to the same blocks",
    engine="Mamba-2, model runner V1, with an idle rank's step after every sixteenth step",
    shows_in="cache blocks that such a step changed; tokens",
)
