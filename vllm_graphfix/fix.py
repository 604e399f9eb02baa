"""The vocabulary: a fix, its diagnosis, its mode, its state.

Named tuples, since this is imported in every process of an engine and dataclasses take several milliseconds to make.
Without ``from __future__ import annotations``: a named tuple compiles each annotation that is text, which for `Fix`
took half a millisecond.
"""

from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from vllm_graphfix.log import logger
from vllm_graphfix.source.part import Slice as Slice  # noqa: PLC0414 - part of this vocabulary

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function


class Verdict(str, Enum):
    """What the source of a vLLM says about one defect."""

    AFFECTED = "affected"
    FIXED = "fixed"
    """The component is there, with a remedy or without the cause."""
    ABSENT = "absent"
    """The component is not there."""
    UNRECOGNISED = "unrecognised"
    """The code is new to the plugin, and nothing is proven; `Diagnosis.defect_seen` tells two kinds apart."""


class Mode(str, Enum):
    """What the user wants of a fix."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"
    OBSERVE = "observe"


class State(str, Enum):
    """What a process did about a fix."""

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
    UNKNOWN = "unknown"
    """Cannot be told: nothing of the defect was seen, and the code is newer than what is known."""


class Code(str, Enum):
    """The kind of reason for a state: a closed list for metrics, in whose labels free text has no place."""

    NONE = "none"
    """The state says it all, or an older release wrote the record."""
    SETTING = "setting"
    """A variable says so."""
    MISCONFIGURED = "misconfigured"
    """A variable has a value that means nothing."""
    NEW_CODE = "new-code"
    """This vLLM's code is not recognised."""
    COMPANION = "companion"
    """A fix that it needs is not there."""
    FOREIGN_PATCH = "foreign-patch"
    """Somebody else's patch is on the same function."""
    ERROR = "error"
    """An error of the plugin's own."""
    IN_CAPTURE = "in-capture"
    """It failed while graphs were captured; if it is active all the same, these graphs are not used."""
    ENGINE = "engine"
    """A detector does not work with this engine, or its action does not."""
    NOTHING_MARKED = "nothing-marked"
    """The marks are on, and in more than 10,000 steps no block was marked."""
    GRAPH_LEFT_OUT = "graph-left-out"
    """The shadow check is on, and leaves out each step of some graph."""
    CANNOT_ABORT = "cannot-abort"
    """A detector is on, and cannot have requests ended, though that is its action."""
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
    """All functions that the verdict rests on are those of one stock release that was looked at."""
    defect_seen: bool = False
    """True of an `UNRECOGNISED` verdict whose code has the defect in new surroundings; False where none was seen."""
    tree: str = ""
    """Of `UNRECOGNISED` code that a patch would fit: 16 hexadecimal digits that stand for this very code, as
    ``VLLM_GRAPHFIX_X=on:TREE`` names it. Only who has run it can know whether it has the defect."""

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
    """Something that a fix looks for: what `observe` would have changed, and what `active` did change."""

    name: str
    meaning: str
    """One sentence for people: what one more of it says."""


class Counter:
    """How often a fix has met one of its events.

    Counted where it happens with ``counter.count += 1``, which takes no lock, allocates nothing that lasts and writes
    nothing: one thread runs the model, and who reads the number may be one behind.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


STEPPED_ASIDE = "stepped-aside"
"""The event of every fix: a call was left alone, since code that is not vLLM's own may have put it right."""


class Activity:
    """What one fix does in this process: whether it corrects or only counts, what it has counted, and how it failed.

    Its wrappers are given it. A wrapper that meets an error of its own lets vLLM do as stock does, for that call.
    """

    __slots__ = ("_aside", "_counters", "_foreign", "corrects", "error", "graphs")
    capturing: ClassVar[Callable[[], Hashable] | None] = None
    """A function that names the graph that is being captured; None while this process captures none.

    What fails during a capture stays in that graph for as long as it is replayed.
    """

    def __init__(self, events: Sequence[Event] = (), *, corrects: bool = True) -> None:
        self.corrects = corrects
        """Whether its wrappers put right what they find; without it they change nothing, and count."""
        self._counters = {event.name: Counter() for event in events}
        self._aside, self._foreign = Counter(), set[str]()
        self.error: str | None = None
        """The first error of a wrapper outside of captures."""
        self.graphs: dict[Hashable, str] = {}
        """Graphs whose capture it failed in, each with its first error; None stands for an error that belongs to no
        graph that is known."""

    def counter(self, event: Event) -> Counter:
        return self._counters[event.name]

    @property
    def counts(self) -> dict[str, int]:
        """The number of times that each event occurred, by its name, and that the fix stepped aside, if it ever did."""
        met = {name: counter.count for name, counter in self._counters.items()}
        return met | {STEPPED_ASIDE: self._aside.count} if self._aside.count else met

    def step_aside(self, name: str, foreign: str) -> None:
        """Count a call that the fix *name* leaves alone: *foreign*, which is not vLLM's own, may have it right.

        The log names that code once.
        """
        self._aside.count += 1
        if foreign not in self._foreign:
            self._foreign.add(foreign)
            logger.warning(
                "graphfix: %s steps aside: %s is not vLLM's own code, and may have put the defect right", name, foreign
            )

    def failed(self, error: Exception) -> None:
        """Takes down an error of a wrapper. Never raises.

        The first is in the log; what goes wrong once on the decode path may go wrong at every step.
        """
        first = self.error is None and not self.graphs
        try:
            reason = f"{type(error).__name__}: {error}"
            if Activity.capturing is not None:
                # What becomes of these graphs is decided after the capture, by all ranks together: see `CaptureGate`.
                self.graphs.setdefault(Activity.capturing(), reason)
            elif self.error is None:
                self.error = reason
        except Exception:  # an error that cannot be told, or no file to import from: it has failed all the same
            if Activity.capturing is not None:
                self.graphs[None] = type(error).__name__
            else:
                self.error = self.error or type(error).__name__
        if first:
            logger.warning("graphfix: a fix failed in use; vLLM runs its own code there", exc_info=error)

    def reset(self) -> None:
        """Begins anew, in a forked child: what was counted, and what failed, was its parent's."""
        for counter in self._counters.values():
            counter.count = 0
        self._aside.count = 0
        self.error, self.graphs = None, {}


Rationale = Literal["answers", "memory", "upstream"] | None
"""Why a fix is on by default.

``answers``: an engine on a GPU gave wrong answers, or none, and right ones with the fix. ``memory``: an engine on a GPU
wrote to memory that belongs to others. ``upstream``: upstream has merged the same remedy, with a reproduction.
"""
StockFunction = Callable[..., Any]
Wrap = Callable[[StockFunction, Activity], Callable[..., Any]]


class Patch(NamedTuple):
    """One name of one module, and what to put around the stock function found there."""

    module: str
    name: str
    """``Class.method``, or a name that the functions of the module look up in its globals."""
    wrap: Wrap
    """Takes the stock function and the activity of the fix, returns a plain function made with `functools.wraps`.

    It counts, and changes nothing unless the activity corrects."""
    observes: bool = True
    """Whether it is put there where the fix only counts, too."""
    leading: int | None = None
    """How many leading parameters of the stock function *wrap* goes by, and passes on all others as they come; None
    for all of them."""


class Companion(NamedTuple):
    """Another fix without which this one trades one defect for another."""

    name: str
    module: str
    """The import of this module makes the other fix necessary."""
    because: str
    may_be_off: bool
    """The user may switch the other one off by name and keep this one."""


if TYPE_CHECKING:  # to make a protocol takes as long as to read the index of the fixes

    class Patchable(Protocol):
        """What is diagnosed and put around vLLM's functions: a `Fix`, or what the shadow check wraps."""

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
    """One upstream correction, brought to stock wheels at run time: what the machinery needs of it.

    `authoring.fix` makes it; what people read of it stands beside it, in a page of the same name.
    """

    name: str
    runner: str | None
    """``V1`` or ``V2`` if an engine on the other model runner does not need it."""
    inspected_files: tuple[str, ...]
    """Every file of a vLLM that the diagnosis may look at, relative to the folder that holds ``vllm/``."""
    modules: tuple[str, ...]
    """Every module that a patch of this fix may touch."""
    diagnose: Callable[["Source"], Diagnosis]
    patches: Callable[[str], Sequence[Patch]]
    """The patches for the shape of code that the diagnosis named."""
    events: tuple[Event, ...]
    needs: Callable[[], "tuple[Need, ...]"]
    """Who is affected: what the defect needs of a deployment, for people and for `status --for`."""
    requires: tuple[Companion, ...] = ()
    default_rationale: Rationale = None
    """What it rests on that the fix is applied where the user sets nothing; None if it only counts there."""
    surroundings: tuple[Slice, ...] = ()
    """The code that the defect's data pass through: a verdict holds where all of it is that of a known release."""
    wordings: tuple[str, ...] = ()
    distant_code: str = ""
    """Names of functions, classes and arguments, space-separated, on which no verdict on a release rests. Where a fork
    has code of its own that has one of them, nothing is known of that fork."""
    """Patterns of statements that `diagnose` recognises, which slices leave out."""

    @property
    def variable(self) -> str:
        return variable(self.name)

    @property
    def default(self) -> Mode:
        """The mode where the user sets none."""
        return Mode.OBSERVE if self.default_rationale is None else Mode.AUTO


def variable(name: str) -> str:
    """The environment variable that holds the mode of the fix *name*."""
    return "VLLM_GRAPHFIX_" + name.upper().replace("-", "_")
