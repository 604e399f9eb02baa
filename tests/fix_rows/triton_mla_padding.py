"""Trials of triton-mla-padding: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import after, before, swap
from trial_rows import LOOKALIKE, REMEDY, Edit, Served, Wording, affects, does_not
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.triton_mla_padding import _BACKEND, _KERNELS

divides, returned = r"^( *)result = acc / e_sum\n", r"^( *)return o, lse\n"
full = (
    "class TritonMLAMetadataBuilder(MLACommonMetadataBuilder):\n"
    "    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH\n\n\nclass TritonMLABackend("
)
CLEARED = "o.masked_fill_((attn_metadata.decode.seq_lens < 1)[:, None, None], 0.0)"
DIVIDES, RETURNED = r"result = acc / e_sum\n", r"return o, lse\n"
COMMON = "vllm/model_executor/layers/attention/mla_attention.py"
own_decodes = r"\1\n\n    def _build_decode(self, **given):\n        return super()._build_decode(**given)\n"
fixed = Verdict.FIXED

EDITS = (
    Edit("full graphs a release early", "0.21.0", _BACKEND, r"^class TritonMLABackend\(", full),
    Edit(
        "full graphs of some specifications alone",
        "0.29.0",
        _BACKEND,
        r"^        AttentionCGSupport\.UNIFORM_SINGLE_TOKEN_DECODE$",
        "        AttentionCGSupport.NEVER",
    ),
    Edit(
        "divided where the sum is above 0",
        "0.22.0",
        _KERNELS,
        divides,
        r"\1result = tl.where(e_sum > 0.0, acc / e_sum, 0.0)\n",
        fixed,
    ),
    Edit(
        "0 where the sum is 0", "0.33.0", _KERNELS, divides, r"\1result = tl.where(e_sum == 0, 0, acc / e_sum)\n", fixed
    ),
    Edit(
        "divided by 1 where the sum is 0",
        "0.33.0",
        _KERNELS,
        divides,
        r"\1safe = tl.where(e_sum == 0.0, 1.0, e_sum)\n\1result = acc / safe\n",
        fixed,
    ),
    Edit(
        "divided by no less than a little",
        "0.25.1",
        _KERNELS,
        divides,
        r"\1result = acc / tl.maximum(e_sum, 1e-20)\n",
        fixed,
    ),
    Edit(
        "divided where there are tokens",
        "0.27.1",
        _KERNELS,
        divides,
        r"\1result = acc\n\1if cur_batch_seq_len > 0:\n\1    result = acc / e_sum\n",
        fixed,
    ),
    Edit(
        "padded rows filled",
        "0.22.1",
        _BACKEND,
        returned,
        r"\1o.masked_fill_((attn_metadata.decode.seq_lens < 1)[:, None, None], 0.0)\n\1return o, lse\n",
        fixed,
    ),
    Edit(
        "filled rows chosen",
        "0.31.0",
        _BACKEND,
        returned,
        r"\1o = torch.where((seq_lens > 0)[:, None, None], o, 0)\n\1return o, lse\n",
        fixed,
    ),
    Edit("no full graphs", "0.24.0", _BACKEND, r"AttentionCGSupport\.UNIFORM_BATCH", "AttentionCGSupport.NEVER", fixed),
    Edit("divided by a function", "0.33.0", _KERNELS, divides, r"\1result = _merged(acc, e_sum)\n"),
    Edit("chosen by something else", "0.22.0", _KERNELS, divides, r"\1result = tl.where(mask_d, acc / e_sum, 0.0)\n"),
    Edit(
        "another log-sum-exp",
        "0.28.0",
        _KERNELS,
        r"e_max \+ tl\.log\(e_sum\)$",
        "e_max + tl.log(tl.where(e_sum > 0, e_sum, 1))",
    ),
    Edit("filled now and then", "0.25.1", _BACKEND, returned, rf"\1if self.odd:\n\1    {CLEARED}\n\1return o, lse\n"),
    Edit(
        "another output",
        "0.26.0",
        _BACKEND,
        r"^            o,\n            lse,\n",
        "            out,\n            lse,\n",
    ),
    Edit(
        "rows are the second of the grid",
        "0.29.0",
        _KERNELS,
        r"(    cur_batch = tl\.program_id\()0(\)\n    cur_head = tl\.program_id\()1\)(?=\n\n    cur_batch_seq_len)",
        r"\g<1>1\g<2>0)",
    ),
    Edit("launched by another name", "0.25.1", _KERNELS, r"^    _fwd_kernel_stage2\[grid\]", "    _stage2[grid]"),
    Edit("decodes of its own", "0.23.0", _BACKEND, r"^(    _cudagraph_support.*)\n", own_decodes),
    Edit("another builder", "0.22.1", _BACKEND, r"TritonMLAMetadataBuilder", "PaddedMLABuilder"),
    Edit(
        "the kernel guarded, another one imported",
        "0.33.0",
        _KERNELS,
        DIVIDES,
        r"result = tl.where(e_sum > 0.0, acc / e_sum, 0.0)\n",
        also=((_BACKEND, r"ops\.triton_decode_attention", "ops.mla_decode"),),
    ),
)

SERVED = (
    Served("0.26.0", "./v3 --attention-backend TRITON_MLA", affects, "TRITON_MLA"),
    Served("0.26.0", "./llama", does_not, "no latent attention"),
)

WORDINGS = (
    Wording(
        REMEDY,
        "0.33.0",
        _KERNELS,
        {
            "by the length": swap(DIVIDES, "result = tl.where(cur_batch_seq_len > 0, acc / e_sum, 0.0)\n"),
            "by a sum that is never 0": before(DIVIDES, "e_sum = tl.where(e_sum == 0, 1, e_sum)"),
            "cleared behind": after(r"result = acc / e_sum", "result = tl.where(e_sum == 0, 0.0, result)"),
            "by the mask of the store": swap(r"(^ +result,\n +mask=mask_d)", r"\1 & (cur_batch_seq_len > 0)"),
            "left before the division": before(
                DIVIDES,
                "if cur_batch_seq_len == 0:",
                "    tl.store(o + cur_batch * stride_obs + cur_head * stride_oh + offs_d, acc, mask=mask_d)",
                "    return",
            ),
            "in the caller of the launch": after(
                r"(?:_decode_softmax_reducev_fwd\(attn_logits|_decode_softmax_reducev_fwd\(\n(?: +.*\n)+ *\))",
                "o.masked_fill_((b_seq_len < 1)[:, None, None], 0.0)",
            ),
            "in the layer": {
                COMMON: before(r"self\._v_up_proj\(attn_out", "attn_out = torch.nan_to_num(attn_out, nan=0.0)")
            },
            "by lengths from 1, in the common builder": {
                COMMON: swap(
                    r"seq_lens_device=seq_lens\[:num_decodes\]", "seq_lens_device=seq_lens[:num_decodes].clamp(min=1)"
                )
            },
            "in the backend, by numbers": {_BACKEND: before(RETURNED, "o.nan_to_num_(nan=0.0)")},
        },
    ),
    Wording(
        LOOKALIKE,
        "0.33.0",
        _KERNELS,
        {
            "divided by a sum that may be 0": swap(DIVIDES, "result = acc / tl.maximum(e_sum, 0.0)\n"),
            "chosen the wrong way round": swap(DIVIDES, "result = tl.where(e_sum > 0, 0.0, acc / e_sum)\n"),
            "guarded and divided again": after(
                r"result = acc / e_sum", "result = tl.where(e_sum > 0, acc / e_sum, 0.0)", "result = acc / e_sum"
            ),
            "guarded for half floats": after(
                r"result = acc / e_sum", "if OUTPUT_FP16:", "    result = tl.where(e_sum > 0, acc / e_sum, 0.0)"
            ),
            "guarded after the store": before(r"lse_val = e_max", "result = tl.where(e_sum > 0, acc / e_sum, 0.0)"),
            "guarded by another name": before(DIVIDES, "safe = tl.where(e_sum == 0, 1, e_sum)"),
            "multiplied by 0": swap(DIVIDES, "result = acc / e_sum * (cur_batch_seq_len > 0)\n"),
            "log-sum-exp guarded alone": swap(r"tl\.log\(e_sum\)", "tl.log(tl.maximum(e_sum, 1e-30))"),
            "cleared on a copy": {_BACKEND: before(RETURNED, CLEARED.replace("o.", "o.clone().", 1))},
            "cleared if debugging": {_BACKEND: before(RETURNED, "if not __debug__:", f"    {CLEARED}")},
            "cleared after the return": {_BACKEND: after(r"return o, lse", CLEARED)},
            "cleared before the kernel": {_BACKEND: before(r"decode_attention_fwd\($", CLEARED)},
            "cleared by a helper that nobody calls": {
                _BACKEND: before(r"def forward_mqa\(", "def _clear(self, o, attn_metadata):", f"    {CLEARED}", "")
            },
        },
    ),
)

OBSERVED = ([80.0, 80.0], [0.0, 80.0])
"""The values of its probe on stock, and with the fix."""
