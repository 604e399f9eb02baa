"""triton-mla-padding on vLLM's own builder, implementation and second kernel stage.

What is left in the rows of a batch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.v1.attention.backends.mla import triton_mla
from vllm.v1.attention.ops import triton_decode_attention

from activities import activity_of, layers
from vllm_graphfix.fix import Activity
from vllm_graphfix.fixes import _triton_mla_reduce
from vllm_graphfix.fixes.triton_mla_padding import FIX, PADDED_BATCH_DECODED
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.mla_decode import CAPTURED, HEADS, common_metadata, metadata_builder
from vllm_graphfix.verify.double.scenarios.triton_mla_padding import LATENT, ROPE, TritonMLADecode, cpu_triton_mla

MINUS_INFINITY = float("-inf")
KERNELS = "vllm.v1.attention.ops.triton_decode_attention"
STOCK_KERNEL = triton_decode_attention._fwd_kernel_stage2


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with cpu_triton_mla():
        yield


@pytest.fixture
def served() -> Iterator[TritonMLADecode]:
    with cpu_cuda_graphs():
        yield TritonMLADecode(captured_requests=CAPTURED)


def attended(lengths: list[int], tokens: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of `forward_mqa` for requests of these lengths and so many query tokens, without a graph."""
    decode = TritonMLADecode()
    query = torch.randn(tokens * len(lengths), HEADS, LATENT + ROPE)
    metadata = decode.metadata(lengths, len(lengths))
    scales = SimpleNamespace(_k_scale=torch.tensor(1.0))
    output, log_sums = decode.implementation.forward_mqa(query, decode.cache, metadata, scales)
    return output, log_sums


@pytest.mark.parametrize("steps", [[[7, 40]], [[5]], [[1, 2, 3]], [[9, 9, 9, 9], [9, 9], [60], [1, 1, 1, 64], [33]]])
def test_a_replay_leaves_zeros_in_padded_rows_and_eagers_values_in_real_ones(
    served: TritonMLADecode, steps: list[list[int]]
) -> None:
    eager = TritonMLADecode()
    for lengths in steps:
        requests = len(lengths)
        assert served.step(lengths) == eager.step(lengths)
        assert torch.equal(served.attended[:requests], eager.attended)
        assert torch.equal(served.log_sums[:requests], eager.log_sums)
        assert not served.attended[requests:].any()
        assert (served.log_sums[requests:] == MINUS_INFINITY).all(), "what a merge over ranks takes as no tokens"


def test_the_nan_of_a_real_row_stays(served: TritonMLADecode) -> None:
    """It is a defect of its own, which must not be hidden."""
    served.metadata([7, 40], CAPTURED)
    served.cache[served.tables[1, 0].long(), 3] = float("nan")
    served.step([7, 40])
    assert served.attended.isnan().flatten(1).all(1).tolist() == [False, True, False, False]
    assert served.log_sums[1].isnan().all()
    assert not served.attended[2:].any()


@pytest.mark.parametrize(
    "lengths", [[0, 5], [5, 0, 7], [0], [0, 0, 0], [-1, 4]], ids=["first", "middle", "one", "all", "negative"]
)
def test_without_a_graph_a_row_without_tokens_is_zeros_too(lengths: list[int]) -> None:
    """With decode context parallelism a request may have no tokens on a rank."""
    output, log_sums = attended(lengths)
    for row, length in enumerate(lengths):
        assert bool(output[row].any()) == (length > 0)
        assert bool((log_sums[row] == MINUS_INFINITY).all()) == (length < 1)
    assert output.isfinite().all()


def test_a_batch_without_rows_is_one(own: Any) -> None:
    own(RuntimeError())
    wrapped, activity = around(launching(stand_in))
    wrapped(**arguments(rows=0))
    assert activity.error is None


@pytest.mark.skipif(
    "divmod" not in inspect.getsource(triton_mla.TritonMLAImpl.forward_mqa), reason="one token a row up to 0.30"
)
def test_every_token_of_a_padded_row_is_zeros() -> None:
    output, log_sums = attended([5, 2, 0], tokens=2)
    assert output.flatten(1).any(1).tolist() == [True, True, True, True, False, False]
    assert output.isfinite().all()
    assert (log_sums[4:] == MINUS_INFINITY).all()


def around(launch: Any) -> tuple[Any, Activity]:
    """Return the function that the kernels' module calls in the place of *launch*, and the activity with its errors."""
    activity, (zeros, _) = layers(FIX, "divides-by-nothing")
    return zeros.wrap(launch), activity


def launching(launch: Any) -> Any:
    """*launch*, with the globals that it looks up its kernel in: each launch leaves its name and what it was given."""
    names = {"torch": torch, "_fwd_kernel_stage2": _Launcher("stock"), "launched": []}
    return FunctionType(launch.__code__, names | {"__name__": triton_decode_attention.__name__})


class _Launcher:
    """Stands in for a kernel. It leaves 3 in all rows, as stock's would leave what it computes or NaN."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self._name, self._error = name, error

    def __getitem__(self, grid: Any) -> Any:
        def launch(o: Any, launched: list[str]) -> None:
            launched.append(self._name)
            if self._error is not None:
                raise self._error
            o.fill_(3.0)

        return launch


def stand_in(logits: Any, q: Any, o: Any, lse: Any, v_buffer: Any, b_seq_len: Any, num_kv_splits: Any) -> Any:
    _fwd_kernel_stage2[o.shape](o, launched)  # type: ignore[name-defined]  # noqa: F821 - see `launching`
    return num_kv_splits


def arguments(rows: int, lengths: list[int] | None = None) -> dict[str, Any]:
    inputs: dict[str, Any] = dict.fromkeys(("logits", "q", "lse", "v_buffer"))
    inputs["o"] = torch.zeros(rows, HEADS, LATENT, dtype=torch.bfloat16)
    inputs["b_seq_len"] = torch.tensor([1] * rows if lengths is None else lengths, dtype=torch.int32)
    inputs["num_kv_splits"] = 5
    return inputs


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what stands in for the fix's own kernel: one that leaves 3, or raises this error."""

    def put(error: Exception | None) -> None:
        monkeypatch.setattr(_triton_mla_reduce, "reduce_kernel", _Launcher("own", error))

    return put


def test_the_own_kernel_is_launched_in_the_place_of_stocks_and_alone(own: Any) -> None:
    own(None)
    stock = launching(stand_in)
    wrapped, activity = around(stock)
    inputs = arguments(3, [4, 0, 1])
    assert wrapped(**inputs) == 5
    assert stock.__globals__["launched"] == ["own"]
    assert (inputs["o"] == 3.0).all(), "nothing else is written"
    assert activity.error is None


@pytest.mark.parametrize("by_position", [False, True])
def test_where_it_cannot_be_compiled_stock_runs_and_zeros_are_filled_in(own: Any, by_position: bool) -> None:
    own(RuntimeError("no such architecture"))
    stock = launching(stand_in)
    wrapped, activity = around(stock)
    for number in (1, 2):
        inputs = arguments(3, [4, 0, 1])
        output, lengths = inputs["o"], inputs["b_seq_len"].clone()
        names = ("logits", "q", "o", "lse", "v_buffer", "b_seq_len", "num_kv_splits")
        assert (wrapped(*map(inputs.get, names)) if by_position else wrapped(**inputs)) == 5
        assert output[:, 0, 0].tolist() == [3.0, 0.0, 3.0]
        assert torch.equal(inputs["b_seq_len"], lengths)
        assert stock.__globals__["launched"] == ["own", *["stock"] * number], "it is not tried again"
    assert activity.error is None, "the remedy is there"


def test_where_it_cannot_be_imported_stock_runs_and_zeros_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("vllm_graphfix.fixes._triton_mla_reduce")
    monkeypatch.setitem(sys.modules, "vllm_graphfix.fixes._triton_mla_reduce", None)
    wrapped, activity = around(launching(stand_in))
    inputs = arguments(2, [0, 7])
    wrapped(**inputs)
    assert inputs["o"][:, 0, 0].tolist() == [0.0, 3.0]
    assert activity.error is None


@pytest.mark.parametrize("lengths", [[0], [0, 0], [0, 0, 0, 0, 0]])
def test_other_lengths_than_rows_leave_the_output_as_the_kernel_did(own: Any, lengths: list[int]) -> None:
    own(RuntimeError())
    wrapped, activity = around(launching(stand_in))
    inputs = arguments(4, lengths)
    wrapped(**inputs)
    assert (inputs["o"] == 3.0).all()
    assert activity.error is not None


def test_an_error_of_stocks_own_launch_comes_out_as_it_is() -> None:
    error = ZeroDivisionError()
    stock = launching(stand_in)
    stock.__globals__["_fwd_kernel_stage2"] = _Launcher("stock", error)
    wrapped, _ = around(stock)
    with pytest.raises(ZeroDivisionError) as raised:
        wrapped(**arguments(1))
    assert raised.value is error


def test_the_kernel_gets_the_same_tensors_as_on_stock(served: TritonMLADecode) -> None:
    """Lengths and blocks of padded rows too: they are the model runner's, and other builders read them."""
    metadata = served.metadata([7, 40], CAPTURED)
    assert metadata.decode.seq_lens.data_ptr() == served.lengths.data_ptr()
    assert served.lengths.tolist() == [7, 40, 0, 0]
    assert not served.tables[2:].any()


@pytest.fixture
def count() -> Any:
    counter = activity_of("triton-mla-padding").counter(PADDED_BATCH_DECODED)
    before = counter.count
    return lambda: counter.count - before


def test_a_padded_batch_is_counted_once(served: TritonMLADecode, count: Any) -> None:
    for lengths, counted in (([7, 40], 1), ([1, 1, 1, 1], 1), ([9], 2), ([3, 3, 3], 3)):
        served.step(lengths)
        assert count() == counted


def test_captures_and_batches_without_padding_are_not_counted(count: Any) -> None:
    with cpu_cuda_graphs():
        served = TritonMLADecode(captured_requests=CAPTURED)
        served.step([5] * CAPTURED)
    served.builder.build_for_cudagraph_capture(common_metadata(served, CAPTURED))
    TritonMLADecode().step([5, 6])
    assert count() == 0


def test_a_subclass_of_tritons_builder_is_counted_and_another_backends_is_not(count: Any) -> None:
    class OfAModel(triton_mla.TritonMLAMetadataBuilder):  # type: ignore[misc]
        pass

    class OfAnotherBackend(MLACommonMetadataBuilder):  # type: ignore[misc]
        pass

    decode = TritonMLADecode()
    for kind, counted in ((OfAnotherBackend, 0), (OfAModel, 1)):
        decode.builder = metadata_builder(kind)
        decode.metadata([5, 6], CAPTURED)
        assert count() == counted


def test_the_launch_is_wrapped_and_the_kernel_is_stocks() -> None:
    """Other backends take the kernel from that module, and launch it themselves."""
    assert triton_decode_attention._decode_softmax_reducev_fwd.__wrapped__.__module__ == KERNELS
    assert _triton_mla_reduce._stock_reduce is STOCK_KERNEL  # type: ignore[attr-defined]
    assert STOCK_KERNEL is not _triton_mla_reduce.reduce_kernel
    assert not hasattr(triton_mla.decode_attention_fwd, "__wrapped__")
