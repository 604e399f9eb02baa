"""cutlass-mla-padding (PR 37442): two requests in a graph of four, whose padded rows keep the NaN of unwritten memory.

The NaN of the padded rows reaches the requests by a common scale. Real: vLLM's builder, implementation and wrapper of
the kernel of Cutlass MLA. Stand-ins: the kernel, which needs a Blackwell GPU and, according to PR 37442, writes nothing
for a row of length 0; quantisation to fp8 with one scale for the batch.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm import platforms

from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.mla_decode import CAPTURED, MLADecode, metadata_builder
from vllm_graphfix.verify.measurement import Measurement

LATENT, ROPE = 512, 64
"""The only widths that the kernel takes."""


def run(*, trigger: bool = True) -> Measurement:
    """Decode two requests. Without *trigger*, four, which fill the graph."""
    steps = [[7 + step, 40 + step, *([] if trigger else [16, 1])] for step in range(3)]
    with cpu_cutlass_mla():
        eager = CutlassMLADecode()
        expected = [eager.step(lengths) for lengths in steps]
        with cpu_cuda_graphs():
            graphed = CutlassMLADecode(captured_requests=CAPTURED)
            replayed = [graphed.step(lengths) for lengths in steps]
    return Measurement(
        numbers=f"every 64th of the quantised attention output of {len(steps[0])} requests padded to 4 over 3 steps",
        eager=tuple(chain.from_iterable(values[::64] for values in expected)),
        graphed=tuple(chain.from_iterable(values[::64] for values in replayed)),
        counted={"rows-left-as-they-were": len(steps)},
    )


@contextlib.contextmanager
def cpu_cutlass_mla() -> Iterator[None]:
    """Decode with Cutlass MLA on a CPU within the block."""
    with mock.patch.object(torch.ops._C, "sm100_cutlass_mla_decode", kernel_stand_in, create=True):
        yield


def backend() -> Any:
    """Import vLLM's module, which allocates a workspace on a GPU on import, without one."""
    processors = SimpleNamespace(multi_processor_count=148)
    with (
        mock.patch.object(torch, "empty", return_value=torch.empty(0)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=processors),
        mock.patch.object(platforms.Platform, "num_compute_units", create=True, return_value=148),
    ):
        return importlib.import_module("vllm.v1.attention.backends.mla.cutlass_mla")


def kernel_stand_in(
    out: torch.Tensor,
    lse: torch.Tensor,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c_and_k_pe_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    workspace: torch.Tensor,
    scale: float,
    num_kv_splits: int,
) -> None:
    """Stand in for `torch.ops._C.sm100_cutlass_mla_decode`: write `out` (rows, heads, values) and `lse`."""
    torch.ops.vllm_graphfix.cutlass_mla_decode(
        [out, lse, q_nope, q_pe, kv_c_and_k_pe_cache, page_table, seq_lens], scale
    )


# No tensor is declared as written to, as in `triton_kernels`.
@torch.library.custom_op(
    "vllm_graphfix::cutlass_mla_decode", mutates_args=(), schema="(Tensor[] tensors, float scale) -> ()"
)
def _cutlass_mla_decode(tensors: list[torch.Tensor], scale: float) -> None:
    out, lse, nope, rope, cache, tables, lengths = tensors
    heads = nope.shape[1]
    for row, length in enumerate(lengths.tolist()):
        if length < 1:
            continue
        keys = cache[tables[row].long()].flatten(0, 1)[:length].float()
        scores = torch.cat((nope[row], rope[row]), dim=-1).float() @ keys.T * scale
        out[row, :heads] = (scores.softmax(-1) @ keys[:, :LATENT]).to(out.dtype)
        if lse.numel():
            lse[row, :heads] = scores.logsumexp(-1)


@_cutlass_mla_decode.register_fake
def _(tensors: list[torch.Tensor], scale: float) -> None: ...


class CutlassMLADecode(MLADecode):
    """Latent attention on Cutlass."""

    latent, rope, page_size, max_pages = LATENT, ROPE, 128, 1
    dtype = torch.bfloat16

    def __init__(self, captured_requests: int | None = None, *, log_sums: bool = False) -> None:
        cutlass_mla = backend()
        self.implementation: Any = object.__new__(cutlass_mla.CutlassMLAImpl)
        self.implementation.__dict__.update(
            kv_lora_rank=LATENT,
            qk_rope_head_dim=ROPE,
            scale=(LATENT + ROPE) ** -0.5,
            kv_cache_dtype="auto",
            need_to_return_lse_for_decode=log_sums,
            _num_kv_splits=1,
            _workspace=SimpleNamespace(ensure_size=lambda *_: None, get_buf=lambda: torch.zeros(1)),
            _decode_out=None,  # what 0.18.0 to 0.19.1 keep
        )
        super().__init__(metadata_builder(cutlass_mla.CutlassMLAMetadataBuilder), captured_requests)

    def attend(self, query: torch.Tensor, metadata: Any) -> tuple[torch.Tensor, Any]:
        scales = SimpleNamespace(_q_scale_float=1.0, _k_scale_float=1.0)
        forward = getattr(self.implementation, "forward_mqa", None) or self.implementation._forward_decode
        attended: tuple[torch.Tensor, Any] = forward(query, self.cache, metadata, scales)
        return attended
