"""Marks in the KV cache on GPUs: what they find, whether they are silent, and what they cost.

    python benchmarks/kv_marks.py --out FOLDER [--part PART …] [--site RELEASE=FOLDER …] [--limit SECONDS]

FOLDER of --site holds a vLLM that can run, with its dependencies; without --site it is the installed one.

silent  one GPU, the fixes on, every finished block marked, or those of 1/--every, in engines side by side on both model
        runners, with drafts, latent attention and a hybrid: requests of all lengths that share prefixes, come, go and
        are aborted, until all engines together have marked --marks blocks; one that has changed is a false alarm
idle    one GPU, bursts of requests and steps of a rank without work between them, with `idle-rank` off and on side by
        side, on each release
cost    one GPU, 24 layers, decodes of 64 requests, none of which is hidden behind another: windows with marks and
        without in turns, in one engine; by the marks' own clock, and by another one around them
ranks   two GPUs with data-parallel experts, one of which always has requests and the other bursts with pauses: with
        `idle-rank` off, then on

--model is of `idle` and `ranks`. By default it is mixtral up to 0.19.1, whose target's slots an idle step writes to,
and later mla-mtp: only the drafter's. --planted has the idle steps write where those of 0.18.1 do, on any release with
model runner V1: what marks must find. --cpu rehearses all where there is no GPU.

The result is in FOLDER/result.json from the first seconds on, logs and what each engine said beside it; --limit is for
each part, with the start of its engines. Exit code 1 if a block has changed with the fixes on, or none with `idle-rank`
off; 2 if an engine has said nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from measuring.engine_cases import Site, find_sites
from measuring.engine_steps import LARGE
from measuring.wrappers import Ratio, ratios_of
from vllm_graphfix.source.files import SourceError
from vllm_graphfix.verify.engine import models, processes
from vllm_graphfix.verify.engine.device import PACKAGE

ENGINE = Path(__file__).parent / "measuring" / "kv_marks_engine.py"
PARTS = ("silent", "idle", "cost", "ranks")
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
ENDING, GRACE = {"ranks": 25.0}, 5.0
"""Seconds before the limit at which an engine has to come to its end, and after it at which it is ended."""


@dataclass
class Engine:
    """One engine, in a process of its own."""

    name: str
    site: Site
    model: str
    environment: dict[str, str]
    arguments: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    files: list[IO[bytes]] = field(default_factory=list)
    ended: bool = False
    """From outside."""

    def told(self, out: Path) -> dict[str, Any]:
        """The last that it has said."""
        path = out / f"{self.name}.out"
        lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
        for line in reversed(lines):
            if line.startswith('{"load, s"') and line.endswith("\n"):
                found: dict[str, Any] = json.loads(line)
                return found
        return {}

    def result(self, out: Path) -> dict[str, Any]:
        code = self.process.poll() if self.process else None
        found = {"release": self.site.release, "model": self.model, **self.environment, **self.told(out)}
        if self.ended:
            found["error"] = "not at its end in time"
        elif self.process is not None and code not in (None, 0):
            error = processes.root_cause((out / f"{self.name}.log").read_text(errors="replace"))
            found["error"] = error or f"exit code {code}"
        return found

    def end(self) -> None:
        if self.process is not None:
            self.ended = self.process.poll() is None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for file in self.files:
            file.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for result.json and the logs")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--site", action="append", default=[], metavar="RELEASE=FOLDER", help="a vLLM; may be repeated")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="for each part (300)")
    parser.add_argument("--parallel", type=int, default=8, metavar="N", help="engines at a time (8)")
    parser.add_argument("--model", choices=sorted(models.MODELS))
    parser.add_argument("--fix", action="append", choices=("off", "auto"), help="of idle and ranks (both)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="1/N is marked, but for cost (1)")
    parser.add_argument("--fraction", type=int, default=16, metavar="N", help="1/N is what cost has (16)")
    parser.add_argument("--marks", type=int, default=110_000, metavar="N", help="without a false alarm (110000)")
    parser.add_argument("--only", type=int, action="append", metavar="N", help="of the engines of silent, by number")
    parser.add_argument("--asynchronous", action=argparse.BooleanOptionalAction, help="scheduling of idle and ranks")
    parser.add_argument("--planted", action="store_true", help="idle steps write to blocks")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal without a GPU")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        bench = Bench(options, find_sites(options.site))
    except (ValueError, SourceError) as error:
        parser.error(str(error))
    with processes.terminated_like_interrupted():
        try:
            for part in options.part or PARTS:
                bench.run(part)
        except KeyboardInterrupt:
            print(f"interrupted; what was measured is in {options.out / 'result.json'}", file=sys.stderr)
            return 130
    print(json.dumps(bench.result, indent=1))
    return verdict(bench.result)


class Bench:
    def __init__(self, options: argparse.Namespace, sites: Sequence[Site]) -> None:
        self._options = options
        self._sites = sites
        self.result: dict[str, Any] = {}
        plugin = options.out / "plugin"
        metadata = plugin / "graphfix_benchmark-1.dist-info"
        metadata.mkdir(parents=True, exist_ok=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: graphfix_benchmark\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\ngraphfix = vllm_graphfix:register\n")
        if not (plugin / "vllm_graphfix").is_symlink():
            (plugin / "vllm_graphfix").symlink_to(PACKAGE / "vllm_graphfix")
        self._plugin = plugin

    def run(self, part: str) -> None:
        """One part, with its result written as it goes."""
        engines = getattr(self, f"_{part}")()
        for model in dict.fromkeys(engine.model for engine in engines):
            self._write_model(model, engines[0].site)
        together = 1 if part == "ranks" else self._options.parallel
        begun, limit, turns = time.time(), self._options.limit, -(-len(engines) // together)
        for turn in range(turns):
            until = begun + limit * (turn + 1) / turns
            self._run(part, engines, engines[turn * together : (turn + 1) * together], until)

    def _run(self, part: str, all_of_them: Sequence[Engine], engines: Sequence[Engine], until: float) -> None:
        out = self._options.out
        stop = out / f"{part}.stop"
        stop.unlink(missing_ok=True)
        try:
            for engine in engines:
                self._start(part, engine, until - ENDING.get(part, GRACE), stop)
            while any(engine.process and engine.process.poll() is None for engine in engines):
                time.sleep(0.5)
                self._save(part, all_of_them)
                if time.time() > until + GRACE:
                    break
                if part == "silent" and marks(self.result[part].values()) >= self._options.marks:
                    stop.touch()
        finally:
            for engine in engines:
                engine.end()
            self._save(part, all_of_them)

    def _save(self, part: str, engines: Iterable[Engine]) -> None:
        out = self._options.out
        told = {engine.name: engine.result(out) for engine in engines if engine.process}
        self.result[part] = {name: found | ratios(found) if part == "cost" else found for name, found in told.items()}
        fresh = out / "result.json.new"
        fresh.write_text(json.dumps(self.result, indent=1))
        fresh.replace(out / "result.json")

    def _silent(self) -> list[Engine]:
        given = [each for number, each in enumerate(SILENT) if not self._options.only or number in self._options.only]
        return [
            Engine(
                f"silent-{site.release}-{number}-{model}",
                site,
                model,
                {"VLLM_USE_V2_MODEL_RUNNER": v2, "VLLM_GRAPHFIX_KV_MARKS": f"1/{self._options.every}"},
                more,
            )
            for site in self._sites
            for number, (model, v2, more) in enumerate(given)
        ]

    def _idle(self) -> list[Engine]:
        return [self._off_and_on("idle", site, fix) for site in self._sites for fix in self._fixes()]

    def _ranks(self) -> list[Engine]:
        made = [self._off_and_on("ranks", site, fix) for site in self._sites for fix in self._fixes()]
        for engine in made:
            engine.arguments |= {"data_parallel_size": 2, "enable_expert_parallel": True, "moe_backend": "triton"}
            records = self._options.out / f"records-{engine.name}"
            records.mkdir(exist_ok=True)
            engine.environment["VLLM_GRAPHFIX_STATUS_DIR"] = str(records)
        return made

    def _fixes(self) -> Sequence[str]:
        return self._options.fix or ("off", "auto")

    def _off_and_on(self, part: str, site: Site, fix: str) -> Engine:
        later = tuple(map(int, site.release.split(".")[:2])) > (0, 19)
        model = self._options.model or ("mla-mtp" if later else "mixtral")
        environment = {
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_GRAPHFIX_IDLE_RANK": fix,
            "VLLM_GRAPHFIX_KV_MARKS": f"1/{self._options.every}",
        }
        arguments: dict[str, Any] = {"speculative_config": DRAFTS} if model.endswith("mtp") else {}
        if self._options.asynchronous is not None:
            arguments["async_scheduling"] = self._options.asynchronous
        more = {"planted": self._options.planted} if part == "idle" else {}
        return Engine(f"{part}-{site.release}-{fix}", site, model, environment, arguments, more)

    def _cost(self) -> list[Engine]:
        cpu = self._options.cpu
        more: dict[str, Any] = {"load_format": "dummy", "max_num_seqs": 64, "async_scheduling": False}
        more |= {"kv_cache_memory_bytes": 8 << 30, "gpu_memory_utilization": 0.3}
        load = {"batch": 64, "prompt": 64, "answer": 256} if not cpu else {"batch": 16, "prompt": 260, "answer": 8}
        sizes = [1, 2, 4, 8, 16, 32, 64]
        more["compilation_config"] = GRAPHS | {"cudagraph_capture_sizes": sizes}
        return [
            Engine(f"cost-{site.release}", site, "large", {}, more, load | {"every": self._options.fraction})
            for site in self._sites[:1]
        ]

    def _write_model(self, model: str, site: Site) -> None:
        out = self._options.out
        if model == "large":
            (out / model).mkdir(exist_ok=True)
            heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
            config = models.LLAMA | ({} if self._options.cpu else LARGE | heads)
            (out / model / "config.json").write_text(json.dumps(config))
        elif not (out / model / "model.safetensors").exists():
            code = (
                "import sys, pathlib; from vllm_graphfix.verify.engine import models; "
                "models.write(sys.argv[1], pathlib.Path(sys.argv[2]))"
            )
            command = [sys.executable, "-c", code, model, str(out)]
            subprocess.run(command, env=self._environment(site), cwd=out, check=True)

    def _environment(self, site: Site) -> dict[str, str]:
        path = filter(None, [str(self._plugin), str(site.folder or ""), os.environ.get("PYTHONPATH", "")])
        return os.environ | {"PYTHONPATH": os.pathsep.join(path)}

    def _start(self, part: str, engine: Engine, until: float, stop: Path) -> None:
        options = self._options
        arguments: dict[str, Any] = {
            "model": str(options.out / engine.model),
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 1 << 28,
            "gpu_memory_utilization": 0.05,
            "compilation_config": GRAPHS,
        } | engine.arguments
        if "speculative_config" in arguments:  # a decode has two tokens
            arguments["compilation_config"] = GRAPHS | {"cudagraph_capture_sizes": [2, 4, 8, 16, 32]}
        if options.cpu:
            for name in (
                "kv_cache_memory_bytes",
                "compilation_config",
                "moe_backend",
                "enable_expert_parallel",
            ):
                arguments.pop(name, None)
            arguments |= {
                "gpu_memory_utilization": 0.3,
                "enforce_eager": True,
                "num_gpu_blocks_override": 400,
                "block_size": 16,
            }
        given = {"part": part, "arguments": arguments, "until": until, "stop": str(stop), "more": engine.more}
        known = {"VLLM_GRAPHFIX_KV_MARKS": "1/1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if part == "ranks":
            del known["VLLM_ENABLE_V1_MULTIPROCESSING"]
        engine.files = [(options.out / f"{engine.name}.{end}").open("wb") for end in ("out", "log")]
        engine.process = subprocess.Popen(
            [sys.executable, str(ENGINE), json.dumps(given)],
            env=self._environment(engine.site) | known | engine.environment,
            cwd=options.out,
            stdin=subprocess.DEVNULL,
            stdout=engine.files[0],
            stderr=engine.files[1],
            start_new_session=True,  # an engine starts processes; together they can be ended
        )


def ratios(found: dict[str, Any]) -> dict[str, Any]:
    """By load: how many tokens a second there are with marks, relative to without, each with a 95 % interval."""
    return {load: {**found[load], **_ratios(found[load])} for load in ("together", "apart") if load in found}


def _ratios(found: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, seconds in found["seconds"].items():
        if len(seconds) >= 4:
            ratio = Ratio.of(seconds)
            told[f"throughput, {name}"] = {key: round(value, 5) for key, value in ratio._asdict().items()}
            told[f"throughput, {name}, mean"] = {key: round(value, 5) for key, value in mean(seconds).items()}
    marked = found["with marks"]
    if marked["seconds"]:
        for name in ("following", "sums", "before the worker's own method"):
            told[f"part of the host's time, {name}"] = round(marked[f"of them {name}"] / marked["seconds"], 6)
    return told


def mean(seconds: Sequence[float]) -> dict[str, float]:
    """The mean of the ratios, with a 95 % interval, which a few batches in one window do not escape."""
    each = ratios_of(seconds)
    middle = statistics.fmean(each)
    margin = 1.96 * statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else math.inf
    return {"mean": middle, "low": middle - margin, "high": middle + margin}


def counts(found: dict[str, Any]) -> list[dict[str, int]]:
    """What an engine has counted, on each of its ranks."""
    return [rank["counts"] for rank in found.get("ranks", ())] or [found.get("counts", {})]


def changed(found: dict[str, Any]) -> int:
    return sum(each.get("changed", 0) for each in counts(found))


def marks(engines: Iterable[dict[str, Any]]) -> int:
    return sum(each.get("marks", 0) for found in engines for each in counts(found))


def verdict(result: dict[str, Any]) -> int:
    engines = {name: found for part in result.values() for name, found in part.items()}
    unmarked = [name for name, found in result.get("silent", {}).items() if not marks([found])]
    if unmarked or any("load, s" not in found for found in engines.values()):
        return 2  # nothing was shown: it did not run, or had no mark
    marked = {name: found for name, found in engines.items() if not name.startswith("cost")}
    off = [changed(found) for name, found in marked.items() if name.endswith("-off")]
    on = [changed(found) for name, found in marked.items() if not name.endswith("-off")]
    return int(any(on) or not all(off))


if __name__ == "__main__":
    sys.exit(main())
