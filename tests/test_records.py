"""The record as JSON: written, read, refused."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from records import ENGINE, only, record
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.records import (
    LARGEST,
    AgreementReport,
    Decided,
    FixReport,
    Rank,
    Record,
    RecordError,
    Wrong,
    identity,
    write,
)
from vllm_graphfix.records.record import SHORT, FalseClaim, MovedTensor, OtherMetadata, OverwrittenBlock, TracedArgument


def test_a_record_is_the_json_object_that_is_documented() -> None:
    document = record(rank=1, world_size=2, leader="f" * 16, problem="why").as_json()
    here = identity()
    assert document == {
        "schema": 1,
        "graphfix": "0.1.0",
        "vllm": "0.21.0",
        "engine": ENGINE,
        "host": here.host,
        "pid": here.pid,
        "start_ticks": here.start_ticks,
        "boot": here.boot,
        "pid_namespace": here.pid_namespace,
        "role": "worker",
        "model": "some/model",
        "rank": {"rank": 1, "local_rank": 1, "world_size": 2, "data_parallel_rank": 0},
        "decision": {"canary": True, "bucket": 1234, "percentage": 25.0, "master": "on", "inherited": True},
        "fixes": {
            "capture-state": {"mode": "auto", "state": "active", "reason": "applied to GPUModelRunner.capture_model"}
        },
        "events": {"capture-state": {"state-consumed": 12}},
        "wrong": {},
        "misconfigured": {},
        "agreement": {"group": "a-token", "world_size": 2, "agreeing": 2, "difference": None},
        "leader": "f" * 16,
        "problem": "why",
        "serves_metrics": False,
        "starting": False,
        "kept": False,
        "written": 1763740000.0,
    }


def test_the_record_in_the_documentation_is_one() -> None:
    page = (Path(__file__).parent.parent / "docs" / "fleet.md").read_text(encoding="utf-8")
    text = page.partition("```json\n")[2].partition("```")[0]
    assert Record.from_json(json.loads(text)).as_json() == json.loads(text)


@pytest.mark.parametrize(
    "one",
    [
        record(),
        record(rank=0),
        record(rank=0)._replace(rank=Rank(0, None, 1, 0)),
        record(misconfigured={"VLLM_GRAPHFIX": "observ", "VLLM_GRAPHFIX_ROLLOUT": "", "VLLM_GRAPFIX": "off"}),
        record(fixes={"capture-state": FixReport("auto", "failed", "KeyError: 1", "error")}),
        record(unchecked="whether its ranks agree is not known (RuntimeError: no store)"),
        record(model=None, decision=Decided(False, None, None, "strict", False), fixes={}, events={}),
    ],
    ids=[
        "front-end",
        "rank",
        "rank without a local rank",
        "misconfigured",
        "code",
        "unchecked",
        "as little as there can be",
    ],
)
def test_a_record_is_read_as_it_was_written(one: Record) -> None:
    assert Record.from_json(json.loads(json.dumps(one.as_json()))) == one


DEEP: list[Any] = []
for _ in range(500):
    DEEP = [DEEP]
REFUSED: list[tuple[str, Any, str]] = [
    ("schema", 2, "it has schema 2, but this vllm-graphfix knows only 1: use a newer version"),
    ("schema", 0, "schema is 0"),
    ("schema", "1", "schema is '1', not a whole number from 0 on"),
    ("graphfix", None, "graphfix is None, not a text of at most 1500 characters"),
    ("graphfix", "x" * 1501, "not a text of at most 1500 characters"),
    ("engine", "0123456789ABCDEF", "engine is '0123456789ABCDEF', not of the form"),
    ("engine", ENGINE + "\n", "engine is '0123456789abcdef\\n'"),
    ("host", "a/../b", "host is 'a/../b', not of the form"),
    ("host", "", "host is ''"),
    ("pid", -1, "pid is -1, not a whole number from 0 on"),
    ("pid", True, "pid is True"),
    ("pid", 1.0, "pid is 1.0"),
    ("pid", 10**4000, "pid is 1000"),
    ("boot", "\x1b[2J", "boot is '\\x1b[2J'"),
    ("role", "boss", "role is 'boss', not one of api-server, engine-core, front-end, worker"),
    ("role", ["worker"], "role is a JSON array"),
    ("model", 7, "model is 7"),
    ("rank", 0, "rank is 0, not an object"),
    ("rank", {"rank": 0}, "rank.world_size is missing"),
    ("rank.world_size", 2**63, "rank.world_size is 9223372036854775808"),
    ("decision", None, "decision is None, not an object"),
    ("decision.canary", 1, "decision.canary is 1, not true or false"),
    ("decision.percentage", nan, "decision.percentage is nan, not a number from 0 to 100"),
    ("decision.percentage", 100.5, "decision.percentage is 100.5"),
    ("decision.master", "maybe", "decision.master is 'maybe', not one of"),
    ("fixes", [], "fixes is a JSON array, not an object"),
    ("fixes", {"x": 1}, "fixes.x is 1, not an object"),
    ("fixes", {"../x": {}}, "fixes has an entry named '../x'"),
    ("fixes", {f"fix-{n}": {} for n in range(65)}, "fixes has 65 entries; at most 64 are allowed"),
    ("fixes.capture-state.state", "great", "fixes.capture-state.state is 'great', not one of"),
    ("fixes.capture-state.mode", "", "fixes.capture-state.mode is ''"),
    ("fixes.capture-state.reason", DEEP, "fixes.capture-state.reason is a JSON array"),
    ("events", {"x": {"y": -1}}, "events.x.y is -1"),
    ("events", {"x": {"Y": 1}}, "events.x has an entry named 'Y'"),
    ("agreement.group", "a token", "agreement.group is 'a token'"),
    ("agreement.agreeing", None, "agreement.agreeing is None"),
    ("leader", "me", "leader is 'me'"),
    ("problem", {}, "problem is a JSON object"),
    ("misconfigured", [], "misconfigured is a JSON array, not an object"),
    ("misconfigured", {"PATH": "x"}, "misconfigured has an entry 'PATH': 'x'"),
    ("misconfigured", {"VLLM_GRAPHFIX": "\x1b[2J"}, "misconfigured has an entry 'VLLM_GRAPHFIX': '\\x1b[2J'"),
    ("misconfigured", {f"VLLM_GRAPHFIX_{n}": "x" for n in range(65)}, "misconfigured has 65 entries; at most 64 are"),
    ("written", inf, "written is inf, not a number from 0 to 1e+11"),
    ("written", 10**400, "written is 1000"),
]


@pytest.mark.parametrize(
    ("key", "value", "sentence"), REFUSED, ids=[f"{key} {sentence[:40]}" for key, _, sentence in REFUSED]
)
def test_what_is_not_as_it_has_to_be_is_refused_in_one_sentence(key: str, value: Any, sentence: str) -> None:
    document = record(rank=0).as_json()
    *path, last = key.split(".")
    place = document
    for name in path:
        place = place[name]
    place[last] = value
    with pytest.raises(RecordError) as refused:
        Record.from_json(document)
    assert sentence in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "key", ["schema", "graphfix", "engine", "host", "pid", "role", "decision", "fixes", "events", "written"]
)
def test_what_a_record_must_have_is_named_if_it_is_missing(key: str) -> None:
    document = record().as_json()
    del document[key]
    with pytest.raises(RecordError, match=f"^{key} is missing$"):
        Record.from_json(document)


def test_a_record_of_an_earlier_version_says_nothing_of_values_that_mean_nothing() -> None:
    document = record().as_json()
    del document["misconfigured"]
    assert Record.from_json(document) == record()


def test_an_older_reader_gets_no_name_that_it_would_refuse() -> None:
    written = record(
        misconfigured={"VLLM_GRAPHFIX_ROLOUT": "5", "VLLM_GRAPFIX": "off", "vllm_graphfix": "off"}
    ).as_json()
    assert written["misconfigured"] == {"VLLM_GRAPHFIX_ROLOUT": "5"}
    assert written["mistyped"] == {"VLLM_GRAPFIX": "off", "vllm_graphfix": "off"}


def test_keys_that_a_later_version_adds_are_ignored() -> None:
    assert Record.from_json(record().as_json() | {"colour": "blue"}) == record()


def test_a_code_that_a_later_version_adds_is_none() -> None:
    document = record().as_json()
    document["fixes"]["capture-state"]["code"] = "solar-flare"
    assert Record.from_json(document) == record()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
@settings(database=None, max_examples=200)
def test_any_json_value_is_a_record_or_is_refused(value: Any) -> None:
    with pytest.raises(RecordError):
        Record.from_json(value)


@given(st.sampled_from(sorted(record(rank=0).as_json())), JSON)
@settings(database=None, max_examples=300)
def test_a_record_with_any_value_in_it_is_printable_or_refused(key: str, value: Any) -> None:
    document = record(rank=0).as_json()
    document[key] = value
    try:
        parsed = Record.from_json(document)
    except RecordError as error:
        parsed = record(problem=str(error))
    assert all(text.isprintable() for text in (parsed.graphfix, parsed.vllm, parsed.model or "", parsed.problem or ""))
    assert len(json.dumps(parsed.as_json(), ensure_ascii=False).encode()) <= LARGEST


def test_text_for_terminals_is_printable() -> None:
    hostile = "red \x1b[31m\nand \u202etfel ot thgir\ud800"
    parsed = Record.from_json({**record().as_json(), "problem": hostile})
    assert parsed.problem == "red \ufffd[31m and \ufffdtfel ot thgir\ufffd"


def test_a_text_that_fits_is_cut_to_what_a_reader_accepts(tmp_path: Path) -> None:
    write(tmp_path, record(rank=0, problem="\U0001f600" * 10_000))
    problem = only(tmp_path).record.problem
    assert problem is not None
    assert (len(problem), problem[-1]) == (1500, "…")


@pytest.mark.parametrize("letter", ["x", "\\", "ß", "\U0001f600"], ids=["ascii", "escaped", "two bytes", "four bytes"])
def test_a_record_is_written_whatever_its_texts_are(letter: str, tmp_path: Path) -> None:
    text, short = letter * 1500, letter * SHORT
    every = {fix.name: FixReport("auto", "failed", text) for fix in FIXES}
    written = record(
        rank=0,
        fixes=every | {f"detector-{n}": FixReport("auto", "failed", text) for n in range(64 - len(every))},
        events={name: {f"event-{n}": 2**62 for n in range(12)} for name in every},
        problem=text,
        unchecked=text,
        model=text,
        agreement=AgreementReport("g" * 128, 2, 1, text),
        wrong=(Wrong(short, 8, 3, short, short, short, short, 2**62),) * 5,
        moved=(MovedTensor(short, short, short, short),) * 5,
        claims=(FalseClaim(short, short),) * 5,
        metadata=(OtherMetadata(short, short, short),) * 5,
        traced=(TracedArgument(short, short, short, short),) * 5,
        overwritten=(OverwrittenBlock(2**62, 2**62, 2**62, short, short),) * 5,
    )
    write(tmp_path, written)
    read_back = only(tmp_path).record
    assert (read_back.fixes.keys(), read_back.events) == (written.fixes.keys(), written.events)
    assert {fix.state for fix in read_back.fixes.values()} == {"failed"}
    assert min(len(fix.reason) for fix in read_back.fixes.values()) > 50
    assert (read_back.problem or "").startswith(letter * 50)


def test_half_a_letter_keeps_no_record_from_being_written(tmp_path: Path) -> None:
    half = "half \ud800"
    write(
        tmp_path,
        record(
            rank=0,
            wrong=(Wrong("graph", 8, 3, half, half, "0", "", 1),),
            moved=(MovedTensor("name", "weight", half, half),),
            claims=(FalseClaim("Builder", half),),
            metadata=(OtherMetadata("Builder", half, half),),
            traced=(TracedArgument("Model", half, half, half),),
            overwritten=(OverwrittenBlock(1, 0, 0, half, half),),
        ),
    )
    read_back = only(tmp_path).record
    texts = (read_back.wrong[0].backends, read_back.moved[0].outcome, read_back.claims[0].graph)
    assert {*texts, read_back.overwritten[0].ran} == {"half \ufffd"}


def test_a_host_name_is_reduced_to_what_a_file_name_may_hold(tmp_path: Path) -> None:
    write(tmp_path, record(host="node/../ä b"))
    assert only(tmp_path).record.host == "node_..___b"
