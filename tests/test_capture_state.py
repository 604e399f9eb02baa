"""capture-state: a pass of a draft that fails."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_graphfix.fix import Activity
from vllm_graphfix.fixes import capture_state
from vllm_graphfix.fixes._capture_passes import CaptureSession


@pytest.mark.parametrize(
    ("failing", "states", "built_after"),
    [(None, ["first", "anew"], [1]), ("warm-up", ["first", "first"], []), ("recorded", ["first", "first"], [1])],
)
def test_where_a_pass_of_a_draft_fails_stocks_state_stays_and_the_graph_builds_none(
    failing: str | None, states: list[str], built_after: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, activity = ("first", "slots"), Activity()
    passes: list[str] = []
    built: list[int] = []

    def build() -> tuple[str, str]:
        built.append(len(passes))
        return "anew", "slots"

    def fails(*args: object) -> bool:
        raise RuntimeError(failing)

    def generate_fn(metadata: str, slots: str) -> None:
        passes.append(metadata)

    generate: Any = capture_state._generate_with_a_state_per_pass(generate_fn, activity)
    session = CaptureSession(activity)
    session.begin()
    try:
        session.built(build, first)
        for each in ("warm-up", "recorded"):
            with monkeypatch.context() as patched:
                if each == failing:
                    patched.setattr(session, "concerns", fails)
                generate(*first)
    finally:
        session.end()
    assert (passes, built) == (states, built_after)
    assert (activity.error is not None) is (failing is not None)
