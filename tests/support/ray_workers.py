"""Stand-ins, in the processes of an engine on Ray, for what needs a GPU: model and worker.

The rest is the release's own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch


class StandInModel(torch.nn.Module):
    """Has the methods by which vLLM knows a model that generates."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: Any) -> Any: ...

    get_input_embeddings = embed_input_ids  # as it was called before 0.12

    def forward(self, input_ids: Any, positions: Any) -> Any: ...

    def compute_logits(self, hidden_states: Any) -> Any: ...


class StandInWorker:
    """In the release's own wrapper, which loads the plugins before it makes this."""

    def __init__(self, vllm_config: Any, rank: int, **rest: Any) -> None:
        self.vllm_config = vllm_config
        self.rank = rank

    def init_device(self) -> None: ...

    def load_model(self) -> None: ...

    def process_report(self) -> dict[str, Any]:
        return process_report()


class StandInExecutor:
    """Stands in for the executor of the release's own engine core.

    The core loads the plugins before it makes this, and gets no further.
    """

    def __init__(self, vllm_config: Any) -> None:
        folder = Path(os.environ["STAND_IN_TOLD"])
        rank = vllm_config.parallel_config.data_parallel_index
        written = folder / f"{rank}.part"
        written.write_text(json.dumps(process_report()))
        written.rename(folder / f"{rank}.json")
        raise NoDeviceError


class NoDeviceError(RuntimeError):
    """The engine core has told what it was to tell."""


def process_report() -> dict[str, Any]:
    """Return the plugin's decision and states in this process."""
    import ray_platform
    import vllm_graphfix

    membership = vllm_graphfix._this_process()
    assert membership.decision is not None
    return {
        "pid": os.getpid(),
        "role": membership.role.value,
        "began_with": json.loads(ray_platform.BEGAN_WITH or "null"),
        "decision": json.loads(membership.decision.encode()),
        "states": {
            name: (state.mode.value, state.state.value)
            for name, state in membership.manager.states(diagnose=False).items()
        },
    }
