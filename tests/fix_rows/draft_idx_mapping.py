"""Trials of draft-idx-mapping: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served, affects, does_not
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.draft_idx_mapping import _BASE, _DFLASH, _EAGLE, _FOLDER, _GUMBEL

unmasked = (
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
_DRAFTS = "vllm/v1/worker/gpu/spec_decode/autoregressive/speculator.py"
v2 = "VLLM_USE_V2_MODEL_RUNNER=1 "
sampled = v2 + (
    """./llama -sc '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 3, """
    """"draft_sample_method": "%s"}'"""
)

EDITS = (
    Edit("the remedy", "0.24.0", _BASE, mapped, padded, Verdict.FIXED, (unmasked, of_dflash)),
    Edit("the remedy", "0.22.1", _EAGLE, mapped, padded, Verdict.FIXED, (unmasked,)),
    Edit("the remedy, but not for DFlash", "0.24.0", _BASE, mapped, padded, also=(unmasked,)),
    Edit("rows below zero that are sampled", "0.23.0", _BASE, mapped, padded),
    Edit(
        "rows behind the batch left out by the kernel alone", "0.21.0", unmasked[0], *unmasked[1:], Verdict.UNRECOGNISED
    ),
    Edit(
        "rows that are padded elsewhere",
        "0.19.1",
        _EAGLE,
        r"^( +)idx_mapping\.copy_\(.*\)\n",
        r"\g<0>\1self.idx_mapping[num_reqs:] = 0\n",
    ),
    Edit(
        "logits of other requests than there are",
        "0.20.2",
        _EAGLE,
        r"^( +)self\.draft_logits = torch\.zeros\(\n +self\.max_num_reqs,",
        r"\1self.draft_logits = torch.zeros(\n                2 * self.max_num_reqs,",
    ),
    # Right elsewhere.
    Edit(
        "the remedy where logits are kept",
        "0.24.0",
        _BASE,
        mapped,
        r"\g<0>\1if self.draft_logits is not None:\n\1    self.idx_mapping[num_reqs:].fill_(-1)\n",
        Verdict.FIXED,
        (unmasked, of_dflash),
    ),
    Edit(
        "padded rows of a draft are replaced",
        "0.24.0",
        _DRAFTS,
        r"idx_mapping = self\.idx_mapping\[:num_reqs\]",
        "idx_mapping = self._of_requests(self.idx_mapping[:num_reqs])",
    ),
    Edit(
        "a spare row",
        "0.22.1",
        _EAGLE,
        r"^( +)self\.draft_logits = torch\.zeros\(\n +self\.max_num_reqs,",
        r"\1self.draft_logits = torch.zeros(\n                self.max_num_reqs + 1,",
        also=((_EAGLE, mapped, r"\g<0>\1self.idx_mapping[num_reqs:].fill_(self.max_num_reqs)\n"),),
    ),
    Edit(
        "rows padded by who proposes",
        "0.23.0",
        _DRAFTS,
        r"^( +)(self\._copy_request_inputs\(\n(?: +.*,\n)+ +\))\n",
        r"\1\2\n\1self.idx_mapping[num_reqs:].fill_(self.spare)\n",
    ),
    Edit(
        "rows behind the batch are not stored",
        "0.21.0",
        _GUMBEL,
        r"^( +logits,\n +mask=mask),\n",
        r"\1 & (req_state_idx < num_reqs),\n",
    ),
    # Wrong.
    Edit(
        "the remedy in dummy runs",
        "0.24.0",
        _BASE,
        mapped,
        r"\g<0>\1if self.is_dummy:\n\1    self.idx_mapping[num_reqs:].fill_(-1)\n",
        also=(unmasked, of_dflash),
    ),
    Edit(
        "the remedy undone",
        "0.24.0",
        _BASE,
        mapped,
        padded + r"\1self.idx_mapping.clamp_(min=0)\n",
        also=(unmasked, of_dflash),
    ),
    Edit(
        "the remedy on a copy",
        "0.22.1",
        _EAGLE,
        mapped,
        r"\g<0>\1self.idx_mapping[num_reqs:].clone().fill_(-1)\n",
        also=(unmasked,),
    ),
    Edit(
        "rows below zero are known and stored",
        "0.22.1",
        _EAGLE,
        mapped,
        padded,
        also=((_GUMBEL, unmasked[1], unmasked[2].replace("mask=mask & is_valid_req", "mask=mask")),),
    ),
    Edit(
        "rows below zero are row 0",
        "0.25.0",
        _GUMBEL,
        r"^( +)(is_valid_req = req_state_idx >= 0)\n",
        r"\1req_state_idx = tl.maximum(req_state_idx, 0)\n\1\2\n",
    ),
    Edit(
        "samples of DFlash are padded with a request",
        "0.27.0",
        _DFLASH,
        r"(out_sample_idx_mapping_ptr \+ block), -1,",
        r"\1, 0,",
    ),
    Edit(
        "rows below zero are sampled as row 0",
        "0.29.0",
        _BASE,
        r"^( +)(return gumbel_sample\(\n)",
        r"\1idx_mapping = idx_mapping.clamp(min=0)\n\1\2",
    ),
    Edit(
        "padding clamped to a request",
        "0.25.0",
        _DRAFTS,
        r"^( *)self\._copy_request_inputs\([^)]*\)$",
        r"\g<0>\n\1self.idx_mapping.clamp_(min=0)",
    ),
    Edit(
        "a speculator that pads nothing",
        "0.25.0",
        f"{_FOLDER}/mtp/speculator.py",
        r"^class MTPSpeculator\(.*\):$",
        r"\g<0>\n    def _copy_request_inputs(self, num_reqs, idx_mapping, temperature, seeds):\n"
        r"        self.idx_mapping[:num_reqs].copy_(idx_mapping)\n",
    ),
)

SERVED = (
    Served("0.22.1", sampled % "probabilistic", affects, "probabilistic"),
    Served("0.21.0", sampled % "gumbel", affects, "gumbel"),
    Served("0.19.1", sampled.replace("draft_", "rejection_") % "probabilistic", affects, "probabilistic"),
    Served("0.22.1", sampled % "greedy", does_not, "likeliest"),
    Served("0.22.1", f"{sampled} --enforce-eager" % "probabilistic", does_not, "--enforce-eager"),
    Served("0.22.1", sampled.replace("=1", "=0") % "probabilistic", does_not, "V1"),
    Served("0.22.1", f"{v2}./llama", does_not, "no speculator"),
)
