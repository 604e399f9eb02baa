"""Trials of c128a-stride: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.c128a_stride import _BACKEND

width = r"max_compressed_tokens=active_topk_width"
rows = (
    r"global_decode_buffer\.view\(-1\)\[\n +: num_decode_tokens \* max_compressed_tokens\n"
    r" +\]\.view\(num_decode_tokens, max_compressed_tokens\)"
)
by_length = r"^( +)(active_topk_width = min\()\n"
built = r"^( +)(global_decode, decode_lens, prefill_local = build_c128a_topk_metadata\()\n"
whole = "max_compressed_tokens=self.c128a_max_compressed"
packed = "global_decode_buffer.view(-1)[:num_decode_tokens * max_compressed_tokens].view(num_decode_tokens, -1)"
by_width = (
    "global_decode_buffer.view(-1)[: num_decode_tokens * max_compressed_tokens]"
    ".view(num_decode_tokens, max_compressed_tokens)"
)
v4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "compress_ratios": [0, 4, 128],
    "head_dim": 512,
}

EDITS = (
    Edit("width of the longest request", "0.27.1", _BACKEND, width, whole, Verdict.FIXED),
    Edit(
        "width of the batch, at least 256",
        "0.27.0",
        _BACKEND,
        width,
        "max_compressed_tokens=max(active_topk_width, 256)",
    ),
    Edit("rows are taken in another way", "0.27.1", _BACKEND, rows, packed),
    Edit("remedy cut out", "0.28.0", _BACKEND, r"global_decode_buffer\[:num_decode_tokens\]", by_width, Verdict.FIXED),
    Edit("remedy cut out, width too", "0.29.0", _BACKEND, r"global_decode_buffer\[:num_decode_tokens\]", packed),
    # Right elsewhere.
    Edit(
        "rows at the buffer's stride",
        "0.27.1",
        _BACKEND,
        rows,
        "global_decode_buffer[:num_decode_tokens, :max_compressed_tokens]",
        Verdict.FIXED,
        also=(
            (
                _BACKEND,
                r"^( +)global_decode_buffer,\n +max_compressed_tokens,\n",
                r"\1global_decode_buffer,\n\1global_decode_buffer.stride(0),\n",
            ),
        ),
    ),
    Edit(
        "the caller hands over the longest batch",
        "0.27.0",
        _BACKEND,
        r"self\._build_c128a_metadata\(cm, ",
        "self._build_c128a_metadata(replace(cm, max_seq_len=self.max_model_len), ",
    ),
    Edit(
        "the batch is as long as any",
        "0.27.1",
        _BACKEND,
        by_length,
        r"\1cm = replace(cm, max_seq_len=self.model_config.max_model_len)\n\1\2\n",
    ),
    Edit(
        "width of the longest request in decodes",
        "0.27.1",
        _BACKEND,
        built,
        r"\1if num_prefill_tokens == 0:\n\1    active_topk_width = self.c128a_max_compressed\n\1\2\n",
    ),
    Edit("width chosen once", "0.27.0", _BACKEND, width, "max_compressed_tokens=self.topk_width"),
    # Wrong.
    Edit(
        "width of the longest request in prefills",
        "0.27.0",
        _BACKEND,
        built,
        r"\1if num_decode_tokens == 0:\n\1    active_topk_width = self.c128a_max_compressed\n\1\2\n",
    ),
    Edit(
        "width of the longest request in debug runs",
        "0.27.1",
        _BACKEND,
        width,
        "max_compressed_tokens=active_topk_width if __debug__ else self.c128a_max_compressed",
    ),
    Edit(
        "rows packed on all devices but one",
        "0.31.0",
        _BACKEND,
        r"global_decode_buffer\[:num_decode_tokens, :max_compressed_tokens\]",
        packed,
    ),
    Edit(
        "the buffer is packed first",
        "0.30.0",
        _BACKEND,
        r"^( +)(num_prefill_tokens = num_tokens - num_decode_tokens)\n",
        r"\1\2\n\1global_decode_buffer = global_decode_buffer.view(-1, max_compressed_tokens)\n",
    ),
    Edit(
        "rows are copied where they end up",
        "0.33.0",
        _BACKEND,
        r"global_decode\.view\(\n",
        "global_decode.contiguous().view(\n",
    ),
    Edit(
        "rows are cut to the batch behind",
        "0.24.0",
        _BACKEND,
        r"global_decode\.view\(\n",
        "global_decode[:, : cm.max_seq_len // self.compress_ratio].contiguous().view(\n",
    ),
    Edit(
        "another builder has the backend",
        "0.28.0",
        _BACKEND,
        r"return DeepseekV4FlashMLAMetadataBuilder$",
        "return PackedFlashMLAMetadataBuilder",
    ),
)

SERVED = (
    Served("0.27.0", "./model", affects, "compress_ratio of 128", model=v4),
    Served("0.27.1", "./model --max-model-len 131072", affects, "compress_ratio of 128", model=v4),
    Served("0.27.0", "./model --max-model-len 16384", does_not, "one width", model=v4),
    Served("0.27.0", "./model -cc.cudagraph_mode=PIECEWISE", does_not, "PIECEWISE", model=v4),
    Served("0.27.0", "./v4", does_not, "no layer of DeepseekV4ForCausalLM"),
    Served("0.27.0", "./llama", does_not, "no latent attention"),
    Served("0.27.0", "deepseek-ai/DeepSeek-V4", unknown, "config.json"),
)
