"""`ubatch-max-seq-len`: micro-batches of a capture get the longest length of that capture (PR 40961)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import correct_result, fix
from vllm_graphfix.fix import Diagnosis, Event, Patch, Slice, Verdict
from vllm_graphfix.source.part import module_name

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source

_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_PLACES = {"ubatch-utils": "vllm/v1/worker/ubatch_utils.py", "backend-utils": "vllm/v1/attention/backends/utils.py"}
"""Files by shape; the second in 0.14.1."""
_MODULES = {shape: module_name(path) for shape, path in _PLACES.items()}
_FLASH = "vllm/v1/attention/backends/flash_attn.py"
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
_READ = "max_seq_len = common_attn_metadata.max_seq_len"
LONGEST_LENGTH_FORGOTTEN = Event(
    "longest-length-forgotten",
    "A micro-batch was made of a batch whose `max_seq_len` is longer than any of its requests, as in a capture: on "
    "stock its kernels are captured for the lengths of the dummy requests.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the longest length in the metadata of a micro-batch: its own, or that of its batch."""
    functions = {shape: source.function(path, _TARGET) for shape, path in _PLACES.items()}
    made = {shape: make for shape, make in functions.items() if make is not None}
    if not made:
        if any(source.contains_word(path, _SPLIT) for path in (*_PLACES.values(), _RUNNER)):
            return Diagnosis.unrecognised("metadata of micro-batches are made in a way", _RUNNER)
        return Diagnosis.absent("no metadata of micro-batches")
    ((shape, make), *others) = made.items()
    longest = [pattern for pattern in (*_LONGEST, _BATCHS) if make.find(pattern)]
    own = make.find(*_OWN)
    if not others and make.assigned("max_seq_len") == 1 and not make.reassigns("attn_metadata"):
        schedule = source.function(_FLASH, "FlashAttentionMetadataBuilder.build")
        read = schedule is not None and schedule.always(_READ) and schedule.assigned("max_seq_len") == 1
        if len(longest) == 1 and make.always(longest[0]) and read:
            return Diagnosis.fixed(
                "a micro-batch is told of the longest length that its batch is", make.at(make.find(longest[0])[0])
            )
        if len(own) == 1:
            return Diagnosis.affected(
                "a micro-batch is told of its own longest length, and in a capture that is the dummy requests'",
                make.at(own[0]),
                shape,
            )
    return Diagnosis.unrecognised("the longest length of a micro-batch is found in a way", make)


def with_longest_length(made: Any, ubatch_slice: Any, attn_metadata: Any) -> Callable[[], None] | None:
    """Set the longest length of a batch if that is longer than all its requests, as in a capture.

    In other steps the longest request is in one of the micro-batches, and the others do not need its length, though
    upstream passes it on.
    """
    longest = attn_metadata.max_seq_len
    if made.max_seq_len >= longest or _longest_on_the_host(attn_metadata) >= longest:
        return None

    def hand_on() -> None:
        made.max_seq_len = longest

    return hand_on


def _longest_on_the_host(batch: Any) -> int:
    """Return the longest length of a batch's requests, from host tensors that stock has just read itself."""
    lengths = getattr(batch, "seq_lens_cpu_upper_bound", None)
    return int((batch.seq_lens_cpu if lengths is None else lengths).max())


def corrections(shape: str) -> tuple[Patch, ...]:
    """Return the patch of the module that makes the metadata."""
    return (correct_result(_MODULES[shape], _TARGET, LONGEST_LENGTH_FORGOTTEN)(with_longest_length),)


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
            clause="--enable-dbo is set",
        ),
        needs.FULL_GRAPHS,
        Need("a sliding window", _has_a_window, "in some layers at least", clause="the model has a sliding window"),
        Need(
            "FlashAttention",
            lambda deployment, _: deployment.flash_attention(),
            "which has no window if the longest length fits in it; other kernels that choose by it were not looked at",
            clause="attention runs on FlashAttention",
        ),
    )


def _has_a_window(deployment: Deployment, _: str) -> Fact:
    """Tell if layers of the model have a sliding window."""
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


FIX = fix(
    "ubatch-max-seq-len",
    runner="V1",
    diagnose=diagnose,
    surroundings=(
        # The way from the longest length of a batch to that of its micro-batches
        Slice(_RUNNER, "GPUModelRunner._build_attention_metadata", f"max_seq_len {_SPLIT}"),
        *(Slice(path, _TARGET, "max_seq_len") for path in _PLACES.values()),
        *(Slice(path, _SPLIT, f"{_TARGET} results max_seq_len") for path in _PLACES.values()),
        # The lengths of dummy requests, and the choice of kernels, which might raise the length again
        Slice(_RUNNER, "GPUModelRunner._dummy_run", "seq_lens for_cudagraph_capture", Verdict.AFFECTED),
        Slice(_FLASH, "FlashAttentionMetadataBuilder.build", "max_seq_len", Verdict.AFFECTED),
    ),
    recognised=(*_OWN, *_LONGEST, _BATCHS),
    # Its value marks a capture's micro-batches on model runner V2.
    distant_code="for_capture",
    corrections=corrections,
    modules=tuple(_MODULES.values()),
    events=(LONGEST_LENGTH_FORGOTTEN,),
    needs=needs,
)
