"""A kernel around the second stage of Triton's MLA decode, for `triton-mla-padding`.

Imported where vLLM's own kernels are, and never before. Triton evaluates the annotations, so they must not be strings.
"""

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.triton_decode_attention import _fwd_kernel_stage2 as _stock_reduce


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def reduce_kernel(  # type: ignore[no-untyped-def]
    Mid_O,
    o,
    lse,
    B_Seqlen,
    stride_mid_ob,
    stride_mid_oh,
    stride_mid_os,
    stride_obs,
    stride_oh,
    stride_lse_bs,
    NUM_KV_SPLITS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    Lv: tl.constexpr,
    OUTPUT_FP16: tl.constexpr = 0,
) -> None:
    """Reduce one row and head per program as vLLM's kernel does, but write zeros to a row without tokens.

    vLLM's kernel is inlined, so there is no additional launch, and rows with tokens get its result. The log-sum-exp of
    a row without tokens is -inf, as with vLLM's kernel.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(B_Seqlen + row) > 0:
        _stock_reduce(
            Mid_O,
            o,
            lse,
            B_Seqlen,
            stride_mid_ob,
            stride_mid_oh,
            stride_mid_os,
            stride_obs,
            stride_oh,
            stride_lse_bs,
            NUM_KV_SPLITS,
            BLOCK_DV,
            Lv,
            OUTPUT_FP16,
        )
    else:
        values = tl.arange(0, BLOCK_DV)
        zeros = tl.zeros([BLOCK_DV], dtype=tl.float32)
        tl.store(o + row.to(tl.int64) * stride_obs + head * stride_oh + values, zeros, mask=values < Lv)
        tl.store(lse + row.to(tl.int64) * stride_lse_bs + head, -float("inf"))
