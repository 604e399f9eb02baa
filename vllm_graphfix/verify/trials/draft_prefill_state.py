"""Trial of draft-prefill-state."""

from __future__ import annotations

from dataclasses import replace

from vllm_graphfix.verify.engine.cases import MLA_MTP
from vllm_graphfix.verify.engine.probe_verdict import Observed, ProbeVerdict
from vllm_graphfix.verify.trial import Trial, Watched


def judge(observed: Observed) -> ProbeVerdict:
    planned, captured = observed.get("planners-in-draft-graphs", (0.0, 0.0))
    return ProbeVerdict(
        "full graphs of the draft's prefill that do not record FlashMLA's planner",
        right=(0.0,),
        observed=(captured - planned,),
        summary=f"FlashMLA's planner is recorded in {planned:.0f} of {captured:.0f} full graphs of the draft's prefill",
        unseen=None if captured else "no full graph of the draft's prefill was captured",
    )


TRIAL = Trial(
    watched=Watched(
        "shadow-v2-drafter", "vllm_graphfix.verify.double.scenarios.draft_prefill_state:watched", ("FlashMLAMetadata",)
    ),
    case=replace(MLA_MTP, judge=judge),
    engine="MLA and MTP, FlashMLA, bf16, model runner V2",
    shows_in="FlashMLA's planner kernel among the nodes of the draft's captured graphs. Tokens do not show it: the "
    "target's graph rewrites the same plan just before, and verifies every draft",
)
