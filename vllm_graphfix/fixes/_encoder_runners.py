"""The fallback of model runners, to encode without a graph where `execute` of the graphs returns None."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_graphfix.source.functions import Function

RUNNER = "vllm/v1/worker/gpu_model_runner.py"
ENCODE = "GPUModelRunner._execute_mm_encoder"
RUNNER_V2 = "vllm/v1/worker/gpu/mm/encoder_runner.py"
ENCODE_V2 = "EncoderRunner.execute_mm_encoder"
IN_A_GRAPH = "cudagraph_output = self.encoder_cudagraph_manager.execute(mm_kwargs_batch)"

_CONDITION = """
self.encoder_cudagraph_manager is not None and self.encoder_cudagraph_manager.supports_modality(modality)
"""
_WITHOUT_A_GRAPH = """
if cudagraph_output is not None:
    batch_outputs = cudagraph_output
else:
    batch_outputs = model.embed_multimodal(**mm_kwargs_batch)
"""
_EXECUTED_V2 = """
cudagraph_output = (
    cg_manager.execute(mm_kwargs_batch)
    if cg_manager is not None and cg_manager.is_captured() and cg_manager.supports_modality(modality)
    else None
)
"""
_WITHOUT_A_GRAPH_V2 = """
batch_outputs = (
    cudagraph_output if cudagraph_output is not None else self.model.embed_multimodal(**mm_kwargs_batch)
)
"""


def falls_back(encode: Function) -> bool:
    """Tell if *encode* of model runner V1 encodes without a graph where the graph returned None."""
    return (
        encode.used_only_in("encoder_cudagraph_manager", _CONDITION, IN_A_GRAPH)
        and encode.find_unique(_CONDITION) is not None
        and encode.used_only_in("cudagraph_output", "cudagraph_output = None", IN_A_GRAPH, _WITHOUT_A_GRAPH)
        and len(encode.find(IN_A_GRAPH)) == 1
        and encode.find_unique(_WITHOUT_A_GRAPH) is not None
    )


def falls_back_v2(encode: Function) -> bool:
    """Tell the same of model runner V2."""
    return (
        encode.used_only_in("cg_manager", "cg_manager = self.cudagraph_manager", _EXECUTED_V2)
        and encode.used_only_in("cudagraph_output", _EXECUTED_V2, _WITHOUT_A_GRAPH_V2)
        and all(len(encode.find(each)) == 1 for each in (_EXECUTED_V2, _WITHOUT_A_GRAPH_V2))
    )


_DECLINES = "graphfix_declines"
"""Attribute of a layer around `EncoderCudaGraphManager.execute`; `functools.wraps` copies it to outer layers."""


def set_declines(execute: Any, predicate: Callable[[Any], bool]) -> None:
    """Publish *predicate*, by which outer layers of *execute* learn if it returns None for a manager."""
    setattr(execute, _DECLINES, predicate)


def declines(execute: Any, manager: Any) -> bool:
    """Tell if *execute* will return None for *manager*, so that work on the images would be wasted."""
    predicate = getattr(execute, _DECLINES, None)
    try:
        return predicate is not None and predicate(manager)
    except Exception:  # that layer will hit and report the error itself
        return False
