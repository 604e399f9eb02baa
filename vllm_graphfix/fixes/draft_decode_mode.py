"""`draft-decode-mode`: draft decodes run in full graphs or none, and no stale index is gathered with (PR 39773)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Diagnosis, Fix, Patch, StockFunction, Verdict

if TYPE_CHECKING:
    from vllm_graphfix.source import Source
    from vllm_graphfix.syntax import Function

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
_MANAGER_MODULE = "vllm.v1.worker.gpu.spec_decode.eagle.cudagraph"
_SPECULATOR_MODULE = "vllm.v1.worker.gpu.spec_decode.eagle.speculator"

_DECODE_ONLY = "cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY"


def diagnose(source: Source) -> Diagnosis:
    if source.function(_FIRST_MANAGER, "EagleCudaGraphManager") is not None:
        sizes = source.function(_UTILS, "get_cudagraph_sizes")
        if sizes is not None and sizes.find("not cudagraph_mode.has_full_cudagraphs()"):
            return Diagnosis(Verdict.FIXED, "draft decodes have full graphs or none", sizes.where)
        return Diagnosis(
            Verdict.UNRECOGNISED,
            "draft decodes choose their mode in a way that nobody has looked at",
            f"{_FIRST_MANAGER}:1",
        )
    for path, name, kernel_name in _SPECULATORS:
        two_managers = source.function(path, f"{name}.init_cudagraph_manager")
        if two_managers is not None:
            return _two_managers(source, two_managers, source.function(path, kernel_name))
    init = source.function(_SPECULATOR, "EagleSpeculator.__init__")
    manager = source.function(_MANAGER, "EagleCudaGraphManager.__init__")
    if init is None and manager is None:
        if source.function(_PACKAGE, "init_speculator") is None:
            return Diagnosis(Verdict.ABSENT, "no draft decodes on model runner V2")
        return Diagnosis(Verdict.UNRECOGNISED, "speculators are where nobody has looked for them", f"{_PACKAGE}:1")
    if init is not None and (chosen := init.find(_DECODE_ONLY)):
        return Diagnosis(Verdict.FIXED, "draft decodes have full graphs or none", init.at(chosen[0]))
    if manager is not None:
        taken = manager.find("self.cudagraph_mode = self.compilation_config.cudagraph_mode.decode_mode()")
        if len(taken) == 1:
            return Diagnosis(
                Verdict.AFFECTED,
                "draft decodes take the configured decode mode as it is, PIECEWISE included",
                manager.at(taken[0]),
                "one-manager",
            )
    return Diagnosis(
        Verdict.UNRECOGNISED,
        "draft decodes choose their mode in a way that nobody has looked at",
        manager.where if manager else f"{_SPECULATOR}:1",
    )


def _two_managers(source: Source, init: Function, kernel: Function | None) -> Diagnosis:
    """0.20.0 and later, and the nightlies between PR 37588 and PR 39773."""
    chosen = init.find(_DECODE_ONLY)
    if kernel is None or not kernel.find("tl.store(last_token_indices_ptr + req_idx, ...)"):
        return Diagnosis(
            Verdict.UNRECOGNISED, "last_token_indices are written in a way that nobody has looked at", init.where
        )
    filled = kernel.find("tl.store(last_token_indices_ptr + block, 0, mask=mask)")
    if chosen and filled:
        return Diagnosis(
            Verdict.FIXED, "draft decodes have full graphs or none, and stale indices are zeroed", init.at(chosen[0])
        )
    # Patches are written for Eagle's own managers; a later speculator without the remedy is a shape of its own.
    if init.qualname != "EagleSpeculator.init_cudagraph_manager" or not init.find(
        "self.decode_cudagraph_manager.pool = ..."
    ):
        return Diagnosis(
            Verdict.UNRECOGNISED, "draft decodes choose their mode in a way that nobody has looked at", init.where
        )
    prepare = source.function(init.path, "prepare_eagle_inputs")
    if not filled and (prepare is None or not {"input_batch", "last_token_indices"} <= set(prepare.parameters)):
        return Diagnosis(
            Verdict.UNRECOGNISED, "last_token_indices are filled in a way that nobody has looked at", init.where
        )
    missing = [
        *(() if chosen else ("draft decodes get the configured mode, PIECEWISE included",)),
        *(() if filled else ("last_token_indices keep old values beyond the batch",)),
    ]
    shape = "two-managers" + ("" if chosen else "-mode") + ("" if filled else "-indices")
    return Diagnosis(Verdict.AFFECTED, "; ".join(missing), (kernel if chosen else init).where, shape)


def _no_piecewise_draft_decodes(stock: StockFunction) -> StockFunction:
    """Around `EagleCudaGraphManager.__init__`, 0.17.x, which captures draft decodes only.

    Its mode is one that runs, FULL or PIECEWISE; FULL_DECODE_ONLY, a pair of modes, means FULL here.
    """

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if self.cudagraph_mode.name != "FULL":
            self.cudagraph_mode = type(self.cudagraph_mode).NONE
            self.cudagraph_sizes = {}
            self.pool = None

    return init


def _decode_manager_of_its_own_mode(stock: StockFunction) -> StockFunction:
    """Around `EagleSpeculator.init_cudagraph_manager` of the nightlies: the decode manager is made anew with the right mode."""

    @functools.wraps(stock)
    def init_cudagraph_manager(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        manager = self.decode_cudagraph_manager
        modes = type(manager.cudagraph_mode)
        wanted = modes.FULL_DECODE_ONLY if manager.cudagraph_mode.decode_mode() == modes.FULL else modes.NONE
        if manager.cudagraph_mode != wanted:
            replacement = type(manager)(self.vllm_config, self.device, wanted, manager.decode_query_len)
            replacement.pool = self.prefill_cudagraph_manager.pool
            self.decode_cudagraph_manager = replacement
        return result

    return init_cudagraph_manager


def _zero_stale_indices(stock: StockFunction) -> StockFunction:
    """Around the name `prepare_eagle_inputs` of the nightlies. Raises ValueError if it takes other arguments than known."""
    # Their order has changed between releases, their names have not.
    parameters = stock.__code__.co_varnames[: stock.__code__.co_argcount]
    batch_at, indices_at = parameters.index("input_batch"), parameters.index("last_token_indices")

    @functools.wraps(stock)
    def prepare_eagle_inputs(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        batch = kwargs["input_batch"] if "input_batch" in kwargs else args[batch_at]
        indices = kwargs["last_token_indices"] if "last_token_indices" in kwargs else args[indices_at]
        indices[batch.num_reqs :].zero_()
        return result

    return prepare_eagle_inputs


def patches(shape: str) -> tuple[Patch, ...]:
    if shape == "one-manager":
        return (Patch(_MANAGER_MODULE, "EagleCudaGraphManager.__init__", _no_piecewise_draft_decodes),)
    wanted = []
    if "-mode" in shape:
        wanted.append(
            Patch(_SPECULATOR_MODULE, "EagleSpeculator.init_cudagraph_manager", _decode_manager_of_its_own_mode)
        )
    if "-indices" in shape:
        wanted.append(Patch(_SPECULATOR_MODULE, "prepare_eagle_inputs", _zero_stale_indices))
    return tuple(wanted)


FIX = Fix(
    name="draft-decode-mode",
    pr=39773,
    references=("PR 37588",),
    summary="draft decodes run in full graphs or none, never piecewise",
    releases="0.17.0 - 0.17.1, and nightlies between PR 37588 and PR 39773",
    symptom="With FlashInfer and Eagle on model runner V2: RuntimeError about 'PrefillSplitQOKVIndptr', kv_indptr should be non-negative; "
    "or reads out of range while drafting.",
    cause="Draft decodes may run in PIECEWISE mode, which pads the tokens but not the requests; attention backends then read past "
    "the metadata that is valid. In the nightlies a captured draft prefill also gathers with indices left over from an earlier, larger batch.",
    remedy="Draft decodes use full graphs where the configured decode mode is FULL, and none otherwise; in the nightlies draft prefill keeps "
    "the configured mode, both share one graph pool, and indices beyond the batch are zeroed.",
    detect="The engine stops with the message above while drafting; it does not with --enforce-eager.",
    concerns="VLLM_USE_V2_MODEL_RUNNER=1, --speculative-config with eagle or eagle3, a cudagraph mode whose decode mode is PIECEWISE.",
    workaround='--compilation-config \'{"cudagraph_mode": "FULL_DECODE_ONLY"}\', or serving without speculative decoding.',
    removable="with vLLM 0.18.0",
    runner="V2",
    reads=(_FIRST_MANAGER, _MANAGER, _UTILS, _PACKAGE, *(path for path, _, _ in _SPECULATORS)),
    modules=(_MANAGER_MODULE, _SPECULATOR_MODULE),
    diagnose=diagnose,
    patches=patches,
)
