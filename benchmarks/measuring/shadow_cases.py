"""The engines of `shadow_check.py`: those of `verify`, and others without a known defect."""

from __future__ import annotations

from pathlib import Path

import image_features
from measuring import parallel_drafters
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.verify.engine import adapters, models
from vllm_graphfix.verify.engine.case import Case
from vllm_graphfix.verify.engine.cases import GDN_MTP, MIXED_FULL, MLA, full_decodes
from vllm_graphfix.verify.trial import further_cases, trial_of

_DEFAULTS = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
COMPILED = tuple(
    Case(name=f"llama-compiled-{runner.lower()}", model="llama", runner=runner, graphs=_DEFAULTS, workload=MLA.workload)
    for runner in ("V1", "V2")
)
"""Engines of vLLM's default configuration: compiled, with ordinary attention. No defect is known to show in them."""
MIXED = tuple(
    Case(
        name=f"llama-full-triton-{runner.lower()}",
        model="llama",
        runner=runner,
        graphs=MIXED_FULL,
        workload=MLA.workload,
        arguments={"attention_config": {"backend": "TRITON_ATTN"}},
    )
    for runner in ("V1", "V2")
)
"""Full graphs of mixed batches, captured for one request: Triton's attention cuts its work by that."""
_DECODES = (("decodes", full_decodes([1, 2, 4, 8])), ("compiled", _DEFAULTS))
LORA = tuple(
    Case(
        name=f"llama-lora-{name}-{runner.lower()}",
        model="llama",
        runner=runner,
        graphs=graphs,
        workload=(),
        arguments={"enable_lora": True, "max_loras": len(adapters.NAMES), "max_lora_rank": adapters.RANK},
    )
    for name, graphs in _DECODES
    for runner in ("V1", "V2")
)
"""Engines whose batches mix requests of two adapters with requests of none. vLLM sets the rows of each adapter once
before a forward pass, for both runs of a check."""
_PIECES = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 64, 256]}
PIECES = tuple(
    Case(name=f"{model}-pieces-{runner.lower()}", model=model, runner=runner, graphs=_PIECES, workload=MLA.workload)
    for model in ("llama", "mla", "mixtral")
    for runner in ("V1", "V2")
)
"""Engines with piecewise graphs alone, whose steps are checked as wholes."""
BREAKABLE = tuple(
    Case(
        name=f"{model}-breakable-v2",
        model=model,
        runner="V2",
        graphs={**_PIECES, "mode": 0},
        workload=MLA.workload,
        environment={"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"},
    )
    for model in ("llama", "mla")
)
DRAFTERS = tuple(
    Case(
        name=f"llama-{name}",
        model="llama",
        draft=name,
        runner="V2",
        graphs=full_decodes([1, 2, 4, 8, 16, 32, 64]),
        workload=(),
        # Their attention is not causal, which few backends support.
        arguments={
            "attention_config": {"backend": "FLASH_ATTN"},
            "speculative_config": {"method": name, "num_speculative_tokens": tokens, "attention_backend": "FLASH_ATTN"},
        },
    )
    for name, tokens in (("eagle", 3), *((name, parallel_drafters.TOKENS) for name in parallel_drafters.CONFIGS))
)
"""Engines whose drafters have full graphs."""
IMAGES = tuple(
    Case(
        name=f"images-{runner.lower()}",
        model=image_features.NAME,
        runner=runner,
        graphs={**full_decodes([1, 2, 4, 8]), "cudagraph_mm_encoder": True},
        workload=(),
        arguments={"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1, "video": 0}},
    )
    for runner in ("V1", "V2")
)
"""Engines whose encoder has graphs; every other prompt begins with an image."""
OF_NO_VERIFY = {"prefill-dispatch": (GDN_MTP,)}
"""By fix: engines that show its defect, and compile for too long to be part of `verify`."""


def checked_cases() -> list[Case]:
    """Return the cases with full graphs, which are checked by default, then those with others alone."""
    cases = dict.fromkeys(
        case for fix in FIXES for case in (trial_of(fix.name).case, *further_cases(fix.name)) if case is not None
    )
    full = (case for case in cases if "FULL" in str(case.graphs.get("cudagraph_mode")))
    return [*full, *COMPILED, *MIXED, *LORA, *PIECES, *BREAKABLE, *DRAFTERS, *IMAGES, GDN_MTP]


def write(name: str, folder: Path) -> Path:
    """Make the model, drafter or adapter *name* of a case in *folder*/*name*, and return that folder."""
    if name in parallel_drafters.CONFIGS:
        return parallel_drafters.write(name, folder)
    if name == image_features.NAME:
        image_features.write(folder)
        return folder / name
    return models.write(name, folder)
