"""What two scenarios of the CPU double take for granted of FlashAttention, asked of its kernels on a GPU.

    PYTHONPATH=SITE python benchmarks/flash_kernels.py

`ubatch-max-seq-len`: a window is dropped if the longest length that the kernel is told of fits in it. The same decode
is launched with the requests' longest length, with 1, and without a window. `encoder-padding`: NaN in values behind the
last image reaches its rows. An encoder's attention, by vLLM's own function behind its operator, has NaN there and
numbers before. All versions of FlashAttention that vLLM has for this GPU are asked, and can be imported. Exit code 1 if
none does either.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

TOKENS, HEADS, WIDTH, WINDOW, PAGE = 512, 8, 64, 32, 16
IMAGE = 150
"""Tokens of the image; no multiple of a tile."""


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    import torch

    if not torch.cuda.is_available():
        print("not run: torch sees no GPU", file=sys.stderr)
        return 2
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    torch.manual_seed(0)
    seen = []
    for version in (2, 3, 4):
        if is_fa_version_supported(version):
            try:
                dropped, reached = drops_a_window(version), nan_reached(version)
            except ImportError as error:
                print(f"FlashAttention {version}: not run: {error}")
                continue
            does = "drops" if dropped else "keeps"
            print(f"FlashAttention {version}: told of a longest length of 1, it {does} a window")
            print(f"FlashAttention {version}: NaN behind an image reaches {reached} of its {IMAGE} rows")
            seen += [dropped, reached > 0]
    return 0 if any(seen) else 1


def random(*shape: int) -> Any:
    import torch

    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def drops_a_window(version: int) -> bool:
    """Whether a decode that is told of a longest length of 1 is the one without a window."""
    import torch
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    query, cache = random(2, HEADS, WIDTH), random(2, 2 * TOKENS // PAGE, PAGE, HEADS, WIDTH)
    tables = torch.arange(2 * TOKENS // PAGE, dtype=torch.int32, device="cuda").view(2, -1)
    lengths = torch.tensor([TOKENS, TOKENS - 9], dtype=torch.int32, device="cuda")
    starts = torch.arange(3, dtype=torch.int32, device="cuda")

    def decode(longest: int, window: list[int]) -> Any:
        return flash_attn_varlen_func(
            query,
            *cache,
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=longest,
            seqused_k=lengths,
            causal=True,
            window_size=window,
            block_table=tables,
            fa_version=version,
        )

    right, told, whole = decode(TOKENS, [WINDOW, 0]), decode(1, [WINDOW, 0]), decode(TOKENS, [-1, -1])
    return is_close(told, whole) and not is_close(told, right)


def is_close(one: Any, other: Any) -> bool:
    return float((one - other).abs().max()) < 0.02


def nan_reached(version: int) -> int:
    """How many rows of an image have NaN if the values behind it are."""
    import torch
    from vllm.v1.attention.ops.vit_attn_wrappers import flash_attn_maxseqlen_wrapper

    query, key, value = random(3, 1, TOKENS, HEADS, WIDTH)
    value[:, IMAGE:] = float("nan")
    starts = torch.tensor([0, IMAGE, IMAGE], dtype=torch.int32, device="cuda")
    attended = flash_attn_maxseqlen_wrapper(
        query, key, value, 1, False, version, cu_seqlens=starts, max_seqlen=torch.tensor(TOKENS)
    )
    return int(attended[0, :IMAGE].isnan().flatten(1).any(1).sum())


if __name__ == "__main__":
    sys.exit(main())
