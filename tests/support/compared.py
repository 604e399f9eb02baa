"""Results of `compare` that no engine gave."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from vllm_graphfix import __version__
from vllm_graphfix.commands.compare.report import Report
from vllm_graphfix.verify.comparison import Comparison, Judgement, Kind
from vllm_graphfix.verify.engine.job import EngineResult, PoisonPass
from vllm_graphfix.verify.poison.kinds import KINDS


def judgement(kind: Kind, position: int | None = None, length: int = 64) -> Judgement:
    return Judgement(kind, length, position, None if position is None else 5, None if position is None else 6, 0.5, 2.0)


def comparison(*judgements: Judgement, noise: float = 0.01) -> Comparison:
    return Comparison(judgements, noise, 0.0625)


FACTS = {
    "vllm": "0.21.0",
    "graphfix": __version__,
    "torch": "2.11.0",
    "python": "3.12.1",
    "device": "GPU [of a test]",
    "driver": "1",
    "switches": "VLLM_GRAPHFIX=on",
    "seed": "7",
}


RESULT = EngineResult((), {"0": {"mamba-padding": "active"}}, {}, None, FACTS, 1.0, cudagraph_mode="FULL")


EQUAL = judgement(Kind.EQUAL)


def report(
    *judgements: Judgement, eager: EngineResult = RESULT, graphs: EngineResult | None = RESULT, **more: Any
) -> Report:
    return Report("the/model", ("-tp", "2"), eager, graphs, comparison(*judgements or (EQUAL,)), **more)


FAILED = replace(
    report(),
    graphs=None,
    comparison=None,
    error="CUDA error: an illegal memory access was encountered (log: /l)",
    logs="/",
)


POISONED = PoisonPass(
    KINDS[:1],
    ("slot_mapping",),
    False,
    tuple(range(20)),
    inf,
    (
        {
            "steps": 83,
            "findings": [[21, "layer 1: block 5", True]],
            "most": {"padded rows": 9},
            "notes": [],
            "error": None,
        },
    ),
)
UNHARMED = replace(
    POISONED, kinds=KINDS[2:3], buffers=None, prompts=(), worst=0.0, ranks=({**POISONED.ranks[0], "findings": []},)
)
