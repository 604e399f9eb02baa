"""turboquant-drafts: the claims that it corrects, on stand-ins for vLLM's backends and builders."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from vllm_graphfix.fix import Activity
from vllm_graphfix.fixes._claims import claim_single_tokens
from vllm_graphfix.fixes.turboquant_drafts import FALSE_CLAIM

DRAFTS, NONE = SimpleNamespace(speculative_config=object()), SimpleNamespace(speculative_config=None)


class Support(Enum):
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class Builder:
    support: ClassVar[Support] = Support.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.vllm_config = vllm_config

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Support:
        return cls.support


class Derived(Builder): ...


class Humble(Builder):
    support = Support.NEVER


class Other:
    get_cudagraph_support = Builder.get_cudagraph_support


def backend_of(builder: type) -> Any:
    return type("Backend", (), {"get_builder_cls": staticmethod(lambda: builder)})


BY_CLASS, BY_BUILDER = claim_single_tokens(FALSE_CLAIM, (__name__, "Builder"))


def ask_v1(*backends: Any, config: Any = DRAFTS, corrects: bool = True) -> tuple[list[Any], int]:
    """Return the backends that stock is handed, and the number of events."""
    activity = Activity((FALSE_CLAIM,), corrects=corrects)
    handed: list[Any] = []

    def stock(self: Any, attention_backends: Any, kv_cache_groups: Any, is_profiling: bool = False) -> None:
        handed.extend(attention_backends)

    groups = [SimpleNamespace(kv_cache_spec=None) for _ in backends]
    BY_CLASS.wrap(stock, activity)(
        SimpleNamespace(vllm_config=config), [{each} for each in backends], groups, is_profiling=True
    )
    assert activity.error is None
    return [next(iter(each)) for each in handed], activity.counts[FALSE_CLAIM.name]


def make(kind: type[Builder], config: Any) -> tuple[Builder, int]:
    """Return a builder that the wrapper has seen being made, and the number of events."""
    activity = Activity((FALSE_CLAIM,))
    builder = object.__new__(kind)
    BY_BUILDER.wrap(Builder.__init__, activity)(builder, None, [], config, None)
    assert activity.error is None
    return builder, activity.counts[FALSE_CLAIM.name]


@pytest.mark.parametrize("kind", [Builder, Derived])
def test_with_drafts_the_class_and_its_subclasses_claim_single_tokens(kind: type) -> None:
    backend, other = backend_of(kind), backend_of(Other)
    (corrected, untouched), count = ask_v1(backend, other)
    assert corrected.get_builder_cls().get_cudagraph_support(DRAFTS, None) is Support.UNIFORM_SINGLE_TOKEN_DECODE
    assert corrected.__name__ == backend.__name__  # vLLM's log names it
    assert untouched is other
    assert count == 1
    assert backend.get_builder_cls() is kind  # it is asked again before builders are made


@pytest.mark.parametrize(("kind", "config"), [(Builder, NONE), (Humble, DRAFTS), (Other, DRAFTS)])
def test_other_claims_are_handed_on(kind: type, config: Any) -> None:
    backend = backend_of(kind)
    assert ask_v1(backend, config=config) == ([backend], 0)


def test_observing_it_hands_on_the_backends_and_counts() -> None:
    backend = backend_of(Builder)
    assert ask_v1(backend, corrects=False) == ([backend], 1)


@pytest.mark.parametrize("kind", [Builder, Derived])
def test_with_drafts_a_builder_claims_single_tokens(kind: type[Builder]) -> None:
    builder, count = make(kind, DRAFTS)
    assert builder.get_cudagraph_support(DRAFTS, None) is Support.UNIFORM_SINGLE_TOKEN_DECODE
    assert kind.get_cudagraph_support(DRAFTS, None) is Support.UNIFORM_BATCH  # of another engine, perhaps
    assert count == 1


@pytest.mark.parametrize(("kind", "config"), [(Builder, NONE), (Humble, DRAFTS)])
def test_other_builders_stay_as_they_are(kind: type[Builder], config: Any) -> None:
    builder, count = make(kind, config)
    assert vars(builder) == {"vllm_config": config}
    assert count == 0
