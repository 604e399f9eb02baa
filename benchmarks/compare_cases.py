"""What `compare --exact --poison` alone finds of the known defects, and whether it judges mixtures and twins.

    python benchmarks/compare_cases.py --out FOLDER [--parallel 6] [--timeout 500] [--twins FOLDER] [--models FOLDER]
                                       [CASE …]

It needs a GPU. Each case is one `vllm-graphfix compare` with vLLM's flags, in processes of its own. Of a known defect
that the installed release has, the models are those of `verify --device gpu`, and the plugin observes: nothing is
corrected, and `compare` is not told what is wrong. FOLDER of `--twins` holds config.json files, each compared as its
twin for eight ranks, and that of `--models` folders with a model, both with the fixes on. CASE takes some, by name. A
case's JSON and log are in FOLDER, where a second call leaves it alone; a row for each is printed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from vllm_graphfix import manifest
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.settings.environment import PREFIX
from vllm_graphfix.source.files import open_source
from vllm_graphfix.verify.engine import device
from vllm_graphfix.verify.engine.case import Case
from vllm_graphfix.verify.trial import further_cases, trial_of

SMALL = (
    "--kv-cache-memory-bytes 1073741824 --gpu-memory-utilization 0.04 --max-num-seqs 16 --max-num-batched-tokens 256 "
    "--seed 0 --max-model-len 1400"
)
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "OMP_NUM_THREADS": "2",
}
LENGTHS = (1, 1, 2, 3, 5, 7, 9, 17, 33, 64, 65, 70, 120, 127, 128, 129, 200, 255, 300, 511, 513, 700, 900, 1)
"""Tokens of the prompts to a model that has no case."""
TOKENS = 40
"""Of the longest answer to these."""
_WORDS = 1000
_NO_FLAG = ("worker_extension_cls", "disable_log_stats", "model")


class Comparison(NamedTuple):
    """A command line of `compare`, and the environment for it."""

    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str]


def of_known_defects(out: Path) -> Iterator[Comparison]:
    """Yield the comparisons of the cases of each fix that the installed vLLM needs, and make their models."""
    source = open_source()
    cases: dict[str, Case] = {}
    for fix in FIXES:
        if manifest.diagnose(fix, source).verdict is Verdict.AFFECTED:
            for case in (trial_of(fix.name).case, *further_cases(fix.name, source)):
                if case is not None:
                    cases[f"{fix.name}--{case.name}"] = case.on(source)
    models = out / "models"
    models.mkdir(exist_ok=True)
    device.find(models, tuple(sorted({name for case in cases.values() for name in case.models})))
    for name, case in cases.items():
        stock = next(job for job in case.jobs(models) if job.name.endswith(" stock"))
        prompts = out / f"{name}.jsonl"
        prompts.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in stock.prompts))
        inherited = {key: value for key, value in stock.environment.items() if value is not None}
        inherited.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        arguments = (str(models / case.model), *flags(stock.arguments | stock.supported_arguments))
        longest = str(max(stock.max_tokens))
        yield Comparison(
            name,
            (*arguments, "--prompts", str(prompts), "--max-tokens", longest),
            inherited | {PREFIX: "observe"},
        )


def flags(arguments: dict[str, Any]) -> Iterator[str]:
    """Yield the flags of vLLM's command line for keywords of `vllm.LLM`."""
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if name in _NO_FLAG:
            continue
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield from (f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value))


def of_models(out: Path, twins: Path | None, models: Path | None) -> Iterator[Comparison]:
    """Yield the comparisons of all twins and of all models, with the fixes on."""
    chance = random.Random(7)  # noqa: S311 - the same prompts in every run
    prompts = out / "prompts.jsonl"
    made = (chance.choices(range(3, _WORDS), k=length) for length in LENGTHS)
    prompts.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in made))
    requests = ("--prompts", str(prompts), "--max-tokens", str(TOKENS))
    for config in sorted(twins.glob("*.json")) if twins else ():
        # Bytes are the tokens of a twin: its prompts are made up by `compare`.
        yield Comparison(
            config.stem, (str(config), *shlex.split(SMALL), "--twin", "-tp", "8", "--max-tokens", str(TOKENS)), {}
        )
    for model in sorted(models.iterdir()) if models else ():
        if (model / "config.json").exists():
            yield Comparison(model.name, (str(model), *shlex.split(SMALL), "--skip-tokenizer-init", *requests), {})


def run(comparison: Comparison, out: Path, timeout: float) -> dict[str, Any]:
    """Run *comparison* for at most *timeout* seconds, unless *out* has its result, and return its row."""
    result, log = out / f"{comparison.name}.json", out / f"{comparison.name}.log"
    if not result.exists():
        began = time.monotonic()
        command = [sys.executable, "-m", "vllm_graphfix", "compare", *comparison.arguments]
        command += ["--exact", "--poison", "--json"]
        environment = {**os.environ, **OFFLINE, **comparison.environment}
        with log.open("w") as errors:
            try:
                done = subprocess.run(
                    command, env=environment, stdout=subprocess.PIPE, stderr=errors, timeout=timeout, check=False
                )
                code, report = done.returncode, json.loads(done.stdout or "{}")
            except subprocess.TimeoutExpired:
                code, report = None, {}
        row = {"code": code, "seconds": round(time.monotonic() - began), "report": report}
        result.write_text(json.dumps(row | {"command": shlex.join(command), "environment": comparison.environment}))
    return dict(json.loads(result.read_text()))


def summary(name: str, row: dict[str, Any]) -> str:
    """Return what each half of a comparison says, in one line."""
    report = row["report"]
    if not report:
        return f"{name}: exit code {row['code']}, {row['seconds']} s"
    exact, poison = report.get("exact") or {}, report.get("poison") or {}
    ranks = exact.get("ranks") or [{}]
    kinds = {prompt["kind"] for prompt in report.get("prompts", ()) if "kind" in prompt}
    return (
        f"{name}: exit code {row['code']}, {row['seconds']} s; replays {ranks[0].get('wrong')} of "
        f"{ranks[0].get('compared')} wrong, {ranks[0].get('unseen')} not compared; poison {poison.get('found')}; "
        f"answers {'corrupt' if report.get('corrupt') else ', '.join(sorted(kinds)) or 'equal'}; "
        f"{report.get('inconclusive') or report.get('error') or ''}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--timeout", type=float, default=500.0)
    parser.add_argument("--twins", type=Path)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--no-defects", action="store_true", help="leave out the known defects")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()
    comparisons = [*of_models(out, options.twins, options.models)]
    if not options.no_defects:
        comparisons += of_known_defects(out)
    taken = [each for each in comparisons if not options.cases or each.name in options.cases]
    print(
        f"vLLM {importlib.metadata.version('vllm')}: {len(taken)} comparisons, {options.parallel} at a time", flush=True
    )
    with ThreadPoolExecutor(options.parallel) as pool:
        for each, row in zip(taken, pool.map(lambda each: run(each, out, options.timeout), taken), strict=True):
            print(summary(each.name, row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
