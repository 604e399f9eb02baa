"""Slices of what several remedies take for granted: how long a metadata builder lives, and whose block 0 is."""

from __future__ import annotations

from vllm_graphfix.fix import Slice, Verdict

_MADE = "initialize_metadata_builders create_metadata_builders metadata_builders"
BUILDERS_STAY = tuple(
    Slice(f"vllm/v1/worker/{path}.py", name, _MADE, Verdict.FIXED)
    for path, name in (
        ("gpu_model_runner", "GPUModelRunner"),
        ("gpu/model_runner", "GPUModelRunner"),
        ("gpu_worker", "Worker"),
    )
)
"""Graphs read the buffers of the builders that made metadata for their capture: no others may come after it."""
AS_BUILT = "build_attn_metadata"
"""Model runner V2 hands on the very metadata that a builder made, not copies of its buffers."""
NULL_BLOCK = Slice("vllm/v1/core/block_pool.py", "BlockPool.__init__", "null_block free_block_queue")
"""Block 0 belongs to no request,"""
TAKEN_FIRST = "FreeKVCacheBlockQueue"
"""since it is the first that this queue hands out."""
