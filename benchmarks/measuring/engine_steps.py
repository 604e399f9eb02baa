"""`engine_cost.py --steps`: a decode step with the plugin against one without, on every release that is given.

Each case has two stock engines, one with what is on by default and one in which every fix observes. Nothing is
compiled, so that engines start soon: their steps are full graphs all the same. On a machine that has room for them, all
engines of a release are alive at once.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from measuring.engine_cases import CONTROL, LAYERS, OBSERVED, PATCHED, SIZES, STOCK, Case, Configuration, Plan, Site
from measuring.engine_figures import CaseResult, Figures, alike, batches, engine_of, seconds_of, throughput
from vllm_graphfix.verify.engine import cases as verified
from vllm_graphfix.verify.engine import models

TARGET = 0.995
DRAFTS = 2
_LARGE = {"num_hidden_layers": LAYERS, "hidden_size": 2048, "intermediate_size": 5504, "vocab_size": 32000}
_LLAMA = models.LLAMA | _LARGE | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
_HYBRID = (
    models.LFM2
    | _LARGE
    | {
        "layer_types": ["conv", "full_attention"] * (LAYERS // 2),
        "conv_dim": 2048,
        "block_dim": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
)
_MLA_MTP = models.MLA_MTP | _LARGE | {"first_k_dense_replace": LAYERS + 1}


def _case(name: str, title: str, model: models.Config, case: verified.Case, graphs: str, rows: int = 1) -> Case:
    sizes = [rows * size for size in SIZES]
    return Case(
        name=name,
        title=title,
        fixes=(),
        wrong="",
        model=model,
        runner=case.runner,
        arguments={"kv_cache_memory_bytes": 1 << 30} | case.arguments,
        capability=case.capability,
        gib=6,
        graphs={"full": ({"mode": 0, "cudagraph_mode": graphs, "cudagraph_capture_sizes": sizes},)},
        target=TARGET,
    )


_DECODES = "FULL_DECODE_ONLY"
_V2 = replace(verified.LLAMA_FULL_FLASH_V2, arguments={}, capability=None)
_HYBRID_V1 = replace(verified.LFM2_ONE_TOKEN, runner="V1")
STEPS = (
    _case("llama", "Llama, V2: no fix acts", _LLAMA, _V2, _DECODES),
    _case("hybrid", "LFM2 (short convolutions and attention), V1", _HYBRID, _HYBRID_V1, _DECODES),
    _case("drafts", f"MLA, FlashMLA, {DRAFTS} drafts (MTP), V2", _MLA_MTP, verified.MLA_MTP, _DECODES, 1 + DRAFTS),
    _case("flash", "Llama, FlashAttention 3, `FULL`, V1", _LLAMA, verified.LLAMA_FULL_FLASH_V1, "FULL"),
)


def step_plans(sites: Sequence[Site], cases: Iterable[Case]) -> list[Plan]:
    """Each of *cases* on each release, those of a release together."""
    return [
        Plan(
            replace(case, name=f"{case.name}_{site.release}", title=f"{case.title}, {site.release}"),
            (
                Configuration(STOCK, "stock", site, "full"),
                Configuration(PATCHED, "patched: what is on by default", site, "full", plugin=True),
                Configuration(CONTROL, "stock, a second engine", site, "full"),
                Configuration(OBSERVED, "every fix observes", site, "full", plugin=True, mode="observe"),
            ),
        )
        for site in sites
        for case in cases
    ]


def packed(plans: Sequence[Plan], free_gib: float) -> list[list[Plan]]:
    """As many cases at a time as there are memory and cores for, all of one release."""
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


def is_step(case: CaseResult) -> bool:
    return bool(engine_of(case, OBSERVED))


def step_table(cases: Sequence[CaseResult]) -> Figures:
    """One table of all cases; a ratio is above 1 where the engine is faster than stock."""
    rows = [_row(case, batch) for case in cases for batch in batches(case)]
    return Figures(
        "A decode step, relative to stock (tokens a second of undisturbed turns; in brackets the median of neighbours)",
        ("engine", "batch", "stock, ms a token", "a second stock engine", "patched", "observed", f"target {TARGET}"),
        tuple(rows),
    )


def _row(case: CaseResult, batch: int) -> tuple[str, ...]:
    taken = undisturbed(case, STOCK, batch)
    step = f"{taken / (case['tokens'] - 1) * 1e3:.3f}" if taken else ""
    shown = []
    for name in (CONTROL, PATCHED, OBSERVED):
        ratio, neighbours = _ratio(case, name, batch), throughput(case, name, STOCK, batch)
        shown.append(f"{ratio:.3f} ({neighbours.median:.3f})" if ratio and neighbours else "")
    return (case["title"], str(batch), step, *shown, _judged(case, batch))


def undisturbed(case: CaseResult, name: str, batch: int) -> float | None:
    """Seconds of a turn that nothing else on the machine held up: the lower quartile of all.

    Whatever disturbs a turn makes it longer, so that the short ones say what the engine takes. Machines with other
    tenants double one turn in ten, which a median of few rounds does not bear.
    """
    taken = seconds_of(case, name, batch)
    return statistics.quantiles(taken, n=4)[0] if len(taken) > 1 else next(iter(taken), None)


def _ratio(case: CaseResult, name: str, batch: int) -> float | None:
    stock, other = undisturbed(case, STOCK, batch), undisturbed(case, name, batch)
    return stock / other if stock and other else None


def _judged(case: CaseResult, batch: int) -> str:
    found = [_ratio(case, name, batch) for name in (PATCHED, OBSERVED)]
    if None in found or not alike(case, PATCHED, OBSERVED, STOCK):
        return "not compared"
    if not _drafted_alike(case):
        return "not compared: other drafts"
    target: float = case["target"]
    if all(ratio is not None and ratio >= target for ratio in found):
        return "met"
    control = _ratio(case, CONTROL, batch)
    # Two engines that are the same differ by as much, in either direction.
    noise = abs(1 - control) if control is not None else 0.0
    return "within noise" if all(ratio is not None and ratio >= target - noise for ratio in found) else "not met"


def _drafted_alike(case: CaseResult) -> bool:
    """Whether all engines have accepted as many drafts: otherwise their answers took another number of steps."""
    counted = [engine.get("drafts") for engine in case["configurations"] if engine["failure"] is None]
    return all(each == counted[0] for each in counted)


def step_notes(case: CaseResult) -> list[str]:
    active = (engine_of(case, PATCHED).get("told") or {}).get("active", [])
    found = [f"fixes at work in the patched engine: {', '.join(active) or 'none'}"]
    drafts = {engine["name"]: engine["drafts"] for engine in case["configurations"] if engine.get("drafts")}
    if drafts:
        told = "; ".join(f"{name} {each['drafts']:.0f}, {each['accepted_tokens']:.0f}" for name, each in drafts.items())
        found.append(f"drafts, and tokens of them accepted: {told}. A step is of as many tokens as that makes")
    return found
