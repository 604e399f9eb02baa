"""Tensors that move under graphs: noticed, told, brought back, or their graphs not used."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from behaviours import check_behaviours
from records import record
from stock import ALL_RELEASES, release_root
from table import SAMPLE, between, slow_but_for
from vllm_graphfix.commands.fleet import look
from vllm_graphfix.engine import addresses, rank_addresses
from vllm_graphfix.engine.addresses import WATCHED, AddressWatch
from vllm_graphfix.engine.inventory import LASTING, Inventory, Kind
from vllm_graphfix.engine.metrics_snapshot import snapshot_of
from vllm_graphfix.engine.rank_addresses import RankAddresses
from vllm_graphfix.records import MovedTensor, Record, RecordError, write
from vllm_graphfix.records.record import SHORT
from vllm_graphfix.settings.decision import decide, decode
from vllm_graphfix.settings.environment import ADDRESSES, Addresses, read
from vllm_graphfix.source.files import open_source

MOVED = MovedTensor("model.layers.0.self_attn.W_UV", "attribute", "update_weights", "reported")
COUNTS = {"comparisons": 3, "moved": 2, "repaired": 0, "graphs-taken-out": 0, "failures": 0}
RELEASES = ("0.16.0", "0.20.0", "0.21.0", "0.25.1", "0.26.0", "0.33.0")


@pytest.mark.parametrize(
    ("release", "action"),
    [pytest.param(release.values[0], action, marks=release.marks if action == "repair" else pytest.mark.slow)
     for release in slow_but_for(("0.21.0", "0.33.0"), RELEASES) for action in ("report", "repair", "off")],
)  # fmt: skip
def test_a_tensor_that_moves_under_graphs_is_reported_and_brought_back(release: str, action: str) -> None:
    check_behaviours(release, "addresses", {"VLLM_GRAPHFIX_ADDRESSES": action, "RELEASE": release})


def made_by_vllm(module: str = "vllm.v1.backend", **attributes: Any) -> Any:
    made = type("Of", (), {"__module__": module})()
    vars(made).update(attributes)
    return made


def test_the_inventory_has_the_tensors_of_models_the_runner_and_their_vllm_objects() -> None:
    torch = pytest.importorskip("torch")

    def tensor() -> Any:
        return torch.zeros(2)

    model = torch.nn.Module()
    model.layer = torch.nn.Linear(2, 2, bias=False)
    model.layer.register_buffer("scale", tensor())
    model.layer.impl = made_by_vllm(W_UV=tensor(), kernel=made_by_vllm(scales=[tensor(), {"w2": tensor()}]), none=None)
    model.layer.kv_cache = [tensor()]
    model.layer.other = made_by_vllm("elsewhere", unseen=tensor())
    model.layer.config = made_by_vllm("vllm.config.vllm", unseen=tensor())
    model.layer.k_range = model.layer.empty = torch.zeros(0)
    runner = made_by_vllm(
        model=model,
        device=torch.device("cpu"),
        buffer=made_by_vllm(gpu=tensor(), cpu=torch.zeros(2, device="meta")),
        attn_groups=[[made_by_vllm(builder=made_by_vllm(lengths=tensor()))]],
        drafter=made_by_vllm(model=torch.nn.Linear(2, 2, bias=False)),
        requests={"r": tensor()},
    )
    runner.again = runner  # what goes in a circle ends
    worker = made_by_vllm(model_runner=runner)
    inventory = Inventory(worker, hold=False)
    assert {entry.name: entry.kind.value for entry in inventory.entries} == {
        "layer.weight": "parameter",
        "layer.scale": "buffer",
        "layer.impl.W_UV": "attribute",
        "layer.impl.kernel.scales[0]": "attribute",
        "layer.impl.kernel.scales[1][w2]": "attribute",
        "layer.kv_cache[0]": "cache",
        "runner.buffer.gpu": "input",
        "runner.attn_groups[0][0].builder.lengths": "metadata",
        "drafter.weight": "parameter",
    }
    assert inventory.moved() == []
    model.layer.impl = made_by_vllm(W_UV=tensor(), kernel=model.layer.impl.kernel)
    del model.layer.scale
    model.layer.weight.data = torch.zeros(2, 2).t()
    assert {each.entry.name for each in inventory.moved()} == {"layer.impl.W_UV", "layer.scale", "layer.weight"}
    assert {each.entry.name for each in inventory.moved(LASTING)} == {"layer.scale", "layer.weight"}
    assert set(inventory.bring_back(inventory.moved()).values()) == {
        "it is gone",
        "nobody holds the memory that the graphs have",
    }


# -- when it is watched --------------------------------------------------------------------------------------------


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of workers of a module that is watched, and imported already; of what serves, no inventory is taken."""
    made = type("Worker", (), {"reload_weights": lambda self: "stock's"})
    module = ModuleType("a_module_that_is_watched")
    vars(module)["Worker"] = made
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(addresses, "WATCHED", ((module.__name__, "Worker", "reload_weights"),))
    monkeypatch.setattr(RankAddresses, "on_captured", lambda self, worker: None)
    return made


def test_nothing_is_wrapped_until_watched_and_nothing_compares_until_a_rank_serves(worker: Any) -> None:
    stock, watch = worker.reload_weights, AddressWatch()
    watch.begin(Addresses.OFF)
    watch.on_captured(worker())
    assert (worker.reload_weights, watch.of_rank) == (stock, None)
    watch.begin(Addresses.REPORT)
    assert worker.reload_weights.__wrapped__ is stock
    wrapped = worker.reload_weights
    watch.begin(Addresses.REPAIR)
    assert worker.reload_weights is wrapped
    assert (worker().reload_weights(), watch.of_rank) == ("stock's", None)
    assert (watch.counts(), watch.moved()) == ({}, ())
    watch.on_captured(worker())
    first = watch.of_rank
    assert first is not None
    first.around = lambda name, together, stock, *_: (name, together)  # type: ignore[method-assign]
    assert worker().reload_weights() == ("reload_weights", False)
    watch.on_captured(worker())
    assert watch.of_rank is first


def test_the_comparison_takes_over_the_action_of_the_watch(worker: Any) -> None:
    published: list[None] = []
    watch = AddressWatch(lambda: published.append(None))
    watch.begin(Addresses.REPORT)
    watch.on_captured(worker())
    comparison = watch.of_rank
    assert comparison is not None
    assert comparison.action is Addresses.REPORT
    for action in (Addresses.REPAIR, Addresses.OFF):
        watch.begin(action)
        assert comparison.action is action
    comparison._publish()
    assert published == [None]
    comparison._depth, comparison._counts = 1, dict(COUNTS)
    assert watch.counts() == {"addresses": COUNTS}
    watch.forked()
    assert (comparison._depth, watch.counts()) == (0, {})


def test_if_it_cannot_be_loaded_vllm_goes_on_and_it_is_logged(
    worker: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch = AddressWatch()
    watch.begin(Addresses.REPORT)
    monkeypatch.setitem(sys.modules, "vllm_graphfix.engine.rank_addresses", None)
    with caplog.at_level("WARNING", logger="vllm.graphfix"):
        watch.on_captured(worker())
    assert [record.getMessage().partition(": ModuleNotFoundError")[0] for record in caplog.records] == [
        "graphfix: addresses are not compared on this rank"
    ]
    assert (watch.counts(), worker().reload_weights()) == ({"addresses": {"failures": 1}}, "stock's")
    watch.forked()
    assert watch.counts() == {}


# -- when it is compared -------------------------------------------------------------------------------------------


class CountingInventory:
    """The inventory of an engine in which nothing moves: how often it was compared, and of what."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.compared: list[frozenset[Kind]] = []

    def moved(self, kinds: frozenset[Kind], *, unhurried: bool = False) -> list[Any]:
        self.compared.append(frozenset(kinds))
        return []

    def forget(self, moved: Any) -> None:
        assert not list(moved)


@pytest.fixture
def watching() -> tuple[RankAddresses, CountingInventory]:
    watch, inventory = RankAddresses(), CountingInventory()
    watch.action, watch._inventory, watch._counts = Addresses.REPORT, inventory, dict(COUNTS)  # type: ignore[assignment]
    return watch, inventory


def test_after_a_capture_inside_of_a_watched_call_it_goes_on(watching: tuple[RankAddresses, CountingInventory]) -> None:
    """As an elastic engine captures anew."""
    watch, inventory = watching
    watch.around("elastic_ep_execute", True, watch._forget_capture)
    watch._inventory, watch._counts = inventory, dict(COUNTS)  # type: ignore[assignment]
    assert not watch._busy()
    inventory.compared.clear()
    watch.around("reload_weights", True, lambda: None)
    assert len(inventory.compared) == 2  # before, and after


@pytest.mark.parametrize("failing", ["update_weights", "finish_weight_update"])
def test_an_update_that_fails_is_over(failing: str, watching: tuple[RankAddresses, CountingInventory]) -> None:
    watch, inventory = watching
    watch.around("start_weight_update", True, lambda: None)
    assert watch._busy()
    with pytest.raises(OSError, match="no such checkpoint"):
        watch.around(failing, True, lambda: (_ for _ in ()).throw(OSError("no such checkpoint")).__next__())
    assert not watch._busy()
    watch.poll()
    assert inventory.compared


def test_loads_of_single_tensors_are_not_compared_each_but_at_the_next_heartbeat(
    watching: tuple[RankAddresses, CountingInventory],
) -> None:
    watch, inventory = watching
    watch.around("load_weights", False, lambda: None)
    watch._not_before = float("inf")
    inventory.compared.clear()
    for _ in range(1000):
        watch.around("load_weights", False, lambda: None)
    assert not inventory.compared
    watch.poll()
    assert inventory.compared == [LASTING | {Kind.ATTRIBUTE}]
    watch.around("process_weights_after_loading", False, lambda: None)  # the end of a load is
    watch.poll()
    assert inventory.compared[-1] == LASTING


def test_a_heartbeat_keeps_what_a_call_has_moved_and_forgets_what_is_back() -> None:
    import torch

    layer = torch.nn.Linear(2, 2, bias=False)
    watch, _worker = _serving(layer)
    parameter = layer.weight
    captured, elsewhere = parameter.data, parameter.data.clone()
    watch.around("reload_weights", True, lambda: setattr(parameter, "data", elsewhere))
    assert _counts_of(watch) == (1, 0, 1)
    for _ in range(3):
        watch.poll()
        assert _counts_of(watch) == (1, 0, 1)
    parameter.data = captured
    watch.poll()
    assert _counts_of(watch) == (1, 0, 0)
    parameter.data = elsewhere  # by nobody who is watched: at the second look it counts
    watch.poll()
    assert _counts_of(watch) == (1, 0, 0)
    watch.poll()
    assert _counts_of(watch) == (2, 0, 1)


def test_a_cache_that_moved_is_not_back_because_it_sleeps() -> None:
    import torch

    layer = torch.nn.Linear(2, 2, bias=False)
    watch, _worker = _serving(layer)
    watch.around("reload_weights", True, lambda: setattr(layer, "kv_cache", torch.zeros(2)))
    for name, args in (("sleep", ()), ("wake_up", ("self", ["weights"])), ("wake_up", ("self", ["kv_cache"]))):
        assert _counts_of(watch) == (1, 0, 1), name
        watch.around(name, True, lambda *_: None, *args)
    assert _counts_of(watch) == (1, 0, 1)


def test_what_calls_that_were_not_compared_have_moved_counts_at_the_next() -> None:
    import torch

    layer = torch.nn.Linear(2, 2, bias=False)
    watch, _worker = _serving(layer)
    watch.around("load_weights", False, lambda: None)
    watch._not_before = float("inf")
    watch.around("process_weights_after_loading of a layer", False, lambda: setattr(layer.impl, "W_UV", torch.ones(2)))
    assert _counts_of(watch) == (0, 0, 0)
    watch.around("reload_weights", True, lambda: None)
    assert _counts_of(watch) == (1, 0, 1)


def _serving(layer: Any) -> tuple[RankAddresses, Any]:
    """A watch of a model of this *layer*, which has keys and values and an absorbed copy; and its worker."""
    import torch

    layer.kv_cache, layer.impl = torch.ones(2), made_by_vllm(W_UV=torch.ones(2))
    model = torch.nn.ModuleDict({"layer": layer})
    watch = RankAddresses()
    watch.begin(Addresses.REPORT)
    worker = made_by_vllm(model_runner=made_by_vllm(model=model, device=torch.device("cpu")))
    watch.on_captured(worker)
    return watch, worker


def _counts_of(watch: RankAddresses) -> tuple[int, int, int]:
    """Return the counts of moves so far, of failures, and of tensors in a record."""
    counts = watch.counts()
    return counts["moved"], counts["failures"], len(watch.moved())


def test_of_somebody_elses_worker_only_what_loads_is_wrapped() -> None:
    class TheirWorker:
        def note_step(self) -> None: ...
        def prepare_batch(self) -> None: ...
        def update_weights_from_ipc(self) -> None: ...
        def load_lora_adapter(self) -> None: ...
        def set_named_param(self) -> None: ...

    RankAddresses()._hook_others(TheirWorker)
    wrapped = {name for name, value in vars(TheirWorker).items() if getattr(value, "_graphfix_addresses", False)}
    assert wrapped == {"update_weights_from_ipc", "load_lora_adapter", "set_named_param"}


# -- what is wrapped -----------------------------------------------------------------------------------------------

LATER = {
    "update_weights": between("0.16.0", "0.33.0"),
    "start_weight_update": between("0.21.0", "0.33.0"),
    "finish_weight_update": between("0.21.0", "0.33.0"),
    "start_draft_weight_update": between("0.26.0", "0.33.0"),
    "discard": between("0.31.0", "0.33.0"),
    "reinitialize_distributed": between("0.14.1", "0.16.0"),
    "elastic_ep_execute": between("0.17.0", "0.33.0"),
    "reload_weights of V2": between("0.22.0", "0.33.0"),
}
"""The names that not every release has."""
MOVES_NOTHING = {
    *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "supports_draft_weight_updates"),
    *("compute_weight_checksums", "reset_weights", "sleep_mode_backend", "list_loras", "pin_lora", "remove_lora"),
}


@pytest.mark.parametrize("release", slow_but_for(SAMPLE, ALL_RELEASES))
def test_what_loads_weights_or_wakes_an_engine_is_there_by_its_name_in_every_release(release: str) -> None:
    source = open_source(release_root(release))
    for module, owner, name in WATCHED:
        known = f"{name} of V2" if ".gpu.model_runner" in module else name
        qualname = f"{owner}.{name}" if owner else name
        there = source.function(f"{module.replace('.', '/')}.py", qualname) is not None
        assert there is (release in LATER.get(known, ALL_RELEASES)), (module, qualname)
    tree = ast.parse(source.read("vllm/v1/worker/gpu_worker.py") or b"")
    (worker,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Worker"]
    methods = {node.name for node in worker.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
    suspects = {name for name in methods if re.search("weight|lora|sleep|wake|discard|elastic|reinit", name)}
    assert suspects - MOVES_NOTHING <= {name for _, _, name in WATCHED}


# -- ranks ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Torch's own, as all ranks have it."""
    from torch import distributed

    made: Any = vars(distributed)["HashStore"]()
    monkeypatch.setattr("vllm_graphfix.engine.rank_addresses.common_store", lambda limit: made)
    return made


@pytest.mark.parametrize(
    ("says", "out"),
    [
        (((False, True), (False, True)), False),
        (((True, True), (False, True)), True),
        (((True, True), (False, False)), False),
    ],
    ids=["none has to", "one has to", "one has to and another has no way"],
)
def test_all_ranks_take_their_graphs_out_or_none_does(says: Any, out: bool, store: Any) -> None:
    watches = [RankAddresses(), RankAddresses()]
    for _ in range(3):  # one update after the other
        assert together(*(agreeing(watches[rank], rank, *answers) for rank, answers in enumerate(says))) == [out, out]
    assert store.num_keys() <= 6  # and what was said before is gone


def test_a_rank_that_does_not_come_ends_it_on_all_and_nobody_waits_longer_than_that(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_addresses, "PATIENCE", 0.2)
    first, late = RankAddresses(), RankAddresses()
    for call in (agreeing(first, 0, True, True), agreeing(late, 1, False, True)):
        (error,) = together(call)
        assert isinstance(error, TimeoutError)


def agreeing(watch: RankAddresses, rank: int, needed: bool, can: bool) -> Callable[[], bool]:
    return lambda: watch._ranks_agree(rank, 2, needed=needed, can=can)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run *calls*, each of a rank, side by side; return their results or exceptions."""
    outcomes: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            outcomes[number] = calls[number]()
        except Exception as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return outcomes


# -- settings, records ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "watches"),
    [
        ({}, Addresses.REPORT),
        ({ADDRESSES: "Repair"}, Addresses.REPAIR),
        ({ADDRESSES: "0"}, Addresses.OFF),
        ({ADDRESSES: "on"}, Addresses.OFF),
        ({"VLLM_GRAPHFIX": "off", ADDRESSES: "repair"}, Addresses.OFF),
        ({"VLLM_GRAPHFIX_ROLLOUT": "0", ADDRESSES: "repair"}, Addresses.OFF),
    ],
)
def test_an_engine_watches_by_default_and_not_outside_the_rollout(
    environment: dict[str, str], watches: Addresses
) -> None:
    made = decide(read(environment, ()), "0.21.0", host="one")
    assert made.watches is watches
    assert decode(made.encode()) == made


def test_a_record_brings_what_has_moved_and_older_ones_have_none() -> None:
    original = record(rank=0, events={"addresses": COUNTS}, moved=(MOVED,) * 5)
    written = original.as_json()
    assert Record.from_json(written) == original
    written["moved"]["0"]["name"] = "x" * 2000
    with pytest.raises(RecordError, match=r"moved\.0"):
        Record.from_json(written)
    del written["moved"]
    assert Record.from_json(written).moved == ()


@pytest.mark.usefixtures("alone")
def test_fleet_names_a_tensor_that_lies_elsewhere_and_not_one_that_was_brought_back(tmp_path: Path) -> None:
    write(tmp_path, record(rank=0, events={"addresses": COUNTS}, moved=(MOVED,)))
    (engine,) = look(tmp_path).engines
    assert [what for what in engine.wrong if f"{MOVED.name} (attribute; after update_weights; reported)" in what]
    write(tmp_path, record(rank=0, moved=(MOVED._replace(outcome="repaired"),), events={"addresses": COUNTS}))
    (engine,) = look(tmp_path).engines
    assert not engine.wrong
    write(tmp_path, record(rank=0, events={"addresses": COUNTS | {"failures": 1}}))
    (engine,) = look(tmp_path).engines
    assert [what for what in engine.notes if "addresses are not compared any more" in what]


def test_metrics_have_the_counts_and_those_at_0_too() -> None:
    (counts,) = snapshot_of([record(rank=0, events={"addresses": COUNTS})], 0.0).events.values()
    assert {event: count for (fix, event), count in counts.items() if fix == "addresses"} == COUNTS


def test_the_names_of_a_moved_tensor_fit_into_a_record() -> None:
    watch = RankAddresses()
    watch._moved = {"ü" * 300: rank_addresses._Moved(Kind.INPUT, "a" * 300, "b" * 300)}
    (moved,) = watch.moved()
    assert max(map(len, moved)) == SHORT
    assert moved.name.isascii()


# -- what is brought back ------------------------------------------------------------------------------------------


def swap(model: Any, memories: Any) -> None:
    model.a.data, model.b.data = model.b.data, model.a.data


def swap_parameters(model: Any, memories: Any) -> None:
    model.a, model.b = model.b, model.a


def rotate(model: Any, memories: Any) -> None:
    model.a.data, model.b.data, model.c.data = model.b.data, model.c.data, model.a.data


def replace_one_after_another(model: Any, memories: Any) -> None:
    model.a.data, model.b.data = model.b.data, model.b.data + 10


def move_to_a_part_of_another(model: Any, memories: Any) -> None:
    model.a.data, model.b.data = memories[1][2:6], model.b.data + 10


def move_to_another_that_cannot_be_copied(model: Any, memories: Any) -> None:
    model.a.data, model.b.data = model.b.data + 10, model.a.data[:2]


def shift_by_one(model: Any, memories: Any) -> None:
    model.a.data = memories[0][1:5]


OCCUPIED = "a tensor that has moved lies in the same memory"


@pytest.mark.parametrize(
    ("move", "reasons"),
    [
        (swap, {"a": OCCUPIED, "b": OCCUPIED}),
        (swap_parameters, {"a": OCCUPIED, "b": OCCUPIED}),
        (rotate, {"a": OCCUPIED, "b": OCCUPIED, "c": OCCUPIED}),
        (replace_one_after_another, {"b": OCCUPIED}),
        (move_to_a_part_of_another, {"b": OCCUPIED}),
        (move_to_another_that_cannot_be_copied, {"a": OCCUPIED, "b": "its shape, stride or type is another"}),
        (shift_by_one, {"a": OCCUPIED}),
    ],
)
def test_nothing_is_copied_to_memory_that_a_moved_tensor_lies_in(
    move: Callable[[Any, Any], None], reasons: dict[str, str]
) -> None:
    torch = pytest.importorskip("torch")
    model, memories = torch.nn.Module(), [torch.arange(8.0) + 100 * number for number in range(3)]
    for name, memory in zip("abc", memories, strict=True):
        setattr(model, name, torch.nn.Parameter(memory[:4], requires_grad=False))
    inventory = Inventory(made_by_vllm(model_runner=made_by_vllm(model=model, device=torch.device("cpu"))), hold=True)
    move(model, memories)
    values = {name: getattr(model, name).tolist() for name in "abc"}
    assert inventory.bring_back(inventory.moved()) == reasons
    assert {name: getattr(model, name).tolist() for name in "abc"} == values
    assert {each.entry.name for each in inventory.moved()} == reasons.keys()
