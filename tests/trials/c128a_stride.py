"""Trials of c128a-stride: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.c128a_stride import _BACKEND

width = r"max_compressed_tokens=active_topk_width"
rows = (
    r"global_decode_buffer\.view\(-1\)\[\n +: num_decode_tokens \* max_compressed_tokens\n"
    r" +\]\.view\(num_decode_tokens, max_compressed_tokens\)"
)
whole = "max_compressed_tokens=self.c128a_max_compressed"
packed = "global_decode_buffer.view(-1)[:num_decode_tokens * max_compressed_tokens].view(num_decode_tokens, -1)"
v4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "compress_ratios": [0, 4, 128],
    "head_dim": 512,
}
affects, does_not = Concern.CONCERNS, Concern.DOES_NOT

EDITS = (
    Edit("width of the longest request", "0.27.1", _BACKEND, width, whole, Verdict.FIXED),
    Edit(
        "width of the batch, at least 256",
        "0.27.0",
        _BACKEND,
        width,
        "max_compressed_tokens=max(active_topk_width, 256)",
        Verdict.UNRECOGNISED,
    ),
    Edit("rows are taken in another way", "0.27.1", _BACKEND, rows, packed, Verdict.UNRECOGNISED),
    Edit(
        "remedy cut out",
        "0.28.0",
        _BACKEND,
        r"global_decode_buffer\[:num_decode_tokens\]",
        packed,
        Verdict.FIXED,
    ),
    Edit(
        "remedy cut out, width too",
        "0.29.0",
        _BACKEND,
        r"global_decode_buffer\[:num_decode_tokens\]",
        packed,
        Verdict.UNRECOGNISED,
    ),
)

SERVED = (
    Served("0.27.0", "./model", affects, "compress_ratio of 128", model=v4),
    Served("0.27.1", "./model --max-model-len 131072", affects, "compress_ratio of 128", model=v4),
    Served("0.27.0", "./model --max-model-len 16384", does_not, "one width", model=v4),
    Served("0.27.0", "./model -cc.cudagraph_mode=PIECEWISE", does_not, "PIECEWISE", model=v4),
    Served("0.27.0", "./v4", does_not, "no layer of DeepseekV4ForCausalLM"),
    Served("0.27.0", "./llama", does_not, "no latent attention"),
    Served("0.27.0", "deepseek-ai/DeepSeek-V4", Concern.UNKNOWN, "config.json"),
)
