"""A layer that meets an error of its own while vLLM runs.

vLLM goes on as stock does, and the state of the fix says so.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from table import ALL_APPLIED, PAIRS, affected_by
from warm_release import run_in_fork

Outcome = dict[str, Any]

NEITHER = {
    # The second of two copies on the device: it fails with the device itself.
    "flashmla-fp8": ("splits.copy_",),
    # What brings a buffer back after a step without work: until its next use it names no block.
    "idle-rank": ("inference_mode", "bring_back"),
    # The states that are left then are those that capture-state made. No state is built after that, by stock neither.
    "draft-prefill-state": ("descriptor.cg_mode", "descriptor.cg_mode.name", "self._create"),
}
"""What leaves neither stock's numbers nor the right ones; said in the fix's state."""
IN_MAKE_TEST = {
    "0.17.1": tuple(fix for fix in affected_by("0.17.1") if fix not in affected_by("0.21.0")),
    "0.21.0": affected_by("0.21.0"),
}
"""The fixes whose layers fail on each release in `make test`: each on one."""
SEVENTH = 7
"""`make test` lets every seventh of the calls of a layer fail."""


# One run a release, whose tests share a process of pytest-xdist: `--dist loadgroup`.
@cache
def in_release(release: str, every: int) -> list[Outcome]:
    names = affected_by(release) if every == 1 else IN_MAKE_TEST[release]
    call = f"main({list(names)!r}, {every})"
    code = f"{(Path(__file__).parent / 'support' / 'failing_layers.py').read_text()}\n{call}\n"
    output = run_in_fork(release, code, ALL_APPLIED, timeout=1200).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"fix"')]


each_pair = pytest.mark.parametrize(
    ("name", "release", "every"),
    [
        *(
            pytest.param(name, release, SEVENTH, marks=pytest.mark.xdist_group(f"failing layers of {release}"))
            for release, names in IN_MAKE_TEST.items()
            for name in names
        ),
        *(pytest.param(*pair, 1, marks=[pytest.mark.xdist_group(pair[1]), pytest.mark.slow]) for pair in PAIRS),
    ],
)


def whole_and_failing(name: str, release: str, every: int) -> tuple[Outcome, list[Outcome]]:
    whole, *failing = [outcome for outcome in in_release(release, every) if outcome["fix"] == name]
    return whole, failing


def of_both(outcome: Outcome, whole: Outcome) -> bool:
    """Return whether each number is stock's or the right one.

    A scenario may have several models, each with layers of its own.
    """
    if outcome["numbers"] == whole["stock"]["numbers"]:
        return True
    each = [re.findall(r"[^\s(),]+", of["numbers"]) for of in (outcome, whole["stock"], whole["right"])]
    return len(set(map(len, each))) == 1 and all(one in others for one, *others in zip(*each, strict=True))


@each_pair
def test_vllm_survives_each_failing_call_of_a_layer_and_wrong_numbers_mean_failed(
    name: str, release: str, every: int
) -> None:
    whole, failing = whole_and_failing(name, release, every)
    assert (whole["right"]["state"], whole["stock"]["state"]) == ("active", "off"), whole["right"]["reason"]
    assert whole["right"]["numbers"] != whole["stock"]["numbers"]
    assert len(failing) * every >= 2, "calls were found"
    for outcome in failing:
        place = outcome["call"]
        assert "escaped" not in outcome, place
        assert outcome["before"] == "active", place
        if outcome["numbers"] != whole["right"]["numbers"]:
            assert of_both(outcome, whole) or place.endswith(NEITHER.get(name, ())), place
            assert outcome["state"] == "failed", place
            assert "Planted" in outcome["reason"], place
