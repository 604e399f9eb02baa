"""A fix that fails while vLLM captures, where a fix of any release is active: whose graphs are left out of dispatch.

Real: model runner V1's way through a capture and its dispatcher; the manager of model runner V2's graphs, its capture
and its candidates. Stand-ins: what they run, and their configuration.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu_model_runner as v1
from vllm.config.compilation import CompilationConfig, CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu import cudagraph_utils as v2

import vllm_graphfix
from activities import activity_of
from vllm_graphfix import _this_process
from vllm_graphfix.engine.capture_hooks import CaptureHooks
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs

FIX = next(name for name, status in vllm_graphfix.states().items() if status.state == "active")
ACTIVITY = activity_of(FIX)
NAMES = ("cudagraph_manager", "speculator.prefill_cudagraph_manager")

by_factory = pytest.mark.skipif(not hasattr(v2.CudaGraphManager, "dispatch"), reason="captures without a factory")


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    progress = _this_process().manager._applied[FIX]
    before = progress.state, progress.reason
    with cpu_cuda_graphs(), torch.inference_mode():
        yield
    ACTIVITY.error = None
    progress.set_state(*before)


class WorkerDouble:
    """A worker of which the gate sees the capture alone."""

    def __init__(self, runner: Any, capture: Any) -> None:
        self.model_runner, self._capture = runner, capture
        self.local_rank = 0
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_rank=0),
            model_config=SimpleNamespace(enforce_eager=False),
            compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL")),
        )

    def compile_or_warm_up_model(self) -> Any:
        return self._capture()


CaptureHooks(_this_process().gate).watch_capture(
    "WorkerDouble", "compile_or_warm_up_model", SimpleNamespace(WorkerDouble=WorkerDouble)
)


def state() -> Any:
    return vllm_graphfix.states()[FIX]


def configuration() -> Any:
    compilation = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, cudagraph_capture_sizes=[2, 4])
    compilation.max_cudagraph_capture_size = 4
    compilation.compile_sizes = []
    compilation.is_attention_compiled_piecewise = lambda: True
    return SimpleNamespace(
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=16),
        model_config=SimpleNamespace(max_model_len=64),
        parallel_config=SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1, is_moe_model=False),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=None,
        lora_config=None,
        num_speculative_tokens=0,
        pad_for_cudagraph=lambda tokens: next(size for size in (2, 4) if tokens <= size),
    )


class RunnerV1Double:
    """Model runner V1's own way through a capture, around a run that fails where *failing* tokens are captured."""

    def __init__(self, failing: int, mode: CUDAGraphMode = CUDAGraphMode.FULL) -> None:
        config = configuration()
        self.vllm_config, self.compilation_config = config, config.compilation_config
        self.parallel_config = SimpleNamespace(use_ubatching=False)
        self.load_config, self.lora_config = SimpleNamespace(use_tqdm_on_load=False), None
        self.cudagraph_dispatcher = CudagraphDispatcher(config)
        self.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, 1)
        self.failing, self.mode = failing, mode
        self.ran: list[tuple[str, int]] = []

    def _dummy_run(self, tokens: int, *, cudagraph_runtime_mode: Any, **kwargs: Any) -> None:
        self.ran.append((cudagraph_runtime_mode.name, tokens))
        if tokens == self.failing and cudagraph_runtime_mode is self.mode:
            ACTIVITY.failed(MemoryError("no room"))

    def maybe_remove_all_loras(self, lora_config: object) -> None:
        pass

    def capture(self) -> None:
        keys = self.cudagraph_dispatcher.cudagraph_keys
        for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            descriptors = sorted(keys[mode], key=lambda descriptor: -descriptor.num_tokens)
            capture = getattr(v1.GPUModelRunner, "_warmup_and_capture", None)
            if capture is not None:
                for descriptor in descriptors:
                    capture(self, descriptor, mode)
            elif "batch_descriptors" in v1.GPUModelRunner._capture_cudagraphs.__code__.co_varnames:
                v1.GPUModelRunner._capture_cudagraphs(self, descriptors, mode)
            else:  # up to 0.16: sizes, each with and without adapters, and whether these are decodes
                v1.GPUModelRunner._capture_cudagraphs(
                    self, [(each.num_tokens, False) for each in descriptors], mode, mode is CUDAGraphMode.FULL
                )

    def dispatched(self, requests: int) -> tuple[str, int]:
        mode, descriptor = self.cudagraph_dispatcher.dispatch(requests, True, False)
        return mode.name, descriptor.num_tokens


def test_model_runner_v1_dispatches_to_another_graph_of_its_own() -> None:
    runner = RunnerV1Double(failing=4)
    WorkerDouble(runner, runner.capture).compile_or_warm_up_model()
    assert ("FULL", 4) in runner.ran
    assert [runner.dispatched(requests) for requests in (1, 2, 3, 4)] == [
        ("FULL", 2),
        ("FULL", 2),
        ("PIECEWISE", 4),
        ("PIECEWISE", 4),
    ]
    assert "cudagraph_dispatcher FULL 4" in state().reason


def test_a_size_without_a_piecewise_graph_has_no_full_one_either() -> None:
    """Data-parallel ranks agree on the lesser mode and the larger size, and vLLM asserts that there is such a graph."""
    runner = RunnerV1Double(failing=4, mode=CUDAGraphMode.PIECEWISE)
    WorkerDouble(runner, runner.capture).compile_or_warm_up_model()
    assert [runner.dispatched(requests)[0] for requests in (2, 3, 4)] == ["FULL", "NONE", "NONE"]
    assert {key.num_tokens for keys in runner.cudagraph_dispatcher.cudagraph_keys.values() for key in keys} == {2}


def test_a_graph_that_was_captured_to_learn_its_size_is_no_matter() -> None:
    runner = RunnerV1Double(failing=4)
    exec("def profile_cudagraph_memory(runner):\n    runner.capture()", vars(v1))  # noqa: S102 - a name in vLLM's own module
    before = state()
    WorkerDouble(runner, lambda: v1.profile_cudagraph_memory(runner)).compile_or_warm_up_model()
    assert runner.dispatched(4) == ("FULL", 4)
    assert state() == before


def test_drafts_of_model_runner_v1_in_the_same_pass_have_no_graph_either() -> None:
    runner = RunnerV1Double(failing=4)
    runner.drafter = drafter = SimpleNamespace(cudagraph_dispatcher=RunnerV1Double(0).cudagraph_dispatcher)  # type: ignore[attr-defined]
    WorkerDouble(runner, runner.capture).compile_or_warm_up_model()
    mode, descriptor = drafter.cudagraph_dispatcher.dispatch(4, True, False)
    assert (mode.name, descriptor.num_tokens) == ("NONE", 4)
    mode, descriptor = drafter.cudagraph_dispatcher.dispatch(2, True, False)
    assert (mode.name, descriptor.num_tokens) == ("FULL", 2)


def managed(failing: int | None, name: str) -> Any:
    """A manager of model runner V2 in the runner's attribute *name*.

    It has made a capture in which the fix failed at *failing* tokens.
    """
    values = {
        "vllm_config": configuration(),
        "device": torch.device("cpu"),
        "cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE,
        "decode_query_len": 1,
    }
    known = inspect.signature(v2.CudaGraphManager).parameters
    hands_states_on = "forward_fn, " in inspect.getsource(inspect.unwrap(v2.CudaGraphManager.capture))
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1)
    with contextlib.ExitStack() as stack:
        patch = pytest.MonkeyPatch()
        stack.callback(patch.undo)
        patch.setattr(v2, "get_pp_group", lambda: group, raising=False)
        patch.setattr(v2, "current_stream", lambda: None, raising=False)
        patch.setattr(v2, "capture_pool", lambda pool, config: contextlib.nullcontext(pool), raising=False)
        manager = v2.CudaGraphManager(**{name: value for name, value in values.items() if name in known})

        def create(desc: Any, warmup: bool = True) -> Any:
            def forward(mode: Any) -> None:
                if (
                    desc.num_tokens == failing
                    and desc.cg_mode is CUDAGraphMode.FULL
                    and not torch.cuda.is_current_stream_capturing()
                ):
                    ACTIVITY.failed(MemoryError("no room"))

            return (forward, None) if hands_states_on else forward

        owner: Any = SimpleNamespace()
        *outer, attribute = name.split(".")
        runner = SimpleNamespace(**{outer[0]: owner}) if outer else owner
        vars(owner)[attribute] = manager
        WorkerDouble(runner, lambda: manager.capture(create)).compile_or_warm_up_model()
    return manager


def dispatched_by(manager: Any, tokens: int) -> tuple[str, int]:
    values = {"num_reqs": tokens, "num_tokens": tokens, "uniform_token_count": 1, "num_active_loras": 0}
    known = inspect.signature(manager.dispatch).parameters
    descriptor = manager.dispatch(**{name: value for name, value in values.items() if name in known})
    assert descriptor.cg_mode is not CUDAGraphMode.FULL or descriptor in manager.graphs
    return descriptor.cg_mode.name, descriptor.num_tokens


@by_factory
@pytest.mark.parametrize("name", NAMES)
def test_model_runner_v2_has_no_candidate_for_it_any_more(name: str) -> None:
    manager = managed(4, name)
    assert [dispatched_by(manager, tokens) for tokens in (1, 2, 3, 4)] == [
        ("FULL", 2),
        ("FULL", 2),
        ("PIECEWISE", 4),
        ("PIECEWISE", 4),
    ]
    assert state().state == "active"
    assert f"{name} FULL 4" in state().reason


@by_factory
def test_model_runner_v2_keeps_all_candidates_where_nothing_failed() -> None:
    manager = managed(None, NAMES[0])
    assert [dispatched_by(manager, tokens) for tokens in (2, 4)] == [("FULL", 2), ("FULL", 4)]
