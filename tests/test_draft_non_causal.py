"""draft-non-causal: the graphs that it drops, on stand-ins for DFlash's manager and the draft's builders."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graphfix.fix import Activity
from vllm_graphfix.fixes.draft_non_causal import _BUILDER, _FLASHINFER_MODULE, GRAPH_OF_A_PLAN, _without_graphs_of_plans


class Mode(Enum):
    NONE = 0
    FULL_DECODE_ONLY = 2


FlashInfer = type(_BUILDER, (), {"__module__": _FLASHINFER_MODULE})
Derived = type("ForksBuilder", (FlashInfer,), {})
Namesake = type(_BUILDER, (), {"__module__": "another.backend"})


class ManagerDouble:
    """Stands in for `DFlashCudaGraphManager`, whose graphs of drafts are full ones."""

    def __init__(self, *, causal: bool = False, sizes: tuple[int, ...] = (3, 6, 12)) -> None:
        self.causal = causal
        self.cudagraph_mode = Mode.FULL_DECODE_ONLY
        self._candidates = {size: [size] for size in sizes}
        self._capture_descs = {Mode.FULL_DECODE_ONLY: list(sizes)} if sizes else {}

    def capture(self, generate: Any, model_state: Any, attn_groups: Any, *, progress: str = "") -> list[int]:
        """Return the sizes of the graphs that are captured, as vLLM's reads them."""
        return [size for sizes in self._capture_descs.values() for size in sizes]


def captured(manager: ManagerDouble, *builders: type, corrects: bool = True) -> tuple[list[int], int]:
    """Return the sizes that were captured, and the number of events."""
    activity = Activity((GRAPH_OF_A_PLAN,), corrects=corrects)
    groups = [[SimpleNamespace(get_metadata_builder=lambda _, kind=kind: kind())] for kind in builders]
    capture: Any = _without_graphs_of_plans(ManagerDouble.capture, activity)
    sizes = capture(manager, None, None, attn_groups=groups, progress="drafts")
    assert activity.error is None
    return sizes, activity.counts[GRAPH_OF_A_PLAN.name]


@pytest.mark.parametrize("builders", [(FlashInfer,), (Namesake, FlashInfer), (Derived,)])
def test_no_graph_of_a_plan_is_captured_or_replayed(builders: tuple[type, ...]) -> None:
    manager = ManagerDouble()
    assert captured(manager, *builders) == ([], 3)
    assert manager.cudagraph_mode is Mode.NONE
    assert manager._candidates == {}


@pytest.mark.parametrize(
    ("manager", "builder"),
    [(ManagerDouble(causal=True), FlashInfer), (ManagerDouble(), Namesake), (ManagerDouble(sizes=()), FlashInfer)],
    ids=["causal", "another backend", "no graphs"],
)
def test_other_drafts_are_captured_as_stock_does(manager: ManagerDouble, builder: type) -> None:
    before = vars(manager).copy()
    sizes = [size for sizes in manager._capture_descs.values() for size in sizes]
    assert captured(manager, builder) == (sizes, 0)
    assert vars(manager) == before


def test_observing_it_captures_and_counts() -> None:
    manager = ManagerDouble()
    before = vars(manager).copy()
    assert captured(manager, FlashInfer, corrects=False) == ([3, 6, 12], 3)
    assert vars(manager) == before


def test_a_manager_with_other_attributes_is_captured_as_stock_does() -> None:
    activity = Activity((GRAPH_OF_A_PLAN,))
    manager: Any = ManagerDouble()
    del manager.causal
    assert _without_graphs_of_plans(ManagerDouble.capture, activity)(manager, None, None, []) == [3, 6, 12]
    assert "causal" in str(activity.error)
    assert activity.counts[GRAPH_OF_A_PLAN.name] == 0
