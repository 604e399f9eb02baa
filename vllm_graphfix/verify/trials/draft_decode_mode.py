"""Trial of draft-decode-mode."""

from __future__ import annotations

from dataclasses import replace

from vllm_graphfix.verify.engine.cases import LLAMA_EAGLE
from vllm_graphfix.verify.engine.probe_verdict import Observed, ProbeVerdict
from vllm_graphfix.verify.trial import Trial


def judge(observed: Observed) -> ProbeVerdict:
    padded, decodes = observed.get("piecewise-draft-decodes", (0.0, 0.0))
    return ProbeVerdict(
        "draft decodes in piecewise graphs with padding",
        right=(0.0,),
        observed=(padded,),
        summary=f"{padded:.0f} of {decodes:.0f} draft decodes ran in piecewise graphs with padding",
        unseen=None if decodes else "no draft was decoded",
    )


TRIAL = Trial(
    case=replace(LLAMA_EAGLE, judge=judge),
    unwatched="the drafts concerned run in piecewise graphs, and the check looks at full ones",
    engine="Llama and an Eagle head, FlashInfer, piecewise graphs, model runner V2",
    shows_in="draft decodes that ran in piecewise graphs with padding, or FlashInfer's error about `kv_indptr`",
)
