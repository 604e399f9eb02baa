"""Probes that send a few prompts at a time, and the next few once those are answered; they observe nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graphfix.verify.engine.probes import Probe

if TYPE_CHECKING:
    from vllm import LLM


class InWaves(Probe):
    """Waves of three: each begins with an empty batch, in slots with the contents of the wave before."""

    name = "in-waves"
    wave = 3
    """Prompts of a wave."""
    first = 0
    """The first pass that is in waves."""

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
    """Return *keywords* with their lists, which have an item for each prompt, cut to the *wave*."""
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
    """Only the second pass in waves, so that its batches have other sizes.

    The passes then differ by the rounding of kernels of other shapes. With trained weights, whose logits are large,
    that is more than the noise between equal batches.
    """

    name = "then-in-waves"
    first = 1
