"""A probe that looks at nothing: prompts are asked three at a time, and the next three once those are answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graphfix.verify.engine.probes import Probe

if TYPE_CHECKING:
    from vllm import LLM

WAVE = 3


class InWaves(Probe):
    """Each wave begins with an empty batch, in slots that hold what the wave before has left there."""

    name = "in-waves"

    def in_the_engine(self, llm: LLM) -> None:
        ask: Any = llm.generate

        def generate(prompts: list[Any], sampling: list[Any], **keywords: Any) -> list[Any]:
            begins = range(0, len(prompts), WAVE)
            waves = [ask(prompts[at : at + WAVE], sampling[at : at + WAVE], **keywords) for at in begins]
            return [output for wave in waves for output in wave]

        llm.generate = generate  # type: ignore[method-assign]
