"""What a fix is tried with: read by `verify` and by the tests, never in an engine."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Concern
    from vllm_graphfix.fix import Verdict
    from vllm_graphfix.verify.engine.cases import Case
    from vllm_graphfix.verify.measurement import Measurement


class Scenario(Protocol):
    """vLLM's own classes on the CPU, driven without and with CUDA graphs."""

    def __call__(self, *, hit: bool = True) -> Measurement:
        """The same computation twice. On stock the two differ; with the fix they are equal, and something is counted.

        Not *hit*: the same code, without what it takes for the defect to show. The two are equal everywhere, and nothing is counted.
        """


class Edit(NamedTuple):
    """A change of a stock release's source, and what the diagnosis has to make of it."""

    what: str
    """In a few words: the test's name."""
    release: str
    path: str
    pattern: str
    """Regular expression, where ``^`` and ``$`` are ends of lines; it has to occur. ``\\A`` in a file that the release lacks: a new one."""
    replacement: str
    verdict: Verdict
    also: tuple[tuple[str, str, str], ...] = ()
    """Path, pattern and replacement of what else is changed, one after the other: in another file, or in the same."""
    shape: str = ""
    """What the diagnosis has to call it, if that matters: a shape that no stock release has is tested because an edit names it."""
    runs: bool = False
    """The scenario runs on it, and `verify` proves the fix there: for a remedy that is cut out."""


class Served(NamedTuple):
    """A command line of `vllm serve`, and whether the fix concerns it."""

    release: str
    line: str
    """Variables in front included. The model is one of `tests/served_models.py` (``./llama``, ``./mamba2``, ``./v3``, …), or ``./model``."""
    answer: Concern
    because: str
    """Some words of the reason."""
    gpu: str | None = None
    model: Mapping[str, Any] = MappingProxyType({})
    """The config.json of ``./model``."""


class Watched(NamedTuple):
    """The replays of a scenario, made so that the shadow check looks at each of them."""

    graphs: str
    """What it has to be wrapped around: a name of `shadow.runners.RUNNERS`."""
    scenario: str
    """``module:function``: takes *hit* as a `Scenario` does. False where this vLLM replays no such graphs in it."""


class Trial(NamedTuple):
    """What shows that a fix is needed, that it works, and that its diagnosis can tell."""

    scenario: str
    """Where the `Scenario` is, ``module:function``: mostly in a module of its own, which imports vLLM."""
    edits: tuple[Edit, ...]
    """At least: upstream's remedy written into an affected release (`fixed`), and a change that the plugin does not recognise (`unrecognised`)."""
    served: tuple[Served, ...]
    """At least one that it concerns, and one that it does not."""
    case: Case | None = None
    """An engine on a GPU in which the defect shows. Without one, `verify --device gpu` skips the fix and says so."""
    further: tuple[Case, ...] = ()
    """More of them, where the defect is in several places of vLLM: each is judged for itself."""
    watched: Watched | None = None
    """Of a scenario whose defect shows in what a replay puts out."""
    watched_further: tuple[Watched, ...] = ()
    """The same on graphs of other kinds: each is judged for itself."""
    unwatched: str = ""
    """Of any other: a clause that says why the shadow check cannot see the defect in a replay."""
