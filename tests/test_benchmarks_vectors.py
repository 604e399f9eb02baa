"""The benchmark of vectors: what it makes of what three engines have answered."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import benchmarked  # noqa: F401 - puts the benchmarks on the path

# isort: split
import vectors
from measuring import tiny_roberta
from measuring.engine_cases import Site
from measuring.engine_process import DiedError
from vllm_graphfix.fixes import BY_NAME

ROBERTA, HIDDEN_STATES = vectors.CASES["roberta"], vectors.CASES["hidden-states"]
RIGHT = [[[1.0, -2.0, 0.5], [0.0, 4.0, 1.0]], [[3.0, 1.0, -1.0]]]
"""Of two requests."""
ENDED: dict[str, Any] = {"requests asked": 2, "requests answered": 2}
SHOWN: dict[str, Any] = {"wrong vectors": 1}
AT_WORK: dict[str, Any] = {"state": "active", "events": {"padded-positions-shifted": 3, "padding-written": 3}}


def copied() -> list[list[list[float]]]:
    copy: list[list[list[float]]] = json.loads(json.dumps(RIGHT))
    return copy


def judged(
    engines: dict[str, dict[str, Any]] | None = None, *, case: vectors.Case = HIDDEN_STATES, affected: bool = True
) -> dict[str, list[str]]:
    """The judgement of three engines, of which *engines* are other than those of an affected release."""
    usual: dict[str, dict[str, Any]] = {
        "eager": ENDED,
        "stock": ENDED | SHOWN,
        "patched": ENDED | {"wrong vectors": 0} | AT_WORK,
    }
    return vectors.judge(usual | (engines or {}), case, affected=affected)


def test_equal_vectors_are_right() -> None:
    found = vectors.compare(copied(), RIGHT)
    assert (found["vectors"], found["wrong vectors"]) == (3, 0)
    assert found["right ones are off by up to"] == 0.0
    assert found["right ones, least cosine"] == 1.0


def test_rounding_is_right_and_told() -> None:
    rounded = copied()
    rounded[0][1][1] += 0.2  # of 4
    found = vectors.compare(rounded, RIGHT)
    assert (found["wrong vectors"], found["right ones are off by up to"]) == (0, 0.05)
    assert found["right ones, absolutely"] == 0.2
    assert 0.99 < found["right ones, least cosine"] < 1.0


def test_a_number_that_is_off_by_more_makes_its_vector_wrong() -> None:
    other = copied()
    other[0][1] = [4.0, 0.0, 1.0]
    found = vectors.compare(other, RIGHT)
    assert found["wrong, [request, position]"] == [[0, 1]]
    assert (found["requests with a wrong one"], found["most in one request"]) == (1, 1)
    assert found["wrong ones are off by up to"] == 1.0
    assert found["right ones are off by up to"] == 0.0


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_no_number_is_wrong(number: float) -> None:
    broken = copied()
    broken[1][0][2] = number
    found = vectors.compare(broken, RIGHT)
    assert found["wrong, [request, position]"] == [[1, 0]]
    json.dumps(found, allow_nan=False)


def test_a_vector_of_zeros_is_wrong_where_there_is_another() -> None:
    empty = copied()
    empty[1][0] = [0.0, 0.0, 0.0]
    assert vectors.compare(empty, RIGHT)["wrong, [request, position]"] == [[1, 0]]


@pytest.mark.parametrize(("request_", "count"), [(0, 1), (1, 2)])
def test_a_vector_too_few_or_too_many_is_wrong(request_: int, count: int) -> None:
    other = copied()
    other[request_] = (other[request_] * 2)[:count]
    assert vectors.compare(other, RIGHT)["wrong, [request, position]"] == [[request_, 1]]


def test_a_vector_of_another_length_is_wrong() -> None:
    short = copied()
    del short[1][0][2]
    assert vectors.compare(short, RIGHT)["wrong vectors"] == 1


def test_requests_that_were_not_answered_are_not_compared() -> None:
    found = vectors.compare(copied()[:1], RIGHT)
    assert (found["vectors"], found["wrong vectors"]) == (2, 0)


def test_nothing_is_wrong_if_stock_alone_shows_the_defect_of_an_affected_release() -> None:
    assert judged() == {"problems": [], "undecided": [], "remarks": []}


@pytest.mark.parametrize(
    ("engines", "problem"),
    [
        ({"patched": ENDED | AT_WORK | {"wrong vectors": 1}}, "the patched engine gives wrong vectors"),
        ({"patched": ENDED | AT_WORK | {"failed": "CUDA"}}, "the patched engine did not come to its end"),
        ({"patched": {"errors at the start": ["CUDA"]}}, "the patched engine did not come to its end"),
        ({"patched": ENDED | AT_WORK | {"state": "inactive"}}, "hidden-states-padding was not active in the patched"),
        ({"stock": ENDED | {"wrong vectors": 0}}, "stock is right, though the release is affected"),
    ],
)
def test_what_must_not_become_of_an_engine_is_a_problem(engines: dict[str, dict[str, Any]], problem: str) -> None:
    (found,) = judged(engines)["problems"]
    assert found.startswith(problem)


def test_a_fix_that_counted_nothing_is_remarked_upon() -> None:
    found = judged({"patched": ENDED | {"state": "active", "events": {"padding-written": 0}}})
    assert (found["problems"], found["undecided"]) == ([], [])
    assert found["remarks"] == ["hidden-states-padding was active, and has counted no padding-written"]


def test_the_end_of_stock_shows_a_defect_only_where_it_is_an_end_and_not_at_the_start() -> None:
    died = ENDED | {"requests answered": 1, "failed": "CUDA error: device-side assert triggered", "wrong vectors": 0}
    assert judged({"stock": died}, case=ROBERTA) == {"problems": [], "undecided": [], "remarks": []}
    for case, stock in ((HIDDEN_STATES, died), (ROBERTA, {"errors at the start": ["out of memory"]})):
        found = judged({"stock": stock}, case=case)
        assert (found["problems"], found["undecided"]) == ([], ["the stock engine did not come to its end"])


def test_stock_must_be_right_on_a_release_that_is_not_affected() -> None:
    right = ENDED | {"wrong vectors": 0}
    not_needed = right | {"state": "not-needed"}
    assert not any(judged({"stock": right, "patched": not_needed}, affected=False).values())
    assert judged({"patched": not_needed}, affected=False)["problems"] == [
        "stock is wrong, though the release is not affected"
    ]


def test_without_eager_nothing_is_decided() -> None:
    found = judged({"eager": {"errors at the start": ["out of memory"]}, "stock": ENDED})
    assert found["problems"] == []
    assert found["undecided"] == ["the eager engine did not come to its end: there is nothing to compare with"]


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([{"problems": [], "undecided": []}], 0),
        ([{"problems": [], "undecided": []}, {"problems": [], "undecided": ["eager"]}], 2),
        ([{"problems": ["patched"], "undecided": []}, {"problems": [], "undecided": ["eager"]}], 1),
    ],
)
def test_problems_come_before_what_is_undecided(results: list[dict[str, Any]], code: int) -> None:
    assert vectors.verdict([each | {"engines": {"eager": ENDED}} for each in results]) == code


def test_nothing_that_ran_is_an_exit_code_of_its_own() -> None:
    died = {"engines": {"patched": {"errors at the start": ["CUDA"]}}, "problems": ["patched"], "undecided": []}
    assert vectors.verdict([]) == vectors.verdict([died]) == 2


@pytest.mark.parametrize("order", [("eager", "stock", "patched"), ("patched", "stock", "eager")])
def test_engines_are_compared_in_whatever_order_they_end(order: tuple[str, ...]) -> None:
    comparison = vectors.Comparison(Site("0.20.0", None), HIDDEN_STATES, affected=True)
    wrong = copied()
    wrong[1][0] = [0.0, 0.0, 9.0]
    answers = {"eager": RIGHT, "stock": wrong, "patched": copied()}
    for engine in order:
        assert "problems" not in comparison.result()
        comparison.note(engine, ENDED | (AT_WORK if engine == "patched" else {}), answers[engine])
    result = comparison.result()
    assert (result["problems"], result["undecided"], result["remarks"]) == ([], [], [])
    assert {name: found.get("wrong vectors") for name, found in result["engines"].items()} == {
        "eager": None,
        "stock": 1,
        "patched": 0,
    }


def test_the_kernel_that_was_out_of_bounds_is_found_in_a_log() -> None:
    said = "x.py:35: unknown: block: [0,0,0], thread: [7,0,0] Assertion `index out of bounds: 0 <= tmp9 < 130` failed."
    assert vectors.assertion(f"INFO began\n{said}\n{said}\nTraceback\n") == said
    assert vectors.assertion("INFO began\n") is None


@pytest.mark.parametrize("case", vectors.CASES.values(), ids=lambda case: case.name)
def test_a_case_names_an_event_of_its_fix(case: vectors.Case) -> None:
    assert case.event in [event.name for event in BY_NAME[case.fix].events]


def test_no_request_of_roberta_fills_its_graph_and_there_are_enough_to_leave_the_table() -> None:
    lengths = [length for length, _ in ROBERTA.workload]
    sizes = ROBERTA.graphs[0]["cudagraph_capture_sizes"]
    assert {min(size for size in sizes if size >= length) for length in lengths} == {8}
    assert max(lengths) < 8
    assert len(lengths) > tiny_roberta.POSITIONS / (tiny_roberta.PADDING_TOKEN + 1)


def test_two_requests_with_hidden_states_fill_the_cache_and_no_more() -> None:
    blocks = [-(-sum(lengths) // vectors.BLOCK) for lengths in HIDDEN_STATES.workload]
    one = (HIDDEN_STATES.arguments["num_gpu_blocks_override"] - 1) // HIDDEN_STATES.arguments["max_num_seqs"]
    assert max(blocks) == one
    assert min(answer for _, answer in HIDDEN_STATES.workload) > vectors.BLOCK
    decodes = {2, 4}  # tokens of a step: each request has one, and one draft
    assert not decodes & set(HIDDEN_STATES.graphs[0]["cudagraph_capture_sizes"])


class StandInForAnEngine:
    """Answers with a vector for each prompt until it *fails*; then its process is gone, or it says so itself."""

    def __init__(self, fails: int, *, dies: bool) -> None:
        self.asked: list[int] = []
        self._fails, self._dies = fails, dies

    def ask(self, asked: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        self.asked.append(len(asked["prompts"]))
        failed = len(self.asked) > self._fails
        if failed and self._dies:
            raise DiedError("ended with signal 6")
        return {"vectors": []} | {"failed": "CUDA"} if failed else {"vectors": [[[1.0]] for _ in asked["prompts"]]}


@pytest.mark.parametrize(("dies", "failed"), [(True, "ended with signal 6"), (False, "CUDA")])
def test_embeddings_before_the_end_of_an_engine_are_kept(dies: bool, failed: str) -> None:
    engine = StandInForAnEngine(63, dies=dies)
    answered, last = vectors.ask(engine, ROBERTA, math.inf)
    assert (len(answered), last["failed"], engine.asked) == (63, failed, [1] * 64)


def test_prompts_with_hidden_states_are_asked_together() -> None:
    engine = StandInForAnEngine(1, dies=True)
    answered, last = vectors.ask(engine, HIDDEN_STATES, math.inf)
    assert (len(answered), "failed" in last, engine.asked) == (48, False, [48])


@pytest.fixture
def engineless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, list[tuple[str, str]]]]:
    """Runs the script where no engine starts; the result is its exit code, and the releases and cases that it tried."""
    engine = tmp_path / "engine.py"
    engine.write_text("raise SystemExit('no vLLM here')\n")
    monkeypatch.setattr(vectors, "ENGINE", engine)
    monkeypatch.setattr(vectors, "find_sites", lambda given: (Site("0.18.1", None), Site("0.20.0", None)))

    def go(*arguments: str) -> tuple[int, list[tuple[str, str]]]:
        given = ["--out", str(tmp_path), "--rehearse", "--timeout", "20", *arguments]
        monkeypatch.setattr(sys, "argv", ["vectors.py", *given])
        code = vectors.main()
        found = json.loads((tmp_path / "result.json").read_text())
        assert all(len(each["engines"]) == 3 and each["undecided"] for each in found)
        return code, sorted((each["release"], each["case"]) for each in found)

    return go


def test_engines_that_do_not_start_are_no_proof(engineless: Any) -> None:
    assert engineless() == (2, [(release, case) for release in ("0.18.1", "0.20.0") for case in sorted(vectors.CASES)])


def test_a_case_of_one_release_is_chosen_by_both_names(engineless: Any, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = engineless("--only", "0.18.1/roberta", "0.20.0/hidden-states")[1]
    assert chosen == [("0.18.1", "roberta"), ("0.20.0", "hidden-states")]
    assert engineless("--only", "roberta")[1] == [("0.18.1", "roberta"), ("0.20.0", "roberta")]
    with pytest.raises(SystemExit):
        engineless("--only", "0.19.0/roberta")
    assert "no such case: 0.19.0/roberta" in capsys.readouterr().err
