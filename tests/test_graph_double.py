"""The CPU double of CUDA graphs behaves like CUDA graphs where a defect of graphs can show."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch

from vllm_graphfix.verify.double.graph import CPUGraph, cpu_cuda_graphs, fill_as_unwritten_

Result = TypeVar("Result")


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with cpu_cuda_graphs():
        yield


def _capture(function: Callable[[], Result]) -> tuple[CPUGraph, Result]:
    graph: Any = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph, torch.cuda.graph_pool_handle()):
        result = function()
    return graph, result


def test_capture_records_and_does_not_execute() -> None:
    """An operation inside a capture leaves every tensor as it was, until the replay."""
    total = torch.zeros(2)
    graph, _ = _capture(lambda: total.add_(1))
    assert total.tolist() == [0, 0]
    assert [operation.name for operation in graph.operations] == ["aten::add_"]
    graph.replay()
    graph.replay()
    assert total.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("dtype", "unwritten"),
    [(torch.float32, "nan"), (torch.bfloat16, "nan"), (torch.int32, "-1073741824"), (torch.uint8, "255")],
)
def test_a_captured_result_is_poison_until_the_replay(dtype: torch.dtype, unwritten: str) -> None:
    """A capture returns memory that nothing has written yet."""
    source = torch.ones(3, dtype=dtype)
    graph, result = _capture(lambda: source * 2)
    assert [str(value) for value in result.tolist()] == [unwritten] * 3
    graph.replay()
    assert result.tolist() == [2, 2, 2]


def test_memory_that_is_only_allocated_stays_poison() -> None:
    """torch.empty launches no kernel, so no replay fills it."""
    graph, result = _capture(lambda: torch.empty(2))
    graph.replay()
    assert graph.operations == []
    assert result.isnan().all()


def test_replay_reads_and_writes_the_recorded_addresses() -> None:
    """New contents of a captured input are seen; another tensor under the same name is not."""
    inputs = {"x": torch.tensor([1.0, 2.0])}
    first = inputs["x"]
    graph, result = _capture(lambda: inputs["x"] * 10)
    address = result.data_ptr()
    inputs["x"] = torch.tensor([7.0, 7.0])
    graph.replay()
    assert result.tolist() == [10, 20]
    first.copy_(torch.tensor([3.0, 4.0]))
    graph.replay()
    assert result.tolist() == [30, 40]
    assert result.data_ptr() == address


def test_replay_runs_no_python_of_the_captured_function() -> None:
    """Branches and side effects happen once, while capturing."""
    calls = []

    def function() -> torch.Tensor:
        calls.append(1)
        return torch.ones(2) + len(calls)

    graph, result = _capture(function)
    graph.replay()
    graph.replay()
    assert len(calls) == 1
    assert result.tolist() == [2, 2]


def test_views_share_the_memory_of_their_base() -> None:
    """A view taken while capturing is an address: no operation, and it follows its base at replay."""
    buffer = torch.zeros(4)

    def function() -> torch.Tensor:
        half = buffer.view(2, 2)[1]
        half.fill_(5)
        return half

    graph, half = _capture(function)
    assert [operation.name for operation in graph.operations] == ["aten::fill_"]
    assert half.data_ptr() == buffer[2:].data_ptr()
    graph.replay()
    assert buffer.tolist() == [0, 0, 5, 5]


def test_in_place_and_out_return_their_target() -> None:
    """Slices assigned to, and out= arguments, are written at replay."""
    buffer, out = torch.zeros(3), torch.zeros(2)

    def function() -> torch.Tensor:
        buffer[1:] = torch.ones(2) * 4
        return torch.add(buffer[1:], 1, out=out)

    graph, returned = _capture(function)
    assert returned.data_ptr() == out.data_ptr()
    graph.replay()
    assert buffer.tolist() == [0, 4, 4]
    assert out.tolist() == [5, 5]


def test_lists_are_written_in_place() -> None:
    """Fused operations over a list of tensors, which their schema marks as written, and out= lists."""
    tensors, out = [torch.zeros(2), torch.zeros(3)], [torch.zeros(2), torch.zeros(3)]

    def function() -> None:
        torch._foreach_add_(tensors, 1)
        torch.ops.aten._foreach_mul.Scalar_out(tensors, 4, out=out)

    graph, _ = _capture(function)
    assert [operation.name for operation in graph.operations] == ["aten::_foreach_add_", "aten::_foreach_mul"]
    assert tensors[0].tolist() == [0, 0]
    graph.replay()
    graph.replay()
    assert [tensor.tolist() for tensor in tensors] == [[2, 2], [2, 2, 2]]
    assert [tensor.tolist() for tensor in out] == [[8, 8], [8, 8, 8]]


def test_a_model_gives_the_same_numbers_as_eager() -> None:
    """Composite operations, several results, attention and indexing are recorded whole."""
    torch.manual_seed(0)
    x, weight, table = torch.randn(4, 8), torch.randn(8, 8), torch.randn(6, 8)
    rows = torch.tensor([3, 0, 5, 1])

    @torch.inference_mode()
    def model() -> list[torch.Tensor]:
        hidden = torch.nn.functional.linear(x + table[rows], weight)
        hidden = torch.nn.functional.layer_norm(hidden, (8,))
        heads = hidden.view(4, 2, 4).transpose(0, 1)
        attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return [attended, *torch.topk(hidden, 2), *hidden.split(4, dim=-1), hidden.argmax(-1)]

    expected = model()
    graph, outputs = _capture(model)
    graph.replay()
    for output, value in zip(outputs, expected, strict=True):
        assert torch.equal(output, value)


def test_a_result_has_the_type_and_layout_of_eager_whatever_was_recorded_before() -> None:
    """Layouts are shared by calls of equal layouts alone: equal numbers and sizes do not suffice."""
    for first in (torch.ones(3, 3, dtype=torch.int32), torch.ones(3, 3), torch.ones(3, 3).t(), torch.ones(3, 1)):
        for second in (1, 1.0, True, torch.ones(3, 3), torch.ones(3, 3, dtype=torch.float64), torch.ones(())):
            for _ in range(2):
                with torch.inference_mode():
                    eager = first + second
                graph, made = _capture(lambda first=first, second=second: first + second)  # type: ignore[misc]
                graph.replay()
                assert (made.dtype, made.shape, made.stride()) == (eager.dtype, eager.shape, eager.stride())
                assert torch.equal(made, eager)


def test_a_custom_operator_is_one_operation() -> None:
    """The mode does not look into a kernel's stand-in, and a kernel may write its arguments."""
    library = torch.library.Library("graph_double_test", "DEF")
    library.define("scale_into(Tensor x, Tensor(a!) out) -> Tensor")

    def scale_into(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.copy_(x * 2)
        return x * 3

    library.impl("scale_into", scale_into, "CPU")
    library.impl("scale_into", lambda x, out: torch.empty_like(x), "Meta")
    x, out = torch.ones(2), torch.zeros(2)
    graph, result = _capture(lambda: torch.ops.graph_double_test.scale_into(x, out))
    assert [operation.name for operation in graph.operations] == ["graph_double_test::scale_into"]
    graph.replay()
    assert out.tolist() == [2, 2]
    assert result.tolist() == [3, 3]


@pytest.mark.parametrize(
    "reads_the_host",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: torch.equal(x, x),
        lambda x: torch.cuda.synchronize(),
    ],
    ids=["item", "bool", "nonzero", "mask", "equal", "synchronize"],
)
def test_reading_a_value_on_the_host_is_an_error(reads_the_host: Callable[[torch.Tensor], object]) -> None:
    """On a GPU too, a capture cannot wait for a value; the graph is then void and capturing is over."""
    x = torch.arange(4.0)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), torch.cuda.graph(graph):
        reads_the_host(x)
    assert not torch.cuda.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="has not been captured"):
        graph.replay()


def test_captures_do_not_nest_and_do_not_replay() -> None:
    """One capture at a time, and no replay inside it."""
    ready, _ = _capture(lambda: torch.ones(1) + 1)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert torch.cuda.is_current_stream_capturing()
        with pytest.raises(RuntimeError, match="not permitted"):
            ready.replay()
        with pytest.raises(RuntimeError, match="captured already"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            pass


def test_pools_are_distinct() -> None:
    """Each handle is a pool of its own, and a graph knows its pool."""
    pool = torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        pass
    assert graph.pool() == pool
    assert torch.cuda.graph_pool_handle() != pool


def test_streams_and_events_are_in_order_here() -> None:
    """Calls of vLLM around a capture work without a device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        event = stream.record_event()
    event.synchronize()
    torch.cuda.synchronize()


def test_everything_is_put_back() -> None:
    """Leaving the block, also by an error, restores torch."""
    names = ("CUDAGraph", "graph", "graph_pool_handle", "Stream", "Event", "current_stream", "synchronize", "stream")
    before = {name: getattr(torch.cuda, name) for name in names}
    with contextlib.suppress(KeyError), cpu_cuda_graphs():
        assert isinstance(torch.cuda.CUDAGraph(), CPUGraph)
        raise KeyError
    assert {name: getattr(torch.cuda, name) for name in names} == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64])
def test_every_type_can_be_poisoned(dtype: torch.dtype) -> None:
    """Also those whose arithmetic a CPU has not."""
    assert fill_as_unwritten_(torch.zeros(2).to(dtype)).dtype is dtype
