"""Trial of turboquant-drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_graphfix.verify.engine.cases import (
    LLAMA_TURBOQUANT_EAGLE,
    LLAMA_TURBOQUANT_NGRAM,
    LLAMA_TURBOQUANT_NGRAM_V2,
    MIMO_TURBOQUANT_MTP,
)
from vllm_graphfix.verify.trial import Trial, Watched

if TYPE_CHECKING:
    from vllm_graphfix.source.files import Source

_SCENARIO = "vllm_graphfix.verify.double.scenarios.turboquant_drafts"


def _reserves_its_workspace(source: Source) -> bool:
    """Tell if builders reserve their workspace: before 0.24.0 V1 ends at a decode without drafts."""
    return source.contains_word("vllm/v1/attention/backends/turboquant_attn.py", "_reserve_workspace")


def _has_ngrams_on_v2(source: Source) -> bool:
    return source.contains_word("vllm/v1/worker/gpu/spec_decode/__init__.py", "NgramGPUSpeculator")


TRIAL = Trial(
    watched=Watched("shadow-v1", f"{_SCENARIO}:watched", ("TurboQuantMetadata",)),
    watched_further=(Watched("shadow-v2", f"{_SCENARIO}:watched_v2", ("TurboQuantMetadata",)),),
    case=MIMO_TURBOQUANT_MTP,
    further=(
        replace(MIMO_TURBOQUANT_MTP, name="mimo-turboquant-mtp-v2", runner="V2"),
        replace(LLAMA_TURBOQUANT_EAGLE, shows_on=_reserves_its_workspace),
        replace(LLAMA_TURBOQUANT_EAGLE, name="llama-turboquant-eagle-v2", runner="V2"),
        replace(LLAMA_TURBOQUANT_NGRAM, shows_on=_reserves_its_workspace),
        replace(LLAMA_TURBOQUANT_NGRAM_V2, shows_on=_has_ngrams_on_v2),
    ),
    engine="MiMo and Llama of eight layers, TurboQuant cache, V1 and V2, with MTP, an Eagle head and n-gram drafts",
    shows_in="tokens",
)
