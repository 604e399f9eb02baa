"""draft-decode-mode on nightlies that lack either half of PR 39773, or both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from activities import layers
from behaviours import check_behaviours
from nightly import SPECULATOR, make_nightly
from stock import release_root
from vllm_graphfix import manifest
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.draft_decode_mode import FIX
from vllm_graphfix.source.files import open_source


@pytest.mark.xdist_group("0.20.0")
@pytest.mark.parametrize(
    ("without_mode", "without_zero_fill"),
    [
        pytest.param(True, True, id="both", marks=pytest.mark.slow),
        pytest.param(True, False, id="mode"),
        pytest.param(False, True, id="indices"),
    ],
)
def test_nightlies_have_full_draft_decodes_or_none_and_no_old_indices(
    tmp_path: Path, without_mode: bool, without_zero_fill: bool
) -> None:
    nightly = make_nightly(
        release_root("0.20.0"), tmp_path / "nightly", without_mode=without_mode, without_zero_fill=without_zero_fill
    )
    check_behaviours(nightly, "draft_decode_mode", active=["draft-decode-mode"])


def _0_20_0(input_buffers: object, input_batch: object, last_token_indices: list[int], rest: int) -> int:
    return rest


def _0_21_0(last_token_indices: list[int], step: object, input_buffers: object, input_batch: object, rest: int) -> int:
    return rest


class IndicesStandIn(list[int]):
    """A stand-in for a tensor, as far as it is zeroed."""

    def __getitem__(self, rows: Any) -> Any:
        indices, chosen = self, range(len(self))[rows]
        return SimpleNamespace(zero_=lambda: [indices.__setitem__(row, 0) for row in chosen])


@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
@pytest.mark.parametrize("stock", [_0_20_0, _0_21_0])
def test_old_indices_are_zeroed_in_whatever_order_the_arguments_come(stock: Callable[..., int], by_name: bool) -> None:
    """0.21.0 changed the order; a fork may lack the remedy there."""
    indices = IndicesStandIn([7, 7, 7, 7])
    named = {
        "input_buffers": None,
        "input_batch": SimpleNamespace(num_reqs=2),
        "last_token_indices": indices,
        "step": 0,
    }
    names = stock.__code__.co_varnames[: stock.__code__.co_argcount]
    arguments = {name: named.get(name, 5) for name in names}
    _, offered = layers(FIX, "two-managers-indices")
    patch = next(patch for patch in offered if patch.name == "prepare_eagle_inputs")
    patched = patch.wrap(stock)
    assert (patched(**arguments) if by_name else patched(*arguments.values())) == 5
    assert list(indices) == [7, 7, 0, 0]


def test_indices_that_are_prepared_from_other_arguments_are_unrecognised(tmp_path: Path) -> None:
    nightly = make_nightly(release_root("0.21.0"), tmp_path / "nightly", without_mode=False, without_zero_fill=True)
    speculator = nightly / SPECULATOR
    assert manifest.diagnose(FIX, open_source(nightly)).verdict is Verdict.AFFECTED
    speculator.write_text(speculator.read_text().replace("input_batch", "batch"))
    assert manifest.diagnose(FIX, open_source(nightly)).verdict is Verdict.UNRECOGNISED
