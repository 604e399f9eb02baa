"""A fix that is in place and not on the path of graphs: state `bypassed`."""

from __future__ import annotations

import functools
import gc
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import fetch_cpu_engine
from behaviours import check_behaviours
from edited import both, edited, stock_source, swap
from records import record
from stock import release_root
from table import slow_but_for
from vllm_graphfix import manifest
from vllm_graphfix.commands.fleet import look
from vllm_graphfix.engine import live_deployment
from vllm_graphfix.engine.bypass import REPLAYS, BypassWatch
from vllm_graphfix.engine.components import Services
from vllm_graphfix.engine.components.bypass import BypassComponent
from vllm_graphfix.fix import Code, Mode, State
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.patching.applied_fix import FixState, Proof, proof_of
from vllm_graphfix.records import FixReport, write
from vllm_graphfix.settings.decision import decide, decode
from vllm_graphfix.settings.environment import BYPASS, Bypass, read
from vllm_graphfix.source import files

RELEASES = ("0.21.0", "0.25.1", "0.28.0", "0.31.0", "0.33.0")


@pytest.mark.parametrize("release", slow_but_for(("0.25.1", "0.33.0"), RELEASES))
def test_stock_releases_build_before_each_replay(release: str) -> None:
    check_behaviours(release, "bypass", select="stock", active=("flash-mixed-schedule",))


@pytest.mark.parametrize(
    "release", slow_but_for(("0.18.1", "0.33.0"), ("0.18.1", "0.20.2", "0.25.1", "0.27.1", "0.33.0"))
)
def test_a_call_comes_before_each_replay_in_scenarios_of_stock_releases(release: str) -> None:
    check_behaviours(release, "bypass_scenarios")


def build_in_the_graph(destination: Path) -> Path:
    """A 0.33.0 whose full graphs hold the build of attention metadata, as upstream means to (57632)."""
    in_the_capture = both(
        swap(r"attn_metadata = model_state.prepare_attn\(", "attn_metadata = partial(model_state.prepare_attn,"),
        swap(r"(with set_forward_context\(\n +attn_metadata),", r"\1(),"),
        swap(r"^from itertools", "from functools import partial\nfrom itertools"),
    )
    not_before = swap(
        r"^( +)(if cudagraph_mode == CUDAGraphMode.FULL:)$",
        r"\1if cudagraph_mode.name == 'FULL' and not for_capture:\n\1    return {}\n\1\2",
    )
    changes = {
        "vllm/v1/worker/gpu/cudagraph_utils.py": in_the_capture,
        "vllm/v1/worker/gpu/model_states/default.py": not_before,
    }
    return edited(release_root("0.33.0"), destination, changes, anonymous=False)


def test_a_build_inside_the_graph_is_seen(tmp_path: Path) -> None:
    tree = build_in_the_graph(tmp_path / "vllm")
    check_behaviours(tree, "bypass", select="captured", active=("flash-mixed-schedule",))


# -- which calls prove a fix -------------------------------------------------------------------------------------------

EACH_STEP = (
    "mamba-padding flashmla-fp8 flashmla-padding prefill-dispatch indexer-padding mamba-all-mode c128a-stride "
    "dcp-context-lens flash-mixed-schedule adaptive-schedule"
)
CAPTURE = "capture-state draft-prefill-state workspace-growth draft-stale-views draft-graph-support draft-non-causal"


def proofs(fix: Any) -> set[Proof | None]:
    shapes = {each["shape"] for each in manifest.load()["fixes"][fix.name] if each["verdict"] == "affected"}
    return {proof_of(patches, each) for patches in map(fix.patches, shapes) for each in patches}


def test_the_names_of_targets_say_which_calls_prove_a_fix() -> None:
    by_proof = {
        proof: " ".join(fix.name for fix in FIXES if proof in proofs(fix)) for proof in (Proof.STEP, Proof.CAPTURE)
    }
    assert by_proof == {Proof.STEP: EACH_STEP, Proof.CAPTURE: CAPTURE}


# -- the watch ---------------------------------------------------------------------------------------------------------


class BuilderDouble:
    def build(self) -> str:
        return "metadata"


class GraphDouble:
    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


class ManagerDouble:
    _candidates: tuple[()] = ()

    def __init__(self) -> None:
        self.graphs = {8: GraphDouble(), 4: GraphDouble()}

    def capture(self) -> None: ...


def site(owner: type, attribute: str) -> Any:
    name = "FlashMLAMetadataBuilder" if owner is BuilderDouble else owner.__name__
    return SimpleNamespace(owner=owner, attribute=attribute, name=f"{name}.{attribute}")


class Worker(SimpleNamespace):
    """A plain namespace takes no weak reference."""


class Engine:
    """A rank with one builder and two full graphs, and the watch of a fix of that builder."""

    def __init__(self, *sites: tuple[Any, Proof], concerns: bool = True) -> None:
        self.builder, manager = BuilderDouble(), ManagerDouble()
        self.graphs = list(manager.graphs.values())
        groups = [[SimpleNamespace(metadata_builders=[self.builder])]]
        self.runner = SimpleNamespace(attn_groups=groups, cudagraph_manager=manager)
        self.worker = Worker(model_runner=self.runner)
        self.published = 0
        self.proofs = {"fix": list(sites or [(site(BuilderDouble, "build"), Proof.STEP)])}
        self.watch = BypassWatch(lambda: self.proofs, lambda fix, worker: concerns, self.publish)

    def publish(self) -> None:
        self.published += 1

    def capture(self, *, called: bool = True) -> Engine:
        self.watch.begin_capture(self.worker)
        if called:
            self.runner.cudagraph_manager.capture()
        self.watch.end_capture()
        self.watch.on_captured(self.worker)
        return self

    def replay(self, times: int, *, builds: bool = False) -> None:
        for number in range(times):
            if builds:
                assert self.builder.build() == "metadata"
            self.graphs[number % 2].replay()

    def execute_dummy_batch(self) -> None:
        self.replay(1)

    def untouched(self) -> bool:
        return not vars(self.builder) and all(vars(graph).keys() == {"replays"} for graph in self.graphs)


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("vllm.graphfix")
    log.addHandler(handler)
    yield messages
    log.removeHandler(handler)


def test_replays_without_a_call_are_reported_once_and_leave_nothing_behind(warnings: list[str]) -> None:
    engine = Engine().capture()
    engine.replay(REPLAYS - 1)
    engine.watch.poll()
    assert not engine.watch.bypassed
    engine.replay(1)
    engine.watch.poll()
    engine.watch.poll()
    assert engine.watch.bypassed.keys() == {"fix"}
    assert engine.untouched()
    assert engine.published == 1
    (text,) = warnings
    assert "fix: bypassed" in text
    assert sum(graph.replays for graph in engine.graphs) == REPLAYS


def test_one_call_is_enough_and_ends_the_watch() -> None:
    engine = Engine().capture()
    engine.replay(1)
    engine.replay(1, builds=True)
    assert not vars(engine.builder)
    engine.watch.poll()
    assert engine.untouched()
    engine.replay(REPLAYS)
    engine.watch.poll()
    assert not engine.watch.bypassed


def test_steps_without_requests_do_not_count() -> None:
    engine = Engine().capture()
    for _ in range(2 * REPLAYS):
        engine.execute_dummy_batch()
    engine.watch.poll()
    assert not engine.watch.bypassed


def test_every_hour_it_looks_again_and_takes_back_what_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_graphfix.engine.bypass._REWATCH_AFTER", 3)
    engine = Engine().capture()
    engine.replay(REPLAYS)
    engine.watch.poll()
    assert engine.watch.bypassed
    for _ in range(3):
        engine.watch.poll()
    engine.replay(1, builds=True)
    engine.watch.poll()
    assert not engine.watch.bypassed
    assert engine.untouched()


@pytest.mark.parametrize("called", [True, False])
def test_a_capture_without_a_call_needs_no_replay(called: bool) -> None:
    engine = Engine((site(ManagerDouble, "capture"), Proof.CAPTURE)).capture(called=called)
    assert engine.watch.bypassed.keys() == (set() if called else {"fix"})
    assert not vars(engine.runner.cudagraph_manager).keys() - {"graphs"}


class Subclass(BuilderDouble):
    def build(self) -> str:
        return "its own"


@pytest.mark.parametrize("case", ["not concerned", "own method", "another's attribute", "no graphs", "no builder"])
def test_nothing_is_concluded_where_a_call_proves_nothing(case: str) -> None:
    engine = Engine(concerns=case != "not concerned")
    (group,) = engine.runner.attn_groups[0]
    if case == "own method":
        group.metadata_builders = [Subclass()]
    elif case == "another's attribute":
        vars(engine.builder)["build"] = lambda: "metadata"
    elif case == "no graphs":
        engine.runner.cudagraph_manager.graphs = {}
    elif case == "no builder":
        group.metadata_builders = []
    engine.capture()
    engine.replay(REPLAYS)
    engine.watch.poll()
    assert not engine.watch.bypassed


def test_an_error_ends_the_watch_with_one_warning(warnings: list[str]) -> None:
    engine = Engine()
    engine.watch._provable = lambda: {"fix": [(None, Proof.STEP)]}  # type: ignore[list-item]
    engine.capture().capture()
    engine.replay(REPLAYS)
    engine.watch.poll()
    (text,) = warnings
    assert "is not watched: AttributeError" in text
    assert engine.untouched()


def test_methods_of_classes_may_be_replaced_while_they_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine().capture()
    monkeypatch.setattr(BuilderDouble, "build", lambda builder: "stock, since the fix was reverted")
    replayed: list[GraphDouble] = []
    monkeypatch.setattr(GraphDouble, "replay", replayed.append)  # as `compare --exact` counts replays
    engine.graphs[0].replay()
    assert engine.builder.build() == "stock, since the fix was reverted"
    assert replayed == [engine.graphs[0]]


def test_a_fix_that_was_reverted_meanwhile_is_not_bypassed(warnings: list[str]) -> None:
    engine = Engine().capture()
    engine.replay(REPLAYS)
    engine.proofs.clear()
    engine.watch.poll()
    assert (engine.watch.bypassed, warnings) == ({}, [])
    assert engine.untouched()


def test_builders_that_are_gone_were_not_to_be_called() -> None:
    engine = Engine().capture()
    (group,) = engine.runner.attn_groups[0]
    group.metadata_builders = [BuilderDouble()]
    del engine.builder
    engine.replay(REPLAYS)
    engine.watch.poll()
    assert not engine.watch.bypassed


def test_attributes_that_others_put_around_those_of_the_watch_stay() -> None:
    engine = Engine().capture()
    calls: list[str] = []

    def around(name: str, ours: Callable[[], Any]) -> Any:
        calls.append(name)
        return ours()

    for owned, name in ((engine.builder, "build"), (engine.graphs[0], "replay")):
        setattr(owned, name, functools.partial(around, name, getattr(owned, name)))
    for _ in range(2):
        engine.replay(1, builds=True)
        engine.watch.poll()
    assert calls == ["build", "replay"] * 2
    assert vars(engine.builder).keys() == {"build"}
    assert not engine.watch.bypassed


def test_what_vllm_discards_goes_at_once() -> None:
    engine = Engine().capture()
    weak: list[Any] = [weakref.ref(each) for each in (engine.worker, engine.builder, *engine.graphs)]
    watch = engine.watch
    watch._provable, watch._publish = dict, lambda: None  # without a reference to the engine of this test
    gc.disable()  # a graph that only a collection frees may be freed while another is captured
    try:
        del engine
        assert [each() for each in weak] == [None] * 4
    finally:
        gc.enable()
    watch.poll()
    assert not watch.bypassed


def test_the_heartbeat_leaves_a_capture_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_graphfix.engine.bypass._REWATCH_AFTER", 1)
    engine = Engine((site(ManagerDouble, "capture"), Proof.CAPTURE)).capture()
    engine.watch.begin_capture(engine.worker)
    for _ in range(3):
        engine.watch.poll()
    engine.runner.cudagraph_manager.capture()
    engine.watch.end_capture()
    engine.watch.on_captured(engine.worker)
    assert not engine.watch.bypassed


@pytest.mark.xdist_group("examples")
def test_an_attribute_can_be_put_on_a_graph_of_torch_for_cuda() -> None:
    """The torch that the tests install has a stand-in for the class. No GPU: the graph is not initialised."""
    script = (
        "from torch.cuda import CUDAGraph\n"
        "from vllm_graphfix.engine.bypass import Watched\n"
        "graph, replayed = CUDAGraph.__new__(CUDAGraph), []\n"
        "CUDAGraph.replay = replayed.append\n"
        "watched = Watched(graph, 'replay', lambda call: replayed.append(call))\n"
        "graph.replay()\n"
        "assert replayed == [watched, graph]\n"
        "watched.remove()\n"
        "assert 'replay' not in vars(graph)\n"
        "print([kind.__module__ for kind in CUDAGraph.__mro__])"
    )
    root = fetch_cpu_engine.engine(version=fetch_cpu_engine.AFFECTED)
    around = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{Path(__file__).parent.parent}"}
    command = (sys.executable, "-c", script)
    ran = subprocess.run(command, check=False, env=around, capture_output=True, text=True, timeout=300)
    assert "pybind11" in ran.stdout, ran.stderr


def test_a_forked_child_watches_nothing() -> None:
    engine = Engine().capture()
    engine.watch.forked()
    assert engine.untouched()


# -- what is said of it ------------------------------------------------------------------------------------------------


def test_the_state_of_the_fix_is_bypassed_and_no_other(tmp_path: Path) -> None:
    nothing: Any = lambda *_: None  # noqa: E731 - for five fields
    component = BypassComponent(Services(nothing, nothing, nothing, nothing, nothing))
    assert component.overrule({}) == {}
    component.watch = BypassWatch(dict)
    component.watch.bypassed = {"a": "why", "b": "why"}
    states = {
        "a": FixState("a", Mode.AUTO, None, State.ACTIVE, "applied"),
        "b": FixState("b", Mode.AUTO, None, State.FAILED, "failed"),
        "c": FixState("c", Mode.AUTO, None, State.ACTIVE, "applied"),
    }
    overruled = component.overrule(states)
    assert overruled == {"a": FixState("a", Mode.AUTO, None, State.BYPASSED, "why", Code.NOT_CALLED)}


def test_older_readers_read_failed_and_fleet_says_bypassed(tmp_path: Path) -> None:
    reason = "the engine goes past it"
    fixes = {"flashmla-fp8": FixReport("auto", "bypassed", reason, "not-called")}
    write(tmp_path, record(fixes=fixes, rank=0))
    (text,) = (file.read_text() for file in tmp_path.rglob("*.json"))
    assert '"state": "failed"' in text or '"state":"failed"' in text
    (engine,) = look(tmp_path).engines
    assert any("flashmla-fp8 is bypassed" in each and reason in each for each in engine.wrong)


@pytest.mark.parametrize(
    ("settings", "watches"),
    [
        ({}, False),
        ({BYPASS: "off"}, False),
        ({BYPASS: "on"}, False),
        ({BYPASS: "report"}, True),
        ({BYPASS: "report", "VLLM_GRAPHFIX": "off"}, False),
        ({BYPASS: "report", "VLLM_GRAPHFIX_ROLLOUT": "0"}, False),
    ],
)
def test_nothing_is_watched_by_default(settings: dict[str, str], watches: bool) -> None:
    nothing: Any = lambda *_: None  # noqa: E731 - for four fields
    engine, policy = Engine(), cast("Any", None)
    component = BypassComponent(Services(nothing, nothing, nothing, nothing, lambda: engine.proofs))
    component.start(decide(read(settings, ()), "0.33.0"), policy)
    component.begin_capture(engine.worker)
    component.end_capture()
    component.on_captured(engine.worker, graphs=True)
    component.poll()
    assert (component.watch is not None, not engine.untouched()) == (watches, watches)
    component.start(decide(read({}, ()), "0.33.0"), policy)  # the next engine of the process
    component.poll()
    assert engine.untouched()


def test_a_decision_holds_the_setting() -> None:
    decision = decide(read({BYPASS: "report"}, ()), "0.33.0")
    assert decision.bypass is Bypass.REPORT
    assert decode(decision.encode()) == decision
    assert not decision.same_choice(decision._replace(bypass=Bypass.OFF))


CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(
        model="/models/llama",
        max_model_len=4096,
        hf_config=SimpleNamespace(to_json_string=lambda: '{"architectures": ["LlamaForCausalLM"], "head_dim": 64}'),
    ),
    parallel_config=SimpleNamespace(tensor_parallel_size=2, data_parallel_size=1, decode_context_parallel_size=2),
    cache_config=SimpleNamespace(cache_dtype="auto", block_size=16),
    compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL_AND_PIECEWISE")),
    attention_config=SimpleNamespace(backend=SimpleNamespace(name="FLASH_ATTN")),
    speculative_config=None,
)


@pytest.mark.parametrize(("ranks", "concerned"), [(2, True), (1, False)])
def test_a_fix_whose_condition_does_not_hold_here_does_not_count(
    ranks: int, concerned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = stock_source(release_root("0.18.1"))
    monkeypatch.setattr(files, "open_source", lambda: source)
    monkeypatch.setattr(live_deployment, "_gpu", lambda: "NVIDIA H100 80GB HBM3")
    parallel = SimpleNamespace(**vars(CONFIG.parallel_config) | {"decode_context_parallel_size": ranks})
    config = SimpleNamespace(**vars(CONFIG) | {"parallel_config": parallel})
    worker = SimpleNamespace(vllm_config=config, model_runner=SimpleNamespace())
    assert live_deployment.concerns("dcp-context-lens", worker) is concerned
    assert live_deployment.concerns("no such fix", worker), "what is not known may concern"
