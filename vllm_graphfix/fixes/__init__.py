"""One module a fix. The order is the order of application and of every table."""

from __future__ import annotations

from vllm_graphfix.fix import Fix, Mode
from vllm_graphfix.fixes import (
    capture_state,
    draft_decode_mode,
    draft_prefill_state,
    flashmla_fp8,
    flashmla_padding,
    idle_rank,
    indexer_padding,
    mamba_padding,
    prefill_dispatch,
    prompt_logprobs,
    triton_mla_padding,
    workspace_growth,
)

FIXES: tuple[Fix, ...] = (
    capture_state.FIX,
    draft_prefill_state.FIX,
    draft_decode_mode.FIX,
    mamba_padding.FIX,
    flashmla_fp8.FIX,
    flashmla_padding.FIX,
    prefill_dispatch.FIX,
    prompt_logprobs.FIX,
    idle_rank.FIX,
    triton_mla_padding.FIX,
    indexer_padding.FIX,
    workspace_growth.FIX,
)
BY_NAME: dict[str, Fix] = {fix.name: fix for fix in FIXES}
OBSERVED_BY_DEFAULT = frozenset(fix.name for fix in FIXES if fix.default is Mode.OBSERVE)
