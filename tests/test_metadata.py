"""Full graphs that replay on other attention metadata than their captures read: the detector `metadata`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from behaviours import check_behaviours
from records import record
from stock import ALL_RELEASES
from table import slow_but_for
from vllm_graphfix.commands.fleet import look
from vllm_graphfix.engine import metadata
from vllm_graphfix.engine.bypass import Watched
from vllm_graphfix.engine.components import Services
from vllm_graphfix.engine.components.metadata import MetadataComponent
from vllm_graphfix.engine.metadata import MetadataCheck, differing
from vllm_graphfix.records import OtherMetadata, write
from vllm_graphfix.settings.decision import decide, decode
from vllm_graphfix.settings.environment import METADATA, Metadata, read

OFF = {"VLLM_GRAPHFIX": "off"}


@pytest.mark.parametrize("release", slow_but_for(("0.16.0", "0.27.1", "0.33.0"), ALL_RELEASES))
def test_stock_releases_differ_where_they_have_a_defect_and_nowhere_else(release: str) -> None:
    check_behaviours(release, "metadata", OFF)


@pytest.mark.parametrize("release", slow_but_for(("0.19.1",), ALL_RELEASES))
def test_with_the_fixes_nothing_differs(release: str) -> None:
    check_behaviours(release, "metadata")


BREAKABLE = OFF | {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
"""Up to 0.23.0 read when operators are defined: in a Python that has imported nothing yet."""


@pytest.mark.parametrize("release", slow_but_for(("0.27.1",), [each for each in ALL_RELEASES if each >= "0.22.0"]))
def test_breakable_graphs_that_hold_what_needs_an_eager_break_are_seen(release: str) -> None:
    check_behaviours(release, "breaks", BREAKABLE, fresh=release <= "0.23.0")


# -- the rules ---------------------------------------------------------------------------------------------------------


class TensorDouble:
    device = SimpleNamespace(type="cuda")

    def __init__(self, address: int, *strides: int, host: bool = False) -> None:
        self._address, self._strides, self.shape = address, strides or (1,), (2,) * len(strides or (1,))
        self.device = SimpleNamespace(type="cpu" if host else "cuda")

    def numel(self) -> int:
        return 2

    def data_ptr(self) -> int:
        return self._address

    def stride(self) -> tuple[int, ...]:
        return self._strides


PLAN = {"scheduler_metadata": TensorDouble(1)}


@pytest.mark.parametrize(
    ("before", "now", "difference"),
    [
        ({"a": TensorDouble(8)}, {"a": TensorDouble(8)}, None),
        ({"a": TensorDouble(8)}, {"a": TensorDouble(9)}, "lies elsewhere"),
        ({"a": TensorDouble(8, 4, 1)}, {"a": TensorDouble(8, 2, 1)}, "has other strides"),
        ({"a": TensorDouble(8)}, {"a": None}, "is None"),
        ({"a": None}, {"a": TensorDouble(8)}, "is not None any more"),
        ({"a": TensorDouble(8, host=True)}, {"a": TensorDouble(9, host=True)}, None),
        ({"a_cpu": TensorDouble(8)}, {"a_cpu": TensorDouble(9)}, None),
        ({"num_prefills": 0}, {"num_prefills": 1}, "is 1, not 0"),
        ({"use_cascade": False}, {"use_cascade": True}, "is True, not False"),
        ({"max_seq_len": 256}, {"max_seq_len": 37}, None),
        ({"max_seq_len": 37}, {"max_seq_len": 256}, "is 256, not 37"),
        ({"max_query_len": 4}, {"max_query_len": 2}, None),
        ({"max_query_len": 4} | PLAN, {"max_query_len": 2} | PLAN, "is 2, not 4"),
        ({"a": [TensorDouble(8)]}, {"a": [TensorDouble(9)]}, "lies elsewhere"),
        ({"a": object()}, {"a": object()}, None),
        ({"a": 1}, {}, None),
    ],
)
def test_what_differs(before: dict[str, Any], now: dict[str, Any], difference: str | None) -> None:
    fields = {
        path: metadata._seen(path, value, "cuda")
        for name, each in before.items()
        for path, value in metadata._leaves(each, ("layer", name))
    }
    seen = differing(fields, {"layer": SimpleNamespace(**now)}, "cuda")
    assert [why for _, why in seen] == ([difference] if difference else [])


# -- captures and replays ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Decode:
    table: Any
    num_splits: int = 1
    unread: int = 0


@dataclasses.dataclass
class Attention:
    decode: Decode


@dataclasses.dataclass
class ForwardContext:
    attn_metadata: Any


class GraphDouble:
    def __init__(self) -> None:
        self.replays = 0

    def capture_begin(self) -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module of forward contexts, and a torch with graphs that do nothing."""
    torch, module = ModuleType("torch"), ModuleType("vllm.forward_context")
    cuda = SimpleNamespace(CUDAGraph=GraphDouble, is_available=lambda: True)
    vars(torch).update(cuda=cuda)
    vars(module).update(ForwardContext=ForwardContext, _forward_context=None)
    for each in (torch, module):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setattr(metadata, "_EVERY", 2)
    return module


def made(address: int = 8, **fields: int) -> Any:
    attention = Attention(Decode(TensorDouble(address), **fields))
    return {"layer 0": attention, "layer 1": attention}


def captured(context: Any, check: MetadataCheck | None = None) -> tuple[MetadataCheck, GraphDouble]:
    check = check or MetadataCheck()
    check.begin_capture()
    graph = GraphDouble()
    context._forward_context = ForwardContext(made(unread=1))
    context._forward_context.attn_metadata["layer 1"].decode.unread  # noqa: B018 - a warm-up
    graph.capture_begin()
    for layer in context._forward_context.attn_metadata.values():
        assert (layer.decode.table._address, layer.decode.num_splits) == (8, 1)
    graph.capture_end()
    check.end_capture()
    return check, graph


def replay(context: Any, graph: GraphDouble, *steps: Any) -> None:
    for each in steps:
        context._forward_context = ForwardContext(each)
        graph.replay()


def test_what_a_capture_read_is_compared_in_the_first_replay_and_one_in_so_many(context: Any) -> None:
    check, graph = captured(context)
    replay(context, graph, made(), made(9), made(unread=2), made(9), made(9, num_splits=3))
    assert graph.replays == 5
    assert check.counts() == {"metadata": {"compared": 3, "differing": 1, "failures": 0}}
    assert set(check.findings()) == {
        OtherMetadata("Attention.decode.table", "a graph", "lies elsewhere"),
        OtherMetadata("Attention.decode.num_splits", "a graph", "is 3, not 1"),
    }


def test_classes_are_as_they_were_after_the_capture(context: Any) -> None:
    kinds = (GraphDouble, ForwardContext, Attention, Decode)
    before = [dict(vars(kind)) for kind in kinds]
    captured(context)
    assert [dict(vars(kind)) for kind in kinds] == before


def test_graphs_of_a_capture_before_a_reset_are_not_compared(context: Any) -> None:
    check, graph = captured(context)
    check.reset()
    replay(context, graph, made(9))
    assert (check.counts(), check.findings(), graph.replays) == ({}, (), 1)


def test_steps_without_requests_or_metadata_are_not_compared(context: Any) -> None:
    check, graph = captured(context)

    def execute_dummy_batch() -> None:
        replay(context, graph, made(9))

    execute_dummy_batch()
    replay(context, graph, made(9), None)
    assert check.counts()["metadata"]["compared"] == 0


def test_an_error_ends_the_comparison_and_vllm_replays_on(context: Any) -> None:
    check, graph = captured(context)
    broken = {"layer 0": Attention(Decode(SimpleNamespace(data_ptr=1, stride=1)))}
    replay(context, graph, broken, made(9), made(9))
    assert check.counts()["metadata"] == {"compared": 1, "differing": 0, "failures": 1}
    assert graph.replays == 3


def test_the_watch_for_bypassed_fixes_may_be_on_the_same_graphs(context: Any) -> None:
    check, graph = captured(context)
    counted: list[Watched] = []
    above = Watched(graph, "replay", counted.append)
    replay(context, graph, made())
    above.remove()
    replay(context, graph, made(), made(9))
    assert (len(counted), graph.replays, check.counts()["metadata"]["differing"]) == (1, 3, 1)


def component(settings: dict[str, str]) -> MetadataComponent:
    nothing: Any = lambda *_: None  # noqa: E731 - for five fields
    one = MetadataComponent(Services(nothing, nothing, nothing, nothing, nothing))
    policy: Any = None
    one.start(decide(read(settings, ()), "0.33.0"), policy)
    return one


def test_off_it_is_not_even_made(context: Any) -> None:
    off, on = component({}), component({METADATA: "report"})
    for each in (off, on):
        each.begin_capture(None)
        each.end_capture()
    assert (off.check, off.counts(), off.findings()) == (None, {}, {})
    assert on.counts() == {"metadata": {"compared": 0, "differing": 0, "failures": 0}}
    on.after_fork()
    assert (on.counts(), on.findings()) == ({}, {"metadata": ()})


def test_a_decision_holds_the_setting() -> None:
    decision = decide(read({METADATA: "report"}, ()), "0.33.0")
    assert decision.compares_metadata
    assert decode(decision.encode()) == decision
    assert not decision.same_choice(decision._replace(metadata=Metadata.OFF))


def test_fleet_calls_such_an_engine_not_in_order(tmp_path: Path) -> None:
    counts = {"compared": 9, "differing": 4, "failures": 0}
    written = record(
        rank=0, metadata=(OtherMetadata("A.plan", "FULL 8", "lies elsewhere"),), events={"metadata": counts}
    )
    write(tmp_path, written)
    (engine,) = look(tmp_path).engines
    (wrong,) = engine.wrong
    assert "in 4 of 9 replays: A.plan lies elsewhere (FULL 8)" in wrong
    write(tmp_path, record(rank=0, events={"metadata": counts | {"differing": 0, "failures": 1}}))
    (engine,) = look(tmp_path).engines
    assert not engine.wrong
    assert [note for note in engine.notes if "metadata of replays are not compared" in note]
