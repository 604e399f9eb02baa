"""Trial of c128a-stride."""

from __future__ import annotations

from dataclasses import replace

from vllm_graphfix.verify.engine.cases import DEEPSEEK_V4_LONG
from vllm_graphfix.verify.engine.probe_verdict import none_may_be
from vllm_graphfix.verify.trial import Trial, Watched

JUDGE = none_may_be(
    "foreign-slots",
    "rows of decode batches with slots that are not their request's",
    "{wrong} of {all} rows that decode batches read held slots that are not their request's",
    "no decode batch read a row of slots",
)
TRIAL = Trial(
    case=replace(DEEPSEEK_V4_LONG, judge=JUDGE),
    watched=Watched(
        "shadow-v1", "vllm_graphfix.verify.double.scenarios.c128a_stride:watched", ("DeepseekV4FlashMLAMetadata",)
    ),
    engine="DeepSeek V4 of two layers, FlashMLA, fp8 KV cache, a `--max-model-len` of 32768, model runner V1",
    shows_in="rows of slots that decode batches read in the graphs and that hold slots of other requests, or of "
    "nobody; tokens",
)
