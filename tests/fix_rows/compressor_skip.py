"""Trials of compressor-skip: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import after, before, both, swap
from trial_rows import LOOKALIKE, REMEDY, Edit, Served, Wording, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.compressor_skip import _ATTENTION, _BATCH, _COMPRESSOR

by_mode = r"forward_context\.cudagraph_runtime_mode != CUDAGraphMode\.FULL"
by_capture = "not torch.cuda.is_current_stream_capturing()"
skipping = (
    rf"(?s)^ {{8}}if \(\n {{12}}current_platform\.is_cuda\(\)\n(?:(?!\n {{8}}\S).)*?{by_mode}.*?\n {{12}}return\n"
)
boundary = r"(?s)^ {12}c128_boundary=\(.*?\n {12}\),\n"
v4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "compress_ratios": [0, 4, 128],
    "head_dim": 512,
}
v1, v2 = "VLLM_USE_V2_MODEL_RUNNER=0 ", "VLLM_USE_V2_MODEL_RUNNER=1 "
drafts = """ --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'"""

EDITS = (
    Edit("capture is asked", "0.32.0", _COMPRESSOR, by_mode, by_capture, Verdict.FIXED),
    Edit("capture is asked, in the first release", "0.27.0", _COMPRESSOR, by_mode, by_capture, Verdict.FIXED),
    Edit("no step leaves entries out", "0.30.0", _COMPRESSOR, skipping, "", Verdict.FIXED),
    Edit("the builder says nothing", "0.29.0", _COMPRESSOR, boundary, "", Verdict.FIXED),
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
    ),
    Edit(
        "groups are completed by another rule",
        "0.31.0",
        _COMPRESSOR,
        r"seq_lens_cpu = metadata\.seq_lens_cpu_upper_bound",
        "seq_lens_cpu = metadata.seq_lens.cpu()",
    ),
    Edit(
        "the write is under a condition",
        "0.26.0",
        _COMPRESSOR,
        r"^( {8})(compress_norm_rope_store_fn\((?:.|\n)*?\n {8}\)\n)",
        r"\1if state_metadata.completes_a_group:\n\1    \2",
    ),
    Edit(
        "layers have a compressor of another class",
        "0.33.0",
        _ATTENTION,
        r"self\.compressor = DeepseekCompressor\(",
        "self.compressor = LeanCompressor(",
    ),
)

condition = (
    r"^ {8}if \(\n {12}current_platform\.is_cuda\(\)\n {12}and self\.head_dim == 512\n"
    r" {12}and self\.compress_ratio == 128\n"
)
marked = r"state_metadata\.c128_boundary is False"
known_in_time = r"if self\.block_size == 8 and not async_spec_decode"

WORDINGS = (
    Wording(
        REMEDY,
        "0.32.0",
        _COMPRESSOR,
        {
            "by mode and by capture": swap(by_mode, rf"\g<0>\n            and {by_capture}"),
            "by capture, on a local": both(
                swap(
                    condition,
                    r"        completes = state_metadata.c128_boundary\n"
                    r"        if torch.cuda.is_current_stream_capturing():\n            completes = None\n\g<0>",
                ),
                swap(marked, "completes is False"),
            ),
            "captures go another way": swap(
                condition,
                "        if torch.cuda.is_current_stream_capturing():\n            pass\n        elif (\n"
                "            current_platform.is_cuda()\n            and self.head_dim == 512\n"
                "            and self.compress_ratio == 128\n",
            ),
            "in the metadata of captures": before(
                r"def build\(\n",
                "def build_for_cudagraph_capture(self, common_attn_metadata):",
                "    metadata = self.build(0, common_attn_metadata)",
                "    metadata.c128_boundary = None",
                "    return metadata",
                "",
            ),
            "no layer asks": swap(marked, "self.compress_ratio < 4 and state_metadata.c128_boundary is False"),
            "the builder never knows": swap(known_in_time, "if False"),
        },
    ),
    Wording(
        LOOKALIKE,
        "0.32.0",
        _COMPRESSOR,
        {
            "capture is asked when metadata are built": swap(known_in_time, rf"\g<0> and {by_capture}"),
            "capture is asked when layers are made": both(
                after(
                    r"self\.compress_ratio = compress_ratio",
                    "self.is_captured = torch.cuda.is_current_stream_capturing()",
                ),
                swap(by_mode, "not self.is_captured"),
            ),
            "capture is asked of some layers": swap(
                by_mode, "not (self.use_fp4_cache and torch.cuda.is_current_stream_capturing())"
            ),
            "capture is asked, and the mode before it": swap(
                condition,
                rf"        if {by_capture} and forward_context.cudagraph_runtime_mode != CUDAGraphMode.FULL:\n"
                r"            pass\n\g<0>",
            ),
            "capture is asked in a helper that nobody calls": before(
                r"def forward\(\n +self,\n +# \[num_tokens, 2",
                "def _skips(self, state_metadata):",
                f"    return {by_capture} and state_metadata.c128_boundary is False",
                "",
            ),
            "piecewise graphs alone": swap(
                by_mode, "forward_context.cudagraph_runtime_mode not in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)"
            ),
            "model runner V2's dummy batches alone": {
                _BATCH: swap(
                    r"seq_lens_cpu_upper_bound = torch\.from_numpy\(num_scheduled_tokens\.copy\(\)\)",
                    "seq_lens_cpu_upper_bound = torch.from_numpy(num_scheduled_tokens.copy()).fill_(128)",
                )
            },
        },
    ),
    Wording(
        LOOKALIKE,
        "0.33.0",
        _COMPRESSOR,
        {
            "skipped before capture is asked": before(
                r"# A captured graph would", "if state_metadata.c128_boundary is False:", "    return"
            ),
            "skipped where entries are written": before(
                r"token_to_req_indices = state_metadata\.token_to_req_indices\n",
                "if state_metadata.c128_boundary is False:",
                "    return",
            ),
        },
    ),
)

SERVED = (
    Served("0.32.0", f"{v2}./model", affects, "compress_ratio of 128", model=v4),
    Served("0.30.0", f"{v2}./model -cc.cudagraph_mode=PIECEWISE", affects, "PIECEWISE", model=v4),
    Served("0.32.0", "./model", affects, "model runner V2", model=v4),
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
