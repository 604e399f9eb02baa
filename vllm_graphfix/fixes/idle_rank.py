"""`idle-rank`: the step of an idle rank writes to no cache block of a request (PR 39444, and one per buffer)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction, Verdict
from vllm_graphfix.fixes._premises import NULL_BLOCK, TAKEN_FIRST

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_WORKER = "vllm/v1/worker/gpu_worker.py"
_WORKER_MODULE = "vllm.v1.worker.gpu_worker"
_TARGET = "Worker.execute_dummy_batch"
_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_TABLE = "vllm/v1/worker/block_table.py"
_BATCH = "vllm/v1/worker/gpu_input_batch.py"
_PROPOSER = "vllm/v1/spec_decode/llm_base_proposer.py"
_EAGLE = "vllm/v1/spec_decode/eagle.py"
_PROPOSERS = (
    (_PROPOSER, "SpecDecodeBaseProposer"),
    (_EAGLE, "SpecDecodeBaseProposer"),
    (_EAGLE, "EagleProposer"),
)
_RUNNER_V2 = "vllm/v1/worker/gpu/model_runner.py"
_TABLE_V2 = "vllm/v1/worker/gpu/block_table.py"
_SPECULATOR_V2 = "vllm/v1/worker/gpu/spec_decode/speculator.py"
_AUTOREGRESSIVE_V2 = "vllm/v1/worker/gpu/spec_decode/autoregressive/speculator.py"

_IDLE_STEP = "self.model_runner._dummy_run(...)"
_SLOTS_PADDED = tuple(
    f"if slot_mappings_by_group is not None:\n    for sm in slot_mappings_by_group.values():\n        sm.fill_({pad})"
    for pad in (-1, "PAD_SLOT_ID", "PADDING_SLOT_ID")
)
_COMMIT = "self.input_batch.block_table.commit_block_table(num_reqs_padded)"
_ROWS_EMPTIED = tuple(
    f"for {table} in self.input_batch.block_table.block_tables: {table}.{rows}.{emptied}"
    for table in ("table", "block_table")
    for rows in ("get_device_tensor(num_reqs_padded)", "block_table.gpu[:num_reqs_padded]", "block_table.gpu")
    for emptied in ("zero_()", "fill_(0)", "fill_(NULL_BLOCK_ID)")
)
_METADATA_BUILT = "attn_metadata, _ = self._build_attention_metadata(...)"
_DRAFT_SLOTS = "slot_mapping_dict = self._get_slot_mapping(num_input_tokens)"
_DRAFT_SLOTS_PADDED = tuple(
    f"self._slot_mapping_buffer{tokens}.fill_({pad})"
    for tokens in ("", "[:num_input_tokens]")
    for pad in (-1, "PADDING_SLOT_ID", "PAD_SLOT_ID")
)
_ROWS_V2 = "return tuple(block_table[:num_reqs] for block_table in self.input_block_tables)"
_EMPTIED_ROWS_V2 = "return tuple(block_table[:num_reqs].zero_() for block_table in self.input_block_tables)"
_DIRTY_ROWS_V2 = (
    "num_rows = max(num_reqs, self._num_dirty_rows)",
    "for block_table in self.input_block_tables: block_table[:num_rows].zero_()",
    _ROWS_V2,
)
_DRAFTS_MASKED_V2 = """
if dummy_run:
    self.idx_mapping.fill_(-1)
else:
    self.idx_mapping[:num_reqs].copy_(idx_mapping)
    self.idx_mapping[num_reqs:].fill_(-1)
"""
"""Upstream's correction of 0.31.0: no row of an idle step has a request."""
_STALE_V2 = {"inputs": "inputs", "tables": "block tables", "drafts": "drafts' block tables"}
_PAD = -1
"""vLLM's PAD_SLOT_ID: such a token is not written."""
_NULL_BLOCK = 0
"""The null block of every cache, which no request gets."""

IDLE_STEP_ON_REAL_BLOCKS = Event(
    "idle-step-on-real-blocks",
    "An idle rank ran a step after a real batch whose cache blocks the step's buffers still named: on stock the step "
    "writes to them.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the step of an idle rank, and its buffers that still name blocks of the last batch."""
    if not source.contains_word(_WORKER, "execute_dummy_batch", of="Worker"):
        return Diagnosis.absent("no idle rank runs a step")
    idle = source.function(_WORKER, _TARGET)
    run = source.function(_RUNNER, "GPUModelRunner._dummy_run")
    first = _stale_in_v1(source, run) if run else None
    second = _stale_in_v2(source, idle) if idle else None
    if idle is None or run is None or first is None or second is None or not idle.find(_IDLE_STEP):
        in_a_way, seen = "an idle rank runs its step in a way", bool(first or second)
        return Diagnosis.unrecognised(in_a_way, run or idle or _WORKER, defect_seen=seen)
    if not first and not second:
        return Diagnosis.fixed("an idle rank's step names no cache block", run.where)
    stale = [*(f"{buffers} (V1)" for buffers in first), *([f"{_STALE_V2[second]} (V2)"] if second else [])]
    return Diagnosis.affected(
        f"an idle rank's step finds its cache by what the last batch left: {', '.join(stale)}",
        run.where,
        "-and-".join(filter(None, ("slots" if "slots" in first else "rows", second))),
    )


def _stale_in_v1(source: Source, run: Function) -> tuple[str, ...] | None:
    """Return the buffers that a step of model runner V1 does not clear; None where drafts run in an unknown way."""
    drafts = _stale_draft_slots(source)
    if drafts is None:
        return None
    return (
        *(() if any(map(run.find_unique, _SLOTS_PADDED)) else ("slots",)),
        *(() if _empties_rows(run) else ("block-table rows",)),
        *(("a draft's slots",) if drafts else ()),
    )


def _empties_rows(run: Function) -> bool:
    """Tell if the rows are emptied before metadata are built, and not copied from the CPU after that."""
    emptied = run.find_first_unique(_ROWS_EMPTIED)
    built = run.find_unique(_METADATA_BUILT)
    if emptied is None or built is None or not run.in_one_block(emptied, built):
        return False
    committed = run.find("(...).commit_block_table(...)")
    return not committed or (committed == run.find(_COMMIT) and run.in_one_block(*committed, emptied, built))


def _stale_draft_slots(source: Source) -> bool | None:
    """Tell if the drafter's slots stay those of the last draft; None if unknown."""
    for path, name in _PROPOSERS:
        dummy = source.function(path, f"{name}.dummy_run")
        if dummy is None:
            continue
        slots = dummy.find_unique(_DRAFT_SLOTS)
        if slots is None:
            return None if "slot_mappings" in dummy.parameters else False  # 0.14.1 drafts write by attention alone
        padded = dummy.find_first_unique(_DRAFT_SLOTS_PADDED)
        return padded is None or not dummy.in_one_block(padded, slots)
    return None


def _stale_in_v2(source: Source, idle: Function) -> str | None:
    """Return the same for model runner V2, as `inputs`, `tables`, `drafts` or ""."""
    run = source.function(_RUNNER_V2, "GPUModelRunner._dummy_run")
    if run is None:
        return None if source.contains_word(_RUNNER_V2, "dummy_run") else ""
    rows = source.function(_TABLE_V2, "BlockTables.get_dummy_block_tables")
    if rows is None or "skip_attn" not in run.parameters:
        return None
    if idle.find("self.model_runner.execute_model(...)"):
        return ""  # 0.14.1 always prepares it, and has attention only
    if _default_of(run, "skip_attn") is not False:
        return "inputs"
    if not rows.always(_EMPTIED_ROWS_V2) and not rows.find_sequence(*_DIRTY_ROWS_V2):
        return "tables"
    copy = source.function(_SPECULATOR_V2, "DraftModelSpeculator._copy_request_inputs")
    if copy is None:
        return None
    return "" if copy.find_unique(_DRAFTS_MASKED_V2) is copy.node.body[-1] else "drafts"


def _default_of(function: Function, parameter: str) -> object:
    """Return the constant default of a keyword-only parameter; None if there is none."""
    arguments = getattr(function.node, "args", None)
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if arguments else ()
    return next((getattr(value, "value", None) for name, value in pairs if name.arg == parameter), None)


Undo = list[Callable[[], object]]


def _name_no_block(stock: StockFunction, activity: Activity, *, shape: str) -> StockFunction:
    """Wrap `Worker.execute_dummy_batch()`, which runs the step of an idle rank: no buffer names a cache block there.

    *shape* names the buffers that stock does not clear. Not called at start-up.
    """
    from torch import inference_mode  # the target is imported by now, and torch with it

    steps_on_real_blocks, corrects = activity.counter(IDLE_STEP_ON_REAL_BLOCKS), activity.corrects

    @functools.wraps(stock)
    def execute_dummy_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        undo: Undo = []
        try:
            if corrects:
                with inference_mode():  # some of the buffers may be made in it
                    _clear_buffers(self.model_runner, shape, undo)
            steps_on_real_blocks.count += _names_real_blocks(self.model_runner, shape)
        except Exception as error:
            activity.failed(error)
            _restore(undo, activity)
        try:
            return stock(self, *args, **kwargs)
        finally:
            _restore(undo, activity)

    return execute_dummy_batch


def _restore(undo: Undo, activity: Activity) -> None:
    """Restore every buffer once, the last one first, even if one fails."""
    from torch import inference_mode

    while undo:
        try:
            with inference_mode():
                undo.pop()()
        except Exception as error:
            activity.failed(error)


def _clear_buffers(runner: Any, shape: str, undo: Undo) -> None:
    """Clear the persistent buffers by which a pass, graphs included, finds its cache; append to *undo* what to restore.

    Real steps refill them: V1 copies the rows of its batch from the CPU, V2 gathers them from the requests' rows. These
    two sources, which grow with a request, are restored or not touched.
    """
    if hasattr(runner, "input_batch"):
        _clear_v1(runner.input_batch.block_table, undo)
        for _, slots in _tensors(getattr(runner, "drafter", None), "slot_mapping"):
            slots.fill_(_PAD)
    elif _part_of_v2(shape):
        tables, speculator = runner.block_tables, runner.speculator
        tables.slot_mappings.fill_(_PAD)
        for rows in tables.input_block_tables:
            rows.fill_(_NULL_BLOCK)
        if speculator is not None:  # computes slots from the requests' rows, up to 0.20 in a graph
            for requests in tables.block_tables:
                _clear_for_now(requests.gpu, undo)
            _replace_for_now(tables, "compute_slot_mappings", _padding_slots(tables.compute_slot_mappings), undo)
            _clear_states(speculator)
    else:
        return
    _clear_states(runner)


def _clear_v1(tables: Any, undo: Undo) -> None:
    for table in tables.block_tables:
        table.slot_mapping.gpu.fill_(_PAD)
        rows = table.block_table
        if rows.gpu.data_ptr() == rows.cpu.data_ptr():  # one memory on a CPU worker
            _clear_for_now(rows.gpu, undo)
        else:
            rows.gpu.fill_(_NULL_BLOCK)
    # From 0.19 on, the step copies rows from the CPU, which still name the batch's requests.
    _replace_for_now(tables, "commit_block_table", lambda num_reqs: None, undo)


def _padding_slots(compute: StockFunction) -> StockFunction:
    """Wrap `compute_slot_mappings`: an idle step does not write to the null block, which padded rows read."""

    def compute_slot_mappings(*args: Any, **kwargs: Any) -> Any:
        return compute(*args, **kwargs).fill_(_PAD)

    return compute_slot_mappings


def _replace_for_now(owner: Any, name: str, function: StockFunction, undo: Undo) -> None:
    """Replace *name* in this object alone, for the duration of the step."""
    undo.append(functools.partial(vars(owner).pop, name, None))
    setattr(owner, name, function)


def _clear_for_now(rows: Any, undo: Undo) -> None:
    undo.append(functools.partial(rows.copy_, rows.clone()))
    rows.fill_(_NULL_BLOCK)


def _clear_states(runner: Any) -> None:
    """Clear the builders' buffers for graphs: state indices of recurrent layers, slots of compressed caches."""
    for builder in _builders(runner):
        for name, tensor in _tensors(builder, "state_indices", "slot_mapping"):
            tensor.fill_(_NULL_BLOCK if "state_indices" in name else _PAD)


def _builders(runner: Any) -> Iterator[Any]:
    for groups in getattr(runner, "attn_groups", None) or ():
        for group in groups:
            yield from group.metadata_builders


def _tensors(owner: Any, *words: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of *owner* in attributes with one of *words* in their name, alone or in a dictionary."""
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if any(word in name for word in words):
            for tensor in value.values() if isinstance(value, dict) else (value,):
                if hasattr(tensor, "fill_"):
                    yield name, tensor


def _part_of_v2(shape: str) -> str:
    return shape.rpartition("-and-")[2] if "-and-" in shape else ""


def _names_real_blocks(runner: Any, shape: str) -> bool:
    """Tell, from data on the host, if on stock the step writes to blocks of a real batch."""
    if hasattr(runner, "input_batch"):
        batch = runner.input_batch
        if shape.startswith("slots") or any(_tensors(getattr(runner, "drafter", None), "slot_mapping")):
            return bool(batch.num_prompt_tokens.any())  # there was a request, and a draft
        rows = any(table.num_blocks_per_row.any() for table in batch.block_table.block_tables)
        return rows and _has_states(runner)
    stale = _part_of_v2(shape)
    if not stale or not runner.block_tables.num_blocks.np.any():
        return False
    return stale == "inputs" or runner.speculator is not None or (stale == "tables" and _has_states(runner))


def _has_states(runner: Any) -> bool:
    return any(any(_tensors(builder, "state_indices")) for builder in _builders(runner))


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_WORKER_MODULE, _TARGET, functools.partial(_name_no_block, shape=shape)),)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    ranks = "more than one rank, which in practice is expert parallelism"
    return (
        needs.on_runners("from 0.31.0 on model runner V1", _runners),
        Need(
            "data parallelism",
            lambda deployment, _: deployment.data_parallel(),
            ranks,
            clause="there are several data-parallel ranks",
        ),
        Need(
            "from 0.20.0 on recurrent layers or speculative decoding",
            _has_states_or_drafts,
            clause="the model has recurrent layers or speculative decoding is on",
        ),
    )


def _runners(shape: str) -> tuple[str, ...]:
    """Return the model runners with uncleared buffers on code of *shape*."""
    if not shape:
        return ()
    return ("V1", "V2") if _part_of_v2(shape) else ("V1",)


def _has_states_or_drafts(deployment: Deployment, shape: str) -> Fact | None:
    """Tell if the deployment has recurrent layers or a drafter, the open cases from 0.20.0 on; None before."""
    from vllm_graphfix.deployment import any_of

    if not shape or "slots" in shape.split("-and-"):
        return None
    return any_of(deployment.recurrent(), deployment.drafts())


_DRAFTS = "_get_slot_mapping _slot_mapping_buffer slot_mapping_dict"

FIX = fix(
    "idle-rank",
    diagnose=diagnose,
    surroundings=(
        # The step, with every other use of its buffers
        Slice(_WORKER, _TARGET, "self"),
        Slice(
            _RUNNER,
            "GPUModelRunner._dummy_run",
            "slot_mappings_by_group slot_mappings block_table block_tables commit_block_table "
            "_build_attention_metadata",
        ),
        # Slots and rows of model runner V1, and their persistent buffers
        Slice(_RUNNER, "GPUModelRunner._get_slot_mappings", "slot_mapping slot_mappings_by_gid"),
        Slice(_RUNNER, "GPUModelRunner._build_attention_metadata", "blk_table"),
        Slice(_TABLE, "MultiGroupBlockTable.commit_block_table", "commit_block_table"),
        Slice(_TABLE, "MultiGroupBlockTable.__getitem__", "block_tables"),
        Slice(_TABLE, "BlockTable.commit_block_table", "block_table"),
        Slice(_TABLE, "BlockTable.get_device_tensor", "block_table"),
        Slice(_TABLE, "BlockTable.__init__", "slot_mapping num_blocks_per_row", Verdict.AFFECTED),
        Slice(_TABLE, "BlockTable.clear_row", "num_blocks_per_row block_table", Verdict.AFFECTED),
        Slice(_BATCH, "InputBatch.__init__", "MultiGroupBlockTable", Verdict.AFFECTED),
        Slice(_BATCH, "InputBatch.remove_request", "block_table", Verdict.AFFECTED),
        # The drafter's slots
        *(
            Slice(path, f"{name}.{method}", _DRAFTS)
            for path, name in _PROPOSERS
            for method in ("dummy_run", "_get_slot_mapping")
        ),
        # Rows and slots of model runner V2, their preparation for an idle step, and those of drafts
        Slice(_TABLE_V2, "BlockTables.get_dummy_block_tables", "input_block_tables block_table"),
        Slice(_TABLE_V2, "BlockTables.get_dummy_slot_mappings", "slot_mappings"),
        Slice(_TABLE_V2, "BlockTables.__init__", "input_block_tables slot_mappings", Verdict.AFFECTED),
        Slice(_RUNNER_V2, "", "get_dummy_block_tables get_dummy_slot_mappings prepare_dummy_attn", Verdict.FIXED),
        Slice(_RUNNER_V2, "GPUModelRunner._dummy_run", "skip_attn dummy_run", Verdict.FIXED),
        Slice(_AUTOREGRESSIVE_V2, "", "_copy_request_inputs", Verdict.FIXED),
        Slice(
            _SPECULATOR_V2, "DraftModelSpeculator._copy_request_inputs", "return idx_mapping dummy_run", Verdict.FIXED
        ),
        NULL_BLOCK,
    ),
    recognised=(
        _COMMIT,
        *_ROWS_EMPTIED,
        *_DRAFT_SLOTS_PADDED,
        _EMPTIED_ROWS_V2,
        *_DIRTY_ROWS_V2,
        _DRAFTS_MASKED_V2,
    ),
    distant_code=TAKEN_FIRST,
    corrections=patches,
    modules=(_WORKER_MODULE,),
    events=(IDLE_STEP_ON_REAL_BLOCKS,),
    needs=needs,
    default_rationale="answers",
)
