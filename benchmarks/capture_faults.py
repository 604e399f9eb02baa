"""What becomes of an engine on a GPU in which a fix fails while graphs are captured, on the installed vLLM.

    python benchmarks/capture_faults.py --out FOLDER [--only CASE …] [--parallel 6]

For each case, tiny models of `verify` in engines of their own, side by side:

eager         without graphs: what is right
stock         the fix off
fixed         the fix, and nothing fails
fails once    it fails while the graph of the most tokens is captured
fails always  it fails in every graph
strict        as `fails once`, with VLLM_GRAPHFIX=strict: the engine must not serve
no way        as `fails once`, where vLLM's dispatch is not known: stock's graph is served, and said to be

The error that is planted is a MemoryError where the fix asks for a second attention state (model runner V2), or while
it corrects metadata (V1). Written to FOLDER/result.json: equal tokens of all, the fix's state, the graphs that are not
used. Exit code 1 if an engine with `fails …` answers otherwise than eager does, or `strict` serves.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_graphfix.settings.environment import PREFIX, STATUS_DIR
from vllm_graphfix.verify.engine import models
from vllm_graphfix.verify.engine.cases import MAMBA2, MLA, Case
from vllm_graphfix.verify.engine.job import Job, Said, from_json

CASES: dict[str, Case] = {"capture-state": MLA, "mamba-padding": MAMBA2}
PLANTS = {"fails once": "most", "fails always": "all", "strict": "most", "no way": "most"}
TIMEOUT = 300.0
PLANT = "GRAPHFIX_BENCHMARK_PLANT"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="for result.json and the engines' logs"
    )
    parser.add_argument("--only", action="append", choices=sorted(CASES))
    parser.add_argument("--parallel", type=int, default=6, metavar="N", help="engines at a time (6)")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"command": sys.argv[1:], "cases": {}}
    jobs = [(fix, job) for fix in options.only or CASES for job in jobs_of(fix, out / "models")]
    with ThreadPoolExecutor(options.parallel) as pool:
        ended = list(pool.map(lambda each: run(each[0], each[1], out), jobs))
    for fix in options.only or CASES:
        said = {job.name: end for (of, job), end in zip(jobs, ended, strict=True) if of == fix}
        result["cases"][fix] = {
            name: told(fix, end, said["eager"]) | {"log": warnings(stem(out, fix, name))} for name, end in said.items()
        }
    (out / "result.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result["cases"], indent=1))
    return int(any(map(wrong, result["cases"].values())))


def jobs_of(fix: str, folder: Path) -> list[Job]:
    case = CASES[fix]
    for name in case.models:
        models.write(name, folder)
    eager, stock, fixed = (replace(job, probes=()) for job in case.jobs(folder))
    plain = [replace(eager, name="eager"), replace(stock, name="stock"), replace(fixed, name="fixed")]
    planted = [
        replace(
            fixed,
            name=name,
            environment=fixed.environment
            | {PLANT: f"{fix} {what} {name}", PREFIX: "strict" if name == "strict" else "on"},
        )
        for name, what in PLANTS.items()
    ]
    return [*plain, *planted]


def run(fix: str, job: Job, out: Path) -> tuple[Said | None, str]:
    """What the engine said, or None and its first error; its log is left in *out*."""
    files = stem(out, fix, job.name)
    job.write(files.with_suffix(".job"))
    environment = {name: value for name, value in os.environ.items() if name != PLANT} | {STATUS_DIR: str(out)}
    for name, value in job.environment.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    with files.with_suffix(".log").open("w") as log:
        try:
            subprocess.run(
                [sys.executable, __file__, "--engine", str(files.with_suffix(".job")), str(files.with_suffix(".said"))],
                env=environment,
                stdout=log,
                stderr=log,
                timeout=TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, f"did not finish in {TIMEOUT:.0f} s"
    try:
        written = json.loads(files.with_suffix(".said").read_text())
    except FileNotFoundError:
        return None, "ended without a word"
    return (None, written["error"]) if "error" in written else (from_json(written), "")


def stem(out: Path, fix: str, name: str) -> Path:
    return out / f"{fix} {name}".replace(" ", "-")


def warnings(files: Path) -> list[str]:
    """What the plugin warned of, as far as it is about this."""
    lines = files.with_suffix(".log").read_text(errors="replace").splitlines()
    return [line.partition("graphfix: ")[2] for line in lines if "graphfix: " in line and " failed: " in line]


def told(fix: str, end: tuple[Said | None, str], eager: tuple[Said | None, str]) -> dict[str, Any]:
    said, error = end
    if said is None or eager[0] is None:
        return {"error": error}
    pairs = [
        (token, right)
        for answer, expected in zip(said.passes[0], eager[0].passes[0], strict=True)
        for token, right in zip(answer.tokens, expected.tokens, strict=True)
    ]
    return {
        "equal tokens": sum(token == right for token, right in pairs),
        "tokens": len(pairs),
        "state": {rank: states.get(fix) for rank, states in said.states.items()},
        "start": said.start_seconds,
    }


def wrong(case: dict[str, dict[str, Any]]) -> bool:
    right = [case[name] for name in ("fixed", "fails once", "fails always")]
    stopped = "stops this engine before it serves" in case["strict"].get("error", "")
    return not stopped or any("error" in each or each["equal tokens"] != each["tokens"] for each in right)


def plant(fix: str, which: str, way: str) -> None:
    """Has the layers of *fix* fail in the graphs that *which* names, from now on."""
    from vllm_graphfix.engine import graph_dispatch
    from vllm_graphfix.fix import Activity
    from vllm_graphfix.fixes import _capture_passes, mamba_padding

    most = 0

    def fails() -> bool:
        nonlocal most
        graph = graph_dispatch.graph_being_captured() if Activity.capturing else None
        if graph is None or not graph.kept or graph.mode != "FULL":
            return False
        most = max(most, graph.tokens)
        return which == "all" or graph.tokens == most

    if fix == "capture-state":
        stock_pass = _capture_passes._Passes._prepare_recorded_pass

        def prepare(self: Any, warmed_up: Any) -> None:
            create = self._create

            def create_or_fail() -> Any:
                if fails():
                    raise MemoryError("planted")
                return create()

            self._create = create_or_fail
            stock_pass(self, warmed_up)

        _capture_passes._Passes._prepare_recorded_pass = prepare  # type: ignore[method-assign]
    else:
        stock_marks = mamba_padding._marks_without_padding

        def marks(common_attn_metadata: Any) -> Any:
            if fails():
                raise MemoryError("planted")
            return stock_marks(common_attn_metadata)

        mamba_padding._marks_without_padding = marks
    if way == "no way":
        graph_dispatch._managers = lambda runner: iter(())


def engine(job: str, result: str) -> int:
    from vllm_graphfix.verify.engine import worker

    if planted := os.environ.get(PLANT):
        fix, which, *way = planted.split(" ", 2)
        plant(fix, which, " ".join(way))
    return worker.main(Job.read(Path(job)), Path(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        sys.exit(engine(*sys.argv[2:4]))
    sys.exit(main())
