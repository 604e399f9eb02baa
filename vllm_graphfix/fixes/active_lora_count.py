"""`active-lora-count`: a graph for a number of LoRA adapters also has room for rows without one."""

from __future__ import annotations

import functools
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import About

if TYPE_CHECKING:
    import ast
    from collections.abc import Sequence

    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_CONFIG = "vllm/config/lora.py"
_UTILS = "vllm/lora/utils.py"
_META = "vllm/lora/ops/triton_ops/lora_kernel_metadata.py"
_SHRINK = "vllm/lora/ops/triton_ops/lora_shrink_op.py"
_EXPAND = "vllm/lora/ops/triton_ops/lora_expand_op.py"
_PUNICA = "vllm/lora/punica_wrapper/punica_gpu.py"
_MIXIN = "vllm/v1/worker/lora_model_runner_mixin.py"
_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_DISPATCHER = "vllm/v1/cudagraph_dispatcher.py"
_UTILS_V2 = "vllm/v1/worker/gpu/lora_utils.py"
_MANAGER_V2 = "vllm/v1/worker/gpu/cudagraph_utils.py"
_ADAPTERS = "vllm/lora/model_manager.py"
_MODULE = "vllm.lora.punica_wrapper.punica_gpu"
_TARGET = "PunicaWrapperGPU.update_metadata"

_LISTED = "lora_ids, num_tokens_per_lora = torch.unique(token_lora_mapping, sorted=True, return_counts=True)"
_LIST = "self.active_lora_ids[:lora_ids.size(0)].copy_(lora_ids, non_blocking=True)"
_ALL = "num_active_loras = self.default_num_active_loras_cpu"
_SHAPES = {
    "number": ("self.num_active_loras", "self.num_active_loras if specialize_active_lora else max_loras + 1"),
    "tensor": ("num_active_loras", "num_active_loras = self.num_active_loras_cpu"),
}
"""What holds the number of programs while the list is made, and how the kernels are given it."""
_PREPARED = (
    "self.token_mapping_meta.prepare_tensors(self.token_lora_indices)",
    "self.prompt_mapping_meta.prepare_tensors(self.sampler_indices)",
)
_FORCED = """
num_active_loras = (
    force_num_active_loras
    if force_num_active_loras is not None
    else len(self.input_batch.lora_id_to_lora_request)
)
"""
_COUNTED_V2 = "return len(lora_state.get_activate_loras(req_ids))"
_RUNNERS = {"number": ("V1",), "tensor": ("V1",), "both-runners": ("V1", "V2")}

BASE_ROWS_UNCOUNTED = Event(
    "base-rows-uncounted",
    "Adapters of a batch changed, graph or not, and it has more kinds of rows, those without one among them, than "
    "kernels have programs in the graph for its number of adapters: on stock its last adapter is left out of a replay.",
)


def diagnose(source: Source) -> Diagnosis:
    listed = source.function(_META, "LoRAKernelMeta.prepare_tensors")
    given = source.function(_META, "LoRAKernelMeta.meta_args")
    prepare = source.function(_PUNICA, _TARGET)
    select = source.function(_MIXIN, "LoRAModelRunnerMixin.maybe_select_dummy_loras")
    count = source.function(_RUNNER, "GPUModelRunner._determine_batch_execution_and_padding")
    count_v2 = source.function(_UTILS_V2, "get_num_active_loras_for_dispatch")
    kernels = (source.function(_SHRINK, "_lora_shrink"), source.function(_EXPAND, "_lora_expand"))
    if not source.says(_CONFIG, "specialize_active_lora"):
        return Diagnosis(Verdict.ABSENT, "one graph for any number of adapters")
    if not (listed and given and prepare and select and count):
        return Diagnosis.unrecognised("adapters are counted in a way", listed or _META)
    told = prepare.takes.startswith("self, mapping, ") and all(prepare.only(each) for each in _PREPARED)
    if not (told and _lists(listed) and all(kernel is not None and _launches(kernel) for kernel in kernels)):
        return Diagnosis.unrecognised("kernels of adapters are told of a batch in a way", listed)
    everything = given.only(_ALL)
    if everything and given.always(_ALL) and given.assigned("num_active_loras") == 1:
        return Diagnosis(Verdict.FIXED, "kernels have programs for all adapters and none", given.at(everything))
    shape = next((name for name, (_, handed) in _SHAPES.items() if len(given.find(handed)) == 1), None)
    room = _room(listed, shape)
    if room is not None:
        return Diagnosis(Verdict.FIXED, "kernels have a program for rows without an adapter", listed.at(room))
    counted = _counted(listed, shape)
    if (
        counted
        and shape
        and _captures_adapters_alone(select)
        and count.only(_FORCED)
        and count.assigned("num_active_loras") == 1
        and (count_v2 is None or len(count_v2.find(_COUNTED_V2)) == 1)
    ):
        return Diagnosis(
            Verdict.AFFECTED,
            "a graph is chosen by the number of adapters, and its kernels walk a list that also has rows without one",
            listed.at(counted),
            "both-runners" if count_v2 else shape,
        )
    return Diagnosis.unrecognised("adapters are counted in a way", listed)


def _lists(listed: Function) -> bool:
    """Whether the kernels' list is of all that rows have, -1 among it."""
    return listed.only(_LISTED) is not None and listed.only(_LIST) is not None and listed.assigned("lora_ids") == 1


def _launches(kernel: Function) -> bool:
    """Whether there are as many programs as the list is said to have entries."""
    grids = [part for each in ("num_active_loras", "num_active_loras.item()") for part in kernel.find(f"(..., {each})")]
    grids += [
        part for each in ("num_active_loras", "num_active_loras.item()") for part in kernel.find(f"(..., ..., {each})")
    ]
    return len(grids) == 1 and not kernel.sets("num_active_loras")


def _known(number: str) -> tuple[str, ...]:
    """What is done with the number of programs on stock."""
    return (
        f"{number} = lora_ids.size(0)",
        f"self.captured_lora_counts and {number} > 0",
        f"idx = bisect.bisect_left(self.captured_lora_counts, {number})",
        f"{number} = self.captured_lora_counts[idx]",
        "self.num_active_loras_cpu[0] = num_active_loras",
    )


def _counted(listed: Function, shape: str | None) -> ast.stmt | ast.expr | None:
    """The statement of vLLM that sets how many programs its LoRA kernels are launched with; None if it is another one.

    It is the number of entries in the list of a batch's adapters, rounded up to one that a graph was captured with.
    """
    if shape is None:
        return None
    known = _known(_SHAPES[shape][0])
    counted = listed.only(known[0])
    return counted if listed.always(known[0]) and listed.confines("num_active_loras", *known) else None


def _room(listed: Function, shape: str | None) -> ast.stmt | ast.expr | None:
    """The statement of vLLM that launches one program more than the list has entries; None if there is none.

    There are never more programs than the list has places.
    """
    if shape is None:
        return None
    number = _SHAPES[shape][0]
    ways = [f"{number} = min({each} + 1, self.active_lora_ids.size(0))" for each in ("lora_ids.size(0)", number)]
    found = [way for way in ways if listed.always(way)]
    right = len(found) == 1 and listed.confines("num_active_loras", *_known(number), *found)
    return listed.only(found[0]) if right else None


def _captures_adapters_alone(select: Function) -> bool:
    """Whether a graph is captured with as many adapters as it is for, and with no row without one."""
    return (
        len(select.find("effective_num_loras = min(num_active_loras, max_loras)")) == 1
        and len(select.find("np.array(list(range(1, effective_num_loras + 1)), dtype=np.int32)")) == 1
        and len(select.find("np.arange(num_reqs, dtype=np.int32) % effective_num_loras + 1")) == 1
    )


def _count_rows_without_adapters(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `PunicaWrapperGPU.update_metadata(self, mapping, …)`, called once for all steps with the same adapters.

    Kernels get one program more than vLLM counts, in captures too, and never more than the list has places. A place
    that a batch does not need holds -1, with which a program ends at once. So a graph for N adapters has room for them
    and for rows without one, and dispatch stays as it is. The number is the host's.
    """
    uncounted, corrects = activity.counter(BASE_ROWS_UNCOUNTED), activity.corrects

    @functools.wraps(stock)
    def update_metadata(self: Any, mapping: Any, *args: Any, **kwargs: Any) -> Any:
        given = stock(self, mapping, *args, **kwargs)
        try:
            if self.lora_config.specialize_active_lora:
                metas = (self.token_mapping_meta, self.prompt_mapping_meta)
                if _lacks_a_program(mapping, metas[0]):
                    uncounted.count += 1
                if corrects:
                    numbers = [_one_more(meta) for meta in metas]
                    for meta, number in zip(metas, numbers, strict=True):
                        _set(meta, number)
        except Exception as error:
            activity.failed(error)
        return given

    return update_metadata


def _lacks_a_program(mapping: Any, meta: Any) -> bool:
    """Whether stock's graph for the adapters of *mapping* leaves one of them out. Encoders' graphs are other ones."""
    adapters = set(mapping.prompt_mapping)
    mixed = len(adapters) > 1 and 0 in adapters and mapping.type.name == "LANGUAGE"
    return mixed and len(adapters) > _programs(meta, len(adapters) - 1)


def _programs(meta: Any, adapters: int) -> int:
    """The programs for different adapters in stock's graph for as many *adapters*, captured with no other rows."""
    most: int = meta.active_lora_ids.shape[0] - 1
    cases: Sequence[int] = meta.captured_lora_counts
    if cases:
        return _up_to(cases, min(_up_to(cases, adapters), most))
    from vllm.lora.utils import get_captured_lora_counts  # 0.16.0 forgets them, and its programs are not rounded up

    return min(_up_to(get_captured_lora_counts(most, True), adapters), most)


def _up_to(cases: Sequence[int], number: int) -> int:
    return cases[min(bisect_left(cases, number), len(cases) - 1)]


def _one_more(meta: Any) -> int:
    """One program more than stock counts; none where no row has an adapter, and kernels do not run."""
    number: int = int(meta.num_active_loras_cpu[0]) if hasattr(meta, "num_active_loras_cpu") else meta.num_active_loras
    return min(number + 1, meta.active_lora_ids.shape[0]) if number else 0


def _set(meta: Any, number: int) -> None:
    if hasattr(meta, "num_active_loras_cpu"):
        meta.num_active_loras_cpu[0] = number
    else:  # 0.16.0
        meta.num_active_loras = number


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_MODULE, _TARGET, _count_rows_without_adapters),)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need, on_runners, unseen

    adapters, counted = "--enable-lora", "--specialize-active-lora"
    return (
        on_runners("model runner V1, or V2 from 0.24.0 on", lambda shape: _RUNNERS.get(shape, ("V1", "V2"))),
        Need(adapters, lambda deployment, _: deployment.switched_on(adapters), flags=(adapters,), usual=False),
        Need(
            counted,
            lambda deployment, _: deployment.switched_on(counted),
            "a graph for each number of adapters",
            (counted,),
            usual=False,
        ),
        needs.GRAPHS,
        unseen("requests with an adapter and without one", "in one batch"),
    )


FIX = Fix(
    number=24,
    name="active-lora-count",
    runner=None,
    reads=(
        _CONFIG,
        _UTILS,
        _META,
        _SHRINK,
        _EXPAND,
        _PUNICA,
        _MIXIN,
        _RUNNER,
        _DISPATCHER,
        _UTILS_V2,
        _MANAGER_V2,
        _ADAPTERS,
    ),
    modules=(_MODULE,),
    diagnose=diagnose,
    patches=patches,
    events=(BASE_ROWS_UNCOUNTED,),
    needs=needs,
    ground="answers",
    evidence=(
        f"{_UTILS}::get_captured_lora_counts",
        f"{_META}::LoRAKernelMeta._reset",
        f"{_META}::LoRAKernelMeta.make",
        f"{_SHRINK}::_lora_shrink_kernel",
        f"{_EXPAND}::_lora_expand_kernel",
        f"{_PUNICA}::PunicaWrapperGPU.__init__",
        f"{_ADAPTERS}::LoRAModelManager._set_adapter_mapping",
        f"{_DISPATCHER}::CudagraphDispatcher._get_lora_cases",
        f"{_DISPATCHER}::CudagraphDispatcher.dispatch",
        f"{_UTILS_V2}::get_lora_capture_cases",
        f"{_UTILS_V2}::create_lora_capture_hook",
        f"{_UTILS_V2}::LoraState.get_activate_loras",
        f"{_MANAGER_V2}::CudaGraphManager._resolve_effective_loras",
        f"{_MANAGER_V2}::CudaGraphManager.dispatch",
    ),
)

ABOUT = About(
    pr=None,
    references=("PR 32005",),
    summary="graphs for a number of LoRA adapters have room for rows without one",
    releases="0.16.0 - 0.33.0",
    absent="0.14.1 - 0.15.1",
    seen="requests with a LoRA adapter are answered by the base model while others without one run beside them",
    first_test="no `--specialize-active-lora`: gone?",
    symptom="With --specialize-active-lora, requests of one adapter get the base model's answers while requests "
    "without an adapter are in the same batch. Alone, or without CUDA graphs, they are right. Nothing ends in an "
    "error.",
    cause="There is a graph for each of several numbers of adapters, captured with just as many programs of the "
    "kernels, and it is chosen by how many adapters a batch has. The kernels walk a list of what rows have, and -1, "
    "for rows without an adapter, is an entry of it, the first. A batch of N adapters and such rows has N + 1, of "
    "which the graph for N has programs for N: the last adapter is left out. The greatest graph, for one more than "
    "there can be adapters, is captured with adapters alone, too.",
    remedy="Kernels have one program more than vLLM counts, while a graph is captured too, and at most as many as the "
    "list has places. Graphs are chosen as before. A program without an entry ends at once.",
    detect="Send requests with an adapter and without one together, and again without --specialize-active-lora: the "
    "answers of one adapter differ. The counter of `observe` says how often such batches came.",
    workaround="Leave out --specialize-active-lora.",
    removable="no release of vLLM has a remedy",
    in_caches="entries of generated tokens of requests with an adapter, and of prompts in piecewise graphs: those of "
    "the base model, kept under the adapter's name",
    how_sure="follows from the code; caches were not looked at",
)
