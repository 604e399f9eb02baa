"""Model runner V2: full graphs of a drafter, Eagle, MTP, DFlash or DSpark, which its speculator replays (from 0.19.0).

Such a graph takes no arguments and returns nothing: it reads and writes tensors of the speculator, and the draft
layers' cache. It ends in draft tokens, sampled with random numbers that follow from seed and position, so that a second
run draws the same. A check copies those tensors, calls the speculator's own function for a step without a graph, and
compares the rows of requests after both.

That function runs with as many rows as the graph, padding included, as when the graph was captured: with fewer rows
another kernel may compute the matrix of logits, and a last bit may decide on another likeliest token. A padded row
stands for a request that is not in the batch, so that what it writes for that request does not matter.

Drafters with graphs of another kind are not checked: other derivatives of DFlash, MTP of several modules, 0.18's.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix.fix import Activity, Patch, StockFunction
from vllm_graphfix.log import logger
from vllm_graphfix.shadow import process
from vllm_graphfix.shadow.acceptance import Acceptance, Drafts
from vllm_graphfix.shadow.check import Shadow
from vllm_graphfix.shadow.drafter_shapes import BUILT_OF, PARALLEL, SHAPES, DrafterGraphs, Speculator
from vllm_graphfix.shadow.failures import StepNotCheckable, UnsafeError
from vllm_graphfix.shadow.forward import Pass, unsafe
from vllm_graphfix.shadow.lockstep import is_in_lockstep
from vllm_graphfix.shadow.runner_v2 import stock_caller
from vllm_graphfix.shadow.runs import Step
from vllm_graphfix.shadow.snapshot import StateRows

if TYPE_CHECKING:
    from types import FrameType

    from torch import Tensor

_SLOTS_MODULE = "vllm.v1.worker.gpu.attn_utils"


def patches(shape: str) -> tuple[Patch, ...]:
    return (_patch(SHAPES[shape]),)


def patches_parallel(shape: str) -> tuple[Patch, ...]:
    return (_patch(PARALLEL, frozenset(shape.split())),)


def _patch(speculator: Speculator, classes: frozenset[str] | None = None) -> Patch:
    watch = functools.partial(_watch_managers, speculator, classes)
    return Patch(speculator.module, f"{speculator.name}.{speculator.hook}", watch)


def _watch_managers(
    speculator: Speculator, classes: frozenset[str] | None, stock: StockFunction, activity: Activity
) -> StockFunction:
    """Wrap the method that makes a speculator's managers, so that each of them counts its replays and checks one.

    *classes*: names of the classes of which a speculator may be; None: any.
    """

    @functools.wraps(stock)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        try:
            if (shadow := process.SHADOW) is not None:
                _watch_speculator(self, speculator.graphs, shadow, classes)
        except Exception as error:
            activity.failed(error)

    return initialise


def _watch_speculator(
    speculator: Any, graphs: tuple[DrafterGraphs, ...], shadow: Shadow, classes: frozenset[str] | None
) -> None:
    if reason := unsafe(speculator.vllm_config):
        process.refuse(reason)
        return
    if is_in_lockstep(speculator.vllm_config):
        logger.info("graphfix: the shadow check leaves the graphs of drafts alone: data-parallel ranks share experts")
        return
    reasons = [meaning for attribute, meaning in _STATEFUL.items() if getattr(speculator, attribute, None) is not None]
    if classes is not None and type(speculator).__name__ not in classes:
        reasons.append(f"those of {type(speculator).__name__} were not examined")
    if hasattr(getattr(speculator, "model", None), "sample_sequential"):
        reasons.append("the drafter samples by kernels of its model, which were not examined")
    if reasons:
        logger.info("graphfix: the shadow check leaves the graphs of drafts alone: %s", reasons[0])
        return
    for name in dict.fromkeys(each.manager for each in graphs):
        if (manager := getattr(speculator, name)) is not None:
            of_this = {each.caller: each for each in graphs if each.manager == name}
            manager.run_fullgraph = _counting_replay(
                manager.run_fullgraph, _Drafter(speculator, manager, of_this), shadow
            )


_STATEFUL = {
    "draft_watermarker": "sampling with a watermark keeps a history, which a second run would lengthen",
    "acceptance_estimator": "each draft is graded to estimate what is accepted, and a second run would grade it twice",
}


class _Drafter(NamedTuple):
    speculator: Any
    manager: Any
    graphs: Mapping[str, DrafterGraphs]
    """The graphs of this manager, by the method that replays them."""


def _counting_replay(stock: Callable[[Any], Any], drafter: _Drafter, shadow: Shadow) -> Callable[[Any], Any]:
    """Replace a manager's method `run_fullgraph`, on the instance: the class shares it with the target model's."""
    schedule, quarantined, mark = shadow.schedule, shadow.quarantined, id(drafter.manager)

    @functools.wraps(stock)
    def run_fullgraph(desc: Any) -> Any:
        # Every rank of a group counts the same replays. Only the target model's replays read the clock, for the time of
        # a step; if it has none, a budget uses the assumed cost of a check, as at the beginning.
        due = False
        try:
            schedule.count += 1
            if schedule.count >= schedule.due or (quarantined and (mark, desc) in quarantined):
                due = True
        except Exception as error:  # raised here it would leave the other ranks in a collective of the model
            shadow.stop_on_this_rank(error)
        if due:
            return _maybe_check(shadow, stock, drafter, desc)
        return stock(desc)

    return run_fullgraph


class _Call(NamedTuple):
    """A replay, and the variables of the method that makes it."""

    speculator: Any
    desc: Any
    graphs: DrafterGraphs
    variables: Mapping[str, Any]
    batch: Any

    @property
    def requests(self) -> int:
        return int(self.variables["num_reqs"])

    @property
    def rows(self) -> int:
        """The number of rows, padding included."""
        return int(self.desc.num_reqs or self.requests)


def _maybe_check(shadow: Shadow, stock: Callable[[Any], Any], drafter: _Drafter, desc: Any) -> Any:
    def replay() -> Any:
        return stock(desc)

    key = (id(drafter.manager), desc)
    call = None
    try:
        call = shadow.read("drafter", lambda: _call_in_frames(drafter, desc, stock_caller(_maybe_check)))
    except Exception as error:
        shadow.stop_on_this_rank(error)
    if call is None:
        return replay()
    # In quarantine without padding, as a speculator drafts without graphs.
    rows = call.requests if key in shadow.quarantined else call.rows
    return shadow.run(key, lambda: _counted(shadow.acceptance, call, _step(call, rows)), replay)


_MAX_FRAMES = 8
"""Frames between a replay and `propose`, decorators included."""


def _call_in_frames(drafter: _Drafter, desc: Any, frame: FrameType | None) -> _Call | None:
    """Find the call in the frames below *frame*; None for another caller, or for a dummy batch.

    Raises UnsafeError where variables have other names.
    """
    replaying: tuple[DrafterGraphs, Mapping[str, Any]] | None = None
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        name = frame.f_code.co_name
        if (replaying is None and name in drafter.graphs) or (replaying is not None and name == "propose"):
            variables = frame.f_locals
            if variables.get("self") is drafter.speculator:
                if replaying is None:
                    replaying = drafter.graphs[name], variables
                if name == "propose":
                    return _call_of(drafter, desc, *replaying, variables)
        frame = frame.f_back
    return None


def _call_of(
    drafter: _Drafter, desc: Any, graphs: DrafterGraphs, variables: Mapping[str, Any], propose: Mapping[str, Any]
) -> _Call | None:
    has_metadata = graphs.builds and graphs.columns != "all"
    needed = {"num_reqs", "num_tokens_across_dp"} | ({graphs.metadata, graphs.slots} if has_metadata else set())
    if missing := [*(needed - variables.keys()), *({"dummy_run", "input_batch"} - propose.keys())]:
        raise UnsafeError(f"{graphs.caller} has no {', '.join(missing)}")
    if propose["dummy_run"] or (has_metadata and variables[graphs.metadata] is None):
        return None
    # A copy, as in `runner_v2`.
    return _Call(drafter.speculator, desc, graphs, dict(variables), propose["input_batch"])


def _counted(acceptance: Acceptance, call: _Call, step: Step) -> Step:
    """Return *step* with a count of its drafts that the target accepts."""

    def compared(replayed: list[Tensor], eager: list[Tensor]) -> None:
        acceptance.add(lambda: (call.speculator, _drafts(call, step.graph.name, replayed, eager)))

    return step._replace(compared=compared)


def _drafts(call: _Call, graph: str, replayed: list[Tensor], eager: list[Tensor]) -> Drafts:
    speculator, columns = call.speculator, call.graphs.columns
    step = 0 if columns in ("first", "all") else int(call.variables["step"]) if columns == "step" else 1
    end = speculator.draft_tokens.shape[1] if columns in ("rest", "all") else step + 1
    place = 0 if columns == "all" else 1  # in the results, as `_step` and `_parallel_step` have them

    def by_request(results: list[Tensor]) -> dict[str, list[int]]:
        return dict(zip(call.batch.req_ids, results[place][:, :end].tolist(), strict=True))

    return Drafts(graph, step, by_request(replayed), by_request(eager))


def _step(call: _Call, run_rows: int) -> Step:
    if call.graphs.columns == "all":
        return _parallel_step(call)
    speculator, desc, graphs, batch = call.speculator, call.desc, call.graphs, call.batch
    if graphs.columns == "first" and (batch.num_tokens_after_padding, batch.num_reqs_after_padding) != (
        desc.num_tokens,
        call.rows,
    ):
        raise StepNotCheckable("the target model's attention metadata have another size than the draft's graph")
    metadata, slots = _metadata_of_caller(call) if graphs.builds else ({}, {})
    own = speculator.draft_attn_layer_names
    forward = Pass(
        speculator.vllm_config,
        {layer: metadata[layer] for layer in metadata if layer in own},  # a prefill has the target model's too
        {layer: slots[layer] for layer in slots if layer in own},
        {"input_buffers": speculator.input_buffers, "slot_mappings": speculator.block_tables.slot_mappings},
        only=own,
    )
    requests = speculator.idx_mapping[: call.requests].long()
    stands_for = _request_outside_batch(call, requests) if run_rows > call.requests else None
    logits = _logits(call)
    eager = _without_graph(call, run_rows, stands_for)
    step = forward.step(graphs.name, desc, eager, lambda: call.requests)
    states = list(step.states)
    if logits is not None:
        rows = speculator.idx_mapping[: call.rows].long()
        rows = rows[(rows >= 0) & (rows < len(logits))]
        if stands_for is not None:
            rows = speculator.idx_mapping.new_tensor([*rows.tolist(), stands_for]).long()
        states.append(StateRows("draft logits", logits, rows, compared=False))

    def results() -> list[Tensor]:
        last = call.requests
        drafted = [speculator.hidden_states[:last], speculator.draft_tokens[:last]]
        return drafted if logits is None else [*drafted, logits.index_select(0, requests)]

    return step._replace(
        graph=step.graph._replace(rows=call.rows, backends=step.graph.backends or _backends(speculator)),
        inputs={
            **step.inputs,
            **_buffers(speculator, desc.num_tokens),
            **({} if graphs.builds else _builders(speculator)),
        },
        states=states,
        results=results,
    )


def _parallel_step(call: _Call) -> Step:
    """Describe a replay that drafts all tokens of each request at once.

    With all rows of the graph, in quarantine, too: a padded row samples for no request.
    """
    speculator, desc = call.speculator, call.desc
    metadata, own = call.variables.get(call.graphs.metadata), speculator.draft_attn_layer_names
    slots = _by_layer(call, speculator.block_tables.slot_mappings[:, : desc.num_tokens])
    context = speculator._num_graph_context_tokens(call.rows) if _stores_context(speculator) else 0
    forward = Pass(
        speculator.vllm_config,
        {layer: (metadata or {})[layer] for layer in metadata or {} if layer in own},
        {layer: slots[layer] for layer in slots if layer in own},
        {"input_buffers": speculator.input_buffers, "slot_mappings": speculator.block_tables.slot_mappings},
        only=own,
    )
    eager = _all_without_graph(call, metadata, slots, context)
    step = forward.step(call.graphs.name, desc, eager, lambda: call.requests)
    states, logits, requests = (
        list(step.states),
        speculator.draft_logits,
        call.batch.idx_mapping[: call.requests].long(),
    )
    if logits is not None:
        # Up to 0.27.1 a padded row samples for the first request's place, too.
        rows = speculator.sample_idx_mapping[: call.rows * speculator.num_speculative_steps].unique().long()
        rows = rows[(rows >= 0) & (rows < len(logits))]
        states.append(StateRows("draft logits", logits, rows, compared=False))
    drafted = [getattr(speculator, name, None) for name in ("draft_tokens", "draft_token_confidence_probs")]

    def results() -> list[Tensor]:
        first = [tensor[: call.requests] for tensor in drafted if tensor is not None]
        return first if logits is None else [*first, logits.index_select(0, requests)]

    return step._replace(
        graph=step.graph._replace(rows=call.rows, backends=step.graph.backends or _backends(speculator)),
        inputs={**step.inputs, **_buffers(speculator, max(desc.num_tokens, context)), **_builders(speculator)},
        states=states,
        results=results,
    )


def _stores_context(speculator: Any) -> bool:
    """Tell whether graphs of drafts store the target's states first, as from 0.31.0 on."""
    return hasattr(speculator, "_num_graph_context_tokens")


def _all_without_graph(call: _Call, metadata: Any, slots: Any, context: int) -> Callable[[], None]:
    """Return a function that does what the graph has: first, from 0.31.0 on, it stores so many rows of *context*.

    *metadata* are the step's; None where the graph brings its own up to date: then they are built, after the replay.
    """
    speculator, desc, variables = call.speculator, call.desc, call.variables

    def run() -> None:
        built = metadata
        if built is None:
            of_batch = call.requests, desc, speculator.num_query_per_req, call.batch.seq_lens_cpu_upper_bound
            named = dict(zip(BUILT_OF, (*of_batch, speculator.num_query_per_req), strict=True))
            built = speculator._build_uniform_attn_metadata(**named, causal=speculator._group_causal)
        if hasattr(speculator, "_prepare_graph_forward"):
            speculator._prepare_graph_forward(call.rows, None)
        elif context:
            speculator._precompute_context_kv(0, context)
        none = type(desc.cg_mode)["NONE"]
        speculator._generate_draft(call.rows, desc.num_tokens, built, slots, variables["num_tokens_across_dp"], none)

    return run


def _backends(speculator: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(group.backend.get_name()) for groups in speculator.attn_groups for group in groups))


def _buffers(speculator: Any, tokens: int) -> dict[str, Tensor]:
    """Return the speculator's tensors, without draft logits.

    Those with a row for each token of the largest batch are cut to the rows of this batch.
    """
    import torch

    return {
        name: value[:tokens] if value.dim() > 1 and len(value) == speculator.max_num_tokens else value
        for name, value in vars(speculator).items()
        if isinstance(value, torch.Tensor) and name != "draft_logits"
    }


def _builders(speculator: Any) -> dict[str, Tensor]:
    """Return the metadata builders' buffers, which a second run fills when it makes metadata that the replay lacked."""
    import torch

    return {
        f"{type(builder).__name__}.{name} ({number})": value
        for number, group in enumerate(group for groups in speculator.attn_groups for group in groups)
        for builder in group.metadata_builders
        for name, value in vars(builder).items()
        if isinstance(value, torch.Tensor)
    }


def _logits(call: _Call) -> Tensor | None:
    """Return the columns of draft logits that the replay writes: (requests, …, vocabulary)."""
    logits: Tensor | None = call.speculator.draft_logits
    if logits is None:
        return None
    if call.graphs.columns == "rest":
        return logits[:, 1:]
    return logits[:, 0 if call.graphs.columns == "first" else int(call.variables["step"])]


def _request_outside_batch(call: _Call, requests: Tensor) -> int:
    """Return the place in the speculator's buffers of a request that is not in the batch.

    There is one if a row is padded.
    """
    taken = set(requests.tolist())
    return next(place for place in range(call.speculator.max_num_reqs) if place not in taken)


def _metadata_of_caller(call: _Call) -> tuple[Any, Any]:
    """Return attention metadata and slots by layer, variables of the method that replays."""
    metadata, slots = call.variables[call.graphs.metadata], call.variables[call.graphs.slots]
    return metadata, _by_layer(call, call.variables["slot_mappings"]) if slots is None else slots


def _metadata_built_here(call: _Call) -> tuple[Any, Any]:
    """Make attention metadata and slots by layer, as for a step whose graph does not make its own.

    After the replay, since this fills buffers that the replay reads.
    """
    speculator, buffers, requests = call.speculator, call.speculator.input_buffers, call.requests
    slots = speculator.block_tables.compute_slot_mappings(
        speculator.idx_mapping[:requests],
        buffers.query_start_loc[: requests + 1],
        buffers.positions[:requests],
        call.desc.num_tokens,
    )
    of_batch = requests, call.desc, 1, call.variables["seq_lens_cpu_upper_bound"], 1
    metadata = speculator._build_uniform_attn_metadata(**dict(zip(BUILT_OF, of_batch, strict=True)))
    return metadata, _by_layer(call, slots)


def _by_layer(call: _Call, slots: Tensor) -> Any:
    return sys.modules[_SLOTS_MODULE].build_slot_mappings_by_layer(slots, call.speculator.kv_cache_config)


def _without_graph(call: _Call, rows: int, stands_for: int | None = None) -> Callable[[], None]:
    """Return a call of the speculator's own function on so many *rows*.

    Padded rows that stand for a request stand for *stands_for* in it.
    """
    speculator, desc, variables = call.speculator, call.desc, call.variables
    eager = getattr(speculator, call.graphs.eager)
    parameters = inspect.signature(eager).parameters
    more: dict[str, Any] = {}
    if "mm_inputs" in parameters:
        more["mm_inputs"] = variables["mm_inputs"]
    if "num_speculative_steps" in parameters:  # as it was captured
        more["num_speculative_steps"] = getattr(
            desc, "num_speculative_tokens", speculator.vllm_config.num_speculative_tokens
        )

    def run() -> None:
        metadata, slots = _metadata_of_caller(call) if call.graphs.builds else _metadata_built_here(call)
        if stands_for is not None:
            padded = speculator.idx_mapping[call.requests : rows]
            padded.masked_fill_(padded >= 0, stands_for)
        none = type(desc.cg_mode)["NONE"]
        eager(rows, desc.num_tokens, metadata, slots, variables["num_tokens_across_dp"], none, **more)

    return run
