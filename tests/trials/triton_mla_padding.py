"""Trials of triton-mla-padding: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.triton_mla_padding import _BACKEND, _KERNELS

divides, returned = r"^( *)result = acc / e_sum\n", r"^( *)return o, lse\n"
full = (
    "class TritonMLAMetadataBuilder(MLACommonMetadataBuilder):\n"
    "    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH\n\n\nclass TritonMLABackend("
)
own_decodes = r"\1\n\n    def _build_decode(self, **given):\n        return super()._build_decode(**given)\n"
fixed, unknown = Verdict.FIXED, Verdict.UNRECOGNISED

EDITS = (
    Edit("full graphs a release early", "0.21.0", _BACKEND, r"^class TritonMLABackend\(", full, Verdict.AFFECTED),
    Edit(
        "divided where the sum is above 0",
        "0.22.0",
        _KERNELS,
        divides,
        r"\1result = tl.where(e_sum > 0.0, acc / e_sum, 0.0)\n",
        fixed,
    ),
    Edit(
        "0 where the sum is 0",
        "0.33.0",
        _KERNELS,
        divides,
        r"\1result = tl.where(e_sum == 0, 0, acc / e_sum)\n",
        fixed,
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
        r"\1o.masked_fill_(padded[:, None, None], 0.0)\n\1return o, lse\n",
        fixed,
    ),
    Edit(
        "filled rows chosen",
        "0.31.0",
        _BACKEND,
        returned,
        r"\1o = torch.where(filled[:, None, None], o, 0)\n\1return o, lse\n",
        fixed,
    ),
    Edit(
        "no full graphs",
        "0.24.0",
        _BACKEND,
        r"AttentionCGSupport\.UNIFORM_BATCH",
        "AttentionCGSupport.NEVER",
        fixed,
    ),
    Edit("divided by a function", "0.33.0", _KERNELS, divides, r"\1result = _merged(acc, e_sum)\n", unknown),
    Edit(
        "chosen by something else",
        "0.22.0",
        _KERNELS,
        divides,
        r"\1result = tl.where(mask_d, acc / e_sum, 0.0)\n",
        unknown,
    ),
    Edit(
        "another log-sum-exp",
        "0.28.0",
        _KERNELS,
        r"e_max \+ tl\.log\(e_sum\)$",
        "e_max + tl.log(tl.where(e_sum > 0, e_sum, 1))",
        unknown,
    ),
    Edit(
        "a further parameter",
        "0.30.0",
        _KERNELS,
        r"^    is_mla=False,\n\):\n    assert",
        "    is_mla=False,\n    pad=0,\n):\n    assert",
        unknown,
    ),
    Edit(
        "filled now and then",
        "0.25.1",
        _BACKEND,
        returned,
        r"\1if self.odd:\n\1    o.masked_fill_(padded[:, None, None], 0.0)\n\1return o, lse\n",
        unknown,
    ),
    Edit(
        "another output",
        "0.26.0",
        _BACKEND,
        r"^            o,\n            lse,\n",
        "            out,\n            lse,\n",
        unknown,
    ),
    Edit(
        "rows are the second of the grid",
        "0.29.0",
        _KERNELS,
        r"(    cur_batch = tl\.program_id\()0(\)\n    cur_head = tl\.program_id\()1\)(?=\n\n    cur_batch_seq_len)",
        r"\g<1>1\g<2>0)",
        unknown,
    ),
    Edit(
        "a further parameter of the second stage",
        "0.33.0",
        _KERNELS,
        r"^    stride_lse_bs,\n    NUM_KV_SPLITS",
        "    stride_lse_bs,\n    sink,\n    NUM_KV_SPLITS",
        unknown,
    ),
    Edit(
        "launched by another name", "0.25.1", _KERNELS, r"^    _fwd_kernel_stage2\[grid\]", "    _stage2[grid]", unknown
    ),
    Edit("decodes of its own", "0.23.0", _BACKEND, r"^(    _cudagraph_support.*)\n", own_decodes, unknown),
    Edit("another builder", "0.22.1", _BACKEND, r"TritonMLAMetadataBuilder", "PaddedMLABuilder", unknown),
)

SERVED = (
    Served("0.26.0", "./v3 --attention-backend TRITON_MLA", Concern.CONCERNS, "TRITON_MLA"),
    Served("0.26.0", "./llama", Concern.DOES_NOT, "no latent attention"),
)
