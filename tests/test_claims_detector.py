"""The detector `claims`: decodes with drafts that a builder takes for prompts, in full graphs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from behaviours import check_behaviours
from records import record
from table import slow_but_for
from vllm_graphfix.commands.fleet import look
from vllm_graphfix.engine import claims
from vllm_graphfix.engine.claims import ClaimCheck, takes_for_prompts
from vllm_graphfix.engine.components import Services
from vllm_graphfix.engine.components.claims import ClaimComponent
from vllm_graphfix.engine.graph_dispatch import Graph
from vllm_graphfix.records import FalseClaim, write
from vllm_graphfix.settings.decision import decide, decode
from vllm_graphfix.settings.environment import CLAIMS, Claims, read
from vllm_graphfix.text import PAGES

RELEASES = ("0.18.1", "0.19.1", "0.21.0", "0.25.1", "0.29.0", "0.33.0")
DRAFTS = 3
PROMPTS, DECODES = SimpleNamespace(num_prefills=2, num_decodes=0), SimpleNamespace(num_prefills=0, num_decodes=2)


@pytest.mark.parametrize("release", slow_but_for(("0.19.1", "0.33.0"), RELEASES))
def test_vllms_own_captures_and_builders_are_judged_by_what_they_do(release: str) -> None:
    check_behaviours(release, "claims_detector", {"VLLM_GRAPHFIX": "off"})


@pytest.mark.parametrize("release", slow_but_for(("0.25.1",), ("0.24.0", "0.25.1")))
def test_what_a_draft_of_model_runner_v2_captures_for_itself_is_seen(release: str) -> None:
    check_behaviours(release, "claims_of_drafts", {"VLLM_GRAPHFIX": "off"})


@pytest.mark.parametrize("release", slow_but_for(("0.33.0",), ("0.28.0", "0.31.0", "0.32.0", "0.33.0")))
def test_graphs_for_decodes_of_varying_lengths_are_known_by_their_bound(release: str) -> None:
    check_behaviours(release, "varlen_graphs", {"VLLM_GRAPHFIX": "off"})


class BuilderDouble:
    """Returns the metadata that it was made with; a capture's come from `build`, as most of vLLM's do."""

    def __init__(self, metadata: Any) -> None:
        self.metadata = metadata

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> Any:
        return self.metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(0, common_attn_metadata)


def batch(length: int = 1 + DRAFTS, tokens: int | None = None) -> Any:
    return SimpleNamespace(num_reqs=2, max_query_len=length, num_actual_tokens=2 * length if tokens is None else tokens)


def worker(*builders: Any, drafts: int | None = DRAFTS) -> Any:
    groups = [[SimpleNamespace(metadata_builders=[builder])] for builder in builders]
    speculative = None if drafts is None else SimpleNamespace(num_speculative_tokens=drafts)
    return SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=speculative), model_runner=SimpleNamespace(attn_groups=groups)
    )


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The graph that is being captured: a full one of eight tokens, or what a test makes of it."""
    current = SimpleNamespace(now=Graph(None, "FULL", 8, serves=True))
    monkeypatch.setattr(claims, "graph_being_captured", lambda: current.now)
    return current


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("vllm.graphfix")
    log.addHandler(handler)
    yield messages
    log.removeHandler(handler)


def captured(builder: Any, *batches: Any, drafts: int | None = DRAFTS) -> ClaimCheck:
    check = ClaimCheck()
    check.begin_capture(worker(builder, drafts=drafts))
    for each in batches:
        builder.build_for_cudagraph_capture(each)
    check.end_capture()
    return check


def counted(check: ClaimCheck) -> int | None:
    return check.counts().get("claims", {}).get("prompts-in-graphs")


@pytest.mark.usefixtures("graph")
def test_a_builder_is_reported_once_with_its_first_graph_and_the_flag(warnings: list[str]) -> None:
    check = captured(BuilderDouble(PROMPTS), batch(), batch())
    assert check.findings() == (FalseClaim("BuilderDouble", "FULL 8"),)
    assert check.counts() == {"claims": {"prompts-in-graphs": 2, "failures": 0}}
    (text,) = warnings
    assert "BuilderDouble" in text
    assert "the graph of 8 tokens" in text
    assert check.findings()[0].advice in text
    assert f"{PAGES}/claims.md" in text


def test_decodes_of_varying_lengths_need_not_fill_the_batch(graph: Any) -> None:
    for longest, reported in ((1 + DRAFTS, ("FULL 8",)), (2 + DRAFTS, ())):
        graph.now = Graph(None, "FULL", 8, serves=True, longest=longest)
        check = captured(BuilderDouble(PROMPTS), batch(tokens=5))
        assert tuple(each.graph for each in check.findings()) == reported


@pytest.mark.parametrize(
    ("builder", "flags"),
    [
        ("FlashMLAMetadataBuilder", ["-cc.cudagraph_mode=PIECEWISE"]),
        ("TurboQuantMetadataBuilder", ["-cc.cudagraph_mode=PIECEWISE", "--no-async-scheduling"]),
        ("Mamba1AttentionMetadataBuilder", ["--speculative-config"]),
    ],
)
def test_what_it_advises_is_what_the_builder_takes(builder: str, flags: list[str]) -> None:
    """Mamba-1 is wrong with drafts in any graph mode."""
    advice = FalseClaim(builder, "FULL 8").advice
    assert re.findall(r"-[-.=\w]+", advice) == flags


class Refusing(BuilderDouble):
    """Refuses rows longer than its threshold, as MLA's builders do under context parallelism."""

    reorder_batch_threshold = 1

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> Any:
        assert common_attn_metadata.max_query_len <= self.reorder_batch_threshold


@pytest.mark.usefixtures("graph")
def test_a_builder_that_ends_the_capture_is_named_with_the_flag(warnings: list[str]) -> None:
    with pytest.raises(AssertionError):
        captured(Refusing(None), batch())
    (text,) = warnings
    assert "Refusing claims full graphs" in text
    assert "PIECEWISE" in text
    assert f"{PAGES}/claims.md" in text


@pytest.mark.parametrize(
    ("threshold", "one", "now"),
    [(1 + DRAFTS, batch(), None), (1, batch(2 + DRAFTS), None), (1, batch(), Graph(None, "PIECEWISE", 8, serves=True))],
    ids=["short enough", "a prompt", "piecewise"],
)
def test_another_error_of_a_build_is_vllms_alone(
    threshold: int, one: Any, now: Graph | None, graph: Any, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise AssertionError

    graph.now = now or graph.now
    monkeypatch.setattr(Refusing, "reorder_batch_threshold", threshold)
    monkeypatch.setattr(Refusing, "build", fails)
    with pytest.raises(AssertionError):
        captured(Refusing(None), one)
    assert warnings == []


@pytest.mark.parametrize(
    ("metadata", "one", "drafts", "now"),
    [
        (DECODES, batch(), DRAFTS, None),
        (PROMPTS, batch(1), DRAFTS, None),
        (PROMPTS, batch(tokens=7), DRAFTS, None),
        (PROMPTS, batch(2 + DRAFTS), DRAFTS, None),
        (PROMPTS, batch(), None, None),
        (PROMPTS, batch(), DRAFTS, Graph(None, "PIECEWISE", 8, serves=True)),
        (PROMPTS, batch(), DRAFTS, Graph(None, "FULL", 8, serves=False)),
        (SimpleNamespace(num_actual_tokens=8), batch(), DRAFTS, None),
    ],
    ids=["decodes", "one token", "not uniform", "a prompt", "no drafts", "piecewise", "measured alone", "no split"],
)
def test_nothing_else_is_reported(metadata: Any, one: Any, drafts: int | None, now: Graph | None, graph: Any) -> None:
    graph.now = now or graph.now
    check = captured(BuilderDouble(metadata), one, drafts=drafts)
    assert check.findings() == ()
    assert not counted(check)


@pytest.mark.parametrize(
    ("metadata", "prompts"),
    [
        (SimpleNamespace(is_prefill=True, num_decodes=0), True),
        (SimpleNamespace(num_extends=2, num_decodes=0), True),
        (SimpleNamespace(num_decodes=0), True),
        (SimpleNamespace(num_decodes=0, num_prefills=0, num_spec_decodes=2), False),
        (SimpleNamespace(is_prefill=False, num_decodes=2), False),
        (None, False),
    ],
)
def test_metadata_say_if_rows_are_prompts(metadata: Any, prompts: bool) -> None:
    assert takes_for_prompts(metadata) is prompts


@pytest.mark.usefixtures("graph")
def test_a_builder_is_as_it_was_after_the_capture_and_its_errors_are_vllms() -> None:
    builder = BuilderDouble(PROMPTS)
    check = captured(builder, batch())
    assert vars(builder) == {"metadata": PROMPTS}
    builder.build_for_cudagraph_capture(batch())
    assert counted(check) == 1
    check.begin_capture(worker(builder))
    with pytest.raises(TypeError, match="build_for_cudagraph_capture"):
        builder.build_for_cudagraph_capture()  # type: ignore[call-arg]
    check.end_capture()
    assert vars(builder) == {"metadata": PROMPTS}


@pytest.mark.usefixtures("graph")
def test_an_error_ends_the_watch_with_one_warning_and_no_word_to_vllm(warnings: list[str]) -> None:
    class Hostile:
        @property
        def num_prefills(self) -> int:
            raise MemoryError("no memory")

    builder = BuilderDouble(Hostile())
    check = captured(builder, batch(), batch())
    assert check.counts() == {"claims": {"prompts-in-graphs": 0, "failures": 1}}
    assert [text for text in warnings if "no memory" in text] == warnings
    assert len(warnings) == 1
    assert vars(builder).keys() == {"metadata"}


def component(settings: dict[str, str]) -> ClaimComponent:
    nothing: Any = lambda *_: None  # noqa: E731 - for five fields
    made = ClaimComponent(Services(nothing, nothing, nothing, nothing, nothing))
    policy: Any = None
    made.start(decide(read(settings, ()), "0.33.0"), policy)
    return made


@pytest.mark.usefixtures("graph")
def test_off_it_is_not_even_made() -> None:
    builder = BuilderDouble(PROMPTS)
    off, on = component({CLAIMS: "off"}), component({})
    for each in (off, on):
        each.begin_capture(worker(builder))
        builder.build_for_cudagraph_capture(batch())
        each.end_capture()
    assert (off.check, off.counts(), off.findings()) == (None, {}, {})
    assert on.findings() == {"claims": (FalseClaim("BuilderDouble", "FULL 8"),)}
    on.after_fork()
    assert (on.counts(), on.findings()) == ({}, {"claims": ()})


def test_a_decision_holds_the_setting() -> None:
    decision = decide(read({CLAIMS: "off"}, ()), "0.33.0")
    assert decision.claims is Claims.OFF
    assert decode(decision.encode()) == decision
    assert not decision.same_choice(decision._replace(claims=Claims.REPORT))


def test_fleet_calls_such_an_engine_not_in_order(tmp_path: Path) -> None:
    written = record(
        rank=0,
        claims=(FalseClaim("TurboQuantMetadataBuilder", "FULL 8"),),
        events={"claims": {"prompts-in-graphs": 4, "failures": 0}},
    )
    write(tmp_path, written)
    (engine,) = look(tmp_path).engines
    (wrong,) = engine.wrong
    assert "TurboQuantMetadataBuilder (first in FULL 8)" in wrong
    assert "PIECEWISE" in wrong
    write(tmp_path, record(rank=0, events={"claims": {"prompts-in-graphs": 0, "failures": 1}}))
    (engine,) = look(tmp_path).engines
    assert not engine.wrong
    assert [note for note in engine.notes if "claims of builders were not checked" in note]
