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

--only names cases, or a case of one release as 0.26.0/padding. Engines run side by side, --parallel at a time. Each has
--timeout seconds to start, and as many for all answers.

A line of JSON for each case as it ends; engines and cases are in result.json, which is written after each engine. Exit
code 1 if an engine died, if something is wrong with the fix, if on stock `padding` is right with all --memories of an
affected release or wrong with one of another; 2 if nothing ran. What `adapters` finds on stock is an observation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from measuring import PROJECT, tiny_qwen2_vl
from measuring.engine_cases import Site, find_sites
from measuring.engine_process import DiedError, EngineProcess, Order
from vllm_graphfix import manifest
from vllm_graphfix.fix import Verdict, variable
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings.environment import PREFIX, STATUS_DIR
from vllm_graphfix.source.files import SourceError, open_source
from vllm_graphfix.verify.engine import adapters
from vllm_graphfix.verify.engine.cases import full_decodes

FIX = "encoder-padding"
FIXES = (FIX, "encoder-adapters")
WORKER = Path(__file__).parent / "measuring" / "image_encoder_engine.py"
CASES = ("padding", "adapters")
MEMORIES = ("driver", "zeros", "pool", "output")
NAN = ("driver", "pool", "output")
"""Those that have it somewhere."""
SIDE = 28
"""Pixels that one token of an image is wide and high."""

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
_ADAPTERS: dict[str, Any] = {
    "enable_lora": True,
    "enable_tower_connector_lora": True,
    "max_loras": len(adapters.NAMES),
    "max_lora_rank": adapters.RANK,
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
_MODULES = ("fc1", "fc2")
"""The layers of the encoder that adapters change."""
_WEIGHTS = tuple(f".{module}.weight" for module in _MODULES)
_STRENGTH = 5.0
"""How many times as large as the layers' own matrices what adapters add to them is. What these layers add to the sum of
all before is small here."""


@dataclass(frozen=True)
class Form:
    """The graphs that an encoder has, and what memory held before: see `image_encoder_engine.py`."""

    name: str
    memory: str
    budgets: tuple[int, ...]
    """Tokens of each graph."""
    items: int
    """Images that one graph takes at most."""

    def asked(self) -> dict[str, Any]:
        return {"memory": self.memory, "budgets": self.budgets, "items": self.items}

    def config(self) -> dict[str, Any]:
        return full_decodes([1, 2, 4, 8]) | {
            "cudagraph_mm_encoder": True,
            "encoder_cudagraph_token_budgets": list(self.budgets),
            "encoder_cudagraph_max_vision_items_per_batch": self.items,
        }


@dataclass(frozen=True)
class Image:
    """One image, in pixels, and the number and the name of its adapter; None: it has none."""

    width: int
    height: int
    seed: int
    adapter: str | None = None

    @property
    def tokens(self) -> int:
        return (self.width // SIDE) * (self.height // SIDE)

    @property
    def name(self) -> str:
        """No other image, nor the same with another adapter, has it."""
        return f"image {self.seed}, {self.width}x{self.height}" + (f", {self.adapter}" if self.adapter else "")

    def asked(self, folder: Path) -> dict[str, Any]:
        number = self.adapter and (adapters.NAMES.index(self.adapter) + 1, str(folder / self.adapter))
        return {"width": self.width, "height": self.height, "seed": self.seed, "adapter": number}


ONE, TWO = adapters.NAMES
_SIZES = ((56, 56), (84, 84), (56, 112), (112, 112))
"""Of 4, 9, 8 and 16 tokens; the third fills the smaller graph."""
_PADDED = tuple(Image(*size, seed=number) for number, size in enumerate(_SIZES))
PADDING_STEPS: dict[str, tuple[Image, ...]] = {
    **{f"{image.name} alone": (image,) for image in _PADDED},
    "together": _PADDED,
}
PADDING_FORMS = {memory: Form(memory, memory, (8, 32), 4) for memory in MEMORIES}
"""All at once are two batches: 21 tokens and 16, both in the larger graph."""

_LARGE, _SMALL, _MIDDLE = (112, 112), (56, 56), (56, 112)
ADAPTER_STEPS: dict[str, tuple[Image, ...]] = {
    "the largest first": (Image(*_LARGE, 11, ONE), Image(*_SMALL, 12, TWO), Image(*_MIDDLE, 13)),
    "the smallest first": (Image(*_SMALL, 21), Image(*_LARGE, 22, TWO), Image(*_MIDDLE, 23, ONE)),
}
ADAPTER_FORMS = (
    Form("one image a replay", "plain", (64,), 1),
    Form("all images in one replay", "plain", (64,), 4),
    # A replay then has fewer rows than the step, whose adapters its kernels look up: it may write beyond them. Last.
    Form("graphs as large as each image", "plain", (4, 8, 16), 1),
)
TOKENS = 4
"""Of an answer. A longer one has more chances to leave the other at a tie."""


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
    """The model and the adapters, made in a process that has torch from a site, if need be."""
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
    """Makes the model and the adapters in the current folder."""
    import torch
    from safetensors import safe_open

    folder = Path.cwd()
    model = tiny_qwen2_vl.write(folder)
    with safe_open(model / "model.safetensors", framework="pt") as held:
        names = [name.removesuffix(".weight") for name in held.keys() if name.endswith(_WEIGHTS)]  # noqa: SIM118
        shapes = {name: held.get_slice(f"{name}.weight").get_shape() for name in names}
    for number, adapter in enumerate(adapters.NAMES):
        chance = torch.Generator().manual_seed(number)
        matrices = {
            name: (
                torch.randn((adapters.RANK, inner), generator=chance) * inner**-0.5,
                torch.randn((outer, adapters.RANK), generator=chance) * adapters.RANK**-0.5 * _STRENGTH,
            )
            for name, (outer, inner) in sorted(shapes.items())
        }
        adapters.write(matrices, folder / adapter, _MODULES)


@dataclass
class Engine:
    """One engine: what it is started with, what it is asked, and what came of it."""

    name: str
    site: Site
    runner: str
    plugin: bool
    arguments: dict[str, Any]
    forms: tuple[Form, ...]
    """Of its graphs, one after the other; none: it has no graphs of the encoder."""
    steps: dict[str, tuple[Image, ...]]
    answers: dict[str, dict[str, Answer]] = field(default_factory=dict)
    """By form and step; the form is ``eager`` where there are no graphs."""
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def died(self) -> bool:
        return "error" in self.found


@dataclass(frozen=True)
class Answer:
    """What an engine made of the images of one step."""

    embeddings: tuple[array[float], ...]
    answers: tuple[tuple[int, ...], ...]
    counted: dict[str, int]
    """How often the encoder was called, and how many images were encoded in a graph."""

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Answer:
        embeddings = []
        for each in told["embeddings"]:
            numbers = array("f")
            numbers.frombytes(each)
            embeddings.append(numbers)
        counted = {name: told[name] for name in ("calls", "in graphs", "in none") if name in told}
        return cls(tuple(embeddings), tuple(map(tuple, told["answers"])), counted)


@dataclass
class Group:
    """The engines of a case on one model runner, and what is made of them once all have ended."""

    about: dict[str, Any]
    engines: dict[str, Engine]
    judge: Callable[[Mapping[str, Engine]], dict[str, Any]]


class Bench:
    """Engines to come, and what has been found."""

    def __init__(self, options: argparse.Namespace, sites: tuple[Site, ...]) -> None:
        self._options, self._sites, self._lock = options, sites, threading.Lock()
        self._groups: list[Group] = []
        self.engines: list[dict[str, Any]] = []
        self.cases: list[dict[str, Any]] = []

    def add(self, site: Site, case: str) -> None:
        for runner in self._options.runners:
            if runner == "V2" and not self._has_graphs_on_v2(site):
                continue
            engines = self._padding(site, runner) if case == "padding" else self._adapters(site, runner)
            about = {"release": site.release, "case": case, "runner": runner, "expected": self._expected(site, case)}
            judge = padding if case == "padding" else whose_adapters
            self._groups.append(Group(about, {engine.name: engine for engine in engines}, judge))

    def _has_graphs_on_v2(self, site: Site) -> bool:
        return self._options.rehearse or open_source(site.folder).says(
            "vllm/v1/worker/gpu/mm/encoder_runner.py", "EncoderCudaGraphManager"
        )

    def _expected(self, site: Site, case: str) -> bool | None:
        """Whether stock is to be wrong; None where that is what is asked, or nothing can be."""
        if case != "padding" or self._options.rehearse or not {*NAN} & {*self._options.memories}:
            return None
        return manifest.diagnose(BY_NAME[FIX], open_source(site.folder)).verdict is Verdict.AFFECTED

    def _engine(
        self,
        name: str,
        site: Site,
        runner: str,
        steps: dict[str, tuple[Image, ...]],
        arguments: Mapping[str, Any] = MappingProxyType({}),
        forms: tuple[Form, ...] = (),
        *,
        plugin: bool = False,
    ) -> Engine:
        forms = () if self._options.rehearse else forms
        arguments = _ENGINE | {"model": str(self._options.out / tiny_qwen2_vl.NAME)} | dict(arguments)
        arguments |= {"memory": forms[0].memory if forms else "plain", "gib": self._options.gib}
        if self._options.rehearse:
            arguments["enforce_eager"] = True
        else:
            arguments["mm_encoder_attn_backend"] = "FLASH_ATTN"
            if forms:
                arguments["compilation_config"] = forms[0].config()
        return Engine(name, site, runner, plugin, arguments, forms, steps)

    def _padding(self, site: Site, runner: str) -> Iterator[Engine]:
        forms = tuple(PADDING_FORMS[memory] for memory in self._options.memories)
        yield self._engine("eager", site, runner, PADDING_STEPS, {"enforce_eager": True})
        yield self._engine("stock", site, runner, PADDING_STEPS, forms=forms)
        yield self._engine("patched", site, runner, PADDING_STEPS, forms=forms, plugin=True)

    def _adapters(self, site: Site, runner: str) -> Iterator[Engine]:
        steps = ADAPTER_STEPS | {
            f"{image.name} alone": (image,) for images in ADAPTER_STEPS.values() for image in _with_any(images)
        }
        own = {image.name for images in ADAPTER_STEPS.values() for image in images}
        of_graphs = {name: step for name, step in steps.items() if len(step) > 1 or step[0].name in own}
        decodes = _ADAPTERS | {"compilation_config": full_decodes([1, 2, 4, 8])}
        yield self._engine("none", site, runner, steps, decodes)
        yield self._engine("graphs", site, runner, of_graphs, _ADAPTERS, ADAPTER_FORMS)
        yield self._engine("patched", site, runner, of_graphs, _ADAPTERS, ADAPTER_FORMS, plugin=True)

    # -- engines, and what they say -------------------------------------------------------------------------------

    def run(self) -> None:
        with ThreadPoolExecutor(self._options.parallel) as pool:
            for group in self._groups:
                left = [*group.engines.values()]
                for engine in group.engines.values():
                    pool.submit(self._one, group, engine, left)

    def _one(self, group: Group, engine: Engine, left: list[Engine]) -> None:
        began = time.monotonic()
        about = {name: group.about[name] for name in ("release", "case", "runner")} | {"engine": engine.name}
        try:
            self._ask(engine, "-".join(about.values()))
        except Exception as error:  # one engine must not keep the others from their turn
            engine.found["error"] = str(error) if isinstance(error, DiedError) else f"{type(error).__name__}: {error}"
        with self._lock:
            self.engines.append(about | {"seconds": round(time.monotonic() - began)} | engine.found)
            left.remove(engine)
            if not left:
                self.cases.append(group.about | judged(group))
                print(json.dumps(self.cases[-1]), flush=True)
            written = {"engines": self.engines, "cases": self.cases}
            (self._options.out / "result.json").write_text(json.dumps(written, indent=1))

    def _ask(self, engine: Engine, name: str) -> None:
        order = Order(
            arguments=engine.arguments,
            plugin=engine.plugin,
            runner=engine.runner,
            largest_batch=0,
            where_known=_WHERE_KNOWN,
        )
        log = self._options.out / f"{name}.log"
        process = EngineProcess(order, self._environment(engine), log, WORKER)
        try:
            ready = process.ready(self._options.timeout)
            engine.found |= {"ready after": round(ready.seconds), **ready.told}
            until = time.monotonic() + self._options.timeout

            def ask(**asked: Any) -> Any:
                return process.ask(asked, max(1.0, until - time.monotonic()))

            forms: Iterable[Form | None] = engine.forms or (None,)
            for number, form in enumerate(forms):
                if form is not None and number:
                    if "enable_lora" in engine.arguments:
                        # After a step without any adapter, a graph would be captured without their kernels, which it
                        # is not when an engine starts.
                        ask(images=[Image(*_SMALL, 1, ONE).asked(self._options.out)], tokens=1)
                    ask(**form.asked())
                answers = engine.answers.setdefault(form.name if form else "eager", {})
                for step, images in engine.steps.items():
                    told = ask(images=[image.asked(self._options.out) for image in images], tokens=TOKENS)
                    answers[step] = Answer.of(told)
                engine.found.setdefault("state", {})[form.name if form else "eager"] = ask(state=True)
        finally:
            process.end()

    def _environment(self, engine: Engine) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        return (
            kept
            | _ENVIRONMENT
            | (_ON_A_CPU if self._options.rehearse else {})
            # By name, since one of them only counts by default.
            | ({PREFIX: "on", **dict.fromkeys(map(variable, FIXES), "on")} if engine.plugin else {})
            | {
                "PYTHONPATH": engine.site.path(self._sites, *([PROJECT] if engine.plugin else [])),
                "VLLM_PLUGINS": "graphfix" if engine.plugin else "",  # an installed plugin is there for all of them
                "VLLM_USE_V2_MODEL_RUNNER": "1" if engine.runner == "V2" else "0",
                "VLLM_CACHE_ROOT": str(self._options.out / "cache"),
                STATUS_DIR: str(self._options.out),
            }
        )


def _with_any(images: Iterable[Image]) -> Iterator[Image]:
    """Each of these images with each of the adapters, and without one."""
    for image in images:
        for adapter in (None, *adapters.NAMES):
            yield Image(image.width, image.height, image.seed, adapter)


# -- what is made of it ---------------------------------------------------------------------------------------------


def judged(group: Group) -> dict[str, Any]:
    died = {name: engine.found["error"] for name, engine in group.engines.items() if engine.died}
    found: dict[str, Any] = {"died": died} if died else {}
    try:
        return found | group.judge(group.engines)
    except Exception as error:  # what the other cases say must not be lost
        return found | {"died": died | {"judge": f"{type(error).__name__}: {error}"}}


def padding(engines: Mapping[str, Engine]) -> dict[str, Any]:
    """What is wrong in each memory, of stock and patched, measured by the eager engine's."""
    eager = engines["eager"].answers.get("eager", {})
    clean = engines["stock"].answers.get("zeros", {})
    found: dict[str, Any] = {
        "far from the eager engine's": {
            f"{name} {form}": round(max(distances(steps, eager), default=math.inf), 4)
            for name, engine in engines.items()
            for form, steps in engine.answers.items()
            if name != "eager"
        },
    }
    for name in ("stock", "patched"):
        engine = engines[name]
        found[name] = {form: wrong_numbers(steps, eager, clean) for form, steps in engine.answers.items()}
        states = engine.found.get("state", {})
        if engine.plugin and states:
            found["fix"] = states[[*states][-1]]
    return found


def distances(steps: Mapping[str, Answer], right: Mapping[str, Answer]) -> list[float]:
    """How far each image's embeddings are from the *right* ones."""
    return [
        distance(own, its)
        for step in steps
        if step in right
        for own, its in zip(steps[step].embeddings, right[step].embeddings, strict=True)
    ]


def wrong_numbers(
    steps: Mapping[str, Answer], right: Mapping[str, Answer], clean: Mapping[str, Answer]
) -> dict[str, Any]:
    """How many numbers of the embeddings are NaN or different, and how many answers are not the *right* ones.

    *clean* is a stock engine's whose graphs have nothing but zeros to write to: the same kernels as these steps have.
    """
    counted = dict.fromkeys(("numbers", "nan", "different", "unlike zeros", "answers", "different answers"), 0)
    wrong = []
    for step in (step for step in steps if step in right):
        for number, image in enumerate(PADDING_STEPS.get(step, ())):
            own, its = steps[step].embeddings[number], right[step].embeddings[number]
            nan, different = compared(own, its)
            counted["numbers"] += len(its)
            counted["nan"] += nan
            counted["different"] += different
            if step in clean:
                counted["unlike zeros"] += unequal(own, clean[step].embeddings[number])
            counted["answers"] += 1
            counted["different answers"] += steps[step].answers[number] != right[step].answers[number]
            if nan or different:
                wrong.append(image.name if len(PADDING_STEPS[step]) == 1 else f"{image.name} {step}")
    calls = [answer.counted for answer in steps.values()]
    in_graphs = {name: sum(each.get(name, 0) for each in calls) for name in ("in graphs", "in none")}
    return {**counted, "wrong images": wrong, **in_graphs, "steps compared": len({*steps} & {*right})}


def compared(found: Sequence[float], right: Sequence[float]) -> tuple[int, int]:
    """How many numbers are NaN, and how many others are further from the right ones than rounding takes them."""
    if len(found) != len(right):
        return 0, len(right)
    allowed = 0.05 * max(map(abs, right), default=0.0)
    nan = sum(map(math.isnan, found))
    return nan, sum(abs(one - other) > allowed for one, other in zip(found, right, strict=True))


def unequal(found: Sequence[float], other: Sequence[float]) -> int:
    """How many numbers are not the very same; NaN is none."""
    return sum(one != another for one, another in zip(found, other, strict=True))


def distance(found: Sequence[float], other: Sequence[float]) -> float:
    """How far two images' embeddings are from each other, by the length of the second; infinite with NaN."""
    if len(found) != len(other) or any(map(math.isnan, found)):
        return math.inf
    squares = sum((one - another) ** 2 for one, another in zip(found, other, strict=True))
    return math.sqrt(squares / (sum(each * each for each in other) or 1.0))


NEAR = 0.1
"""The distance that rounding in bfloat16 may take embeddings; adapters take them further than this many times over."""


def whose(found: Sequence[float], own: str | None, references: Mapping[str | None, Sequence[float]]) -> str:
    """Whose embeddings an image has that should have those of the adapter *own*.

    *references* are its embeddings with each adapter and, by None, with none.
    """
    if any(map(math.isnan, found)):
        return "none of these, NaN"
    near = {adapter: distance(found, values) for adapter, values in references.items()}
    nearest = min(near, key=lambda adapter: near[adapter])
    name = "its own" if nearest == own else "the base model's" if nearest is None else f"another adapter's ({nearest})"
    # Where an image's adapters hardly change it, a mixture of them is near to each.
    between = [distance(values, references[nearest]) for adapter, values in references.items() if adapter != nearest]
    return name if near[nearest] <= min([NEAR, *(each / 4 for each in between)]) else f"none of these, nearest {name}"


def whose_adapters(engines: Mapping[str, Engine]) -> dict[str, Any]:
    """Whose embeddings each image has, by form of the graphs and by step; and how far apart those are that may be."""
    alone = engines["none"].answers.get("eager", {})
    references: dict[int, dict[str | None, Sequence[float]]] = {}
    for image in (image for images in ADAPTER_STEPS.values() for image in _with_any(images)):
        if (answer := alone.get(f"{image.name} alone")) is not None:
            references.setdefault(image.seed, {})[image.adapter] = answer.embeddings[0]
    apart = [
        distance(one, another)
        for each in references.values()
        for adapter, one in each.items()
        for other, another in each.items()
        if adapter != other
    ]
    found: dict[str, Any] = {"references are apart by": round(min(apart), 3) if apart else None}
    for engine in engines.values():
        for form, steps in engine.answers.items():
            of_form = engine.name if form == "eager" else f"{form}, patched" if engine.plugin else form
            found[of_form] = {
                step: of_step(answer, engine.steps[step], references, alone)
                for step, answer in steps.items()
                if len(engine.steps[step]) > 1
            } | {"alone": of_alone(engine, steps, references)}
    states = engines["graphs"].found.get("state", {})
    found["captured"] = {form: state.get("kernels of adapters left out", {}) for form, state in states.items()}
    if "patched" in engines:
        counted = engines["patched"].found.get("state", {})
        found["events"] = {form: state.get("events of encoder-adapters", {}) for form, state in counted.items()}
    return found


def of_step(
    answer: Answer,
    images: Sequence[Image],
    references: Mapping[int, Mapping[str | None, Sequence[float]]],
    alone: Mapping[str, Answer],
) -> dict[str, Any]:
    """Whose embeddings the images of one step have, and how many answers are as alone."""
    own = {
        image.name: whose(found, image.adapter, references.get(image.seed, {None: ()}))
        for image, found in zip(images, answer.embeddings, strict=True)
    }
    right = [alone[f"{image.name} alone"].answers[0] for image in images if f"{image.name} alone" in alone]
    different = sum(one != other for one, other in zip(answer.answers, right, strict=False))
    return own | {"different answers": different} | answer.counted


def of_alone(
    engine: Engine,
    steps: Mapping[str, Answer],
    references: Mapping[int, Mapping[str | None, Sequence[float]]],
) -> dict[str, int]:
    """Of how many images that are encoded alone, each with its own adapter, the embeddings are whose."""
    counted: dict[str, int] = {}
    for step, answer in steps.items():
        images = engine.steps[step]
        if len(images) == 1:
            found = whose(answer.embeddings[0], images[0].adapter, references.get(images[0].seed, {None: ()}))
            counted[found] = counted.get(found, 0) + 1
    return counted


def verdict(engines: Sequence[Mapping[str, Any]], cases: Sequence[Mapping[str, Any]]) -> int:
    """The exit code; see above."""
    if not engines or all("error" in engine for engine in engines):
        return 2
    is_wrong = {"padding": is_unexpected, "adapters": are_mixed_up}
    return int(any("died" in case or is_wrong[case["case"]](case) for case in cases))


def are_mixed_up(case: Mapping[str, Any]) -> bool:
    """Whether an image has other embeddings than its own with the fix."""
    patched = [steps for form, steps in case.items() if form.endswith(", patched")]
    told = [step for steps in patched for name, step in steps.items() if name != "alone"]
    return any(said != "its own" for step in told for said in step.values() if isinstance(said, str))


def is_unexpected(case: Mapping[str, Any]) -> bool:
    """Whether the fix leaves something wrong, or stock is not as its release lets expect."""
    wrong = {
        name: {form: bool(found["nan"] or found["different"]) for form, found in case.get(name, {}).items()}
        for name in ("stock", "patched")
    }
    if any(wrong["patched"].values()) or not all(wrong.values()) or wrong["stock"].get("zeros", False):
        return True
    return case["expected"] is not None and any(wrong["stock"].values()) != case["expected"]


if __name__ == "__main__":
    sys.exit(main())
