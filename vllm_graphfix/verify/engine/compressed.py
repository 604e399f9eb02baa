"""Probes of the entries of DeepSeek V4's groups of 128 tokens: unwritten entries, and foreign ones that are read."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.verify.engine.probes import CountedInGraphs

if TYPE_CHECKING:
    from vllm import LLM

_RATIO = 128


class _Counted(CountedInGraphs):
    def in_the_engine(self, llm: LLM) -> None:
        self._counts.zero_()  # without the dummy batches of the engine's start
        super().in_the_engine(llm)


class UnwrittenEntries(_Counted):
    """Entries of groups that a step completes whose block in the cache does not change, and all completed entries."""

    name = "unwritten-entries"

    def count_into(self, counts: Any) -> None:
        import torch
        from vllm.forward_context import get_forward_context
        from vllm.models.deepseek_v4.compressor import DeepseekCompressor

        forward = DeepseekCompressor.forward

        @functools.wraps(forward)
        def counted(layer: Any, *args: Any, **kwargs: Any) -> Any:
            metadata = get_forward_context().attn_metadata
            if layer.compress_ratio != _RATIO or not isinstance(metadata, dict):
                return forward(layer, *args, **kwargs)
            cache = layer._static_forward_context[layer.k_cache_prefix].kv_cache
            slots = metadata[layer.k_cache_prefix].slot_mapping  # -1 but for the last token of a group
            blocks = slots.clamp(min=0) // cache.shape[1]
            before = cache.index_select(0, blocks)
            result = forward(layer, *args, **kwargs)
            same = (cache.index_select(0, blocks) == before).flatten(1).all(1)
            complete = slots >= 0
            counts.add_(torch.stack([(complete & same).sum(), complete.sum()]))
            return result

        DeepseekCompressor.forward = counted


class ForeignSlots(_Counted):
    """Rows of a decode batch with a slot that is not their request's, and all rows with slots."""

    name = "foreign-slots"

    def count_into(self, counts: Any) -> None:
        import torch
        from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

        decode = DeepseekV4FlashMLAAttention._forward_decode

        @functools.wraps(decode)
        def counted(
            layer: Any, q: Any, kv_cache: Any, swa_metadata: Any, attn_metadata: Any, *rest: Any, **more: Any
        ) -> Any:
            if layer.compress_ratio == _RATIO:
                metadata = attn_metadata
                rows = metadata.c128a_global_decode_topk_indices.squeeze(1)
                lengths = metadata.c128a_decode_topk_lens.unsqueeze(1)
                in_a_block = metadata.block_size // _RATIO
                entries = torch.arange(rows.shape[1], device=rows.device)
                requests = metadata.req_id_per_token[: len(rows)].long()
                columns = (entries // in_a_block).clamp(max=metadata.block_table.shape[1] - 1)
                own = metadata.block_table[requests][:, columns] * in_a_block + entries % in_a_block
                foreign = (rows != own) & (entries < lengths)
                counts.add_(torch.stack([foreign.any(1).sum(), (lengths > 0).sum()]))
            return decode(layer, q, kv_cache, swa_metadata, attn_metadata, *rest, **more)

        DeepseekV4FlashMLAAttention._forward_decode = counted
