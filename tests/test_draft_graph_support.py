"""draft-graph-support: when a backend supports full graphs of drafts."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

import pytest

from vllm_graphfix.fixes.draft_graph_support import _supports

Support = Enum("Support", {"ALWAYS": 3, "UNIFORM_BATCH": 2, "UNIFORM_SINGLE_TOKEN_DECODE": 1, "NEVER": 0})
"""As vLLM has it."""


@pytest.mark.parametrize(
    ("threshold", "support", "supports"),
    [
        (None, Support.ALWAYS, True),
        (None, Support.UNIFORM_BATCH, True),
        (None, Support.UNIFORM_SINGLE_TOKEN_DECODE, False),
        (None, Support.NEVER, False),
        (3, Support.UNIFORM_BATCH, True),
        (2, Support.ALWAYS, False),
    ],
)
def test_support_needs_a_class_that_has_it_and_a_builder_that_knows_decodes(
    threshold: int | None, support: Support, supports: bool
) -> None:
    builder = SimpleNamespace(reorder_batch_threshold=threshold, get_cudagraph_support=lambda config, spec: support)
    group = SimpleNamespace(get_metadata_builder=lambda ubatch: builder, kv_cache_spec=None)
    assert _supports(SimpleNamespace(vllm_config=None), group, 3, "UNIFORM_BATCH") is supports
