"""The rollout decision: a sticky, monotonic choice by percentage of the engines that get the fixes.

An engine's first process makes it once and passes it to all others in an environment variable.
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
"""Buckets of all engines; one bucket is 0.01 %."""

_SCHEMA = 1
_ENGINE = r"[0-9a-f]{16}"
_LONGEST = 12_288
"""Characters of an encoded decision. A usual one has 600; with every value and eight names invalid it has 9,100."""
_LONGEST_KEY = 200
"""Characters of the key that a decision holds. Linux starts no process that has a variable of 128 KiB, and a long key
of escapes would reach that."""
_MODES = frozenset(mode.value for mode in Mode)


def bucket(key: str) -> int:
    """Return the bucket of *key*, 0 to 9,999.

    It is the first eight bytes of SHA-256 over ``vllm-graphfix:`` and the key, big-endian, modulo 10,000.

    An engine is in the rollout if its bucket is below the percentage times 100. An engine that is in at 5 % is
    therefore in at 6 %.
    """
    import hashlib  # here, since the import takes milliseconds and only a percentage needs it

    digest = hashlib.sha256(b"vllm-graphfix:" + key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % BUCKETS


def buckets_of(percentage: str) -> int:
    """Convert ``25``, ``25%`` or ``0.5 %`` to buckets; raise ValueError, whose message follows the value.

    A percentage finer than one bucket is refused, since rounding in either direction would surprise. The digits are
    therefore read as decimals, not as floating point.
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
    buckets = int(matched[1]) * 100 + int(fraction.ljust(2, "0"))
    if buckets > BUCKETS:
        raise ValueError("is more than 100 %")
    return buckets


def as_percentage(buckets: int) -> str:
    """Write a number of buckets as a percentage, such as ``25 %`` or ``0.5 %``."""
    return f"{buckets / 100:.2f}".rstrip("0").rstrip(".") + " %"


class Decision(NamedTuple):
    """The choice of an engine's first process for all its processes.

    It depends on the environment, and on the engine's flags where its nodes decide separately (`needing_a_key`).
    """

    engine: str
    """A random name of this engine, 16 hexadecimal digits."""
    instance: str | None
    """The engine's `VllmConfig.instance_id`, which vLLM passes to its processes; None before there is one."""
    graphfix: str
    vllm: str
    host: str
    pid: int
    """The process on *host* that decided."""
    key: str | None
    bucket: int | None
    """None if no percentage is set: every engine is in the rollout then."""
    rollout: int | None
    """Buckets in the rollout; None if no percentage is set."""
    canary: bool
    refused: str | None
    """The reason if the percentage is invalid or lacks a key: no engine is in the rollout then, and none is patched."""
    master: environment.Master
    modes: Mapping[str, Mode]
    shadow: str = shadow_rate.OFF
    """The rate of checked replays, as `shadow_rate.normal` writes it."""
    shadow_action: shadow_rate.Action = shadow_rate.Action.REPORT
    shadow_graphs: shadow_rate.ShadowGraphs = shadow_rate.ShadowGraphs.FULL
    agreement_timeout: float = environment.DEFAULT_TIMEOUT
    """Seconds that ranks wait for each other before a capture."""
    addresses: environment.Addresses = environment.Addresses.REPORT
    claims: environment.Claims = environment.Claims.REPORT
    bypass: environment.Bypass = environment.Bypass.OFF
    metadata: environment.Metadata = environment.Metadata.OFF
    traced: environment.Traced = environment.Traced.OFF
    kv_marks: str = shadow_rate.OFF
    """The fraction of requests whose finished cache blocks are marked, as `shadow_rate.normal_fraction` writes it."""
    kv_marks_action: shadow_rate.MarksAction = shadow_rate.MarksAction.REPORT
    misconfigured: Mapping[str, str] = {}
    """Variables with an invalid value, and unknown variables, each with its value as `environment.brief` writes it."""
    trees: Mapping[str, str] = {}
    """Fixes that are switched on for unrecognised code, each with the `Diagnosis.tree` of that code."""

    @property
    def withheld(self) -> str | None:
        """The reason why this engine is not patched although the switch is on; None if it is in the rollout."""
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
        """The address watch of this engine; off outside the rollout, or with the master switch off."""
        return self.addresses if self._is_watched else environment.Addresses.OFF

    @property
    def checks(self) -> environment.Claims:
        """The watch of captures in this engine; off outside the rollout, or with the master switch off."""
        return self.claims if self._is_watched else environment.Claims.OFF

    @property
    def watches_calls(self) -> bool:
        """True if this engine watches for fixes that its graphs go past: in the rollout, with the master switch on."""
        return self._is_watched and self.bypass is environment.Bypass.REPORT

    @property
    def compares_metadata(self) -> bool:
        """True if this engine compares metadata of replays: in the rollout, with the master switch on."""
        return self._is_watched and self.metadata is environment.Metadata.REPORT

    @property
    def compares_traces(self) -> bool:
        """True if this engine compares arguments of compiled models: in the rollout, with the master switch on."""
        return self._is_watched and self.traced is environment.Traced.REPORT

    @property
    def marks(self) -> str:
        """The rate of marked blocks in this engine; off outside the rollout, or with the master switch off."""
        return self.kv_marks if self._is_watched else shadow_rate.OFF

    @property
    def aborts(self) -> bool:
        """True if a detector may abort requests of this engine."""
        of_marks = self.marks != shadow_rate.OFF and self.kv_marks_action is shadow_rate.MarksAction.ABORT
        of_shadow = self.shadow != shadow_rate.OFF and self.shadow_action is shadow_rate.Action.ABORT
        return of_marks or (of_shadow and self._is_watched)

    @property
    def _is_watched(self) -> bool:
        return self.canary and self.master is not environment.Master.OFF

    @property
    def is_off(self) -> bool:
        """True if the settings leave this engine stock: with the kill switch, or with a refused percentage."""
        return self.master is environment.Master.OFF or self.refused is not None

    def same_choice(self, other: "Decision") -> bool:
        """Return True if both choose the same for a process, ignoring the engine that they belong to."""

        def choice(decision: Decision) -> tuple[object, ...]:
            shadow = decision.shadow, decision.shadow_action, decision.shadow_graphs
            fixes = decision.withheld, decision.master, dict(decision.modes)
            marks = decision.kv_marks, decision.kv_marks_action
            watches = decision.addresses, decision.claims, decision.bypass, decision.metadata, decision.traced
            others = decision.agreement_timeout, dict(decision.misconfigured), dict(decision.trees)
            return (*fixes, *shadow, *marks, *watches, *others)

        return choice(self) == choice(other)

    @property
    def _corrects(self) -> bool:
        """True if engines in the rollout are patched where they need it: some fix is neither off nor only observed."""
        return self.master is not environment.Master.OFF and bool({Mode.AUTO, Mode.ON} & set(self.modes.values()))

    @property
    def applies(self) -> bool:
        """True if this engine gets the fixes that it needs."""
        return self.canary and self._corrects

    @property
    def percentage(self) -> float:
        """The percentage of engines with these settings that get the fixes that they need."""
        if not self._corrects or (self.rollout is None and self.refused is not None):
            return 0.0
        return 100.0 if self.rollout is None else self.rollout / 100

    def needing_a_key(self, separately: str) -> "Decision":
        """Refuse a decision that was made without a key in an engine whose nodes decide separately.

        *separately* is the flag that makes them do so. Without a key each node decides by its host name, so that
        decisions could differ; at 0 and at 100 % they cannot, and the decision stands.
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
        """Write this decision as one line of JSON, for the environment."""
        fields: dict[str, Any] = (
            {"schema": _SCHEMA}
            | self._asdict()
            | {"master": self.master.value, "shadow_action": self.shadow_action.value}
            | {"addresses": self.addresses.value, "claims": self.claims.value, "bypass": self.bypass.value}
            | {"metadata": self.metadata.value, "traced": self.traced.value}
            | {"kv_marks_action": self.kv_marks_action.value, "shadow_graphs": self.shadow_graphs.value}
        )
        fields["modes"] = {name: mode.value for name, mode in self.modes.items()}
        return json.dumps(fields, separators=(",", ":"))


def decide(wanted: environment.Settings, vllm: str, *, host: str | None = None) -> Decision:
    """Decide for a new engine in its first process. Never raises."""
    from vllm_graphfix._version import __version__

    host = host or os.uname().nodename
    key = rollout = engine_bucket = refused = None
    misconfigured = dict(wanted.misconfigured)
    if wanted.rollout is not None:
        key = wanted.rollout_key or host
        engine_bucket = bucket(key)
        try:
            rollout = buckets_of(wanted.rollout)
        except ValueError as error:
            # Not all engines: somebody who sets a percentage wants a part of the fleet.
            refused = (
                f"{environment.ROLLOUT}={text.brief_repr(wanted.rollout)} {error}; "
                "no engine gets the fixes until this is corrected"
            )
            misconfigured[environment.ROLLOUT] = environment.brief(wanted.rollout)
    canary = refused is None and (engine_bucket is None or rollout is None or engine_bucket < rollout)
    return Decision(
        engine=os.urandom(8).hex(),
        instance=None,
        graphfix=__version__,
        vllm=vllm,
        host=host,
        pid=os.getpid(),
        key=key if key is None or len(key) <= _LONGEST_KEY else f"{key[: _LONGEST_KEY - 1]}…",
        bucket=engine_bucket,
        rollout=rollout,
        canary=canary,
        refused=refused,
        master=wanted.master,
        modes=dict(wanted.modes),
        shadow=wanted.shadow,
        shadow_action=wanted.shadow_action,
        shadow_graphs=wanted.shadow_graphs,
        agreement_timeout=wanted.agreement_timeout,
        addresses=wanted.addresses,
        claims=wanted.claims,
        bypass=wanted.bypass,
        metadata=wanted.metadata,
        traced=wanted.traced,
        kv_marks=wanted.kv_marks,
        kv_marks_action=wanted.kv_marks_action,
        misconfigured=misconfigured,
        trees=dict(wanted.trees),
    )


def decode(text: str) -> Decision | None:
    """Read the output of `Decision.encode`; None for any other text, that of other versions included."""
    if len(text) > _LONGEST:
        return None
    try:
        fields = JsonObject(json.loads(text), "the decision")
        if not set(fields.keys()) <= {"schema", *Decision._fields} or fields.get("schema") != _SCHEMA:
            return None
        modes = fields.table("modes", lambda name, mode: isinstance(mode, str) and mode in _MODES)
        decision = Decision(
            engine=fields.name("engine", _ENGINE),  # checked, since the name of the engine's record begins with it
            instance=fields.text("instance") if fields.has("instance") else None,
            graphfix=fields.text("graphfix"),
            vllm=fields.text("vllm"),
            host=fields.text("host"),
            pid=fields.whole("pid"),
            key=fields.text("key", _LONGEST_KEY) if fields.has("key") else None,
            bucket=fields.whole("bucket", BUCKETS) if fields.has("bucket") else None,
            rollout=fields.whole("rollout", BUCKETS + 1) if fields.has("rollout") else None,
            canary=fields.truth("canary"),
            refused=fields.line("refused") if fields.has("refused") else None,
            master=environment.Master(fields.get("master")),
            modes={name: Mode(mode) for name, mode in modes.items()},
        )
        # Fields that later versions added: absent from the decision of an older one.
        added: dict[str, Any] = {name: _ADDED[name](fields, name) for name in _ADDED if name in fields}
        return decision._replace(**added)
    except (ValueError, RecursionError):  # the variable may hold anything; RecursionError: JSON nested too deep
        return None


def _timeout(fields: JsonObject, key: str) -> float:
    seconds = fields.number(key, environment.MAX_TIMEOUT)
    if type(fields.get(key)) is not float or seconds == 0:
        fields.refuse(key, "seconds")
    return seconds


_ADDED: dict[str, Callable[[JsonObject, str], Any]] = {
    "shadow": lambda fields, key: shadow_rate.normal(fields.text(key)),
    "shadow_action": lambda fields, key: shadow_rate.Action(fields.get(key)),
    "shadow_graphs": lambda fields, key: shadow_rate.ShadowGraphs(fields.get(key)),
    "agreement_timeout": _timeout,
    "addresses": lambda fields, key: environment.Addresses(fields.get(key)),
    "claims": lambda fields, key: environment.Claims(fields.get(key)),
    "bypass": lambda fields, key: environment.Bypass(fields.get(key)),
    "metadata": lambda fields, key: environment.Metadata(fields.get(key)),
    "traced": lambda fields, key: environment.Traced(fields.get(key)),
    "kv_marks": lambda fields, key: shadow_rate.normal_fraction(fields.text(key)),
    "kv_marks_action": lambda fields, key: shadow_rate.MarksAction(fields.get(key)),
    "misconfigured": lambda fields, key: fields.table(key, environment.is_brief),
    "trees": lambda fields, key: fields.table(
        key, lambda _, tree: isinstance(tree, str) and re.fullmatch(r"[0-9a-f]{16}", tree) is not None
    ),
}


def inherited_decision(encoded: str | None, vllm: str, fixes: frozenset[str]) -> Decision | None:
    """Decode another process's decision; None unless it is for this vLLM, these fixes and this version of the package.

    *encoded* is the value of the environment variable, None if it is not set.
    """
    from vllm_graphfix._version import __version__

    decision = decode(encoded or "")
    if decision is None or (decision.graphfix, decision.vllm) != (__version__, vllm) or decision.modes.keys() != fixes:
        return None
    return decision
