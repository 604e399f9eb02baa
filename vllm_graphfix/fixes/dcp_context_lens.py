"""`dcp-context-lens`: FlashAttention's graphs read a rank's context lengths of their own batch (PR 36070).

This concerns decode context parallelism.
"""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import About

if TYPE_CHECKING:
    import torch

    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_BACKEND = "vllm/v1/attention/backends/flash_attn.py"
_UTILS = "vllm/v1/attention/backends/utils.py"
_BACKEND_MODULE = "vllm.v1.attention.backends.flash_attn"
_BUILDER = "FlashAttentionMetadataBuilder"
_TARGET = f"{_BUILDER}.build"
_LENGTHS = "dcp_context_kv_lens"
_MENTIONS = {2: 4, 3: 6}
"""How often the lengths are named where they are assigned so many times: nothing else is done with them."""
_BUFFER = "_graphfix_dcp_context_kv_lens"
"""The attribute of a builder that holds its persistent lengths."""

LENGTHS_OF_ANOTHER_BATCH = Event(
    "lengths-of-another-batch",
    "A batch small enough for a graph reached FlashAttention with decode context parallelism: on stock a full graph "
    "attends to as much context as its capture had, or as the reused memory happens to say.",
)


def diagnose(source: Source) -> Diagnosis:
    if not source.says(_BACKEND, _LENGTHS):
        return Diagnosis(Verdict.ABSENT, "FlashAttention has no lengths of a rank's share of the context")
    build, init = source.function(_BACKEND, _TARGET), source.function(_BACKEND, f"{_BUILDER}.__init__")
    if build is not None and init is not None and _gives_what_it_assigns(build):
        *_, assigned = build.assignments(_LENGTHS, "...")
        if _are_in_a_buffer(build, assigned):
            return Diagnosis(Verdict.FIXED, "a rank's context lengths are in a persistent buffer", build.at(assigned))
        read = source.function(_BACKEND, "FlashAttentionImpl._forward_with_dcp")
        made, returned = build.only("attn_metadata = FlashAttentionMetadata(...)"), build.only("return attn_metadata")
        if (
            assigned in build.assignments(_LENGTHS, "get_dcp_local_seq_lens(...)")
            and build.takes == "self, common_prefix_len, common_attn_metadata, fast_build"
            and made
            and returned
            and build.in_one_block(made, returned, at_once=True)
            and build.mentions(attn_metadata=2)
            and read is not None
            and read.only(f"attn_metadata.{_LENGTHS}")
            and init.only("self.dcp_world_size = get_dcp_group().world_size")
            and init.only("self.use_full_cuda_graph = self.compilation_config.cudagraph_mode.has_full_cudagraphs()")
            and init.only("self.max_cudagraph_size = self.compilation_config.max_cudagraph_capture_size")
        ):
            return Diagnosis(
                Verdict.AFFECTED,
                "a rank's context lengths are a new tensor in each step, and a graph reads that of its capture",
                build.at(assigned),
                "new-lengths",
            )
    return Diagnosis.unrecognised("a rank's context lengths are made in a way", build or _BACKEND)


def _gives_what_it_assigns(build: Function) -> bool:
    """Whether the metadata have the lengths that are assigned last.

    Apart from that, the lengths must only be used for scheduling.
    """
    assigned = build.assignments(_LENGTHS, "...")
    return (
        len(assigned) in _MENTIONS
        and build.mentions(**{_LENGTHS: _MENTIONS[len(assigned)]})
        and build.gives("FlashAttentionMetadata(...)", f"{_LENGTHS}={_LENGTHS}")
    )


def _are_in_a_buffer(build: Function, assigned: ast.Assign) -> bool:
    """Whether the lengths are the first rows of an attribute of the builder.

    The attribute must be written before, in the same block.
    """
    kept = assigned.value
    if not (isinstance(kept, ast.Subscript) and isinstance(kept.value, ast.Attribute)):
        return False
    rows = f"{ast.unparse(kept.value)}[:num_reqs]"
    written = [part for form in (f"{rows} = ...", f"{rows}.copy_(...)") for part in build.find(form)]
    return rows.startswith("self.") and ast.unparse(kept) == rows and build.in_one_block(*written[-1:], assigned)


def _lengths_in_a_buffer(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `build`: the metadata's context lengths of this rank, (requests,) int32, are in a buffer of the builder.

    Copied on the device, to the address that graphs recorded, and 0 in the rows behind: a graph for any kind of batch
    has as many rows as requests at its capture. The schedule of FlashAttention 3 was made of the same lengths, and is
    in a buffer of vLLM's.
    """
    lengths_of_others, corrects = activity.counter(LENGTHS_OF_ANOTHER_BATCH), activity.corrects

    @functools.wraps(stock)
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = stock(self, *args, **kwargs)
        try:
            if self.dcp_world_size > 1 and self.use_full_cuda_graph:
                if corrects:
                    lengths = metadata.dcp_context_kv_lens
                    kept, rows = _buffer_of_lengths(self, lengths), lengths.shape[0]
                    kept[:rows].copy_(lengths)
                    kept[rows:].zero_()
                    metadata.dcp_context_kv_lens = kept[:rows]
                if metadata.num_actual_tokens <= self.max_cudagraph_size:
                    lengths_of_others.count += 1
        except Exception as error:
            activity.failed(error)
        return metadata

    return build


def _buffer_of_lengths(builder: Any, lengths: torch.Tensor) -> torch.Tensor:
    """The builder's buffer of lengths, for as many requests as a batch may have.

    It is made with the builder's first metadata, which no graph is captured before.
    """
    kept: torch.Tensor | None = getattr(builder, _BUFFER, None)
    if kept is None:
        from torch import inference_mode

        with inference_mode(False):  # a tensor that is made in it can be written nowhere else
            kept = lengths.new_zeros(builder.vllm_config.scheduler_config.max_num_seqs)
        setattr(builder, _BUFFER, kept)
    return kept


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_BACKEND_MODULE, _TARGET, _lengths_in_a_buffer),)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    return (
        Need(
            "--decode-context-parallel-size above 1",
            lambda deployment, _: deployment.shares_the_context(),
            "which needs more tensor-parallel ranks than KV heads",
        ),
        needs.FULL_GRAPHS,
        Need("FlashAttention", lambda deployment, _: deployment.flash_attention(), "so no latent attention (MLA)"),
    )


FIX = Fix(
    number=15,
    name="dcp-context-lens",
    runner=None,
    reads=(_BACKEND, _UTILS),
    modules=(_BACKEND_MODULE,),
    diagnose=diagnose,
    patches=patches,
    events=(LENGTHS_OF_ANOTHER_BATCH,),
    needs=needs,
    ground="answers",
    evidence=(
        f"{_BACKEND}::FlashAttentionImpl.forward",
        f"{_UTILS}::get_dcp_local_seq_lens",
    ),
)

ABOUT = About(
    pr=36070,
    references=(),
    summary="with decode context parallelism, graphs read the context lengths of their own batch",
    releases="0.14.1 - 0.19.1",
    seen="answers that ignore the prompt, or a part of it",
    first_test="`--enforce-eager`: gone?",
    symptom="With --decode-context-parallel-size above 1 and full CUDA graphs, models on FlashAttention answer with "
    "text that has nothing to do with the prompt, as if they had read none of it, or only a part.",
    cause="How many tokens of each request's context are on this rank is computed in every step, into a new tensor. A "
    "full graph reads the tensor of its capture, which has been freed since: it sees the context lengths of the "
    "capture's dummy batch, or whatever that memory holds now.",
    remedy="The lengths are copied into a buffer that each attention metadata builder keeps and whose address the "
    "graph recorded. Rows beyond the batch are 0.",
    detect="Answers are wrong with --decode-context-parallel-size, and right with --enforce-eager or without that "
    "flag.",
    workaround='--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', or --enforce-eager.',
    removable="with vLLM 0.20.0",
    in_caches="entries of generated tokens; those of prompts too with cudagraph_mode FULL",
    how_sure="follows from the code; the wrong answers were shown",
)
