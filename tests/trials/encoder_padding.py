"""Trials of encoder-padding: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.encoder_padding import _MANAGER, _OPERATOR, _RUNNER

launched = r"^( +)(output = flash_attn_varlen_func\(\n)"
zeros = 'kwargs["out"] = torch.zeros(q.shape[0], q.shape[1], v.shape[-1], dtype=q.dtype, device=q.device)'
capturing = "current_platform.is_cuda() and torch.cuda.is_current_stream_capturing()"
affects, does_not, unknown = Concern.CONCERNS, Concern.DOES_NOT, Concern.UNKNOWN
qwen = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
captured = "./model -cc.cudagraph_mm_encoder=true"

EDITS = (
    Edit(
        "zeros while a graph is captured",
        "0.27.1",
        _OPERATOR,
        launched,
        rf"\1if {capturing}:\n\1    {zeros}\n\1\2",
        Verdict.FIXED,
    ),
    Edit(
        "zeros in any case",
        "0.20.0",
        _OPERATOR,
        launched,
        r'\1kwargs["out"] = torch.zeros_like(q)\n\1\2',
        Verdict.FIXED,
    ),
    Edit(
        "zeros on CUDA",
        "0.25.1",
        _OPERATOR,
        launched,
        rf"\1if current_platform.is_cuda():\n\1    {zeros}\n\1\2",
        Verdict.FIXED,
    ),
    Edit(
        "remedy cut out",
        "0.31.0",
        _OPERATOR,
        r"^( +if current_platform\.is_cuda\(\) and torch\.cuda\.is_current_stream_capturing\(\):\n)(?:.*\n){4}",
        r"\1        pass\n",
        Verdict.AFFECTED,
        runs=True,
    ),
    Edit(
        "zeros for large images",
        "0.28.0",
        _OPERATOR,
        launched,
        rf"\1if max_seqlen > 1024:\n\1    {zeros}\n\1\2",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "padded rows zeroed afterwards",
        "0.24.0",
        _OPERATOR,
        r"^( +)context_layer = einops\.rearrange\(output,",
        r"\1output = output.where(torch.arange(len(output), device=q.device)[:, None, None] < cu_seqlens[-1], 0)\n"
        r"\1context_layer = einops.rearrange(output,",
        Verdict.UNRECOGNISED,
        remedy=True,
    ),
    Edit(
        "the kernel is looked up once",
        "0.22.1",
        _OPERATOR,
        r"^( +)from vllm\.v1\.attention\.backends\.fa_utils import flash_attn_varlen_func\n",
        r"\1flash_attn_varlen_func = fa_utils.flash_attn_varlen_func\n",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "captured without a warm-up",
        "0.23.0",
        _MANAGER,
        r"^( +)output = self\.model\.encoder_cudagraph_forward\(\{\*\*values\}\)\n( +)output_buffer = torch",
        r"\1output_buffer = torch",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "no encoder is captured",
        "0.26.0",
        _RUNNER,
        r"vllm\.v1\.worker\.encoder_cudagraph import",
        "vllm.v1.worker.encoder_graphs import",
        Verdict.ABSENT,
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
