"""Trial of workspace-growth."""

from __future__ import annotations

from dataclasses import replace

from vllm_graphfix.verify.engine.cases import MIXTRAL
from vllm_graphfix.verify.engine.probe_verdict import Observed, ProbeVerdict
from vllm_graphfix.verify.trial import Trial


def judge(observed: Observed) -> ProbeVerdict:
    written, looked = observed.get("outgrown-workspace", (0.0, 0.0))
    summary = f"{written:.0f} bytes of tensors made after the workspace had grown were overwritten by graphs"
    return ProbeVerdict(
        "bytes of others' memory that graphs wrote to when the workspace had grown",
        right=(0.0,),
        observed=(written,),
        summary=summary if looked else "",
        unseen=None if looked else "no workspace was outgrown",
    )


TRIAL = Trial(
    case=replace(MIXTRAL, judge=judge),
    unwatched="what the graph puts out is right; on the way it overwrites memory that belongs to others",
    engine="Mixtral, model runner V2; a probe makes the workspace grow after the captures, and takes the memory that "
    "is then free",
    shows_in="bytes of the probe's tensors that graphs have written to, or an illegal memory access",
)
