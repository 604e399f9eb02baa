"""Compares very many replays of graphs that are right, by kind of graph, and counts those that are called wrong.

    python benchmarks/exact_replays.py --out FOLDER --models FOLDER [--minutes 4] [--parallel 12]

It needs a GPU. FOLDER of `--models` holds mixtures of experts, each in a folder; others are `verify`'s. Each engine is
that of `compare --exact`, alone: with the fixes on, one model under one kind of graph, asked 96 prompts. Engines start
until the minutes are over. FOLDER of `--out` gets a line of JSON for each; a row for each kind is printed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import replace
from pathlib import Path

from compare_cases import OFFLINE, SMALL
from vllm_graphfix.commands.compare.run import SCHEDULER_IN_PROCESS, Options, jobs_for
from vllm_graphfix.verify.codec import to_builtins
from vllm_graphfix.verify.engine import device
from vllm_graphfix.verify.engine.exact import ENVIRONMENT as EXACT_ENVIRONMENT
from vllm_graphfix.verify.engine.exact import ExactRank
from vllm_graphfix.verify.engine.job import Job
from vllm_graphfix.verify.engine.processes import Engines, JobResult

_UNCOMPILED = ("-cc.mode=0",)
_PIECEWISE = "-cc.cudagraph_mode=PIECEWISE"
_V1, _V2, _BREAKABLE = (
    {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    {"VLLM_USE_V2_MODEL_RUNNER": "1"},
    {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"},
)
_FULL = ("-cc.cudagraph_mode=FULL_DECODE_ONLY", *_UNCOMPILED)
_NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
KINDS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "full, V2": (_FULL, _V2),
    "breakable": ((_PIECEWISE, *_UNCOMPILED), _BREAKABLE),
    "full, V1": (_FULL, _V1),
    "pieces": ((_PIECEWISE,), _V2),
    "n-gram drafts": ((*_FULL, "--speculative-config", _NGRAM), _V2),
}
"""Flags and environment by kind of graph."""
DRAFTS = {
    "Eagle's": ("llama", '{"method": "eagle", "num_speculative_tokens": 3, "model": "%s/eagle"}'),
    "MTP's": ("mimo", '{"method": "mtp", "num_speculative_tokens": 2}'),
}
"""Model and `--speculative-config`, with a place for the folder of models, by kind of drafter graph."""
OURS = ("llama", "mimo", "mla", "mamba2", "granite", "qwen3-next", "eagle")
_COMMON = ("--skip-tokenizer-init", "--no-enable-flashinfer-autotune", "--kernel-config.enable_jit_warmup=false")
_SIZES = ("--cudagraph-capture-sizes", "1", "2", "4", "8", "16", "32", "64")
_REQUESTS, _LONGEST, _TOKENS = 96, 400, 512


def jobs(models: Sequence[Path], drafting: Path) -> Iterator[Job]:
    """Yield jobs without end, each kind in turn and each model, with other prompts each time."""
    chance = random.Random(11)  # noqa: S311 - the same prompts in every run
    kinds = [(kind, model, *KINDS[kind]) for model in models for kind in KINDS]
    for kind, (name, config) in DRAFTS.items():
        drafts = (*_FULL, "--speculative-config", config % drafting if "%" in config else config)
        kinds += [(kind, drafting / name, drafts, _V2)] * 2
    chance.shuffle(kinds)
    number = 0
    while True:
        for kind, model, flags, environment in kinds:
            prompts = tuple(
                tuple(chance.choices(range(3, 1000), k=chance.randint(1, _LONGEST))) for _ in range(_REQUESTS)
            )
            options = Options(prompts, max_tokens=_TOKENS)
            graphs = jobs_for(str(model), (*SMALL.split(), *_COMMON, *_SIZES, *flags), options)[1]
            number += 1
            own: dict[str, str | None] = {**OFFLINE, **environment}
            if "-cc.mode=0" in flags:
                own["TORCHDYNAMO_DISABLE"] = "1"
            yield replace(
                graphs,
                name=f"{number} {model.name} {kind}",
                exact=True,
                untuned=True,
                environment=SCHEDULER_IN_PROCESS | EXACT_ENVIRONMENT | own,
            )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--parallel", type=int, default=12)
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    (ours := out / "models").mkdir(parents=True, exist_ok=True)
    device.find(ours, OURS)
    mixtures = [each for each in sorted(options.models.resolve().iterdir()) if (each / "config.json").exists()]
    models = [*mixtures, *(ours / name for name in OURS if name != "eagle")]
    began = time.monotonic()
    counts: dict[str, Counter[str]] = {}
    engines, source = Engines(out, 400.0, preload=True, retry=False), jobs(models, ours)
    with engines.open(options.parallel) as submit, (out / "engines.jsonl").open("a") as lines:
        running: set[Future[JobResult]] = {submit(next(source)) for _ in range(options.parallel)}
        while running:
            done = next(as_completed(running))
            running.remove(done)
            if time.monotonic() - began < 60 * options.minutes:
                running.add(submit(next(source)))
            ended = done.result()
            ranks: tuple[ExactRank, ...] = ended.result.exact if ended.result else ()
            row = {"name": ended.job.name, "seconds": round(ended.seconds), "error": ended.error}
            print(json.dumps(row | {"ranks": to_builtins(ranks)}), file=lines, flush=True)
            for rank in ranks:
                count = counts.setdefault(ended.job.name.split(" ", 2)[2], Counter())
                count.update(compared=rank.compared, wrong=rank.wrong, unjudged=rank.skipped)
                count.update(unseen=rank.unseen)
    for kind, count in sorted(counts.items()):
        print(f"{kind}: {', '.join(f'{number} {what}' for what, number in count.items())}")
    return int(any(count["wrong"] for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
