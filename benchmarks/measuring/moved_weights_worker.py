"""What a worker of `moved_weights.py` is asked for: weights, loaded as programs for reinforcement learning do it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Updates:
    """vLLM's `worker_extension_cls`."""

    model_runner: Any
    vllm_config: Any

    def update(self, folder: str, elsewhere: bool) -> None:
        """Loads the weights in *folder* and processes them once more.

        With *elsewhere* every parameter gets memory of its own before, as `parameter.data = tensor` does.
        """
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        model, config = self.model_runner.get_model(), self.vllm_config.model_config
        with torch.inference_mode(), set_current_vllm_config(self.vllm_config):
            if elsewhere:
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
            model.load_weights(_weights(Path(folder)))
            process_weights_after_loading(model, config, self.model_runner.device)

    def observed(self) -> dict[str, Any]:
        """Counts, and what has moved, of the watch; None where there is none."""
        from vllm_graphfix import _this_process, events

        watch = _this_process().component("addresses").watch.of_rank
        names = [f"{name}: {what.outcome}" for name, what in sorted(watch._moved.items())] if watch is not None else []
        return {"events": events().get("addresses", {}), "moved": names}

    def seconds_of_a_look(self) -> float:
        """How long a heartbeat's look takes."""
        import time

        from vllm_graphfix import _this_process

        began = time.perf_counter()
        _this_process().look()
        return time.perf_counter() - began

    def comparison(self) -> dict[str, Any]:
        """How many addresses there are to compare, and how long that takes: the fastest of ten, in seconds."""
        import time

        from vllm_graphfix.engine.inventory import Inventory

        taken, seconds = Inventory(self, hold=False), []
        for _ in range(10):
            began = time.perf_counter()
            taken.moved()
            seconds.append(time.perf_counter() - began)
        return {"addresses": len(taken.entries), "seconds": round(min(seconds), 5)}


def _weights(folder: Path) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as held:
            for name in held.keys():  # noqa: SIM118 - it is no dictionary
                yield name, held.get_tensor(name)
