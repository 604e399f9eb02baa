"""`mamba-padding`: the Mamba builder never takes rows without scheduled tokens for prefills (PR 41873)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import correct_arguments, fix
from vllm_graphfix.fix import Diagnosis, Event, Slice, Verdict

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_BATCH = "vllm/v1/worker/gpu_input_batch.py"
_BACKENDS = "vllm/v1/attention/backends"
_BUILDER, _UTILS = f"{_BACKENDS}/mamba_attn.py", f"{_BACKENDS}/utils.py"
_COMPUTE = "_compute_common_metadata"
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
"""Upstream's correction, the first, and equivalents; the pattern False equals 0, too."""
_FIRST_TOKENS = (
    "is_prefilling = common_attn_metadata.is_prefilling",
    "assert is_prefilling is not None",
    "single_token_prefill_rows = is_prefilling & (... == 1)",
    """if torch.any(...).item():
    is_prefilling = is_prefilling.clone()
    is_prefilling[...] = False
    common_attn_metadata = common_attn_metadata.replace(is_prefilling=is_prefilling)""",
)
"""Since 0.22.0 the builder takes rows of one token with a state for decodes, which marks no padded row."""

PADDED_ROW_PREFILLING = Event(
    "padded-row-prefilling",
    "A batch reached a group of Mamba layers with a padded row that is marked as prefilling: on stock a decode graph "
    "replays with stale state indices.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the marks on padded rows, their clearing, and the builder that splits the batch by them."""
    build = source.function(_RUNNER, "GPUModelRunner._build_attention_metadata")
    compute = source.function(_BUILDER, "BaseMambaAttentionMetadataBuilder._compute_common_metadata")
    if not source.contains_word(_RUNNER, "is_prefilling") and not source.contains_word(
        _BUILDER, "treat_short_extends_as_decodes"
    ):
        return Diagnosis.absent("the model runner does not tell the builders which rows are prefilling")
    marked = build and build.find_unique(_MARKED)
    if build is not None and compute is not None and marked is not None:
        cleared = build.find_first_unique(_CLEARED)
        # At once, so that nothing changes the marks or the number of rows in between.
        if cleared is not None and build.in_one_block(marked, cleared, at_once=True) and not _is_padding_counted(build):
            return Diagnosis.fixed("padded rows are marked as not prefilling", build.at(cleared))
        if compute.find(_SPLIT_BY_PHASE) and (cleared is None or _is_padding_counted(build)):
            return Diagnosis.affected(
                "is_prefilling covers padded rows, and the Mamba builder splits the batch by it",
                build.at(marked),
                "prefilling-over-padding",
            )
        if compute.find(_SPLIT) and not source.contains_word(_BUILDER, "treat_short_extends_as_decodes"):
            return Diagnosis.fixed("the Mamba builder does not split the batch by phase", compute.where)
    return Diagnosis.unrecognised("rows are marked as prefilling in a way", build or _RUNNER)


def _is_padding_counted(build: Function) -> bool:
    """Tell if `num_reqs` may have become the padded number, behind which nothing is cleared."""
    return build.assigned("num_reqs") > 0


@correct_arguments(
    "vllm.v1.attention.backends.mamba_attn",
    "BaseMambaAttentionMetadataBuilder._compute_common_metadata",
    PADDED_ROW_PREFILLING,
)
def without_padding(self: Any, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any] | None:
    """Split the batch on a copy of the metadata in which padded rows are not prefilling; None where none is marked."""
    real = _marks_without_padding(common_attn_metadata)
    if real is None:
        return None
    from torch import from_numpy  # here, since the import takes as long as the rest of most calls

    # A copy: builders of other layers, which are right, get the same metadata.
    corrected = object.__new__(type(common_attn_metadata))
    corrected.__dict__.update(common_attn_metadata.__dict__, is_prefilling=from_numpy(real))
    return self, corrected


def _marks_without_padding(common_attn_metadata: Any) -> Any:
    """Return `is_prefilling`, less its padded rows, as an array; None where no padded row is marked.

    Reads `query_start_loc_cpu`, (num_reqs + 1,) int32, and `is_prefilling`, (num_reqs,) bool, both on the CPU.
    """
    is_prefilling = common_attn_metadata.is_prefilling
    if is_prefilling is None:
        return None
    # Bytes, since comparing tensors of this size would cost ten times as much as this function.
    marks = is_prefilling.numpy()
    marked = marks.tobytes()
    if 1 not in marked:  # pure decode batches, most steps
        return None
    starts = common_attn_metadata.query_start_loc_cpu.numpy()
    real = marks & (starts[1:] != starts[:-1])
    return None if real.tobytes() == marked else real


def needs() -> tuple[Need, ...]:
    """Return the conditions of the defect. Without chunked prefill, a finished request leaves such a slot, too."""
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    layers = "not gated delta nets; chunked prefill makes it likely"
    return (
        needs.RUNNER_V1,
        Need(
            "Mamba or short-convolution layers",
            lambda deployment, _: deployment.mamba(),
            layers,
            clause="the model has Mamba or short-convolution layers",
        ),
        needs.FULL_GRAPHS,
    )


FIX = fix(
    "mamba-padding",
    runner="V1",
    diagnose=diagnose,
    surroundings=(
        # The marks, and every other use of them
        Slice(
            _RUNNER,
            "GPUModelRunner._build_attention_metadata",
            "is_prefilling num_prompt_tokens_cpu num_computed_tokens_cpu",
        ),
        # The numbers that a request leaves in its slot
        Slice(_BATCH, "InputBatch.condense", "num_prompt_tokens", Verdict.AFFECTED),
        Slice(_BATCH, "InputBatch.remove_request", "num_prompt_tokens", Verdict.AFFECTED),
        # The split by the marks, and the builder's arguments
        Slice(_UTILS, "split_decodes_and_prefills", "is_prefill is_prefilling", Verdict.AFFECTED),
        Slice(
            _BUILDER,
            "BaseMambaAttentionMetadataBuilder._compute_common_metadata",
            "split_decodes_and_prefills is_prefilling",
        ),
        Slice(_BUILDER, "BaseMambaAttentionMetadataBuilder.build", f"{_COMPUTE} is_prefilling common_attn_metadata"),
        *(
            Slice(
                f"{_BACKENDS}/{name}_attn.py", f"{builder}AttentionMetadataBuilder.build", f"{_COMPUTE} is_prefilling"
            )
            for name, builder in (("mamba1", "Mamba1"), ("mamba2", "Mamba2"))
        ),
        # The classes of builders: a subclass might mark rows otherwise
        *(
            Slice(f"{_BACKENDS}/{name}_attn.py", f"{backend}AttentionBackend.get_builder_cls")
            for name, backend in (("mamba1", "Mamba1"), ("mamba2", "Mamba2"), ("short_conv", "ShortConv"))
        ),
    ),
    recognised=(_MARKED, *_CLEARED, *_FIRST_TOKENS),
    corrections=(without_padding,),
    events=(PADDED_ROW_PREFILLING,),
    needs=needs,
    default_rationale="answers",
)
