"""The vocabulary: a fix, its diagnosis, its mode, its state.

Every process of an engine imports this module, so it has named tuples, not dataclasses, which take several
milliseconds to make. It has no ``from __future__ import annotations``: a named tuple compiles each annotation that is a
string, which took half a millisecond for `Fix`.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from vllm_graphfix.log import logger
from vllm_graphfix.source.part import Slice as Slice  # noqa: PLC0414 - part of this vocabulary

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function


class Verdict(str, Enum):
    """The judgement of a vLLM's source on one defect."""

    AFFECTED = "affected"
    FIXED = "fixed"
    """The component exists, with a remedy or without the cause."""
    ABSENT = "absent"
    """The component does not exist."""
    UNRECOGNISED = "unrecognised"
    """The code is new to the plugin, so nothing is proven; `Diagnosis.defect_seen` separates two kinds."""


class Mode(str, Enum):
    """The user's setting for a fix."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"
    OBSERVE = "observe"


class State(str, Enum):
    """The state of a fix in a process."""

    ACTIVE = "active"
    OBSERVING = "observing"
    OFF = "off"
    NOT_NEEDED = "not-needed"
    NOT_IN_CANARY = "not-in-canary"
    INCOMPATIBLE = "incompatible"
    CONFLICT = "conflict"
    FAILED = "failed"
    WAITING = "waiting"
    """Needed; vLLM has not imported the module yet."""
    BYPASSED = "bypassed"
    """Applied, but vLLM replays graphs without calling its wrappers."""
    UNKNOWN = "unknown"
    """Undecidable: the defect was not seen, and the code is newer than every known release."""


class Code(str, Enum):
    """The kind of reason for a state, a closed list for the labels of metrics."""

    NONE = "none"
    """The state needs no reason, or an older release wrote the record."""
    SETTING = "setting"
    """A variable says so."""
    MISCONFIGURED = "misconfigured"
    """A variable has an invalid value."""
    NEW_CODE = "new-code"
    """This vLLM's code is not recognised."""
    COMPANION = "companion"
    """A fix that it requires is missing."""
    FOREIGN_PATCH = "foreign-patch"
    """A patch of other code is on the same function."""
    ERROR = "error"
    """An error in the plugin."""
    IN_CAPTURE = "in-capture"
    """It failed while graphs were captured; if it is still active, these graphs are not used."""
    NOT_CALLED = "not-called"
    """Its wrappers are in place and vLLM does not call them."""
    ENGINE = "engine"
    """A detector, or its action, does not work with this engine."""
    NOTHING_MARKED = "nothing-marked"
    """The marks are on, and in more than 10,000 steps no block was marked."""
    GRAPH_EXCLUDED = "graph-left-out"
    """The shadow check is on, and skips every step of some graph."""
    CANNOT_ABORT = "cannot-abort"
    """A detector is on, but cannot end requests, which is its action."""
    UNDELIVERED = "undelivered"
    """Verdicts on requests do not reach the scheduler."""


class Diagnosis(NamedTuple):
    """The verdict on one defect, with the evidence."""

    verdict: Verdict
    reason: str
    where: str | None = None
    """Place in the source, ``path:line``."""
    shape: str = ""
    """Name of the recognised shape of the code; a fix chooses its patches by it."""
    known: bool = False
    """All functions that the verdict rests on are those of one recorded stock release."""
    defect_seen: bool = False
    """True for an `UNRECOGNISED` verdict on code that has the defect in new surroundings."""
    tree: str = ""
    """The identity, 16 hexadecimal digits, of `UNRECOGNISED` code that a patch would fit, for
    ``VLLM_GRAPHFIX_X=on:TREE``. The user may have found out by running it that it has the defect."""

    @classmethod
    def absent(cls, reason: str) -> "Diagnosis":
        return cls(Verdict.ABSENT, reason)

    @classmethod
    def fixed(cls, reason: str, where: str, shape: str = "") -> "Diagnosis":
        return cls(Verdict.FIXED, reason, where, shape)

    @classmethod
    def affected(cls, reason: str, where: str, shape: str) -> "Diagnosis":
        return cls(Verdict.AFFECTED, reason, where, shape)

    @classmethod
    def unrecognised(cls, what: str, place: "Function | str", *, defect_seen: bool = False) -> "Diagnosis":
        """Diagnose code that is not recognised.

        *what* is "… in a way" or the like; *place* is a function, or the path of a file where no function is known.
        """
        where = f"{place}:1" if isinstance(place, str) else place.where
        reason = f"{what} that this plugin does not recognise"
        return cls(Verdict.UNRECOGNISED, reason, where, defect_seen=defect_seen)

    @property
    def needs_action(self) -> bool:
        """Tell if the code of the defect is there, in known surroundings or in new ones."""
        return self.verdict is Verdict.AFFECTED or (self.verdict is Verdict.UNRECOGNISED and self.defect_seen)


class Event(NamedTuple):
    """An occurrence that a fix counts: one that it corrected or, observing, would have corrected."""

    name: str
    meaning: str
    """One sentence for people on what a count of 1 means."""


class Counter:
    """The number of times that one event of a fix occurred.

    ``counter.count += 1`` needs no lock: one thread runs the model, and a reader may be one behind.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


STEPPED_ASIDE = "stepped-aside"
"""The event of every fix: a call was not touched, since foreign code may have corrected it already."""


class Activity:
    """The activity of one fix in this process: its mode, counts and failures, shared by its wrappers.

    Where a wrapper fails, that call does what stock does.
    """

    __slots__ = ("_aside", "_counters", "_foreign", "corrects", "error", "graphs")
    capturing: ClassVar[Callable[[], Hashable] | None] = None
    """A function that returns the graph being captured, or None if it cannot tell; the attribute is None outside of
    captures.

    A failure during a capture stays in that graph for as long as it is replayed.
    """

    def __init__(self, events: Sequence[Event] = (), *, corrects: bool = True) -> None:
        self.corrects = corrects
        """True if its wrappers correct; they only count otherwise."""
        self._counters = {event.name: Counter() for event in events}
        self._aside, self._foreign = Counter(), set[str]()
        self.error: str | None = None
        """The first error of a wrapper outside of captures."""
        self.graphs: dict[Hashable, str] = {}
        """The first error in the capture of each graph; None stands for an unknown graph."""

    def counter(self, event: Event) -> Counter:
        return self._counters[event.name]

    @property
    def counts(self) -> dict[str, int]:
        """The number of times that each event occurred, by its name; `STEPPED_ASIDE` is among them if it ever did."""
        met = {name: counter.count for name, counter in self._counters.items()}
        return met | {STEPPED_ASIDE: self._aside.count} if self._aside.count else met

    def step_aside(self, name: str, foreign: str) -> None:
        """Count a call that the fix *name* does not touch, since *foreign* code may have corrected it already.

        The log names that code once.
        """
        self._aside.count += 1
        if foreign not in self._foreign:
            self._foreign.add(foreign)
            logger.warning(
                "graphfix: %s steps aside: %s is not vLLM's own code, and may have put the defect right", name, foreign
            )

    def failed(self, error: Exception) -> None:
        """Record an error of a wrapper. Never raises.

        Only the first is logged: an error on the decode path may recur at every step.
        """
        first = self.error is None and not self.graphs
        reason, capturing, graph = type(error).__name__, Activity.capturing, None
        # An error without a text, or no file to import from: it has failed all the same.
        with suppress(Exception):
            reason = f"{reason}: {error}"
            graph = capturing() if capturing is not None else None
        if capturing is None:
            self.error = self.error or reason
        else:
            # All ranks decide on these graphs together, after the capture: see `CaptureGate`.
            self.graphs.setdefault(graph, reason)
        if first:
            logger.warning("graphfix: a fix failed in use; vLLM runs its own code there", exc_info=error)

    def reset(self) -> None:
        """Forget counts and failures in a forked child: they are its parent's."""
        for counter in self._counters.values():
            counter.count = 0
        self._aside.count = 0
        self.error, self.graphs = None, {}


Rationale = Literal["answers", "memory", "upstream"] | None
"""The evidence by which a fix is on by default.

``answers``: an engine on a GPU gave wrong answers, or none, and right ones with the fix. ``memory``: an engine on a GPU
wrote to memory of others. ``upstream``: upstream has merged the same remedy, with a reproduction.
"""
StockFunction = Callable[..., Any]
Wrap = Callable[[StockFunction, Activity], Callable[..., Any]]


class Patch(NamedTuple):
    """A function of one module, and the wrapper to put around it."""

    module: str
    name: str
    """``Class.method``, or a name that the functions of the module look up in its globals."""
    wrap: Wrap
    """Takes the stock function and the activity of the fix, and returns a plain function made with `functools.wraps`.

    That function counts, and changes nothing unless the activity corrects."""
    observes: bool = True
    """True if it is also applied where the fix only counts."""
    leading: int | None = None
    """The number of leading parameters that *wrap* depends on, and passes on all others as they come; None for all."""


class Companion(NamedTuple):
    """Another fix, without which this one would trade its defect for another one."""

    name: str
    module: str
    """The module whose import makes the other fix necessary."""
    because: str
    may_be_off: bool
    """True if the user may switch the other one off by name and keep this one."""


if TYPE_CHECKING:  # making a protocol takes as long as reading the index of the fixes

    class Patchable(Protocol):
        """A diagnosis with patches: a `Fix`, or the hooks of the shadow check."""

        @property
        def name(self) -> str: ...
        @property
        def variable(self) -> str: ...
        @property
        def runner(self) -> str | None: ...
        @property
        def inspected_files(self) -> tuple[str, ...]: ...
        @property
        def modules(self) -> tuple[str, ...]: ...
        @property
        def requires(self) -> tuple[Companion, ...]: ...
        @property
        def events(self) -> tuple[Event, ...]: ...
        @property
        def diagnose(self) -> Callable[["Source"], Diagnosis]: ...
        @property
        def patches(self) -> Callable[[str], Sequence[Patch]]: ...


class Fix(NamedTuple):
    """The record of one upstream correction that is applied to stock wheels at run time.

    `authoring.fix` makes it; a page of the same name beside its module describes it for people.
    """

    name: str
    runner: str | None
    """``V1`` or ``V2`` if an engine on the other model runner does not need it."""
    inspected_files: tuple[str, ...]
    """Every file of a vLLM that the diagnosis may read, relative to the folder that holds ``vllm/``."""
    modules: tuple[str, ...]
    """Every module that a patch of this fix may touch."""
    diagnose: Callable[["Source"], Diagnosis]
    patches: Callable[[str], Sequence[Patch]]
    """The patches for the shape of code that the diagnosis named."""
    events: tuple[Event, ...]
    needs: Callable[[], "tuple[Need, ...]"]
    """The conditions under which a deployment is affected, for people and for `status --for`."""
    requires: tuple[Companion, ...] = ()
    default_rationale: Rationale = None
    """The evidence by which the fix is on by default; None if it only counts by default."""
    surroundings: tuple[Slice, ...] = ()
    """The code that the defect's data pass through: a verdict holds where all of it is known from a release."""
    recognised: tuple[str, ...] = ()
    """Patterns of statements that `diagnose` matches itself; slices leave each out once per listing."""
    distant_code: str = ""
    """Names of functions, classes and arguments, space-separated, on which no verdict on a release rests. A fork whose
    own code mentions one of them is not recognised."""
    changes_compiled_code: bool = False
    """True if torch.compile traces other code, or other inputs, where the fix is active: the keys of vLLM's compile
    cache then say so."""

    @property
    def variable(self) -> str:
        return variable(self.name)

    @property
    def default(self) -> Mode:
        """The mode where the user sets none."""
        return Mode.OBSERVE if self.default_rationale is None else Mode.AUTO


def variable(name: str) -> str:
    """Return the environment variable that holds the mode of the fix *name*."""
    return "VLLM_GRAPHFIX_" + name.upper().replace("-", "_")
