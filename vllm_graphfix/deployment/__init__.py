"""Reads the command line of a `vllm serve` without vLLM, and answers if a defect can show in that deployment.

Each fact is true, false or not known, with its reason: a missing flag, a model that cannot be examined and a value that
vLLM takes from elsewhere are different things. Nothing is concluded from a fact that is not known.
"""

from __future__ import annotations

from vllm_graphfix.deployment.answers import Answer, Concern, Fact, all_of, any_of
from vllm_graphfix.deployment.facts import Deployment, read_deployment
from vllm_graphfix.deployment.line import FlagsError

__all__ = [
    "Answer",
    "Concern",
    "Deployment",
    "Fact",
    "FlagsError",
    "all_of",
    "any_of",
    "read_deployment",
]
