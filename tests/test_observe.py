"""`observe`: vLLM is as it was, and what a fix would have changed is counted; with the fix on the same is counted and put right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from nightly import make_nightly
from stock import ALL_RELEASES, release_root, run_in_release
from table import PAIRS, affected_by, slow_but_for, slow_but_for_the_sample
from warm_release import run_in_fork

from vllm_graphfix import manifest
from vllm_graphfix.capturing import has_consumed_plan
from vllm_graphfix.fix import Event, Fix, Patch, Verdict
from vllm_graphfix.fixes import BY_NAME, FIXES
from vllm_graphfix.fixes.draft_decode_mode import DECODE_PADDED_IN_PIECEWISE, PREFILL_WITH_OLD_INDICES
from vllm_graphfix.source import open_source

Told = dict[str, Any]


def shapes(fix: Fix) -> tuple[str, ...]:
    """Of stock's releases, and those that an edit of the trial names."""
    affected = (entry for entry in manifest.load()["fixes"][fix.name] if entry["verdict"] == "affected")
    named = (edit.shape for edit in fix.trial().edits if edit.verdict is Verdict.AFFECTED and edit.shape)
    return tuple(dict.fromkeys([*(entry["shape"] for entry in affected), *named]))


def observed(release: str | Path, names: tuple[str, ...], further: str = "{}") -> dict[tuple[str, str, str], Told]:
    """What every workload came to, by way (stock, observe, active), fix and workload."""
    code = Path(__file__).with_name("observed.py").read_text() + f"\nmain({list(names)!r}, {further})\n"
    run = run_in_fork if isinstance(release, str) else run_in_release
    lines = [json.loads(line) for line in run(release, code).stdout.splitlines() if line.startswith('{"way"')]
    return {(told["way"], told["fix"], told["workload"]): told for told in lines}


# One run a release, whose tests share a process of pytest-xdist: `--dist loadgroup`.
@cache
def in_release(release: str) -> dict[tuple[str, str, str], Told]:
    return observed(release, affected_by(release))


each_pair = pytest.mark.parametrize(
    ("name", "release"),
    [
        pytest.param(*pair, marks=[pytest.mark.xdist_group(pair[1]), *slow_but_for_the_sample(pair[1])])
        for pair in PAIRS
    ],
)


@each_pair
def test_observed_the_numbers_are_stocks_wrong_ones_and_the_defect_is_counted(name: str, release: str) -> None:
    found = in_release(release)
    stock, seen = found["stock", name, "scenario"], found["observe", name, "scenario"]
    assert (seen["state"], stock["state"]) == ("observing", "off")
    assert (seen["numbers"], seen["right"]) == (stock["numbers"], False)
    assert sum(seen["events"].values()) > 0
    assert sum(stock["events"].values()) == 0


@each_pair
def test_active_the_numbers_are_right_and_the_same_is_counted(name: str, release: str) -> None:
    found = in_release(release)
    active, seen = found["active", name, "scenario"], found["observe", name, "scenario"]
    assert (active["state"], active["right"]) == ("active", True)
    expected = active["expected"]
    assert {event: active["events"][event] for event in expected} == expected
    assert sum(active["events"].values()) > 0
    if not seen["stopped"]:  # stock does not get that far
        assert seen["events"] == active["events"]


@each_pair
def test_without_the_defects_condition_nothing_is_counted(name: str, release: str) -> None:
    found = in_release(release)
    for way in ("observe", "active"):
        assert set(found[way, name, "without"]["events"].values()) == {0}
        assert found[way, name, "without"]["numbers"] == found["stock", name, "without"]["numbers"]
        assert found[way, name, "without"]["right"]


@pytest.mark.parametrize(
    ("without_mode", "without_zero_fill"),
    [
        pytest.param(True, False, marks=pytest.mark.slow, id="mode"),
        pytest.param(False, True, marks=pytest.mark.slow, id="indices"),
        pytest.param(True, True, id="both"),
    ],
)
def test_nightlies_count_what_their_speculator_has(tmp_path: Path, without_mode: bool, without_zero_fill: bool) -> None:
    name = "draft-decode-mode"
    nightly = make_nightly(
        release_root("0.20.0"), tmp_path, without_mode=without_mode, without_zero_fill=without_zero_fill
    )
    found = observed(nightly, (name,), "{'full': drafts_in_full_graphs}")
    assert found["observe", name, "scenario"]["numbers"] == found["stock", name, "scenario"]["numbers"]
    assert found["active", name, "scenario"]["right"]
    assert found["active", name, "scenario"]["events"] == {
        DECODE_PADDED_IN_PIECEWISE.name: 4 if without_mode else 0,
        PREFILL_WITH_OLD_INDICES.name: 4 if without_zero_fill else 0,
    }
    assert (found["observe", name, "scenario"]["events"][DECODE_PADDED_IN_PIECEWISE.name] > 0) == without_mode
    assert found["observe", name, "full"]["numbers"] == found["stock", name, "full"]["numbers"]
    for way in ("observe", "active"):
        full = found[way, name, "full"]["events"]
        assert full[DECODE_PADDED_IN_PIECEWISE.name] == 0
        assert (full[PREFILL_WITH_OLD_INDICES.name] > 0) == without_zero_fill
        assert set(found[way, name, "without"]["events"].values()) == {0}


# What holds for every observer

OBSERVERS = [
    pytest.param(fix.name, patch, id=f"{fix.name}-{shape}-{patch.name}")
    for fix in FIXES
    for shape in shapes(fix)
    for patch in fix.observers(shape)
]
each_observer = pytest.mark.parametrize(("name", "patch"), OBSERVERS)


class Stop(Exception):  # noqa: N818 - no error: what a stock function raises here
    pass


def _told(given: dict[str, Any]) -> dict[str, Any]:
    for value in given.values():
        if isinstance(value, Stop):
            raise value
    return given


# Stand-ins for vLLM's functions, by the names of their parameters; each returns what it was given.


def _capture(self: Any, create_forward_fn: Any, progress_bar_desc: Any) -> Any:
    return _told(locals())


def _prepare_inputs_to_capture(num_reqs: Any, num_tokens: Any, input_buffers: Any) -> Any:
    return _told(locals())


def _capture_graph(self: Any, num_tokens: Any, capture_cg_mode: Any, model: Any) -> Any:
    return _told(locals())


def _capture_eagle_graph(self: Any, num_tokens: Any, generate_fn: Any, input_buffers: Any) -> Any:
    return _told(locals())


def _capture_prefill(self: Any, forward_fn: Any, full_cg_attn_states: Any, progress_bar_desc: Any) -> Any:
    return _told(locals())


def _generate_draft(
    self: Any,
    num_reqs: Any,
    num_tokens_padded: Any,
    attn_metadata: Any,
    slot_mappings: Any,
    num_tokens_across_dp: Any,
    cudagraph_runtime_mode: Any,
) -> Any:
    return _told(locals())


def _init_cudagraph_manager(self: Any, cudagraph_mode: Any) -> Any:
    return _told(locals())


def _prepare_eagle_inputs(input_buffers: Any, input_batch: Any, last_token_indices: Any, num_sampled: Any) -> Any:
    return _told(locals())


def _compute_common_metadata(self: Any, common_attn_metadata: Any, num_accepted_tokens: Any) -> Any:
    return _told(locals())


def _build_decode(
    self: Any,
    block_table_tensor: Any,
    seq_lens_device: Any,
    max_seq_len: Any,
    query_start_loc_cpu: Any,
    query_start_loc_device: Any,
    num_decode_tokens: Any,
    dcp_tot_seq_lens_device: Any,
) -> Any:
    return _told(locals())


def _determine_batch_execution_and_padding(
    self: Any,
    num_tokens: Any,
    num_reqs: Any,
    num_scheduled_tokens_np: Any,
    max_num_scheduled_tokens: Any,
    use_cascade_attn: Any,
) -> Any:
    return _told(locals())


def _update_requests(self: Any, scheduler_output: Any) -> Any:
    return _told(locals())


def _dispatch_cg_and_sync_dp(
    cudagraph_manager: Any, num_reqs: Any, num_tokens: Any, uniform_token_count: Any, dp_size: Any, dp_rank: Any
) -> Any:
    return _told(locals())


def _prepare_decode_tensors(
    self: Any,
    seq_lens: Any,
    block_table: Any,
    decode_lens: Any,
    decode_lens_cpu: Any,
    query_start_loc: Any,
    num_decodes: Any,
    num_decode_tokens: Any,
    use_native: Any,
    next_n: Any,
    max_decode_len: Any,
) -> Any:
    return _told(locals())


def _build(self: Any, common_prefix_len: Any, common_attn_metadata: Any, fast_build: Any) -> Any:
    return _told(locals())


def _ensure_workspace_size(self: Any, required_bytes: Any) -> Any:
    return _told(locals())


def _capture_model(self: Any) -> Any:
    return _told(locals())


def _profile_cudagraph_memory(self: Any) -> Any:
    return _told(locals())


def _execute_dummy_batch(self: Any) -> Any:
    return _told(locals())


def _sample_tokens(self: Any, grammar_output: Any) -> Any:
    return _told(locals())


def _decode_attention_fwd(
    q: Any, k_buffer: Any, v_buffer: Any, o: Any, lse: Any, req_to_token: Any, b_seq_len: Any
) -> Any:
    return _told(locals())


STOCK: dict[str, Callable[..., Any]] = {
    "decode_attention_fwd": _decode_attention_fwd,
    "CudaGraphManager.capture": _capture,
    "CudaGraphManager.capture_graph": _capture_graph,
    "EagleCudaGraphManager.capture_graph": _capture_eagle_graph,
    "prepare_inputs_to_capture": _prepare_inputs_to_capture,
    "PrefillEagleCudaGraphManager.capture": _capture_prefill,
    "EagleSpeculator.generate_draft": _generate_draft,
    "EagleSpeculator.init_cudagraph_manager": _init_cudagraph_manager,
    "prepare_eagle_inputs": _prepare_eagle_inputs,
    "BaseMambaAttentionMetadataBuilder._compute_common_metadata": _compute_common_metadata,
    "FlashMLAMetadataBuilder._build_decode": _build_decode,
    "GPUModelRunner._determine_batch_execution_and_padding": _determine_batch_execution_and_padding,
    "GPUModelRunner.update_requests": _update_requests,
    "dispatch_cg_and_sync_dp": _dispatch_cg_and_sync_dp,
    "DeepseekV32IndexerMetadataBuilder._prepare_decode_tensors": _prepare_decode_tensors,
    "MLACommonMetadataBuilder.build": _build,
    "WorkspaceManager._ensure_workspace_size": _ensure_workspace_size,
    "GPUModelRunner.capture_model": _capture_model,
    "GPUModelRunner.profile_cudagraph_memory": _profile_cudagraph_memory,
    "Worker.execute_dummy_batch": _execute_dummy_batch,
    "GPUModelRunner.sample_tokens": _sample_tokens,
}


def stock_of(patch: Patch) -> Callable[..., Any]:
    """A stand-in for the function that *patch* wraps: one of those above, or one with the parameters of stock's."""
    if patch.name in STOCK:
        return STOCK[patch.name]
    for release in reversed(ALL_RELEASES):
        source = open_source(release_root(release))
        path = patch.module.replace(".", "/") + ".py"
        origin = re.search(
            rf"^from (vllm[\w.]*) import [^#]*?\b{patch.name}\b", (source.read(path) or b"").decode(), re.MULTILINE
        )
        for each in filter(None, (path, origin and origin[1].replace(".", "/") + ".py")):
            function = source.function(each, patch.name)
            if function is not None:
                made: dict[str, Any] = {}
                exec(f"def stand_in({function.takes.replace('*, ', '')}): return told(locals())", {"told": _told}, made)  # noqa: S102 - parameters as stock has them
                stand_in: Callable[..., Any] = made["stand_in"]
                return stand_in
    raise LookupError(f"no release has {patch.name} in {patch.module}")


class Hostile:
    """Whatever it is asked for, it raises."""

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __bool__(self) -> bool:
        raise RuntimeError("bool")

    def __len__(self) -> int:
        raise RuntimeError("len")


def given_to(patch: Patch, kind: Callable[[], Any]) -> dict[str, Any]:
    code = stock_of(patch).__code__
    return {name: kind() for name in code.co_varnames[: code.co_argcount]}


@each_observer
@pytest.mark.parametrize("kind", [object, Hostile], ids=["object", "hostile"])
@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
def test_stock_gets_the_very_objects_and_its_answer_is_handed_on(
    name: str, patch: Patch, kind: Callable[[], Any], by_name: bool
) -> None:
    """Also where they are nothing that an observer knows."""
    observe, given = patch.wrap(stock_of(patch)), given_to(patch, kind)
    before = [event.count for event in BY_NAME[name].events]
    returned = observe(**given) if by_name else observe(*given.values())
    assert list(returned) == list(given)
    # what the factory makes is stock's: below
    assert all(returned[key] is value for key, value in given.items() if key != "create_forward_fn")
    assert [event.count for event in BY_NAME[name].events] == before


@each_observer
def test_an_error_of_stock_comes_out_as_it_is(name: str, patch: Patch) -> None:
    given = given_to(patch, object)
    error = given[list(given)[-1]] = Stop()
    with pytest.raises(Stop) as raised:
        patch.wrap(stock_of(patch))(*given.values())
    assert raised.value is error


@each_observer
def test_an_observer_is_a_plain_function_that_wraps_stock(name: str, patch: Patch) -> None:
    stock = stock_of(patch)
    observe = patch.wrap(stock)
    assert type(observe) is type(stock)
    assert observe.__wrapped__ is stock  # type: ignore[attr-defined]
    assert patch.module in BY_NAME[name].modules


@each_observer
def test_stocks_complaint_about_wrong_arguments_is_a_type_error_as_ever(name: str, patch: Patch) -> None:
    with pytest.raises(TypeError):
        patch.wrap(stock_of(patch))(*range(20))


def test_every_target_is_one_that_the_fix_touches_too() -> None:
    for fix in FIXES:
        for shape in shapes(fix):
            touched = {(patch.module, patch.name) for patch in fix.patches(shape)}
            assert {(patch.module, patch.name) for patch in fix.observers(shape)} <= touched


def test_events_have_names_that_a_label_takes_and_one_sentence_each() -> None:
    for fix in FIXES:
        assert fix.events
        for event in fix.events:
            assert event.name == event.name.lower().replace("_", "-").replace(" ", "-")
            assert event.meaning.endswith(".")
            assert ". " not in event.meaning
            assert set(Event.__slots__) == {"count", "meaning", "name"}
    names = [event.name for fix in FIXES for event in fix.events]
    assert len(set(names)) == len(names)


# capture-state: the one argument that is wrapped


def test_a_watched_factory_hands_on_the_very_forward_function_and_state() -> None:
    (patch,) = BY_NAME["capture-state"].observers("factory-with-state")
    made = {full: (lambda mode: None, object()) for full in (True, False)}
    descriptors = {
        full: SimpleNamespace(cg_mode=SimpleNamespace(name="FULL" if full else "PIECEWISE")) for full in made
    }

    def stock(self: Any, create_forward_fn: Any) -> Any:
        return {full: create_forward_fn(descriptor) for full, descriptor in descriptors.items()}

    by_name = {id(descriptor): full for full, descriptor in descriptors.items()}
    returned = patch.wrap(stock)(object(), lambda descriptor: made[by_name[id(descriptor)]])
    assert all(returned[full] is made[full] for full in made)


# Lazy plans


@dataclass
class Plan:
    """Stands in for FlashMLASchedMeta."""

    have_initialized: bool = False


@dataclass
class Node:
    below: Any = None
    tensors: list[Any] = field(default_factory=list)


def nested(levels: int, value: Any) -> Any:
    for _ in range(levels):
        value = Node(value)
    return value


@pytest.mark.parametrize("consumed", [False, True])
@pytest.mark.parametrize("levels", range(6))
def test_a_plan_is_found_as_deep_as_vllms_metadata_go(levels: int, consumed: bool) -> None:
    metadata = {"layer.0": Node(), "layer.1": nested(levels, Plan(consumed))}
    assert has_consumed_plan((metadata, {})) is consumed
    assert has_consumed_plan([metadata]) is consumed
    assert has_consumed_plan(lambda mode: metadata) is consumed


def test_one_of_several_plans_is_enough() -> None:
    assert has_consumed_plan({"a": Node(Plan()), "b": Node(Plan(have_initialized=True))})


def test_what_a_model_or_a_manager_in_a_closure_has_is_no_plan() -> None:
    model = Node(Plan(have_initialized=True))
    assert not has_consumed_plan(lambda mode: model)


def test_a_key_of_that_name_is_no_plan() -> None:
    assert not has_consumed_plan({"have_initialized": True})


@pytest.mark.parametrize(
    "state",
    [None, 7, "text", (), {}, object(), Hostile(), {"layer": Hostile()}, [Hostile()]],
    ids=["nothing", "number", "text", "tuple", "dict", "object", "hostile", "hostile layer", "hostile item"],
)
def test_what_has_no_plan_has_none_consumed(state: object) -> None:
    assert not has_consumed_plan(state)


def test_a_state_that_holds_itself_or_very_much_is_looked_at_for_a_moment() -> None:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    assert not has_consumed_plan(loop)
    wide = [Node([Node() for _ in range(100)]) for _ in range(100)]
    assert not has_consumed_plan(wide)
    assert not has_consumed_plan(nested(50, Plan(have_initialized=True)))


def test_a_property_is_not_asked() -> None:
    class Metadata:
        @property
        def lengths(self) -> Any:
            raise AssertionError("would copy from the device")

    assert not has_consumed_plan({"layer": Metadata()})


REAL_PLANS = """
from dataclasses import fields
from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins
install_flashmla_stand_ins()
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseMetadata as Sparse
from vllm.v1.attention.ops.flashmla import FlashMLASchedMeta
from vllm_graphfix.capturing import has_consumed_plan
from vllm_graphfix.fixes.capture_state import STATE_CONSUMED

def sparse(plan):
    kernel = Sparse.FP8KernelMetadata(plan, None, None)
    decode = Sparse.FP8SeparatePrefillDecode.Decode(*[None, kernel, 1][: len(fields(Sparse.FP8SeparatePrefillDecode.Decode))])
    split = Sparse.FP8SeparatePrefillDecode(decode=decode)
    metadata = object.__new__(Sparse)
    metadata.fp8_extra_metadata = split
    return {"layer": metadata}

plan = FlashMLASchedMeta()
print(has_consumed_plan((sparse(plan), {})), end=" ")
plan.have_initialized = True
print(has_consumed_plan((sparse(plan), {})))
"""


@pytest.mark.parametrize("release", slow_but_for(("0.16.0", "0.22.1"), ("0.16.0", "0.18.1", "0.21.0", "0.22.1")))
def test_the_plan_of_sparse_flashmla_is_found(release: str) -> None:
    assert run_in_fork(release, REAL_PLANS).stdout.split()[-2:] == ["False", "True"]


# What only the host knows


def draft(patch: Patch, requests: int, tokens: int, mode: str, metadata: object = "some") -> None:
    arguments = (SimpleNamespace(cudagraph_manager=object()), requests, tokens, metadata, None, None)
    patch.wrap(_generate_draft)(*arguments, cudagraph_runtime_mode=SimpleNamespace(name=mode))


@pytest.mark.parametrize(
    ("requests", "tokens", "mode", "metadata", "counted"),
    [
        (3, 4, "PIECEWISE", "some", 1),
        (4, 4, "PIECEWISE", "some", 0),
        (3, 4, "NONE", "some", 0),  # of a data-parallel engine
        (3, 4, "FULL", "some", 0),
        (3, 4, "PIECEWISE", None, 0),
    ],
    ids=["padded", "whole", "no graph", "full", "a dummy run without attention"],
)
def test_draft_decodes_are_counted_where_attention_reads_past_the_batch(
    requests: int, tokens: int, mode: str, metadata: object, counted: int
) -> None:
    (patch,) = BY_NAME["draft-decode-mode"].observers("one-manager")
    before = DECODE_PADDED_IN_PIECEWISE.count
    draft(patch, requests, tokens, mode, metadata)
    assert DECODE_PADDED_IN_PIECEWISE.count - before == counted


class DeviceTensorStandIn:
    """A tensor whose values are on a device: only its address may be asked for."""

    def __init__(self, address: int = 0) -> None:
        self.data_ptr = lambda: address

    def numpy(self) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a tensor on the device")


def test_nothing_is_read_from_the_device_to_see_padded_rows() -> None:
    (patch,) = BY_NAME["flashmla-padding"].observers("minus-one")
    (event,) = BY_NAME["flashmla-padding"].events
    given = given_to(patch, DeviceTensorStandIn)
    starts = {"on the CPU": SimpleNamespace(numpy=lambda: np.array([0, 1, 1])), "on the device": DeviceTensorStandIn()}
    for where, counted in (("on the CPU", 1), ("on the device", 0)):
        before = event.count
        builder = SimpleNamespace(is_fp8_kvcache=True)
        patch.wrap(_build_decode)(**given | {"self": builder, "query_start_loc_cpu": starts[where]})
        assert (where, event.count - before) == (where, counted)


def test_nothing_is_read_from_the_device_to_see_tokens_of_padded_rows() -> None:
    (patch,) = BY_NAME["indexer-padding"].observers("view-of-a-row")
    (event,) = BY_NAME["indexer-padding"].events
    given = given_to(patch, DeviceTensorStandIn) | {"use_native": True, "max_decode_len": 2}
    for last, counted in ((0, 1), (2, 0)):
        before = event.count
        tokens = SimpleNamespace(numpy=lambda last=last: np.array([2, 2, last]))
        patch.wrap(_prepare_decode_tensors)(**given | {"decode_lens_cpu": tokens})
        assert (last, event.count - before) == (last, counted)


@pytest.mark.parametrize(
    ("starts", "counted"),
    [([0, 1, 1], 1), ([0, 1, 2], 0), ([0, 0], 1), ([0], 0), ([], 0), ([0, 2, 2, 2], 1)],
    ids=["padded", "unpadded", "one padded row", "no rows", "nothing", "two tokens and padding"],
)
@pytest.mark.parametrize("tritons", [True, False])
def test_padded_rows_of_tritons_builder_alone_are_counted(tritons: bool, starts: list[int], counted: int) -> None:
    (patch,) = BY_NAME["triton-mla-padding"].observers("divides-by-nothing")
    (event,) = BY_NAME["triton-mla-padding"].events
    module = "vllm.v1.attention.backends.mla.triton_mla" if tritons else "vllm.v1.attention.backends.mla.flashmla"
    above = type("TritonMLAMetadataBuilder", (), {"__module__": module})
    of_a_model = type("OfAModel", (above,), {})
    metadata = SimpleNamespace(query_start_loc_cpu=SimpleNamespace(numpy=lambda: np.array(starts)))
    before = event.count
    patch.wrap(_build)(of_a_model(), 0, metadata, False)
    assert event.count - before == (counted if tritons else 0)


@pytest.mark.parametrize(
    ("plan", "splits", "counted"),
    [(8, 16, 0), (9, 16, 1), (7, 16, 1), (8, 17, 1), (8, 15, 1)],
    ids=["inside", "tiles above", "tiles below", "splits above", "splits below"],
)
def test_plans_are_told_by_their_addresses(plan: int, splits: int, counted: int) -> None:
    (patch,) = BY_NAME["flashmla-fp8"].observers("new-plan")
    (event,) = BY_NAME["flashmla-fp8"].events
    builder = SimpleNamespace(
        is_fp8_kvcache=True,
        cg_buf_tile_scheduler_metadata=DeviceTensorStandIn(8),
        cg_buf_num_splits=DeviceTensorStandIn(16),
    )
    scheduler = SimpleNamespace(
        tile_scheduler_metadata=DeviceTensorStandIn(plan), num_splits=DeviceTensorStandIn(splits)
    )
    metadata = SimpleNamespace(scheduler_metadata=scheduler)
    before, attributes = event.count, dict(vars(scheduler))
    assert patch.wrap(lambda self: metadata)(builder) is metadata
    assert event.count - before == counted
    assert vars(scheduler) == attributes


def test_marks_on_the_device_are_not_read() -> None:
    (patch,) = BY_NAME["mamba-padding"].observers("prefilling-over-padding")
    given = given_to(patch, object) | {"common_attn_metadata": SimpleNamespace(is_prefilling=DeviceTensorStandIn())}
    assert patch.wrap(_compute_common_metadata)(**given) == given


class StateStandIn(NamedTuple):
    """Of vLLM's ExecuteModelState, what is looked at."""

    scheduler_output: Any
    hidden_states: Any


class RowsStandIn:
    """Hidden states on a device: only how many rows there are may be asked for."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a tensor on the device")


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({}, 1),
        ({"asked": {}}, 0),
        ({"asked": {"preempted": 1}}, 0),
        ({"asked": {"preempted": 1, "scored": 1}}, 1),
        ({"rows": 17}, 0),
        ({"largest": 0}, 0),
        ({"padded": True}, 0),
        ({"method": "suffix"}, 0),
        ({"method": "use_ngram_gpu"}, 0),
        ({"method": "uses_draft_model"}, 1),
        ({"method": "uses_extract_hidden_states"}, 1),
        ({"method": None}, 0),
    ],
    ids=[
        "scored",
        "nobody asks",
        "who asks is not scheduled",
        "one of two is",
        "more tokens than a graph takes",
        "no graphs",
        "drafts afterwards",
        "no model",
        "n-grams",
        "a draft model",
        "hidden states",
        "no drafter",
    ],
)
def test_steps_are_counted_in_which_a_prompt_is_scored_after_a_draft(changes: dict[str, Any], counted: int) -> None:
    (patch,) = BY_NAME["prompt-logprobs"].observers("draft-first")
    (event,) = BY_NAME["prompt-logprobs"].events
    given: dict[str, Any] = {
        "asked": {"scored": 1},
        "rows": 16,
        "largest": 16,
        "padded": False,
        "method": "use_eagle",
    } | changes
    methods = {"use_eagle": lambda: False, str(given["method"]): lambda: True}
    speculation = SimpleNamespace(disable_padded_drafter_batch=given["padded"], **methods)
    state = StateStandIn(SimpleNamespace(num_scheduled_tokens={"scored": 9, "other": 7}), RowsStandIn(given["rows"]))
    runner = SimpleNamespace(
        num_prompt_logprobs=given["asked"],
        execute_model_state=state,
        speculative_config=speculation if given["method"] else None,
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=given["largest"]),
    )
    before = event.count
    assert patch.wrap(_sample_tokens)(runner, None) == {"self": runner, "grammar_output": None}
    assert event.count - before == counted
    assert runner.execute_model_state is state


def test_a_step_without_a_state_is_not_looked_at() -> None:
    """Of a rank that is not the last of a pipeline."""
    fix = BY_NAME["prompt-logprobs"]
    runner = SimpleNamespace(num_prompt_logprobs={"scored": 1}, execute_model_state=None, speculative_config=None)
    before = fix.events[0].count, fix.fallback.reason
    fix.observers("draft-first")[0].wrap(_sample_tokens)(runner, None)
    assert (fix.events[0].count, fix.fallback.reason) == before
