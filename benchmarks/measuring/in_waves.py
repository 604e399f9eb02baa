"""Probes that look at nothing: prompts are asked three at a time, and the next three once those are answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graphfix.verify.engine.probes import Probe

if TYPE_CHECKING:
    from vllm import LLM

WAVE = 3


class InWaves(Probe):
    """Each wave begins with an empty batch, in slots that hold what the wave before has left there."""

    name = "in-waves"
    first = 0
    """The number of the pass from which on prompts are asked in waves."""

    def in_the_engine(self, llm: LLM) -> None:
        ask: Any = llm.generate
        passes = iter(range(100))

        def generate(prompts: list[Any], sampling: list[Any], **keywords: Any) -> list[Any]:
            wave = WAVE if next(passes) >= self.first else len(prompts)
            begins = range(0, len(prompts), wave)
            waves = [ask(prompts[at : at + wave], sampling[at : at + wave], **keywords) for at in begins]
            return [output for wave in waves for output in wave]

        llm.generate = generate


class ThenInWaves(InWaves):
    """The second pass is in batches of another size.

    What it differs in is what kernels of other shapes round otherwise. With trained weights, whose logits are large,
    that is more than the noise of the same batch.
    """

    name = "then-in-waves"
    first = 1
