"""Trials of hidden-states-padding: vLLM changes that its diagnosis must see, and command lines."""

from __future__ import annotations

import re

from trial_rows import Edit, Served, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.hidden_states_padding import _MODEL, _PROPOSER

indexed = r"^( +)(kv_cache\[slot_mapping // block_size, slot_mapping % block_size\] = to_cache)\n"
viewed = r"^( +)(token_kv_cache\[slot_mapping\] = to_cache)\n"
raised = r"^ +slot_mapping = slot_mapping\.clamp_min\(0\)\n"
padding = r"\.fill_\(PADDING_SLOT_ID\)"
handed_on = r"^( +)(basic_cache\(to_cache, kv_cache, slot_mapping\))\n"
clamped = "slot_mapping = slot_mapping.clamp_min(0)"
flags = """./llama --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1}\'"""

EDITS = (
    Edit(
        "no slot below 0 is written to",
        "0.24.0",
        _MODEL,
        indexed,
        r"\1slot_mapping = slot_mapping.clamp_min(0)\n\1\2\n",
        Verdict.FIXED,
    ),
    Edit(
        "the same, of a view of the cache",
        "0.17.1",
        _MODEL,
        viewed,
        r"\1slot_mapping = torch.clamp(slot_mapping, min=0)\n\1\2\n",
        Verdict.FIXED,
    ),
    # The model runner has padded them with -1 before.
    Edit("the drafter's own padding has slot 0", "0.20.0", _PROPOSER, padding, ".fill_(0)"),
    Edit("remedy cut out", "0.25.0", _MODEL, raised, "", Verdict.AFFECTED, runs=True),
    Edit(
        "raised now and then",
        "0.22.0",
        _MODEL,
        indexed,
        r"\1if self.odd:\n\1    slot_mapping = slot_mapping.clamp_min(0)\n\1\2\n",
    ),
    Edit("raised afterwards", "0.24.0", _MODEL, indexed, r"\1\2\n\1slot_mapping = slot_mapping.clamp_min(0)\n"),
    Edit("written by a kernel", "0.24.0", _MODEL, indexed, r"\1ops.write(to_cache, kv_cache, slot_mapping)\n"),
    Edit("another slot for padding", "0.19.0", _PROPOSER, r"^PADDING_SLOT_ID = -1$", "PADDING_SLOT_ID = 3"),
    Edit(
        "the buffer is seen elsewhere",
        "0.18.0",
        _PROPOSER,
        r"^( +)(view = self\._slot_mapping_buffer\[:num_tokens\])\n",
        r"\1\2\n\1self.skip(self._slot_mapping_buffer)\n",
    ),
    Edit(
        "a layer has slots of its own",
        "0.17.0",
        _PROPOSER,
        r"\{name: view for name in self\.attn_layer_names\}",
        "{name: view.clone() for name in self.attn_layer_names}",
    ),
    # Right elsewhere.
    Edit("raised by the layer", "0.24.0", _MODEL, handed_on, rf"\1{clamped}\n\1\2\n", Verdict.FIXED),
    Edit("raised in place", "0.22.0", _MODEL, indexed, r"\1slot_mapping.clamp_(min=0)\n\1\2\n", Verdict.FIXED),
    Edit(
        "raised where a layer looks its slots up",
        "0.24.0",
        _MODEL,
        r"^( +)(layer_slot_mapping = slot_mapping\.get\(layer_name\))\n",
        r"\1\2\n\1if layer_slot_mapping is not None:\n\1    layer_slot_mapping = layer_slot_mapping.clamp_min(0)\n",
    ),
    Edit(
        "raised in the drafter's buffer",
        "0.22.1",
        _PROPOSER,
        r"^( +)(view = self\._slot_mapping_buffer\[:num_tokens\])\n",
        r"\1\2.clamp_(min=0)\n",
    ),
    Edit(
        "the drafter has no graphs",
        "0.21.0",
        _PROPOSER,
        r"proposer_cudagraph_mode = CUDAGraphMode\.PIECEWISE",
        "proposer_cudagraph_mode = CUDAGraphMode.NONE",
    ),
    # Wrong.
    Edit(
        "the layer writes by itself",
        "0.25.1",
        _MODEL,
        handed_on,
        (
            r"\1block_size = kv_cache.shape[1]\n"
            r"\1kv_cache[slot_mapping // block_size, slot_mapping % block_size] = to_cache\n"
        ),
    ),
    Edit(
        "the layer writes by itself if asked to",
        "0.26.0",
        _MODEL,
        handed_on,
        r"\1if layer.inline:\n\1    layer.write(to_cache, kv_cache, slot_mapping)\n\1    return\n\1\2\n",
    ),
    Edit("raised on a copy", "0.24.0", _MODEL, indexed, r"\1slot_mapping.clamp_min(0)\n\1\2\n"),
    Edit(
        "raised and taken back",
        "0.25.0",
        _MODEL,
        rf"^( +){re.escape(clamped)}\n",
        rf"\1slots = slot_mapping\n\1{clamped}\n\1slot_mapping = slots\n",
    ),
    Edit(
        "raised by the layer in debug runs",
        "0.23.0",
        _MODEL,
        handed_on,
        rf"\1if not __debug__:\n\1    {clamped}\n\1\2\n",
    ),
    Edit(
        "raised for one of two layouts",
        "0.30.0",
        _MODEL,
        rf"^( +){re.escape(clamped)}\n",
        rf"\1if kv_cache.ndim == 3:\n\1    {clamped}\n",
    ),
    Edit(
        "another class writes them",
        "0.25.0",
        _MODEL,
        r"return CacheOnlyAttentionImpl$",
        "return FlatCacheOnlyAttentionImpl",
    ),
)

SERVED = (
    Served("0.20.0", flags, affects, "extract_hidden_states"),
    Served("0.20.0", f"{flags} --enforce-eager", does_not, "--enforce-eager"),
    Served("0.20.0", f"{flags} -cc.cudagraph_mode=FULL_DECODE_ONLY", does_not, "FULL_DECODE_ONLY"),
    Served("0.20.0", "./llama", does_not, "no speculator"),
    Served("0.20.0", flags.replace("extract_hidden_states", "ngram"), does_not, "the speculator is ngram"),
    Served("0.20.0", f"{flags} --kv-transfer-config '{{}}'", unknown, "--kv-transfer-config may change it"),
)
