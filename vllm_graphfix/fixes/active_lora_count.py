"""`active-lora-count`: a graph for a number of LoRA adapters also has room for rows without one."""

from __future__ import annotations

import functools
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction, Verdict
from vllm_graphfix.fixes._stock_path import find_override

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source

_CONFIG = "vllm/config/lora.py"
_UTILS = "vllm/lora/utils.py"
_META = "vllm/lora/ops/triton_ops/lora_kernel_metadata.py"
_EXPAND = "vllm/lora/ops/triton_ops/lora_expand_op.py"
_PUNICA = "vllm/lora/punica_wrapper/punica_gpu.py"
_MIXIN = "vllm/v1/worker/lora_model_runner_mixin.py"
_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_DISPATCHER = "vllm/v1/cudagraph_dispatcher.py"
_UTILS_V2 = "vllm/v1/worker/gpu/lora_utils.py"
_MANAGER_V2 = "vllm/v1/worker/gpu/cudagraph_utils.py"
_MODULE, _TARGET = "vllm.lora.punica_wrapper.punica_gpu", "PunicaWrapperGPU.update_metadata"
_META_MODULE = "vllm.lora.ops.triton_ops.lora_kernel_metadata"
_FOREIGN = "graphfix_foreign_count"
"""The attribute of a Punica wrapper with the name of foreign code that may count otherwise than stock, or None."""

_ALL = "num_active_loras = self.default_num_active_loras_cpu"
_BY_BATCH = f"""
if specialize_active_lora:
    num_active_loras = self.num_active_loras_cpu
else:
    {_ALL}
"""
_SHAPES = {
    "number": ("self.num_active_loras", "self.num_active_loras if specialize_active_lora else max_loras + 1"),
    "tensor": ("num_active_loras", _BY_BATCH),
}
"""The number of programs while the list is made, and its way to the kernels."""
_COUNTED = tuple(f"{number} = lora_ids.size(0)" for number, _ in _SHAPES.values())
_HANDED_ON = "self.num_active_loras_cpu[0] = num_active_loras"
_ROOM = tuple(
    f"{number} = min({counted} + 1, self.active_lora_ids.size(0))"
    for number, _ in _SHAPES.values()
    for counted in ("lora_ids.size(0)", number)
)
_NUMBERS = "num_active_loras force_num_active_loras effective_num_active_loras"
_RUNNERS = {"number": ("V1",), "tensor": ("V1",), "both-runners": ("V1", "V2")}

BASE_ROWS_UNCOUNTED = Event(
    "base-rows-uncounted",
    "Adapters of a batch changed, graph or not, and it has more kinds of rows, those without one among them, than "
    "kernels have programs in the graph for its number of adapters: on stock its last adapter is left out of a replay.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the number of programs that kernels are launched with: the entries of the list, one more, or all."""
    if not source.contains_word(_CONFIG, "specialize_active_lora"):
        return Diagnosis.absent("one graph for any number of adapters")
    listed = source.function(_META, "LoRAKernelMeta.prepare_tensors")
    args = source.function(_META, "LoRAKernelMeta.meta_args")
    if listed is not None and args is not None:
        everything = args.find_unique(_ALL)
        if everything and args.always(_ALL) and args.assigned("num_active_loras") == 1:
            return Diagnosis.fixed("kernels have programs for all adapters and none", args.at(everything))
        shape = next((name for name, (_, handed) in _SHAPES.items() if len(args.find(handed)) == 1), None)
        counted = listed.find(*_COUNTED)
        room = listed.find(*_ROOM)
        handed_on = listed.find(_HANDED_ON)
        # One after the other in every step: a number that is counted again, or later, does not reach the kernels.
        is_effective = (
            len(room) == 1
            and len(counted) <= 1
            and room[0] in listed.node.body
            and listed.in_one_block(*counted, *room, *handed_on)
        )
        if shape and is_effective:
            return Diagnosis.fixed("kernels have a program for rows without an adapter", listed.at(room[0]))
        if shape and len(counted) == 1 and not room:
            return Diagnosis.affected(
                "a graph is chosen by the number of adapters, and its kernels walk a list that also has rows without "
                "one",
                listed.at(counted[0]),
                "both-runners" if source.function(_UTILS_V2, "get_num_active_loras_for_dispatch") else shape,
            )
    return Diagnosis.unrecognised("adapters are counted in a way", listed or _META)


def _count_rows_without_adapters(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `PunicaWrapperGPU.update_metadata(self, mapping, …)`, which runs once for all steps with the same adapters.

    Kernels get one program more than vLLM counts, in captures too, but never more than the list has entries. An unused
    entry holds -1, with which a program ends at once. So a graph for N adapters also has a program for rows without
    one, and dispatch is unchanged. The number is on the host.
    """
    uncounted, corrects = activity.counter(BASE_ROWS_UNCOUNTED), activity.corrects

    @functools.wraps(stock)
    def update_metadata(self: Any, mapping: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, mapping, *args, **kwargs)
        try:
            if self.lora_config.specialize_active_lora:
                if (foreign := _foreign_count(self)) is not None:
                    activity.step_aside("active-lora-count", foreign)
                    return result
                metas = (self.token_mapping_meta, self.prompt_mapping_meta)
                if _lacks_a_program(mapping, metas[0]):
                    uncounted.count += 1
                if corrects:
                    numbers = [_one_more(meta) for meta in metas]
                    for meta, number in zip(metas, numbers, strict=True):
                        _set(meta, number)
        except Exception as error:
            activity.failed(error)
        return result

    return update_metadata


def _foreign_count(wrapper: Any) -> str | None:
    """Name foreign code in *wrapper*, or in its lists, that may count otherwise than stock; searched once.

    A program too many ends at once only where the entries behind a list hold -1, as stock's do.
    """
    if _FOREIGN not in vars(wrapper):
        lists = (wrapper.token_mapping_meta, wrapper.prompt_mapping_meta)
        names = ("prepare_tensors", "meta_args", "_reset")
        setattr(
            wrapper,
            _FOREIGN,
            find_override(wrapper, _MODULE, "PunicaWrapperGPU", ("update_metadata",))
            or next(filter(None, (find_override(each, _META_MODULE, "LoRAKernelMeta", names) for each in lists)), None),
        )
    foreign: str | None = getattr(wrapper, _FOREIGN)
    return foreign


def _lacks_a_program(mapping: Any, meta: Any) -> bool:
    """Tell if stock's graph for the adapters of *mapping* leaves one out. Not for encoders, which have other graphs."""
    adapters = set(mapping.prompt_mapping)
    mixed = len(adapters) > 1 and 0 in adapters and mapping.type.name == "LANGUAGE"
    return mixed and len(adapters) > _programs(meta, len(adapters) - 1)


def _programs(meta: Any, adapters: int) -> int:
    """Return the number of programs in stock's graph for *adapters* adapters, captured without other rows."""
    most: int = meta.active_lora_ids.shape[0] - 1
    cases: Sequence[int] = meta.captured_lora_counts
    if cases:
        return _up_to(cases, min(_up_to(cases, adapters), most))
    from vllm.lora.utils import get_captured_lora_counts  # 0.16.0 does not store them, and does not round up

    return min(_up_to(get_captured_lora_counts(most, True), adapters), most)


def _up_to(cases: Sequence[int], number: int) -> int:
    return cases[min(bisect_left(cases, number), len(cases) - 1)]


def _one_more(meta: Any) -> int:
    """Return one program more than stock counts; 0 where no row has an adapter, and kernels do not run."""
    number: int = int(meta.num_active_loras_cpu[0]) if hasattr(meta, "num_active_loras_cpu") else meta.num_active_loras
    return min(number + 1, meta.active_lora_ids.shape[0]) if number else 0


def _set(meta: Any, number: int) -> None:
    if hasattr(meta, "num_active_loras_cpu"):
        meta.num_active_loras_cpu[0] = number
    else:  # 0.16.0
        meta.num_active_loras = number


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need, on_runners, unseen

    adapters, counted = "--enable-lora", "--specialize-active-lora"
    return (
        on_runners("model runner V1, or V2 from 0.24.0 on", lambda shape: _RUNNERS.get(shape, ("V1", "V2"))),
        Need(
            adapters,
            lambda deployment, _: deployment.switched_on(adapters),
            flags=(adapters,),
            usual=False,
            clause="--enable-lora is set",
        ),
        Need(
            counted,
            lambda deployment, _: deployment.switched_on(counted),
            "a graph for each number of adapters",
            (counted,),
            usual=False,
            clause="--specialize-active-lora is set",
        ),
        needs.GRAPHS,
        unseen("requests with an adapter and without one", "in one batch"),
    )


FIX = fix(
    "active-lora-count",
    diagnose=diagnose,
    surroundings=(
        Slice(_CONFIG, "", "specialize_active_lora", Verdict.AFFECTED),
        # The list, the count of its entries, and the programs that are launched for them
        Slice(_PUNICA, _TARGET, "num_active_loras num_active_loras_cpu"),
        Slice(_META, "LoRAKernelMeta.prepare_tensors", "num_active_loras num_active_loras_cpu lora_ids"),
        Slice(_META, "LoRAKernelMeta.meta_args", "num_active_loras num_active_loras_cpu"),
        Slice(_META, "LoRAKernelMeta._reset", "active_lora_ids num_active_loras num_active_loras_cpu"),
        Slice(_META, "LoRAKernelMeta.make", "active_lora_ids default_num_active_loras_cpu"),
        # Both kernels need the remedy
        Slice(_EXPAND, "_lora_expand", "num_active_loras"),
        # The choice of the graph by the number of adapters, in either runner
        Slice(_RUNNER, "GPUModelRunner._determine_batch_execution_and_padding", _NUMBERS, Verdict.AFFECTED),
        Slice(_DISPATCHER, "CudagraphDispatcher.dispatch", _NUMBERS, Verdict.AFFECTED),
        Slice(_UTILS, "get_captured_lora_counts", "", Verdict.AFFECTED),
        Slice(_UTILS_V2, "get_num_active_loras_for_dispatch", "get_activate_loras", Verdict.AFFECTED),
        Slice(_UTILS_V2, "LoraState.get_activate_loras", "", Verdict.AFFECTED),
        Slice(_MANAGER_V2, "CudaGraphManager.dispatch", "_resolve_effective_loras", Verdict.AFFECTED),
        Slice(_MANAGER_V2, "CudaGraphManager._resolve_effective_loras", "", Verdict.AFFECTED),
        # The rows of the capture
        Slice(_MIXIN, "LoRAModelRunnerMixin.maybe_select_dummy_loras", "effective_num_loras", Verdict.AFFECTED),
    ),
    recognised=(*_COUNTED, *_ROOM, _BY_BATCH, _ALL),
    corrections=(Patch(_MODULE, _TARGET, _count_rows_without_adapters),),
    events=(BASE_ROWS_UNCOUNTED,),
    needs=needs,
    default_rationale="answers",
)
