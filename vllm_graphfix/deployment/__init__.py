"""What the command line of a `vllm serve` says of a deployment, read without vLLM, and what follows for a fix.

A flag that is not there, a model that cannot be examined and a value that vLLM takes from elsewhere are different
things: each fact is true, false or not known, with the reason. Nothing is concluded from what is not known.
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
