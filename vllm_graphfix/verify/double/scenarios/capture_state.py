"""capture-state (PR 42444): target and draft decode in full graphs, at other lengths than the capture's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.measurement import Measurement

install_flashmla_stand_ins()

from vllm.config.compilation import CUDAGraphMode  # noqa: E402 - FlashMLA is looked for when vLLM is imported
from vllm.v1.worker.gpu import cudagraph_utils  # noqa: E402

from vllm_graphfix.verify.double.decoding import (  # noqa: E402
    DEVICE,
    HIDDEN,
    MAX_REQUESTS,
    ModelStandIn,
    RunnerStandIn,
    Step,
    attention_without_a_plan,
    configuration,
    measure,
)

SIZES = (1, 2, 4)
STEPS = (
    Step((37,)),
    Step((5, 42)),
    Step((17, 3, 29)),  # one padded row
    Step((18, 4, 30, 9)),
    Step((6, 43)),
)
TARGET, DRAFT = "target.attention", "draft.attention"


def run(*, trigger: bool = True) -> Measurement:
    """Compare hidden states of a target and a draft model. Without *trigger*, layers need no plan."""
    numbers = f"hidden states of target and draft model over {len(STEPS)} decode steps of 1 to {MAX_REQUESTS} requests"
    with nullcontext() if trigger else attention_without_a_plan():
        return measure(numbers, _eager, _graphed, {"state-consumed": 2 * len(SIZES)})


def _models() -> tuple[ModelStandIn, ModelStandIn]:
    return ModelStandIn([TARGET + ".0", TARGET + ".1"]), ModelStandIn([DRAFT], seed=1)


def _runner() -> RunnerStandIn:
    return RunnerStandIn(configuration(CUDAGraphMode.FULL_DECODE_ONLY, SIZES), [TARGET + ".0", TARGET + ".1", DRAFT])


def _eager() -> list[torch.Tensor]:
    runner, models = _runner(), _models()
    return [runner.run_eagerly(model, step) for step in STEPS for model in models]


def watched(*, trigger: bool = True) -> None:
    """Replay the target model's graphs of `run` as model runner V2 does, for the shadow check.

    The draft's graphs are left out: vLLM's speculators replay them.
    """
    from vllm_graphfix.verify.double.model_runners import RunnerV2StandIn, wrappers_on_the_double

    with wrappers_on_the_double(), nullcontext() if trigger else attention_without_a_plan():
        runner, (model, _) = _runner(), _models()
        target = _capture_target(runner, model)
        for step in STEPS:
            descriptor = _descriptor(target, step)
            metadata, slots = runner.prepare(step, padded_requests=descriptor.num_reqs)
            batch = SimpleNamespace(num_tokens=step.num_tokens)
            inputs = runner.model_inputs(descriptor.num_tokens)
            RunnerV2StandIn(target, model).execute_model(metadata, slots, batch, inputs, descriptor)


def _graphed() -> list[torch.Tensor]:
    with cpu_cuda_graphs():
        runner, (target_model, draft_model) = _runner(), _models()
        target = _capture_target(runner, target_model)
        draft_states = torch.zeros(MAX_REQUESTS, HIDDEN)
        draft = _draft_manager(runner.config)
        draft.capture(_draft_forward(runner, draft_model, draft_states), **runner.capture_inputs())

        outputs = []
        for step in STEPS:
            runner.prepare(step, padded_requests=_padded_requests(target, step))
            outputs.append(_replay(target, step)[: step.num_tokens].clone())
            runner.prepare(step, padded_requests=_padded_requests(draft, step))
            _replay(draft, step)
            outputs.append(draft_states[: step.num_tokens].clone())
        return outputs


def _capture_target(runner: RunnerStandIn, model: ModelStandIn) -> Any:
    """Return the manager of the target model's graphs, with its captures."""
    target = _target_manager(runner.config)
    arguments = runner.capture_inputs() | {
        "model": model,
        "mrope_positions": None,
        "inputs_embeds": None,
        "intermediate_tensors": None,
    }
    target.capture(**supported_kwargs(target.capture, arguments))
    return target


def _target_manager(config: Any) -> Any:
    kind = getattr(cudagraph_utils, "ModelCudaGraphManager", cudagraph_utils.CudaGraphManager)
    return _make_manager(kind, config)


def _draft_manager(config: Any) -> Any:
    for name in ("eagle.cudagraph", "eagle_cudagraph"):  # a package from 0.17 on
        try:
            module = importlib.import_module(f"vllm.v1.worker.gpu.spec_decode.{name}")
        except ImportError:
            continue
        kind = getattr(module, "DecodeEagleCudaGraphManager", None) or module.EagleCudaGraphManager
        return _make_manager(kind, config)
    raise RuntimeError("this vLLM has no draft decode manager of model runner V2 where one is known to be")


def _make_manager(kind: Any, config: Any) -> Any:
    values = {
        "vllm_config": config,
        "device": DEVICE,
        "cudagraph_mode": CUDAGraphMode.FULL_DECODE_ONLY,
        "decode_query_len": 1,
        "uses_mrope": False,
        "use_aux_hidden_state_outputs": False,
        "draft_tokens": torch.zeros(MAX_REQUESTS, 1, dtype=torch.int64),
    }
    return kind(**supported_kwargs(kind, values))


def _draft_forward(runner: RunnerStandIn, model: ModelStandIn, output: torch.Tensor) -> Callable[..., None]:
    """Return a stand-in for EagleSpeculator.generate_draft: one draft position without Triton kernel and sampling."""

    def generate_draft(*arguments: Any, **by_name: Any) -> None:
        arguments = (*arguments, *by_name.values())
        # Counts (num_reqs from 0.17 on, num_tokens), then metadata, slot mappings, tokens across ranks, graph mode.
        counts = [a for a in arguments if type(a) is int]
        metadata, slot_mappings = arguments[len(counts) : len(counts) + 2]
        output[: counts[-1]] = runner.forward(model, counts[-1], metadata, slot_mappings)

    return generate_draft


def _descriptor(manager: Any, step: Step) -> Any:
    """Return the model runner's choice for the step: a descriptor from 0.18 on, a number of tokens before."""
    if hasattr(manager, "dispatch"):
        return manager.dispatch(len(step.lengths), step.num_tokens, step.query_tokens)
    options = supported_kwargs(
        manager.get_cudagraph_size, {"num_tokens_per_request": [1] * len(step.lengths), "uniform_decode": True}
    )
    return manager.get_cudagraph_size(step.num_tokens, **options)


def _padded_requests(manager: Any, step: Step) -> int:
    descriptor = _descriptor(manager, step)
    return int(getattr(descriptor, "num_reqs", descriptor))


def _replay(manager: Any, step: Step) -> Any:
    replay = getattr(manager, "run_fullgraph", None) or manager.run
    return replay(_descriptor(manager, step))
