"""Acts of vLLM while a call of the plugin fails: see `fault_acts`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from capture_failures import WorkerDouble, graph_of

from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios import capture_state


class Capture:
    """vLLM's own manager captures the graphs of a model on lazy attention metadata.

    The capture is between the two sides of the gate.
    """

    def prepare(self) -> None:
        self._double = cpu_cuda_graphs()
        self._double.__enter__()
        self._runner, (self._model, _) = capture_state._runner(), capture_state._models()
        self._manager: Any = None
        self._worker = WorkerDouble(SimpleNamespace(cudagraph_manager=None), self._capture)
        self._manager = capture_state._target_manager(self._runner.config)
        self._worker.model_runner.cudagraph_manager = self._manager

    def _capture(self) -> None:
        arguments = self._runner.capture_inputs() | {
            "model": self._model,
            "mrope_positions": None,
            "inputs_embeds": None,
            "intermediate_tensors": None,
        }
        self._manager.capture(**supported_kwargs(self._manager.capture, arguments))

    def act(self) -> None:
        self._worker.compile_or_warm_up_model()

    def right(self) -> bool:
        """Every batch that is dispatched to a graph comes out as without one, at lengths other than the capture's."""
        for step in capture_state.STEPS:
            tokens = graph_of(self._manager, step.num_tokens)
            if tokens is None:
                continue
            self._runner.prepare(step, padded_requests=tokens)
            replayed = capture_state._replay(self._manager, step)[: step.num_tokens].clone()
            if not torch.allclose(replayed, self._runner.run_eagerly(self._model, step), atol=1e-5):
                return False
        return True


class Check:
    """A step that the shadow check looks at: vLLM's manager replays its graph, and it is run once more without."""

    def prepare(self) -> None:
        from shadow_v2 import Served

        from vllm_graphfix.settings.shadow_rate import Rate

        self._double = cpu_cuda_graphs()
        self._double.__enter__()
        self._inference = torch.inference_mode()
        self._inference.__enter__()
        self._served, self._unwatched = Served(), Served(Rate())
        self._served.step(), self._unwatched.step()

    def act(self) -> None:
        self._output = self._served.step()

    def right(self) -> bool:
        """This step and the next are what they are without the check, and so is the cache."""
        outputs = [(self._output, self._unwatched.step()), (self._served.step(), self._unwatched.step())]
        caches = zip(self._served.caches(), self._unwatched.caches(), strict=True)
        return all(torch.equal(mine, other) for mine, other in (*outputs, *caches))
