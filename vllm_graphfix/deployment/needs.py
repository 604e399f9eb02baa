"""Preconditions of a defect: each fix states its own once, for people and for `status --for`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from vllm_graphfix.deployment.answers import Answer, Concern, Fact, all_of
from vllm_graphfix.deployment.facts import Deployment

_NO_DEFAULT = " (not the default here)"
_SINCE = re.compile(r"^from [0-9.]+ on ")


class Need(NamedTuple):
    """One precondition of a defect. The defect shows where all of its preconditions are met."""

    text: str
    """The precondition in few words."""
    fact: Callable[[Deployment, str], Fact | None]
    """Judges a deployment, for the shape of vLLM's code that the diagnosis names (empty if that is not known). Returns
    None where the precondition does not decide: code of that shape does not need it, or no flag shows it."""
    detail: str = ""
    """More of it, for a page that has the room."""
    flags: tuple[str, ...] = ()
    """Flags of `vllm serve` that only this precondition reads: ``--switch``, or ``--option=`` for one with a value."""
    runners: Callable[[str], tuple[str, ...]] | None = None
    """Returns the model runners, ``V1`` and ``V2``, with the defect on code of a shape. None: any runner will do."""
    usual: bool = True
    """False for a setting that no release has by default."""
    clause: str = ""
    """The precondition as it follows `LIKELY IF`, for one that a deployment may leave open."""

    def here(self, default: str, shape: str) -> str:
        """Describe the precondition on code of *shape*, and say if it is no default there; empty if all meet it.

        *default* is the model runner of that code where nobody chooses one; empty if that is not known.
        """
        if self.runners is None:
            return self.text if self.usual else f"{self.text}{_NO_DEFAULT}"
        runners = self.runners(shape)
        if not runners or len(runners) > 1:
            return "" if runners else self.text
        other = default in ("V1", "V2") and default not in runners
        return f"model runner {runners[0]}{_NO_DEFAULT if other else ''}"

    def if_so(self, shape: str, default: str = "") -> str:
        """Return the precondition as a clause, on code of *shape*; it names a *default* that is another."""
        if self.runners is None:
            return self.clause
        (runner,) = self.runners(shape)
        return f"the model runner is {runner}{f' ({default} here)' if default in {'V1', 'V2'} - {runner} else ''}"


def unseen(text: str, detail: str = "") -> Need:
    """Return a precondition that no flag shows: it is named to people and decides nothing."""
    return Need(text, lambda deployment, shape: None, detail)


def on_runners(text: str, runners: Callable[[str], tuple[str, ...]], detail: str = "") -> Need:
    """Return the precondition of a model runner; *runners* names those with the defect on code of a shape.

    It decides nothing where both have the defect, or where the shape is not known.
    """

    def fact(deployment: Deployment, shape: str) -> Fact | None:
        affected = runners(shape)
        return deployment.runner(affected[0]) if len(affected) == 1 else None

    return Need(text, fact, detail, runners=runners)


RUNNER_V1 = on_runners("model runner V1", lambda _: ("V1",))
RUNNER_V2 = on_runners("model runner V2", lambda _: ("V2",))
GRAPHS = Need("CUDA graphs", lambda deployment, _: deployment.graphs(), clause="vLLM runs CUDA graphs")
FULL_GRAPHS = Need(
    "full graphs",
    lambda deployment, _: deployment.full_graphs(),
    "a cudagraph_mode with FULL, as by default",
    clause="vLLM runs full graphs",
)
PROMPTS_IN_GRAPHS = Need(
    "prompts in graphs",
    lambda deployment, _: deployment.prompts_in_graphs(),
    "a cudagraph_mode of PIECEWISE, FULL or FULL_AND_PIECEWISE",
    clause="prompts run in graphs",
)
DRAFTS = Need("speculative decoding", lambda deployment, _: deployment.drafts(), clause="speculative decoding is on")
TORCH_COMPILE = Need(
    "torch.compile",
    lambda deployment, _: deployment.compiles(),
    "no --enforce-eager, -O0 or -cc.mode=0",
    clause="torch.compile is on",
)
MULTIMODAL = Need(
    "a multimodal model",
    lambda deployment, _: deployment.multimodal(),
    "of images, videos or audio",
    clause="the model takes images, videos or audio",
)
FP8_CACHE = Need(
    "fp8 KV cache", lambda deployment, _: deployment.fp8_cache(), "--kv-cache-dtype fp8", clause="the KV cache is fp8"
)
SPARSE_MLA = Need(
    "sparse attention",
    lambda deployment, _: deployment.sparse_mla(),
    "DeepSeek's, with its indexer",
    clause="the model has sparse attention",
)
DENSE_FLASHMLA = Need(
    "FlashMLA",
    lambda deployment, _: deployment.dense_flashmla(),
    "latent attention that is not sparse, on Hopper",
    clause="attention runs on FlashMLA",
)
FLASHMLA = Need(
    "FlashMLA",
    lambda deployment, _: deployment.flashmla(),
    "latent attention, dense, or sparse with an fp8 cache",
    clause="attention runs on FlashMLA",
)


def judge(needs: Iterable[Need], deployment: Deployment, shape: str) -> Answer:
    """Answer if a defect with these *needs* can show in *deployment*, on code of *shape*."""
    facts = [(need, fact) for need in needs if (fact := need.fact(deployment, shape)) is not None]
    answer = all_of(*(fact for _, fact in facts))
    if answer.concern is Concern.UNKNOWN:
        default = deployment.default_runner
        undecided = (need.if_so(shape, default) for need, fact in facts if fact.holds is None)
    else:
        # The fact is about this very code, whatever release has it.
        undecided = (_SINCE.sub("", need.here("", shape)) for need, fact in facts if fact.holds is False)
    return answer._replace(undecided=tuple(dict.fromkeys(undecided)))


def briefly(needs: Iterable[Need]) -> str:
    """List the preconditions for a cell of a table."""
    return ", ".join(need.text for need in needs)


def briefly_here(needs: Iterable[Need], default: str, shape: str) -> str:
    """List the preconditions on code of *shape* with the model runner *default*, and mark those that are no default."""
    return ", ".join(filter(None, (need.here(default, shape) for need in needs)))


def by_choice(needs: Iterable[Need], default: str, shape: str) -> bool:
    """Return True if one of *needs* is no default on code of *shape*: only those who chose it have the defect."""
    return any(need.here(default, shape).endswith(_NO_DEFAULT) for need in needs)


def has_chosen(needs: Iterable[Need], deployment: Deployment, shape: str) -> bool:
    """Return True if *deployment* has one of *needs* that no release has by default, on code of *shape*."""
    facts = (need.fact(deployment, shape) for need in needs if not need.usual)
    return any(fact is not None and fact.holds for fact in facts)


def described(needs: Iterable[Need]) -> str:
    """List the preconditions with their details."""
    return "; ".join(f"{need.text} ({need.detail})" if need.detail else need.text for need in needs)
