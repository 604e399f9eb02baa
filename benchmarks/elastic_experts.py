"""Elastic expert parallelism, which captures again in a live engine, with `addresses`: ranks that come and go.

It runs on the installed vLLM, or the one on the Python path, and two GPUs or more.

    python benchmarks/elastic_experts.py --out FOLDER [--modes report repair stock] [--runner V2] [--parallel N]

A tiny mixture of experts with full graphs. vLLM has no engine of one rank whose ranks come and go, so that there are
two ranks, then three, then two. Without Ray each rank has a front-end of its own, and each of them is asked for the
same change. With fewer than three GPUs, ranks share one, and each says that it is a host of its own: NCCL refuses two
ranks of one host on one GPU.

before       two ranks
scaled up    a third one has joined, with copies of experts; the others have captured again
moved        on every rank the weights, but those of experts, lie elsewhere, and their old memory is wiped
scaled down  the third one has left; the others have captured again

After each, every rank is asked the same prompts; right is what an engine without graphs says, on one GPU. After a
change it also waits --watch seconds, in which heartbeats compare, and asks `vllm-graphfix fleet`. `report` and `repair`
are VLLM_GRAPHFIX_ADDRESSES; `stock` is without the plugin.

A line of JSON for each step; result.json holds all and is written after each. Exit code 1 if an answer is corrupt that
has to be right; if something is said to have moved that has not, or nothing that has; or if the watch has failed. 2 if
an engine has not come to its end; if no graph was replayed, or nothing compared; if graphs are right with wiped
weights; or if the engine without graphs differs from itself too much to judge others.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from measuring import PROJECT
from measuring.engine_process import EngineProcess

sys.path.append(str(PROJECT))

from vllm_graphfix.settings.environment import ADDRESSES, STATUS_DIR
from vllm_graphfix.verify import comparison
from vllm_graphfix.verify.comparison import Answer, Kind
from vllm_graphfix.verify.engine import models
from vllm_graphfix.verify.engine.models import VOCABULARY

WORKER = Path(__file__).parent / "measuring" / "elastic_rank.py"
MODEL, EXPERTS = "mixtral", models.MIXTRAL["num_local_experts"]
FEWEST, MOST = 2, 3
"""Ranks. One alone has no group that could be replaced."""
MODES = ("report", "repair", "stock")
STEPS = 4
PROMPTS, PROMPT, TOKENS = 8, 24, 24
NOISE = 0.25
"""Difference of log-probabilities, of an engine without graphs to itself, up to which others can be judged by it."""
_COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "max_model_len": 256,
    "max_num_seqs": PROMPTS,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 1 << 28,  # keeps vLLM's memory profiling out of a GPU that several ranks share
    "gpu_memory_utilization": 0.05,
    "moe_backend": "triton",
    "enable_flashinfer_autotune": False,  # nothing here is tuned, and each capture would begin with it
    "disable_log_stats": True,
    "seed": 0,
}
_ELASTIC: dict[str, Any] = {
    "data_parallel_external_lb": True,
    "data_parallel_address": "127.0.0.1",
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "enable_elastic_ep": True,
    "elastic_ep_max_dp_size": MOST,
    "all2all_backend": "allgather_reducescatter",
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    },
    "worker_extension_cls": "measuring.elastic_rank.Observed",
}
_ENVIRONMENT = {
    # As vLLM's command line has it: a forked process keeps the port of the first ranks' handshake, which a new one
    # needs.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "PYTHONUNBUFFERED": "1",
    "NO_COLOR": "1",
}
_SHARED = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
"""For ranks that share a GPU, each of which is a host of its own to NCCL (see `measuring/one_gpu.py`)."""
_NCCL_SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"
"""If it is set, NCCL takes several ranks of one GPU (2.30.7 knows it), and they exchange as ranks of one host do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for result.json and the logs")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--runner", default="V2", choices=["V1", "V2"], help="model runner (V2)")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="modes side by side (1)")
    parser.add_argument("--watch", type=float, default=25.0, metavar="S", help="for heartbeats, after a change (25)")
    parser.add_argument("--start", type=float, default=300.0, metavar="S", help="limit of a start or a change (300)")
    parser.add_argument("--answer", type=float, default=120.0, metavar="S", help="limit of any other answer (120)")
    parser.add_argument("--gpus", nargs="+", metavar="GPU", help="as CUDA_VISIBLE_DEVICES names them (all)")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    options.gpus = options.gpus or gpus()
    models.write(MODEL, options.out)
    bench = Bench(options)
    with ThreadPoolExecutor(options.parallel + 1) as pool:
        right = pool.submit(bench.reference)
        for mode in options.modes:
            pool.submit(bench.mode, mode, right.result)
    return verdict(bench.result)


def gpus() -> list[str]:
    """Names of the GPUs that may be used."""
    import torch

    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named or [str(number) for number in range(torch.cuda.device_count())] or ["0"]


class Bench:
    """What has been asked, and what came of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._lock = options, threading.Lock()
        chance = random.Random(5)  # noqa: S311 - the same prompts in every engine
        self._prompts = [chance.choices(range(1, VOCABULARY), k=PROMPT) for _ in range(PROMPTS)]
        self.result: dict[str, Any] = {"gpus": len(options.gpus), "reference": {}, "modes": {}}

    def reference(self) -> list[Answer]:
        """What an engine without graphs says, and how far it is from itself if it is asked one prompt at a time."""
        rank = self._rank("reference", 0, {"VLLM_PLUGINS": ""})
        began = time.monotonic()
        try:
            told = rank.wait_for_answer(self._options.start)
            arguments = _COMMON | {"model": str(self._options.out / MODEL), "enforce_eager": True}
            rank.ask({"do": "start", "arguments": arguments}, self._options.start)
            right, alone = (_answers(self._asked(rank, str(alone), alone=alone)) for alone in (False, True))
            told["noise"] = str(comparison.noise_between(right, alone))
        except Exception as error:
            told, right = {"error": _said(error)}, []
        finally:
            rank.end()
        with self._lock:
            self.result["reference"] = told | {"seconds": round(time.monotonic() - began)}
            self._write({"engine": "reference"} | self.result["reference"])
        return right

    def mode(self, mode: str, right: Callable[[], list[Answer]]) -> None:
        """All steps of an engine with *mode*."""
        began = time.monotonic()
        found: dict[str, Any] = {"steps": {}}
        with self._lock:
            self.result["modes"][mode] = found
        engine = Elastic(self._options, mode, self._records(mode))
        try:
            engine.import_vllm(self._rank)
            self._step(engine, mode, "before", right, {"seconds": engine.start()})
            self._step(engine, mode, "scaled up", right, {"seconds": engine.scale(MOST)}, watch=True)
            moved = engine.on_all({"do": "call", "method": "scatter_weights"}, self._options.answer)
            self._step(engine, mode, "moved", right, {"weights moved": moved})
            self._step(engine, mode, "scaled down", right, {"seconds": engine.scale(FEWEST)}, watch=True)
        except Exception as error:
            found["error"] = _said(error)
        finally:
            engine.end()
        with self._lock:
            found["seconds"] = round(time.monotonic() - began)
            self._write({"mode": mode, "seconds": found["seconds"], "error": found.get("error")})

    def _step(
        self, engine: Elastic, mode: str, step: str, right: Any, done: dict[str, Any], *, watch: bool = False
    ) -> None:
        """Asks all ranks after what was *done*; a step that waits is one that heartbeats compare in."""
        asked = self._question(step, alone=False)
        before = engine.observed()
        answers = engine.on_all(asked, self._options.answer)
        if watch:
            time.sleep(self._options.watch)
        ranks = engine.observed()
        for now, first in zip(ranks, before, strict=True):
            now["replays"] -= first["replays"]
            now["elsewhere since the step before"] = first["elsewhere"]
            if mode != "stock":
                now["comparisons"] = now["events"].get("comparisons", 0) - first["events"].get("comparisons", 0)
        told = done | self._judged([_answers(each) for each in answers], right()) | {"of ranks": ranks}
        if mode != "stock":
            told["fleet"] = engine.fleet(self._options.out / f"{mode}-{step.replace(' ', '-')}.fleet.json")
        with self._lock:
            self.result["modes"][mode]["steps"][step] = told
            self._write({"mode": mode, "step": step} | told)

    def _judged(self, answers: Sequence[list[Answer]], right: list[Answer]) -> dict[str, Any]:
        """How many answers of all ranks are right. Noise that is too large excuses no more than `NOISE`."""
        if not right:
            return {"not compared": "there is no engine without graphs"}
        noise = min(float(self.result["reference"]["noise"]), NOISE)
        compared = [comparison.compare(right, each, noise) for each in answers]
        kinds = {kind.value: sum(len(each.of(kind)) for each in compared) for kind in (Kind.EQUAL, Kind.TIE)}
        kinds[Kind.CORRUPT.value] = sum(len(each.of(Kind.CORRUPT)) for each in compared)
        return kinds | {"distance": str(max(each.distance for each in compared))}

    def _question(self, name: str, *, alone: bool) -> dict[str, Any]:
        return {"do": "ask", "name": name, "prompts": self._prompts, "tokens": TOKENS, "alone": alone}

    def _asked(self, rank: EngineProcess, name: str, *, alone: bool) -> Any:
        return rank.ask(self._question(name, alone=alone), self._options.answer)

    def _records(self, mode: str) -> Path:
        made: Path = self._options.out / f"{mode}-records"
        made.mkdir(exist_ok=True)
        return made

    def _rank(self, name: str, number: int, more: dict[str, str]) -> EngineProcess:
        """The process of a rank, which imports vLLM and then waits."""
        out = self._options.out
        kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        path = os.pathsep.join(filter(None, (str(WORKER.parents[1]), os.environ.get("PYTHONPATH"))))
        alike = len(self._options.gpus) < MOST and _NCCL_SHARES not in os.environ
        shared = _SHARED | {"NCCL_HOSTID": f"rank-{number}"} if alike else {}
        environment = kept | _ENVIRONMENT | shared | more
        environment |= {
            "CUDA_VISIBLE_DEVICES": self._options.gpus[number % len(self._options.gpus)],
            "PYTHONPATH": path,
            "VLLM_USE_V2_MODEL_RUNNER": str(int(self._options.runner == "V2")),
            "VLLM_CACHE_ROOT": str(out / "cache" / name),
            "VLLM_ENGINE_READY_TIMEOUT_S": str(int(self._options.start)),
        }
        order: Any = {}
        return EngineProcess(order, environment, out / f"{name}.log", WORKER)

    def _write(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        (self._options.out / "result.json").write_text(json.dumps(self.result, indent=1))


class Elastic:
    """An engine whose ranks come and go."""

    def __init__(self, options: argparse.Namespace, mode: str, records: Path) -> None:
        self._options, self._mode, self._records = options, mode, records
        self._port = _free_port()
        self._all: list[EngineProcess] = []
        self._here: list[EngineProcess] = []

    def import_vllm(self, rank: Callable[..., EngineProcess]) -> None:
        """Starts the processes of all ranks, also of the one that joins: imports take long."""
        records = {ADDRESSES: self._mode, STATUS_DIR: str(self._records)}
        more = {"VLLM_PLUGINS": ""} if self._mode == "stock" else records
        for number in range(MOST):
            joins = {"VLLM_ELASTIC_EP_SCALE_UP_LAUNCH": "1"} if number >= FEWEST else {}
            self._all.append(rank(f"{self._mode}-rank-{number}", number, more | joins))
        self._together([functools.partial(each.wait_for_answer, self._options.start) for each in self._all])

    def start(self) -> list[Any]:
        """Starts the first ranks; returns the seconds of each."""
        self._here = self._all[:FEWEST]
        started = self._together([functools.partial(self._start_one, number) for number in range(FEWEST)])
        return [each["seconds"] for each in started]

    def _start_one(self, number: int) -> Any:
        ranks = FEWEST if number < FEWEST else MOST
        arguments = _COMMON | _ELASTIC | {"model": str(self._options.out / MODEL)}
        arguments |= {
            "data_parallel_size": ranks,
            "data_parallel_rank": number,
            "data_parallel_rpc_port": self._port,
            "eplb_config": {
                "use_async": False,  # that needs NIXL
                "num_redundant_experts": EXPERTS * ranks // FEWEST - EXPERTS,
            },
        }
        return self._all[number].ask({"do": "start", "arguments": arguments}, self._options.start)

    def scale(self, ranks: int) -> list[Any]:
        """Has all ranks change to so many; returns the seconds of each."""
        asked = {"do": "scale", "ranks": ranks}
        changing = [functools.partial(each.ask, asked, self._options.start) for each in self._here]
        joining = [functools.partial(self._start_one, number) for number in range(len(self._here), ranks)]
        seconds = [each["seconds"] for each in self._together([*changing, *joining])]
        for leaving in self._all[ranks:]:
            leaving.end()
        self._here = self._all[:ranks]
        return seconds

    def on_all(self, asked: dict[str, Any], timeout: float) -> list[Any]:
        """The answer of each rank."""
        return self._together([functools.partial(each.ask, asked, timeout) for each in self._here])

    def observed(self) -> list[Any]:
        return self.on_all({"do": "call", "method": "observed"}, self._options.answer)

    def fleet(self, written: Path) -> dict[str, Any]:
        """The exit code of `vllm-graphfix fleet`, what it says in JSON being *written*, and what records have moved."""
        from vllm_graphfix import records

        command = [sys.executable, "-m", "vllm_graphfix", "fleet", "--json", "--dir", str(self._records)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except subprocess.TimeoutExpired:
            return {"error": "not at its end after 30 s"}
        written.write_text(done.stdout + done.stderr)
        found = [each.record for each in records.read(self._records, own=True).found]
        of_ranks = [
            {"rank": each.rank.data_parallel_rank, "events": each.events.get("addresses"), "moved": len(each.moved)}
            for each in found
            if each.rank is not None
        ]
        return {"exit code": done.returncode, "records": sorted(of_ranks, key=lambda each: str(each["rank"]))}

    def end(self) -> None:
        for each in self._all:
            with contextlib.suppress(OSError):
                each.end()

    def _together(self, asked: Sequence[Callable[[], Any]]) -> list[Any]:
        """What all of these return. Once one has failed, the others would wait for that rank: all ranks are ended."""
        with ThreadPoolExecutor(len(asked)) as pool:
            found = [pool.submit(each) for each in asked]
            done, _ = wait(found, return_when=FIRST_EXCEPTION)
            failed = next((each for each in found if each in done and each.exception() is not None), None)
            if failed is not None:
                self.end()
                failed.result()
        return [each.result() for each in found]


def verdict(result: dict[str, Any]) -> int:
    """The exit code; see above."""
    modes = result["modes"]
    noise = float(result["reference"].get("noise", "inf"))
    if not modes or noise > NOISE or any("error" in each or len(each["steps"]) < STEPS for each in modes.values()):
        return 2
    wrong = nothing_shown = False
    for mode, found in modes.items():
        for step, each in found["steps"].items():
            has_to_be_right = step != "moved" or mode == "repair"
            wrong |= has_to_be_right and each[Kind.CORRUPT.value] > 0
            nothing_shown |= not has_to_be_right and not each[Kind.CORRUPT.value]
            nothing_shown |= not all(rank["replays"] for rank in each["of ranks"])
            if mode != "stock":
                wrong |= any(misreported(step, rank) for rank in each["of ranks"])
                compared = all(rank["comparisons"] > 0 for rank in each["of ranks"])
                nothing_shown |= step.startswith("scaled") and not compared
    return 1 if wrong else 2 if nothing_shown else 0


def misreported(step: str, rank: dict[str, Any]) -> bool:
    """Whether a rank says that something has moved where nothing has, or the reverse; or its watch has failed."""
    return bool(rank["events"].get("failures")) or bool(rank["moved"]) != (step == "moved")


def _answers(found: Sequence[Any]) -> list[Answer]:
    return [Answer(tuple(tokens), tuple(dict(best) for best in top)) for tokens, top in found]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _free_port() -> int:
    """One that no outgoing connection takes meanwhile: it is bound twice, when ranks start and when one joins."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(100):
        with socket.socket() as found, contextlib.suppress(OSError):
            # Any, where all that may be bound are those of outgoing connections, too.
            found.bind(("127.0.0.1", random.randrange(lowest * 2 // 3, lowest) if lowest > 2048 else 0))  # noqa: S311
            return int(found.getsockname()[1])
    raise OSError(f"none of 100 ports below {lowest} could be bound")


if __name__ == "__main__":
    sys.exit(main())
