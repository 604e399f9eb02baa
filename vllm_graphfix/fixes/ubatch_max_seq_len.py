"""`ubatch-max-seq-len`: micro-batches of a capture are told of the longest length that the capture is (PR 40961)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import About

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_PLACES = {"ubatch-utils": "vllm/v1/worker/ubatch_utils.py", "backend-utils": "vllm/v1/attention/backends/utils.py"}
"""Files by shape: it was in the second in 0.14.1."""
_MODULES = {shape: path.removesuffix(".py").replace("/", ".") for shape, path in _PLACES.items()}
_TARGET = "_make_metadata_with_slice"
_SPLIT = "split_attn_metadata"
_OWN = ("max_seq_len = int(seq_lens_cpu_upper_bound.max())", "max_seq_len = int(seq_lens_cpu.max())")
"""The longest length of a micro-batch's own requests."""
_LONGEST = tuple(
    f"max_seq_len = max({lengths})"
    for own in ("int(seq_lens_cpu_upper_bound.max())", "int(seq_lens_cpu.max())")
    for lengths in (f"{own}, attn_metadata.max_seq_len", f"attn_metadata.max_seq_len, {own}")
)
_BATCHS = "max_seq_len = attn_metadata.max_seq_len"
_MADE = "CommonAttentionMetadata(*..., max_seq_len=max_seq_len)"
_TOLD = """
if for_cudagraph_capture:
    max_seq_len = self.max_model_len
else:
    ...
"""

LONGEST_LENGTH_FORGOTTEN = Event(
    "longest-length-forgotten",
    "A micro-batch was made of a batch that is told of a longer length than any of its requests has, as a capture is: "
    "on stock its kernels are captured for the lengths of the dummy requests.",
)


def diagnose(source: Source) -> Diagnosis:
    found = {shape: source.function(path, _TARGET) for shape, path in _PLACES.items()}
    made = {shape: make for shape, make in found.items() if make is not None}
    if not made:
        if any(source.says(path, _SPLIT) for path in (*_PLACES.values(), _RUNNER)):
            return Diagnosis.unrecognised("metadata of micro-batches are made in a way", _RUNNER)
        return Diagnosis(Verdict.ABSENT, "no metadata of micro-batches")
    ((shape, make), *others) = made.items()
    told = _is_told_in_captures(source)
    calls = source.function(_PLACES[shape], _SPLIT)
    longest = [part for pattern in (*_LONGEST, _BATCHS) for part in make.find(pattern)]
    own = [part for pattern in _OWN for part in make.find(pattern)]
    if others or calls is None or not _hands_on(make, calls):
        return Diagnosis.unrecognised("metadata of micro-batches are made in a way", make)
    if len(longest) == 1 and make.confines("max_seq_len", *_LONGEST, _BATCHS, _MADE):
        return Diagnosis(
            Verdict.FIXED, "a micro-batch is told of the longest length that its batch is", make.at(longest[0])
        )
    if len(own) == 1 and make.confines("max_seq_len", *_OWN, _MADE) and told:
        return Diagnosis(
            Verdict.AFFECTED,
            "a micro-batch is told of its own longest length, and in a capture that is the dummy requests'",
            make.at(own[0]),
            shape,
        )
    return Diagnosis.unrecognised("the longest length of a micro-batch is found in a way", make)


def _hands_on(make: Function, calls: Function) -> bool:
    """Whether metadata of a micro-batch are made of those of the batch, whose longest length goes into them."""
    return (
        make.takes == "ubatch_slice, attn_metadata"
        and not make.sets("attn_metadata")
        and len(make.find(_MADE)) == len(make.find("CommonAttentionMetadata(...)")) == 1
        and len(make.find("return ...")) == 1
        and calls.takes == "ubatch_slices, common_attn_metadata"
        and calls.only(f"results.append({_TARGET}(ubatch_slice, common_attn_metadata))") is not None
    )


def _is_told_in_captures(source: Source) -> bool:
    """Whether a capture is told of the longest length possible, and its requests are as long as their queries."""
    build = source.function(_RUNNER, "GPUModelRunner._build_attention_metadata")
    dummy = source.function(_RUNNER, "GPUModelRunner._dummy_run")
    return (
        build is not None
        and len(build.find(_TOLD)) == 1
        and build.assigned("max_seq_len") == 2
        and len(build.find(f"{_SPLIT}(ubatch_slices, cm)")) == 1
        and dummy is not None
        and len(dummy.find("seq_lens = max_query_len")) == 1
        and len(dummy.find("self._build_attention_metadata(*..., for_cudagraph_capture=is_graph_capturing)")) == 1
    )


def _tell_of_the_longest(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `_make_metadata_with_slice(ubatch_slice, attn_metadata)`.

    A batch that is told of a longer length than its requests have hands it on. In other steps, the longest request is
    in one of the micro-batches, and none needs to know of another's; upstream tells them all the same.
    """
    forgotten, corrects = activity.counter(LONGEST_LENGTH_FORGOTTEN), activity.corrects

    @functools.wraps(stock)
    def _make_metadata_with_slice(ubatch_slice: Any, attn_metadata: Any) -> Any:
        made = stock(ubatch_slice, attn_metadata)
        try:
            longest = attn_metadata.max_seq_len
            if made.max_seq_len < longest and _longest_on_the_host(attn_metadata) < longest:
                if corrects:
                    made.max_seq_len = longest
                forgotten.count += 1
        except Exception as error:
            activity.failed(error)
        return made

    return _make_metadata_with_slice


def _longest_on_the_host(batch: Any) -> int:
    """The longest length of a batch's own requests. Stock has looked at the same tensors just before."""
    lengths = getattr(batch, "seq_lens_cpu_upper_bound", None)
    return int((batch.seq_lens_cpu if lengths is None else lengths).max())


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_MODULES[shape], _TARGET, _tell_of_the_longest),)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    return (
        needs.RUNNER_V1,
        Need(
            "--enable-dbo",
            lambda deployment, _: deployment.switched_on("--enable-dbo"),
            "micro-batches",
            ("--enable-dbo",),
            usual=False,
        ),
        needs.FULL_GRAPHS,
        Need("a sliding window", _has_a_window, "in some layers at least"),
        Need(
            "FlashAttention",
            lambda deployment, _: deployment.flash_attention(),
            "which has no window if the longest length fits in it; other kernels that choose by it were not looked at",
        ),
    )


def _has_a_window(deployment: Deployment, _: str) -> Fact:
    """Layers of the model attend to what is in a window alone."""
    from vllm_graphfix.deployment import Fact

    windows, missing = deployment.configured("sliding_window")
    used, unsure = deployment.configured("use_sliding_window")
    missing = missing or unsure
    if missing is not None:
        return Fact(None, missing)
    sizes = [size for size in windows if isinstance(size, int) and size > 0]
    if not sizes:
        return Fact(False, f"{deployment.model} has no sliding_window")
    if used and not any(used):
        return Fact(False, f"{deployment.model} does not use its sliding_window")
    return Fact(True, f"{deployment.model} has a sliding_window of {min(sizes)}")


FIX = Fix(
    number=22,
    name="ubatch-max-seq-len",
    runner="V1",
    reads=(*_PLACES.values(), _RUNNER),
    modules=tuple(_MODULES.values()),
    diagnose=diagnose,
    patches=patches,
    events=(LONGEST_LENGTH_FORGOTTEN,),
    needs=needs,
    evidence=tuple(f"{path}::slice_query_start_locs" for path in _PLACES.values()),
)

ABOUT = About(
    pr=40961,
    references=(),
    summary="micro-batches of a capture are told of the longest length that the capture is",
    releases="0.14.1 - 0.20.2",
    seen="with micro-batches, a model with sliding windows answers otherwise than without graphs",
    first_test="`-cc.cudagraph_mode=PIECEWISE`: gone?",
    symptom="With --enable-dbo and full CUDA graphs, layers with a sliding window attend to all that came before, and "
    "not only to what is in the window: answers to long requests differ from those without graphs.",
    cause="A capture has requests of one token each, and is told of the longest length possible, since kernels are "
    "chosen by it: FlashAttention has no window if the longest length fits in it. With micro-batches the metadata of "
    "each are made anew, and their longest length is that of the dummy requests. So the graph holds kernels without a "
    "window, and is replayed for requests that are longer.",
    remedy="A micro-batch is told of the longest length that its batch is, if that is longer than all of the batch's "
    "requests. That is so in captures; other steps are as before.",
    detect="Answers to requests longer than the window differ from those with cudagraph_mode PIECEWISE. The counter of "
    "`observe` counts micro-batches of captures, whatever the model.",
    workaround='--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', or no --enable-dbo.',
    removable="with vLLM 0.21.0",
    in_caches="wrong entries of generated tokens, from the first layer with a window on",
    how_sure="follows from the code: only decodes run in these graphs",
)
