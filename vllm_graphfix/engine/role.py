"""What a process is to an engine, told by who calls the plugin in it."""

from __future__ import annotations

import os
import sys
from enum import Enum
from types import FrameType
from typing import Any

from vllm_graphfix.settings.decision import Decision


class Role(str, Enum):
    """What a process is to an engine."""

    FRONT_END = "front-end"
    """The first one: `vllm serve`, or a program that makes an `LLM`."""
    API_SERVER = "api-server"
    """A further one, of ``--api-server-count``."""
    ENGINE_CORE = "engine-core"
    WORKER = "worker"
    INSPECTION = "inspection"
    """Looks at a model's class for another process."""


_PLACES = {
    "vllm.v1.engine.core": Role.ENGINE_CORE,
    "vllm.v1.worker.worker_base": Role.WORKER,
    "vllm.model_executor.models.registry": Role.INSPECTION,
}
"""Modules of vLLM that load plugins in a process which somebody else's engine has started. Anybody else begins an
engine."""


def place() -> tuple[Role, Any]:
    """What this process is to the engine whose code is loading plugins right now.

    Also returns the engine's configuration if it is at hand.

    The innermost function of vLLM that loads plugins tells: others, a tracer's wrapper say, may stand between. Where
    there is none, as in a notebook that calls `register` by hand, an engine will begin here.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == "__main__":  # run with -m, as the inspection is
            name = getattr(frame.f_globals.get("__spec__"), "name", "")
        name = str(name)  # somebody's exec may be given anything
        if name == "vllm.engine.arg_utils":
            break
        if name in _PLACES:
            return _PLACES[name], frame.f_locals.get("vllm_config")
        frame = frame.f_back
    return Role.FRONT_END, None


def prints_help() -> bool:
    """Whether this process prints its help and ends."""
    return any(word in ("-h", "--help") for word in getattr(sys, "argv", ()))  # an embedded Python may have none


def served_model(config: Any) -> str | None:
    """The name that clients call the model of this configuration by."""
    served = getattr(getattr(config, "model_config", None), "served_model_name", None)
    first = served[0] if isinstance(served, list) and served else served
    return str(first) if first else None


def deciding_separately(parallel: Any, headless: bool) -> str | None:
    """What of a `ParallelConfig` says that an engine's nodes start, and decide, on their own.

    None where one process decides. With Ray one does, whichever nodes its workers and engine cores are on.
    """
    size, here = int(parallel.data_parallel_size), int(parallel.data_parallel_size_local)
    if parallel.nnodes > 1:
        return f"--nnodes {parallel.nnodes}"
    if headless:
        return "--headless"
    if parallel.distributed_executor_backend == "external_launcher":
        return "an external launcher, such as torchrun,"
    if size > 1 and parallel.data_parallel_external_lb:
        return "external data-parallel load balancing (--data-parallel-rank)"
    if size > 1 and parallel.data_parallel_hybrid_lb:
        return "hybrid data-parallel load balancing"
    if here < size and parallel.data_parallel_backend != "ray":
        return f"{here} of {size} data-parallel ranks on this node"
    return None


def ranks_on_host(parallel: Any) -> int | None:
    """Return the number of ranks that the engine of a `ParallelConfig` starts on this host.

    None where that is not known: Ray places them, or a launcher starts each as an engine of its own; and where they
    come and go.
    """
    backends = (getattr(parallel, name, "") for name in ("distributed_executor_backend", "data_parallel_backend"))
    if not all(each in (None, "uni", "mp") for each in backends) or getattr(parallel, "enable_elastic_ep", False):
        return None
    return int(parallel.local_world_size * parallel.data_parallel_size_local)


def is_api_server_of(decision: Decision) -> bool:
    """Whether the process that decided started this one to serve the same engine: vLLM names these processes."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    named = multiprocessing.current_process().name.startswith("ApiServer")
    return named and parent is not None and parent.pid == decision.pid and host_name() == decision.host


def host_name() -> str:
    return os.uname().nodename
