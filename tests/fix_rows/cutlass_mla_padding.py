"""Trials of cutlass-mla-padding: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import after, before, swap
from trial_rows import LOOKALIKE, REMEDY, Edit, Served, Wording, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.cutlass_mla_padding import _BACKEND, _KERNELS

COMMON = "vllm/model_executor/layers/attention/mla_attention.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
FRESH = r"out = q_nope\.new_empty"
BEHIND = r"if H < MAX_HEADS:"
CLEARED = "out.masked_fill_((seq_lens < 1)[:, None, None], 0.0)"
ZEROS = "out = q_nope.new_zeros((B_q, MAX_HEADS, D_latent), dtype=dtype)"
fresh = r"q_nope\.new_empty\(\(B_q, MAX_HEADS, D_latent\), dtype=dtype\)"
zeros = r"q_nope\.new_zeros\(\(B_q, MAX_HEADS, D_latent\), dtype=dtype\)"
whole = r"^( +)(if H < MAX_HEADS:\n)"
fixed = Verdict.FIXED

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
    Edit("one of the zeros is memory as it is", "0.19.0", _BACKEND, zeros, "torch.empty(1)"),
    Edit(
        "filled now and then",
        "0.25.1",
        _BACKEND,
        whole,
        r"\1if self.odd:\n\1    out.masked_fill_((seq_lens < 1)[:, None, None], 0.0)\n\1\2",
    ),
    Edit("padded heads cleared", "0.33.0", _BACKEND, whole, r"\1out[:, H:] = 0\n\1\2"),
    Edit("other rows filled", "0.32.0", _BACKEND, whole, r"\1out.masked_fill_(odd[:, None, None], 0.0)\n\1\2"),
    Edit("filled by a function", "0.30.0", _BACKEND, whole, r"\1clear(out, seq_lens)\n\1\2"),
    Edit(
        "another kernel behind the same name",
        "0.28.0",
        _KERNELS,
        r"torch\.ops\._C\.sm100_cutlass_mla_decode\(",
        "torch.ops._C.sm103_cutlass_mla_decode(",
    ),
    Edit(
        "decodes of its own",
        "0.23.0",
        _BACKEND,
        r"^class CutlassMLABackend\(",
        "    def _build_decode(self, **given):\n        return super()._build_decode(**given)\n\n\n"
        "class CutlassMLABackend(",
    ),
    Edit("a layer's class from elsewhere", "0.19.0", _BACKEND, r"return CutlassMLAImpl$", "return LeanCutlassMLAImpl"),
)

SERVED = (
    Served("0.26.0", "./v3 --attention-backend CUTLASS_MLA", affects, "CUTLASS_MLA", gpu="NVIDIA B200"),
    Served("0.26.0", "./v3 --attention-backend CUTLASS_MLA", does_not, "Cutlass MLA needs", gpu="NVIDIA H200"),
    Served("0.26.0", "./v3", unknown, "the attention backend that vLLM logs", gpu="NVIDIA B200"),
    Served("0.26.0", "./llama", does_not, "no latent attention"),
)

WORDINGS = (
    Wording(
        REMEDY,
        "0.33.0",
        _BACKEND,
        {
            "cleared before the kernel": after(FRESH, CLEARED),
            "cleared when there are fewer heads and when not": before(r"return out, lse\n", CLEARED),
            "cleared by rows": before(BEHIND, "out[seq_lens == 0] = 0"),
            "chosen by a view": before(BEHIND, "out = torch.where((seq_lens == 0).view(-1, 1, 1), 0.0, out)"),
            "made of zeros by torch": swap(
                r"q_nope\.new_empty\(\(B_q, MAX_HEADS, D_latent\), dtype=dtype\)",
                "torch.zeros((B_q, MAX_HEADS, D_latent), dtype=dtype, device=q_nope.device)",
            ),
            "in the caller": before(
                r"return o, \(lse", "o.masked_fill_((attn_metadata.decode.seq_lens < 1)[:, None, None], 0.0)"
            ),
            "in the layer": {
                COMMON: before(
                    r"self\._v_up_proj\(attn_out",
                    "if attn_metadata.decode is not None:",
                    "    attn_out = attn_out.masked_fill((attn_metadata.decode.seq_lens < 1)[:, None, None], 0.0)",
                )
            },
            "in the layer, by numbers": {
                COMMON: before(r"self\._v_up_proj\(attn_out", "attn_out = torch.nan_to_num(attn_out, nan=0.0)")
            },
            "in the wrapper of the kernel": {
                _KERNELS: before(r"torch\.ops\._C\.sm100_cutlass_mla_decode\(", "out.zero_()")
            },
            "by lengths from 1, in the builder": {
                _BACKEND: before(
                    r"class CutlassMLABackend\(",
                    "    def _build_decode(self, seq_lens_device, **others):",
                    "        return super()._build_decode(seq_lens_device=seq_lens_device.clamp(min=1), **others)",
                    "",
                    "",
                )
            },
            "by lengths from 1, in the common builder": {
                COMMON: swap(
                    r"seq_lens_device=seq_lens\[:num_decodes\]", "seq_lens_device=seq_lens[:num_decodes].clamp(min=1)"
                )
            },
        },
    ),
    Wording(
        LOOKALIKE,
        "0.33.0",
        _BACKEND,
        {
            "zeros, then memory as it is": before(FRESH, ZEROS),
            "memory as it is, of a zeroed buffer's size": swap(
                r"out = q_nope\.new_empty", "out = self._decode_out = q_nope.new_empty"
            ),
            "zeros where the context is split": after(FRESH, "if num_kv_splits > 1:", f"    {ZEROS}"),
            "cleared if debugging": before(BEHIND, "if not __debug__:", f"    {CLEARED}"),
            "cleared for fewer heads": after(BEHIND, f"    {CLEARED}"),
            "cleared on a copy": before(BEHIND, "out.clone().masked_fill_((seq_lens < 1)[:, None, None], 0.0)"),
            "cleared and not taken": before(BEHIND, "torch.where((seq_lens > 0)[:, None, None], out, 0)"),
            "cleared in vain": before(
                FRESH, "out = q_nope.new_empty((B_q, MAX_HEADS, D_latent), dtype=dtype)", CLEARED
            ),
            "cleared after the return": after(r"return out, lse", CLEARED),
            "cleared by a helper that nobody calls": before(
                r"def _sm100_cutlass_mla_decode", "def _clear(self, out, seq_lens):", f"    {CLEARED}", ""
            ),
            "cleared below no length": before(BEHIND, "out.masked_fill_((seq_lens < 0)[:, None, None], 0.0)"),
            "multiplied by 0": before(BEHIND, "out = out * (seq_lens > 0)[:, None, None]"),
            "log-sum-exp cleared": before(BEHIND, "lse.masked_fill_((seq_lens < 1)[:, None], 0.0)"),
            "the layer clears what it does not hand on": {
                COMMON: before(r"self\._v_up_proj\(attn_out", "torch.nan_to_num(attn_out, nan=0.0)")
            },
        },
    ),
    Wording(
        LOOKALIKE,
        "0.19.0",
        _BACKEND,
        {
            "zeros once, then memory as it is": after(
                r"out = self\._decode_out\[:B_q\]", "out = torch.empty_like(out)"
            ),
            "zeros of another step written over": after(r"out = self\._decode_out\[:B_q\]", "out.fill_(float('nan'))"),
            "zeros only where there were none": swap(
                r"self\._decode_out = q_nope\.new_zeros", "self._decode_out = q_nope.new_empty"
            ),
        },
    ),
)
