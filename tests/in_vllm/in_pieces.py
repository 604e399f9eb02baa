"""`wrapped_model`'s model as vLLM runs it in pieces: attention outside of graphs, what follows it in one.

Its steps go through the functions of vLLM's own model runners, whatever of them a release has.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from wrapped_model import CAPTURED, WIDTH, ModelStandIn, Served

from vllm_graphfix.settings.shadow_rate import NEVER
from vllm_graphfix.shadow import process

MIXED = CUDAGraphMode.PIECEWISE
KINDS = ["V1", "V1 beside full"]
try:
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper, eager_break_during_capture
except ImportError:
    BreakableCUDAGraphWrapper = eager_break_during_capture = None
else:
    KINDS += ["V1 breakable", "V1 breakable beside full"]
try:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

    CudaGraphManager.run_pw_graph  # noqa: B018
except (ImportError, AttributeError):
    CudaGraphManager = ModelCudaGraphManager = None
else:
    KINDS += ["V2", "V2 breakable", "V2 draft"]


class InPieces:
    """The stand-in's first layer outside of graphs, as attention is, and its second one in a piece."""

    def __init__(self, model: ModelStandIn, config: Any) -> None:
        """*config*: of pieces in vLLM's wrapper; None where a breakable graph is around the model."""
        memory = torch.zeros(CAPTURED, WIDTH)
        self.layer = model.layers["layer.0"]
        self.first_layers: list[int] = []
        """The number that the forward context has of the next layer of experts, at the start of each pass."""

        def attention(hidden: torch.Tensor) -> None:
            context = get_forward_context()
            if hasattr(context, "moe_layer_index"):
                self.first_layers.append(context.moe_layer_index)
                context.moe_layer_index += 1
            memory.copy_(self.layer(hidden) if context.attn_metadata else hidden)

        self.attention = attention if eager_break_during_capture is None else eager_break_during_capture(attention)
        self.weight = torch.ones(1)
        self.piece = lambda: model.layers["layer.1"](memory * self.weight)
        if config is not None:
            self.piece = CUDAGraphWrapper(self.piece, config, MIXED)

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        self.attention(input_ids * 1.0)
        piece: Any = self.piece
        output: torch.Tensor = piece()
        return output


def run_in_pieces(served: Served, kind: str) -> Any:
    """Make steps of *served* in mode PIECEWISE go through a model runner of this *kind*; capture its graphs."""
    model: Any = InPieces(served.model, None if "breakable" in kind else served.config)
    by_mode = "breakable beside full" in kind and "runtime_mode" in signature(BreakableCUDAGraphWrapper).parameters
    more = {"runtime_mode": MIXED} if by_mode else {}
    breakable = BreakableCUDAGraphWrapper(model, served.config, **more) if "breakable" in kind else None
    run: Callable[[torch.Tensor], Any]
    if kind.startswith("V2"):
        manager: Any = object.__new__(CudaGraphManager if "draft" in kind else ModelCudaGraphManager)
        manager.vllm_config, manager.use_breakable_cg = served.config, breakable is not None
        manager.breakable_cg_runner = breakable

        def run(hidden: torch.Tensor) -> Any:
            dummy_run = served.descriptor.num_reqs is None
            return manager.run_pw_graph(model, {"input_ids": hidden}), dummy_run
    else:
        outermost = breakable or model
        if "full" in kind and (breakable is None or by_mode):
            outermost = CUDAGraphWrapper(outermost, served.config, CUDAGraphMode.FULL)
        runner = SimpleNamespace(vllm_config=served.config, model=outermost)

        def run(hidden: torch.Tensor) -> Any:
            return GPUModelRunner._model_forward(runner, input_ids=hidden), False

    def step(hidden: torch.Tensor) -> torch.Tensor:
        process.SHADOW = served.shadow  # of this one, where another one is compared with it
        output: torch.Tensor = run(hidden)[0]
        return output

    shadow: Any = served.shadow
    if shadow is not None:
        shadow.schedule.due = NEVER
    served.run = step
    if "full" in kind:
        served.forward(CUDAGraphMode.FULL)
    served.descriptor = BatchDescriptor(CAPTURED, num_reqs=2)
    served.forward(MIXED)  # the capture
    for layer in served.model.layers.values():
        layer.kv_cache[0].zero_()
    if shadow is not None:
        shadow.memory.measuring = False
        served.forward(CUDAGraphMode.NONE)  # the first call after it
        shadow.schedule.count, shadow.schedule.due = 0, 1
    return model
