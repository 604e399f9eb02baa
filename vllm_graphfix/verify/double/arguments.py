"""Arguments of vLLM's functions, of which one release knows more than another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def known_to(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of *values* that *function* has a parameter for."""
    return {name: values[name] for name in inspect.signature(function).parameters if name in values}


def input_batch(
    requests: int, longest: int, tokens: int, block_sizes: Sequence[int], device: Any, vocabulary: int = 8
) -> Any:
    """Model runner V1's batch of *requests* of *longest* tokens each.

    It has a group of layers for each of *block_sizes*.
    """
    from vllm.v1.worker.gpu_input_batch import InputBatch

    given = {
        "max_num_reqs": requests,
        "max_model_len": longest,
        "max_num_batched_tokens": tokens,
        "device": device,
        "pin_memory": False,
        "vocab_size": vocabulary,
        "block_sizes": list(block_sizes),
        "kernel_block_sizes": list(block_sizes),
        "max_num_blocks_per_req": [-(-longest // size) for size in block_sizes],
    }
    return InputBatch(**known_to(InputBatch, given))
