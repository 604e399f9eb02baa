"""The first process of engines on Ray, with a stock release.

``python ray_engine.py MODEL WAY …`` prints a line of JSON for each way.

The release's own functions configure the engine, put its environment together, start its actors and set them up.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from ray_workers import NoDeviceError, StandInExecutor, StandInModel, process_report


def configuration(model: str, **flags: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.registry import ModelRegistry

    arguments = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=64,
        distributed_executor_backend="ray",
        worker_cls="ray_workers.StandInWorker",
        **flags,
    )
    ModelRegistry.register_model("LlamaForCausalLM", StandInModel)  # the real one is inspected in a process of its own
    return arguments.create_engine_config()


def workers(model: str, executor: str, *, used_before: bool) -> list[dict[str, Any]]:
    """The workers of the release's *executor*.

    With *used_before*, they are on a node that an earlier engine has left its decision to.
    """
    from vllm.v1.executor.abstract import Executor

    os.environ["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] = str(int(executor == "RayExecutorV2"))
    config = configuration(model)
    if used_before:
        # What an actor begins with: its node's environment would be that of whoever started the node.
        config.parallel_config.ray_runtime_env = {"env_vars": {"VLLM_GRAPHFIX_DECISION": another_engines_decision()}}
    executor_class = Executor.get_class(config)
    if executor_class.__name__ != executor:
        raise RuntimeError(f"{executor_class} is no {executor}")
    started = executor_class(config)
    reports: list[dict[str, Any]] = started.collective_rpc("process_report")
    return reports


def engine_cores(model: str, number: int) -> list[dict[str, Any]]:
    """The release's data-parallel engine cores."""
    from vllm.v1.engine.utils import CoreEngineActorManager, EngineZmqAddresses

    config = configuration(model, data_parallel_size=number, data_parallel_backend="ray")
    groups = [ray.util.placement_group([{"GPU": 1.0}, {"CPU": 1.0}]) for _ in range(number)]
    folder = Path(os.environ["STAND_IN_TOLD"])
    try:
        CoreEngineActorManager(
            vllm_config=config,
            addresses=EngineZmqAddresses(inputs=["inproc://in"], outputs=["inproc://out"]),
            executor_class=StandInExecutor,
            log_stats=False,
            placement_groups=groups,
            local_dp_ranks=list(range(number)),
        )
    except ray.exceptions.RayError as error:
        if NoDeviceError.__name__ not in str(error):
            raise
    until = time.monotonic() + 60
    while len(files := sorted(folder.glob("*.json"))) < number and time.monotonic() < until:
        time.sleep(0.05)
    return [json.loads(file.read_text()) for file in files]


def another_engines_decision() -> str:
    """The decision of an engine of the same vLLM and plugin, which wants everything observed."""
    from vllm_graphfix import _this_process
    from vllm_graphfix.fix import Mode

    decision = _this_process().decision
    assert decision is not None
    modes = dict.fromkeys(decision.modes, Mode.OBSERVE)
    return decision._replace(engine="another", instance="1", modes=modes).encode()


def main() -> None:
    model, *ways = sys.argv[1:]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        os.environ["STAND_IN_TOLD"] = folder
        mine = {name: os.environ[name] for name in ("PYTHONPATH", "STAND_IN_TOLD")}
        ray.init(
            address=os.environ["STAND_IN_RAY"],
            logging_level=logging.ERROR,
            log_to_driver=False,
            runtime_env={"env_vars": mine, "py_executable": os.environ["STAND_IN_PYTHON"]},
        )
        for way in ways:
            kind, *rest = way.split(maxsplit=1)
            if kind == "CoreEngineActorManager":
                reports = engine_cores(model, int(rest[0]))
            else:
                reports = workers(model, kind, used_before=bool(rest))
            print(json.dumps({"way": way, "engine": process_report(), "processes": reports}), flush=True)  # noqa: T201 - the result
    os._exit(0)  # Ray ends the actors of a driver that is gone; the executors' own end takes five seconds


if __name__ == "__main__":
    main()
