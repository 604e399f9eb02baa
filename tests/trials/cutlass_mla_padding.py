"""Trials of cutlass-mla-padding: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.cutlass_mla_padding import _BACKEND, _KERNELS

fresh = r"q_nope\.new_empty\(\(B_q, MAX_HEADS, D_latent\), dtype=dtype\)"
kept = r"q_nope\.new_zeros\(\(B_q, MAX_HEADS, D_latent\), dtype=dtype\)"
whole = r"^( +)(if H < MAX_HEADS:\n)"
fixed, unknown = Verdict.FIXED, Verdict.UNRECOGNISED

EDITS = (
    Edit(
        "zeros at each call",
        "0.33.0",
        _BACKEND,
        fresh,
        "q_nope.new_zeros((B_q, MAX_HEADS, D_latent), dtype=dtype)",
        fixed,
    ),
    Edit(
        "padded rows filled",
        "0.20.0",
        _BACKEND,
        whole,
        r"\1out.masked_fill_((seq_lens < 1)[:, None, None], 0.0)\n\1\2",
        fixed,
    ),
    Edit(
        "filled rows chosen",
        "0.14.1",
        _BACKEND,
        whole,
        r"\1out = torch.where((seq_lens > 0)[:, None, None], out, 0)\n\1\2",
        fixed,
    ),
    Edit(
        "no full graphs",
        "0.24.0",
        _BACKEND,
        r"AttentionCGSupport\.UNIFORM_SINGLE_TOKEN_DECODE",
        "AttentionCGSupport.NEVER",
        fixed,
    ),
    Edit("one of the zeros is memory as it is", "0.19.0", _BACKEND, kept, "torch.empty(1)", unknown),
    Edit(
        "filled now and then",
        "0.25.1",
        _BACKEND,
        whole,
        r"\1if self.odd:\n\1    out.masked_fill_((seq_lens < 1)[:, None, None], 0.0)\n\1\2",
        unknown,
    ),
    Edit("padded heads cleared", "0.33.0", _BACKEND, whole, r"\1out[:, H:] = 0\n\1\2", unknown),
    Edit("other rows filled", "0.32.0", _BACKEND, whole, r"\1out.masked_fill_(odd[:, None, None], 0.0)\n\1\2", unknown),
    Edit(
        "filled by a function",
        "0.30.0",
        _BACKEND,
        whole,
        r"\1clear(out, seq_lens)\n\1\2",
        unknown,
    ),
    Edit(
        "another kernel behind the same name",
        "0.28.0",
        _KERNELS,
        r"torch\.ops\._C\.sm100_cutlass_mla_decode\(",
        "torch.ops._C.sm103_cutlass_mla_decode(",
        unknown,
    ),
    Edit(
        "decodes of its own",
        "0.23.0",
        _BACKEND,
        r"^class CutlassMLABackend\(",
        "    def _build_decode(self, **given):\n        return super()._build_decode(**given)\n\n\n"
        "class CutlassMLABackend(",
        unknown,
    ),
)

SERVED = (
    Served("0.26.0", "./v3 --attention-backend CUTLASS_MLA", Concern.CONCERNS, "CUTLASS_MLA", gpu="NVIDIA B200"),
    Served("0.26.0", "./v3 --attention-backend CUTLASS_MLA", Concern.DOES_NOT, "Cutlass MLA needs", gpu="NVIDIA H200"),
    Served("0.26.0", "./v3", Concern.UNKNOWN, "the attention backend that vLLM logs", gpu="NVIDIA B200"),
    Served("0.26.0", "./llama", Concern.DOES_NOT, "no latent attention"),
)
