"""The shadow check in the records of ranks, `fleet`, `report`, and the states."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from records import record
from vllm_graphfix.commands.cli import app
from vllm_graphfix.commands.fleet import look
from vllm_graphfix.commands.upstream_report import markdown
from vllm_graphfix.fix import Mode, State
from vllm_graphfix.patching.manager import FixState
from vllm_graphfix.records import FixReport, Record, RecordError, Wrong, write
from vllm_graphfix.records.record import SHORT, MovedTensor, OverwrittenBlock
from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import process
from vllm_graphfix.shadow.check import Shadow
from vllm_graphfix.shadow.verdict import Graph, Mismatch

WRONG = Wrong(
    "target model, BatchDescriptor(num_tokens=4)", 4, 3, "FlashMLAMetadata", "0 0.31 inf", "0", "model.layers.1", 7
)
COUNTS = {"checks": 90, "mismatches": 4, "quarantined-graphs": 1, "steps-left-out": 0, "milliseconds": 1200}


def rank_with(wrong: tuple[Wrong, ...]) -> Record:
    """A rank that checks, with what it has found."""
    shadow = FixReport("auto", "active", "shadow-v1: active")
    return record(rank=0, fixes={"shadow": shadow}, events={"shadow": COUNTS}, wrong=wrong)


def test_a_record_has_the_mismatches_and_older_ones_have_none() -> None:
    announced = rank_with((WRONG,) * 5)
    written = announced.as_json()
    assert Record.from_json(written) == announced
    del written["wrong"]
    assert Record.from_json(written).wrong == ()
    longest = Wrong("g" * SHORT, 2**62, 2**62, "b" * SHORT, "e" * SHORT, "n" * SHORT, "l" * SHORT, 2**62, "a" * SHORT)
    assert len(json.dumps(rank_with((longest,) * 5).as_json())) < 8000


@pytest.mark.parametrize("broken", [{"rows": -1}, {"graph": None}, {"errors": "x" * 2000}, {"check": "1"}])
def test_a_record_that_somebody_has_forged_is_refused(broken: dict[str, Any]) -> None:
    written = rank_with((WRONG,)).as_json()
    written["wrong"]["0"] |= broken
    with pytest.raises(RecordError, match=r"wrong\.0"):
        Record.from_json(written)


@pytest.mark.usefixtures("alone")
def test_fleet_says_that_graphs_are_wrong_and_report_writes_it_down(tmp_path: Path) -> None:
    write(tmp_path, rank_with((WRONG,)))
    (engine,) = look(tmp_path).engines
    assert [what for what in engine.wrong if "4 in 90 checks; graphs no longer replayed: 1" in what]
    text = markdown(look(tmp_path)) or ""
    for part in ("vLLM `0.21.0`", "0 0.31 inf", "BatchDescriptor(num_tokens=4)", "`model.layers.1`", "rank 0"):
        assert part in text
    reported = CliRunner().invoke(app, ["report", "--dir", str(tmp_path)])
    assert (reported.exit_code, reported.stdout) == (0, text)
    write(tmp_path, record(rank=0))
    assert markdown(look(tmp_path)) is None
    assert CliRunner().invoke(app, ["report", "--dir", str(tmp_path)]).exit_code == 3


@pytest.mark.usefixtures("alone")
def test_report_has_accepted_drafts_of_a_graph_and_older_records_have_none(tmp_path: Path) -> None:
    accepted = "3 of 120 drafts accepted, 96 without the graph, in 60 rows of checked steps"
    announced = rank_with((WRONG._replace(accepted=accepted), WRONG))
    write(tmp_path, announced)
    assert (markdown(look(tmp_path)) or "").count(f"\n- `{accepted}`\n") == 1
    written = announced.as_json()
    del written["wrong"]["0"]["accepted"]
    assert Record.from_json(written).wrong == (WRONG, WRONG)


@pytest.mark.usefixtures("alone")
def test_report_has_a_part_for_each_detector_with_findings(tmp_path: Path) -> None:
    block = OverwrittenBlock(7, 1, 3, "model.layers.0.attn", "4 with requests, 2 of a rank without work")
    moved = MovedTensor("model.layers.0.W_UV", "attribute", "reload_weights", "reported")
    events = {"shadow": COUNTS, "kv-marks": {"marks": 50, "changed": 1}, "addresses": {"comparisons": 9, "moved": 4}}
    write(tmp_path, record(rank=0, events=events, wrong=(WRONG,), overwritten=(block,), moved=(moved,)))
    parts = (markdown(look(tmp_path)) or "").split("\n# ")
    assert [part.splitlines()[0].removeprefix("# ") for part in parts] == [
        "A replayed CUDA graph differs from the same step without it",
        "A finished block of the prefix cache changes",
        "Tensors move after CUDA graphs were captured",
    ]
    assert "1 of 50 had changed" in parts[1]
    assert "block 7 of cache group 1, block 3 of its request, in `model.layers.0.attn`" in parts[1]
    assert "2 of a rank without work" in parts[1]
    assert "9 comparisons found tensors elsewhere 4 times" in parts[2]
    assert "`attribute` `model.layers.0.W_UV`, noticed after `reload_weights`: `reported`" in parts[2]
    for part in parts:
        assert "vLLM `0.21.0`, vllm-graphfix `0.1.0`" in part
        assert "Fixes of vllm-graphfix in this engine: " in part
    write(tmp_path, record(rank=0, events=events, overwritten=(block,)))
    assert (markdown(look(tmp_path)) or "").startswith("# A finished block")


@pytest.mark.usefixtures("alone")
def test_a_report_names_no_host_and_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/people/alice")
    moved = MovedTensor("weight", "attribute", "load", "rank 3 (n3) on n3: /srv/people/alice/x is gone" + "." * 99)
    written = record(host="gpu-17", pid=77, rank=None, model="alice/secret-model", moved=(moved,))
    write(tmp_path, written._replace(wrong=(WRONG._replace(errors="no alice/secret-model on gpu-17.corp.example"),)))
    text = markdown(look(tmp_path)) or ""
    assert "rank 3 (host-" in text
    assert "~/x is gone" + "." * 99 in text
    assert "a model whose name is left out" in text
    assert not [word for word in ("gpu-17", "corp", "alice", "(n3)") if word in text]


def test_a_rank_reports_the_first_mismatch_of_each_graph_with_its_layer(monkeypatch: Any) -> None:
    shadow = Shadow(Rate(every=1), Action.REPORT, process.refuse)
    monkeypatch.setattr(process, "SHADOW", shadow)
    results = shadow.results
    graphs = [Graph(f"target model, {number}", 4, ("Metadata",)) for number in range(7)]
    for graph in graphs:
        for layer in (None, "layer.1", None):
            results.add(Mismatch(graph, 2, (0.0, math.inf), 0.0, layer, 1, 0.0, here=True))
    results.add(Mismatch(graphs[0], 2, (), 0.0, None, 1, 0.0, here=False))
    assert [(wrong.graph, wrong.layer) for wrong in process.wrong()] == [
        (graph.name, "layer.1") for graph in graphs[:5]
    ]
    assert process.wrong()[0].errors == "0 inf"
    assert process.counts()["shadow"]["mismatches"] == 22


@pytest.mark.parametrize(
    ("errors", "failure", "looked_for"),
    [
        ((0.0, math.inf, math.nan), None, [False, True, True]),
        ((0.0, 0.0), None, ()),  # a recurrent state alone is wrong: it is not known whose
        ((), "RuntimeError: x", ()),
    ],
)
def test_abort_ends_whose_rows_are_wrong_and_all_where_that_is_not_known(
    monkeypatch: Any, errors: tuple[float, ...], failure: str | None, looked_for: Any
) -> None:
    shadow = Shadow(Rate(every=1), Action.REPORT, process.refuse)
    calls: list[Any] = []
    ended: list[Any] = []

    def requests_of_rows(wrong: Any) -> list[str]:
        calls.append(wrong)
        return ["a"]

    monkeypatch.setattr("vllm_graphfix.shadow.consequences.requests_of_rows", requests_of_rows)
    monkeypatch.setattr(
        shadow.consequences,
        "_abort",
        SimpleNamespace(why_not=lambda: None, deliver=lambda *values: ended.append(values[:2])),
    )
    graph = Graph("target model, 4", 4, ("Metadata",))
    shadow.consequences._end_requests(
        Mismatch(graph, len(errors), errors, 0.0, None, 1, 0.0, here=True, failure=failure)
    )
    assert (calls, ended) == ([looked_for], [(["a"], ())])


@pytest.mark.parametrize(
    ("refused", "stopped", "state", "reason"),
    [
        (None, None, "active", "shadow-v1: active"),
        ("a KV connector", None, "incompatible", "a KV connector"),
        (None, "RuntimeError: x", "failed", "the check has stopped: RuntimeError: x"),
    ],
)
def test_one_state_tells_of_both_runners_and_of_the_check(
    monkeypatch: Any, refused: str | None, stopped: str | None, state: str, reason: str
) -> None:
    shadow = Shadow(Rate(every=1), Action.REPORT, process.refuse)
    shadow.stopped = stopped
    monkeypatch.setattr(process, "SHADOW", shadow)
    monkeypatch.setattr(process, "REFUSED", refused)
    runners = {
        "shadow-v1": FixState("shadow-v1", Mode.AUTO, None, State.ACTIVE, "applied"),
        "shadow-v2": FixState("shadow-v2", Mode.AUTO, None, State.WAITING, "to be diagnosed"),
    }
    for order in (list(runners.items()), list(runners.items())[::-1]):
        actual = process.state(dict(order))
        assert (actual.name, actual.state.value) == ("shadow", state)
        assert reason in actual.reason


def test_an_engine_whose_drafts_alone_are_checked_is_incompatible() -> None:
    runners = {
        "shadow-v2": FixState("shadow-v2", Mode.AUTO, None, State.INCOMPATIBLE, "unrecognised"),
        "shadow-v2-drafter": FixState("shadow-v2-drafter", Mode.AUTO, None, State.ACTIVE, "applied"),
    }
    for order in (list(runners.items()), list(runners.items())[::-1]):
        assert process.state(dict(order)).state is State.INCOMPATIBLE


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("secret", ["", "token=abcdefgh"], ids=["", "with a secret at the end of each text"])
def test_no_text_of_a_record_becomes_markup_in_a_report(secret: str, tmp_path: Path) -> None:
    text = f"t` ![x](https://evil/b.png) @everyone closes #1 <b> ` {secret}"
    fixes = {"mamba-padding": FixReport("auto", "active", text)}
    written = record(
        rank=0, fixes=fixes, wrong=(Wrong(text, 4, 3, text, text, text, text, 7), WRONG._replace(layer="", noise=""))
    )
    moved, block = MovedTensor(*[text] * 4), OverwrittenBlock(7, 1, 3, text, text)
    write(tmp_path, written._replace(vllm=text, graphfix=text, moved=(moved,), overwritten=(block,)))
    markup = [
        token
        for block_token in MarkdownIt().parse(markdown(look(tmp_path)) or "")
        for token in (block_token.children or [block_token])
        if token.type not in ("code_inline", "softbreak")
    ]
    assert {token.type for token in markup if token.tag in ("img", "a") or "html" in token.type} == set()
    assert [token.content for token in markup if "everyone" in token.content or "`" in token.content] == []
