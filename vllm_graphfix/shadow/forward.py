"""A forward pass as vLLM's forward context describes it, and the data that a second one would read and write.

`unsafe` names the engines in which there must be no second pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix.shadow import connectors, lockstep
from vllm_graphfix.shadow.failures import UnsafeError
from vllm_graphfix.shadow.layers import recurrent_rows, ring_rows, unknown_cache, written
from vllm_graphfix.shadow.runs import Step
from vllm_graphfix.shadow.verdict import TARGET, Graph

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_INPUT = 64 << 20
"""Bytes of the largest input that is copied; larger tensors are workspaces, which a pass fills before it reads them."""


def unsafe(config: Any) -> str | None:
    """Return why no step of an engine with this `VllmConfig` may run twice; None if nothing is known against it."""
    parallel = config.parallel_config
    if getattr(config, "kv_transfer_config", None) is not None and not connectors.can_be_silenced():
        return "a KV connector takes each layer's cache while a forward pass runs, and would get it twice"
    if lockstep.is_in_lockstep(config) and (reason := lockstep.why_not(config)):
        return reason
    if getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False):
        return "micro-batches overlap in a forward pass, on threads of their own"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "ranks of prefill context parallelism belong to no group that a check can ask"
    if getattr(parallel, "enable_eplb", False):
        return "each forward pass counts the load of experts, which would be counted twice"
    if getattr(parallel, "enable_hc_sp", False):
        return "rows are spread over the ranks of a group within a forward pass, which was not examined"
    if getattr(parallel, "enable_elastic_ep", False):
        return "ranks come and go"
    if _consumes_embeddings(config):
        return "the model clears the embeddings of its images in a forward pass, and a second one would be without"
    if getattr(getattr(config, "attention_config", None), "hisparse_config", None) is not None:
        return "HiSparse moves parts of the cache to and from the host in a forward pass"
    if _captures_other_kernels(config):
        return "its graphs run other kernels than a step without a graph, and round differently"
    if getattr(config.cache_config, "use_replayssm", False):
        return "ReplaySSM keeps recurrent state in a form that this plugin does not know"
    return None


def unsafe_in_pieces(config: Any, *, images: bool = True) -> str | None:
    """Return why no step that runs in pieces may run twice where others may; None if nothing is known against it.

    *images*: a request may have some.
    """
    if getattr(config, "kv_transfer_config", None) is not None:
        return "attention, which is in no piece, hands each layer's cache to the KV connector, and would at each replay"
    if _model_type(config) == "deepseek_v41":
        return "layers of the model replay graphs of their own in a step without one"
    if images and _clears_embeddings(config):
        return "the model clears the embeddings of its images in a forward pass, and a second one would be without"
    return None


def _model_type(config: Any) -> str:
    return getattr(getattr(getattr(config, "model_config", None), "hf_config", None), "model_type", "")


def _captures_other_kernels(config: Any) -> bool:
    """Detect the specialised decode of Kimi K3 or DeepSeek V4.1, and V4.1's mHC on a Blackwell.

    Both run in captured graphs and nowhere else.
    """
    further = getattr(config, "additional_config", None)
    if isinstance(further, dict) and further.get("decode_backend", "auto") != "auto":
        return True
    if _model_type(config) != "deepseek_v41":
        return False
    try:
        from vllm.models.deepseek_v41.nvidia.ops.mhc import supports_mhc_overlap
    except ImportError:  # before 0.31.0
        return False
    try:
        return bool(supports_mhc_overlap(config))
    except Exception:  # vLLM's function does not know such a configuration either
        return True


def _captured_projection(layers: Mapping[str, Any]) -> str | None:
    """Return the first layer of Kimi K3 whose projections have kernels of their own in graphs, as with eight ranks."""
    return next((name for name in layers if getattr(layers[name], "_projection_overlap_max_tokens", 0) > 0), None)


def _consumes_embeddings(config: Any) -> bool:
    """Detect Qwen3-VL and its like with full graphs of prompts; decodes have no images."""
    mode = getattr(getattr(config, "compilation_config", None), "cudagraph_mode", None)
    return getattr(mode, "name", None) == "FULL" and _clears_embeddings(config)


def _clears_embeddings(config: Any) -> bool:
    of_model = getattr(getattr(config, "model_config", None), "hf_config", None)
    vision = getattr(getattr(of_model, "thinker_config", of_model), "vision_config", None)
    return bool(getattr(vision, "deepstack_visual_indexes", None))


class Pass(NamedTuple):
    """A forward pass: the data of vLLM's `ForwardContext`, and the arguments of the model."""

    config: Any
    """`VllmConfig`."""
    metadata: Any
    """Attention metadata by layer."""
    slots: Any
    """Slot mapping by layer: (tokens,), -1 for padding."""
    arguments: object
    """The model's."""
    own: object = None
    """Further objects of the pass, whose attributes may be set while it runs."""
    only: Collection[str] | None = None
    """The layers that run in it; None: all."""
    dummy: bool = False
    """True for the dummy batch of a rank without requests, which runs because other ranks run theirs."""

    @property
    def layers(self) -> Mapping[str, Any]:
        layers: Mapping[str, Any] = self.config.compilation_config.static_forward_context
        return layers if self.only is None else {name: layers[name] for name in layers if name in self.only}

    def step(self, model: str, descriptor: Any, eager: Callable[[], Any], real_rows: Callable[[], int]) -> Step:
        """Describe the pass to a check. Raises UnsafeError for a model with a cache that a step cannot write twice."""
        if not isinstance(self.metadata, dict) or not isinstance(self.slots, dict):
            raise UnsafeError("there are no attention metadata, or they belong to micro-batches")
        if reason := unknown_cache(self.layers):
            raise UnsafeError(reason)
        if name := _captured_projection(self.layers):
            raise UnsafeError(f"{name} runs other kernels in a graph than without one, and rounds differently there")
        backends = tuple(dict.fromkeys(type(each).__name__ for each in self.metadata.values()))
        # All layers include a drafter's, which do not run in a step of the target model.
        rings = ring_rows(self.layers, self.metadata, every=self.only is not None)
        states = [*recurrent_rows(self.layers, self.metadata), *rings]
        if self.dummy:
            states, real_rows = [each._replace(compared=False) for each in states], lambda: 0
        return Step(
            Graph(f"{model}, {descriptor}", descriptor.num_tokens, backends, _has_adapters(model, descriptor)),
            connectors.silenced(eager),
            real_rows,
            self._inputs(),
            (self.metadata, self.own),
            states,
            lambda: written(self.layers, self.slots, states),
            _launches(self.config, descriptor),
        )

    def _inputs(self) -> dict[str, Tensor]:
        """Return the tensors that the pass reads: the model's arguments, slots, and those of the attention metadata."""
        by_id: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in (
            *_named_tensors("arguments", self.arguments, 4),
            *_named_tensors("slot_mapping", self.slots, 2),
            *_named_tensors("attention metadata", self.metadata, 4),
        ):
            if tensor.numel() * tensor.element_size() <= _LARGEST_INPUT:
                by_id.setdefault(id(tensor), (name, tensor))
        return {f"{name} ({number})": tensor for number, (name, tensor) in enumerate(by_id.values())}


def _has_adapters(model: str, descriptor: Any) -> bool:
    """Tell whether kernels of adapters may run in a graph, by its descriptor: V2's says so from 0.24.0 on, V1's always.

    Drafters have no adapters in vLLM.
    """
    fields = (getattr(descriptor, "has_lora", None), getattr(descriptor, "num_active_loras", None))
    return model.startswith(TARGET) and (any(fields) or fields == (None, None))


def _launches(config: Any, descriptor: Any) -> tuple[dict[str, int], ...]:
    """Return the numbers that a capture may have passed to kernels, which split their work by them.

    Its longest request may be as long as possible (FlashAttention 2); a batch of prompts and decodes may have one
    request, or requests of one token (Triton's attention).
    """
    longest = getattr(getattr(config, "model_config", None), "max_model_len", None)
    if longest is None:
        return ()
    lengths = {"max_seq_len": longest, "max_seqlen_k": longest}
    if getattr(descriptor, "uniform", False) or getattr(descriptor, "uniform_token_count", None) is not None:
        return (lengths,)
    # A graph for decodes of varying lengths has their bound instead.
    longest_query = getattr(descriptor, "max_query_len", None)
    tokens = (descriptor.num_tokens, 1) if longest_query is None else (longest_query,)
    return (lengths, *(lengths | {"max_query_len": count, "max_seqlen_q": count} for count in tokens))


def _named_tensors(name: str, value: object, deepest: int) -> Iterator[tuple[str, Tensor]]:
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
            yield from _named_tensors(f"{name}.{key}", part, deepest - 1)
