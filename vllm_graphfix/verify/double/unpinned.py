"""vLLM's classes without pinned memory, which needs CUDA."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

from vllm_graphfix.verify.double.arguments import supported_kwargs


@contextmanager
def unpinned() -> Iterator[None]:
    """For the block, nothing is pinned that vLLM pins unasked: from 0.21 on, a batch with prefills; from 0.25, more."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("vllm.") and vars(module).get("PIN_MEMORY"):
                stack.enter_context(mock.patch.object(module, "PIN_MEMORY", False))
            if name.startswith("vllm.") and "is_pin_memory_available" in vars(module):
                stack.enter_context(mock.patch.object(module, "is_pin_memory_available", return_value=False))
        builders = sys.modules.get("vllm.v1.attention.backends.mamba_attn")
        if builders is not None and hasattr(builders, "async_tensor_h2d"):
            copy = builders.async_tensor_h2d
            plain = partial(copy, **supported_kwargs(copy, {"pin_memory": False}))
            stack.enter_context(mock.patch.object(builders, "async_tensor_h2d", plain))
        yield
