"""Trials of draft-idx-mapping: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.draft_idx_mapping import _BASE, _DFLASH, _EAGLE, _GUMBEL

left_out = (
    _GUMBEL,
    r"^( +)temp = tl\.load\(temp_ptr \+ req_state_idx\)((?:.*\n)*?)( +)mask=mask,",
    (
        r"\1is_valid_req = req_state_idx >= 0\n"
        r"\1temp = tl.load(temp_ptr + req_state_idx, mask=is_valid_req, other=0.0)\2\3mask=mask & is_valid_req,"
    ),
)
mapped = r"^( +)self\.idx_mapping\[:num_reqs\]\.copy_\(.*\)\n"
padded = r"\g<0>\1self.idx_mapping[num_reqs:].fill_(-1)\n"
of_dflash = (_DFLASH, r"(out_sample_idx_mapping_ptr \+ block), 0,", r"\1, -1,")
v2 = "VLLM_USE_V2_MODEL_RUNNER=1 "
sampled = v2 + (
    """./llama -sc '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 3, """
    """"draft_sample_method": "%s"}'"""
)

EDITS = (
    Edit("the remedy", "0.24.0", _BASE, mapped, padded, Verdict.FIXED, (left_out, of_dflash)),
    Edit("the remedy", "0.22.1", _EAGLE, mapped, padded, Verdict.FIXED, (left_out,)),
    Edit("the remedy, but not for DFlash", "0.24.0", _BASE, mapped, padded, Verdict.UNRECOGNISED, (left_out,)),
    Edit("rows below zero that are sampled", "0.23.0", _BASE, mapped, padded, Verdict.UNRECOGNISED),
    Edit(
        "rows behind the batch left out by the kernel alone",
        "0.21.0",
        left_out[0],
        *left_out[1:],
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "rows that are padded elsewhere",
        "0.19.1",
        _EAGLE,
        r"^( +)idx_mapping\.copy_\(.*\)\n",
        r"\g<0>\1self.idx_mapping[num_reqs:] = 0\n",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "logits of other requests than there are",
        "0.20.2",
        _EAGLE,
        r"^( +)self\.draft_logits = torch\.zeros\(\n +self\.max_num_reqs,",
        r"\1self.draft_logits = torch.zeros(\n                2 * self.max_num_reqs,",
        Verdict.UNRECOGNISED,
    ),
)

SERVED = (
    Served("0.22.1", sampled % "probabilistic", Concern.CONCERNS, "probabilistic"),
    Served("0.21.0", sampled % "gumbel", Concern.CONCERNS, "gumbel"),
    Served("0.19.1", sampled.replace("draft_", "rejection_") % "probabilistic", Concern.CONCERNS, "probabilistic"),
    Served("0.22.1", sampled % "greedy", Concern.DOES_NOT, "likeliest"),
    Served("0.22.1", f"{sampled} --enforce-eager" % "probabilistic", Concern.DOES_NOT, "--enforce-eager"),
    Served("0.22.1", sampled.replace("=1", "=0") % "probabilistic", Concern.DOES_NOT, "V1"),
    Served("0.22.1", f"{v2}./llama", Concern.DOES_NOT, "no speculator"),
)
