"""Trial of prefill-dispatch."""

from __future__ import annotations

from dataclasses import replace

from vllm_graphfix.fixes._dispatch_source import serves_them_wrong_on_v2
from vllm_graphfix.verify.engine.cases import LFM2_ONE_TOKEN, MAMBA2_ONE_TOKEN
from vllm_graphfix.verify.trial import Trial, Watched

TRIAL = Trial(
    watched=Watched(
        "shadow-v1",
        "vllm_graphfix.verify.double.scenarios.prefill_dispatch:watched",
        ("GDNAttentionMetadata", "Mamba2AttentionMetadata"),
    ),
    watched_further=(
        Watched(
            "shadow-v2",
            "vllm_graphfix.verify.double.scenarios.prefill_dispatch:watched_v2",
            ("GDNAttentionMetadata", "Mamba2AttentionMetadata"),
        ),
    ),
    case=MAMBA2_ONE_TOKEN,
    further=(replace(LFM2_ONE_TOKEN, shows_on=serves_them_wrong_on_v2),),
    engine="Mamba-2, prompts of one token; from 0.19.0 on, and `skipped` before: there Mamba treats such a prompt as a "
    "decode even without graphs, and the CPU double proves the fix with GDN layers and drafts. In 0.23.0 – 0.27.1 also "
    "LFM2 (a short convolution and attention) on model runner V2, in a row of its own",
    shows_in="tokens",
)
