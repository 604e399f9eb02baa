"""Which engines are in the rollout, and what one process tells the others of it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from judged_fleets import NAMED
from vllm_graphfix import __version__
from vllm_graphfix.settings import decision as rollout
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.settings.decision import BUCKETS, bucket, buckets_of, decide, decode, inherited_decision

FIXES = ("capture-state", "flashmla-fp8")
DOCUMENT = Path(__file__).parents[1] / "docs" / "rollout.md"
KEYS = 100_000


@pytest.fixture(scope="module")
def buckets_of_keys() -> list[int]:
    return [bucket(f"node-{number}.example") for number in range(KEYS)]


def test_every_percentage_is_hit_within_half_a_point(buckets_of_keys: list[int]) -> None:
    for percentage in range(101):
        hit = sum(each < percentage * 100 for each in buckets_of_keys) / KEYS * 100
        assert abs(hit - percentage) <= 0.5, f"{percentage} % hits {hit} %"


def test_nobody_leaves_when_the_percentage_rises() -> None:
    before: set[str] = set()
    for percentage in ("0", "0.01", "0.5", "1", "5", "5.5", "25", "50", "99.99", "100"):
        environment = {"VLLM_GRAPHFIX_ROLLOUT": percentage}
        inside = {
            key
            for key in map(str, range(2_000))
            if decide(settings.read(environment | {"VLLM_GRAPHFIX_ROLLOUT_KEY": key}, FIXES), "0.21.0").canary
        }
        assert before <= inside
        before = inside
    assert len(before) == 2_000


@pytest.mark.parametrize("kind", NAMED)
def test_2000_engines_named_as_kubernetes_names_them_get_their_share(kind: str) -> None:
    """Within three standard deviations of a draw of 2,000; the same engines each time, and none leaves."""
    inside: list[set[str]] = []
    for percentage in (1, 5, 25, 50):
        environment = {"VLLM_GRAPHFIX_ROLLOUT": str(percentage)}
        by_key = [settings.read(environment | {"VLLM_GRAPHFIX_ROLLOUT_KEY": key}, FIXES) for key in NAMED[kind]]
        chosen, again = ({each.rollout_key for each in by_key if decide(each, "0.21.0").canary} for _ in range(2))
        assert chosen == again
        assert not inside or inside[-1] < chosen
        inside.append(chosen)
        share = percentage / 100
        assert abs(len(chosen) / 2_000 - share) <= 3 * (share * (1 - share) / 2_000) ** 0.5
    row = " | ".join(f"{len(chosen) / 20:.2f}" for chosen in inside)
    assert f"| {kind} | {row} |" in DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize("percentage", ["0", "0.01", "5", "99.99", "100"])
def test_an_engine_is_in_if_its_bucket_is_below_the_percentage(percentage: str) -> None:
    buckets = buckets_of(percentage)
    for key in map(str, range(500)):
        environment = {"VLLM_GRAPHFIX_ROLLOUT": percentage, "VLLM_GRAPHFIX_ROLLOUT_KEY": key}
        decision = decide(settings.read(environment, FIXES), "0.21.0")
        assert decision.canary == (bucket(key) < buckets)
        assert decision.canary or f" is not among the first {percentage} % " in str(decision.withheld)
        assert (decision.withheld is None) == decision.canary


def test_the_bucket_that_a_percentage_begins_with_is_out() -> None:
    first_out, last_in = (next(k for k in map(str, range(10**6)) if bucket(k) == wanted) for wanted in (500, 499))
    for key, canary in ((first_out, False), (last_in, True)):
        environment = {"VLLM_GRAPHFIX_ROLLOUT": "5", "VLLM_GRAPHFIX_ROLLOUT_KEY": key}
        decision = decide(settings.read(environment, FIXES), "0.21.0")
        assert (decision.bucket, decision.canary) == (bucket(key), canary)
        reason = f"bucket 500 of 10,000 is not among the first 5 % (VLLM_GRAPHFIX_ROLLOUT, key {key!r})"
        assert decision.withheld == (None if canary else reason)


def test_the_published_vectors_hold() -> None:
    """Other tools may predict who is in: the function is a part of the interface."""
    rows = re.findall(r"^\| `([^`]*)` \| (\d+) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 5
    for key, published in rows:
        digest = hashlib.sha256(b"vllm-graphfix:" + key.encode()).digest()
        assert bucket(key) == int(published) == int.from_bytes(digest[:8], "big") % BUCKETS


@pytest.mark.parametrize(
    ("text", "buckets"),
    [
        ("25", 2500),
        ("25%", 2500),
        (" 0.5 % ", 50),
        ("0", 0),
        ("0.01", 1),
        ("99.990%", 9999),
        ("100", 10_000),
        ("7.25", 725),
    ],
)
def test_a_percentage_is_read_to_the_last_bucket(text: str, buckets: int) -> None:
    assert buckets_of(text) == buckets


@pytest.mark.parametrize(
    "text", ["", " \t", "%", "-1", "100.01", "1e1", "0.005", "a quarter", "25%%", "٢٥", "1_0", "nan", "9" * 500]
)
def test_what_is_no_percentage_puts_nobody_in_and_says_so(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        buckets_of(text)
    decision = decide(settings.read({"VLLM_GRAPHFIX_ROLLOUT": text}, FIXES), "0.21.0")
    assert not decision.canary
    assert decision.withheld is not None
    assert decision.withheld.startswith("VLLM_GRAPHFIX_ROLLOUT=")
    assert decision.withheld.isprintable()
    assert len(decision.withheld) < 200
    assert decision.misconfigured == {"VLLM_GRAPHFIX_ROLLOUT": settings.brief(text.strip())}
    assert decode(decision.encode()) == decision


@given(st.integers(0, BUCKETS))
def test_a_number_of_buckets_is_printed_as_it_is_read(buckets: int) -> None:
    assert buckets_of(rollout.as_percentage(buckets)) == buckets


def test_without_a_percentage_every_engine_is_in() -> None:
    decision = decide(settings.read({}, FIXES), "0.21.0")
    assert (decision.canary, decision.bucket, decision.rollout, decision.withheld) == (True, None, None, None)


def test_the_key_is_the_host_unless_one_is_set() -> None:
    percentage = {"VLLM_GRAPHFIX_ROLLOUT": "50"}
    by_host = decide(settings.read(percentage, FIXES), "0.21.0", host="node-a")
    assert (by_host.key, by_host.bucket) == ("node-a", bucket("node-a"))
    by_key = decide(settings.read(percentage | {"VLLM_GRAPHFIX_ROLLOUT_KEY": "web"}, FIXES), "0.21.0", host="node-a")
    assert (by_key.key, by_key.bucket) == ("web", bucket("web"))


def test_a_decision_comes_out_of_the_environment_as_it_went_in() -> None:
    environment = {
        "VLLM_GRAPHFIX_ROLLOUT": "1",
        "VLLM_GRAPHFIX_ROLLOUT_KEY": "ü\n",
        "VLLM_GRAPHFIX_CAPTURE_STATE": "off",
    }
    decision = decide(settings.read(environment, FIXES), "0.21.0")
    assert decode(decision.encode()) == decision
    assert "\n" not in decision.encode()


@pytest.mark.parametrize(("length", "key"), [(200, "x" * 200), (201, "x" * 199 + "…")])
def test_a_long_key_is_printed_shortened_and_decides_whole(length: int, key: str) -> None:
    environment = {"VLLM_GRAPHFIX_ROLLOUT": "50", "VLLM_GRAPHFIX_ROLLOUT_KEY": "x" * length}
    decision = decide(settings.read(environment, FIXES), "0.21.0")
    assert (decision.key, decision.bucket) == (key, bucket("x" * length))


def test_decisions_with_the_same_effect_are_the_same_choice_for_any_engine() -> None:
    def of(**environment: str) -> rollout.Decision:
        named = {f"VLLM_GRAPHFIX{name}": value for name, value in environment.items()}
        return decide(settings.read(named, FIXES), "0.21.0")

    assert of().same_choice(of(_ROLLOUT="100"))
    others = [of(), of(_ROLLOUT="0"), of(_ROLLOUT="nonsense"), of(**{"": "off"}), of(_CAPTURE_STATE="off")]
    others += [of(**{"": "offf"}), of(_CAPTURE_STATE="of"), of(_AGREEMENT_TIMEOUT="900")]
    for one in others:
        assert [one.same_choice(other) for other in others] == [one is other for other in others]


@pytest.mark.parametrize("percentage", ["0", "100", "nonsense"])
def test_the_decision_of_a_percentage_at_the_end_of_the_scale_is_handed_on(percentage: str) -> None:
    decision = decide(settings.read({"VLLM_GRAPHFIX_ROLLOUT": percentage}, FIXES), "0.21.0")
    assert inherited_decision(decision.encode(), "0.21.0", frozenset(FIXES)) == decision


@pytest.mark.parametrize(
    ("field", "least", "most"), [("bucket", 0, BUCKETS - 1), ("rollout", 0, BUCKETS), ("pid", None, 2**63 - 1)]
)
def test_a_number_outside_its_range_is_no_decision(field: str, least: int | None, most: int) -> None:
    for value, sound in ((least, True), (most, True), (most + 1, False), *([(least - 1, False)] if least == 0 else [])):
        if value is not None:
            assert (decode(json.dumps(GOOD | {field: value})) is not None) == sound, value


def test_a_decision_counts_only_for_the_vllm_and_the_plugin_that_made_it() -> None:
    decision = decide(settings.read({}, FIXES), "0.21.0")
    assert inherited_decision(decision.encode(), "0.21.0", frozenset(FIXES)) == decision
    assert inherited_decision(decision.encode(), "0.22.0", frozenset(FIXES)) is None
    assert inherited_decision(decision.encode(), "0.21.0", frozenset({*FIXES, "a-new-one"})) is None
    assert inherited_decision(decision.encode(), "0.21.0", frozenset(FIXES[:1])) is None
    assert inherited_decision(None, "0.21.0", frozenset(FIXES)) is None
    other = decision._replace(graphfix=__version__ + ".1")
    assert inherited_decision(other.encode(), "0.21.0", frozenset(FIXES)) is None


def test_a_value_that_means_nothing_is_handed_on_and_the_percentage_is_one() -> None:
    environment = {"VLLM_GRAPHFIX": "observ", "VLLM_GRAPHFIX_CAPTURE_STATE": "\x1b2", "VLLM_GRAPHFIX_ROLLOUT": "half"}
    decision = decode(decide(settings.read(environment, FIXES), "0.21.0").encode())
    assert decision is not None
    assert decision.misconfigured == environment | {"VLLM_GRAPHFIX_CAPTURE_STATE": r"\x1b2"}
    assert decision.master is settings.Master.OFF
    assert (decision.canary, decision.applies, decision.percentage) == (False, False, 0.0)


APPLIES: list[tuple[dict[str, str], bool, float]] = [
    ({}, True, 100),
    ({"VLLM_GRAPHFIX": "strict"}, True, 100),
    ({"VLLM_GRAPHFIX_CAPTURE_STATE": "off"}, True, 100),
    ({"VLLM_GRAPHFIX_ROLLOUT": "100"}, True, 100),
    ({"VLLM_GRAPHFIX_ROLLOUT": "0"}, False, 0),
    ({"VLLM_GRAPHFIX_ROLLOUT": "57", "VLLM_GRAPHFIX_ROLLOUT_KEY": "node-b"}, True, 57),
    ({"VLLM_GRAPHFIX_ROLLOUT": "56", "VLLM_GRAPHFIX_ROLLOUT_KEY": "node-b"}, False, 56),
    ({"VLLM_GRAPHFIX_ROLLOUT": "57", "VLLM_GRAPHFIX_ROLLOUT_KEY": "node-b", "VLLM_GRAPHFIX": "off"}, False, 0),
    ({"VLLM_GRAPHFIX": "off"}, False, 0),
    ({"VLLM_GRAPHFIX": "observe"}, False, 0),
    ({"VLLM_GRAPHFIX": "observe", "VLLM_GRAPHFIX_CAPTURE_STATE": "on"}, True, 100),
    ({"VLLM_GRAPHFIX": "observ"}, False, 0),
    ({"VLLM_GRAPHFIX": "offf", "VLLM_GRAPHFIX_CAPTURE_STATE": "on"}, False, 0),
    ({"VLLM_GRAPHFIX_CAPTURE_STATE": "onn"}, True, 100),
    ({"VLLM_GRAPHFIX_CAPTURE_STATE": "onn", "VLLM_GRAPHFIX_FLASHMLA_FP8": "off"}, False, 0),
    ({"VLLM_GRAPHFIX_ROLLOUT": "half"}, False, 0),
    ({"VLLM_GRAPHFIX_ROLLOUT": ""}, False, 0),
]
"""An environment; whether an engine there has the fixes; and the percentage of those that do."""


@pytest.mark.parametrize(("environment", "applies", "percentage"), APPLIES, ids=[str(row[0]) for row in APPLIES])
def test_engines_in_the_rollout_have_the_fixes_unless_off_or_observing(
    environment: dict[str, str], applies: bool, percentage: float
) -> None:
    decision = decide(settings.read(environment, FIXES), "0.21.0")
    assert (decision.applies, decision.percentage) == (applies, percentage)


MARKS = {"VLLM_GRAPHFIX_KV_MARKS": "1/1"}
MARKS_END = {"VLLM_GRAPHFIX_KV_MARKS_ACTION": "abort"}
SHADOW = {"VLLM_GRAPHFIX_SHADOW": "1/9"}
SHADOW_ENDS = {"VLLM_GRAPHFIX_SHADOW_ACTION": "abort"}


@pytest.mark.parametrize(
    ("environment", "aborts"),
    [
        ({}, False),
        (MARKS, False),
        (MARKS_END, False),
        (MARKS | MARKS_END, True),
        (SHADOW, False),
        (SHADOW_ENDS, False),
        (SHADOW | SHADOW_ENDS, True),
        (MARKS | SHADOW_ENDS, False),
        (SHADOW | MARKS_END, False),
    ],
)
def test_requests_may_be_ended_where_a_check_is_on_and_ends_them(environment: dict[str, str], aborts: bool) -> None:
    assert decide(settings.read(environment, ()), "0.21.0").aborts == aborts
    for switch in ({"VLLM_GRAPHFIX": "off"}, {"VLLM_GRAPHFIX_ROLLOUT": "0"}):
        assert not decide(settings.read(environment | switch, ()), "0.21.0").aborts


@pytest.mark.parametrize(
    ("switch", "off", "watched"),
    [
        ({}, False, True),
        ({"VLLM_GRAPHFIX": "observe"}, False, True),
        ({"VLLM_GRAPHFIX": "off"}, True, False),
        ({"VLLM_GRAPHFIX_ROLLOUT": "0"}, False, False),
        ({"VLLM_GRAPHFIX_ROLLOUT": "half"}, True, False),
        ({"VLLM_GRAPHFIX_ROLLOUT": " "}, True, False),
    ],
    ids=str,
)
def test_what_is_off_for_all_and_what_is_not_looked_at(switch: dict[str, str], off: bool, watched: bool) -> None:
    by_default = decide(settings.read(switch, ()), "0.21.0")
    assert (by_default.watches_calls, by_default.compares_metadata, by_default.compares_traces) == (False,) * 3
    reports = dict.fromkeys(("VLLM_GRAPHFIX_BYPASS", "VLLM_GRAPHFIX_METADATA", "VLLM_GRAPHFIX_TRACED"), "report")
    wanted = {"VLLM_GRAPHFIX_ADDRESSES": "repair", **reports, **MARKS, **switch}
    decision = decide(settings.read(wanted, ()), "0.21.0")
    assert decision.is_off == off
    assert (decision.watches.value, decision.marks) == (("repair", "1/1") if watched else ("off", "off"))
    assert decision.checks.value == ("report" if watched else "off")
    assert (decision.watches_calls, decision.compares_metadata, decision.compares_traces) == (watched,) * 3


@pytest.mark.parametrize("percentage", ["0.01", "5", "99.99"])
def test_nodes_that_decide_separately_are_out_of_a_percentage_without_a_key(percentage: str) -> None:
    for host in ("node-a", "node-b"):
        alone = decide(settings.read({"VLLM_GRAPHFIX_ROLLOUT": percentage}, FIXES), "0.21.0", host=host)
        together = alone.needing_a_key("--nnodes 2")
        assert not together.canary
        assert together.withheld == (
            f"VLLM_GRAPHFIX_ROLLOUT={percentage} % without VLLM_GRAPHFIX_ROLLOUT_KEY: with --nnodes 2 the nodes of an "
            "engine decide "
            "separately, and need one key that all of them have; no node gets the fixes until it is set"
        )
        assert together.percentage == float(percentage), "what is set; nobody is in"
        assert decode(together.encode()) == together


@pytest.mark.parametrize("environment", [{}, {"VLLM_GRAPHFIX_ROLLOUT": "0"}, {"VLLM_GRAPHFIX_ROLLOUT": "100"}])
def test_nodes_that_cannot_decide_differently_need_no_key(environment: dict[str, str]) -> None:
    decision = decide(settings.read(environment, FIXES), "0.21.0")
    assert decision.needing_a_key("--nnodes 2") == decision


GOOD = json.loads(decide(settings.read({}, FIXES), "0.21.0").encode())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda x: st.lists(x) | st.dictionaries(st.text(), x),
)


@given(st.text() | JSON.map(json.dumps))
def test_whatever_else_the_environment_holds_is_no_decision(text: str) -> None:
    assert decode(text) is None


@given(st.sampled_from(sorted(GOOD)), JSON)
def test_a_decision_with_one_field_replaced_is_none_or_of_the_right_types(name: str, value: object) -> None:
    decision = decode(json.dumps(GOOD | {name: value}))
    if decision is not None:
        assert json.loads(decision.encode()) == GOOD | {name: value}


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"VLLM_GRAPHFIX": 1},
        {"PATH": "x"},
        {"VLLM_GRAPHFIX": "x" * 41},
        {"VLLM_GRAPHFIX": "ä"},
        {"VLLM_GRAPHFIX": "a\n"},
    ],
)
def test_what_cannot_be_a_value_that_means_nothing_is_no_decision(value: object) -> None:
    assert decode(json.dumps(GOOD | {"misconfigured": value})) is None
    assert decode(json.dumps(GOOD | {"misconfigured": {"VLLM_GRAPHFIX": "observ"}})) is not None


@pytest.mark.parametrize(("length", "read"), [(200, True), (201, False)])
def test_a_key_longer_than_one_is_written_is_no_decision(length: int, read: bool) -> None:
    assert (decode(json.dumps(GOOD | {"key": "x" * length})) is not None) is read
    long = decide(settings.read({"VLLM_GRAPHFIX_ROLLOUT": "5", "VLLM_GRAPHFIX_ROLLOUT_KEY": "\t" * 300}, ()), "0.21.0")
    assert decode(long.encode()) is not None


@pytest.mark.parametrize("value", [0.0, -1.0, 604801.0, 600, True, "600", None])
def test_what_cannot_be_a_timeout_is_no_decision(value: object) -> None:
    assert decode(json.dumps(GOOD | {"agreement_timeout": value})) is None


def test_a_decision_without_what_a_later_version_has_added_is_one() -> None:
    older = {name: value for name, value in GOOD.items() if name not in ("misconfigured", "agreement_timeout")}
    decision = decode(json.dumps(older))
    assert decision is not None
    assert (decision.misconfigured, decision.agreement_timeout) == ({}, 600.0)


@pytest.mark.parametrize("schema", [0, 2, None, "1"])
def test_a_decision_of_another_schema_is_none(schema: object) -> None:
    assert decode(json.dumps(GOOD | {"schema": schema})) is None


@pytest.mark.parametrize("tree", [16 * "g", 15 * "a", 17 * "a", 1234567890123456, None])
def test_what_cannot_be_a_tree_is_no_decision(tree: object) -> None:
    assert decode(json.dumps(GOOD | {"trees": {"capture-state": tree}})) is None
    assert decode(json.dumps(GOOD | {"trees": {"capture-state": 16 * "a"}})) is not None


@pytest.mark.parametrize(("length", "read"), [(12_288, True), (12_289, False)])
def test_a_longer_text_than_a_decision_may_have_is_none(length: int, read: bool) -> None:
    assert (decode(json.dumps(GOOD).ljust(length)) is not None) is read


def test_a_decision_too_deep_or_too_long_is_none() -> None:
    assert decode("[" * 8000) is None
    assert decode(json.dumps(GOOD | {"host": "x" * 10_000})) is None
