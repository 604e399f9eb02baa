"""Trials of encoder-padding: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.encoder_padding import _LAYER, _MANAGER, _OPERATOR, _RUNNER

launched = r"^( +)(output = flash_attn_varlen_func\(\n)"
zeros = 'kwargs["out"] = torch.zeros(q.shape[0], q.shape[1], v.shape[-1], dtype=q.dtype, device=q.device)'
capturing = "current_platform.is_cuda() and torch.cuda.is_current_stream_capturing()"
qwen = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
captured = "./model -cc.cudagraph_mm_encoder=true"

fixed, affected, unrecognised = Verdict.FIXED, Verdict.AFFECTED, Verdict.UNRECOGNISED


def before_launch(what: str, release: str, replacement: str, verdict: Verdict) -> Edit:
    """An edit of the lines in front of the kernel's launch."""
    return Edit(what, release, _OPERATOR, launched, replacement + r"\1\2", verdict)


EDITS = (
    Edit(
        "graphs of as many tokens alone",
        "0.26.0",
        _MANAGER,
        r"^( *)for budget in budgets:\n.*\n.*return budget\n",
        r"\1return total_tokens if total_tokens in budgets else None\n",
    ),
    before_launch("zeros while a graph is captured", "0.27.1", rf"\1if {capturing}:\n\1    {zeros}\n", fixed),
    before_launch("zeros in any case", "0.20.0", r'\1kwargs["out"] = torch.zeros_like(q)' + "\n", fixed),
    before_launch("zeros on CUDA", "0.25.1", rf"\1if current_platform.is_cuda():\n\1    {zeros}\n", fixed),
    before_launch(
        "zeros in captures, and new memory elsewhere",
        "0.30.0",
        rf"\1if {capturing}:\n\1    {zeros}\n\1else:\n" + r'\1    kwargs["out"] = torch.empty_like(q)' + "\n",
        fixed,
    ),
    Edit(
        "remedy cut out",
        "0.31.0",
        _OPERATOR,
        r"^( +if current_platform\.is_cuda\(\) and torch\.cuda\.is_current_stream_capturing\(\):\n)(?:.*\n){4}",
        r"\1        pass\n",
        affected,
        runs=True,
    ),
    # Right elsewhere.
    Edit(
        "padded rows zeroed afterwards",
        "0.24.0",
        _OPERATOR,
        r"^( +)context_layer = einops\.rearrange\(output,",
        r"\1output = output.where(torch.arange(len(output), device=q.device)[:, None, None] < cu_seqlens[-1], 0)\n"
        r"\1context_layer = einops.rearrange(output,",
        remedy=True,
    ),
    Edit(
        "padded rows zeroed by the layer",
        "0.27.0",
        _LAYER,
        r"^( +)if is_reshaped:\n( +output = output\.reshape\(bsz, q_len, -1\)\n.*\n\n +def _forward_triton)",
        r"\1output = without_padding(output, cu_seqlens)\n\1if is_reshaped:\n\2",
    ),
    Edit(
        "another kernel while capturing",
        "0.28.0",
        _MANAGER,
        r"^( +)values = capture_inputs\.values\n",
        r"\g<0>\1fa_utils.flash_attn_varlen_func = on_zeros\n",
    ),
    Edit(
        "graphs that fit exactly alone",
        "0.22.1",
        _MANAGER,
        r"^( +)if budget >= total_tokens:\n",
        r"\1if budget == total_tokens:\n",
    ),
    Edit(
        "no graphs with this attention",
        "0.26.0",
        _RUNNER,
        r"self\.encoder_cudagraph_manager is not None\n( +and)",
        r"self.encoder_cudagraph_manager is not None\n\1 not self.has_flash_attention\n\1",
    ),
    # Not right, though it looks so.
    before_launch("zeros for large images", "0.28.0", rf"\1if max_seqlen > 1024:\n\1    {zeros}\n", unrecognised),
    before_launch(
        "zeros outside of captures",
        "0.28.0",
        rf"\1if not torch.cuda.is_current_stream_capturing():\n\1    {zeros}\n",
        unrecognised,
    ),
    before_launch(
        "zeros, and new memory instead",
        "0.29.0",
        rf"\1{zeros}\n" + r'\1kwargs["out"] = torch.empty_like(q)' + "\n",
        unrecognised,
    ),
    before_launch(
        "zeros that are taken out again", "0.23.0", rf"\1{zeros}\n" + r'\1kwargs.pop("out")' + "\n", unrecognised
    ),
    before_launch("zeros in arguments that are made anew", "0.25.0", rf"\1{zeros}\n\1kwargs = " + "{}\n", unrecognised),
    before_launch("zeros in a copy", "0.22.0", r'\1dict(kwargs)["out"] = torch.zeros_like(q)' + "\n", unrecognised),
    before_launch(
        "zeros where they are said to be supported, which they are not",
        "0.30.0",
        rf"\1supports_out = False\n\1if supports_out:\n\1    {zeros}\n",
        unrecognised,
    ),
    Edit(
        "zeros too late", "0.28.0", _OPERATOR, r"^( +)context_layer = einops\.rearrange\(output,", rf"\1{zeros}\n\g<0>"
    ),
    Edit(
        "the kernel is looked up once",
        "0.22.1",
        _OPERATOR,
        r"^( +)from vllm\.v1\.attention\.backends\.fa_utils import flash_attn_varlen_func\n",
        r"\1flash_attn_varlen_func = fa_utils.flash_attn_varlen_func\n",
    ),
    Edit(
        "no encoder is captured",
        "0.26.0",
        _RUNNER,
        r"vllm\.v1\.worker\.encoder_cudagraph import",
        "vllm.v1.worker.encoder_graphs import",
    ),
    Edit(
        "the layer calls the kernel itself",
        "0.31.0",
        _LAYER,
        r"^( +)output = vit_flash_attn_wrapper\(\n",
        r"\1if self._fa_version == 3:\n\1    return flash_attn_varlen_func(query, key, value, causal=False)\n\g<0>",
    ),
)

SERVED = (
    Served("0.30.0", captured, affects, "cudagraph_mm_encoder is on", model=qwen),
    Served("0.20.0", f"{captured} --mm-encoder-attn-backend FLASH_ATTN", affects, "FLASH_ATTN", model=qwen),
    Served("0.25.0", "./model", does_not, "cudagraph_mm_encoder is off", model=qwen),
    Served("0.25.0", "./model -cc.cudagraph_mm_encoder=false", does_not, "is off", model=qwen),
    Served("0.25.0", f"{captured} --enforce-eager", does_not, "--enforce-eager", model=qwen),
    Served("0.25.0", f"{captured} --mm-encoder-attn-backend FLASHINFER", does_not, "FLASHINFER", model=qwen),
    Served("0.25.0", "./model -cc.cudagraph_mm_encoder=perhaps", unknown, "cudagraph_mm_encoder", model=qwen),
    Served("0.25.0", "./model --config serve.yaml", unknown, "--config", model=qwen),
)
