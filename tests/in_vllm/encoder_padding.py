"""encoder-padding: whose kernel is another, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends import fa_utils
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

from activities import activity_of

ACTIVITY = activity_of("encoder-padding")


def kernel(q: torch.Tensor, *_: Any, out: torch.Tensor | None = None) -> torch.Tensor | None:
    """Stands in for FlashAttention: what it was given to write to."""
    return out


@pytest.fixture(autouse=True)
def on_cuda() -> Iterator[None]:
    with (
        mock.patch.object(fa_utils, "flash_attn_varlen_func", kernel, create=True),
        mock.patch.object(type(current_platform), "is_cuda", return_value=True),
    ):
        yield
    ACTIVITY.error = None


def attended(**keywords: Any) -> Any:
    return fa_utils.flash_attn_varlen_func(torch.ones(8, 2, 4), torch.ones(8, 1, 4), torch.ones(8, 1, 6), **keywords)


def captured(seen: Any) -> Any:
    """Return the result of *seen* while a manager captures."""
    result = []

    def capture_inputs(*_: Any) -> Any:
        result.append(seen())
        raise InterruptedError  # no model is there to be captured

    manager: Any = object.__new__(EncoderCudaGraphManager)
    manager.model = mock.Mock(prepare_encoder_cudagraph_capture_inputs=capture_inputs)
    vars(manager).update(max_batch_size=1, max_frames_per_batch=0, device="cpu", dtype=torch.float32, budget_graphs={})
    with pytest.raises(InterruptedError):
        manager._capture_budget_graph(8)
    (inputs,) = result
    return inputs


def test_a_capture_gets_zeros_and_is_undone_even_if_it_fails() -> None:
    assert captured(attended).equal(torch.zeros(8, 2, 6))
    assert fa_utils.flash_attn_varlen_func is kernel
    assert attended() is None
    assert ACTIVITY.error is None


def test_memory_of_the_caller_is_written_to() -> None:
    own = torch.ones(8, 2, 6)
    assert captured(lambda: attended(out=own)) is own


def test_other_platforms_keep_their_kernel() -> None:
    with mock.patch.object(type(current_platform), "is_cuda", return_value=False):
        assert captured(lambda: fa_utils.flash_attn_varlen_func) is kernel
    assert ACTIVITY.error is None


def test_a_platform_without_the_kernel_is_an_error_of_the_fix_and_captures_as_stock() -> None:
    with mock.patch.object(fa_utils, "flash_attn_varlen_func"):
        del fa_utils.flash_attn_varlen_func
        assert captured(lambda: hasattr(fa_utils, "flash_attn_varlen_func")) is False
    assert "AttributeError" in str(ACTIVITY.error)
