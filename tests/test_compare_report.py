"""Output of `compare`: the chart, JSON, and the page for people."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from compared import EQUAL, FACTS, FAILED, POISONED, RESULT, UNHARMED, comparison, judgement, report
from vllm_graphfix import __version__
from vllm_graphfix.commands.cli import app
from vllm_graphfix.commands.compare.report import Report, as_json, histogram, show
from vllm_graphfix.verify.comparison import Judgement, Kind
from vllm_graphfix.verify.engine.poison_report import report_of
from vllm_graphfix.verify.engine.poisoned import PASSES
from vllm_graphfix.verify.poison.kinds import KINDS


def test_the_chart_has_a_row_for_each_part_of_the_longest_answer() -> None:
    rows = histogram(comparison(judgement(Kind.CORRUPT, 0, 20), judgement(Kind.TIE, 19, 20), judgement(Kind.TIE, 2, 9)))
    assert [label for label, _ in rows] == ["0-2", "3-5", "6-8", "9-11", "12-14", "15-17", "18-19"]
    assert rows[0][1] == {Kind.CORRUPT: 1, Kind.PADDED: 0, Kind.BATCHED: 0, Kind.COMPILED: 0, Kind.TIE: 1}
    assert rows[-1][1] == {Kind.CORRUPT: 0, Kind.PADDED: 0, Kind.BATCHED: 0, Kind.COMPILED: 0, Kind.TIE: 1}


@pytest.mark.parametrize(("length", "parts"), [(1, 1), (2, 2), (8, 8), (9, 5), (128, 8), (1000, 8)])
def test_the_chart_is_short_and_covers_every_token(length: int, parts: int) -> None:
    rows = histogram(comparison(judgement(Kind.CORRUPT, length - 1, length)))
    assert len(rows) == parts
    assert rows[0][0].split("-")[0] == "0"
    assert rows[-1][0].split("-")[1] == str(length - 1)
    assert rows[-1][1][Kind.CORRUPT] == 1


def test_the_chart_takes_what_lies_beyond_the_reference() -> None:
    """A difference behind the reference's end counts in the last range, also if the reference is empty."""
    assert histogram(comparison(judgement(Kind.CORRUPT, 8, 8)))[-1][1][Kind.CORRUPT] == 1
    assert histogram(comparison(judgement(Kind.CORRUPT, 0, 0)))[-1][1][Kind.CORRUPT] == 1


def test_json_has_the_fields_of_its_schema() -> None:
    output = as_json(report(EQUAL, judgement(Kind.CORRUPT, 16), note="a note", logs="/logs"))
    prompts = output.pop("prompts")
    assert output == {
        "schema": 1,
        **FACTS,
        "model": "the/model",
        "flags": ["-tp", "2"],
        "twin": None,
        "corrupt": True,
        "inconclusive": None,
        "error": None,
        "note": "a note",
        "logs": "/logs",
        "cudagraph_mode": "FULL",
        "fixes": {"0": {"mamba-padding": "active"}},
        "drafts": {"eager": None, "graphs": None, "lost": False},
        "poison": None,
        "exact": None,
        "gap": None,
        "noise": 0.01,
        "tolerance": 0.0625,
        "distance": 0.0,
        "tokens": 128,
        "compared": 80,
    }
    assert prompts[1] == {
        "prompt": 1,
        "kind": "corrupt",
        "length": 64,
        "compared": 16,
        "position": 16,
        "expected": 5,
        "found": 6,
        "margin": 0.5,
        "gap": 2.0,
        "distance": 0.0,
    }


def test_json_of_an_engine_that_failed_has_the_same_fields() -> None:
    output = as_json(FAILED)
    assert output.keys() == as_json(report()).keys()
    assert (output["corrupt"], output["error"], output["fixes"], output["prompts"]) == (True, FAILED.error, None, [])
    assert json.loads(json.dumps(output, allow_nan=False)) == output


def test_json_has_null_where_a_number_is_none() -> None:
    broken = replace(judgement(Kind.CORRUPT, 0), margin=nan, token_gap=inf, distance=inf)
    output = as_json(Report("m", (), RESULT, RESULT, comparison(broken, noise=inf)))
    json.dumps(output, allow_nan=False)
    assert (output["noise"], output["distance"]) == (None, None)
    assert [output["prompts"][0][name] for name in ("margin", "gap", "distance")] == [None, None, None]


def page(rendered: Report) -> str:
    out = io.StringIO()
    show(rendered, Console(file=out, width=140))
    return out.getvalue()


def last(rendered: Report) -> str:
    return page(rendered).splitlines()[-1]


def test_the_page_names_what_was_compared_and_on_what() -> None:
    first, second = page(report()).splitlines()[:2]
    assert first == (
        f"the/model -tp 2: vLLM 0.21.0, vllm-graphfix {__version__}, torch 2.11.0, GPU [of a test], driver 1, "
        "VLLM_GRAPHFIX=on, "
        "seed 7"
    )
    assert second == "graphs: FULL; fixes: mamba-padding active"


def test_the_page_of_equal_answers_is_short() -> None:
    rendered = page(report(EQUAL, EQUAL))
    assert "2 prompts: 2 equal, 0 diverge at a tie, 0 corrupt; 128 of 128 tokens compared" in rendered
    assert (
        "eager differs from itself by up to 0.01, graphs from eager by up to 0; up to 0.0625 counts as rounding"
        in rendered
    )
    assert "prompt " not in rendered
    assert last(report(EQUAL, EQUAL)) == "no corruption"


def test_the_page_shows_where_a_corrupt_answer_begins_to_differ() -> None:
    rendered = page(report(EQUAL, judgement(Kind.CORRUPT, 16)))
    (row,) = [line.split() for line in rendered.splitlines() if line.startswith("1 ")]
    assert row == ["1", "token", "16", "of", "64", "5", "6", "0.5", "corrupt"]
    (bar,) = [line.split() for line in rendered.splitlines() if line.startswith("16-23")]
    assert bar == ["16-23", "█" * 40, "1"]
    assert rendered.splitlines()[-1] == "corruption"


def test_the_page_of_ties_alone_shows_no_corruption() -> None:
    rendered = page(report(judgement(Kind.TIE, 60), judgement(Kind.TIE, 60)))
    assert rendered.count("tie, rounding") == 2
    assert f"56-63 {'░' * 40} 2" in rendered
    assert rendered.splitlines()[-1] == "no corruption"


def test_the_page_tells_what_is_compiled_from_what_is_corrupt() -> None:
    rendered = page(report(judgement(Kind.COMPILED, 60)))
    assert "compiled, without graphs too" in rendered
    assert "0 diverge at a tie, 1 equal to compiled without graphs, 0 corrupt" in rendered
    assert rendered.splitlines()[-1] == "no corruption"


def test_an_answer_that_ended_early_has_no_token_there() -> None:
    rendered = page(report(replace(judgement(Kind.CORRUPT, 16), actual=None, margin=None)))
    (row,) = [line.split() for line in rendered.splitlines() if line.startswith("0 ")]
    assert row == ["0", "token", "16", "of", "64", "5", "none", "corrupt"]


def test_of_many_prompts_the_worst_are_listed_and_the_rest_counted() -> None:
    many = [*[judgement(Kind.TIE, 60)] * 500, judgement(Kind.COMPILED, 60), judgement(Kind.CORRUPT, 1)]
    lines = page(report(*many)).splitlines()
    rows = [line for line in lines if "token " in line and " of 64" in line]
    assert (len(rows), rows[0].split()[0], rows[1].split()[0]) == (20, "501", "500")
    assert "… and 482 more; --json lists all" in lines
    (bar,) = [line for line in lines if line.split()[:1] == ["0-7"]]
    assert bar.split() == ["0-7", "█", "1"], "one of five hundred is still to be seen"


def test_states_are_printed_once_if_all_ranks_agree_and_one_by_one_if_not() -> None:
    def fixes(*ranks: dict[str, str]) -> str:
        states = {str(rank): states for rank, states in enumerate(ranks)}
        return page(report(graphs=replace(RESULT, states=states))).splitlines()[1].partition("fixes: ")[2]

    assert fixes({"a": "active", "b": "off", "c": "not-needed"}) == "a active, b off"
    assert fixes({"a": "active"}, {"a": "active"}) == "a active (2 ranks)"
    assert fixes({"a": "active"}, {"a": "off"}) == "a active and off (2 ranks)"
    assert fixes({"a": "active"}, {}) == "a active and unknown (2 ranks)"
    assert fixes({}, {"a": "active"}) == "a active and unknown (2 ranks)"
    assert fixes({"a": "not-needed"}) == "none needed"
    assert fixes() == "unknown, the workers did not answer"


def test_an_engine_that_fails_with_graphs_alone_is_corrupt_and_says_its_error() -> None:
    assert FAILED.corrupt
    assert last(FAILED) == (
        "the engine runs without graphs and fails with them: CUDA error: an illegal memory access was "
        "encountered (log: /l)"
    )


def drafts(eager: tuple[int, int] | None, graphs: tuple[int, int] | None, *judgements: Judgement) -> Report:
    return report(*judgements, eager=replace(RESULT, drafts=eager), graphs=replace(RESULT, drafts=graphs))


def test_drafts_are_counted() -> None:
    assert "drafts accepted: eager 300 of 1000, with graphs 140 of 500" in page(drafts((300, 1000), (140, 500)))
    assert "drafts" not in page(drafts(None, (140, 500)))


LOST = [
    ((300, 1000), (2, 500), True),
    ((300, 1000), (74, 500), True),
    ((300, 1000), (76, 500), False),
    ((300, 1000), (500, 500), False),
    ((300, 1000), (0, 99), False),  # too few to say
    ((40, 1000), (0, 500), False),  # a draft model that guesses nothing has nothing to lose
    ((0, 1000), (0, 500), False),
    (None, (0, 500), False),
    ((300, 1000), None, False),
]


@pytest.mark.parametrize(("eager", "graphs", "lost"), LOST)
def test_drafts_are_lost_if_less_than_half_as_many_are_accepted(
    eager: tuple[int, int] | None, graphs: tuple[int, int] | None, lost: bool
) -> None:
    rendered = drafts(eager, graphs)
    assert (rendered.drafts_lost, rendered.corrupt, as_json(rendered)["drafts"]["lost"]) == (lost, lost, lost)
    assert last(rendered).startswith("drafts lost") == lost


def test_no_corruption_says_nothing_where_no_graphs_were_used() -> None:
    without = report(graphs=replace(RESULT, cudagraph_mode="NONE"))
    assert "no CUDA graphs were used" in (without.inconclusive or "")
    assert last(without) == f"inconclusive: {without.inconclusive}"
    assert as_json(without)["inconclusive"] == without.inconclusive
    assert report(graphs=replace(RESULT, cudagraph_mode="NONE and FULL")).inconclusive is None


def test_no_corruption_says_nothing_where_eager_is_as_far_from_itself() -> None:
    assert Report("m", (), RESULT, RESULT, comparison(EQUAL, noise=0.3)).inconclusive is None
    loud = Report("m", (), RESULT, RESULT, comparison(EQUAL, noise=0.4))
    assert "eager differs from itself by up to 0.4" in (loud.inconclusive or "")
    assert "set VLLM_BATCH_INVARIANT=1" in (loud.inconclusive or "")


def test_no_corruption_says_nothing_where_little_could_be_compared() -> None:
    assert report(EQUAL, judgement(Kind.TIE, 0)).inconclusive is None
    early = report(EQUAL, *[judgement(Kind.TIE, 2)] * 3)
    assert "only 70 of 256 tokens could be compared" in (early.inconclusive or "")


@pytest.mark.parametrize("error", ["OutOfMemoryError: CUDA out of memory", "did not finish in 3600 s"])
def test_an_error_with_graphs_that_is_untypical_of_graphs_is_no_corruption(error: str) -> None:
    """Graphs take memory and time to capture."""
    failed = replace(FAILED, error=error)
    assert (failed.corrupt, as_json(failed)["corrupt"]) == (False, False)
    assert error in (failed.inconclusive or "")
    assert last(failed) == f"the engine runs without graphs and fails with them: {error}"


@pytest.mark.parametrize(
    "output", [FAILED, report(judgement(Kind.CORRUPT, 0), graphs=replace(RESULT, cudagraph_mode="NONE"))]
)
def test_corruption_is_never_inconclusive(output: Report) -> None:
    assert (output.corrupt, output.inconclusive) == (True, None)


@pytest.mark.parametrize("text", ["[/red]", "[bold", "a\\", "[/]"])
def test_what_others_wrote_is_printed_as_it_is(text: str) -> None:
    """Square brackets are markup of the console's."""
    assert text in page(replace(report(), model=text))
    assert text in page(replace(report(), flags=(text,)))
    assert text in page(replace(report(), note=text))
    assert text in page(replace(FAILED, error=text))


# -- `vllm-graphfix report --compared`


def reported(compared: Report, folder: Path) -> tuple[int, str]:
    """Exit code and Markdown, of a comparison that was written as `compare --json` writes it."""
    file = folder / "compared.json"
    file.write_text(json.dumps(as_json(compared)))
    done = CliRunner().invoke(app, ["report", "--compared", str(file)])
    return done.exit_code, done.stdout


def test_a_comparison_without_corruption_is_not_reported(tmp_path: Path) -> None:
    assert reported(report(EQUAL, judgement(Kind.TIE, 3)), tmp_path) == (3, "")


def test_wrong_answers_are_reported_with_the_engine_that_gave_them(tmp_path: Path) -> None:
    code, text = reported(report(EQUAL, judgement(Kind.CORRUPT, 7)), tmp_path)
    assert code == 0
    for part in (
        "# Answers with CUDA graphs differ from those without",
        "vLLM 0.21.0, torch 2.11.0, GPU [of a test], driver 1, flags `-tp 2`",
        "a\nmodel whose name is left out here.",
        "- 1 of 2 prompts have wrong answers: 1\n",
        "- prompt 1, from position 7 on: token 5 without graphs, 6 with them, 2 apart",
        "Fixes of vllm-graphfix in this engine: `mamba-padding` active.",
    ):
        assert part in text


def test_a_report_for_others_does_not_name_the_model_nor_secrets(tmp_path: Path) -> None:
    model, served = "/srv/models/llama-of-ours", ("--served-model-name", "prod-eu", "chat-eu", "--tokenizer")
    flags = (*served, "/srv/models/llama-of-ours/", "--served_model_name=beta-eu", "--api-key", "k3y-of-us", "-tp", "2")
    error = f"{FAILED.error} of chat-eu in {model}, of beta-eu in llama-of-ours"
    code, text = reported(replace(FAILED, model=model, flags=flags, error=error), tmp_path)
    assert code == 0
    assert (
        "flags `--served-model-name (hidden) (hidden) --tokenizer (hidden)/ --served_model_name=(hidden) "
        "--api-key (hidden) -tp 2`"
    ) in text
    assert "of (hidden) in (hidden), of (hidden) in (hidden)`" in text
    assert [name for name in ("llama", "prod", "chat", "beta", "k3y") if name in text] == []


def test_an_engine_that_ends_as_graphs_make_it_end_is_reported(tmp_path: Path) -> None:
    code, text = reported(FAILED, tmp_path)
    assert code == 0
    assert "- with graphs the engine ends: `CUDA error: an illegal memory access" in text
    assert "prompts have wrong answers" not in text


def test_drafts_that_graphs_lose_are_reported(tmp_path: Path) -> None:
    compared = report(eager=replace(RESULT, drafts=(90, 100)), graphs=replace(RESULT, drafts=(5, 100)))
    code, text = reported(compared, tmp_path)
    assert (code, "- drafts that were accepted: 5 of 100 with graphs, 90 of 100 without" in text) == (0, True)


def test_passes_in_which_poison_shows_are_reported_and_others_omitted(tmp_path: Path) -> None:
    result = replace(RESULT, passes=((), ()), poisoned=(POISONED, UNHARMED))
    code, text = reported(report(EQUAL, poison=report_of(result, None, {})), tmp_path)
    assert code == 0
    for part in (
        "# Memory that belongs to no request reaches an answer",
        "\n## slot_mapping\n",
        "- answers of prompts 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 … differ: another token, or NaN",
        "- rank 0, step 21: layer 1: block 5",
        "- rank 0: 83 steps poisoned, at most padded rows 9",
        "its answers were equal to the last bit",
    ):
        assert part in text
    assert KINDS[2] not in text.partition("##")[2]
    assert "Answers with CUDA graphs" not in text
    assert "\n\n\n" not in text


def test_poison_that_ends_an_engine_is_reported(tmp_path: Path) -> None:
    ended = report_of(None, "CUDA error: an illegal memory access", {PASSES: [1.0]})
    assert ended.detected
    code, text = reported(report(EQUAL, poison=ended), tmp_path)
    assert (code, "- with poison the engine ends: `CUDA error: an illegal memory access`" in text) == (0, True)
    assert "crashed before its answers could be compared" in text
    assert "equal to the last bit" not in text


@pytest.mark.parametrize(
    ("written", "compared"),
    [
        (None, "cannot read "),
        ("no JSON", "is not what `vllm-graphfix compare MODEL --json` prints"),
        ("[]", "is not what `vllm-graphfix compare MODEL --json` prints"),
        ('{"schema": 1}', "is not what `vllm-graphfix compare MODEL --json` prints"),
        ('{"schema": 2}', "has schema 2, and not 1: another release has written it"),
    ],
)
def test_a_file_that_is_no_comparison_is_one_clear_error(tmp_path: Path, written: str | None, compared: str) -> None:
    file = tmp_path / "compared.json"
    if written is not None:
        file.write_text(written)
    done = CliRunner().invoke(app, ["report", "--compared", str(file)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert compared in done.stderr
    assert str(file) in done.stderr


def test_records_and_a_comparison_are_not_reported_together(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", "--dir", str(tmp_path), "--compared", str(tmp_path / "compared.json")])
    assert done.exit_code == 2
    assert "name one of them" in done.stderr


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"[" * 200_000, "is not what `vllm-graphfix compare MODEL --json` prints"),
        (b'{"schema": ' + b"[" * 200_000 + b"1" + b"]" * 200_000 + b"}", "is not what"),
        (b" " * (16 * 1024 * 1024 + 1), "is larger than"),
        (b"\xff\xfe", "is not what"),
        (None, "cannot read "),
    ],
    ids=["deep", "deep within", "large", "no text", "a FIFO"],
)
def test_a_hostile_comparison_is_one_clear_error(tmp_path: Path, written: bytes | None, message: str) -> None:
    file = tmp_path / "compared.json"
    if written is None:
        os.mkfifo(file)
    else:
        file.write_bytes(written)
    done = CliRunner().invoke(app, ["report", "--compared", str(file)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert str(file) in done.stderr
