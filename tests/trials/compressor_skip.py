"""Trials of compressor-skip: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.compressor_skip import _COMPRESSOR

by_mode = r"forward_context\.cudagraph_runtime_mode != CUDAGraphMode\.FULL"
by_capture = "not torch.cuda.is_current_stream_capturing()"
left_out = (
    rf"(?s)^ {{8}}if \(\n {{12}}current_platform\.is_cuda\(\)\n(?:(?!\n {{8}}\S).)*?{by_mode}.*?\n {{12}}return\n"
)
asked = r"(?s)^ {12}c128_boundary=\(.*?\n {12}\),\n"
v4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "compress_ratios": [0, 4, 128],
    "head_dim": 512,
}
affects, does_not, unknown = Concern.CONCERNS, Concern.DOES_NOT, Concern.UNKNOWN
v1, v2 = "VLLM_USE_V2_MODEL_RUNNER=0 ", "VLLM_USE_V2_MODEL_RUNNER=1 "
drafts = """ --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'"""

EDITS = (
    Edit("capture is asked", "0.32.0", _COMPRESSOR, by_mode, by_capture, Verdict.FIXED),
    Edit("capture is asked, in the first release", "0.27.0", _COMPRESSOR, by_mode, by_capture, Verdict.FIXED),
    Edit("no step leaves entries out", "0.30.0", _COMPRESSOR, left_out, "", Verdict.FIXED),
    Edit("the builder says nothing", "0.29.0", _COMPRESSOR, asked, "", Verdict.FIXED),
    Edit(
        "remedy cut out",
        "0.33.0",
        _COMPRESSOR,
        r"not torch\.cuda\.is_current_stream_capturing\(\)",
        "forward_context.cudagraph_runtime_mode != CUDAGraphMode.FULL",
        Verdict.AFFECTED,
        also=((_COMPRESSOR, r"import VllmConfig,", "import CUDAGraphMode, VllmConfig,"),),
        runs=True,
    ),
    Edit(
        "the mode is asked in another way",
        "0.32.0",
        _COMPRESSOR,
        by_mode,
        "not forward_context.cudagraph_runtime_mode.has_full_cudagraphs()",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "groups are completed by another rule",
        "0.31.0",
        _COMPRESSOR,
        r"seq_lens_cpu = metadata\.seq_lens_cpu_upper_bound",
        "seq_lens_cpu = metadata.seq_lens.cpu()",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "the write is under a condition",
        "0.26.0",
        _COMPRESSOR,
        r"^( {8})(compress_norm_rope_store_fn\((?:.|\n)*?\n {8}\)\n)",
        r"\1if state_metadata.completes_a_group:\n\1    \2",
        Verdict.UNRECOGNISED,
    ),
)

SERVED = (
    Served("0.32.0", f"{v2}./model", affects, "compress_ratio of 128", model=v4),
    Served("0.30.0", f"{v2}./model -cc.cudagraph_mode=PIECEWISE", affects, "PIECEWISE", model=v4),
    Served("0.32.0", "./model", unknown, "model runner that vLLM logs", model=v4),
    Served("0.32.0", f"{v1}./model", does_not, "model runner V1", model=v4),
    Served("0.32.0", f"{v1}./model --enable-dbo", affects, "--enable-dbo", model=v4),
    Served("0.31.0", f"{v1}./model --enable-dbo -cc.cudagraph_mode=PIECEWISE", does_not, "PIECEWISE", model=v4),
    Served("0.31.0", f"{v2}./model --enforce-eager", does_not, "--enforce-eager", model=v4),
    Served("0.32.0", f"{v2}./model{drafts}", unknown, "--async-scheduling", model=v4),
    Served("0.32.0", f"{v2}./model{drafts} --async-scheduling", does_not, "--async-scheduling", model=v4),
    Served("0.32.0", f"{v2}./model{drafts} --no-async-scheduling", unknown, "logs", model=v4),
    Served("0.28.0", f"{v2}./model", does_not, "--enable-dbo is not given", model=v4),
    Served("0.27.1", f"{v1}./model --enable-dbo", affects, "--enable-dbo", model=v4),
    Served("0.29.0", f"{v2}./model --enable-dbo", does_not, "model runner V2", model=v4),
    Served("0.32.0", f"{v2}./v4", does_not, "no layer of DeepseekV4ForCausalLM"),
    Served("0.32.0", f"{v2}./llama", does_not, "no latent attention"),
    Served("0.32.0", f"{v2}deepseek-ai/DeepSeek-V4", unknown, "config.json"),
)
