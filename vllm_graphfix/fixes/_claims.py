"""Corrections of attention backends that claim full graphs of decodes with drafts, which their builders cannot serve.

vLLM asks each backend which full graphs it supports, and chooses the mode by the least of the answers. Model runner V1
asks the builder's class, before any builder is made; model runner V2, from 0.20.0 on, asks the builder.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import correct_arguments, correct_result

if TYPE_CHECKING:
    from vllm_graphfix.fix import Event, Patch

RUNNER_V1_MODULE = "vllm.v1.worker.gpu_model_runner"
Name = tuple[str, str]
"""A builder: its module and its class."""


def claim_single_tokens(event: Event, *builders: Name) -> tuple[Patch, ...]:
    """Make patches by which *builders*, where drafts are configured, claim no graphs but of one token a request.

    A subclass of theirs claims no more. *event* is counted for each such claim of V1's, and each builder that is made.
    """

    @correct_arguments(RUNNER_V1_MODULE, "GPUModelRunner._check_and_update_cudagraph_mode", event)
    def claim_by_classes(
        self: Any, attention_backends: Any, kv_cache_groups: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...] | None:
        """Replace backends with a false claim by subclasses of theirs, which V1 only asks; None where there is none."""
        corrected = [
            {
                _claiming_less(backend, self.vllm_config, group.kv_cache_spec, builders) or backend
                for backend in backends
            }
            for backends, group in zip(attention_backends, kv_cache_groups, strict=False)
        ]
        return (self, corrected) if corrected != [set(backends) for backends in attention_backends] else None

    return (claim_by_classes, *(_claim_by_builder(event, *builder) for builder in builders))


def _claim_by_builder(event: Event, module: str, name: str) -> Patch:
    @correct_result(module, f"{name}.__init__", event)
    def claim_by_builder(
        result: None, self: Any, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, *args: Any, **kwargs: Any
    ) -> Callable[[], None] | None:
        """Let a builder answer for itself; None where its class claims no more than is true."""
        claim = _lower_claim(self, vllm_config, kv_cache_spec)
        return None if claim is None else partial(setattr, self, "get_cudagraph_support", lambda *_, **__: claim)

    return claim_by_builder


def _claiming_less(backend: Any, config: Any, spec: Any, builders: tuple[Name, ...]) -> Any:
    """Return a subclass of *backend* whose builder's claim is true; None where its own is."""
    builder = backend.get_builder_cls()
    if not any((kind.__module__, kind.__name__) in builders for kind in builder.__mro__):
        return None
    claim = _lower_claim(builder, config, spec)
    if claim is None:
        return None
    honest = type(builder.__name__, (builder,), {"get_cudagraph_support": classmethod(lambda *_, **__: claim)})
    return type(backend.__name__, (backend,), {"get_builder_cls": staticmethod(lambda: honest)})


def _lower_claim(builder: Any, config: Any, spec: Any) -> Any:
    """Return the support for graphs of one token a request if *builder*, a class or an object, claims more."""
    if config.speculative_config is None:
        return None
    claim = builder.get_cudagraph_support(config, spec)
    single = type(claim).UNIFORM_SINGLE_TOKEN_DECODE
    return single if claim.value > single.value else None
