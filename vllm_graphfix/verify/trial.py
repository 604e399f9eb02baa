"""What a fix is tried with, and where that is found: read by `verify` and by the tests, never in an engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.verify.engine.cases import Case
    from vllm_graphfix.verify.measurement import Measurement

_HERE = "vllm_graphfix.verify"


class Scenario(Protocol):
    """vLLM's own classes on the CPU, driven without and with CUDA graphs."""

    def __call__(self, *, hit: bool = True) -> Measurement:
        """The same computation twice. On stock the two differ; with the fix they are equal, and something is counted.

        Not *hit*: the same code, without what it takes for the defect to show. The two are equal everywhere, and
        nothing is counted.
        """


class Watched(NamedTuple):
    """The replays of a scenario, made so that the shadow check looks at each of them."""

    graphs: str
    """What it has to be wrapped around: a name of `shadow.runners.RUNNERS`."""
    scenario: str
    """``module:function``: takes *hit* as a `Scenario` does. False where this vLLM replays no such graphs in it."""
    metadata: tuple[str, ...] = ()
    """The classes of the attention metadata, of one of which each of these graphs has been captured; none without."""


class Trial(NamedTuple):
    """What shows that a fix is needed, and that it works.

    It is the `TRIAL` of a module of `trials` named as the fix's.
    """

    case: Case | None = None
    """An engine on a GPU in which the defect shows. Without one, `verify --device gpu` skips the fix and says so."""
    further: tuple[Case, ...] = ()
    """More of them, where the defect is in several places of vLLM: each is judged for itself."""
    watched: Watched | None = None
    """A scenario whose defect shows in what a replay puts out."""
    watched_further: tuple[Watched, ...] = ()
    """The same on graphs of other kinds: each is judged for itself."""
    engine: str = ""
    """The engine of `case`, for people."""
    shows_in: str = ""
    """Where the defect shows in it, or on the CPU double, for people."""
    unwatched: str = ""
    """Why the shadow check cannot see the defect in a replay, as a clause, for every other scenario."""


# Modules are named in strings here and nowhere else in `verify`: a fix is found by its name alone.
def trial_of(fix: str) -> Trial:
    """The trial of the fix named *fix*."""
    trial: Trial = import_module(f"{_HERE}.trials.{_module(fix)}").TRIAL
    return trial


def scenario_of(fix: str) -> str:
    """The place of the scenario of the fix named *fix*, ``module:function``.

    It is `run` of the trial's own module, which then imports vLLM inside of it, or of the module of
    `double.scenarios` named as the fix's, whose import imports vLLM.
    """
    trial = import_module(f"{_HERE}.trials.{_module(fix)}")
    return f"{trial.__name__}:run" if hasattr(trial, "run") else f"{_HERE}.double.scenarios.{_module(fix)}:run"


def further_cases(fix: str, source: Source | None = None) -> tuple[Case, ...]:
    """What else is run on a GPU for *fix*, which has a case then; with *source*, on that vLLM alone."""
    return tuple(
        case for case in trial_of(fix).further if source is None or case.shows_on is None or case.shows_on(source)
    )


def _module(fix: str) -> str:
    return fix.replace("-", "_")
