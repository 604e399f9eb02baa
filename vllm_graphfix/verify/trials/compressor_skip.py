"""Trial of compressor-skip."""

from __future__ import annotations

from dataclasses import replace

from vllm_graphfix.verify.engine.cases import DEEPSEEK_V4
from vllm_graphfix.verify.engine.probe_verdict import none_may_be
from vllm_graphfix.verify.trial import Trial

JUDGE = none_may_be(
    "unwritten-entries",
    "entries of completed groups that were not written",
    "{wrong} of {all} entries of groups that steps completed were not written",
    "no step completed a group of 128 tokens",
)
CASE = replace(
    DEEPSEEK_V4,
    judge=JUDGE,
    shows_with=(
        "vllm/models/deepseek_v4/compressor.py",
        "seq_lens_cpu_upper_bound",
        "model runner V2 writes every entry; only microbatches of model runner V1 go wrong",
    ),
)
TRIAL = Trial(
    case=CASE,
    unwatched="two more engines that compile for a minute; it sees those steps that complete a group, and read the "
    "entry that they ought to have written (`python benchmarks/shadow_check.py --only deepseek-v4`)",
    engine="DeepSeek V4 of two layers, FlashMLA, fp8 KV cache, model runner V2; from 0.30.0 on, and `skipped` before: "
    "there only microbatches go wrong",
    shows_in="cache entries of groups that a step completes and that are as they were after it, counted in the graphs; "
    "tokens",
)
