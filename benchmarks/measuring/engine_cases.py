"""The models and configurations of `benchmarks/engine_cost.py`; models are large enough for useful ratios."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from measuring.engine_process import Order
from vllm_graphfix import manifest
from vllm_graphfix.fix import Verdict, variable
from vllm_graphfix.fixes import BY_NAME, FIXES
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.source.files import SourceError, open_source
from vllm_graphfix.verify.engine import cases as verified
from vllm_graphfix.verify.engine import models
from vllm_graphfix.verify.engine.device import PACKAGE

LAYERS = 24
SIZES = [1, 2, 4, 8, 16, 32, 64]
"""Batch sizes with a graph."""
GIB = 1 << 30

REFERENCE, STOCK, CONTROL, PATCHED, FIXED = "eager", "stock", "stock-again", "patched", "fixed"
OBSERVED = "observed"
ALL_DETECTORS: Mapping[str, str] = {
    **dict.fromkeys(
        (settings.ADDRESSES, settings.BYPASS, settings.CLAIMS, settings.METADATA, settings.TRACED), "report"
    ),
    settings.SHADOW_GRAPHS: "all",
}
"""Besides the shadow check, whose rate differs."""


@dataclass(frozen=True)
class Case:
    """A model, an engine for it, and the fixes that act on it."""

    name: str
    title: str
    fixes: tuple[str, ...]
    wrong: str
    """The effect of the defect on stock full graphs."""
    model: Mapping[str, Any]
    runner: str
    arguments: Mapping[str, Any]
    """Further keywords of `vllm.LLM`."""
    capability: int | None
    """Major compute capability that the attention kernels need."""
    gib: float
    """GPU memory of an engine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    graphs: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=lambda: GRAPHS)
    target: float | None = 0.99
    """The speed that a patched engine must reach, relative to stock's; None where stock is wrong."""


_FULL = {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": SIZES}
_PIECEWISE = {"mode": 3, "cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": SIZES}
GRAPHS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "full": (_FULL, {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES}),
    "piecewise": (_PIECEWISE, _PIECEWISE | {"backend": "eager"}),
}
"""Values of `compilation_config` to try in turn: vLLM's default, and one without its compiler, for a release whose
compiler fails on the torch at hand."""

_MLA = models.MLA | {
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "vocab_size": 32000,
}
_MAMBA2 = models.MAMBA2 | {
    "num_hidden_layers": LAYERS,
    "hidden_size": 2048,
    "num_heads": 64,
    "state_size": 128,
    "vocab_size": 32000,
}

MLA = Case(
    name="mla",
    title=f"MLA, {LAYERS} layers, FlashMLA, bf16, model runner V2",
    fixes=("capture-state",),
    wrong="wrong tokens",
    model=_MLA,
    runner=verified.MLA.runner,
    arguments=verified.MLA.arguments,
    capability=verified.MLA.capability,
    gib=7,
)
MLA_FP8 = Case(
    name="mla-fp8",
    title=f"MLA, {LAYERS} layers, FlashMLA, fp8 KV cache, model runner V1",
    fixes=("flashmla-fp8", "flashmla-padding"),
    wrong="wrong tokens",
    model=_MLA,
    runner=verified.MLA_FP8.runner,
    arguments=verified.MLA_FP8.arguments,
    capability=verified.MLA_FP8.capability,
    gib=7,
)
MAMBA2 = Case(
    name="mamba2",
    title=f"Mamba-2, {LAYERS} layers, bf16, model runner V1",
    fixes=("mamba-padding",),
    wrong="wrong tokens under load",
    model=_MAMBA2,
    runner=verified.MAMBA2.runner,
    arguments={"kv_cache_memory_bytes": 4 * GIB},
    capability=None,
    gib=8,
)
CASES = (MLA, MLA_FP8, MAMBA2)
"""What matters most comes first."""

_CPU_ENGINE: dict[str, Any] = {
    "title": "rehearsal: Llama, 2 layers, CPU engine",
    "fixes": ("capture-state",),
    "wrong": "nothing wrong here",
    "model": models.LLAMA,
    "runner": "V1",
    "arguments": {"max_model_len": 256, "max_num_batched_tokens": 512, "block_size": 16},
    "capability": None,
    "gib": 0,
    "environment": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    # A CPU engine has no graphs. What it compiles takes a minute; and a first attempt that fails has its second.
    "graphs": {"full": ({"mode": 0},), "piecewise": ({"mode": "no such mode"}, {"mode": 0})},
}
REHEARSAL = tuple(Case(name=name, **_CPU_ENGINE) for name in ("rehearsal", "rehearsal-2"))
"""Cases that rehearse the script, without graphs, on a CPU engine."""

_ENGINE: dict[str, Any] = {
    "load_format": "dummy",  # weights near zero: times do not depend on them, and nobody reads the tokens
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": 8192,  # the largest batch is prefilled in one step
    "kv_cache_memory_bytes": 2 * GIB,  # or vLLM would profile the memory of a GPU that several engines share
    "gpu_memory_utilization": 0.05,  # with the above, only a check at the start
    "enable_prefix_caching": False,
    "disable_log_stats": False,  # has the times of the tokens
    "seed": 0,
}
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: the engine's steps and nothing between processes
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "OMP_NUM_THREADS": "1",  # as vLLM's own worker processes have it
    # Newer releases would compile FlashInfer's top-k and top-p for minutes when they start; nothing here draws tokens.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


@dataclass(frozen=True)
class Site:
    """A vLLM: its folder, or None for the installed one."""

    release: str
    folder: Path | None

    def path(self, sites: Sequence[Site], *also: Path) -> str:
        """Return a PYTHONPATH: this vLLM, *also*, and the inherited one without the other *sites*."""
        others = {each.folder for each in sites if each.folder is not None}
        inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        usable = (part for part in inherited if Path(part).resolve() not in others)
        return os.pathsep.join([*map(str, filter(None, (self.folder, *also))), *usable])


@dataclass(frozen=True)
class Configuration:
    """One engine of a case."""

    name: str
    label: str
    site: Site
    graphs: str | None
    """Key of `Case.graphs`; None: `enforce_eager`."""
    plugin: bool = False
    mode: str | None = None
    """Of every fix; None: as by default."""
    detectors: Mapping[str, str] = field(default_factory=dict)
    """Variables that switch detectors on."""

    def attempts(self, case: Case) -> int:
        return len(case.graphs[self.graphs]) if self.graphs else 1

    def order(self, case: Case, attempt: int, model: Path, largest_batch: int) -> Order:
        graphs: dict[str, Any] = (
            {"compilation_config": dict(case.graphs[self.graphs][attempt])} if self.graphs else {"enforce_eager": True}
        )
        arguments = _ENGINE | {"model": str(model), "max_num_seqs": max(SIZES)} | dict(case.arguments) | graphs
        return Order(arguments=arguments, plugin=self.plugin, runner=case.runner, largest_batch=largest_batch)

    def environment(self, case: Case, sites: Sequence[Site], cache: Path) -> dict[str, str]:
        """Return the environment of the engine's process: its vLLM, its compile cache, and no setting from outside."""
        unwanted = ("VLLM_", "PYTHONDONTWRITEBYTECODE")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        return (
            inherited
            | _ENVIRONMENT
            | dict(case.environment)
            | (dict.fromkeys(map(variable, BY_NAME), self.mode) if self.mode else {})
            | dict(self.detectors)
            | {
                "PYTHONPATH": self.site.path(sites, *([PACKAGE] if self.plugin else [])),
                "PYTHONUNBUFFERED": "1",
                # An installed plugin is there for all of them: only those that are to have it load it.
                "VLLM_PLUGINS": "graphfix" if self.plugin else "",
                "VLLM_USE_V2_MODEL_RUNNER": "1" if case.runner == "V2" else "0",
                "VLLM_CACHE_ROOT": str(cache),
            }
        )


@dataclass(frozen=True)
class Plan:
    """A case, and the engines that the releases at hand allow."""

    case: Case
    configurations: tuple[Configuration, ...]
    not_run: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Configuration:
        return next(configuration for configuration in self.configurations if configuration.name == name)


def find_sites(options: Sequence[str]) -> tuple[Site, ...]:
    """Return the sites of *options*, ``RELEASE=FOLDER`` each, or the installed vLLM. Raises SourceError, ValueError."""
    if not options:
        try:
            return (Site(open_source().version or "installed", None),)
        except SourceError:
            raise ValueError("no vLLM is installed in this Python; name one with --site RELEASE=FOLDER") from None
    sites = []
    for text in options:
        release, equals, folder = text.partition("=")
        if not equals:
            raise ValueError(f"{text} is not RELEASE=FOLDER")
        source = open_source(folder)
        if source.version is not None and not source.version.startswith(release):
            raise ValueError(f"{folder} holds vLLM {source.version}, not {release}")
        sites.append(Site(release, source.folder))
    return tuple(sites)


def plan(case: Case, sites: Sequence[Site]) -> Plan | None:
    """Return a plan for the newest affected release and the first fixed one after it; None if none is affected."""
    fixes = [fix for fix in FIXES if fix.name in case.fixes]
    verdicts = {site: {manifest.diagnose(fix, open_source(site.folder)).verdict for fix in fixes} for site in sites}
    ordered = sorted(sites, key=_number)
    affected = [site for site in ordered if Verdict.AFFECTED in verdicts[site]]
    if not affected:
        return None
    here = affected[-1]
    later = [site for site in ordered if verdicts[site] == {Verdict.FIXED} and _number(site) > _number(here)]
    return _plan(case, here, later[0] if later else None)


def plan_of_detectors(case: Case, sites: Sequence[Site], rate: str) -> Plan:
    """Return a plan for the newest release: stock, and patched with all detectors, the shadow check at *rate*."""
    here = max(sites, key=_number)
    detectors = {settings.SHADOW: rate, **ALL_DETECTORS}
    patched = f"full graphs, patched, all detectors, shadow check at {rate}"
    return Plan(
        replace(case, fixes=()),
        (
            Configuration(STOCK, "full graphs, stock", here, "full"),
            Configuration(CONTROL, "full graphs, stock, a second engine", here, "full"),
            Configuration(OBSERVED, "full graphs, patched", here, "full", plugin=True),
            Configuration(PATCHED, patched, here, "full", plugin=True, detectors=detectors),
        ),
    )


def rehearsal(sites: Sequence[Site]) -> tuple[Plan, ...]:
    """Return plans that take the first site for an affected release and the last for a fixed one."""
    return tuple(_plan(case, sites[0], sites[-1]) for case in REHEARSAL)


def _plan(case: Case, here: Site, fixed: Site | None) -> Plan:
    configurations = [
        Configuration(REFERENCE, "eager", here, None),
        Configuration("piecewise", "piecewise graphs, stock", here, "piecewise"),
        Configuration(STOCK, f"full graphs, stock ({case.wrong})", here, "full"),
        Configuration(CONTROL, "full graphs, stock, a second engine", here, "full"),
        Configuration(PATCHED, "full graphs, patched", here, "full", plugin=True),
    ]
    if fixed is None:
        return Plan(case, tuple(configurations), ("no release with the upstream fix was given",))
    return Plan(case, (*configurations, Configuration(FIXED, f"full graphs, stock {fixed.release}", fixed, "full")))


def _number(site: Site) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", site.release)[:3]))


def write_model(case: Case, folder: Path) -> Path:
    """Write the model's config.json, all that an engine with dummy weights needs, and return its folder."""
    made = folder / case.name
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_text(json.dumps(case.model, indent=2))
    return made
