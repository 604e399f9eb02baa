"""The case `input-norm` of `image_encoder.py`: images that the model normalises on the device.

An engine without graphs says what is right. One of stock and one with the fix `encoder-input-norm` have graphs for all
images, and then graphs that most images are too large for. FlashAttention writes to zeros in all of them, so that
padding does no harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from measuring.encoder_case import Case, Engine, Form
from measuring.encoder_padding import STEPS, judge

FORMS = (Form("graphs for all", "zeros", (8, 32), 4), Form("graphs for small images", "zeros", (4, 8), 4))


def engines(_: Sequence[str]) -> Iterator[Engine]:
    yield Engine("eager", STEPS, {"enforce_eager": True})
    yield Engine("stock", STEPS, forms=FORMS)
    yield Engine("patched", STEPS, forms=FORMS, plugin=True)


def is_unexpected(findings: Mapping[str, Any]) -> bool:
    """Whether the fix leaves something wrong, or stock is not as its release lets expect."""
    wrong = {
        name: [bool(each["nan"] or each["different"]) for each in findings.get(name, {}).values()]
        for name in ("stock", "patched")
    }
    if any(wrong["patched"]) or not all(wrong.values()):
        return True
    return findings["expected"] is not None and {*wrong["stock"]} != {findings["expected"]}


CASE = Case(
    fix="encoder-input-norm",
    engines=engines,
    judge=judge,
    is_wrong=is_unexpected,
    shows_on_stock=lambda _: True,
)
