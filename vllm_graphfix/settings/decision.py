"""Which engines get the fixes: a sticky, monotonic choice by percentage.

It is made once for an engine and handed on to its processes.
"""

# No `from __future__ import annotations`: as in `fix.py`, for the named tuple.

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vllm_graphfix import text
from vllm_graphfix.fix import Mode
from vllm_graphfix.settings import environment, shadow_rate
from vllm_graphfix.settings.json_object import JsonObject

BUCKETS = 10_000
"""A percentage is a number of buckets: 0.01 % is one."""

_SCHEMA = 1
_ENGINE = r"[0-9a-f]{16}"
_LONGEST = 12_288
"""Characters of a decision; ours have some 600, and 9,100 where every value and eight names mean nothing."""
_LONGEST_KEY = 200
"""Characters of a key that a decision tells. Linux starts no process with a variable of 128 KiB, which a long key made
of escapes would be."""
_MODES = frozenset(mode.value for mode in Mode)


def bucket(key: str) -> int:
    """The bucket of *key*, 0 to 9,999.

    It is the first eight bytes of SHA-256 over ``vllm-graphfix:`` and the key, big-endian, modulo 10,000.

    An engine is in the rollout if its bucket is below the percentage times 100. So whoever is in at 5 % is in at 6 %.
    """
    import hashlib  # milliseconds, and only where a percentage is set

    digest = hashlib.sha256(b"vllm-graphfix:" + key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % BUCKETS


def buckets_of(percentage: str) -> int:
    """How many buckets ``25``, ``25%`` or ``0.5 %`` is; raises ValueError with what is wrong.

    Decimal digits, not floating point: a percentage finer than one bucket is refused, not rounded, since both
    directions would surprise.
    """
    text = percentage.strip().removesuffix("%").strip()
    if not percentage.strip():
        raise ValueError("is empty: set a percentage, or unset it")
    matched = re.fullmatch(r"([0-9]{1,3})(?:\.([0-9]{1,6}))?", text)
    if matched is None:
        raise ValueError("is not a percentage such as 25, 25% or 0.5%")
    fraction = (matched[2] or "").rstrip("0")
    if len(fraction) > 2:
        raise ValueError("is finer than 0.01 %, the smallest step")
    found = int(matched[1]) * 100 + int(fraction.ljust(2, "0"))
    if found > BUCKETS:
        raise ValueError("is more than 100 %")
    return found


def as_percentage(buckets: int) -> str:
    """A number of buckets as people write it: ``25 %``, ``0.5 %``."""
    return f"{buckets / 100:.2f}".rstrip("0").rstrip(".") + " %"


class Decision(NamedTuple):
    """What the first process of an engine decided for every process after it.

    From its environment, and from the engine's flags where its nodes decide separately (`needing_a_key`).
    """

    engine: str
    """Made up anew for each engine: 16 hexadecimal digits."""
    instance: str | None
    """`VllmConfig.instance_id` of the engine, which travels with the configuration; None before there is one."""
    graphfix: str
    vllm: str
    host: str
    pid: int
    """The process ID of the process that decided, on *host*."""
    key: str | None
    bucket: int | None
    """None where no percentage is set: every engine is in."""
    rollout: int | None
    """Buckets that are in; None where no percentage is set."""
    canary: bool
    refused: str | None
    """Why the percentage puts nobody in, where it means nothing or wants a key; nothing is patched then."""
    master: environment.Master
    modes: Mapping[str, Mode]
    shadow: str = shadow_rate.OFF
    """How often a replay is checked, as `shadow_rate.normal` writes it."""
    shadow_action: shadow_rate.Action = shadow_rate.Action.REPORT
    agreement_timeout: float = environment.PATIENCE
    """Seconds that ranks wait for one another before a capture."""
    addresses: environment.Addresses = environment.Addresses.REPORT
    kv_marks: str = shadow_rate.OFF
    """Of how many requests the finished cache blocks are marked, as `shadow_rate.normal_fraction` writes it."""
    kv_marks_action: shadow_rate.MarksAction = shadow_rate.MarksAction.REPORT
    misconfigured: Mapping[str, str] = {}
    """Variables whose value means nothing, and names that do, each with that value as `environment.brief` writes it."""
    trees: Mapping[str, str] = {}
    """Fixes that are on for unrecognised code, each with the `Diagnosis.tree` of that code."""

    @property
    def withheld(self) -> str | None:
        """Why nothing is patched in this engine although the switch is on; None if it is in the rollout."""
        if self.canary:
            return None
        if self.refused is not None:
            return self.refused
        return (
            f"bucket {self.bucket} of {BUCKETS:,} is not among the first {as_percentage(self.rollout or 0)} "
            f"({environment.ROLLOUT}, key {self.key!r})"
        )

    @property
    def watches(self) -> environment.Addresses:
        """What is done about addresses in this engine: nothing outside the rollout, or where all is off."""
        return self.addresses if self._is_watched else environment.Addresses.OFF

    @property
    def marks(self) -> str:
        """How many of this engine's finished blocks are marked: none outside the rollout, or where all is off."""
        return self.kv_marks if self._is_watched else shadow_rate.OFF

    @property
    def aborts(self) -> bool:
        """Whether requests may be ended in this engine."""
        of_marks = self.marks != shadow_rate.OFF and self.kv_marks_action is shadow_rate.MarksAction.ABORT
        of_shadow = self.shadow != shadow_rate.OFF and self.shadow_action is shadow_rate.Action.ABORT
        return of_marks or (of_shadow and self._is_watched)

    @property
    def _is_watched(self) -> bool:
        return self.canary and self.master is not environment.Master.OFF

    @property
    def is_off(self) -> bool:
        """Whether this engine is stock for all that its settings say.

        That is so with the kill switch, and with a percentage that nobody can be in by.
        """
        return self.master is environment.Master.OFF or self.refused is not None

    def same_choice(self, other: "Decision") -> bool:
        """Whether both mean the same for a process, whichever engine they are for."""

        def choice(decision: Decision) -> tuple[object, ...]:
            shadow = decision.shadow, decision.shadow_action
            fixes = decision.withheld, decision.master, dict(decision.modes)
            marks = decision.kv_marks, decision.kv_marks_action
            others = decision.agreement_timeout, decision.addresses, dict(decision.misconfigured), dict(decision.trees)
            return (*fixes, *shadow, *marks, *others)

        return choice(self) == choice(other)

    @property
    def _corrects(self) -> bool:
        """Whether an engine in the rollout gets a fix, if it needs one: not every fix is off or only observed."""
        return self.master is not environment.Master.OFF and bool({Mode.AUTO, Mode.ON} & set(self.modes.values()))

    @property
    def applies(self) -> bool:
        """Whether this engine gets the fixes that it needs."""
        return self.canary and self._corrects

    @property
    def percentage(self) -> float:
        """The percentage of the engines with these settings that get the fixes that they need."""
        if not self._corrects or (self.rollout is None and self.refused is not None):
            return 0.0
        return 100.0 if self.rollout is None else self.rollout / 100

    def needing_a_key(self, separately: str) -> "Decision":
        """This decision, made without a key, in an engine whose nodes decide *separately*, as that flag says.

        Their host names differ, and so would their decisions: then no node gets the fixes. At 0 and at 100 % they
        cannot differ.
        """
        if self.rollout is None or not 0 < self.rollout < BUCKETS:
            return self
        why = (
            f"{environment.ROLLOUT}={as_percentage(self.rollout)} without {environment.ROLLOUT_KEY}: with {separately} "
            "the nodes of an engine decide separately, and need one key that all of them have; "
            "no node gets the fixes until it is set"
        )
        return self._replace(canary=False, refused=why)

    def encode(self) -> str:
        """For the environment: one line of JSON."""
        told: dict[str, Any] = (
            {"schema": _SCHEMA}
            | self._asdict()
            | {"master": self.master.value, "shadow_action": self.shadow_action.value}
            | {"addresses": self.addresses.value, "kv_marks_action": self.kv_marks_action.value}
        )
        told["modes"] = {name: mode.value for name, mode in self.modes.items()}
        return json.dumps(told, separators=(",", ":"))


def decide(wanted: environment.Settings, vllm: str, *, host: str | None = None) -> Decision:
    """The decision of a new engine whose first process this is. Never raises."""
    from vllm_graphfix._version import __version__

    host = host or os.uname().nodename
    key = rollout = found = refused = None
    misconfigured = dict(wanted.misconfigured)
    if wanted.rollout is not None:
        key = wanted.rollout_key or host
        found = bucket(key)
        try:
            rollout = buckets_of(wanted.rollout)
        except ValueError as error:
            # All engines would be the other reading. Whoever wrote a percentage wanted a part of the fleet.
            refused = (
                f"{environment.ROLLOUT}={text.brief_repr(wanted.rollout)} {error}; "
                "no engine gets the fixes until this is corrected"
            )
            misconfigured[environment.ROLLOUT] = environment.brief(wanted.rollout)
    canary = refused is None and (found is None or rollout is None or found < rollout)
    return Decision(
        os.urandom(8).hex(),
        None,
        __version__,
        vllm,
        host,
        os.getpid(),
        key if key is None or len(key) <= _LONGEST_KEY else f"{key[: _LONGEST_KEY - 1]}…",
        found,
        rollout,
        canary,
        refused,
        wanted.master,
        dict(wanted.modes),
        wanted.shadow,
        wanted.shadow_action,
        wanted.agreement_timeout,
        wanted.addresses,
        wanted.kv_marks,
        wanted.kv_marks_action,
        misconfigured,
        dict(wanted.trees),
    )


def decode(text: str) -> Decision | None:
    """What `Decision.encode` made; None for anything else, that of another version of this package included."""
    if len(text) > _LONGEST:
        return None
    try:
        said = JsonObject(json.loads(text), "the decision")
        if not set(said.keys()) <= {"schema", *Decision._fields} or said.get("schema") != _SCHEMA:
            return None
        modes = said.table("modes", lambda name, mode: isinstance(mode, str) and mode in _MODES)
        decision = Decision(
            engine=said.name("engine", _ENGINE),  # the name of a file begins with it
            instance=said.text("instance") if said.has("instance") else None,
            graphfix=said.text("graphfix"),
            vllm=said.text("vllm"),
            host=said.text("host"),
            pid=said.whole("pid"),
            key=said.text("key") if said.has("key") else None,
            bucket=said.whole("bucket", BUCKETS) if said.has("bucket") else None,
            rollout=said.whole("rollout", BUCKETS + 1) if said.has("rollout") else None,
            canary=said.truth("canary"),
            refused=said.line("refused") if said.has("refused") else None,
            master=environment.Master(said.get("master")),
            modes={name: Mode(mode) for name, mode in modes.items()},
        )
        # What later versions have added; an older one leaves it out.
        added: dict[str, Any] = {name: _ADDED[name](said, name) for name in _ADDED if name in said}
        return decision._replace(**added)
    except (ValueError, RecursionError):
        return None


def _timeout(said: JsonObject, key: str) -> float:
    seconds = said.number(key, environment.MOST_PATIENCE)
    if type(said.get(key)) is not float or seconds == 0:
        said.refuse(key, "seconds")
    return seconds


_ADDED: dict[str, Callable[[JsonObject, str], Any]] = {
    "shadow": lambda said, key: shadow_rate.normal(said.text(key)),
    "shadow_action": lambda said, key: shadow_rate.Action(said.get(key)),
    "agreement_timeout": _timeout,
    "addresses": lambda said, key: environment.Addresses(said.get(key)),
    "kv_marks": lambda said, key: shadow_rate.normal_fraction(said.text(key)),
    "kv_marks_action": lambda said, key: shadow_rate.MarksAction(said.get(key)),
    "misconfigured": lambda said, key: said.table(key, environment.is_brief),
    "trees": lambda said, key: said.table(
        key, lambda _, tree: isinstance(tree, str) and re.fullmatch(r"[0-9a-f]{16}", tree) is not None
    ),
}


def inherited_decision(left: str | None, vllm: str, fixes: frozenset[str]) -> Decision | None:
    """The decision that another process *left*, if it is for this vLLM and this version of the package."""
    from vllm_graphfix._version import __version__

    found = decode(left or "")
    if found is None or (found.graphfix, found.vllm) != (__version__, vllm) or found.modes.keys() != fixes:
        return None
    return found
