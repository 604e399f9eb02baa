"""Doubles of an engine's process and of a worker at the gate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_graphfix.engine.process import EngineProcess
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.settings import decision
from vllm_graphfix.settings import environment as settings


def process_double(environment: dict[str, str]) -> EngineProcess:
    """A process whose fixes are all there, and whose record nobody writes."""
    me = EngineProcess(FIXES, environment)
    me.decision = decision.decide(settings.read(environment, tuple(fix.name for fix in FIXES)), "0.21.0")
    vars(me.manager)["unapplied"] = lambda **_: ()
    nothing: dict[str, Any] = {
        name: lambda: None for name in ("publish", "publish_started", "start_heartbeat", "flush")
    }
    nothing["start_relay"] = lambda *_: None
    record = SimpleNamespace(rank=None, agreement=None, problem=None, unchecked=None, **nothing)
    me.gate.status_record = record  # type: ignore[assignment]  # a double
    return me


def worker_of(rank: int) -> Any:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_rank=0),
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL")),
    )
    return SimpleNamespace(local_rank=rank, use_v2_model_runner=False, vllm_config=config)
