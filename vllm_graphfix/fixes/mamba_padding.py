"""`mamba-padding`: rows that schedule no token are never prefilling to the Mamba builder (PR 41873)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import About

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_BUILDER = "vllm/v1/attention/backends/mamba_attn.py"
_BUILDER_MODULE = "vllm.v1.attention.backends.mamba_attn"
_SPLIT = "split_decodes_and_prefills(common_attn_metadata, decode_threshold=...)"
_SPLIT_BY_PHASE = (
    "split_decodes_and_prefills(common_attn_metadata, decode_threshold=..., treat_short_extends_as_decodes=False)"
)

_MARKED = "is_prefilling = num_computed_tokens_cpu < num_prompt_tokens_cpu"
_CLEARED = tuple(
    f"is_prefilling[{rows}]{cleared}"
    for rows in ("num_reqs:", "num_reqs:num_reqs_padded")
    for cleared in (" = False", ".fill_(False)", ".zero_()")
)
"""Upstream's correction, the first; a pattern of False is one of 0 as well."""
_NUMBERS = (
    "num_computed_tokens_cpu = self.input_batch.num_computed_tokens_cpu_tensor[:num_reqs_padded]",
    "num_prompt_tokens_cpu = self.input_batch.num_prompt_tokens_cpu_tensor[:num_reqs_padded]",
)
_SPLIT_BY_MARKS = "is_prefill |= common_attn_metadata.is_prefilling"
_PREFILLS = (
    _SPLIT_BY_MARKS,
    "is_prefill = query_lens != query_lens[0]",
    "is_prefill = query_lens > decode_threshold",
    "torch.any(is_prefill)",
    "is_prefill.int()",
)
_BATCH = "vllm/v1/worker/gpu_input_batch.py"
_UTILS = "vllm/v1/attention/backends/utils.py"
_BUILDS = (
    (_BUILDER, "BaseMambaAttentionMetadataBuilder"),
    ("vllm/v1/attention/backends/mamba1_attn.py", "Mamba1AttentionMetadataBuilder"),
    ("vllm/v1/attention/backends/mamba2_attn.py", "Mamba2AttentionMetadataBuilder"),
)
"""Those that call what is patched."""

PADDED_ROW_PREFILLING = Event(
    "padded-row-prefilling",
    "A batch reached a group of Mamba layers with a padded row that is marked as prefilling: on stock a decode graph "
    "replays with stale state indices.",
)


def diagnose(source: Source) -> Diagnosis:
    build = source.function(_RUNNER, "GPUModelRunner._build_attention_metadata")
    compute = source.function(_BUILDER, "BaseMambaAttentionMetadataBuilder._compute_common_metadata")
    if not source.says(_RUNNER, "is_prefilling") and not source.says(_BUILDER, "treat_short_extends_as_decodes"):
        return Diagnosis(Verdict.ABSENT, "the model runner does not tell the builders which rows are prefilling")
    marked = build and build.only(_MARKED)
    if build is not None and marked and build.gives("CommonAttentionMetadata(...)", "is_prefilling=is_prefilling"):
        cleared = next((found for found in map(build.only, _CLEARED) if found is not None), None)
        ineffective = False
        # One after the other, and nothing else done to the marks.
        if cleared and build.in_one_block(marked, cleared, at_once=True) and _marks_are_confined(build, *_CLEARED):
            if not build.sets("num_reqs") and len(build.assignments("num_reqs_padded", "...")) < 2:
                return Diagnosis(Verdict.FIXED, "padded rows are marked as not prefilling", build.at(cleared))
            # Up to there no row is padded any more: nothing is cleared.
            padded = build.only("num_reqs = num_reqs_padded")
            ineffective = (
                padded is not None
                and build.in_one_block(padded, marked, cleared)
                and build.assigned("num_reqs") == build.assigned("num_reqs_padded") == 1
            )
        split = compute and compute.only("split_decodes_and_prefills(...)")
        if compute is not None and split and (ineffective or _marks_are_confined(build)):
            if compute.takes.startswith("self, common_attn_metadata") and compute.find(_SPLIT_BY_PHASE):
                if _stale_and_split_as_known(source, build):
                    return Diagnosis(
                        Verdict.AFFECTED,
                        "is_prefilling covers padded rows, and the Mamba builder splits the batch by it",
                        build.at(marked),
                        "prefilling-over-padding",
                    )
            elif compute.find(_SPLIT) and not source.says(_BUILDER, "treat_short_extends_as_decodes"):
                return Diagnosis(Verdict.FIXED, "the Mamba builder does not split the batch by phase", compute.where)
    return Diagnosis.unrecognised("rows are marked as prefilling in a way", build or _RUNNER)


def _marks_are_confined(build: Function, *cleared: str) -> bool:
    """Whether nothing is done to the marks but that they are made, cleared so, and given to the builders."""
    return build.confines(
        "is_prefilling", _MARKED, *cleared, "CommonAttentionMetadata(*..., is_prefilling=is_prefilling)"
    )


def _stale_and_split_as_known(source: Source, build: Function) -> bool:
    """Whether padded rows have the numbers of requests that were there before.

    The builders must also be given the marks of these rows and split by them.
    """
    batch = source.function(_BATCH, "InputBatch")
    condense = batch and batch.inner("condense")
    split = source.function(_UTILS, "split_decodes_and_prefills")
    builds = [source.function(path, f"{name}.build") for path, name in _BUILDS]
    return (
        all(map(build.only, _NUMBERS))
        and build.confines("num_prompt_tokens_cpu", *_NUMBERS, _MARKED, "rswa_prefix_lens = num_prompt_tokens_cpu")
        and build.confines(
            "num_computed_tokens_cpu",
            *_NUMBERS,
            _MARKED,
            "num_computed_tokens_cpu = None",
            "CommonAttentionMetadata(*..., _num_computed_tokens_cpu=num_computed_tokens_cpu)",
        )
        and batch is not None
        and condense is not None
        and condense.confines(
            "num_prompt_tokens", "self.num_prompt_tokens[empty_index] = self.num_prompt_tokens[last_req_index]"
        )
        and not any(removed.names("num_prompt_tokens") for removed in [batch.inner("remove_request")] if removed)
        and split is not None
        and split.only(_SPLIT_BY_MARKS) is not None
        and split.confines("is_prefill", *_PREFILLS)
        and all(
            each is None
            or (
                not each.sets("common_attn_metadata")
                and each.find("self._compute_common_metadata(...)")
                == each.find("self._compute_common_metadata(common_attn_metadata, *...)")
            )
            for each in builds
        )
    )


def _split_without_padding(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `_compute_common_metadata(common_attn_metadata, …)`, which splits the batch by its marks."""
    from torch import from_numpy  # the target is imported by now, and torch with it

    padded_rows, corrects = activity.counter(PADDED_ROW_PREFILLING), activity.corrects

    @functools.wraps(stock)
    def _compute_common_metadata(self: Any, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            real = _marks_without_padding(common_attn_metadata)
            if real is not None:
                if corrects:
                    # A copy: the same metadata goes to the builders of other layers, which are right as they are.
                    corrected = object.__new__(type(common_attn_metadata))
                    corrected.__dict__.update(common_attn_metadata.__dict__, is_prefilling=from_numpy(real))
                    common_attn_metadata = corrected
                padded_rows.count += 1
        except Exception as error:
            activity.failed(error)
        return stock(self, common_attn_metadata, *args, **kwargs)

    return _compute_common_metadata


def _marks_without_padding(common_attn_metadata: Any) -> Any:
    """`is_prefilling`, less its padded rows, as an array; None where no padded row is marked.

    Reads `query_start_loc_cpu`, (num_reqs + 1,) int32, and `is_prefilling`, (num_reqs,) bool, both on the CPU.
    """
    is_prefilling = common_attn_metadata.is_prefilling
    if is_prefilling is None:
        return None
    # Bytes, since comparing tensors this small costs ten times as much as all that is here.
    marks = is_prefilling.numpy()
    marked = marks.tobytes()
    if 1 not in marked:  # pure decode batches, most steps
        return None
    starts = common_attn_metadata.query_start_loc_cpu.numpy()
    real = marks & (starts[1:] != starts[:-1])
    return None if real.tobytes() == marked else real


_TARGET = "BaseMambaAttentionMetadataBuilder._compute_common_metadata"


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_BUILDER_MODULE, _TARGET, _split_without_padding),)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    # Without chunked prefill, a request that ends after its prefill leaves such a slot behind as well.
    layers = "not gated delta nets; chunked prefill makes it likely"
    return (
        needs.RUNNER_V1,
        Need("Mamba or short-convolution layers", lambda deployment, _: deployment.mamba(), layers),
        needs.FULL_GRAPHS,
    )


FIX = Fix(
    number=4,
    name="mamba-padding",
    runner="V1",
    reads=(_RUNNER, _BATCH, _UTILS, *(path for path, _ in _BUILDS)),
    modules=(_BUILDER_MODULE,),
    diagnose=diagnose,
    patches=patches,
    events=(PADDED_ROW_PREFILLING,),
    needs=needs,
    ground="answers",
)

ABOUT = About(
    pr=41873,
    references=(),
    summary="padded rows never turn a Mamba decode batch into a prefill",
    releases="0.19.0 - 0.21.0",
    absent="0.14.1 - 0.18.1",
    seen="wrong tokens now and then, under load",
    first_test="long prompts next to short requests; `--enforce-eager`: gone?",
    symptom="Under load, Mamba and hybrid models now and then decode wrong tokens with full CUDA graphs.",
    cause="The model runner computes the prefilling mark for padded rows, too. A slot beyond the batch keeps the "
    "numbers of a request that was moved away while it was still prefilling. Mamba's builder splits by that mark: a "
    "padded row turns a pure decode batch into decode + prefill, and the persistent buffers that the graph reads are "
    "not refreshed.",
    remedy="The Mamba builder splits on a copy of the metadata in which rows without scheduled tokens are not "
    "prefilling. Real rows keep their mark.",
    detect="Long prompts with chunked prefill next to short requests that finish meanwhile; output differs from "
    "--enforce-eager for some requests only.",
    workaround='--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', or --enforce-eager.',
    removable="with vLLM 0.22.0",
    in_caches="wrong recurrent states, of any request of the engine: the graph reads and writes at state indices of an "
    "earlier batch. In hybrids also wrong keys and values, of generated tokens and of whatever is computed on such a "
    "state afterwards, prompts included",
    how_sure="that states are mixed up was shown; which of them reach a store depends on the prefix cache's Mamba mode "
    "and the connector, and is not known",
)
