"""`draft-idx-mapping`: padded rows of a draft graph write to no request's draft logits (PR 47066)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import About

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
_DRAFTS = f"{_FOLDER}/autoregressive/speculator.py"
_DFLASH, _DFLASH_MODULE = f"{_FOLDER}/dflash/speculator.py", f"{_PACKAGE}.dflash.speculator"
_GRAPHS = "vllm/v1/worker/gpu/cudagraph_utils.py"
_DATA_PARALLEL = "vllm/v1/worker/gpu/dp_utils.py"
_GUMBEL = "vllm/v1/worker/gpu/sample/gumbel.py"
_SAMPLERS = ("gumbel_block_argmax", "_gumbel_sample_kernel")
"""What stores a row's logits; the first that there is."""
_BUFFERS = (
    "self.idx_mapping = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)",
    "self.temperature = torch.zeros(self.max_num_reqs, dtype=torch.float32, device=device)",
    "self.seeds = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)",
    (
        "self.draft_logits = torch.zeros(self.max_num_reqs, self.num_speculative_steps, self.vocab_size, "
        "dtype=torch.float32, device=device)"
    ),
)
_COPIES = ("self.temperature.copy_(temperature)", "self.seeds.copy_(seeds)")
_OWNERS = {_BASE: ("DraftModelSpeculator", "_copy_request_inputs"), _EAGLE: ("EagleSpeculator", "propose")}
"""The class with the buffers, and its function that fills them for a batch; by file."""
_MAPPED = (
    "self.idx_mapping[:num_reqs].copy_(idx_mapping)",
    "self.idx_mapping[:num_reqs].copy_(input_batch.idx_mapping)",
    "idx_mapping.copy_(input_batch.idx_mapping)",
)
"""How the request of each row comes into its buffer; one of them."""
_USES = {_BASE: (2,), _EAGLE: (3, 5)}
"""How often the class names that buffer: to make and to fill it, to draft, and for slots of tokens, of which a padded
row has none."""
_SPARE = "_graphfix_spare_row"
"""The attribute that tells the row which no request has: of a speculator with such a row, and of a tensor that it gives
to a function."""

ROWS_PADDED_WITH_REQUESTS = Event(
    "rows-padded-with-requests",
    "Drafts were sampled in a graph with more rows than requests: on stock a padded row writes its logits to the "
    "request that it stood for before.",
)


def diagnose(source: Source) -> Diagnosis:
    path = next((path for path, (owner, _) in _OWNERS.items() if source.says(path, "draft_logits", of=owner)), None)
    if path is None:
        return Diagnosis(Verdict.ABSENT, "no speculator keeps the logits of its drafts by request")
    owner, copying = _OWNERS[path]
    init, copy = source.function(path, f"{owner}.__init__"), source.function(path, f"{owner}.{copying}")
    kernel = next(filter(None, (source.function(_GUMBEL, name) for name in _SAMPLERS)), None)
    if init is not None and copy is not None and kernel is not None:
        padded = copy.only("self.idx_mapping[num_reqs:].fill_(-1)")
        if padded and _leaves_rows_out(kernel) and not _padding_of_dflash(source, "0"):
            return Diagnosis(Verdict.FIXED, "padded rows have no request, and are not sampled", copy.at(padded))
        mapped = [part for form in _MAPPED for part in copy.find(form)]
        whole, dflash = source.function(path, owner), source.says(_DFLASH, "sample_idx_mapping")
        if (
            len(mapped) == 1
            and whole is not None
            and len(whole.find("self.idx_mapping")) in _USES[path]
            and all(map(init.only, _BUFFERS))
            and all(map(copy.only, _COPIES))
            and _samples_every_row(kernel)
            and (path == _EAGLE or source.function(_DRAFTS, "AutoRegressiveSpeculator"))
            and (not dflash or _padding_of_dflash(source, "0"))
        ):
            return Diagnosis(
                Verdict.AFFECTED,
                "padded rows of a draft graph still stand for requests of an earlier batch",
                copy.at(mapped[0]),
                "eagle" if path == _EAGLE else "all-but-dflash" if not dflash else "all",
            )
    return Diagnosis.unrecognised("drafts are sampled in a way", copy or path)


def _samples_every_row(kernel: Function) -> bool:
    """Whether the logits of each row are stored for the request of that row, which is read once."""
    return bool(
        kernel.only("req_state_idx = tl.load(expanded_idx_mapping_ptr + token_idx)")
        and kernel.only("tl.load(temp_ptr + req_state_idx)")
        and kernel.only("tl.load(seeds_ptr + req_state_idx)")
        and kernel.only("processed_logits_ptr + req_state_idx * processed_logits_stride")
        and kernel.mentions(req_state_idx=4)
    )


def _leaves_rows_out(kernel: Function) -> bool:
    """Whether nothing is stored for a row whose request is below 0."""
    return bool(
        kernel.only("is_valid_req = req_state_idx >= 0") and kernel.gives("tl.store(...)", "mask=mask & is_valid_req")
    )


def _padding_of_dflash(source: Source, request: str) -> bool:
    """Whether DFlash's padded rows are given *request*, in the buffer that its function is handed."""
    kernel = source.function(_DFLASH, "_prepare_dflash_inputs_kernel")
    prepare = source.function(_DFLASH, "prepare_dflash_inputs")
    propose = source.function(_DFLASH, "DFlashSpeculator.propose")
    return bool(
        kernel is not None
        and prepare is not None
        and propose is not None
        and kernel.only(f"tl.store(out_sample_idx_mapping_ptr + block, {request}, mask=mask)")
        and prepare.parameters[6:8] == ("sample_idx_mapping", "input_batch")
        and prepare.parameters[-3] == "num_speculative_steps"
        and propose.in_one_block(*propose.each("self._copy_request_inputs(...)", "prepare_dflash_inputs(...)"))
        and propose.only("self.sample_idx_mapping")
    )


def _with_a_spare_row(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps the speculator's `__init__`: what is looked up by request has one row more than its length tells.

    Before any graph is captured, so that it records the new addresses. The row behind the last request's is read and
    written by kernels alone: whoever asks for the shape sees stock's.
    """

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - the name of what it wraps
        stock(self, *args, **kwargs)
        try:
            if self.draft_logits is not None:
                logits, temperature, seeds = map(_with_one_row_more, (self.draft_logits, self.temperature, self.seeds))
                self.draft_logits, self.temperature, self.seeds = logits, temperature, seeds
                setattr(self, _SPARE, len(logits))
        except Exception as error:
            activity.failed(error)

    return __init__


def _with_one_row_more(fresh: torch.Tensor) -> torch.Tensor:
    """All zeros like *fresh*, with a row behind it in the same memory."""
    return fresh.new_zeros((len(fresh) + 1, *fresh.shape[1:]))[:-1]


def _pad_before(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `propose`: before it runs, all rows of `idx_mapping` are set to the spare row.

    `propose` then writes the requests of the batch's rows into `idx_mapping`, which is (max requests,) int32.
    """
    from torch import inference_mode  # the target is imported by now, and torch with it

    padded_rows, corrects = activity.counter(ROWS_PADDED_WITH_REQUESTS), activity.corrects

    @functools.wraps(stock)
    def propose(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if corrects:
                spare = getattr(self, _SPARE, None)
                writes_logits = spare is not None
                if writes_logits:
                    with inference_mode():
                        self.idx_mapping.fill_(spare)
            else:
                writes_logits = self.draft_logits is not None
            if writes_logits:
                padded_rows.count += _has_padded_rows(self, input_batch.num_reqs)
        except Exception as error:
            activity.failed(error)
        return stock(self, input_batch, *args, **kwargs)

    return propose


def _pad_behind(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `_copy_request_inputs`: afterwards, rows behind the batch are set to the spare row.

    That function does the same as `propose`, for several speculators.
    """
    from torch import inference_mode

    padded_rows, corrects = activity.counter(ROWS_PADDED_WITH_REQUESTS), activity.corrects

    @functools.wraps(stock)
    def _copy_request_inputs(self: Any, num_reqs: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, num_reqs, *args, **kwargs)
        try:
            if corrects:
                spare = getattr(self, _SPARE, None)
                writes_logits = spare is not None
                if writes_logits:
                    with inference_mode():
                        self.idx_mapping[num_reqs:].fill_(spare)
                    if hasattr(self, "sample_idx_mapping"):
                        # DFlash's, which is filled by a function that knows no speculator.
                        setattr(self.sample_idx_mapping, _SPARE, spare)
            else:
                writes_logits = self.draft_logits is not None
            if writes_logits:
                padded_rows.count += _has_padded_rows(self, num_reqs)
        except Exception as error:
            activity.failed(error)
        return result

    return _copy_request_inputs


def _pad_samples(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps DFlash's `prepare_dflash_inputs`: samples behind the batch's belong to the spare row.

    On stock these tokens belong to request 0. DFlash's buffer `sample_idx_mapping` is (max requests * draft tokens,)
    int32.
    """
    from torch import inference_mode

    @functools.wraps(stock)
    def prepare_dflash_inputs(*args: Any) -> Any:
        result = stock(*args)
        try:
            samples, requests, steps = args[6], args[7].num_reqs, args[-3]
            spare = getattr(samples, _SPARE, None)
            if spare is not None:
                with inference_mode():
                    samples[requests * steps :].fill_(spare)
        except Exception as error:
            activity.failed(error)
        return result

    return prepare_dflash_inputs


_MANAGERS = ("decode_cudagraph_manager", "query_cudagraph_manager", "cudagraph_manager")
"""The names by which speculators have the manager of the graphs that sample drafts behind the first token, or all
drafts."""


_SIZES = "_graphfix_sizes"
"""The attribute of a manager with the number of its graphs, their numbers of requests, and the largest of these."""


def _has_padded_rows(speculator: Any, requests: int) -> bool:
    """Whether so many requests are drafted for in a full graph that has more rows. Asked at every step."""
    for name in _MANAGERS:
        manager = getattr(speculator, name, None)
        if manager is not None:
            break
    else:
        return False
    captured = len(manager.graphs)
    known = getattr(manager, _SIZES, None)
    # Graphs are only ever added to a manager: as many are the same ones.
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
        ),
        unseen("temperatures above 0"),
        needs.FULL_GRAPHS,
    )


def _sampled_drafts(deployment: Deployment, _: str) -> Fact:
    """Drafts are sampled, and not the likeliest tokens: their logits are kept for the rejection sampler."""
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


FIX = Fix(
    number=16,
    name="draft-idx-mapping",
    runner="V2",
    reads=(_BASE, _EAGLE, _DRAFTS, _DFLASH, _GUMBEL, _GRAPHS, _DATA_PARALLEL),
    modules=(_EAGLE_MODULE, _BASE_MODULE, _DFLASH_MODULE),
    diagnose=diagnose,
    patches=patches,
    events=(ROWS_PADDED_WITH_REQUESTS,),
    needs=needs,
    ground="answers",
    evidence=(
        *(
            f"{_EAGLE}::EagleSpeculator.{name}"
            for name in ("prefill", "multi_step_decode", "generate_draft", "_sample_draft")
        ),
        *(
            f"{_EAGLE}::{name}"
            for name in ("prepare_eagle_inputs", "prepare_eagle_decode", "update_eagle_draft_inputs")
        ),
        *(
            f"{_DRAFTS}::AutoRegressiveSpeculator.{name}"
            for name in ("__init__", "propose", "_prefill", "_multi_step_decode", "_generate_draft")
        ),
        *(f"{_DRAFTS}::{name}" for name in ("prepare_prefill_inputs", "prepare_decode_inputs")),
        f"{_GUMBEL}::gumbel_sample",
        *(f"{_GRAPHS}::CudaGraphManager.{name}" for name in ("dispatch", "run_fullgraph")),
        f"{_DATA_PARALLEL}::dispatch_cg_and_sync_dp",
    ),
)

ABOUT = About(
    pr=47066,
    references=(),
    summary="padded rows of a draft graph write to no request's draft logits",
    releases="0.19.0 - 0.24.0",
    absent="0.14.1 - 0.18.1",
    seen="wrong or garbled answers with sampled drafts",
    first_test="`draft_sample_method` greedy: gone?",
    symptom="With model runner V2, full CUDA graphs and sampled drafts, answers are wrong or gibberish at "
    "temperatures above 0, for some requests of batches whose size is between two capture sizes.",
    cause="A draft graph samples in each of its rows, and writes the row's logits to the request that the row stands "
    "for. Padded rows still stand for requests of an earlier, larger batch (DFlash's: for request 0). The rejection "
    "sampler then mistakes these logits for those that a draft token was sampled from.",
    remedy="Padded rows stand for a spare row, which draft logits, temperatures and seeds get after their last one. "
    "Rows of real requests are unchanged.",
    detect="With draft tokens and a batch size between two capture sizes, answers are wrong at temperature 1 and "
    "right at 0; with --enforce-eager they are right at both.",
    workaround="draft_sample_method greedy (before 0.21 rejection_sample_method strict), which are the defaults, or "
    "--enforce-eager.",
    removable="with vLLM 0.25.0",
    in_caches="entries of tokens that were accepted or sampled wrongly: right for these tokens, which are not the "
    "model's",
    how_sure="follows from the code; the wrong answers were shown",
)
