"""Trial of triton-mla-padding."""

from __future__ import annotations

from dataclasses import replace

from vllm_graphfix.verify.engine.cases import MLA_TRITON
from vllm_graphfix.verify.engine.probe_verdict import none_may_be
from vllm_graphfix.verify.trial import Trial

JUDGE = none_may_be(
    "empty-rows",
    "rows of length 0 that Triton's MLA decode leaves not finite",
    "{wrong} of {all} rows of length 0 came out of Triton's MLA decode with non-finite numbers",
    "no row of length 0 reached Triton's MLA decode",
)
TRIAL = Trial(
    case=replace(MLA_TRITON, judge=JUDGE),
    unwatched="a run without the graph has the same padded rows, and takes the same NaN from them",
    engine="MLA, Triton MLA, bf16, model runner V1, a batch that shrinks through sizes between those captured",
    shows_in="rows of length 0 whose attention output is not finite, counted in the graphs. Tokens do not show it: the "
    "model is dense and in bf16, where a padded row affects no other row",
)
