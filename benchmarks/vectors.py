"""Vectors that vLLM gives out, of engines with graphs and without: two defects that no token shows, on one GPU.

    python benchmarks/vectors.py --out FOLDER [--site RELEASE=FOLDER …] [--only CASE …] [--parallel 6] [--timeout 240]

FOLDER of --site holds a vLLM that can run, with its dependencies; without --site it is the installed one. For each case
three engines on a tiny model, each in a process of its own: eager, stock (graphs, the plugin off) and patched (graphs,
the plugin on). What stock and patched answer is compared with eager.

- `roberta` (fix `roberta-positions`): an XLM-RoBERTa embedder with piecewise graphs, compiled as vLLM does by default,
  is asked for short embeddings one by one, none of which fills its graph. On an affected release stock dies of a
  position beyond the model's table.
- `hidden-states` (fix `hidden-states-padding`): a Llama hands on the hidden states of its prompts, two requests at a
  time in a cache that they fill, with piecewise graphs between whose sizes all steps are. On an affected release stock
  has one wrong row in some requests, the last one of a block.

What is compiled rounds otherwise than eager. A vector is wrong if one of its numbers is off by more than a tenth of the
largest one in it; how far those go that are right is told, too.

--only names cases, or a case of one release as 0.18.1/roberta.

--rehearse runs three eager engines for each case, on a CPU engine if need be.

A line of JSON for each case as it ends, and all engines in result.json, which is written as each one ends. Exit code 1
if a patched engine is wrong, has died or had its fix not active where the release is affected, or if stock is right
there, or wrong where the release is not; 2 if an engine that decides about it did not come that far, or nothing ran.
That a fix was active and has counted no event is a remark.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from measuring import PROJECT, tiny_roberta
from measuring.engine_cases import Site, find_sites
from measuring.engine_process import DiedError, EngineProcess, Order
from vllm_graphfix import manifest
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings.environment import PREFIX
from vllm_graphfix.source.files import SourceError, open_source
from vllm_graphfix.verify.engine import models

ENGINE = Path(__file__).parent / "measuring" / "vectors_engine.py"
ENGINES = EAGER, STOCK, PATCHED = "eager", "stock", "patched"
TOLERANCE = 0.1
"""Of the largest number of a vector. Rounding in bfloat16 is a hundredth; another vector's numbers are off by one."""
BLOCK = 16
"""Tokens of a block of the cache."""

Vectors = Sequence[Sequence[Sequence[float]]]
"""For each request its vectors."""


@dataclass(frozen=True, eq=False)  # cases are told apart by which they are
class Case:
    """A tiny model, what it is asked, and the fix whose defect that brings about."""

    name: str
    fix: str
    event: str
    """What the fix counts when it is at work."""
    config: models.Config
    shapes: models.Shapes
    files: dict[str, Any]
    """What else is in the model's folder, by name."""
    what: str
    """``embeddings`` or ``hidden states``."""
    workload: tuple[tuple[int, int], ...]
    """Tokens of each prompt and of its answer."""
    arguments: dict[str, Any]
    """Keywords of `vllm.LLM`."""
    graphs: tuple[dict[str, Any], ...]
    """vLLM's `compilation_config`; each one after the first is tried if an engine does not start with that before."""
    dies: bool = False
    """Whether stock may show its defect by its end, too."""

    def prompts(self) -> list[list[int]]:
        chance = random.Random(7)  # noqa: S311 - the same prompts in every run
        return [chance.choices(range(3, models.VOCABULARY), k=length) for length, _ in self.workload]


def _piecewise(*sizes: int) -> dict[str, Any]:
    return {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": list(sizes)}


def _without_inductor(graphs: dict[str, Any]) -> dict[str, Any]:
    return graphs | {"mode": 3, "backend": "eager"}


_SHORT, _SLOTS = _piecewise(4, 8, 16, 32), _piecewise(3, 6, 24, 50, 100, 160)
_LLAMA, _shapes_of_llama = models.MODELS["llama"]
CASES = {
    case.name: case
    for case in (
        Case(
            name="roberta",
            fix="roberta-positions",
            event="padded-positions-shifted",
            config=tiny_roberta.CONFIG,
            shapes=tiny_roberta.shapes(),
            files=tiny_roberta.files(),
            what="embeddings",
            # Padded rows begin anew whenever a request is longer: the last one of the graph of 8 never does. It leaves
            # the table within 65 steps, those at the start of the engine counted.
            workload=tuple((5 + number % 3, 0) for number in range(160)),
            arguments={"runner": "pooling", "max_model_len": 64, "max_num_batched_tokens": 64, "max_num_seqs": 4},
            graphs=(_SHORT, _without_inductor(_SHORT)),
            dies=True,
        ),
        Case(
            name="hidden-states",
            fix="hidden-states-padding",
            event="padding-written",
            config=_LLAMA,
            shapes=_shapes_of_llama(_LLAMA),
            files={},
            what="hidden states",
            # The connector saves a prompt with its first step, and then with each step that gives the request a block:
            # every answer is longer than a block, so that padded decodes come before. Two requests have the whole
            # cache, but for its null block, and are never preempted, which the connector does not know of.
            workload=tuple((33 + 7 * number % 32, BLOCK + 2 + number % 5) for number in range(48)),
            arguments={
                "skip_tokenizer_init": True,
                "max_model_len": 6 * BLOCK,
                "max_num_batched_tokens": 256,
                "max_num_seqs": 2,
                "block_size": BLOCK,
                "num_gpu_blocks_override": 1 + 2 * 6,
                "speculative_config": {
                    "method": "extract_hidden_states",
                    "num_speculative_tokens": 1,
                    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
                },
            },
            graphs=(_without_inductor(_SLOTS), _SLOTS),
        ),
    )
}

_ENGINE: dict[str, Any] = {
    "kv_cache_memory_bytes": 1 << 28,  # keeps vLLM's memory profiling out of a GPU that several engines share
    "gpu_memory_utilization": 0.05,  # with the above, only what vLLM asks to be free at the start
    "enable_prefix_caching": False,
    "seed": 0,
}
_WHERE_KNOWN = {"enable_flashinfer_autotune": False}  # nothing here uses what it would tune
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: the states and events of the fix are in it
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # newer releases would compile it for minutes when they start
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "OMP_NUM_THREADS": "2",  # engines share the machine
    "PYTHONUNBUFFERED": "1",
}
_ON_A_CPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for result.json and the logs")
    parser.add_argument("--site", action="append", default=[], metavar="RELEASE=FOLDER", help="a vLLM; may be repeated")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--parallel", type=int, default=6, help="engines at a time, of some 5 GiB each (6)")
    parser.add_argument("--timeout", type=float, default=240.0, metavar="S", help="seconds for each engine (240)")
    parser.add_argument("--rehearse", action="store_true", help="three eager engines, on a CPU if there is no GPU")
    options = parser.parse_args()
    try:
        sites = find_sites(options.site)
    except (SourceError, ValueError) as error:
        parser.error(str(error))
    named = {(site, case): {case.name, f"{site.release}/{case.name}"} for site in sites for case in CASES.values()}
    chosen = [each for each, names in named.items() if not options.only or names & set(options.only)]
    if unknown := set(options.only).difference(*named.values()):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench(out, sites, options.timeout, rehearse=options.rehearse)
    wanted = [
        Comparison(site, case, affected=not options.rehearse and is_affected(site, case)) for site, case in chosen
    ]
    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(lambda which: bench.run(*which), [(each, engine) for each in wanted for engine in ENGINES]))
    return verdict([each.result() for each in wanted])


def is_affected(site: Site, case: Case) -> bool:
    return manifest.diagnose(BY_NAME[case.fix], open_source(site.folder)).verdict is Verdict.AFFECTED


@dataclass
class Comparison:
    """A case on one vLLM, and what its engines have answered so far."""

    site: Site
    case: Case
    affected: bool
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What is told of each engine that has ended, by its name."""
    _vectors: dict[str, Vectors] = field(default_factory=dict)

    def note(self, engine: str, found: dict[str, Any], vectors: Vectors) -> None:
        """That the *engine* has ended; what it has answered is compared as soon as eager's *vectors* are there, too."""
        self.engines[engine], self._vectors[engine] = dict(found), vectors
        if self._vectors.get(EAGER):
            for name in (STOCK, PATCHED):
                if name in self._vectors:
                    self.engines[name] |= compare(self._vectors.pop(name), self._vectors[EAGER])

    def ended(self) -> bool:
        return len(self.engines) == len(ENGINES)

    def result(self) -> dict[str, Any]:
        """What is told of the case: of each engine that has ended, and with them all what it proves."""
        result: dict[str, Any] = {"release": self.site.release, "case": self.case.name, "affected": self.affected}
        result["engines"] = {name: self.engines[name] for name in ENGINES if name in self.engines}
        return result | (judge(self.engines, self.case, affected=self.affected) if self.ended() else {})


class Bench:
    """Runs engines, and writes down what has become of them."""

    def __init__(self, out: Path, sites: tuple[Site, ...], timeout: float, *, rehearse: bool) -> None:
        self._out, self._sites, self._timeout, self._rehearse = out, sites, timeout, rehearse
        self._lock, self._comparisons = threading.Lock(), list[Comparison]()

    def run(self, comparison: Comparison, engine: str) -> None:
        began = time.monotonic()
        found, vectors = self._run(comparison, engine, began + self._timeout)
        found["seconds"] = round(time.monotonic() - began)
        with self._lock:
            if all(each is not comparison for each in self._comparisons):
                self._comparisons.append(comparison)
            comparison.note(engine, found, vectors)
            results = [each.result() for each in self._comparisons]
            (self._out / "result.json").write_text(json.dumps(results, indent=1))
            if comparison.ended():
                print(json.dumps(comparison.result()), flush=True)

    def _run(self, comparison: Comparison, engine: str, until: float) -> tuple[dict[str, Any], Vectors]:
        errors: list[str] = []
        for graphs in [None] if engine == EAGER or self._rehearse else comparison.case.graphs:
            if errors and until - time.monotonic() < 20:  # no engine starts in less
                break
            try:
                found, vectors = self._ask(comparison, engine, graphs, until)
            except DiedError as error:
                errors.append(str(error))
            else:
                return found | ({"errors at the start": errors} if errors else {}), vectors
        return {"errors at the start": errors}, []

    def _ask(
        self, comparison: Comparison, engine: str, graphs: dict[str, Any] | None, until: float
    ) -> tuple[dict[str, Any], Vectors]:
        """What is told of an engine, and what it has answered. Raises DiedError if it does not start."""
        case = comparison.case
        backend = f"-backend-{graphs['backend']}" if graphs and "backend" in graphs else ""
        name = f"{comparison.site.release}-{case.name}-{engine}{backend}"
        log = self._out / f"{name}.log"
        order = VectorsOrder(
            arguments=self._arguments(case, name, graphs),
            plugin=engine == PATCHED,
            runner="V1",
            largest_batch=0,
            where_known=_WHERE_KNOWN,
            model={"config": case.config, "shapes": case.shapes, "files": case.files},
        )
        process = EngineProcess(order, self._environment(comparison.site, engine, name, graphs), log, ENGINE)
        try:
            ready = process.ready(until - time.monotonic())
            told = {"start, s": round(ready.seconds, 1)} | ready.told
            vectors, last = ask(process, case, until)
        finally:
            process.end()
        found = told | {"requests asked": len(case.workload), "requests answered": len(vectors)}
        if "failed" in last:
            found |= {"failed": last["failed"], "the log says": assertion(log.read_text(errors="replace"))}
        if "states" in last:
            found |= {"state": last["states"].get(case.fix), "events": last["events"].get(case.fix, {})}
        return found, vectors

    def _arguments(self, case: Case, name: str, graphs: dict[str, Any] | None) -> dict[str, Any]:
        arguments = _ENGINE | {"model": str(self._out / "models" / name)} | case.arguments
        if case.what == "hidden states":
            arguments["kv_transfer_config"] = {
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(self._out / "hidden-states" / name)},
            }
        return arguments | ({"enforce_eager": True} if graphs is None else {"compilation_config": graphs})

    def _environment(self, site: Site, engine: str, name: str, graphs: dict[str, Any] | None) -> dict[str, str]:
        """Its own vLLM comes first on the path, no other one is on it, and no setting of anybody's gets in."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        return (
            kept
            | _ENVIRONMENT
            # What no compiler has made cannot be stored.
            | ({"VLLM_DISABLE_COMPILE_CACHE": "1"} if graphs and graphs.get("backend") == "eager" else {})
            | (_ON_A_CPU if self._rehearse and not Path("/dev/nvidiactl").exists() else {})
            | {
                "PYTHONPATH": site.path(self._sites, PROJECT),
                PREFIX: "on" if engine == PATCHED else "off",
                # An installed plugin is there for all of them: only the one that is to have it loads it.
                "VLLM_PLUGINS": "graphfix" if engine == PATCHED else "",
                "VLLM_CACHE_ROOT": str(self._out / "cache" / name),  # each engine compiles its own
                "VLLM_GRAPHFIX_STATUS_DIR": str(self._out),
            }
        )


class VectorsOrder(Order):
    """What `vectors_engine.py` is to start."""

    model: dict[str, Any]
    """Its ``config``, the ``shapes`` of its tensors, and further ``files``."""


class Asked(Protocol):
    """An engine that has started, as `EngineProcess`."""

    def ask(self, asked: Mapping[str, Any], timeout: float) -> Any: ...


def ask(engine: Asked, case: Case, until: float) -> tuple[list[Sequence[Sequence[float]]], dict[str, Any]]:
    """The vectors of each request that was answered, and the last answer, or ``failed``, why there is none.

    Embeddings are asked for one by one: those before the end of a process are here then.
    """
    prompts, tokens = case.prompts(), [count for _, count in case.workload]
    size = 1 if case.what == "embeddings" else len(prompts)
    vectors: list[Sequence[Sequence[float]]] = []
    last: dict[str, Any] = {}
    for first in range(0, len(prompts), size):
        some = slice(first, first + size)
        try:
            last = engine.ask(
                {"what": case.what, "prompts": prompts[some], "tokens": tokens[some]},
                max(1.0, until - time.monotonic()),
            )
        except DiedError as error:
            return vectors, {"failed": str(error)}
        vectors += last["vectors"]
        if "failed" in last:
            break
    return vectors, last


def compare(found: Vectors, right: Vectors) -> dict[str, Any]:
    """How the vectors *found* differ from those that are *right*, of as many requests as were answered."""
    wrong: list[tuple[int, int]] = []
    largest = {True: 0.0, False: 0.0}
    absolute, cosine, count = 0.0, 1.0, 0
    for request, (vectors, expected) in enumerate(zip(found, right, strict=False)):
        count += len(expected)
        for position in range(max(len(vectors), len(expected))):
            if position >= min(len(vectors), len(expected)):
                wrong.append((request, position))  # one too few, or too many
                continue
            a, b = vectors[position], expected[position]
            off = difference(a, b)
            is_right = off <= TOLERANCE  # not so if it is NaN
            largest[is_right] = max(largest[is_right], off) if math.isfinite(off) else math.inf
            if is_right:
                absolute = max(absolute, *(abs(one - other) for one, other in zip(a, b, strict=True)))
                cosine = min(cosine, cosine_of(a, b))
            else:
                wrong.append((request, position))
    return {
        "vectors": count,
        "wrong vectors": len(wrong),
        "requests with a wrong one": len({request for request, _ in wrong}),
        "most in one request": max((sum(one == each for one, _ in wrong) for each, _ in wrong), default=0),
        "wrong, [request, position]": [list(each) for each in wrong[:64]],
        "wrong ones are off by up to": _finite(largest[False]),
        "right ones are off by up to": round(largest[True], 5),
        "right ones, absolutely": round(absolute, 5),
        "right ones, least cosine": round(cosine, 6),
    }


def difference(found: Sequence[float], right: Sequence[float]) -> float:
    """The largest difference of two numbers, in units of the largest number that is right; inf if one is missing."""
    if len(found) != len(right):
        return math.inf
    off = [abs(a - b) for a, b in zip(found, right, strict=True)]
    if not all(map(math.isfinite, off)):
        return math.inf
    return max(off) / (max(map(abs, right)) or 1.0)


def cosine_of(a: Sequence[float], b: Sequence[float]) -> float:
    norms = math.sqrt(sum(x * x for x in a) * sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else 1.0


def _finite(value: float) -> float | str:
    return round(value, 5) if math.isfinite(value) else "not a number"


def assertion(log: str) -> str | None:
    """The first line of a *log* in which a kernel says what was out of bounds."""
    said = re.compile(r"index out of bounds|index out of range|Assertion .* failed|device-side assert")
    return next((line.strip()[:300] for line in log.splitlines() if said.search(line)), None)


def judge(engines: dict[str, dict[str, Any]], case: Case, *, affected: bool) -> dict[str, list[str]]:
    """What is wrong with the three *engines* of a *case* that have ended, what they leave open, and what is odd."""
    problems, undecided, remarks = [], [], []
    eager, stock, patched = (engines[name] for name in ENGINES)
    if not _came_to_its_end(eager):
        undecided.append("the eager engine did not come to its end: there is nothing to compare with")
    if not _came_to_its_end(patched):
        problems.append("the patched engine did not come to its end")
    elif patched.get("wrong vectors"):
        problems.append("the patched engine gives wrong vectors")
    if affected and _came_to_its_end(patched):
        if patched.get("state") != "active":
            problems.append(f"{case.fix} was not active in the patched engine")
        elif not patched.get("events", {}).get(case.event):
            remarks.append(f"{case.fix} was active, and has counted no {case.event}")
    shown = bool(stock.get("wrong vectors")) or (case.dies and "failed" in stock)
    if shown and not affected:
        problems.append("stock is wrong, though the release is not affected")
    elif not shown and not _came_to_its_end(stock):
        undecided.append("the stock engine did not come to its end")
    elif not shown and affected and _came_to_its_end(eager):
        problems.append("stock is right, though the release is affected")
    return {"problems": problems, "undecided": undecided, "remarks": remarks}


def _came_to_its_end(engine: dict[str, Any]) -> bool:
    return "failed" not in engine and engine.get("requests answered", -1) == engine.get("requests asked")


def verdict(results: list[dict[str, Any]]) -> int:
    """The exit code."""
    if not any("requests answered" in engine for each in results for engine in each["engines"].values()):
        return 2
    if any(each["problems"] for each in results):
        return 1
    return 2 if any(each["undecided"] for each in results) else 0


if __name__ == "__main__":
    started = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
    sys.exit(code)
