"""Probes that look at nothing: a few prompts are asked at a time, and the next few once those are answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graphfix.verify.engine.probes import Probe

if TYPE_CHECKING:
    from vllm import LLM


class InWaves(Probe):
    """Each wave begins with an empty batch, in slots that hold what the wave before has left there."""

    name = "in-waves"
    wave = 3
    """Prompts that are asked at a time."""
    first = 0
    """The number of the pass from which on prompts are asked in waves."""

    def in_the_engine(self, llm: LLM) -> None:
        ask: Any = llm.generate
        passes = iter(range(100))

        def generate(prompts: list[Any], sampling: list[Any], **keywords: Any) -> list[Any]:
            count = self.wave if next(passes) >= self.first else len(prompts)
            waves = (slice(at, at + count) for at in range(0, len(prompts), count))
            answered = [ask(prompts[each], sampling[each], **_cut(keywords, each)) for each in waves]
            return [output for outputs in answered for output in outputs]

        llm.generate = generate


def _cut(keywords: dict[str, Any], wave: slice) -> dict[str, Any]:
    """With what is given for each prompt, as adapters are, for those of the *wave*."""
    return {name: value[wave] if isinstance(value, list) else value for name, value in keywords.items()}


class InFours(InWaves):
    """Four at a time."""

    name = "in-fours"
    wave = 4


class InEights(InWaves):
    """Eight at a time."""

    name = "in-eights"
    wave = 8


class ThenInWaves(InWaves):
    """The second pass is in batches of another size.

    What it differs in is what kernels of other shapes round otherwise. With trained weights, whose logits are large,
    that is more than the noise of the same batch.
    """

    name = "then-in-waves"
    first = 1
