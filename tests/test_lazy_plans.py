"""Plans that a pass has consumed already are recognised in a state of attention, as FlashMLA makes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from stock_stand_ins import Hostile
from table import slow_but_for
from vllm_graphfix.fixes._capture_passes import has_consumed_plan
from warm_release import run_in_fork


@dataclass
class Plan:
    """Stands in for FlashMLASchedMeta."""

    have_initialized: bool = False


@dataclass
class Node:
    below: Any = None
    tensors: list[Any] = field(default_factory=list)


def nested(levels: int, value: Any) -> Any:
    for _ in range(levels):
        value = Node(value)
    return value


@pytest.mark.parametrize("consumed", [False, True])
@pytest.mark.parametrize("levels", range(6))
def test_a_plan_is_recognised_as_deep_as_vllms_metadata_go(levels: int, consumed: bool) -> None:
    metadata = {"layer.0": Node(), "layer.1": nested(levels, Plan(consumed))}
    assert has_consumed_plan((metadata, {})) is consumed
    assert has_consumed_plan([metadata]) is consumed
    assert has_consumed_plan(lambda mode: metadata) is consumed


def test_one_of_several_plans_is_enough() -> None:
    assert has_consumed_plan({"a": Node(Plan()), "b": Node(Plan(have_initialized=True))})


def test_what_a_model_or_a_manager_in_a_closure_has_is_no_plan() -> None:
    model = Node(Plan(have_initialized=True))
    assert not has_consumed_plan(lambda mode: model)


def test_a_key_of_that_name_is_no_plan() -> None:
    assert not has_consumed_plan({"have_initialized": True})


@pytest.mark.parametrize(
    "state",
    [None, 7, "text", (), {}, object(), Hostile(), {"layer": Hostile()}, [Hostile()]],
    ids=["nothing", "number", "text", "tuple", "dict", "object", "hostile", "hostile layer", "hostile item"],
)
def test_what_has_no_plan_has_none_consumed(state: object) -> None:
    assert not has_consumed_plan(state)


def test_a_state_that_holds_itself_or_very_much_is_looked_at_for_a_moment() -> None:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    assert not has_consumed_plan(loop)
    wide = [Node([Node() for _ in range(100)]) for _ in range(100)]
    assert not has_consumed_plan(wide)
    assert not has_consumed_plan(nested(50, Plan(have_initialized=True)))


def test_a_property_is_not_read() -> None:
    class Metadata:
        @property
        def lengths(self) -> Any:
            raise AssertionError("would copy from the device")

    assert not has_consumed_plan({"layer": Metadata()})


REAL_PLANS = """
from dataclasses import fields
from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins
install_flashmla_stand_ins()
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseMetadata as Sparse
from vllm.v1.attention.ops.flashmla import FlashMLASchedMeta
from vllm_graphfix.fixes._capture_passes import has_consumed_plan
from vllm_graphfix.fixes.capture_state import STATE_CONSUMED

def sparse(plan):
    kernel = Sparse.FP8KernelMetadata(plan, None, None)
    decode = Sparse.FP8SeparatePrefillDecode.Decode(*[None, kernel, 1][: len(fields(Sparse.FP8SeparatePrefillDecode.Decode))])
    split = Sparse.FP8SeparatePrefillDecode(decode=decode)
    metadata = object.__new__(Sparse)
    metadata.fp8_extra_metadata = split
    return {"layer": metadata}

plan = FlashMLASchedMeta()
print(has_consumed_plan((sparse(plan), {})), end=" ")
plan.have_initialized = True
print(has_consumed_plan((sparse(plan), {})))
"""  # noqa: E501


@pytest.mark.parametrize("release", slow_but_for(("0.16.0", "0.22.1"), ("0.16.0", "0.18.1", "0.21.0", "0.22.1")))
def test_the_plan_of_sparse_flashmla_is_recognised(release: str) -> None:
    assert run_in_fork(release, REAL_PLANS).stdout.split()[-2:] == ["False", "True"]
