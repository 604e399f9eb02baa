"""`idle-rank`: the step of an idle rank writes to no cache block of a request (PR 39444, and more for each buffer)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import NEWEST, About

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

_PADDED = ("(...).fill_(-1)", "(...).fill_(PAD_SLOT_ID)", "(...).fill_(PADDING_SLOT_ID)")
_EMPTIED = ("(...).zero_()", "(...).fill_(0)", "(...).fill_(NULL_BLOCK_ID)")
_STALE_V2 = {"inputs": "inputs", "tables": "block tables", "drafts": "drafts' block tables"}
_PAD = -1
"""vLLM's PAD_SLOT_ID: nothing is written for such a token."""
_NULL_BLOCK = 0
"""The null block of every cache, in every release: no request has it."""

IDLE_STEP_ON_REAL_BLOCKS = Event(
    "idle-step-on-real-blocks",
    "An idle rank ran a step after a real batch whose cache blocks the step's buffers still named: on stock the step "
    "writes to them.",
)


def diagnose(source: Source) -> Diagnosis:
    if not source.says(_WORKER, "execute_dummy_batch", of="Worker"):
        return Diagnosis(Verdict.ABSENT, "no idle rank runs a step")
    idle = source.function(_WORKER, _TARGET)
    run = source.function(_RUNNER, "GPUModelRunner._dummy_run")
    first, second = _stale_in_v1(source, run), _stale_in_v2(source, idle)
    if idle is None or run is None or first is None or second is None or not _is_one_step(idle):
        return Diagnosis.unrecognised("an idle rank runs its step in a way", run or idle or _WORKER)
    if not first and not second:
        return Diagnosis(Verdict.FIXED, "an idle rank's step names no cache block", run.where)
    left = [*(f"{what} (V1)" for what in first), *([f"{_STALE_V2[second]} (V2)"] if second else [])]
    return Diagnosis(
        Verdict.AFFECTED,
        f"an idle rank's step finds its cache by what the last batch left: {', '.join(left)}",
        run.where,
        "-and-".join(filter(None, ("slots" if "slots" in first else "rows", second))),
    )


def _is_one_step(idle: Function) -> bool:
    """Whether the function calls the model runner for one step, and uses it otherwise only for the step's size.

    The step may be that of either model runner.
    """
    first, second = idle.find("self.model_runner._dummy_run(...)"), idle.find("self.model_runner.execute_model(...)")
    size = idle.find("getattr(self.model_runner, 'uniform_decode_query_len', 1)")
    uses = len(first) + len(second) + len(size)
    return idle.takes == "self" and len(first) == 1 and uses == len(idle.find("self.model_runner"))


def _stale_in_v1(source: Source, run: Function | None) -> tuple[str, ...] | None:
    """What a step of model runner V1 leaves as it was; None if that is not known."""
    build = source.function(_RUNNER, "GPUModelRunner._build_attention_metadata")
    tables = source.function(_TABLE, "MultiGroupBlockTable.commit_block_table")
    table = source.function(_TABLE, "BlockTable.commit_block_table")
    buffers = source.function(_TABLE, "BlockTable.__init__")
    batch = source.function(_BATCH, "InputBatch.__init__")
    if run is None or build is None or tables is None or table is None or buffers is None or batch is None:
        return None
    known = (
        run.only("force_attention or cudagraph_runtime_mode == CUDAGraphMode.FULL")  # when a step is given metadata
        and build.only("blk_table = self.input_batch.block_table[kv_cache_gid]")
        and tables.only("block_table.commit_block_table(num_reqs)")
        and len(tables.loops_over("self.block_tables")) == 1
        and table.only("self.block_table.copy_to_gpu(num_reqs)")
        and buffers.only("self.block_table = self._make_buffer(...)")
        and buffers.only("self.slot_mapping = self._make_buffer(...)")
        and buffers.only("self.num_blocks_per_row = ...")
        and batch.only("self.num_prompt_tokens = ...")
        and batch.only("self.block_table = MultiGroupBlockTable(...)")
    )
    taken, committed = run.find("self._get_slot_mappings(...)"), run.find("(...).commit_block_table(num_reqs_padded)")
    own = build.find("blk_table.slot_mapping.gpu[:num_tokens_padded]")
    padded, drafts = _pads_slots(run), _stale_draft_slots(source)
    if not known or drafts is None or len(taken) + len(own) != 1 or len(committed) > 1 or padded is None:
        return None
    since = max((call.lineno for call in committed), default=0)  # which copies the rows of the CPU
    emptied = any(
        since < found.lineno <= (loop.end_lineno or 0)
        for loop in run.loops_over("self.input_batch.block_table.block_tables")
        for pattern in _EMPTIED
        for found in run.find(pattern)
        if loop.lineno < found.lineno
    )
    return (
        *(() if padded else ("slots",)),
        *(() if emptied else ("block-table rows",)),
        *(("a draft's slots",) if drafts else ()),
    )


def _pads_slots(run: Function) -> bool | None:
    """Whether *run* pads the slots of each group; None if something is padded in another way than that."""
    found = [part for pattern in _PADDED for part in run.find(pattern)]
    loops = run.loops_over("slot_mappings_by_group.values()")
    if not found and not loops:
        return False
    inside = [part for part in found for loop in loops if loop.lineno < part.lineno <= (loop.end_lineno or 0)]
    return True if len(inside) == len(found) == len(loops) == 1 else None


def _stale_draft_slots(source: Source) -> bool | None:
    """Whether the drafter's own slots stay as the last draft left them; None if it is not known."""
    for path, name in _PROPOSERS:
        dummy = source.function(path, f"{name}.dummy_run")
        if dummy is None:
            continue
        own = dummy.find("self._get_slot_mapping(...)")
        if not own:
            return None if "slot_mappings" in dummy.parameters else False  # 0.14.1 drafts write by attention alone
        if any(dummy.find(pattern) for pattern in _PADDED):
            return False
        stale = dummy.only("slot_mapping_dict = self._get_slot_mapping(num_input_tokens)")
        return True if stale and len(own) == 1 and dummy.mentions(slot_mapping_dict=3) else None
    return None


def _stale_in_v2(source: Source, idle: Function | None) -> str | None:
    """The same of model runner V2, in one word: `inputs`, `tables`, `drafts`, or nothing."""
    run = source.function(_RUNNER_V2, "GPUModelRunner._dummy_run")
    if run is None:
        return None if source.says(_RUNNER_V2, "dummy_run") else ""
    rows = source.function(_TABLE_V2, "BlockTables.get_dummy_block_tables")
    slots = source.function(_TABLE_V2, "BlockTables.get_dummy_slot_mappings")
    buffers = source.function(_TABLE_V2, "BlockTables.__init__")
    known = (
        rows
        and buffers
        and slots
        and slots.only("self.slot_mappings.fill_(PAD_SLOT_ID)")
        and buffers.only("self.block_tables: list[StagedWriteTensor] = []")
        and buffers.only("self.input_block_tables: list[torch.Tensor] = ...")
        and buffers.only("self.slot_mappings = ...")
        and buffers.only("self.num_blocks = UvaBackedTensor(...)")
        and "skip_attn" in run.parameters
    )
    if not known or rows is None:
        return None
    if idle is not None and idle.find("self.model_runner.execute_model(...)"):
        return ""  # 0.14.1, which always prepares it, and has no layers but attention
    if _default_of(run, "skip_attn") is not False:
        return "inputs"
    if not any(rows.find(pattern) for pattern in _EMPTIED):
        return "tables"
    copy = source.function(_SPECULATOR_V2, "DraftModelSpeculator._copy_request_inputs")
    if copy is None:
        return None
    masked = "dummy_run" in copy.parameters and copy.find("self.idx_mapping.fill_(-1)")
    return "" if masked else "drafts"


def _default_of(function: Function, parameter: str) -> object:
    """The constant that a keyword-only parameter is by default; None if there is none."""
    given = getattr(function.node, "args", None)
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True) if given else ()
    return next((getattr(value, "value", None) for name, value in pairs if name.arg == parameter), None)


Undo = list[Callable[[], object]]


def _name_no_block(stock: StockFunction, activity: Activity, *, shape: str) -> StockFunction:
    """Wraps `Worker.execute_dummy_batch()`, which runs the step of a rank without work, and nothing at start-up.

    The step then finds no cache block named in any buffer; *shape* says which buffers stock leaves as they are.
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
    """Each of them, whatever becomes of the others."""
    for bring_back in reversed(undo):
        from torch import inference_mode

        try:
            with inference_mode():
                bring_back()
        except Exception as error:
            activity.failed(error)


def _clear_buffers(runner: Any, shape: str, undo: Undo) -> None:
    """Every buffer by which a pass finds its cache names none; *undo* takes what brings back what later steps rely on.

    The buffers are the persistent ones, so that graphs read it too. Real steps fill them anew: V1 copies the rows of
    its batch from the CPU, V2 gathers them from the request's; these two, which grow with a request, are what is
    brought back or left alone.
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
        if speculator is not None:  # which computes slots from the requests' rows, up to 0.20 inside of a graph
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
        if rows.gpu.data_ptr() == rows.cpu.data_ptr():  # a worker on a CPU has one memory for both
            _clear_for_now(rows.gpu, undo)
        else:
            rows.gpu.fill_(_NULL_BLOCK)
    # From 0.19 on the step copies the rows of the CPU, in which the requests of the batch still are.
    _replace_for_now(tables, "commit_block_table", _commit_nothing, undo)


def _commit_nothing(num_reqs: int) -> None:
    """In place of `commit_block_table` while the step runs."""


def _padding_slots(compute: StockFunction) -> StockFunction:
    """Wraps `compute_slot_mappings` so that an idle step does not write to the null block.

    Its slots would be in that block, which padded rows read.
    """

    def compute_slot_mappings(*args: Any, **kwargs: Any) -> Any:
        return compute(*args, **kwargs).fill_(_PAD)

    return compute_slot_mappings


def _replace_for_now(owner: Any, name: str, function: StockFunction, undo: Undo) -> None:
    """In this one object, and only as long as the step runs."""
    undo.append(functools.partial(vars(owner).pop, name, None))
    setattr(owner, name, function)


def _clear_for_now(rows: Any, undo: Undo) -> None:
    undo.append(functools.partial(rows.copy_, rows.clone()))
    rows.fill_(_NULL_BLOCK)


def _clear_states(runner: Any) -> None:
    """What metadata builders keep for graphs: state indices of Mamba and its kind, and slots of compressed caches."""
    for builder in _builders(runner):
        for name, tensor in _tensors(builder, "state_indices", "slot_mapping"):
            tensor.fill_(_NULL_BLOCK if "state_indices" in name else _PAD)


def _builders(runner: Any) -> Iterator[Any]:
    for groups in getattr(runner, "attn_groups", None) or ():
        for group in groups:
            yield from group.metadata_builders


def _tensors(owner: Any, *words: str) -> Iterator[tuple[str, Any]]:
    """The tensors that *owner* keeps under a name with one of *words* in it, alone or in a dictionary."""
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if any(word in name for word in words):
            for tensor in value.values() if isinstance(value, dict) else (value,):
                if hasattr(tensor, "fill_"):
                    yield name, tensor


def _part_of_v2(shape: str) -> str:
    return shape.rpartition("-and-")[2] if "-and-" in shape else ""


def _names_real_blocks(runner: Any, shape: str) -> bool:
    """Whether on stock the step writes to blocks of a real batch, by what the host knows.

    Nothing is read from a device.
    """
    if hasattr(runner, "input_batch"):
        batch = runner.input_batch
        if shape.startswith("slots") or any(_tensors(getattr(runner, "drafter", None), "slot_mapping")):
            return bool(batch.num_prompt_tokens.any())  # there was a request, and a draft
        rows = any(table.num_blocks_per_row.any() for table in batch.block_table.block_tables)
        return rows and _has_states(runner)
    left = _part_of_v2(shape)
    if not left or not runner.block_tables.num_blocks.np.any():
        return False
    return left == "inputs" or runner.speculator is not None or (left == "tables" and _has_states(runner))


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
        Need("data parallelism", lambda deployment, _: deployment.data_parallel(), ranks),
        Need("from 0.20.0 on recurrent layers or speculative decoding", _has_states_or_drafts),
    )


def _runners(shape: str) -> tuple[str, ...]:
    """The model runners of which a step leaves something, on code of *shape*."""
    if not shape:
        return ()
    return ("V1", "V2") if _part_of_v2(shape) else ("V1",)


def _has_states_or_drafts(deployment: Deployment, shape: str) -> Fact | None:
    """From 0.20.0 on slots are clean: what is left is the states of recurrent layers and a drafter's slots."""
    from vllm_graphfix.deployment import any_of

    if not shape or "slots" in shape.split("-and-"):
        return None
    return any_of(deployment.recurrent(), deployment.drafts())


FIX = Fix(
    number=9,
    name="idle-rank",
    runner=None,
    reads=(_WORKER, _RUNNER, _TABLE, _BATCH, _PROPOSER, _EAGLE, _RUNNER_V2, _TABLE_V2, _SPECULATOR_V2),
    modules=(_WORKER_MODULE,),
    diagnose=diagnose,
    patches=patches,
    events=(IDLE_STEP_ON_REAL_BLOCKS,),
    needs=needs,
    ground="answers",
    evidence=(
        f"{_RUNNER}::GPUModelRunner._get_slot_mappings",
        *(f"{_TABLE}::BlockTable.{name}" for name in ("_make_buffer", "clear_row", "get_device_tensor")),
        f"{_TABLE}::MultiGroupBlockTable.__getitem__",
        f"{_BATCH}::InputBatch.remove_request",
        *(f"{path}::{name}._get_slot_mapping" for path, name in _PROPOSERS),
    ),
)

ABOUT = About(
    pr=39444,
    references=("PR 34866", "PR 37728", "PR 49757", "PR 56734"),
    summary="an idle rank writes to no cache block",
    releases=f"0.14.1 - {NEWEST}",
    seen="garbage or NaN after a pause, or wrong hits in the prefix cache",
    first_test="bursts with pauses, on one rank and on several",
    symptom="With data parallelism, on ranks that were idle for a while, answers turn to garbage or NaN, or a prompt "
    "with a cached prefix is answered differently than before.",
    cause="An idle rank runs a step of its own, so that the others can go on. Its buffers still hold what the last "
    "batch, or requests that wait on this rank, put there: slots (up to 0.19.1), a drafter's slots (model runner V1), "
    "block-table rows, which are the states of Mamba and its kind, and request rows from which drafts compute slots "
    "(model runner V2 up to 0.30.0). The step writes there, though the blocks may belong to other requests by then, "
    "or to the prefix cache.",
    remedy="During such a step, slots are set to the pad slot and block-table rows to the null block, in the "
    "persistent buffers, so that graphs read them too. Rows that grow with a request are restored afterwards. "
    "Captures and warm-ups are untouched.",
    detect="Bursts of requests with pauses between them, on an engine with --data-parallel-size above 1; a prompt "
    "that hits the prefix cache answers differently after a pause.",
    workaround="None in the engine; one engine per rank behind a router (no --data-parallel-size), where the model "
    "fits.",
    removable="not yet: no release has a remedy; later with one that `status` calls fixed",
    in_caches="anything in a block that the idle step wrote to: prompts, generated tokens, states, of requests that "
    "run, have ended or are only cached. A block is wrong in the store if it was stored after that step",
    how_sure="the writes were shown; what a store copied, and when, is not known",
)
