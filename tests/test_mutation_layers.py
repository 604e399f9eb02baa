"""A layer that is given what it does not know: stock gets the very objects, its answer is handed on, and the fix remembers why."""

from __future__ import annotations

from typing import Any

import pytest
from test_observe import SHAPES, Hostile
from test_observe import STOCK as OBSERVED

from vllm_graphfix.fix import Patch
from vllm_graphfix.fixes import BY_NAME, FIXES


def _init(self: Any, vllm_config: Any, device: Any) -> Any:
    return locals()


def _set_forward_context(attn_metadata: Any, vllm_config: Any, num_tokens: Any) -> Any:
    return locals()


STOCK = {**OBSERVED, "EagleCudaGraphManager.__init__": _init, "set_forward_context": _set_forward_context}
"""Stand-ins for vLLM's functions; each returns what it was given."""

LAYERS = [
    pytest.param(fix.name, patch, id=f"{fix.name}-{shape}-{patch.name}")
    for fix in FIXES
    for shape in SHAPES[fix.name]
    for patch in fix.patches(shape)
]
WRAPPED = {"create_forward_fn", "generate_fn"}
"""Arguments in whose place stock gets one of ours that calls it."""
TELLS = {
    "EagleCudaGraphManager.__init__",
    "EagleSpeculator.generate_draft",
    "prepare_eagle_inputs",
    "BaseMambaAttentionMetadataBuilder._compute_common_metadata",
    "FlashMLAMetadataBuilder._build_decode",
}
"""Those that look at what they are given before or after stock does."""


@pytest.mark.parametrize(("name", "patch"), LAYERS)
@pytest.mark.parametrize("kind", [object, Hostile], ids=["object", "hostile"])
def test_a_layer_that_fails_lets_vllm_do_as_stock_does(name: str, patch: Patch, kind: Any) -> None:
    fix = BY_NAME[name]
    fix.fallback.reason = None
    before = [event.count for event in fix.events]
    names = STOCK[patch.name].__code__.co_varnames[: STOCK[patch.name].__code__.co_argcount]
    given = {each: kind() for each in names}
    returned = patch.wrap(STOCK[patch.name])(*given.values())
    assert [event.count for event in fix.events] == before
    if patch.name != "EagleCudaGraphManager.__init__":  # returns nothing, as any
        assert all(returned[key] is value for key, value in given.items() if key not in WRAPPED)
    if patch.name in TELLS:
        assert str(fix.fallback.reason).startswith(("AttributeError: ", "RuntimeError: ", "TypeError: "))
    fix.fallback.reason = None
