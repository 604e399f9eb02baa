"""`engine_cost.py --steps`: a decode step with the plugin against one without, on each release of --site.

Each case has an engine with the defaults, and one in which every fix observes; each is compared with itself without
wrappers (`wrappers.py`). Nothing is compiled, so that engines start soon; steps are full graphs all the same. There is
no asynchronous scheduling, which would hide some of the plugin's time behind the GPU's work.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from measuring.engine_cases import LAYERS, OBSERVED, PATCHED, SIZES, Case, Configuration, Plan, Site
from measuring.engine_figures import CaseResult, Figures, engine_of
from measuring.engine_process import EngineProcess
from measuring.wrappers import Ratio, judged
from vllm_graphfix.verify.engine import case as verified_case
from vllm_graphfix.verify.engine import cases as verified
from vllm_graphfix.verify.engine import models

TARGET = 0.995
DRAFTS = 2
LARGE = {"num_hidden_layers": LAYERS, "hidden_size": 2048, "intermediate_size": 5504, "vocab_size": 32000}
_LLAMA = models.LLAMA | LARGE | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
_HYBRID = (
    models.LFM2
    | LARGE
    | {
        "layer_types": ["conv", "full_attention"] * (LAYERS // 2),
        "conv_dim": 2048,
        "block_dim": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
)
_MLA_MTP = models.MLA_MTP | LARGE | {"first_k_dense_replace": LAYERS + 1}


def _case(
    name: str,
    title: str,
    model: models.Config,
    case: verified_case.Case,
    graphs: str,
    rows: int = 1,
    target: float | None = TARGET,
) -> Case:
    sizes = [rows * size for size in SIZES]
    return Case(
        name=name,
        title=title,
        fixes=(),
        wrong="",
        model=model,
        runner=case.runner,
        arguments={"kv_cache_memory_bytes": 4 << 30, "async_scheduling": False} | case.arguments,
        capability=case.capability,
        gib=9,
        graphs={"full": ({"mode": 0, "cudagraph_mode": graphs, "cudagraph_capture_sizes": sizes},)},
        target=target,
    )


_DECODES = "FULL_DECODE_ONLY"
_V2 = replace(verified.LLAMA_FULL_FLASH_V2, arguments={}, capability=None)
_HYBRID_V1 = replace(verified.LFM2_ONE_TOKEN, runner="V1")
STEPS = (
    _case("llama", "Llama, V2: no fix acts", _LLAMA, _V2, _DECODES),
    _case("hybrid", "LFM2 (short convolutions and attention), V1", _HYBRID, _HYBRID_V1, _DECODES),
    _case("drafts", f"MLA, FlashMLA, {DRAFTS} drafts (MTP), V2", _MLA_MTP, verified.MLA_MTP, _DECODES, 1 + DRAFTS),
    _case("flash", "Llama, FlashAttention 3, `FULL`, V1", _LLAMA, verified.LLAMA_FULL_FLASH_V1, "FULL", target=None),
)


def step_plans(sites: Sequence[Site], cases: Iterable[Case]) -> list[Plan]:
    """Return a plan for each of *cases* on each release, ordered by release."""
    return [
        Plan(
            replace(case, name=f"{case.name}_{site.release}", title=f"{case.title}, {site.release}"),
            (
                Configuration(PATCHED, "patched: what is on by default", site, "full", plugin=True),
                Configuration(OBSERVED, "every fix observes", site, "full", plugin=True, mode="observe"),
            ),
        )
        for site in sites
        for case in cases
    ]


def packed(plans: Sequence[Plan], free_gib: float) -> list[list[Plan]]:
    """Group plans of one release, as many as memory and cores allow."""
    groups: list[list[Plan]] = []
    for made in plans:
        together = [*groups[-1], made] if groups else []
        fits = sum(each.case.gib * len(each.configurations) for each in together) <= free_gib
        engines = sum(len(each.configurations) for each in together)
        releases = {configuration.site for each in together for configuration in each.configurations}
        if together and fits and engines <= (os.cpu_count() or 1) and len(releases) == 1:
            groups[-1].append(made)
        else:
            groups.append([made])
    return groups


def measured(engine: EngineProcess, batch: int, steps: int, timeout: float) -> dict[str, Any]:
    """Measure *steps* decode steps of *batch* requests, with wrappers and without. Raises DiedError."""
    result: dict[str, Any] = {"batch": batch}
    for name in ("control", "compared"):
        request = {"in_turns": batch, "steps": steps, "control": name == "control"}
        seconds: list[float] = engine.ask(request, timeout)
        result |= {name: Ratio.of(seconds), "steps": len(seconds), "milliseconds": 1e3 * statistics.median(seconds)}
    return result


def is_step(case: CaseResult) -> bool:
    return bool(engine_of(case, OBSERVED))


def step_table(cases: Sequence[CaseResult]) -> Figures:
    """Return one table of all cases; a ratio above 1 means that steps with wrappers are faster."""
    batches = [(case, batch) for case in cases for batch in sorted({each["batch"] for each in _steps(case)})]
    return Figures(
        "A decode step with the plugin, relative to the same without its wrappers (95 % of the median)",
        ("engine", "batch", "a step, ms", "without against without", "patched", "observed", f"target {TARGET}"),
        tuple(_row(case, batch) for case, batch in batches),
    )


def _steps(case: CaseResult, name: str | None = None) -> list[dict[str, Any]]:
    engines = [engine for engine in case["configurations"] if name in (None, engine["name"])]
    return [each for engine in engines for each in engine.get("steps", ())]


def _row(case: CaseResult, batch: int) -> tuple[str, ...]:
    engines = [[each for each in _steps(case, name) if each["batch"] == batch] for name in (PATCHED, OBSERVED)]
    took = next(each["milliseconds"] for engine in engines for each in engine)
    ratios = [Ratio(*each["compared"]) for engine in engines for each in engine]
    controls = "; ".join(Ratio(*each["control"]).text() for engine in engines for each in engine)
    compared = [Ratio(*engine[0]["compared"]).text() if engine else "" for engine in engines]
    verdict = "–"
    if case["target"] is not None:
        verdict = judged(ratios, case["target"]) if all(engines) else "not compared"
    return (case["title"], str(batch), f"{took:.3f}", controls, *compared, verdict)


def step_notes(case: CaseResult) -> list[str]:
    active = (engine_of(case, PATCHED).get("told") or {}).get("active", [])
    return [f"fixes at work in the patched engine: {', '.join(active) or 'none'}"]
