"""`draft-decode-mode`: draft decodes run in full graphs or none, and stale token indices are cleared (PR 39773)."""

from __future__ import annotations

import ast
import functools
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Counter, Diagnosis, Event, Patch, Slice, StockFunction, Verdict

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_SPEC_DECODE = "vllm/v1/worker/gpu/spec_decode"
_FIRST_MANAGER = f"{_SPEC_DECODE}/eagle_cudagraph.py"
_MANAGER = f"{_SPEC_DECODE}/eagle/cudagraph.py"
_SPECULATOR = f"{_SPEC_DECODE}/eagle/speculator.py"
_UTILS = "vllm/v1/worker/gpu/cudagraph_utils.py"
_PACKAGE = f"{_SPEC_DECODE}/__init__.py"
_SPECULATORS = (
    (_SPECULATOR, "EagleSpeculator", "_prepare_eagle_inputs_kernel"),
    (f"{_SPEC_DECODE}/autoregressive/speculator.py", "AutoRegressiveSpeculator", "_prepare_prefill_inputs_kernel"),
    (
        f"{_SPEC_DECODE}/target_dependent_ar/speculator.py",
        "TargetDependentARSpeculator",
        "_prepare_prefill_inputs_kernel",
    ),
)
_CLASS = "EagleCudaGraphManager"
_MANAGER_MODULE = "vllm.v1.worker.gpu.spec_decode.eagle.cudagraph"
_SPECULATOR_MODULE = "vllm.v1.worker.gpu.spec_decode.eagle.speculator"

_NO_PIECEWISE_SIZES = "if not cudagraph_mode.has_full_cudagraphs(): return {}"
_CHOSEN = """
if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
    cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
else:
    cudagraph_mode = CUDAGraphMode.NONE
"""
"""Upstream's correction."""
_MODE_TAKEN = "self.cudagraph_mode = self.compilation_config.cudagraph_mode.decode_mode()"
_CONFIGURED = (
    "cudagraph_mode",
    *(f"{config}.compilation_config.cudagraph_mode" for config in ("self.vllm_config", "vllm_config")),
)
_MADE = "self.cudagraph_manager = EagleCudaGraphManager(vllm_config, device, cudagraph_mode, *...)"
_DECODES_MADE = tuple(
    f"self.decode_cudagraph_manager = {cls}(self.vllm_config, self.device, {mode}, decode_query_len=1)"
    for mode in _CONFIGURED
    for cls in (_CLASS, f"Decode{_CLASS}", "DecodeSpeculatorCudaGraphManager", "SpeculatorCudaGraphManager")
)
"""The manager of the draft decodes. The first patterns pass the variable, chosen or configured, the others the
configuration."""
_PREFILLS_MADE = tuple(
    made.replace("decode_cudagraph", "prefill_cudagraph")
    .replace("decode_query_len=1", "self.num_speculative_steps + 1")
    .replace("= Decode", "= Prefill")
    for made in _DECODES_MADE
)
_POOL = "self.decode_cudagraph_manager.pool = self.prefill_cudagraph_manager.pool"
_DRAFT = "EagleSpeculator.generate_draft"

DECODE_PADDED_IN_PIECEWISE = Event(
    "decode-padded-in-piecewise",
    "On stock, draft decodes would run in piecewise graphs with more tokens than requests: attention reads past what "
    "is valid for the batch.",
)
PREFILL_WITH_OLD_INDICES = Event(
    "prefill-with-old-indices",
    "On stock, a draft prefill that is captured in full graphs has token indices of an earlier batch beyond its own "
    "requests.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the mode that the manager of the draft decodes gets, and in newer code what clears stale token indices."""
    in_a_way = "draft decodes choose their mode in a way"
    if source.function(_FIRST_MANAGER, _CLASS) is not None:
        sizes = source.function(_UTILS, "get_cudagraph_sizes")
        if sizes is not None and sizes.always(_NO_PIECEWISE_SIZES):
            return Diagnosis.fixed("draft decodes have full graphs or none", sizes.where)
        return Diagnosis.unrecognised(in_a_way, _FIRST_MANAGER)
    for path, name, kernel_name in _SPECULATORS:
        two_managers = source.function(path, f"{name}.init_cudagraph_manager")
        if two_managers is not None:
            return _two_managers(source, two_managers, source.function(path, kernel_name))
    init = source.function(_SPECULATOR, "EagleSpeculator.__init__")
    manager = source.function(_MANAGER, f"{_CLASS}.__init__")
    if init is None and manager is None:
        if source.function(_PACKAGE, "init_speculator") is None:
            return Diagnosis.absent("no draft decodes on model runner V2")
        return Diagnosis.unrecognised("speculators are in a place", _PACKAGE)
    if init is not None and (chosen := _mode_for_decodes(init, (_MADE,))):
        return Diagnosis.fixed("draft decodes have full graphs or none", init.at(chosen))
    taken = manager.find_unique(_MODE_TAKEN) if manager else None
    if manager is not None and taken is not None and len(manager.find("self.cudagraph_mode = ...")) == 1:
        return Diagnosis.affected(
            "draft decodes take the configured decode mode as it is, PIECEWISE included",
            manager.at(taken),
            "one-manager",
        )
    return Diagnosis.unrecognised(in_a_way, manager or _SPECULATOR)


def _two_managers(source: Source, init: Function, kernel: Function | None) -> Diagnosis:
    """Judge 0.20.0 and later, and the nightlies between PR 37588 and PR 39773."""
    speculator = source.function(init.path, init.qualname.partition(".")[0])
    if kernel is None or not kernel.find("tl.store(last_token_indices_ptr + req_idx, ...)"):
        return Diagnosis.unrecognised("last_token_indices are written in a way", init)
    # The class makes the manager of the decodes once.
    if speculator is None or len(speculator.find("self.decode_cudagraph_manager = ...")) != 1:
        return Diagnosis.unrecognised("draft decodes get their manager in a way", init)
    chosen = _mode_for_decodes(init, _DECODES_MADE[:4])
    cleared = _are_old_indices_cleared(source, speculator, kernel)
    if chosen and cleared:
        return Diagnosis.fixed("draft decodes have full graphs or none, and stale indices are zeroed", init.at(chosen))
    made = next((pattern for pattern in _DECODES_MADE if init.find_unique(pattern)), "")
    as_configured = bool(made) and (
        ".compilation_config" in made or not (chosen or init.find("CUDAGraphMode.FULL_DECODE_ONLY"))
    )
    stale = kernel.mentions(last_token_indices_ptr=1)
    # Patches fit Eagle's own managers; a later speculator without the remedy would be another shape.
    if not init.qualname.startswith("EagleSpeculator.") or not (chosen or as_configured) or not (cleared or stale):
        return Diagnosis.unrecognised("draft decodes are handled in a way", init)
    missing = [
        *(() if chosen else ("draft decodes get the configured mode, PIECEWISE included",)),
        *(() if cleared else ("last_token_indices keep old values beyond the batch",)),
    ]
    shape = "two-managers" + ("" if chosen else "-mode") + ("" if cleared else "-indices")
    return Diagnosis.affected("; ".join(missing), (kernel if chosen else init).where, shape)


def _mode_for_decodes(init: Function, made: tuple[str, ...]) -> ast.stmt | ast.expr | None:
    """Return the choice of the mode of draft decodes, with which their manager is *made* later in its block."""
    for pattern in made:
        parts = init.find_sequence(_CHOSEN, pattern)
        if parts:
            chosen, _ = parts
            after = [each for each in init.assignments("cudagraph_mode", "...") if each.lineno > chosen.lineno]
            return chosen if len(after) == 2 else None  # those of the choice
    return None


def _are_old_indices_cleared(source: Source, speculator: Function, kernel: Function) -> bool:
    """Tell if the kernel zeroes the indices between the batch's end and that of the buffer that it gets."""
    stored = kernel.find_unique("tl.store(last_token_indices_ptr + block, 0, mask=mask)")
    covering = kernel.find("block = i + tl.arange(0, BLOCK_SIZE)") + kernel.find("mask = block < max_num_reqs")
    name = kernel.qualname.removeprefix("_").removesuffix("_kernel")
    prepare = source.function(kernel.path, name)
    # `prepare` passes both on unchanged, which its slice shows.
    return (
        prepare is not None
        and {"last_token_indices", "max_num_reqs"} <= prepare.arguments(f"{kernel.qualname}[...](*...)")
        and {"self.last_token_indices", "self.max_num_reqs"} <= speculator.arguments(f"{name}(*...)")
        and stored is not None
        and any(
            len(lines) == 2 and kernel.in_one_block(*lines, stored)
            for loop in kernel.loops_over("range(num_reqs, max_num_reqs, BLOCK_SIZE)")
            for lines in [[line for line in covering if line in loop.body]]
        )
    )


def _no_piecewise_draft_decodes(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `EagleCudaGraphManager.__init__`, 0.17.x: draft decodes, all that it captures, have full graphs or none.

    Its mode is a runtime mode, FULL or PIECEWISE: FULL_DECODE_ONLY, a pair of modes, has become FULL.
    """

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        try:
            if self.cudagraph_mode.name != "FULL":
                sizes = self.cudagraph_sizes if self.cudagraph_mode.name == "PIECEWISE" else {}
                none = type(self.cudagraph_mode).NONE
                self.graphfix_stock_tokens = lambda num_reqs: sizes.get(num_reqs, num_reqs)
                self.cudagraph_mode, self.cudagraph_sizes, self.pool = none, {}, None
        except Exception as error:
            activity.failed(error)

    return init


class _OldIndices:
    """The number of rows of stock's `last_token_indices` that may be stale: the largest batch since all were zeroed."""

    def __init__(self) -> None:
        self._speculator: Any = None
        self._rows = 0

    def belong_to(self, speculator: Any) -> None:
        """Track *speculator*, the worker's only one, whose indices stock zeroes after this call. Never raises."""
        with suppress(TypeError):  # not vLLM's, and without weak references
            self._speculator, self._rows = weakref.ref(speculator), 0

    def observe(self, batch: Any, old_indices: Counter) -> None:
        """Count *batch* if stock's indices beyond its requests are stale."""
        speculator = self._speculator and self._speculator()
        if speculator is not None and speculator.prefill_cudagraph_manager.graphs:
            if batch.num_reqs < self._rows:
                old_indices.count += 1
            self._rows = max(self._rows, batch.num_reqs)


def _around_init(stock: StockFunction, activity: Activity, *, indices: _OldIndices, mode_too: bool) -> StockFunction:
    """Wrap `EagleSpeculator.init_cudagraph_manager` of the nightlies: *indices* track its speculator.

    With *mode_too*, the decode manager is replaced by one with its own mode.
    """
    makes_anew = mode_too and activity.corrects

    @functools.wraps(stock)
    def init_cudagraph_manager(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        indices.belong_to(self)
        if makes_anew:
            try:
                _give_decodes_their_own_mode(self)
            except Exception as error:
                activity.failed(error)
        return result

    return init_cudagraph_manager


def _give_decodes_their_own_mode(speculator: Any) -> None:
    manager = speculator.decode_cudagraph_manager
    modes = type(manager.cudagraph_mode)
    wanted = modes.FULL_DECODE_ONLY if manager.cudagraph_mode.decode_mode() == modes.FULL else modes.NONE
    if manager.cudagraph_mode != wanted:
        replacement = type(manager)(speculator.vllm_config, speculator.device, wanted, manager.decode_query_len)
        replacement.pool = speculator.prefill_cudagraph_manager.pool
        replacement.graphfix_stock_tokens = _tokens_by(manager, replacement)
        speculator.decode_cudagraph_manager = replacement


def _tokens_by(stock_manager: Any, replacement: Any) -> Callable[[int], int]:
    """Return a function from a number of requests to the tokens that stock's decode manager would run them with.

    These are the tokens of a piecewise graph, or the number of requests itself. Only the dispatch of the stock manager
    is used: it captures nothing.
    """

    def stock_tokens(num_reqs: int) -> int:
        stock_manager._graphs_captured = replacement._graphs_captured
        descriptor = stock_manager.dispatch(num_reqs, num_reqs, 1)
        return int(descriptor.num_tokens) if descriptor.cg_mode.name == "PIECEWISE" else num_reqs

    return stock_tokens


def _around_drafts(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `EagleSpeculator.generate_draft`, which runs draft decodes without full graphs, to count alone."""
    padded_decodes = activity.counter(DECODE_PADDED_IN_PIECEWISE)

    @functools.wraps(stock)
    def generate_draft(
        self: Any, num_reqs: Any, num_tokens_padded: Any, attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            if attn_metadata is not None:  # a dummy run has none
                manager = getattr(self, "decode_cudagraph_manager", None) or self.cudagraph_manager
                stock_tokens = getattr(manager, "graphfix_stock_tokens", None)
                if stock_tokens is not None:  # the fix replaced this manager's mode: no graph
                    tokens = stock_tokens(num_reqs)
                elif _mode_name(args, kwargs) == "PIECEWISE" and getattr(manager, "_graphs_captured", True):
                    tokens = num_tokens_padded  # but captures of the nightlies have metadata for all
                else:
                    tokens = num_reqs
                if tokens > num_reqs:
                    padded_decodes.count += 1
        except Exception as error:
            activity.failed(error)
        return stock(self, num_reqs, num_tokens_padded, attn_metadata, *args, **kwargs)

    return generate_draft


def _mode_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    mode = args[2] if len(args) > 2 else kwargs.get("cudagraph_runtime_mode")
    return getattr(mode, "name", None)


def _around_inputs(stock: StockFunction, activity: Activity, *, indices: _OldIndices) -> StockFunction:
    """Wrap the name `prepare_eagle_inputs` of the nightlies: the token indices beyond the batch's requests become 0.

    Raises ValueError if a known parameter is missing.
    """
    old_indices, corrects = activity.counter(PREFILL_WITH_OLD_INDICES), activity.corrects
    # Releases differ in the order of parameters, not in their names.
    parameters = stock.__code__.co_varnames[: stock.__code__.co_argcount]
    batch_at, indices_at = parameters.index("input_batch"), parameters.index("last_token_indices")

    @functools.wraps(stock)
    def prepare_eagle_inputs(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        try:
            batch = kwargs["input_batch"] if "input_batch" in kwargs else args[batch_at]
            if corrects:
                token_indices = kwargs["last_token_indices"] if "last_token_indices" in kwargs else args[indices_at]
                token_indices[batch.num_reqs :].zero_()
            indices.observe(batch, old_indices)
        except Exception as error:
            activity.failed(error)
        return result

    return prepare_eagle_inputs


def patches(shape: str) -> tuple[Patch, ...]:
    drafts = Patch(_SPECULATOR_MODULE, _DRAFT, _around_drafts)
    if shape == "one-manager":
        init = _no_piecewise_draft_decodes
        return (Patch(_MANAGER_MODULE, "EagleCudaGraphManager.__init__", init, observes=False), drafts)
    mode_too, indices_too, indices = "-mode" in shape, "-indices" in shape, _OldIndices()
    around_init = functools.partial(_around_init, indices=indices, mode_too=mode_too)
    around_inputs = functools.partial(_around_inputs, indices=indices)
    return (
        Patch(_SPECULATOR_MODULE, "EagleSpeculator.init_cudagraph_manager", around_init, observes=indices_too),
        *((drafts,) if mode_too else ()),
        *((Patch(_SPECULATOR_MODULE, "prepare_eagle_inputs", around_inputs),) if indices_too else ()),
    )


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    return (
        needs.RUNNER_V2,
        Need(
            "eagle, eagle3 or mtp",
            _drafts_with_decodes,
            "more than one draft token",
            clause="drafts come from eagle, eagle3 or mtp",
        ),
        Need(
            "piecewise decodes",
            _graphs,
            "in nightlies between 0.17.1 and 0.18.0 decodes in any graphs",
            clause="decodes run in piecewise graphs",
        ),
    )


def _drafts_with_decodes(deployment: Deployment, shape: str) -> Fact:
    # The first token of a draft is a prefill's.
    return deployment.speculator("eagle", "eagle3", "mtp", several="-indices" not in shape and bool(shape))


def _graphs(deployment: Deployment, shape: str) -> Fact:
    from vllm_graphfix.deployment import any_of

    mode, indices = shape != "two-managers-indices", "-indices" in shape or not shape
    # A captured prefill gathers with stale indices in any mode.
    return any_of(*([deployment.piecewise_decodes()] if mode else []), *([deployment.graphs()] if indices else []))


FIX = fix(
    "draft-decode-mode",
    runner="V2",
    diagnose=diagnose,
    surroundings=(
        Slice(_PACKAGE, "init_speculator", "cudagraph_manager", Verdict.ABSENT),
        Slice(_FIRST_MANAGER, f"{_CLASS}.__init__", "cudagraph_mode cudagraph_sizes", Verdict.FIXED),
        Slice(_UTILS, "get_cudagraph_sizes", "cudagraph_mode"),
        # The choice of a mode, and every other use of it and of the manager that gets it
        Slice(_SPECULATOR, "EagleSpeculator.__init__", "cudagraph_mode cudagraph_manager"),
        *(
            Slice(path, f"{name}.init_cudagraph_manager", "cudagraph_mode decode_cudagraph_manager")
            for path, name, _ in _SPECULATORS
        ),
        # The attributes of the manager of 0.17.x
        Slice(_MANAGER, f"{_CLASS}.__init__", "cudagraph_mode cudagraph_size cudagraph_sizes"),
        *(
            Slice(_MANAGER, f"{_CLASS}.{name}", "cudagraph_mode cudagraph_size cudagraph_sizes", Verdict.AFFECTED)
            for name in ("get_cudagraph_runtime_mode", "get_cudagraph_size", "capture")
        ),
        # The mode of the drafts, which dispatch returns
        Slice(
            _SPECULATOR,
            "EagleSpeculator.propose",
            "cudagraph_mode cudagraph_size cudagraph_manager decode_cudagraph_manager decode_batch_desc generate_draft "
            "last_token_indices",
            Verdict.AFFECTED,
        ),
        Slice(_SPECULATOR, _DRAFT, "num_reqs num_tokens_padded attn_metadata cudagraph_runtime_mode", Verdict.AFFECTED),
        # The token indices: the kernel, and its buffer
        *(Slice(path, kernel, "last_token_indices_ptr", Verdict.FIXED) for path, _, kernel in _SPECULATORS),
        *(
            Slice(path, kernel.removeprefix("_").removesuffix("_kernel"), "input_batch last_token_indices max_num_reqs")
            for path, _, kernel in _SPECULATORS
        ),
        *(Slice(path, f"{name}.propose", "last_token_indices", Verdict.FIXED) for path, name, _ in _SPECULATORS[1:]),
    ),
    recognised=(_NO_PIECEWISE_SIZES, _CHOSEN, _MODE_TAKEN, _MADE, *_DECODES_MADE, *_PREFILLS_MADE, _POOL),
    corrections=patches,
    modules=(_MANAGER_MODULE, _SPECULATOR_MODULE),
    events=(DECODE_PADDED_IN_PIECEWISE, PREFILL_WITH_OLD_INDICES),
    needs=needs,
    default_rationale="upstream",
)
