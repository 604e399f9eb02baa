"""`draft-idx-mapping`: padded rows of a draft graph do not write to a request's draft logits (PR 47066)."""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction, Verdict
from vllm_graphfix.source.patterns import matches_any

if TYPE_CHECKING:
    import torch

    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_FOLDER = "vllm/v1/worker/gpu/spec_decode"
_PACKAGE = "vllm.v1.worker.gpu.spec_decode"
_EAGLE, _BASE = f"{_FOLDER}/eagle/speculator.py", f"{_FOLDER}/speculator.py"
_EAGLE_MODULE, _BASE_MODULE = f"{_PACKAGE}.eagle.speculator", f"{_PACKAGE}.speculator"
_DFLASH, _DFLASH_MODULE = f"{_FOLDER}/dflash/speculator.py", f"{_PACKAGE}.dflash.speculator"
_PROPOSE = {"autoregressive": "AutoRegressiveSpeculator", "target_dependent_ar": "TargetDependentARSpeculator"}
"""The speculators that fill the buffers in `propose`, by folder, from 0.23.0 on."""
_INHERIT = {
    "mtp": "MTPSpeculator",
    "gemma4": "Gemma4Speculator",
    "eagle": "EagleSpeculator",
    "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
}
"""Speculators that inherit that from them."""
_GUMBEL = "vllm/v1/worker/gpu/sample/gumbel.py"
_SAMPLERS = ("gumbel_block_argmax", "_gumbel_sample_kernel")
"""The functions that store a row's logits; the first that exists counts."""
_OWNERS = {_BASE: ("DraftModelSpeculator", "_copy_request_inputs"), _EAGLE: ("EagleSpeculator", "propose")}
"""The class with the buffers, and its function that fills them for a batch, by file."""
_MAPPED = (
    "self.idx_mapping[:num_reqs].copy_(idx_mapping)",
    "self.idx_mapping[:num_reqs].copy_(input_batch.idx_mapping)",
    "idx_mapping.copy_(input_batch.idx_mapping)",
)
"""Copies of the rows' requests into the buffer; one of them."""
_PADDED = "self.idx_mapping[num_reqs:].fill_(-1)"
_ALL_PADDED = "self.idx_mapping.fill_(-1)"
"""A dummy run has no requests."""
_IF_SAMPLED = "self.draft_logits is not None"
_READ = tuple(f"req_state_idx = tl.load(expanded_idx_mapping_ptr + token_idx){more}" for more in ("", ".to(tl.int64)"))
_VALID = "is_valid_req = req_state_idx >= 0"
_STORED = tuple(
    f"tl.store({logits}_ptr + req_state_idx * {row} + {column}block, logits, mask=mask"
    for logits, row, column in (
        ("processed_logits", "processed_logits_stride", ""),
        ("processed_logits", "processed_logits_stride", "col * vocab_size + "),
        ("logits_cache", "logits_cache_stride", "col * vocab_size + "),
        ("logits_cache", "logits_cache_stride_0", "col * logits_cache_stride_1 + "),
    )
)
"""Stores of a row's logits at its request; the mask may continue."""
_LOADED = tuple(
    loaded
    for more, other in (("", ""), (", mask=is_valid_req, other=0.0", ", mask=is_valid_req, other=0"))
    for loaded in (
        f"temp = tl.load(temp_ptr + req_state_idx{more}).to(tl.float32)",
        f"seed = tl.load(seeds_ptr + req_state_idx{other})",
    )
)
_OF_DFLASH = "tl.store(out_sample_idx_mapping_ptr + block, {}, mask=mask)"
_SPARE = "_graphfix_spare_row"
"""The attribute with the index of the spare row, of a speculator and of a tensor that it passes to a function."""

ROWS_PADDED_WITH_REQUESTS = Event(
    "rows-padded-with-requests",
    "Drafts were sampled in a graph with more rows than requests: on stock a padded row writes its logits to the "
    "request that it stood for before.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the requests of padded rows, and if logits are stored for such rows."""
    path = next(
        (path for path, (owner, _) in _OWNERS.items() if source.contains_word(path, "draft_logits", of=owner)), None
    )
    if path is None:
        return Diagnosis.absent("no speculator keeps the logits of its drafts by request")
    owner, copying = _OWNERS[path]
    copy = source.function(path, f"{owner}.{copying}")
    kernel = next(filter(None, (source.function(_GUMBEL, name) for name in _SAMPLERS)), None)
    if copy is not None and kernel is not None:
        padded = copy.find_unique(_PADDED)
        unsampled = _leaves_rows_out(kernel) and _samples_as_mapped(source, path) and _pads_dflash(source, path, -1)
        if padded and _is_done_if_sampled(copy, padded) and unsampled:
            return Diagnosis.fixed("padded rows have no request, and are not sampled", copy.at(padded))
        mapped = copy.find(*_MAPPED)
        every_row = any(kernel.find_unique(f"{stored})") for stored in _STORED) and not kernel.contains_name(
            "is_valid_req"
        )
        if len(mapped) == 1 and not padded and every_row and _pads_dflash(source, path, 0):
            dflash = source.contains_word(_DFLASH, "sample_idx_mapping")
            return Diagnosis.affected(
                "padded rows of a draft graph still stand for requests of an earlier batch",
                copy.at(mapped[0]),
                "eagle" if path == _EAGLE else "all-but-dflash" if not dflash else "all",
            )
    return Diagnosis.unrecognised("drafts are sampled in a way", copy or path)


def _is_done_if_sampled(copy: Function, padded: ast.stmt | ast.expr) -> bool:
    """Tell if *padded* runs in each step that stores logits of drafts, unless all rows become -1."""
    blocks = [copy.node.body]
    for each in copy.node.body:
        if isinstance(each, ast.If) and matches_any(each.test, [_IF_SAMPLED]):
            blocks.append(each.body)
        elif isinstance(each, ast.If) and len(each.body) == 1 and matches_any(each.body[0], [_ALL_PADDED]):
            blocks.append(each.orelse)
    return any(getattr(statement, "value", None) is padded for block in blocks for statement in block)


def _leaves_rows_out(kernel: Function) -> bool:
    """Tell if nothing is stored for a row whose request is below 0."""
    return bool(
        any(map(kernel.find_unique, _READ))
        and kernel.find_unique(_VALID)
        and kernel.call_has_keyword("tl.store(...)", "mask=mask & is_valid_req")
    )


def _samples_as_mapped(source: Source, path: str) -> bool:
    """Tell if the kernel gets the rows' requests unchanged, or the speculator is the first Eagle's."""
    sample = source.function(_BASE, "DraftModelSpeculator.sample_draft")
    if path == _EAGLE or sample is None:
        return path == _EAGLE
    handed = sample.arguments("gumbel_sample(...)") | sample.arguments("sampler(...)")
    return "idx_mapping" in handed and not sample.reassigns("idx_mapping")


def _pads_dflash(source: Source, path: str, request: int) -> bool:
    """Tell if DFlash pads its samples with *request*; without a buffer of its own it pads as others do."""
    if not source.contains_word(_DFLASH, "sample_idx_mapping"):
        return path == _EAGLE or request == 0
    kernel = source.function(_DFLASH, "_prepare_dflash_inputs_kernel")
    return kernel is not None and kernel.find_unique(_OF_DFLASH.format(request)) is not None


def _with_a_spare_row(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap the speculator's `__init__`: buffers that are indexed by request get a spare row behind their visible end.

    This happens before any capture, so graphs record the new addresses. Only kernels access the spare row: the shapes
    are stock's.
    """

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - the name of what it wraps
        stock(self, *args, **kwargs)
        try:
            foreign = _find_foreign(self)
            if foreign is not None and self.draft_logits is not None:
                # It may index by -1, or have buffers of its own, for which the spare row is out of bounds.
                activity.step_aside("draft-idx-mapping", foreign)
            elif self.draft_logits is not None:
                logits, temperature, seeds = map(_with_one_row_more, (self.draft_logits, self.temperature, self.seeds))
                self.draft_logits, self.temperature, self.seeds = logits, temperature, seeds
                setattr(self, _SPARE, len(logits))
        except Exception as error:
            activity.failed(error)

    return __init__


def _find_foreign(speculator: Any) -> str | None:
    """Name the first foreign class of *speculator*, up to the one with the buffers."""
    for kind in type(speculator).__mro__:
        if kind.__module__.split(".")[0] != "vllm":
            return f"{kind.__module__}.{kind.__qualname__}"
        if kind.__name__ in ("DraftModelSpeculator", "EagleSpeculator"):
            break
    return None


def _with_one_row_more(fresh: torch.Tensor) -> torch.Tensor:
    """Return a copy of *fresh* that is followed by a row of zeros in memory."""
    more = fresh.new_zeros((len(fresh) + 1, *fresh.shape[1:]))
    more[:-1].copy_(fresh)
    return more[:-1]


def _pad_rows(speculator: Any, first: int, *, corrects: bool) -> bool:
    """Tell if *speculator* stores logits and, if *corrects*, set its rows from *first* on to the spare row."""
    if not corrects:
        return speculator.draft_logits is not None
    spare = getattr(speculator, _SPARE, None)
    if spare is None:
        return False
    from torch import inference_mode  # the target is imported by now, and torch with it

    with inference_mode():
        speculator.idx_mapping[first:].fill_(spare)
    if hasattr(speculator, "sample_idx_mapping"):
        # DFlash fills it in a function without access to the speculator: see `_pad_samples`.
        setattr(speculator.sample_idx_mapping, _SPARE, spare)
    return True


def _pad_before(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `propose`: all rows of `idx_mapping`, (max requests,) int32, are set to the spare row before.

    `propose` then writes the requests of the batch's rows.
    """
    padded_rows, corrects = activity.counter(ROWS_PADDED_WITH_REQUESTS), activity.corrects

    @functools.wraps(stock)
    def propose(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if _pad_rows(self, 0, corrects=corrects):
                padded_rows.count += _has_padded_rows(self, input_batch.num_reqs)
        except Exception as error:
            activity.failed(error)
        return stock(self, input_batch, *args, **kwargs)

    return propose


def _pad_behind(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `_copy_request_inputs`, which fills `idx_mapping`: rows behind the batch get the spare row after it."""
    padded_rows, corrects = activity.counter(ROWS_PADDED_WITH_REQUESTS), activity.corrects

    @functools.wraps(stock)
    def _copy_request_inputs(self: Any, num_reqs: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, num_reqs, *args, **kwargs)
        try:
            if _pad_rows(self, num_reqs, corrects=corrects):
                padded_rows.count += _has_padded_rows(self, num_reqs)
        except Exception as error:
            activity.failed(error)
        return result

    return _copy_request_inputs


def _pad_samples(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap DFlash's `prepare_dflash_inputs`: samples behind the batch get the spare row, on stock request 0.

    DFlash's buffer `sample_idx_mapping` is (max requests * draft tokens,) int32.
    """
    import inspect

    from torch import inference_mode

    names = list(inspect.signature(stock).parameters)

    @functools.wraps(stock)
    def prepare_dflash_inputs(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        try:
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            samples, requests = arguments["sample_idx_mapping"], arguments["input_batch"].num_reqs
            spare = getattr(samples, _SPARE, None)
            if spare is not None:
                with inference_mode():
                    samples[requests * arguments["num_speculative_steps"] :].fill_(spare)
        except Exception as error:
            activity.failed(error)
        return result

    return prepare_dflash_inputs


_MANAGERS = ("decode_cudagraph_manager", "query_cudagraph_manager", "cudagraph_manager")
"""Attributes of speculators with the manager of the graphs that sample drafts after the first token, or all drafts."""
_SIZES = "_graphfix_sizes"
"""The attribute of a manager that caches the number of its graphs, their numbers of requests, and the largest."""


def _has_padded_rows(speculator: Any, requests: int) -> bool:
    """Tell if drafts for *requests* run in a full graph that has more rows. Called at every step."""
    for name in _MANAGERS:
        manager = getattr(speculator, name, None)
        if manager is not None:
            break
    else:
        return False
    captured = len(manager.graphs)
    known = getattr(manager, _SIZES, None)
    # Managers never drop graphs: the same number means the same graphs.
    if known is None or known[0] != captured:
        sizes = {descriptor.num_reqs for descriptor in manager.graphs}
        known = captured, sizes, max(sizes, default=0)
        setattr(manager, _SIZES, known)
    return requests < known[2] and requests not in known[1]


def patches(shape: str) -> tuple[Patch, ...]:
    if shape == "eagle":
        return (
            Patch(_EAGLE_MODULE, "EagleSpeculator.__init__", _with_a_spare_row, observes=False),
            Patch(_EAGLE_MODULE, "EagleSpeculator.propose", _pad_before),
        )
    of_all = (
        Patch(_BASE_MODULE, "DraftModelSpeculator.__init__", _with_a_spare_row, observes=False),
        Patch(_BASE_MODULE, "DraftModelSpeculator._copy_request_inputs", _pad_behind),
    )
    of_dflash = Patch(_DFLASH_MODULE, "prepare_dflash_inputs", _pad_samples, observes=False)
    return (*of_all, of_dflash) if shape == "all" else of_all


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need, unseen

    return (
        needs.RUNNER_V2,
        needs.DRAFTS,
        Need(
            "sampled drafts",
            _sampled_drafts,
            '"draft_sample_method": "probabilistic" ("gumbel" in 0.21.0, '
            '"rejection_sample_method": "probabilistic" before)',
            clause="drafts are sampled",
        ),
        unseen("temperatures above 0"),
        needs.FULL_GRAPHS,
    )


def _sampled_drafts(deployment: Deployment, _: str) -> Fact:
    """Tell if drafts are sampled, so that their logits are stored for the rejection sampler."""
    import json

    from vllm_graphfix.deployment import Fact

    value, missing = deployment.value("--speculative-config")
    if missing is not None:
        return Fact(None, missing)
    try:
        config = json.loads(value or "{}")
        methods = [config[key] for key in ("draft_sample_method", "rejection_sample_method") if key in config]
    except (ValueError, TypeError, RecursionError):
        return Fact(None, "a JSON object for --speculative-config")
    for method in methods:
        if method in ("probabilistic", "gumbel"):
            return Fact(True, f"drafts are sampled ({method})")
    return Fact(False, "the likeliest tokens are drafted (draft_sample_method in --speculative-config)")


FIX = fix(
    "draft-idx-mapping",
    runner="V2",
    diagnose=diagnose,
    surroundings=(
        # The requests of rows, and of rows behind the batch
        Slice(_BASE, "DraftModelSpeculator._copy_request_inputs", "return idx_mapping"),
        Slice(_EAGLE, "EagleSpeculator.propose", "idx_mapping"),
        Slice(_DFLASH, "_prepare_dflash_inputs_kernel", "out_sample_idx_mapping_ptr"),
        # The store of logits
        *(Slice(_GUMBEL, sampler, "req_state_idx is_valid_req") for sampler in _SAMPLERS),
        # The buffers with a row for each request, and every other access
        Slice(_BASE, "DraftModelSpeculator", "idx_mapping draft_logits temperature seeds", Verdict.AFFECTED),
        Slice(_EAGLE, "EagleSpeculator", "idx_mapping draft_logits temperature seeds", Verdict.AFFECTED),
        Slice(f"{_FOLDER}/autoregressive/speculator.py", "", "idx_mapping draft_logits", Verdict.AFFECTED),
        *(
            Slice(f"{_FOLDER}/{folder}/speculator.py", f"{name}.propose", "idx_mapping", Verdict.FIXED)
            for folder, name in _PROPOSE.items()
        ),
        # Overrides of mapping and sampling
        *(
            Slice(f"{_FOLDER}/{folder}/speculator.py", f"{name}.{method}")
            for folder, name in (_PROPOSE | _INHERIT).items()
            for method in ("_copy_request_inputs", "sample_draft")
        ),
        *(
            Slice(f"{_FOLDER}/{folder}/speculator.py", f"{name}.propose")
            for folder, name in _INHERIT.items()
            if folder not in ("eagle", "dflash")
        ),
        Slice(
            _DFLASH,
            "DFlashSpeculator.propose",
            "_copy_request_inputs prepare_dflash_inputs sample_idx_mapping",
            Verdict.AFFECTED,
        ),
        Slice(_DFLASH, "prepare_dflash_inputs", "sample_idx_mapping num_speculative_steps", Verdict.AFFECTED),
    ),
    recognised=(
        *_MAPPED,
        _PADDED,
        _ALL_PADDED,
        *_READ,
        _VALID,
        *_LOADED,
        *(f"{stored}{more})" for stored in _STORED for more in ("", " & is_valid_req")),
        *(_OF_DFLASH.format(request) for request in (0, -1)),
    ),
    corrections=patches,
    modules=(_EAGLE_MODULE, _BASE_MODULE, _DFLASH_MODULE),
    events=(ROWS_PADDED_WITH_REQUESTS,),
    needs=needs,
    default_rationale="answers",
)
