"""A layer that is given what it does not know.

Stock gets the very objects, its answer is handed on, and the fix remembers why.
"""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import pytest

from activities import Layer, layers
from stock_stand_ins import Hostile, arguments_for, shapes, stock_of
from vllm_graphfix.fix import Activity, Counter
from vllm_graphfix.fixes import FIXES, draft_decode_mode

LAYERS = [
    pytest.param(activity, layer, id=f"{fix.name}-{shape}-{layer.name}")
    for fix in FIXES
    for shape in shapes(fix)
    for activity, offered in [layers(fix, shape)]
    for layer in offered
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


@pytest.mark.parametrize(("activity", "patch"), LAYERS)
@pytest.mark.parametrize("kind", [object, Hostile], ids=["object", "hostile"])
def test_a_layer_that_fails_lets_vllm_do_as_stock_does(activity: Activity, patch: Layer, kind: Any) -> None:
    activity.error = None
    before = activity.counts
    arguments = arguments_for(patch, kind)
    returned = patch.wrap(stock_of(patch))(*arguments.values())
    assert activity.counts == before
    if not patch.name.endswith(".__init__"):  # which returns nothing
        assert all(returned[key] is value for key, value in arguments.items() if key not in WRAPPED)
    if patch.name in TELLS:
        assert str(activity.error).startswith(("AttributeError: ", "RuntimeError: ", "TypeError: "))


class Mode(enum.Enum):
    """Stands in for `CUDAGraphMode`."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = 3


@pytest.mark.parametrize(
    ("mode", "unchanged", "tokens"),
    [(Mode.FULL, True, None), (Mode.PIECEWISE, False, 4), (Mode.NONE, False, 3), (Mode.FULL_DECODE_ONLY, False, 3)],
)
def test_draft_decodes_are_counted_by_what_stock_would_have_run(
    mode: Mode, unchanged: bool, tokens: int | None
) -> None:
    def stock(self: Any) -> None:
        self.cudagraph_mode, self.cudagraph_sizes, self.pool = mode, {3: 4}, "a pool"

    _, offered = layers(draft_decode_mode.FIX, "one-manager")
    (patch,) = (layer for layer in offered if layer.name.endswith("__init__"))
    manager = SimpleNamespace()
    patch.wrap(stock)(manager)
    actual = (manager.cudagraph_mode, manager.cudagraph_sizes, manager.pool)
    assert actual == ((mode, {3: 4}, "a pool") if unchanged else (Mode.NONE, {}, None))
    stock_tokens = getattr(manager, "graphfix_stock_tokens", None)
    assert (stock_tokens and stock_tokens(3)) == tokens


@pytest.mark.parametrize(("mode", "tokens"), [(Mode.PIECEWISE, 8), (Mode.FULL, 3), (Mode.NONE, 3)])
def test_draft_decodes_are_counted_by_the_dispatch_of_stocks_manager(mode: Mode, tokens: int) -> None:
    dispatched = []

    def dispatch(*arguments: int) -> Any:
        dispatched.append(arguments)
        return SimpleNamespace(num_tokens=8, cg_mode=mode)

    stock, replacement = SimpleNamespace(dispatch=dispatch), SimpleNamespace(_graphs_captured=True)
    assert draft_decode_mode._tokens_by(stock, replacement)(3) == tokens
    assert dispatched == [(3, 3, 1)]  # so many requests and tokens, one token of each
    assert stock._graphs_captured is True


@pytest.mark.parametrize(("tokens", "counted"), [(3, 0), (4, 1)])
def test_draft_decodes_are_counted_where_the_fix_is_active_too(tokens: int, counted: int) -> None:
    activity, (patch,) = layers(draft_decode_mode.FIX, "one-manager", corrects=False)
    manager = SimpleNamespace(graphfix_stock_tokens=lambda _: tokens)
    patch.wrap(stock_of(patch))(SimpleNamespace(cudagraph_manager=manager), 3, 8, {}, None, None, Mode.NONE)
    assert activity.counts["decode-padded-in-piecewise"] == counted


@pytest.mark.parametrize(
    ("arguments", "counted"), [((None, None, Mode.PIECEWISE), 1), ((Mode.PIECEWISE, Mode.PIECEWISE, Mode.FULL), 0)]
)
def test_draft_decodes_are_counted_by_the_third_argument_where_it_has_no_name(
    arguments: tuple[Any, ...], counted: int
) -> None:
    activity, (patch,) = layers(draft_decode_mode.FIX, "one-manager", corrects=False)
    patch.wrap(stock_of(patch))(SimpleNamespace(cudagraph_manager=object()), 3, 8, {}, *arguments)
    assert activity.counts["decode-padded-in-piecewise"] == counted


def test_old_indices_begin_with_none() -> None:
    indices, old_indices = draft_decode_mode._OldIndices(), Counter()
    indices.observe(SimpleNamespace(num_reqs=0), old_indices)  # belongs to nobody
    speculator = type("Speculator", (), {"prefill_cudagraph_manager": SimpleNamespace(graphs={1: 1})})()
    indices.belong_to(speculator)
    for num_reqs, counted in ((0, 0), (2, 0), (1, 1), (2, 1), (0, 2)):
        indices.observe(SimpleNamespace(num_reqs=num_reqs), old_indices)
        assert old_indices.count == counted
