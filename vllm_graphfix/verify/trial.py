"""Trials of fixes, found by a fix's name: read by `verify` and by the tests, never in an engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.verify.engine.case import Case
    from vllm_graphfix.verify.measurement import Measurement

_HERE = "vllm_graphfix.verify"


class Scenario(Protocol):
    """vLLM's own classes on the CPU, driven without and with CUDA graphs."""

    def __call__(self, *, trigger: bool = True) -> Measurement:
        """Run one computation twice. On stock the results differ; with the fix they are equal, and it counts events.

        Without *trigger*, the same code runs without the condition of the defect: the results are equal everywhere, and
        nothing is counted.
        """


class Watched(NamedTuple):
    """The replays of a scenario, made so that the shadow check looks at each of them."""

    graphs: str
    """What it has to be wrapped around: a name of `shadow.runners.RUNNERS`."""
    scenario: str
    """``module:function``: takes *trigger* as a `Scenario` does. False where this vLLM replays no such graphs in it."""
    metadata: tuple[str, ...] = ()
    """The classes of the attention metadata, of one of which each of these graphs has been captured; none without."""


class Trial(NamedTuple):
    """Cases and scenarios that show that a fix is needed and works.

    It is the `TRIAL` of the module of `trials` that has the fix's name.
    """

    case: Case | None = None
    """Engine on a GPU in which the defect shows. Without one, `verify --device gpu` skips the fix."""
    further: tuple[Case, ...] = ()
    """Further engines, for a defect in several places of vLLM; each is judged by itself."""
    watched: Watched | None = None
    """Scenario whose defect shows in the outputs of a replay."""
    watched_further: tuple[Watched, ...] = ()
    """Such scenarios on graphs of other kinds; each is judged by itself."""
    engine: str = ""
    """Description of the engine of *case*, for people."""
    shows_in: str = ""
    """Place where the defect shows in that engine or on the CPU double, for people."""
    unwatched: str = ""
    """Reason why the shadow check cannot see the defect in a replay, as a clause, if *watched* is None."""


# A fix's modules are found by its name, so that there is no list of them to keep up to date.
def trial_of(fix: str) -> Trial:
    """Return the trial of the fix named *fix*."""
    trial: Trial = import_module(f"{_HERE}.trials.{_module(fix)}").TRIAL
    return trial


def scenario_place(fix: str) -> str:
    """Return the place of the scenario of the fix named *fix*, ``module:function``.

    It is `run` of the trial's module, which imports vLLM inside of that function, or of the module of
    `double.scenarios` with the fix's name, whose import imports vLLM.
    """
    trial = import_module(f"{_HERE}.trials.{_module(fix)}")
    return f"{trial.__name__}:run" if hasattr(trial, "run") else f"{_HERE}.double.scenarios.{_module(fix)}:run"


def further_cases(fix: str, source: Source | None = None) -> tuple[Case, ...]:
    """Return the further cases of *fix*; with *source*, those alone that show on that vLLM."""
    return tuple(
        case for case in trial_of(fix).further if source is None or case.shows_on is None or case.shows_on(source)
    )


def _module(fix: str) -> str:
    return fix.replace("-", "_")
