"""The plugin's wrappers taken off vLLM and put back between two steps of one engine.

Two engines that are the same differ by several per cent on a shared machine, and one engine from step to step by far
less. Graphs stay what they were captured as, with the fixes: what differs is all that the plugin does in a step.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

ORDER = (True, False, False, True)
"""With the wrappers, and without: what drifts cancels out, and each has one step after a change and one without."""


class Switch:
    """Sets the wrappers of the fixes that are on vLLM now."""

    def __init__(self) -> None:
        from vllm_graphfix.patching import sites

        self._sites = [site for site in sites._sites.values() if site.layers]
        # The plugin looks now and then whether its wrappers still stand, and gives up those that do not.
        sites.Site.lost = lambda _: None  # type: ignore[assignment]
        # `from target import name` has carried some of them into other modules.
        ours = {site.installed: site.stock for site in self._sites}
        modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"]
        self._copies: list[tuple[Any, str, FunctionType, FunctionType]] = [
            (module, name, value, ours[value])
            for module in modules
            for name, value in [*vars(module).items()]
            if type(value) is FunctionType and value in ours
        ]

    @property
    def functions(self) -> list[str]:
        """Names of vLLM's functions that are wrapped."""
        return sorted(site.name for site in self._sites)

    def set(self, *, on: bool) -> None:
        """Sets all of them, also where nothing changes: a class that is written to drops what Python has cached."""
        for site in self._sites:
            setattr(site.owner, site.attribute, site.installed if on else site.stock)
        for module, name, ours, stock in self._copies:
            setattr(module, name, ours if on else stock)


def in_turns(switch: Switch, step: Callable[[], float], count: int, *, control: bool = False) -> list[float]:
    """Seconds of *count* steps, in `ORDER`; with *control* the wrappers are off in all of them."""
    try:
        seconds = []
        for on in itertools.islice(itertools.cycle(ORDER), count):
            switch.set(on=on and not control)
            seconds.append(step())
        return seconds
    finally:
        switch.set(on=True)


def ratios_of(seconds: Iterable[float]) -> list[float]:
    """Of each `ORDER` of *seconds*: those without wrappers, relative to those with."""
    return [
        (first + second) / (before + after)
        for before, first, second, after in zip(*[iter(seconds)] * len(ORDER), strict=False)
    ]


class Ratio(NamedTuple):
    """How fast steps with wrappers are, relative to those without: a median, and where it lies with 95 % confidence."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Ratio:
        """*seconds* of steps in `ORDER`; what is left at their end is not compared. Raises ValueError for none."""
        ratios = sorted(ratios_of(seconds))
        if not ratios:
            raise ValueError(f"{len(ORDER)} steps are needed")
        middle, margin = len(ratios) / 2, 0.98 * len(ratios) ** 0.5
        low, high = max(0, int(middle - margin)), min(len(ratios) - 1, int(middle + margin))
        return cls(statistics.median(ratios), ratios[low], ratios[high])

    def text(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} – {self.high:.3f})"


def judged(ratios: Sequence[Ratio], target: float) -> str:
    """Whether all *ratios* reach *target*; ``within noise`` where their intervals reach it."""
    if all(ratio.median >= target for ratio in ratios):
        return "met"
    return "within noise" if all(ratio.high >= target for ratio in ratios) else "not met"
