"""What CUDA graphs of an image encoder make of images: a tiny Qwen2-VL with random weights, on one GPU.

    python benchmarks/image_encoder.py --out FOLDER [--site RELEASE=FOLDER …] [--only padding] [--runners V1]

FOLDER of --site holds a vLLM that can run, with its dependencies; without --site it is the installed one, and the
plugin has to be on the path.

padding    Images that do not fill their graph, in an engine without graphs, a stock one with them, and one with the fix
           `encoder-padding`: numbers of their embeddings that are NaN or not the eager engine's, and answers that
           differ. What is wrong depends on what memory holds, so each engine with graphs captures them once for each of
           the --memories, the first of them when it starts: `driver`, `pool` and `output` leave NaN where busy machines
           may have it, and `zeros` what nothing can be wrong with (measuring/image_encoder_engine.py says how).
adapters   Images at once, each with an adapter of the encoder or none, in an engine without graphs of the encoder, a
           stock one with them, and one with the fix `encoder-adapters`: whether an image's embeddings are its own,
           another adapter's, the base model's, or none of these. Graphs of three forms are captured, and each image is
           encoded alone, too.
input-norm Images that the model normalises on the device (0.28.0 on), in an engine without graphs, a stock one with
           them, and one with the fix `encoder-input-norm`; counted as for `padding`. In the other cases the host
           normalises them.

--only names cases, or a case of one release as 0.26.0/padding. Engines run side by side, --parallel at a time. Each has
--timeout seconds to start, and as many for all answers.

A line of JSON for each case as it ends; engines and cases are in result.json, which is written after each engine. Exit
code 1 if an engine died, if something is wrong with the fix, if on stock `padding` is right with all --memories of an
affected release or wrong with one of another, or `input-norm` likewise; 2 if nothing ran. What `adapters` finds on
stock is an observation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import PROJECT, encoder_adapters, encoder_input_norm, encoder_padding, tiny_qwen2_vl
from measuring.encoder_case import EAGER, Answer, Case, Engine, Form, Image
from measuring.encoder_padding import MEMORIES
from measuring.engine_cases import Site, find_sites
from measuring.engine_process import DiedError, EngineProcess, Order
from vllm_graphfix import manifest
from vllm_graphfix.fix import Verdict, variable
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings.environment import PREFIX, STATUS_DIR
from vllm_graphfix.source.files import SourceError, open_source

WORKER = Path(__file__).parent / "measuring" / "image_encoder_engine.py"
CASES: Mapping[str, Case] = {
    "padding": encoder_padding.CASE,
    "adapters": encoder_adapters.CASE,
    "input-norm": encoder_input_norm.CASE,
}
TOKENS = 4
"""Of an answer. A longer one has more chances to leave the other at a tie."""

_ENGINE: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,  # all images of a step at once
    "max_num_seqs": 8,
    "limit_mm_per_prompt": {"image": 1, "video": 0},
    "kv_cache_memory_bytes": 1 << 28,  # keeps vLLM's memory profiling out of a GPU that several engines share
    "gpu_memory_utilization": 0.05,  # with the above, only what vLLM asks to be free at the start
    "enable_prefix_caching": False,
    "seed": 0,
}
_WHERE_KNOWN = {"enable_flashinfer_autotune": False}
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, in which the encoder can be watched
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled
    "OMP_NUM_THREADS": "2",  # engines share the machine
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "PYTHONUNBUFFERED": "1",
}
_ON_A_CPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for result.json and the logs")
    parser.add_argument("--site", action="append", default=[], metavar="RELEASE=FOLDER", help="a vLLM; may be repeated")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--runners", nargs="+", default=["V1", "V2"], choices=["V1", "V2"])
    parser.add_argument("--memories", nargs="+", default=list(MEMORIES), choices=MEMORIES)
    parser.add_argument("--gib", type=float, default=4.0, help="GPU memory that `driver` fills with NaN (4)")
    parser.add_argument("--parallel", type=int, default=8, metavar="N", help="engines at a time (8)")
    parser.add_argument("--timeout", type=float, default=150.0, metavar="S", help="to start, and for answers (150)")
    parser.add_argument("--rehearse", action="store_true", help="a CPU engine: without graphs, and nothing is wrong")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        sites = find_sites(options.site)
    except (SourceError, ValueError) as error:
        parser.error(str(error))
    names = {(site, case): {case, f"{site.release}/{case}"} for site in sites for case in CASES}
    if unknown := {*options.only}.difference(*names.values()):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    make_models(options.out, sites)
    bench = Bench(options, sites)
    for (site, case), named in names.items():
        if not options.only or named & {*options.only}:
            bench.add(site, case)
    bench.run()
    return verdict(bench.engines, bench.cases)


def make_models(out: Path, sites: tuple[Site, ...]) -> None:
    """Makes what engines need, in a process that has torch from a site, if need be."""
    code = f"import sys; sys.path.insert(0, {str(WORKER.parents[1])!r}); import image_encoder as own; own.write_all()"
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=out,
        env=os.environ | {"PYTHONPATH": sites[0].path(sites, PROJECT)},
        check=True,
        timeout=300,
        stdout=subprocess.DEVNULL,
    )


def write_all() -> None:
    """Makes the model in the current folder, and what the cases need beside it."""
    folder = Path.cwd()
    tiny_qwen2_vl.write(folder)
    for case in CASES.values():
        if case.write is not None:
            case.write(folder)


@dataclass
class Group:
    """The engines of a case with one vLLM and one model runner."""

    site: Site
    about: dict[str, Any]
    """The group's name, and what is expected of it: the beginning of its findings."""
    case: Case
    engines: dict[str, Engine]

    @property
    def name(self) -> dict[str, str]:
        return {key: self.about[key] for key in ("release", "case", "runner")}

    @property
    def runner(self) -> str:
        return self.name["runner"]


class Bench:
    """Engines to come, and what has been found."""

    def __init__(self, options: argparse.Namespace, sites: tuple[Site, ...]) -> None:
        self._options, self._sites, self._lock = options, sites, threading.Lock()
        self._groups: list[Group] = []
        self.engines: list[dict[str, Any]] = []
        self.cases: list[dict[str, Any]] = []

    def add(self, site: Site, name: str) -> None:
        case = CASES[name]
        for runner in self._options.runners:
            if runner == "V2" and not self._has_graphs_on_v2(site):
                continue
            about = {"release": site.release, "case": name, "runner": runner, "expected": self._expected(site, case)}
            engines = {engine.name: engine for engine in case.engines(self._options.memories)}
            self._groups.append(Group(site, about, case, engines))

    def _has_graphs_on_v2(self, site: Site) -> bool:
        return self._options.rehearse or open_source(site.folder).says(
            "vllm/v1/worker/gpu/mm/encoder_runner.py", "EncoderCudaGraphManager"
        )

    def _expected(self, site: Site, case: Case) -> bool | None:
        """Whether stock is to be wrong; None where that is what is asked, or nothing can be."""
        if self._options.rehearse or not case.shows_on_stock(self._options.memories):
            return None
        return manifest.diagnose(BY_NAME[case.fix], open_source(site.folder)).verdict is Verdict.AFFECTED

    def run(self) -> None:
        with ThreadPoolExecutor(self._options.parallel) as pool:
            for group in self._groups:
                left = [*group.engines.values()]
                for engine in group.engines.values():
                    pool.submit(self._one, group, engine, left)

    def _one(self, group: Group, engine: Engine, left: list[Engine]) -> None:
        began = time.monotonic()
        about = group.name | {"engine": engine.name}
        try:
            self._ask(group, engine, "-".join(about.values()))
        except Exception as error:  # one engine must not keep the others from their turn
            engine.found["error"] = str(error) if isinstance(error, DiedError) else f"{type(error).__name__}: {error}"
        with self._lock:
            self.engines.append(about | {"seconds": round(time.monotonic() - began)} | engine.found)
            left.remove(engine)
            if not left:
                self.cases.append(group.about | findings(group))
                print(json.dumps(self.cases[-1]), flush=True)
            written = {"engines": self.engines, "cases": self.cases}
            (self._options.out / "result.json").write_text(json.dumps(written, indent=1))

    def _ask(self, group: Group, engine: Engine, name: str) -> None:
        captured: Sequence[Form] = () if self._options.rehearse else engine.forms
        order = Order(
            arguments=self._arguments(engine, captured),
            plugin=engine.plugin,
            runner=group.runner,
            largest_batch=0,
            where_known=_WHERE_KNOWN | dict(group.case.where_known),
        )
        log = self._options.out / f"{name}.log"
        process = EngineProcess(order, self._environment(group, engine), log, WORKER)
        try:
            ready = process.ready(self._options.timeout)
            engine.found |= {"ready after": round(ready.seconds), **ready.told}
            until = time.monotonic() + self._options.timeout

            def ask(**request: Any) -> Any:
                return process.ask(request, max(1.0, until - time.monotonic()))

            def encode(images: Iterable[Image], tokens: int) -> Any:
                return ask(images=[image.request(self._options.out) for image in images], tokens=tokens)

            forms: Sequence[Form | None] = captured or (None,)
            for number, form in enumerate(forms):
                if form is not None and number:
                    if engine.before_captures:
                        encode(engine.before_captures, 1)
                    ask(**form.request())
                form_name = form.name if form else EAGER
                answers = engine.answers.setdefault(form_name, {})
                for step, images in engine.steps.items():
                    answers[step] = Answer.of(encode(images, TOKENS))
                engine.found.setdefault("state", {})[form_name] = ask(state=True)
        finally:
            process.end()

    def _arguments(self, engine: Engine, forms: Sequence[Form]) -> dict[str, Any]:
        """vLLM's, and what the worker takes out of them for itself; it starts with the first of *forms*."""
        arguments = _ENGINE | {"model": str(self._options.out / tiny_qwen2_vl.NAME)} | dict(engine.arguments)
        arguments |= {"memory": forms[0].memory if forms else "plain", "gib": self._options.gib}
        if self._options.rehearse:
            return arguments | {"enforce_eager": True}
        arguments["mm_encoder_attn_backend"] = "FLASH_ATTN"
        if forms:
            arguments["compilation_config"] = forms[0].config()
        return arguments

    def _environment(self, group: Group, engine: Engine) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        # By name, since one of them only counts by default.
        plugin_on = {PREFIX: "on", **{variable(case.fix): "on" for case in CASES.values()}}
        return (
            kept
            | _ENVIRONMENT
            | (_ON_A_CPU if self._options.rehearse else {})
            | (plugin_on if engine.plugin else {})
            | {
                "PYTHONPATH": group.site.path(self._sites, *([PROJECT] if engine.plugin else [])),
                "VLLM_PLUGINS": "graphfix" if engine.plugin else "",  # an installed plugin is there for all of them
                "VLLM_USE_V2_MODEL_RUNNER": "1" if group.runner == "V2" else "0",
                "VLLM_CACHE_ROOT": str(self._options.out / "cache"),
                STATUS_DIR: str(self._options.out),
            }
        )


def findings(group: Group) -> dict[str, Any]:
    died = {name: engine.found["error"] for name, engine in group.engines.items() if engine.died}
    found: dict[str, Any] = {"died": died} if died else {}
    try:
        return found | group.case.judge(group.engines)
    except Exception as error:  # what the other cases say must not be lost
        return found | {"died": died | {"judge": f"{type(error).__name__}: {error}"}}


def verdict(engines: Sequence[Mapping[str, Any]], cases: Sequence[Mapping[str, Any]]) -> int:
    """The exit code; see above."""
    if not engines or all("error" in engine for engine in engines):
        return 2
    return int(any("died" in case or CASES[case["case"]].is_wrong(case) for case in cases))


if __name__ == "__main__":
    sys.exit(main())
