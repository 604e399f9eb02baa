"""cutlass-mla-padding on vLLM's own implementation: what is left in the rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from activities import activity_of, layers
from vllm_graphfix.fixes.cutlass_mla_padding import FIX, PADDED_BATCH_DECODED
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.mla_decode import CAPTURED, HEADS
from vllm_graphfix.verify.double.scenarios.cutlass_mla_padding import CutlassMLADecode, cpu_cutlass_mla

MINUS_INFINITY = float("-inf")


@pytest.fixture(autouse=True)
def _kernel() -> Iterator[None]:
    with cpu_cutlass_mla():
        yield


@pytest.mark.parametrize("log_sums", [False, True], ids=["one rank", "ranks that share the context"])
def test_a_replay_leaves_zeros_in_padded_rows_and_eagers_values_in_real_ones(log_sums: bool) -> None:
    counter = activity_of("cutlass-mla-padding").counter(PADDED_BATCH_DECODED)
    before = counter.count
    eager = CutlassMLADecode(log_sums=log_sums)
    with cpu_cuda_graphs():
        served = CutlassMLADecode(CAPTURED, log_sums=log_sums)
        for lengths in ([7, 40], [1, 2, 3, 4], [9]):
            requests = len(lengths)
            assert served.step(lengths) == eager.step(lengths)
            assert not served.attended[requests:].any()
            if log_sums:
                assert torch.equal(served.log_sums[:requests], eager.log_sums)
                assert (served.log_sums[requests:] == MINUS_INFINITY).all(), "what a merge takes as no tokens"
    assert counter.count == before + 2, "captures and full batches are not counted"


def test_the_nan_of_a_real_row_stays() -> None:
    """It is a defect of its own, which must not be hidden."""
    decode = CutlassMLADecode()
    metadata = decode.metadata([7, 0, 40], 3)
    decode.cache[decode.tables[2, 0].long(), 3] = float("nan")
    attended, _ = decode.attend(decode.query[:3], metadata)
    assert attended.isnan().flatten(1).all(1).tolist() == [False, False, True]


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0, 0, 0]])
def test_other_lengths_than_rows_leave_the_output_as_the_kernel_did(lengths: list[int]) -> None:
    activity, (zeros, _) = layers(FIX, "fresh-output")
    output, log_sums = torch.ones(4, HEADS, 3), torch.ones(4, HEADS)
    around = zeros.wrap(lambda out, lse, q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens: out)
    assert around(output, log_sums, None, None, None, torch.tensor(lengths)) is output
    assert output.all()
    assert log_sums.all()
    assert activity.error is not None
