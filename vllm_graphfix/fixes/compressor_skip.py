"""`compressor-skip`: graphs of DeepSeek V4 write compressed entries of all groups of tokens (as in 0.33.0)."""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction, Verdict

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_COMPRESSOR = "vllm/models/deepseek_v4/compressor.py"
_COMPRESSOR_BEFORE = "vllm/model_executor/layers/deepseek_compressor.py"
"""The file up to 0.21.0."""
_ATTENTION = "vllm/models/deepseek_v4/attention.py"
_BATCH = "vllm/v1/worker/gpu/input_batch.py"
_MODULE = "vllm.models.deepseek_v4.compressor"
_TARGET = "DeepseekCompressor.forward"
_BUILD = "CompressorMetadataBuilder.build"
_RATIO = 128
"""Tokens in a group that a step may skip."""
_HEAD = 512

_SKIPPED = (
    "if (current_platform.is_cuda() and self.head_dim == 512 and self.compress_ratio == 128 and {recorded} "
    "and state_metadata.c128_boundary is False): return"
)
_BY_MODE = _SKIPPED.format(recorded="forward_context.cudagraph_runtime_mode != CUDAGraphMode.FULL")
_BY_CAPTURE = _SKIPPED.format(recorded="not torch.cuda.is_current_stream_capturing()")
"""Upstream's correction."""
_FIELD = "c128_boundary: bool | None = None"
_DUMMY = "if not isinstance(attn_metadata, dict): return"
_SAVES = (
    "save_partial_states(...)",
    "_save_partial_states_kernel[(num_actual,)](...)",
    "_SAVE_PARTIAL_STATES_KERNEL(...)",
)
_WRITES = (
    "compress_norm_rope_store_fn(...)",
    "self._fused_kernel[(num_actual,)](...)",
    "self._compress_norm_rope_store(...)",
)
_SHAPES = {
    "starts = metadata._num_computed_tokens_cpu": "by-computed-tokens",
    "seq_lens_cpu = metadata.seq_lens_cpu_upper_bound": "by-lengths",
}
"""The numbers by which the builder detects that a step completes a group. Model runner V2 has only lengths."""

LAYER_SKIPPED = Event(
    "layer-left-out",
    "A layer of DeepSeek V4 was recorded into a graph that leaves out what writes compressed entries: on stock no "
    "replay writes one there.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the conditions that end a layer's step between saving its states and writing its entries."""
    path = _COMPRESSOR if source.read(_COMPRESSOR) is not None else _COMPRESSOR_BEFORE
    if source.read(path) is None:
        return Diagnosis.absent("no compressor, as in DeepSeek V4")
    forward, build = source.function(path, _TARGET), source.function(path, _BUILD)
    if forward is None or build is None:
        return Diagnosis.unrecognised("entries of groups of tokens are written in a way", forward or path)
    ends = _ends_between_saving_and_writing(forward)
    skip = forward.find_unique(_BY_MODE)
    if skip is not None and ends == [skip]:
        if "c128_boundary" not in ast.unparse(build.node):
            return Diagnosis.fixed("of no step it is known that it completes no group", build.where)
        return Diagnosis.affected(
            "a step that completes no group of 128 tokens leaves its entries out, also one that a graph "
            "records while the forward context says NONE or PIECEWISE",
            forward.at(skip),
            _shape(source),
        )
    if ends == [] and not forward.contains_name("c128_boundary"):
        return Diagnosis.fixed("every step writes the entries of the groups that it completes", forward.where)
    remedy = forward.find_unique(_BY_CAPTURE)
    if remedy is not None and ends == [remedy]:
        return Diagnosis.fixed("what a graph records leaves nothing out", forward.at(remedy))
    return Diagnosis.unrecognised("entries of groups of tokens are written in a way", forward)


def _ends_between_saving_and_writing(forward: Function) -> list[ast.stmt | ast.expr] | None:
    """List the conditions that end a step after its states are saved and before its entries are written.

    None unless it saves and writes once each, in the same block.
    """
    saved = forward.find(*_SAVES)
    written = forward.find(*_WRITES)
    dummy = forward.find_unique(_DUMMY)
    if len(saved) != 1 or len(written) != 1 or dummy is None or not forward.in_one_block(dummy, *saved, *written):
        return None
    returns = [each for each in forward.find("return") if saved[0].lineno < each.lineno < written[0].lineno]
    conditions = [part for part in forward.find("if ...: ...") if part.lineno > saved[0].lineno]
    between = [part for part in conditions if any(each in ast.walk(part) for each in returns)]
    if len(between) != len(returns) or not all(forward.in_one_block(*saved, part, *written) for part in between):
        return None
    return between


def _shape(source: Source) -> str:
    """Name the numbers that show if a step completes a group; "" for unknown ones."""
    decides = source.function(_COMPRESSOR, "_get_c128_boundary")
    shapes = [shape for pattern, shape in _SHAPES.items() if decides is not None and decides.find_unique(pattern)]
    return shapes[0] if len(shapes) == 1 else ""


def _write_in_captures(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `DeepseekCompressor.forward`: in a capture, the metadata never claim that the batch completes no group.

    A graph cannot decide in each replay, and the batch of a capture is a dummy. The kernel writes nothing for a group
    that is not complete. Outside of captures, warm-ups included, nothing changes.
    """
    import torch

    met, corrects = activity.counter(LAYER_SKIPPED), activity.corrects

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        corrected = None
        try:
            if self.compress_ratio == _RATIO and _is_capturing(torch):
                metadata = _metadata_that_skip(self)
                if metadata is not None:
                    if corrects:
                        corrected = metadata
                        corrected.c128_boundary = None
                    met.count += 1
        except Exception as error:
            activity.failed(error)
        try:
            return stock(self, *args, **kwargs)
        finally:
            # Restored, since all layers of this ratio share the metadata, and each is counted.
            if corrected is not None:
                corrected.c128_boundary = False

    return forward


def _is_capturing(torch: Any) -> bool:
    """Tell if a graph is being captured on the current stream."""
    try:
        return bool(torch.cuda.is_current_stream_capturing())
    except RuntimeError as error:
        if "dummy base class" in str(error):  # a torch without CUDA, for other platforms
            return False
        raise


def _metadata_that_skip(layer: Any) -> Any | None:
    """Return the metadata of this step if stock skips the kernel that writes *layer*'s entries; None otherwise."""
    from vllm.forward_context import get_forward_context
    from vllm.platforms import current_platform

    context = get_forward_context()
    if not isinstance(context.attn_metadata, dict) or context.cudagraph_runtime_mode.name == "FULL":
        return None
    metadata = context.attn_metadata[layer.state_cache.prefix]
    skips = metadata.c128_boundary is False and layer.head_dim == _HEAD and current_platform.is_cuda()
    return metadata if skips else None


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    return (
        needs.SPARSE_MLA,
        Need(
            "DeepSeek V4",
            lambda deployment, _: deployment.compressed_by(_RATIO),
            "layers with a compress_ratio of 128",
            clause="the model is DeepSeek V4",
        ),
        Need("CUDA graphs", _in_graphs, "full ones on model runner V1", clause="vLLM runs CUDA graphs"),
        Need(
            "model runner V2 or --enable-dbo",
            _builds_without_the_batch,
            "before 0.30.0 model runner V1 with --enable-dbo",
            ("--enable-dbo",),
            clause="the model runner is V2 or --enable-dbo is set",
        ),
        Need(
            "no drafts under asynchronous scheduling",
            _known_in_time,
            flags=("--async-scheduling",),
            clause="no drafts run under asynchronous scheduling",
        ),
    )


def _in_graphs(deployment: Deployment, shape: str) -> Fact:
    first = shape == "by-computed-tokens" or deployment.runner("V2").holds is False
    return deployment.full_graphs() if first else deployment.graphs()


def _builds_without_the_batch(deployment: Deployment, shape: str) -> Fact:
    """Tell if the builder does not get the batch's requests: microbatches and model runner V2 do not pass them."""
    from vllm_graphfix.deployment import any_of

    microbatches = deployment.switched_on("--enable-dbo")
    if shape == "by-computed-tokens":  # model runner V2 does not pass them
        first = deployment.runner("V1")
        return microbatches if microbatches.holds is False or first.holds else first
    return any_of(deployment.runner("V2"), microbatches)


def _known_in_time(deployment: Deployment, _: str) -> Fact:
    """Tell if the builder knows which step completes a group: not with drafts under asynchronous scheduling."""
    from vllm_graphfix.deployment import Fact

    drafts = deployment.drafts()
    if drafts.holds is not True:
        return drafts if drafts.holds is None else Fact(True, drafts.source)
    asynchronous = deployment.switched_on("--async-scheduling")
    if asynchronous.holds:
        return Fact(False, f"{asynchronous.source} and drafts: nobody knows in time which step completes a group")
    # Not on the line: vLLM may choose it all the same.
    return Fact(None, "--async-scheduling, or whether vLLM logs that asynchronous scheduling is enabled")


FIX = fix(
    "compressor-skip",
    diagnose=diagnose,
    surroundings=(
        # Saving states and writing entries, now and up to 0.21.0
        Slice(_COMPRESSOR, _TARGET, "return save_partial_states _SAVE_PARTIAL_STATES_KERNEL"),
        Slice(
            _COMPRESSOR,
            "DeepseekCompressor._compress_norm_rope_store",
            "return compress_norm_rope_store_fn",
            Verdict.FIXED,
        ),
        Slice(_COMPRESSOR_BEFORE, _TARGET, "return _save_partial_states_kernel c128_boundary"),
        # Every use of the mark of a step that completes no group
        Slice(_COMPRESSOR, _BUILD, "c128_boundary"),
        Slice(_COMPRESSOR, "", "c128_boundary"),
        Slice(_COMPRESSOR, "_get_c128_boundary", "", Verdict.AFFECTED),
        # The class of the compressor: a subclass might skip by the mark
        Slice(_ATTENTION, "DeepseekV4Attention.__init__", "DeepseekCompressor compressor"),
        # Its callers: a layer might skip by the mark, too
        Slice(_ATTENTION, "", "compressor", Verdict.FIXED),
        # The dummy batch of a capture completes no group
        Slice(_BATCH, "InputBatch.make_dummy", "seq_lens_cpu_upper_bound", Verdict.AFFECTED),
    ),
    recognised=(_BY_MODE, _BY_CAPTURE, _FIELD),
    corrections=(Patch(_MODULE, _TARGET, _write_in_captures),),
    events=(LAYER_SKIPPED,),
    needs=needs,
    default_rationale="answers",
)
