"""Trial of draft-decode-mode."""

from __future__ import annotations

from dataclasses import replace

from vllm_graphfix.verify.engine.cases import LLAMA_EAGLE
from vllm_graphfix.verify.engine.probe_verdict import none_may_be
from vllm_graphfix.verify.trial import Trial

JUDGE = none_may_be(
    "piecewise-draft-decodes",
    "draft decodes in piecewise graphs with padding",
    "{wrong} of {all} draft decodes ran in piecewise graphs with padding",
    "no draft was decoded",
)
TRIAL = Trial(
    case=replace(LLAMA_EAGLE, judge=JUDGE),
    unwatched="the drafts concerned run in piecewise graphs, and the check looks at full ones",
    engine="Llama and an Eagle head, FlashInfer, piecewise graphs, model runner V2",
    shows_in="draft decodes that ran in piecewise graphs with padding, or FlashInfer's error about `kv_indptr`",
)
