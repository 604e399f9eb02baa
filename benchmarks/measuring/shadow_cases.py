"""The engines of `shadow_check.py`: those of `verify`, and more in which no defect is known to show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from measuring import tiny_qwen2_vl
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.verify.engine import adapters
from vllm_graphfix.verify.engine.cases import DEEPSEEK_V4, GDN_MTP, MIXED_FULL, MLA, Case, full_decodes
from vllm_graphfix.verify.trial import further_cases, trial_of

_DEFAULTS = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
COMPILED = tuple(
    Case(name=f"llama-compiled-{runner.lower()}", model="llama", runner=runner, graphs=_DEFAULTS, workload=MLA.workload)
    for runner in ("V1", "V2")
)
"""Engines as vLLM is by default: compiled, and with an ordinary attention. No defect is known to show in them."""
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
"""Full graphs of prompts and decodes together, which are captured for one request: Triton's attention cuts its work by
that."""
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
"""Engines whose batches mix requests of two adapters with requests of none. vLLM tells its kernels which row is whose
before a forward pass, and once for both runs of a check."""
LORA_COUNTED = tuple(
    replace(
        case,
        name=case.name.replace("decodes", "counted"),
        arguments=case.arguments | {"specialize_active_lora": True},
    )
    for case in LORA
    if "decodes" in case.name
)
"""With a graph for each number of adapters, in which vLLM does not count the rows without one, though its kernels do:
in a replay for a batch that has such rows, the last adapter is left out. They run without the fix for that: mismatches
are right. These and the next run where --only names them."""
LORA_FIXED = tuple(replace(case, name=f"{case.name}-fixed") for case in LORA_COUNTED)
"""The same with `active-lora-count`."""
LORA_ANY_ORDER = tuple(replace(case, name=f"{case.name}-any-order") for case in LORA)
"""With adapters that change `down_proj`, too, whose sums vLLM's kernels make in any order: runs of the same step differ
by rounding, with a graph and without. They run where --only names them."""
_OF_NEWEST: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "minimax-m3": ("minimax-m3", ("V1", "V2"), {"block_size": 128}),
    # On V1 graphs are captured before FlashKDA asks for its workspace, which may not grow then.
    "kimi-k3": ("kimi-k3", ("V1", "V2"), {"additional_config": {"kda_prefill_backend": "triton"}}),
    # V1 gives a model no n-grams. FlashInfer's kernels are compiled for longer.
    "qwen4-exp": ("qwen4-exp", ("V2",), {"additional_config": {"gdn_prefill_backend": "triton"}}),
    "qwen4-exp-on-gpu": (
        "qwen4-exp",
        ("V2",),
        {"additional_config": {"gdn_prefill_backend": "triton"}, "engram_config": {"cpu_offload": False}},
    ),
}
"""By name: a model, its runners and its arguments. Embeddings of n-grams are in the host's memory by default."""
NEWEST = (
    *(
        Case(
            name=f"{name}-{runner.lower()}",
            model=model,
            runner=runner,
            graphs=full_decodes([1, 2, 4, 8]),
            workload=MLA.workload,
            arguments=arguments | {"max_num_batched_tokens": 512},
            where_known={"moe_backend": "triton", "kernel_config": {"enable_jit_warmup": False}},
            capability=9,
        )
        for name, (model, runners, arguments) in _OF_NEWEST.items()
        for runner in runners
    ),
    *(
        replace(
            DEEPSEEK_V4,
            name=f"deepseek-v41-{runner.lower()}",
            model="deepseek-v41",
            runner=runner,
            # Blocks of 64 tokens: those of the kernels, into which larger ones are not cut here.
            arguments=DEEPSEEK_V4.arguments | {"block_size": 64, "limit_mm_per_prompt": {"image": 0}},
            probes=(),
        )
        for runner in ("V1", "V2")
    ),
)
"""Engines with caches of classes of their own, of models that the newest releases alone have. These run where --only
names them."""
KIMI_K3_ONE_TOKEN = replace(
    next(case for case in NEWEST if case.name == "kimi-k3-v1"), name="kimi-k3-one-token", workload=((1, 48),) * 8
)
"""Prompts of one token, which a graph of decodes takes without `prefill-dispatch`: mismatches are right."""
ONLY_WHERE_NAMED = (*LORA_COUNTED, *LORA_FIXED, *LORA_ANY_ORDER, *NEWEST, KIMI_K3_ONE_TOKEN)
IMAGES = tuple(
    Case(
        name=f"{tiny_qwen2_vl.NAME}-{name}-{runner.lower()}",
        model=tiny_qwen2_vl.NAME,
        runner=runner,
        graphs=graphs,
        workload=(),
        arguments={"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1, "video": 0}},
    )
    for name, graphs in _DECODES
    for runner in ("V1", "V2")
)
"""Engines that are given images with every other prompt. The encoder has no graphs; decodes get embeddings in place of
tokens."""
EXPERTS = tuple(
    Case(
        name=f"mixtral-{name}-{runner.lower()}",
        model="mixtral",
        runner=runner,
        graphs=graphs,
        workload=(),
        arguments=arguments,
        where_known={"moe_backend": "triton"},  # the same on all releases, and nothing to compile
    )
    for name, graphs, arguments in (
        ("decodes", full_decodes([1, 2, 4, 8]), {}),
        ("flash", MIXED_FULL, {"attention_config": {"backend": "FLASH_ATTN"}}),
    )
    for runner in ("V1", "V2")
)
"""Engines of `experts`. In those whose graphs take prompts, too, `flash-mixed-schedule` shows on stock."""
OF_NO_VERIFY = {"prefill-dispatch": (GDN_MTP, KIMI_K3_ONE_TOKEN)}
"""By name of a fix: engines in which its defect shows, and that take too long to compile for `verify`, or need a newer
release."""


def full_graph_cases() -> list[Case]:
    """The cases of `verify` with full graphs: in others nothing can be checked."""
    cases = dict.fromkeys(
        case for fix in FIXES for case in (trial_of(fix.name).case, *further_cases(fix.name)) if case is not None
    )
    full = (case for case in cases if "FULL" in str(case.graphs.get("cudagraph_mode")))
    return [*full, *COMPILED, *MIXED, *LORA, *IMAGES, GDN_MTP]
