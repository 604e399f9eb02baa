"""The cache groups of an engine whose blocks can be marked, and the engines that have none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix.shadow.layers import block_and_token, caches_of

if TYPE_CHECKING:
    from torch import Tensor

_WRITTEN_ONCE = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
"""vLLM's classes of caches whose blocks are written once, a slot for each token."""
_OTHERS = (
    "MambaSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "SlidingWindowMLASpec",
    "SinkFullAttentionSpec",
    "CircularBufferSpec",
    "HiddenStateCacheSpec",
    "RSWASpec",
)
"""Classes whose blocks come from the same pool, and are not marked."""


class LayerCache(NamedTuple):
    """The cache of one layer."""

    layer: str
    memory: Tensor
    """Its bytes as integers, so that NaN equals itself."""
    axis: int
    """The axis of blocks."""
    parts: int
    """The number of kernel blocks that make up one of the scheduler's."""

    @property
    def nbytes(self) -> int:
        """Bytes of one block of the scheduler."""
        return self.parts * self.memory.select(self.axis, 0).numel() * self.memory.element_size()


class Group(NamedTuple):
    """A cache group whose blocks are marked."""

    tokens: int
    """The tokens of a block, on all ranks of context parallelism together."""
    caches: tuple[LayerCache, ...]


class UnsafeCacheError(Exception):
    """Blocks of this engine cannot be marked; the message says why."""


def unsafe(config: Any) -> str | None:
    """Return why no block of an engine with this `VllmConfig` can be marked; None if nothing is known against it."""
    parallel = config.parallel_config
    if getattr(config, "kv_transfer_config", None) is not None:
        return "a KV connector writes to blocks without a word to the model's worker"
    if getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False):
        return "micro-batches write on streams of their own"
    if getattr(parallel, "enable_elastic_ep", False):
        return "elastic expert parallelism makes the cache anew"
    if getattr(parallel, "distributed_executor_backend", None) == "ray":
        return "Ray's executor has steps run past the worker, which is told of blocks"
    if getattr(config.model_config, "is_diffusion", False):
        return "a diffusion model writes the same tokens again and again"
    scheduler = getattr(config.scheduler_config, "scheduler_cls", None)
    name = scheduler if isinstance(scheduler, str) else getattr(scheduler, "__module__", "vllm.")
    if not name.startswith("vllm."):
        return f"blocks are given out by a scheduler of somebody else's ({name})"
    return None


def groups(worker: Any) -> dict[int, Group]:
    """Return the cache groups of *worker* whose blocks can be marked, by number.

    Raises UnsafeCacheError if there are none, or if a cache is of an unknown class.
    """
    config, runner = worker.vllm_config, worker.model_runner
    kv, layers = runner.kv_cache_config, config.compilation_config.static_forward_context
    parallel = config.parallel_config
    ranks = int(getattr(parallel, "decode_context_parallel_size", 1) or 1)
    ranks *= int(getattr(parallel, "prefill_context_parallel_size", 1) or 1)
    by_number: dict[int, Group] = {}
    unmarked: list[str] = []
    for number, group in enumerate(kv.kv_cache_groups):
        specs = _specs(group)
        names = {type(spec).__name__ for spec in specs.values()}
        if unknown := names - {*_WRITTEN_ONCE, *_OTHERS}:
            raise UnsafeCacheError(f"it is not known how blocks of a {min(unknown)} are used")
        if not names <= {*_WRITTEN_ONCE} or not all(map(_is_plain, specs.values())):
            unmarked += sorted(names)
            continue
        caches: list[LayerCache] = []
        seen: set[int] = set()
        for layer, spec in specs.items():
            for cache in caches_of(layers[layer]) if layer in layers else ():
                made = _layer_cache(layer, layers[layer], cache, spec.block_size, kv.num_blocks)
                if made is not None and cache.data_ptr() not in seen:  # layers may share one
                    seen.add(cache.data_ptr())
                    caches.append(made)
        if caches:
            by_number[number] = Group(group.kv_cache_spec.block_size * ranks, tuple(caches))
        else:
            unmarked += [f"{name} of an unknown shape" for name in sorted(names)]
    if not by_number:
        raise UnsafeCacheError(
            f"it has no cache whose blocks are written once ({', '.join(unmarked) or 'none at all'})"
        )
    return by_number


def _specs(group: Any) -> dict[str, Any]:
    """Return the specification of each layer of a cache group."""
    spec = group.kv_cache_spec
    each = getattr(spec, "kv_cache_specs", None)
    return dict(each) if isinstance(each, dict) else dict.fromkeys(group.layer_names, spec)


def _is_plain(spec: Any) -> bool:
    """Tell whether a block has a slot for each of its tokens, computed once and from tokens before it alone."""
    return (
        getattr(spec, "tokens_per_state", 1) == 1
        and getattr(spec, "compress_ratio", 1) in (None, 1)
        and not getattr(spec, "non_causal", False)
        and not getattr(spec, "non_causal_multi_token_decode", False)
    )


def _layer_cache(name: str, layer: Any, cache: Tensor, tokens: int, blocks: int) -> LayerCache | None:
    """Locate *blocks* blocks of *tokens* tokens in *cache*; None where their place is not known."""
    import torch

    axes = block_and_token(layer, cache)
    if axes is None:
        return None
    parts, rest = divmod(cache.shape[axes[0]], blocks)
    if rest or parts * cache.shape[axes[1]] != tokens:
        return None
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return LayerCache(name, cache.view(integers[cache.element_size()]), axes[0], parts)


def slack_and_doubt(config: Any) -> tuple[int, int]:
    """Return the tokens at a request's end that may be computed again, and those counted that may have been rejected.

    Without drafts both are 0. With asynchronous scheduling a step is made before the drafts of those under way are
    verified.
    """
    drafts = int(getattr(getattr(config, "speculative_config", None), "num_speculative_tokens", 0) or 0)
    if not drafts:
        return 0, 0
    under_way = int(config.parallel_config.pipeline_parallel_size) + 1
    if not getattr(config.scheduler_config, "async_scheduling", False):
        under_way -= 1
    return (drafts + 1) * (under_way + 1), drafts * under_way
