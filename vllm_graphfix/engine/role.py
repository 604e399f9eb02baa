"""Detects the role of this process in an engine from the vLLM code that loads the plugin."""

from __future__ import annotations

import os
import sys
from enum import Enum
from types import FrameType
from typing import Any

from vllm_graphfix.settings.decision import Decision


class Role(str, Enum):
    """The role of a process in an engine."""

    FRONT_END = "front-end"
    """The first one: `vllm serve`, or a program that makes an `LLM`."""
    API_SERVER = "api-server"
    """A further one, of ``--api-server-count``."""
    ENGINE_CORE = "engine-core"
    WORKER = "worker"
    INSPECTION = "inspection"
    """Inspects the class of a model for another process."""


_ROLE_BY_MODULE = {
    "vllm.v1.engine.core": Role.ENGINE_CORE,
    "vllm.v1.worker.worker_base": Role.WORKER,
    "vllm.model_executor.models.registry": Role.INSPECTION,
}
"""Modules of vLLM that load plugins in a process which an engine has started. Any other caller is a front-end."""


def detect_role() -> tuple[Role, Any]:
    """Return this process's role in the engine whose code is loading plugins now, and the engine's configuration.

    The configuration is None if the frame of that code does not hold it. The innermost frame of vLLM that loads plugins
    decides: frames of others, such as a tracer's wrapper, may lie above it. Without one, as in a notebook that calls
    `register` by hand, this process is a front-end.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == "__main__":  # run with -m, like the inspection of a model
            name = getattr(frame.f_globals.get("__spec__"), "name", "")
        name = str(name)  # globals of an `exec` may hold any object
        if name == "vllm.engine.arg_utils":
            break
        if name in _ROLE_BY_MODULE:
            return _ROLE_BY_MODULE[name], frame.f_locals.get("vllm_config")
        frame = frame.f_back
    return Role.FRONT_END, None


def prints_help() -> bool:
    """Tell if this process only prints its help."""
    return any(word in ("-h", "--help") for word in getattr(sys, "argv", ()))  # an embedded Python may have no argv


def served_model(config: Any) -> str | None:
    """Return the name by which clients request the model of this configuration."""
    served = getattr(getattr(config, "model_config", None), "served_model_name", None)
    first = served[0] if isinstance(served, list) and served else served
    return str(first) if first else None


def deciding_separately(parallel: Any, headless: bool) -> str | None:
    """Return the option of a `ParallelConfig` by which an engine's nodes start, and decide, on their own.

    None if one process decides for all. With Ray one does, on whichever nodes workers and engine cores run.
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

    None if that is not known: Ray places them, a launcher starts each as an engine of its own, or they come and go.
    """
    backends = (getattr(parallel, name, "") for name in ("distributed_executor_backend", "data_parallel_backend"))
    if not all(each in (None, "uni", "mp") for each in backends) or getattr(parallel, "enable_elastic_ep", False):
        return None
    return int(parallel.local_world_size * parallel.data_parallel_size_local)


def is_api_server_of(decision: Decision) -> bool:
    """Tell if the process that made *decision* started this one as an API server, by the name that vLLM gives those."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    named = multiprocessing.current_process().name.startswith("ApiServer")
    return named and parent is not None and parent.pid == decision.pid and host_name() == decision.host


def host_name() -> str:
    return os.uname().nodename
