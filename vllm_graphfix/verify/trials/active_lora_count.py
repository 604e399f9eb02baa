"""Trial of active-lora-count."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_graphfix.verify.engine.cases import LLAMA_LORA
from vllm_graphfix.verify.trial import Trial, Watched

if TYPE_CHECKING:
    from vllm_graphfix.source.files import Source


def _counts_on_v2(source: Source) -> bool:
    """Return True if model runner V2 has a graph for each number of adapters."""
    return source.contains_word("vllm/v1/worker/gpu/lora_utils.py", "get_num_active_loras_for_dispatch")


TRIAL = Trial(
    case=LLAMA_LORA,
    further=(replace(LLAMA_LORA, name="llama-lora-v2", runner="V2", watched=False, shows_on=_counts_on_v2),),
    watched=Watched(
        "shadow-v1", "vllm_graphfix.verify.double.scenarios.active_lora_count:watched", ("AttentionMetadataStandIn",)
    ),
    engine="Llama with two LoRA adapters, `--specialize-active-lora`, requests of each and of none in one batch, model "
    "runner V1; from 0.24.0 on also V2, in a row of its own",
    shows_in="tokens",
)
