"""`draft-decode-mode`: draft decodes run in full graphs or none, and no stale index is gathered with (PR 39773)."""

from __future__ import annotations

import ast
import functools
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Counter, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import About

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

_CHOSEN = """
if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
    cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
else:
    cudagraph_mode = CUDAGraphMode.NONE
"""
"""Upstream's correction."""
_USES = {
    "get_cudagraph_runtime_mode": (
        "cudagraph_mode = self.cudagraph_mode",
        "cudagraph_size = self.get_cudagraph_size(num_tokens)",
    ),
    "get_cudagraph_size": ("return self.cudagraph_sizes.get(num_tokens)",),
    "capture": ("if self.cudagraph_mode == CUDAGraphMode.NONE: return",),
}
_DRAFT = "EagleSpeculator.generate_draft"
_DRAFT_PARAMETERS = (
    "self, num_reqs, num_tokens_padded, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode"
)

_POOL_GIVEN = "self.decode_cudagraph_manager.pool = ..."
_CONFIGURED = ("self.vllm_config.compilation_config.cudagraph_mode", "vllm_config.compilation_config.cudagraph_mode")
_MODES = ("cudagraph_mode", "decode_batch_desc")
"""In whose name `propose` has what dispatch says: a mode, or a descriptor."""
_DISPATCHED = (
    "cudagraph_mode, cudagraph_size = self.cudagraph_manager.get_cudagraph_runtime_mode(num_reqs)",
    "get_cudagraph_and_dp_padding(num_reqs, cudagraph_size, cudagraph_mode.value, *...)",
    "cudagraph_mode = CUDAGraphMode(synced_cudagraph_mode)",
    "cudagraph_mode == CUDAGraphMode.FULL",
    "self.generate_draft(num_reqs, num_tokens_padded, *..., cudagraph_runtime_mode=cudagraph_mode)",
)
_DISPATCHED_BY_TWO = (
    (
        "decode_batch_desc, num_tokens_across_dp = dispatch_cg_and_sync_dp(self.decode_cudagraph_manager, num_reqs, "
        "num_reqs, *...)"
    ),
    "decode_batch_desc.cg_mode == CUDAGraphMode.FULL",
    "decode_batch_desc.num_reqs or num_reqs",
    "self.block_tables.compute_slot_mappings(..., ..., ..., decode_batch_desc.num_tokens)",
    (
        "self._build_draft_attn_metadata(*..., num_reqs_padded=decode_batch_desc.num_reqs or num_reqs, "
        "num_tokens_padded=decode_batch_desc.num_tokens)"
    ),
    "self.decode_cudagraph_manager.run_fullgraph(decode_batch_desc)",
    (
        "self.generate_draft(num_reqs, decode_batch_desc.num_tokens, *..., "
        "cudagraph_runtime_mode=decode_batch_desc.cg_mode)"
    ),
)

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
    if source.function(_FIRST_MANAGER, "EagleCudaGraphManager") is not None:
        sizes = source.function(_UTILS, "get_cudagraph_sizes")
        if sizes is not None and sizes.find("if not cudagraph_mode.has_full_cudagraphs(): return {}"):
            return Diagnosis(Verdict.FIXED, "draft decodes have full graphs or none", sizes.where)
        return Diagnosis.unrecognised("draft decodes choose their mode in a way", _FIRST_MANAGER)
    for path, name, kernel_name in _SPECULATORS:
        two_managers = source.function(path, f"{name}.init_cudagraph_manager")
        if two_managers is not None:
            return _two_managers(source, two_managers, source.function(path, kernel_name))
    init = source.function(_SPECULATOR, "EagleSpeculator.__init__")
    manager = source.function(_MANAGER, "EagleCudaGraphManager.__init__")
    if init is None and manager is None:
        if source.function(_PACKAGE, "init_speculator") is None:
            return Diagnosis(Verdict.ABSENT, "no draft decodes on model runner V2")
        return Diagnosis.unrecognised("speculators are in a place", _PACKAGE)
    if init is not None and (chosen := _mode_for_decodes(init, "cudagraph_manager")):
        return Diagnosis(Verdict.FIXED, "draft decodes have full graphs or none", init.at(chosen))
    if manager is not None:
        taken = manager.only("self.cudagraph_mode = ...")
        as_configured = manager.find("self.cudagraph_mode = self.compilation_config.cudagraph_mode.decode_mode()")
        if taken and as_configured and _uses_as_known(source) and _drafts_as_known(source, _SPECULATOR, _DISPATCHED):
            return Diagnosis(
                Verdict.AFFECTED,
                "draft decodes take the configured decode mode as it is, PIECEWISE included",
                manager.at(taken),
                "one-manager",
            )
    return Diagnosis.unrecognised("draft decodes choose their mode in a way", manager or _SPECULATOR)


def _two_managers(source: Source, init: Function, kernel: Function | None) -> Diagnosis:
    """0.20.0 and later, and the nightlies between PR 37588 and PR 39773."""
    speculator = source.function(init.path, init.qualname.partition(".")[0])
    chosen = _mode_for_decodes(init, "decode_cudagraph_manager")
    if kernel is None or not kernel.find("tl.store(last_token_indices_ptr + req_idx, ...)"):
        return Diagnosis.unrecognised("last_token_indices are written in a way", init)
    # One manager of the decodes, which is left as it is.
    if (
        speculator is None
        or len(speculator.find("self.decode_cudagraph_manager = ...")) != 1
        or not init.confines("decode_cudagraph_manager", "self.decode_cudagraph_manager = ...", _POOL_GIVEN)
    ):
        return Diagnosis.unrecognised("draft decodes get their manager in a way", init)
    filled = _zero_filled(kernel)
    if filled and not _covers_all(source, speculator, kernel):
        return Diagnosis.unrecognised("last_token_indices are filled in a way", kernel)
    if chosen and filled:
        return Diagnosis(
            Verdict.FIXED, "draft decodes have full graphs or none, and stale indices are zeroed", init.at(chosen)
        )
    # Patches are written for Eagle's own managers; a later speculator without the remedy is a shape of its own.
    if init.qualname != "EagleSpeculator.init_cudagraph_manager" or not init.find(_POOL_GIVEN):
        return Diagnosis.unrecognised("draft decodes choose their mode in a way", init)
    as_configured = _mode_argument(init, "decode_cudagraph_manager") in _CONFIGURED or (
        _mode_argument(init, "decode_cudagraph_manager") == "cudagraph_mode"
        and not init.find("CUDAGraphMode.FULL_DECODE_ONLY")
    )
    if (not chosen and not as_configured) or (not filled and not kernel.mentions(last_token_indices_ptr=1)):
        return Diagnosis.unrecognised("draft decodes are handled in a way", init)
    prepare = source.function(init.path, "prepare_eagle_inputs")
    if not filled and (
        prepare is None
        or not {"input_batch", "last_token_indices"} <= set(prepare.parameters)
        or not _indices_as_known(source, init.path)
    ):
        return Diagnosis.unrecognised("last_token_indices are filled in a way", init)
    if not chosen and not _drafts_as_known(source, init.path, _DISPATCHED_BY_TWO):
        return Diagnosis.unrecognised("draft decodes are generated in a way", init)
    missing = [
        *(() if chosen else ("draft decodes get the configured mode, PIECEWISE included",)),
        *(() if filled else ("last_token_indices keep old values beyond the batch",)),
    ]
    shape = "two-managers" + ("" if chosen else "-mode") + ("" if filled else "-indices")
    return Diagnosis(Verdict.AFFECTED, "; ".join(missing), (kernel if chosen else init).where, shape)


def _mode_for_decodes(init: Function, manager: str) -> Any:
    """The statement that chooses the mode of the draft decodes.

    Their *manager*, which is made later in the same block, is given that mode.
    """
    parts = init.each(_CHOSEN, f"self.{manager} = ...")
    if not parts or not init.in_one_block(*parts) or _mode_argument(init, manager) != "cudagraph_mode":
        return None
    chosen, _ = parts
    after = [found for found in init.assignments("cudagraph_mode", "...") if found.lineno > chosen.lineno]
    return chosen if len(after) == 2 else None  # those of the choice


def _mode_argument(init: Function, manager: str) -> str:
    """What the manager of the draft decodes is given for a mode, as written."""
    call = getattr(init.only(f"self.{manager} = ..."), "value", None)
    given = {keyword.arg: keyword.value for keyword in getattr(call, "keywords", [])}
    given |= dict(zip(("vllm_config", "device", "cudagraph_mode"), getattr(call, "args", []), strict=False))
    return ast.unparse(given["cudagraph_mode"]) if "cudagraph_mode" in given else ""


def _zero_filled(kernel: Function) -> bool:
    """Whether the last program of a launch, or each, zeroes the indices from the batch's end to the buffer's."""
    stored = kernel.only("tl.store(last_token_indices_ptr + block, 0, mask=mask)")
    lines = kernel.find("block = i + tl.arange(0, BLOCK_SIZE)") + kernel.find("mask = block < max_num_reqs")
    for loop in kernel.loops_over("range(num_reqs, max_num_reqs, BLOCK_SIZE)"):
        here = [line for line in lines if line in loop.body]
        if stored and len(here) == 2 and kernel.in_one_block(*here, stored):
            return True
    return False


def _covers_all(source: Source, speculator: Function, kernel: Function) -> bool:
    """Whether the kernel is launched with the speculator's indices, and told how many there are."""
    name = kernel.qualname.removeprefix("_").removesuffix("_kernel")
    prepare = source.function(kernel.path, name)
    return (
        prepare is not None
        and not any(map(prepare.sets, ("last_token_indices", "max_num_reqs")))
        and {"last_token_indices", "max_num_reqs"} <= prepare.arguments(f"{kernel.qualname}[...](*...)")
        and {"self.last_token_indices", "self.max_num_reqs"} <= speculator.arguments(f"{name}(*...)")
    )


def _uses_as_known(source: Source) -> bool:
    """Whether 0.17.x's manager goes by the attributes that the patch sets, and by no copies of them."""
    methods = {name: source.function(_MANAGER, f"{_CLASS}.{name}") for name in _USES}
    return all(
        method and all(map(method.find, _USES[name])) for name, method in methods.items()
    ) and _dispatches_as_known(methods["get_cudagraph_runtime_mode"])


def _dispatches_as_known(method: Function | None) -> bool:
    """Whether what 0.17.x's manager says is its mode, or none."""
    return method is not None and method.confines(
        "cudagraph_mode",
        "cudagraph_mode = self.cudagraph_mode",
        "cudagraph_mode = CUDAGraphMode.NONE",
        "cudagraph_mode == CUDAGraphMode.FULL",
        "return cudagraph_mode, cudagraph_size",
    )


def _drafts_as_known(source: Source, path: str, dispatched: tuple[str, ...]) -> bool:
    """Whether drafts are generated as the patches know it, in the mode that dispatch says."""
    draft, propose = source.function(path, _DRAFT), source.function(path, "EagleSpeculator.propose")
    return (
        draft is not None
        and draft.takes == _DRAFT_PARAMETERS
        and propose is not None
        and len(propose.find("self.generate_draft(*...)")) == len(propose.find(dispatched[-1])) == 1
        and any(propose.names(name) and propose.confines(name, *dispatched) for name in _MODES)
        and propose.confines("generate_draft", "self.generate_draft(*...)")
    )


def _indices_as_known(source: Source, path: str) -> bool:
    """Whether a draft hands its indices to `prepare_eagle_inputs`, and does nothing else with them."""
    propose = source.function(path, "EagleSpeculator.propose")
    call = propose and propose.only("prepare_eagle_inputs(*...)")
    return propose is not None and call is not None and propose.confines("last_token_indices", ast.unparse(call))


def _no_piecewise_draft_decodes(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `EagleCudaGraphManager.__init__`, 0.17.x: draft decodes, which alone it captures, have full graphs or none.

    Its mode is one that runs, FULL or PIECEWISE; FULL_DECODE_ONLY, a pair of modes, means FULL here.
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
    """Tracks how far stock's `last_token_indices` hold old values, by what the host knows.

    That is the largest batch since all of them were zeroed.
    """

    def __init__(self) -> None:
        self._speculator: Any = None
        self._rows = 0

    def belong_to(self, speculator: Any) -> None:
        """A worker has one. The indices are zeroed after this, before the first graph is captured. Never raises."""
        with suppress(TypeError):  # not vLLM's, and without weak references
            self._speculator, self._rows = weakref.ref(speculator), 0

    def look(self, batch: Any, old_indices: Counter) -> None:
        """Counts *batch* if stock's indices have old values beyond its requests."""
        speculator = self._speculator and self._speculator()
        if speculator is not None and speculator.prefill_cudagraph_manager.graphs:
            if batch.num_reqs < self._rows:
                old_indices.count += 1
            self._rows = max(self._rows, batch.num_reqs)


def _around_init(stock: StockFunction, activity: Activity, *, indices: _OldIndices, mode_too: bool) -> StockFunction:
    """Wraps `EagleSpeculator.init_cudagraph_manager` of the nightlies: *indices* belong to its speculator.

    With *mode_too* the decode manager is made anew.
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
    """A function for how many tokens stock's decode manager would run a number of requests with.

    That is the number of tokens of a piecewise graph, or else the number of requests itself. The stock manager
    captures nothing and holds no graph: its dispatch alone is used.
    """

    def stock_tokens(num_reqs: int) -> int:
        stock_manager._graphs_captured = replacement._graphs_captured
        found = stock_manager.dispatch(num_reqs, num_reqs, 1)
        return int(found.num_tokens) if found.cg_mode.name == "PIECEWISE" else num_reqs

    return stock_tokens


def _around_drafts(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `EagleSpeculator.generate_draft` without changing anything.

    It runs the decodes of a draft where no full graph does.
    """
    padded_decodes = activity.counter(DECODE_PADDED_IN_PIECEWISE)

    @functools.wraps(stock)
    def generate_draft(
        self: Any, num_reqs: Any, num_tokens_padded: Any, attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            if attn_metadata is not None:  # a dummy run goes without attention
                manager = getattr(self, "decode_cudagraph_manager", None) or self.cudagraph_manager
                stock_tokens = getattr(manager, "graphfix_stock_tokens", None)
                if stock_tokens is not None:  # the fix is active on this manager: these decodes run in no graph
                    tokens = stock_tokens(num_reqs)
                elif _mode_name(args, kwargs) == "PIECEWISE" and getattr(manager, "_graphs_captured", True):
                    tokens = num_tokens_padded  # while the nightlies capture, the metadata are those of all the tokens
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
    """Wraps the name `prepare_eagle_inputs` of the nightlies: the token indices beyond the batch's requests are 0.

    Raises ValueError if it takes other arguments than known.
    """
    old_indices, corrects = activity.counter(PREFILL_WITH_OLD_INDICES), activity.corrects
    # Their order has changed between releases, their names have not.
    parameters = stock.__code__.co_varnames[: stock.__code__.co_argcount]
    batch_at, indices_at = parameters.index("input_batch"), parameters.index("last_token_indices")

    @functools.wraps(stock)
    def prepare_eagle_inputs(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        try:
            batch = kwargs["input_batch"] if "input_batch" in kwargs else args[batch_at]
            if corrects:
                given = kwargs["last_token_indices"] if "last_token_indices" in kwargs else args[indices_at]
                given[batch.num_reqs :].zero_()
            indices.look(batch, old_indices)
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
        Need("eagle, eagle3 or mtp", _drafts_with_decodes, "more than one draft token"),
        Need("piecewise decodes", _graphs, "in nightlies between 0.17.1 and 0.18.0 decodes in any graphs"),
    )


def _drafts_with_decodes(deployment: Deployment, shape: str) -> Fact:
    # Decodes of a draft are its tokens after the first.
    return deployment.speculator("eagle", "eagle3", "mtp", several="-indices" not in shape and bool(shape))


def _graphs(deployment: Deployment, shape: str) -> Fact:
    from vllm_graphfix.deployment import any_of

    mode, indices = shape != "two-managers-indices", "-indices" in shape or not shape
    # A draft's prefill gathers with old indices wherever it is captured.
    return any_of(*([deployment.piecewise_decodes()] if mode else []), *([deployment.graphs()] if indices else []))


FIX = Fix(
    number=3,
    name="draft-decode-mode",
    runner="V2",
    reads=(_FIRST_MANAGER, _MANAGER, _UTILS, _PACKAGE, *(path for path, _, _ in _SPECULATORS)),
    modules=(_MANAGER_MODULE, _SPECULATOR_MODULE),
    diagnose=diagnose,
    patches=patches,
    events=(DECODE_PADDED_IN_PIECEWISE, PREFILL_WITH_OLD_INDICES),
    needs=needs,
    ground="upstream",
    evidence=(f"{_UTILS}::get_cudagraph_sizes",),
)

ABOUT = About(
    pr=39773,
    references=("PR 37588",),
    summary="draft decodes run in full graphs or none, never piecewise",
    releases="0.17.0 - 0.17.1, and nightlies between PR 37588 and PR 39773",
    seen="`kv_indptr … should be non-negative` while drafting, or out-of-range reads",
    first_test="`--enforce-eager`: gone?",
    symptom="With FlashInfer and Eagle on model runner V2: RuntimeError about 'PrefillSplitQOKVIndptr', kv_indptr "
    "should be non-negative; or out-of-range reads while drafting.",
    cause="Draft decodes may run in PIECEWISE mode, which pads the tokens but not the requests; attention backends "
    "then read past the valid metadata. In the nightlies a captured draft prefill also gathers with indices left over "
    "from an earlier, larger batch.",
    remedy="Draft decodes use full graphs where the configured decode mode is FULL, and none otherwise; in the "
    "nightlies draft prefill keeps the configured mode, both share one graph pool, and indices beyond the batch are "
    "zeroed.",
    detect="The engine stops with the message above while drafting; it does not with --enforce-eager.",
    workaround='--compilation-config \'{"cudagraph_mode": "FULL_DECODE_ONLY"}\', or serving without speculative '
    "decoding.",
    removable="with vLLM 0.18.0",
    in_caches="wrong entries of the drafter's own layers, if the connector stores those. The crash ends the engine "
    "while other requests are being written",
    how_sure="whether padded rows were written anywhere is not known; it was never observed",
)
