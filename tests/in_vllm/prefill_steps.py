"""Steps for tests of prefill-dispatch on both model runners: models with recurrent layers, lengths of a decode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from activities import activity_of
from vllm_graphfix.fixes.prefill_dispatch import PREFILL_AS_DECODE
from vllm_graphfix.verify.double.unpinned import unpinned

LENGTHS = pytest.mark.parametrize("length", [1, 2, 4])
"""Tokens of a decode: one, and its drafts."""
ACTIVITY = activity_of("prefill-dispatch")
AS_DECODE = ACTIVITY.counter(PREFILL_AS_DECODE)


@pytest.fixture(autouse=True)
def nothing_counted() -> Iterator[None]:
    ACTIVITY.reset()
    with unpinned():
        yield
    assert ACTIVITY.error is None


def recurrent(kind: Any = MambaSpec) -> Any:
    return kind(block_size=32, shapes=((2,),), dtypes=(torch.float32,))


def attention() -> Any:
    return FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)


def layers(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layers.{number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
