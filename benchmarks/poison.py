"""What poison shows in tiny models with full graphs, stock and with the fixes, on the installed vLLM and one GPU.

    python benchmarks/poison.py --out FOLDER [--case NAME …] [--fixes off on] [--parallel 4]

Each engine is asked twice as it is and then with poison in padded rows, the null block, unused blocks and freed memory;
where that shows, with each kind alone (docs/comparing.md). Batches shrink through sizes between those of the graphs, so
that there is padding. The plugin has to be on the path.

A line of JSON for each engine, and all of them in result.json. Exit code 1 if poison shows where the fixes are on, or
in a model without a known defect; 2 if nothing ran.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_graphfix.commands.compare.poisoned import report_of
from vllm_graphfix.fix import variable
from vllm_graphfix.settings.environment import PREFIX
from vllm_graphfix.verify.engine import cases, models
from vllm_graphfix.verify.engine.cases import Case
from vllm_graphfix.verify.engine.job import Job
from vllm_graphfix.verify.engine.processes import Engines

_CLEAN = Case(
    name="llama-v1",
    model="llama",
    runner="V1",
    graphs=cases.full_decodes([1, 2, 4, 8]),
    workload=cases.ONE_BY_ONE,
    padded=True,
)
CASES = {
    case.name: replace(case, probes=case.probes if case is cases.MAMBA2_IDLE else ())
    for case in (
        _CLEAN,
        replace(_CLEAN, name="llama-v2", runner="V2"),
        replace(
            _CLEAN,
            name="llama-piecewise",
            graphs=cases.full_decodes([1, 2, 4, 8]) | {"mode": 3, "backend": "eager", "cudagraph_mode": "PIECEWISE"},
            environment={"VLLM_DISABLE_COMPILE_CACHE": "1"},
        ),
        replace(cases.MLA, workload=cases.ONE_BY_ONE),
        cases.MLA_FP8_PADDED,
        cases.MLA_TRITON,
        cases.MAMBA2,
        cases.MAMBA2_IDLE,
        cases.LFM2_ONE_TOKEN,
        cases.SPARSE_MTP,
    )
}
"""Those of Llama have no defect that is known; each other has one in one release or another."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for result.json and the logs")
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=sorted(CASES), metavar="NAME")
    parser.add_argument("--fixes", nargs="+", default=["off", "on"], choices=["off", "on"])
    parser.add_argument("--parallel", type=int, default=4, help="engines at a time")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for each engine")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    chosen = [CASES[name] for name in options.case]
    for model in dict.fromkeys(model for case in chosen for model in case.models):
        if not (out / model).exists():
            models.write(model, out)
    jobs = {(case.name, fixes): job_of(case, fixes, out) for case in chosen for fixes in options.fixes}
    ended = Engines(out, options.timeout).run(list(jobs.values()), options.parallel)
    results = []
    for (case, fixes), job in jobs.items():
        engine = ended[job.name]
        report = report_of(engine.said, engine.error, engine.observed)
        facts = engine.said.facts if engine.said else {}
        results.append(
            {"case": case, "fixes": fixes, "vllm": facts.get("vllm"), "device": facts.get("device")}
            | {"seconds": round(engine.seconds), "lines": report.lines(), "summary": report.summary()}
            | report.as_json()
        )
        print(json.dumps({name: value for name, value in results[-1].items() if name != "passes"}), flush=True)
    (out / "result.json").write_text(json.dumps(results, indent=1))
    return verdict(results)


def job_of(case: Case, fixes: str, folder: Path) -> Job:
    """The case's engine with graphs, asked with poison."""
    stock, patched = case.jobs(folder)[1:]
    job = patched if fixes == "on" else stock
    environment = job.environment | {variable("triton-mla-padding"): "on", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment |= {PREFIX: fixes}
    return replace(
        job,
        name=f"{case.name} {fixes}",
        poison=True,
        again=1,
        seconds=None,  # what hangs without poison is ended by --timeout, and says nothing of poison
        environment=environment,
    )


def verdict(results: list[dict[str, Any]]) -> int:
    if all(found["error"] and not found["found"] for found in results):
        return 2
    clean = {name for name in CASES if name.startswith("llama")}
    return int(any(found["found"] for found in results if found["fixes"] == "on" or found["case"] in clean))


if __name__ == "__main__":
    sys.exit(main())
