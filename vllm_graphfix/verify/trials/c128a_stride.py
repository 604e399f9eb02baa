"""Trial of c128a-stride."""

from __future__ import annotations

from dataclasses import replace

from vllm_graphfix.verify.engine.cases import DEEPSEEK_V4_LONG
from vllm_graphfix.verify.engine.probe_verdict import Observed, ProbeVerdict
from vllm_graphfix.verify.trial import Trial, Watched


def judge(observed: Observed) -> ProbeVerdict:
    foreign, rows = observed.get("foreign-slots", (0.0, 0.0))
    return ProbeVerdict(
        "rows of decode batches with slots that are not their request's",
        right=(0.0,),
        observed=(foreign,),
        summary=f"{foreign:.0f} of {rows:.0f} rows that decode batches read held slots that are not their request's",
        unseen=None if rows else "no decode batch read a row of slots",
    )


TRIAL = Trial(
    case=replace(DEEPSEEK_V4_LONG, judge=judge),
    watched=Watched(
        "shadow-v1", "vllm_graphfix.verify.double.scenarios.c128a_stride:watched", ("DeepseekV4FlashMLAMetadata",)
    ),
    engine="DeepSeek V4 of two layers, FlashMLA, fp8 KV cache, a `--max-model-len` of 32768, model runner V1",
    shows_in="rows of slots that decode batches read in the graphs and that hold slots of other requests, or of "
    "nobody; tokens",
)
