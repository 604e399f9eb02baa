"""`dcp-context-lens`: FlashAttention's graphs read context lengths of their own batch under DCP (PR 36070)."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import correct_result, fix
from vllm_graphfix.fix import Diagnosis, Event, Slice, Verdict
from vllm_graphfix.fixes._premises import AS_BUILT, BUILDERS_STAY

if TYPE_CHECKING:
    import torch

    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_BACKEND = "vllm/v1/attention/backends/flash_attn.py"
_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_METADATA = "vllm/v1/worker/gpu/attn_utils.py"
_REGISTRY = "vllm/v1/attention/backends/registry.py"
_UTILS = "vllm/v1/attention/backends/utils.py"
_BUILDER = "FlashAttentionMetadataBuilder"
_LENGTHS = "dcp_context_kv_lens"
_COMPUTED = "get_dcp_local_seq_lens(...)"
_SCHEDULED = tuple(
    f"scheduler_metadata = {make}(*..., seqlens={_LENGTHS})" for make in ("schedule", "self._get_scheduler_metadata")
)
"""A schedule reads the lengths."""
_NO_LAYERS = "if not attn_groups[i]:\n    continue"
_LOCAL = "local_context_kv_lens"
_BUFFER = "_graphfix_dcp_context_kv_lens"
"""The attribute of a builder that holds its persistent lengths."""

LENGTHS_OF_ANOTHER_BATCH = Event(
    "lengths-of-another-batch",
    "A batch small enough for a graph reached FlashAttention with decode context parallelism: on stock a full graph "
    "attends to as much context as its capture had, or as the reused memory happens to say.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the lengths that a rank's graphs read: a new tensor in each step, or rows of a buffer."""
    if not source.contains_word(_BACKEND, _LENGTHS):
        return Diagnosis.absent("FlashAttention has no lengths of a rank's share of the context")
    build = source.function(_BACKEND, f"{_BUILDER}.build")
    # The last one: the lengths of all ranks together may have the same name before.
    assigned = build.assignments(_LENGTHS, "...")[-1:] if build is not None else []
    if build is not None and assigned and build.find_unique(_COMPUTED):
        if _is_in_a_buffer(source, build, assigned[0]):
            return Diagnosis.fixed("a rank's context lengths are in a persistent buffer", build.at(assigned[0]))
        if assigned[0] in build.assignments(_LENGTHS, _COMPUTED):
            return Diagnosis.affected(
                "a rank's context lengths are a new tensor in each step, and a graph reads that of its capture",
                build.at(assigned[0]),
                "new-lengths",
            )
    return Diagnosis.unrecognised("a rank's context lengths are made in a way", build or _BACKEND)


def _is_in_a_buffer(source: Source, build: Function, assigned: ast.Assign) -> bool:
    """Tell if *assigned* takes rows of a buffer that are written just before, in every batch.

    The constructor must make that buffer, and nothing else in the class may use it.
    """
    builder, init = source.function(_BACKEND, _BUILDER), source.function(_BACKEND, f"{_BUILDER}.__init__")
    if builder is None or init is None or not build.find(f"{_LENGTHS} = ...[:num_reqs]"):
        return False
    buffer = ast.unparse(assigned.value).removesuffix("[:num_reqs]")
    made = f"{buffer} = torch.zeros(...)"
    writing = [f"{buffer}[:num_reqs]{form}" for form in (f" = {_LOCAL}", f".copy_({_LOCAL})", f".copy_({_COMPUTED})")]
    clearing = [f"{buffer}[num_reqs:]{form}" for form in (" = 0", ".zero_()", ".fill_(0)")]
    written = build.find(*writing)
    return (
        len(written) == 1
        and build.in_one_block(*build.assignments(_LOCAL, _COMPUTED), *written, assigned)
        and build.assigned(_LOCAL) <= 1
        and builder.find_unique(made) is not None
        and init.find_unique(made) is not None
        and builder.used_only_in(
            buffer.rpartition(".")[2], made, *writing, *clearing, f"{_LENGTHS} = {buffer}[:num_reqs]"
        )
    )


@correct_result("vllm.v1.attention.backends.flash_attn", f"{_BUILDER}.build", LENGTHS_OF_ANOTHER_BATCH)
def lengths_in_a_buffer(metadata: Any, self: Any, *args: Any, **kwargs: Any) -> Callable[[], None] | None:
    """Copy this rank's context lengths, (requests,) int32, to where graphs read them; None where none is replayed.

    The schedule of FlashAttention 3 was made from the same lengths, and is in a buffer of vLLM's.
    """
    if self.dcp_world_size == 1 or not self.use_full_cuda_graph or metadata.num_actual_tokens > self.max_cudagraph_size:
        return None

    def copy() -> None:
        lengths = metadata.dcp_context_kv_lens
        buffer, rows = _buffer_of(self, lengths), lengths.shape[0]
        buffer[:rows].copy_(lengths)
        # A graph for mixed batches has the rows of its capture: clear those behind the batch.
        buffer[rows:].zero_()
        metadata.dcp_context_kv_lens = buffer[:rows]

    return copy


def _buffer_of(builder: Any, lengths: torch.Tensor) -> torch.Tensor:
    """Return the builder's buffer, (max requests,), which is made with its first metadata, before any capture."""
    buffer: torch.Tensor | None = getattr(builder, _BUFFER, None)
    if buffer is None:
        from torch import inference_mode

        with inference_mode(False):  # an inference tensor cannot be written outside inference mode
            buffer = lengths.new_zeros(builder.vllm_config.scheduler_config.max_num_seqs)
        setattr(builder, _BUFFER, buffer)
    return buffer


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    return (
        Need(
            "--decode-context-parallel-size above 1",
            lambda deployment, _: deployment.shares_the_context(),
            "which needs more tensor-parallel ranks than KV heads",
            clause="--decode-context-parallel-size is above 1",
        ),
        needs.FULL_GRAPHS,
        Need(
            "FlashAttention",
            lambda deployment, _: deployment.flash_attention(),
            "so no latent attention (MLA)",
            clause="attention runs on FlashAttention",
        ),
    )


FIX = fix(
    "dcp-context-lens",
    diagnose=diagnose,
    surroundings=(
        # The lengths from their computation to the kernels
        Slice(_BACKEND, f"{_BUILDER}.build", _LENGTHS),
        Slice(_BACKEND, f"{_BUILDER}.update_block_table", _LENGTHS),
        Slice(_BACKEND, "FlashAttentionImpl.forward", _LENGTHS),
        Slice(_BACKEND, "FlashAttentionImpl._forward_with_dcp", _LENGTHS, Verdict.AFFECTED),
        # No replacement between the builder and the layers, nor of the builder
        Slice(_REGISTRY, "AttentionBackendEnum", "FLASH_ATTN"),
        Slice(_BACKEND, "FlashAttentionBackend.get_builder_cls"),
        Slice(_RUNNER, "GPUModelRunner._build_attention_metadata", f"attn_metadata_dict {_LENGTHS}"),
        Slice(_METADATA, "build_attn_metadata", f"attn_metadata {_LENGTHS}"),
        # Possible remedies after the metadata are made, or where lengths are computed
        Slice(_BACKEND, _BUILDER, "attn_metadata", Verdict.AFFECTED),
        Slice(_UTILS, "get_dcp_local_seq_lens", "dcp_local_seq_lens base remainder", Verdict.AFFECTED),
        *BUILDERS_STAY,
    ),
    recognised=(
        f"{_LENGTHS} = {_COMPUTED}",
        f"{_LOCAL} = {_COMPUTED}",
        f"{_LENGTHS} = ...[:num_reqs]",
        f"...[:num_reqs].copy_({_COMPUTED})",
        *_SCHEDULED,
        _NO_LAYERS,
    ),
    distant_code=AS_BUILT,
    corrections=(lengths_in_a_buffer,),
    events=(LENGTHS_OF_ANOTHER_BATCH,),
    needs=needs,
    default_rationale="answers",
)
