"""Premises of several remedies, as slices: metadata builders outlive the capture, and block 0 belongs to no request."""

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
"""Graphs read the buffers of the builders of their capture, so builders must not be made again after it."""
AS_BUILT = "build_attn_metadata"
"""The function by which model runner V2 passes on a builder's metadata without copying its buffers."""
NULL_BLOCK = Slice("vllm/v1/core/block_pool.py", "BlockPool.__init__", "null_block free_block_queue")
"""Block 0, the first of the free blocks, is taken as the null block and never given to a request."""
TAKEN_FIRST = "FreeKVCacheBlockQueue"
"""The queue whose first block is block 0."""
