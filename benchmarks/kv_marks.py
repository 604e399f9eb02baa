"""Marks in the KV cache on GPUs: what they find, whether they are silent, and what they cost.

It runs on the installed vLLM, or the one on the Python path.

    python benchmarks/kv_marks.py --out FOLDER [--part PART …] [--model MODEL] [--marks 100000] [--seconds 300]

silent  one GPU, the fixes on, every finished block marked, in engines on both model runners, with drafts, latent
        attention and a hybrid: requests of all lengths that share prefixes, come, go and are aborted, until all engines
        together have marked --marks blocks; one that has changed is a false alarm
idle    one GPU, with steps of a rank without work in between: `idle-rank` off, until a block has changed, and on
cost    one GPU, 24 layers: seconds for a batch of requests, without marks, without again, and with 1/16, in turns, in
        one engine, as ratios
ranks   two GPUs with data-parallel experts, one of which has nothing to do now and then: `idle-rank` off, until a
        record tells of a block that has changed, and on. The plugin has to be installed

--model is of `idle` and `ranks`: mixtral shows the defect up to 0.19.1, mla-mtp, with drafts, also later. --cpu
rehearses all but `ranks` where there is no GPU. Result in FOLDER/result.json, logs beside it. Exit code 1 if a block
has changed with the fixes on, or none with `idle-rank` off; 2 if an engine has not come to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from measuring.engine_steps import LARGE
from vllm_graphfix.verify.engine import models

ENGINE = Path(__file__).parent / "measuring" / "kv_marks_engine.py"
PARTS = ("silent", "idle", "cost", "ranks")
FRACTION = 16
DRAFTS = {"method": "mtp", "num_speculative_tokens": 1}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
SILENT: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "0", {}),
    ("llama", "1", {}),
    ("llama", "1", {"async_scheduling": True}),
    ("mla", "0", {}),
    ("mla-mtp", "0", {"speculative_config": DRAFTS}),
    ("mla-mtp", "1", {"speculative_config": DRAFTS, "async_scheduling": True}),
    ("qwen3-next", "0", {}),
)
"""A model, VLLM_USE_V2_MODEL_RUNNER, and what else the engine is given."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for result.json and the logs")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--model", default="mla-mtp", choices=sorted(models.MODELS))
    parser.add_argument("--marks", type=int, default=100_000, metavar="N", help="without a false alarm (100000)")
    parser.add_argument("--seconds", type=float, default=300.0, metavar="S", help="of load on one engine (300)")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="of cost (8)")
    parser.add_argument("--only", type=int, action="append", metavar="N", help="of the engines of silent, by number")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal without a GPU")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    parts = {"silent": bench.silent, "idle": bench.idle, "cost": bench.cost, "ranks": bench.ranks}
    for part in options.part or PARTS:
        bench.result[part] = parts[part]()
        (options.out / "result.json").write_text(json.dumps(bench.result, indent=1))
    print(json.dumps(bench.result, indent=1))
    return verdict(bench.result)


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.result: dict[str, Any] = {}

    def silent(self) -> list[Any]:
        given = [each for number, each in enumerate(SILENT) if not self._options.only or number in self._options.only]
        most = -(-self._options.marks // len(given))
        return [
            {"engine": f"{model}, runner V{int(v2) + 1}, {more}"}
            | self._engine(
                "silent", model, f"silent-{model}-{v2}-{number}", {"VLLM_USE_V2_MODEL_RUNNER": v2}, more, marks=most
            )
            for number, (model, v2, more) in enumerate(given)
        ]

    def idle(self) -> dict[str, Any]:
        model = self._options.model
        more = {"speculative_config": DRAFTS} if model.endswith("mtp") else {}
        return {
            mode: self._engine("idle", model, f"idle-{mode}", {"VLLM_GRAPHFIX_IDLE_RANK": mode} | _v1(), more)
            for mode in ("off", "auto")
        }

    def cost(self) -> dict[str, Any]:
        folder = self._options.out / "large"
        folder.mkdir(exist_ok=True)
        config = models.MODELS["llama"][0] | ({} if self._options.cpu else LARGE)
        (folder / "config.json").write_text(json.dumps(config))
        more: dict[str, Any] = {"load_format": "dummy", "max_num_seqs": 64, "kv_cache_memory_bytes": 8 << 30}
        load = {"batch": 64, "prompt": 512, "answer": 256} if not self._options.cpu else {
            "batch": 8, "prompt": 64, "answer": 32}  # fmt: skip
        found = self._engine("cost", "large", "cost", {}, more, rounds=self._options.rounds, every=FRACTION, **load)
        if "seconds" in found:
            taken = found["seconds"]
            found["ratio to off"] = {
                mode: _spread([on / off for on, off in zip(taken[mode], taken["off"], strict=True)])
                for mode in ("off again", "on")
            }
        return found

    def ranks(self) -> dict[str, Any]:
        model = self._options.model
        arguments: dict[str, Any] = {
            "data_parallel_size": 2,
            "enable_expert_parallel": True,
            "moe_backend": "triton",
        }
        if model.endswith("mtp"):
            arguments["speculative_config"] = DRAFTS
        found = {}
        for mode in ("off", "auto"):
            status = self._options.out / f"records-{mode}"
            status.mkdir(exist_ok=True)
            given = {"VLLM_GRAPHFIX_IDLE_RANK": mode, "VLLM_GRAPHFIX_STATUS_DIR": str(status)} | _v1()
            found[mode] = self._engine("ranks", model, f"ranks-{mode}", given, arguments)
        return found

    def _engine(
        self, part: str, model: str, log: str, environment: dict[str, str], more: dict[str, Any], **order: Any
    ) -> dict[str, Any]:
        """What an engine of a process of its own prints."""
        options = self._options
        if model in models.MODELS and not (options.out / model).exists():
            models.write(model, options.out)
        arguments: dict[str, Any] = {
            "model": str(options.out / model),
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 1 << 28,
            "gpu_memory_utilization": 0.1 if part != "cost" else 0.4,
            "compilation_config": GRAPHS,
        } | more
        if options.cpu:
            for name in ("kv_cache_memory_bytes", "gpu_memory_utilization", "compilation_config"):
                del arguments[name]
            arguments |= {"enforce_eager": True, "num_gpu_blocks_override": 400}
        given = {"part": part, "arguments": arguments, "seconds": options.seconds} | order
        known = {"VLLM_GRAPHFIX_KV_MARKS": "1/1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if part == "ranks":
            del known["VLLM_ENABLE_V1_MULTIPROCESSING"]
        with (options.out / f"{log}.log").open("w") as errors:
            try:
                done = subprocess.run(
                    [sys.executable, str(ENGINE), json.dumps(given)],
                    env=os.environ | known | environment,
                    cwd=options.out,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    timeout=options.seconds + 600,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return {"error": f"not at its end, see {log}.log"}
        (options.out / f"{log}.out").write_bytes(done.stdout)
        lines = [line for line in done.stdout.decode().splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            return {"error": f"exit code {done.returncode}, see {log}.log"}
        found: dict[str, Any] = json.loads(lines[-1])
        return found


def _v1() -> dict[str, str]:
    return {"VLLM_USE_V2_MODEL_RUNNER": "0"}


def _spread(ratios: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(ratios), 4), "from": round(min(ratios), 4), "to": round(max(ratios), 4)}


def changed(found: dict[str, Any]) -> int:
    """Blocks that have changed in an engine, on all of its ranks."""
    ranks = [rank["counts"] for rank in found.get("ranks", ())] or [found.get("counts", {})]
    return sum(counts.get("changed", 0) for counts in ranks)


def verdict(result: dict[str, Any]) -> int:
    engines = [*result.get("silent", ()), *filter(None, [result.get("cost")])]
    engines += [found for part in ("idle", "ranks") for found in result.get(part, {}).values()]
    if any("error" in found for found in engines):
        return 2
    alarms = sum(map(changed, result.get("silent", ())))
    pairs = [result[part] for part in ("idle", "ranks") if part in result]
    return int(alarms > 0 or any(changed(pair["auto"]) or not changed(pair["off"]) for pair in pairs))


if __name__ == "__main__":
    sys.exit(main())
