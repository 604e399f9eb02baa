"""What poison shows in tiny models with full graphs, stock and with the fixes, on one GPU.

    python benchmarks/poison.py --out FOLDER [--site RELEASE=FOLDER …] [--only NAME …] [--fixes off on] [--parallel 6]

FOLDER of --site holds a vLLM that can run, with its dependencies; without --site it is the installed one, and the
plugin has to be on the path. Each engine is asked twice as it is and then with poison in padded rows, the null block,
unused blocks and freed memory; where that shows, with each kind alone (docs/comparing.md). Batches shrink through sizes
between those of the graphs, so that there is padding. Engines of all releases run side by side, --parallel at a time,
each within --timeout; none begins when --limit seconds are over.

--only names cases, or a case of one release as 0.20.0/mamba2. A case whose defect a release does not have is run there
too: nothing may show.

A line of JSON for each engine as it ends, and all of them in result.json, which is written each time. Exit code 1 if
poison shows where the fixes are on, or on stock where no defect of the case is known, or does not where one is; 2 if
nothing ran.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from measuring import PROJECT
from measuring.engine_cases import Site, find_sites
from vllm_graphfix import manifest
from vllm_graphfix.fix import Verdict, variable
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings.environment import PREFIX
from vllm_graphfix.source.files import SourceError, open_source
from vllm_graphfix.verify.engine import cases, device
from vllm_graphfix.verify.engine.cases import Case
from vllm_graphfix.verify.engine.job import Job
from vllm_graphfix.verify.engine.poison_report import report_of
from vllm_graphfix.verify.engine.processes import Ended, Engines

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
DEFECTS = {
    "mla-fp8-padded": "flashmla-padding",
    "mla-triton": "triton-mla-padding",
    "sparse-mtp": "indexer-padding",
    "mamba2-idle": "idle-rank",
    "mamba2": "mamba-padding",
}
"""What poison is to find, by case."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for result.json and the logs")
    parser.add_argument("--site", action="append", default=[], metavar="RELEASE=FOLDER", help="a vLLM; may be repeated")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--fixes", nargs="+", default=["off", "on"], choices=["off", "on"])
    parser.add_argument("--parallel", type=int, default=6, help="engines at a time, of about 5 GiB each (6)")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for each engine (240)")
    parser.add_argument("--limit", type=float, metavar="S", help="seconds after which no engine begins")
    options = parser.parse_args()
    try:
        sites = find_sites(options.site)
    except (SourceError, ValueError) as error:
        parser.error(str(error))
    chosen = [
        (site, case)
        for site in sites
        for case in CASES.values()
        if not options.only or {case.name, f"{site.release}/{case.name}"} & set(options.only)
    ]
    if unknown := set(options.only) - {
        name for site, case in chosen for name in (case.name, f"{site.release}/{case.name}")
    }:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    make_models(sorted({model for _, case in chosen for model in case.models}), out, sites)
    bench = Bench(out)
    for site, case in chosen:
        for fixes in options.fixes:
            bench.add(site, case, fixes, sites)
    Engines(out, options.timeout, ended=bench.note, limit=options.limit).run(
        list(bench.jobs.values()), options.parallel
    )
    return verdict(bench.results)


def make_models(names: list[str], out: Path, sites: tuple[Site, ...]) -> None:
    """In a process that has torch from a site, if need be."""
    missing = [name for name in names if not (out / name).exists()]
    if missing:
        subprocess.run(
            [sys.executable, "-m", device.__name__, str(out), *missing],
            env=os.environ | {"PYTHONPATH": sites[0].path(sites, PROJECT)},
            check=True,
            stdout=subprocess.DEVNULL,
        )


class Bench:
    """Engines to come, and what has been found."""

    def __init__(self, out: Path) -> None:
        self._out, self._lock = out, threading.Lock()
        self.jobs: dict[str, Job] = {}
        self.results: list[dict[str, Any]] = []
        self._about: dict[str, dict[str, Any]] = {}

    def add(self, site: Site, case: Case, fixes: str, sites: tuple[Site, ...]) -> None:
        job = job_of(case, fixes, self._out)
        environment = job.environment | {"PYTHONPATH": site.path(sites, PROJECT)}
        job = replace(job, name=f"{site.release} {job.name}", environment=environment)
        self.jobs[job.name] = job
        expected = expectation(site, case.name, fixes)
        self._about[job.name] = {"release": site.release, "case": case.name, "fixes": fixes, "expected": expected}

    def note(self, ended: Ended) -> None:
        """Called in the thread of each engine."""
        report = report_of(ended.said, ended.error, ended.observed)
        facts = ended.said.facts if ended.said else {}
        found = (
            self._about[ended.job.name]
            | {"vllm": facts.get("vllm"), "torch": facts.get("torch"), "device": facts.get("device")}
            | {"seconds": round(ended.seconds), "lines": report.lines(), "summary": report.summary()}
            | report.as_json()
        )
        with self._lock:
            self.results.append(found)
            (self._out / "result.json").write_text(json.dumps(self.results, indent=1))
            print(json.dumps({name: value for name, value in found.items() if name != "passes"}), flush=True)


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
        poison_last=False,
        again=1,
        seconds=None,  # what hangs without poison is ended by --timeout, and says nothing of poison
        environment=environment,
    )


def expectation(site: Site, case: str, fixes: str) -> bool | None:
    """Whether poison is to show; None if it may, by another defect than those that it finds."""
    if fixes == "on" or case.startswith("llama"):
        return False
    fix = DEFECTS.get(case)
    if fix is None:
        return None
    found = manifest.diagnose(BY_NAME[fix], open_source(site.folder)).verdict
    return True if found is Verdict.AFFECTED else None


def verdict(results: list[dict[str, Any]]) -> int:
    if not results or all(found["error"] and not found["found"] for found in results):
        return 2
    judged = [found for found in results if found["expected"] is not None and (shows(found) or not found["error"])]
    return int(any(shows(found) != found["expected"] for found in judged))


def shows(found: dict[str, Any]) -> bool:
    """What `triton-mla-padding` does stays in padded rows where the model is dense."""
    return bool(found["found"] or (found["case"] == "mla-triton" and found["padded"]))


if __name__ == "__main__":
    sys.exit(main())
