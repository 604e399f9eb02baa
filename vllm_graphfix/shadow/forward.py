"""One forward pass as vLLM's forward context describes it: what a second one would read and write. And engines where there must be none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_graphfix.shadow.check import Step
from vllm_graphfix.shadow.layers import recurrent_rows, unknown_cache, written

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_graphfix.shadow.verdict import Graph

_LARGEST_INPUT = 64 << 20
"""Bytes of a tensor among the inputs that is copied; larger ones are workspaces, which a pass fills before it reads them."""


def unsafe(config: Any) -> str | None:
    """Why no step of an engine with this `VllmConfig` may run twice; None if nothing is known against it."""
    parallel = config.parallel_config
    if getattr(config, "kv_transfer_config", None) is not None:
        return "a KV connector takes each layer's cache while a forward pass runs, and would get it twice"
    if getattr(parallel, "data_parallel_size", 1) > 1 and getattr(parallel, "is_moe_model", True) is not False:
        return "data-parallel ranks of a mixture of experts run collectives together in a forward pass, and are not at the same step"
    if getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False):
        return "micro-batches overlap in a forward pass, on threads of their own"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "ranks of prefill context parallelism are in no group that a check can ask"
    if getattr(parallel, "enable_eplb", False):
        return "each forward pass counts the load of experts, which would be counted twice"
    if getattr(parallel, "enable_elastic_ep", False):
        return "ranks come and go"
    if getattr(config.cache_config, "use_replayssm", False):
        return "ReplaySSM keeps recurrent state in a form that nobody has looked at"
    return None


class UnsafeError(Exception):
    """No step of this model may run twice; the message says why."""


class Pass:
    """A forward pass in *context*, vLLM's `ForwardContext`, with the arguments *given* to the model.

    Raises UnsafeError for a model with a cache that a step cannot write twice.
    """

    def __init__(self, context: Any, config: Any, given: object) -> None:
        self._context = context
        self._block_size = int(config.cache_config.block_size)
        self._ranks_share_tokens = getattr(config.parallel_config, "decode_context_parallel_size", 1) > 1
        self._layers: Mapping[str, Any] = context.no_compile_layers
        self._metadata = context.attn_metadata
        if not isinstance(self._metadata, dict):
            raise UnsafeError("the attention metadata are of micro-batches")
        if reason := unknown_cache(self._layers):
            raise UnsafeError(reason)
        self._given = given
        self.backends = tuple(dict.fromkeys(type(each).__name__ for each in self._metadata.values()))
        self._states = recurrent_rows(self._layers, self._metadata)

    def step(self, graph: Graph, eager: Callable[[], Any]) -> Step:
        return Step(
            graph,
            eager,
            self._real_rows,
            self._inputs(),
            (self._metadata, self._context.additional_kwargs),
            self._states,
            lambda: written(self._layers, self._slots(), self._states, self._block_size),
        )

    def _slots(self) -> dict[str, Tensor]:
        found = self._context.slot_mapping
        return dict(found) if isinstance(found, dict) else {}

    def _real_rows(self) -> int:
        """Of the tokens, those that are no padding, which is behind them: with -1 for a slot, or masked.

        With decode context parallelism a rank has slots for its own tokens only; then requests' last token tells.
        """
        if (mask := getattr(self._context, "is_padding", None)) is not None:
            return int((~mask).sum())
        if self._ranks_share_tokens:
            found = [
                given.query_start_loc[-1] for given in self._metadata.values() if hasattr(given, "query_start_loc")
            ]
        else:
            found = [(slots >= 0).sum() for slots in self._slots().values()]
        if not found:
            raise UnsafeError("which rows are padding cannot be told")
        return int(found[0])

    def _inputs(self) -> dict[str, Tensor]:
        """Tensors that the pass is given: arguments of the model, slots, and what is in the attention metadata."""
        found: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in (
            *_named("arguments", self._given, 4),
            *_named("slot_mapping", self._slots(), 2),
            *_named("attention metadata", self._metadata, 4),
        ):
            if tensor.numel() * tensor.element_size() <= _LARGEST_INPUT:
                found.setdefault(id(tensor), (name, tensor))
        return {f"{name} ({number})": tensor for number, (name, tensor) in enumerate(found.values())}


def _named(name: str, value: object, deepest: int) -> Iterator[tuple[str, Tensor]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
        return
    if isinstance(value, dict):
        parts: Any = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    elif type(value).__module__.startswith(("vllm.", "vllm_graphfix.")):
        parts = getattr(value, "__dict__", {}).items()
    else:
        return
    if deepest:
        for key, part in list(parts):
            yield from _named(f"{name}.{key}", part, deepest - 1)
