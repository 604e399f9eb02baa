"""`compressor-skip`: graphs of DeepSeek V4 write all compressed entries (as in 0.33.0).

They also write those of groups that their capture did not complete.
"""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import About

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_COMPRESSOR = "vllm/models/deepseek_v4/compressor.py"
_COMPRESSOR_BEFORE = "vllm/model_executor/layers/deepseek_compressor.py"
"""Where it was up to 0.21.0."""
_MODULE = "vllm.models.deepseek_v4.compressor"
_TARGET = "DeepseekCompressor.forward"
_BUILD = "CompressorMetadataBuilder.build"
_RATIO = 128
"""Tokens of the groups that may be left out."""
_HEAD = 512

_DUMMY = "if not isinstance(attn_metadata, dict): return"
_LEFT_OUT = (
    "if (current_platform.is_cuda() and self.head_dim == 512 and self.compress_ratio == 128 and {recorded} "
    "and state_metadata.c128_boundary is False): return"
)
_BY_MODE = _LEFT_OUT.format(recorded="forward_context.cudagraph_runtime_mode != CUDAGraphMode.FULL")
_BY_CAPTURE = _LEFT_OUT.format(recorded="not torch.cuda.is_current_stream_capturing()")
_CONTEXT = (
    "forward_context = get_forward_context()",
    "attn_metadata = forward_context.attn_metadata",
    "state_metadata = cast(CompressorMetadata, attn_metadata[self.state_cache.prefix])",
)
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
"""How the builder knows whether a step completes a group. Model runner V2 has lengths alone."""

LAYER_LEFT_OUT = Event(
    "layer-left-out",
    "A layer of DeepSeek V4 was recorded into a graph that leaves out what writes compressed entries: on stock no "
    "replay writes one there.",
)


def diagnose(source: Source) -> Diagnosis:
    path = _COMPRESSOR if source.read(_COMPRESSOR) is not None else _COMPRESSOR_BEFORE
    if source.read(path) is None:
        return Diagnosis(Verdict.ABSENT, "no compressor, as in DeepSeek V4")
    forward, build = source.function(path, _TARGET), source.function(path, _BUILD)
    if forward is not None and build is not None:
        between = _between_saving_and_writing(forward)
        if between == []:
            return Diagnosis(
                Verdict.FIXED, "every step writes the entries of the groups that it completes", forward.where
            )
        for remedy in forward.find(_BY_CAPTURE):
            if between == [remedy]:
                return Diagnosis(Verdict.FIXED, "what a graph records leaves nothing out", forward.at(remedy))
        for left_out in forward.find(_BY_MODE):
            if between != [left_out] or path != _COMPRESSOR:
                break
            if not build.gives("CompressorMetadata(...)", "c128_boundary=..."):
                return Diagnosis(Verdict.FIXED, "of no step it is known that it completes no group", build.where)
            shape = _shape(source, forward, build)
            if shape is not None:
                return Diagnosis(
                    Verdict.AFFECTED,
                    "a step that completes no group of 128 tokens leaves its entries out, also one that a graph "
                    "records while the forward context says NONE or PIECEWISE",
                    forward.at(left_out),
                    shape,
                )
    return Diagnosis.unrecognised("entries of groups of tokens are written in a way", forward or path)


def _between_saving_and_writing(forward: Function) -> list[ast.stmt | ast.expr] | None:
    """Where a step may end after its states are saved and before entries are written; None if it is not known."""
    saved = [call for name in _SAVES for call in forward.find(name)]
    written = [call for name in _WRITES for call in forward.find(name)]
    dummy = forward.only(_DUMMY)
    if len(saved) != 1 or len(written) != 1 or dummy is None or not forward.in_one_block(dummy, *saved, *written):
        return None
    ends = [end for end in forward.find("return") if saved[0].lineno < end.lineno < written[0].lineno]
    inside = [part for part in forward.find("if ...: ...") if part.lineno > saved[0].lineno]
    between = [part for part in inside if any(end in ast.walk(part) for end in ends)]
    if len(between) != len(ends) or not all(forward.in_one_block(*saved, part, *written) for part in between):
        return None
    return between


def _shape(source: Source, forward: Function, build: Function) -> str | None:
    """By what it is known whether a step completes a group; None if it is not what the layers rely on."""
    decides = source.function(_COMPRESSOR, "_get_c128_boundary")
    known = (
        len(forward.each(*_CONTEXT)) == len(_CONTEXT)
        and len(forward.find("state_metadata.c128_boundary")) == 1
        and len(build.find("_get_c128_boundary(common_attn_metadata)")) == 1
        and decides is not None
    )
    shapes = [shape for pattern, shape in _SHAPES.items() if decides is not None and decides.only(pattern)]
    return shapes[0] if known and len(shapes) == 1 else None


def _write_in_captures(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `DeepseekCompressor.forward`: while a graph is captured, each layer writes its entries.

    No layer is told that the batch completes no group. A graph cannot decide anew in each replay, and the batch of a
    capture is a dummy. Where no group is completed, the kernel of the layer writes nothing. Without a capture
    everything is as it was, warm-ups included.
    """
    import torch

    left_out_layers, corrects = activity.counter(LAYER_LEFT_OUT), activity.corrects

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        corrected = None
        try:
            if self.compress_ratio == _RATIO and _is_capturing(torch):
                metadata = _metadata_that_leave_out(self)
                if metadata is not None:
                    if corrects:
                        corrected = metadata
                        corrected.c128_boundary = None
                    left_out_layers.count += 1
        except Exception as error:
            activity.failed(error)
        try:
            return stock(self, *args, **kwargs)
        finally:
            if corrected is not None:  # of all layers of this ratio, and each is counted
                corrected.c128_boundary = False

    return forward


def _is_capturing(torch: Any) -> bool:
    """Whether a graph is being captured on the current stream."""
    try:
        return bool(torch.cuda.is_current_stream_capturing())
    except RuntimeError as error:
        if "dummy base class" in str(error):  # a torch without CUDA, for other platforms
            return False
        raise


def _metadata_that_leave_out(layer: Any) -> Any | None:
    """The metadata of this step that make stock leave out the kernel that writes *layer*'s entries.

    None if stock runs that kernel.
    """
    from vllm.forward_context import get_forward_context
    from vllm.platforms import current_platform

    context = get_forward_context()
    if not isinstance(context.attn_metadata, dict) or context.cudagraph_runtime_mode.name == "FULL":
        return None
    metadata = context.attn_metadata[layer.state_cache.prefix]
    left_out = metadata.c128_boundary is False and layer.head_dim == _HEAD and current_platform.is_cuda()
    return metadata if left_out else None


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_MODULE, _TARGET, _write_in_captures),)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    return (
        needs.SPARSE_MLA,
        Need(
            "DeepSeek V4", lambda deployment, _: deployment.compressed_by(_RATIO), "layers with a compress_ratio of 128"
        ),
        Need("CUDA graphs", _in_graphs, "full ones on model runner V1"),
        Need(
            "model runner V2 or --enable-dbo",
            _builds_without_the_batch,
            "before 0.30.0 model runner V1 with --enable-dbo",
            ("--enable-dbo",),
        ),
        Need("no drafts under asynchronous scheduling", _known_in_time, flags=("--async-scheduling",)),
    )


def _in_graphs(deployment: Deployment, shape: str) -> Fact:
    first = shape == "by-computed-tokens" or deployment.runner("V2").holds is False
    return deployment.full_graphs() if first else deployment.graphs()


def _builds_without_the_batch(deployment: Deployment, shape: str) -> Fact:
    """The builder is not told which requests the batch has: microbatches and model runner V2 do not say."""
    from vllm_graphfix.deployment import any_of

    microbatches = deployment.switched_on("--enable-dbo")
    if shape == "by-computed-tokens":  # which model runner V2 does not tell
        first = deployment.runner("V1")
        return microbatches if microbatches.holds is False or first.holds else first
    return any_of(deployment.runner("V2"), microbatches)


def _known_in_time(deployment: Deployment, _: str) -> Fact:
    """The builder knows which step completes a group: not with drafts under asynchronous scheduling."""
    from vllm_graphfix.deployment import Fact

    drafts = deployment.drafts()
    if drafts.holds is not True:
        return drafts if drafts.holds is None else Fact(True, drafts.told)
    asynchronous = deployment.switched_on("--async-scheduling")
    if asynchronous.holds:
        return Fact(False, f"{asynchronous.told} and drafts: nobody knows in time which step completes a group")
    # Not on the line: vLLM may choose it all the same.
    return Fact(None, "--async-scheduling, or whether vLLM logs that asynchronous scheduling is enabled")


FIX = Fix(
    number=18,
    name="compressor-skip",
    runner=None,
    reads=(_COMPRESSOR, _COMPRESSOR_BEFORE),
    modules=(_MODULE,),
    diagnose=diagnose,
    patches=patches,
    events=(LAYER_LEFT_OUT,),
    needs=needs,
    ground="answers",
    evidence=(
        f"{_COMPRESSOR}::CompressorMetadataBuilder.__init__",
        f"{_COMPRESSOR}::_prefer_two_stage_compressor",
    ),
)

ABOUT = About(
    pr=None,
    references=("PR 48957", "PR 55353"),
    summary="graphs of DeepSeek V4 write compressed entries of groups that their capture did not complete",
    releases="0.27.0 - 0.32.0; before 0.30.0 only microbatches of model runner V1",
    absent="0.14.1 - 0.19.1",
    seen="the model forgets what is far back in a request",
    first_test="`--enforce-eager`: gone?",
    symptom="With CUDA graphs and model runner V2, DeepSeek V4 forgets what is further back than its sliding window: "
    "answers that need it are wrong, and more of them the longer the request. Nothing else tells of it.",
    cause="Layers with a compress_ratio of 128 attend to one entry for each group of 128 tokens. A step that "
    "completes no group does not run what writes entries, unless the forward context says that it is of a full graph. "
    "Model runner V2 captures its full graphs under a context that says NONE, and piecewise ones under PIECEWISE, on "
    "dummy batches that complete no group; model runner V1 captures so with microbatches. Their graphs hold no such "
    "kernel: in none of their replays an entry is written, and attention reads what another request has left in its "
    "place.",
    remedy="While a graph is captured, a layer is not told that the batch completes no group, so that the graph holds "
    "the kernel. It writes where a group is completed, and nothing elsewhere. Steps without a graph are as before.",
    detect="Questions about the beginning of a long prompt get worse answers than with --enforce-eager. The counter "
    "of `observe` counts layers as soon as graphs have been captured.",
    workaround="--enforce-eager; or model runner V1 (VLLM_USE_V2_MODEL_RUNNER=0) without --enable-dbo.",
    removable="with vLLM 0.33.0",
    in_caches="compressed entries that were never written, of prompts and of generated tokens: what was in the block "
    "before is stored in their place. Entries computed from these layers' outputs are wrong, too",
    how_sure="that entries are not written was shown; what reaches a store follows from the code",
)
