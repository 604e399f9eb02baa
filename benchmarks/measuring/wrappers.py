"""Taking the plugin's wrappers off vLLM and putting them back between two steps of one engine.

Two equal engines differ by several per cent on a shared machine, steps of one engine by far less. Graphs remain as they
were captured, with the fixes: the difference is what the plugin does in a step.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

ORDER = (True, False, False, True)
"""With wrappers or without: linear drift cancels out, and each has one step right after a switch and one not."""


class Switch:
    """The wrappers that fixes have put on vLLM."""

    def __init__(self) -> None:
        from vllm_graphfix.patching import sites

        self._sites = [site for site in sites._sites.values() if site.layers]
        # The plugin checks periodically that its wrappers are in place, and marks fixes as lost without them.
        sites.Site.lost = lambda _: None  # type: ignore[assignment]
        # `from target import name` has copied some of them into other modules.
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
        """The names of the functions of vLLM that are wrapped."""
        return sorted(site.name for site in self._sites)

    def set(self, *, on: bool) -> None:
        """Set all of them, changed or not: a write to a class invalidates Python's caches, in each step alike."""
        for site in self._sites:
            setattr(site.owner, site.attribute, site.installed if on else site.stock)
        for module, name, ours, stock in self._copies:
            setattr(module, name, ours if on else stock)


def in_turns(switch: Switch, step: Callable[[], float], count: int, *, control: bool = False) -> list[float]:
    """Return the seconds of *count* steps, in `ORDER`; for *control* the wrappers are off in all of them."""
    try:
        seconds = []
        for on in itertools.islice(itertools.cycle(ORDER), count):
            switch.set(on=on and not control)
            seconds.append(step())
        return seconds
    finally:
        switch.set(on=True)


def ratios_of(seconds: Iterable[float]) -> list[float]:
    """Return the speed with wrappers over that without, for each `ORDER` of *seconds*."""
    return [
        (first + second) / (before + after)
        for before, first, second, after in zip(*[iter(seconds)] * len(ORDER), strict=False)
    ]


class Ratio(NamedTuple):
    """The speed of steps with wrappers over that without: a median and its 95 % confidence interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Ratio:
        """Compare *seconds* of steps in `ORDER`, without an incomplete one at the end. Raises ValueError for none."""
        ratios = sorted(ratios_of(seconds))
        if not ratios:
            raise ValueError(f"{len(ORDER)} steps are needed")
        middle, margin = len(ratios) / 2, 0.98 * len(ratios) ** 0.5
        low, high = max(0, int(middle - margin)), min(len(ratios) - 1, int(middle + margin))
        return cls(statistics.median(ratios), ratios[low], ratios[high])

    def text(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} – {self.high:.3f})"


def judged(ratios: Sequence[Ratio], target: float) -> str:
    """Return ``met`` if all medians reach *target*, ``within noise`` if all intervals do, or ``not met``."""
    if all(ratio.median >= target for ratio in ratios):
        return "met"
    return "within noise" if all(ratio.high >= target for ratio in ratios) else "not met"
