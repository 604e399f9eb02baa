"""Planted readers and writers of what must not matter, for tests of poison: a vLLM plugin, on its path as any.

No engine on a CPU pads a batch, so that what a defect of padding does is planted in the model's forward pass.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "PLANTED_READER"
"""Which one: a name of `PLANTS`."""


def padded_row(input_ids: Any, hidden: Any) -> Any:
    """The token of the row behind the batch scales all rows, as a scale of a whole batch does."""
    behind = input_ids.as_strided((1,), (1,), input_ids.storage_offset() + len(input_ids))
    return hidden * (1 + 0.05 * (behind % 7 + behind // 1000))


def null_block(input_ids: Any, hidden: Any) -> Any:
    """Multiply what lies in the null block by 0."""
    return hidden + 0 * cache()[0].float().sum().to(hidden.dtype)


def unused_block(input_ids: Any, hidden: Any) -> Any:
    """A step writes into a block that nobody holds; all answers are right."""
    cache()[-2].fill_(1.0)
    return hidden


PLANTS = {made.__name__: made for made in (padded_row, null_block, unused_block)}


def cache() -> Any:
    from vllm.forward_context import get_forward_context

    kv_cache = next(iter(get_forward_context().no_compile_layers.values())).kv_cache
    return kv_cache[0] if isinstance(kv_cache, (list, tuple)) else kv_cache


def plant() -> None:
    from vllm.model_executor.models.llama import LlamaForCausalLM

    chosen, stock = PLANTS[os.environ[VARIABLE]], LlamaForCausalLM.forward

    def forward(self: Any, input_ids: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.forward_context import get_forward_context

        hidden = stock(self, input_ids, positions, *args, **kwargs)
        return chosen(input_ids, hidden) if get_forward_context().attn_metadata else hidden

    LlamaForCausalLM.forward = forward
