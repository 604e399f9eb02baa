"""What a defect needs of a deployment: written once by a fix, for people and for `status --for`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from vllm_graphfix.deployment.answers import Answer, Fact, all_of
from vllm_graphfix.deployment.facts import Deployment


class Need(NamedTuple):
    """One thing that a defect needs; it shows where all of them are met."""

    text: str
    """What it is, in few words."""
    fact: Callable[[Deployment, str], Fact | None]
    """Whether a deployment meets it, given the shape of vLLM's code that the diagnosis named; an empty shape where
    that is not known. None where it does not decide: code of that shape does not need it, or flags do not show it."""
    detail: str = ""
    """What else there is to say of it."""
    flags: tuple[str, ...] = ()
    """Flags of `vllm serve` that it asks for and the facts of a `Deployment` do not: ``--switch``, or ``--option=``
    for one with a value."""


def unseen(text: str, detail: str = "") -> Need:
    """A need that no flag shows: people are told of it, and it decides nothing."""
    return Need(text, lambda deployment, shape: None, detail)


RUNNER_V1 = Need("model runner V1", lambda deployment, _: deployment.runner("V1"))
RUNNER_V2 = Need("model runner V2", lambda deployment, _: deployment.runner("V2"))
GRAPHS = Need("CUDA graphs", lambda deployment, _: deployment.graphs())
FULL_GRAPHS = Need(
    "full graphs", lambda deployment, _: deployment.full_graphs(), "a cudagraph_mode with FULL, as by default"
)
DRAFTS = Need("speculative decoding", lambda deployment, _: deployment.drafts())
FP8_CACHE = Need("fp8 KV cache", lambda deployment, _: deployment.fp8_cache(), "--kv-cache-dtype fp8")
SPARSE_MLA = Need("sparse attention", lambda deployment, _: deployment.sparse_mla(), "DeepSeek's, with its indexer")
DENSE_FLASHMLA = Need(
    "FlashMLA", lambda deployment, _: deployment.dense_flashmla(), "latent attention that is not sparse, on Hopper"
)
FLASHMLA = Need(
    "FlashMLA", lambda deployment, _: deployment.flashmla(), "latent attention, dense, or sparse with an fp8 cache"
)


def judge(needs: Iterable[Need], deployment: Deployment, shape: str) -> Answer:
    """Whether a defect with these *needs* can show in *deployment*, on code of *shape*."""
    found = (need.fact(deployment, shape) for need in needs)
    return all_of(*(fact for fact in found if fact is not None))


def briefly(needs: Iterable[Need]) -> str:
    """Who is affected, for a table."""
    return ", ".join(need.text for need in needs)


def described(needs: Iterable[Need]) -> str:
    """Who is affected, with all that there is to say of it."""
    return "; ".join(f"{need.text} ({need.detail})" if need.detail else need.text for need in needs)
