"""FlashMLA's stand-in kernels compute attention, by the plan that they are given and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_graphfix.verify.double import flashmla
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs

HEADS, WIDTH, VALUE_WIDTH, BLOCK, SCALE = 2, 6, 4, 4, 0.4


class Batch:
    def __init__(self, lengths: list[int], query_tokens: int = 1) -> None:
        generator = torch.Generator().manual_seed(1)
        self.q = torch.randn(len(lengths), query_tokens, HEADS, WIDTH, generator=generator)
        self.cache = torch.randn(32, BLOCK, 1, WIDTH, generator=generator)
        self.table = torch.randperm(32, generator=generator)[: 8 * len(lengths)].view(len(lengths), 8).int()
        self.lengths = torch.tensor(lengths, dtype=torch.int32)

    def decode(self, plan: tuple[torch.Tensor, ...] | None = None) -> tuple[torch.Tensor, ...]:
        results: tuple[torch.Tensor, ...] = torch.ops._flashmla_C.dense_decode_fwd(
            self.q, self.cache, VALUE_WIDTH, self.lengths, self.table, SCALE, True, *(plan or (None, None)), None
        )
        return results

    def expected(self) -> torch.Tensor:
        """Causal attention over a request's tokens, written out."""
        rows = []
        for request, length in enumerate(self.lengths.tolist()):
            keys = self.cache[self.table[request].long()].reshape(-1, WIDTH)
            for query in range(self.q.shape[1]):
                visible = keys[: length - self.q.shape[1] + 1 + query]
                weights = torch.softmax(self.q[request, query] @ visible.T * SCALE, -1)
                rows.append(weights @ visible[:, :VALUE_WIDTH])
        return torch.stack(rows).view(len(rows) // self.q.shape[1], self.q.shape[1], HEADS, VALUE_WIDTH)


@pytest.mark.parametrize(("lengths", "query_tokens"), [([13], 1), ([5, 29, 8], 1), ([2, 31, 16, 3], 2)])
def test_decode_is_attention(lengths: list[int], query_tokens: int) -> None:
    """With a plan of its own lengths, whatever parts it was cut into."""
    batch = Batch(lengths, query_tokens)
    torch.testing.assert_close(batch.decode()[0], batch.expected())


def test_a_request_of_length_zero_gives_zeros() -> None:
    """Padded rows are planned too, and written."""
    out = Batch([9, 0]).decode()[0]
    assert out[0].isfinite().all()
    assert (out[1] == 0).all()


def test_a_plan_of_shorter_lengths_leaves_tokens_out() -> None:
    """The decode kernel attends to what the plan lists, not to what the lengths say."""
    batch = Batch([30, 12])
    out = batch.decode(flashmla.plan_blocks(torch.tensor([1, 1]), BLOCK))[0]
    assert (out - batch.expected()).abs().max() > 0.01
    assert out.isfinite().all()


def test_a_poisoned_plan_gives_nan() -> None:
    """A plan that a graph recorded and nothing has computed yet."""
    batch = Batch([30, 12])
    poison = torch.full((flashmla.SM_PARTS, flashmla.PLAN_WIDTH), -(2**30), dtype=torch.int32)
    assert batch.decode((poison, torch.zeros(3, dtype=torch.int32)))[0].isnan().all()


def test_a_graph_records_the_planner_only_without_a_plan() -> None:
    """This is how capture-state comes about."""
    batch = Batch([30, 12])
    plan = batch.decode()[2:]
    recorded = []
    with cpu_cuda_graphs(), torch.inference_mode():
        for each in (None, plan):
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                batch.decode(each)
            recorded.append([operation.name.rpartition("::")[2] for operation in graph.operations])
    assert recorded == [["plan_stand_in", "decode_stand_in"], ["decode_stand_in"]]
