"""The shadow check's action `abort` in a real engine: who has a wrong row ends, and nobody else does."""

from __future__ import annotations

from pathlib import Path

import pytest

import aborted_engine
import engine as cpu

ON = {"VLLM_GRAPHFIX_SHADOW": "1/1", "VLLM_GRAPHFIX_SHADOW_ACTION": "abort"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "executor", "more"),
    [("1", "uni", {}), ("0,2", "mp", {}), ("none", "uni", {}), ("1", "uni", {"VLLM_GRAPHFIX_SHADOW_ACTION": "report"})],
    ids=["one row", "two rows, the scheduler in another process", "no row", "report"],
)
def test_who_has_a_wrong_row_ends_with_an_error_and_the_others_are_right(
    tmp_path: Path, wrong: str, executor: str, more: dict[str, str]
) -> None:
    actual = cpu.check_answer("aborted_engine.py", tmp_path, wrong, executor, env=ON | more)
    rows = {int(row) for row in wrong.split(",") if row != "none"}
    ending = rows if not more else set()
    assert (actual["state"], actual["counts"]["checks"] > 20, actual["counts"]["steps-left-out"]) == ("active", True, 0)
    # Of vLLM's own scheduler, in steps without a verdict: it answer nothing that could wait.
    assert actual["called"] == ([] if more else ["_around_update"])
    assert actual["abort"] == (None if more else "active")
    assert (actual["counts"]["mismatches"], actual["counts"]["aborted"]) == (int(bool(rows)), len(ending))
    for number, (answer, after, again, right) in enumerate(
        zip(actual["asked"], actual["after"], actual["again"], actual["eager"], strict=True)
    ):
        whole_blocks = aborted_engine.LENGTHS[number] // 16 * 16
        if number in ending:
            assert answer["reason"] == "error"
            assert "its tokens came of a wrong replay of a CUDA graph (a replayed CUDA graph was wrong" in answer["why"]
            assert f"{len(rows)} of 3 rows differ" in answer["why"]
            # The prompt's token, and those of the right replays: not the one that came of the wrong row.
            assert answer["tokens"] == right["tokens"][: aborted_engine.AT]
            assert after["cached"] == 0
        else:
            assert (answer["reason"], len(answer["tokens"])) == ("length", aborted_engine.TOKENS)
            assert answer["tokens"] == right["tokens"] or number in rows
            assert after["cached"] == whole_blocks
        # Later requests are served, and find what those before them have left.
        assert (after["reason"], after["tokens"]) == ("length", right["tokens"][:1])
        assert (again["reason"], again["tokens"], again["cached"]) == ("length", right["tokens"], whole_blocks)
