"""What a defect needs of a deployment: written once by a fix, for people and for `status --for`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from vllm_graphfix.deployment.answers import Answer, Fact, all_of
from vllm_graphfix.deployment.facts import Deployment

_NO_DEFAULT = " (not the default here)"


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
    runners: Callable[[str], tuple[str, ...]] | None = None
    """The model runners with the defect on code of a shape, ``V1``, ``V2`` or both; None if it is no need for one."""
    usual: bool = True
    """False for a setting that no release has by default."""

    def here(self, default: str, shape: str) -> str:
        """What it is on code of *shape*, and whether that is the default there; empty where it spares nobody.

        *default* is the model runner which that code takes if nobody chooses one; empty if that is not known.
        """
        if self.runners is None:
            return self.text if self.usual else f"{self.text}{_NO_DEFAULT}"
        runners = self.runners(shape)
        if not runners or len(runners) > 1:
            return "" if runners else self.text
        other = default in ("V1", "V2") and default not in runners
        return f"model runner {runners[0]}{_NO_DEFAULT if other else ''}"


def unseen(text: str, detail: str = "") -> Need:
    """A need that no flag shows: people are told of it, and it decides nothing."""
    return Need(text, lambda deployment, shape: None, detail)


def on_runners(text: str, runners: Callable[[str], tuple[str, ...]], detail: str = "") -> Need:
    """The need for a model runner, of which *runners* names those with the defect on code of a shape.

    Where both have it, or the shape is not known, it decides nothing.
    """

    def fact(deployment: Deployment, shape: str) -> Fact | None:
        found = runners(shape)
        return deployment.runner(found[0]) if len(found) == 1 else None

    return Need(text, fact, detail, runners=runners)


RUNNER_V1 = on_runners("model runner V1", lambda _: ("V1",))
RUNNER_V2 = on_runners("model runner V2", lambda _: ("V2",))
GRAPHS = Need("CUDA graphs", lambda deployment, _: deployment.graphs())
FULL_GRAPHS = Need(
    "full graphs", lambda deployment, _: deployment.full_graphs(), "a cudagraph_mode with FULL, as by default"
)
PROMPTS_IN_GRAPHS = Need(
    "prompts in graphs",
    lambda deployment, _: deployment.prompts_in_graphs(),
    "a cudagraph_mode of PIECEWISE, FULL or FULL_AND_PIECEWISE",
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


def briefly_here(needs: Iterable[Need], default: str, shape: str) -> str:
    """Who is affected on code of *shape* whose default model runner is *default*, and what of it is no default."""
    return ", ".join(filter(None, (need.here(default, shape) for need in needs)))


def by_choice(needs: Iterable[Need], default: str, shape: str) -> bool:
    """Whether one of *needs* is no default on code of *shape*: nobody has the defect who has not chosen it."""
    return any(need.here(default, shape).endswith(_NO_DEFAULT) for need in needs)


def described(needs: Iterable[Need]) -> str:
    """Who is affected, with all that there is to say of it."""
    return "; ".join(f"{need.text} ({need.detail})" if need.detail else need.text for need in needs)
