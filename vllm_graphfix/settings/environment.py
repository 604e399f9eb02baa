"""Environment -> `Settings`, once a process.

A value that means nothing fails closed: it is never read as the default where the default would patch something. So
does a name that means nothing, if it may have been meant to switch off, or to take a part of the fleet.
"""

# No `from __future__ import annotations`: as in `fix.py`, for the named tuple.

import re
from collections.abc import Callable, Container, Iterable, Mapping
from enum import Enum
from typing import NamedTuple, TypeVar

from vllm_graphfix import _variable_names
from vllm_graphfix.fix import Mode, variable
from vllm_graphfix.settings import shadow_rate
from vllm_graphfix.settings.shadow_rate import Action, MarksAction
from vllm_graphfix.text import brief_repr

T = TypeVar("T")

PREFIX = _variable_names.PREFIX
ROLLOUT = _variable_names.ROLLOUT
ROLLOUT_KEY = _variable_names.ROLLOUT_KEY
is_ours = _variable_names.is_ours
after_prefix = _variable_names.after_prefix
asks_for_less = _variable_names.asks_for_less
SHADOW = "VLLM_GRAPHFIX_SHADOW"
SHADOW_ACTION = "VLLM_GRAPHFIX_SHADOW_ACTION"
ADDRESSES = "VLLM_GRAPHFIX_ADDRESSES"
KV_MARKS = "VLLM_GRAPHFIX_KV_MARKS"
KV_MARKS_ACTION = "VLLM_GRAPHFIX_KV_MARKS_ACTION"
AGREEMENT_TIMEOUT = "VLLM_GRAPHFIX_AGREEMENT_TIMEOUT"
DECISION = "VLLM_GRAPHFIX_DECISION"
STATUS_DIR = "VLLM_GRAPHFIX_STATUS_DIR"

PATIENCE = 600.0
"""Seconds that ranks wait for one another before a capture: as long as vLLM itself waits for an engine to start."""
MOST_PATIENCE = 7 * 24 * 3600
_VLLM_PATIENCE = "VLLM_ENGINE_READY_TIMEOUT_S"

_NAMED, _LISTED, _LONGEST_NAME = 20, 8, 80
"""Unknown names that are told one by one, and their characters: an environment may hold a hundred thousand, or one of a
hundred thousand characters."""
_HANDED_ON, _LONGEST_HANDED_ON = 8, 64
"""Unknown names that a decision has, and their characters: it has room for few besides every variable's value."""
_LONGEST_VALUE = 40
_ON_A_TREE = re.compile(r"on:([0-9a-f]{16})")
_SAME = {"1": "on", "true": "on", "yes": "on", "0": "off", "false": "off", "no": "off"}


class Master(str, Enum):
    """The switch for everything."""

    ON = "on"
    OFF = "off"
    STRICT = "strict"
    OBSERVE = "observe"
    """Every fix that is left at `auto` is observed: also one that a later version of this package brings."""


class Addresses(str, Enum):
    """What follows where a tensor that graphs hold has moved."""

    REPORT = "report"
    REPAIR = "repair"
    """It is copied to where they have it, or they are taken out of use."""
    OFF = "off"
    """Nothing is watched."""


class Settings(NamedTuple):
    master: Master
    modes: Mapping[str, Mode]
    """By the name of the fix; every fix has one, and none is `auto` where the master switch says `observe`."""
    trees: Mapping[str, str]
    """Fixes that are on for unrecognised code, by ``on:TREE``, each with that `Diagnosis.tree`."""
    explicit: frozenset[str]
    """Fixes whose mode the user set by name."""
    problems: tuple[str, ...]
    """What was set and means nothing here, each with what would."""
    rollout: str | None
    """The percentage as it was written, empty if it was set and is empty; None if it is not set."""
    rollout_key: str
    """Empty for the host name."""
    shadow: str = shadow_rate.OFF
    """How often a replay is checked, as `rate.normal` writes it."""
    shadow_action: Action = Action.REPORT
    agreement_timeout: float = PATIENCE
    """Seconds that ranks wait for one another before a capture."""
    addresses: Addresses = Addresses.REPORT
    kv_marks: str = shadow_rate.OFF
    """Of how many requests the finished cache blocks are marked, as `shadow_rate.normal_fraction` writes it."""
    kv_marks_action: MarksAction = MarksAction.REPORT
    misconfigured: Mapping[str, str] = {}
    """Variables whose value means nothing, and names that do, each with that value as `brief` writes it;
    `rollout.decide` adds the percentage."""


def names(fixes: Iterable[str]) -> tuple[str, ...]:
    """Every name of the interface, to be registered with vLLM."""
    rollout, watches = (ROLLOUT, ROLLOUT_KEY), (SHADOW, SHADOW_ACTION, ADDRESSES, KV_MARKS, KV_MARKS_ACTION)
    return (PREFIX, *map(variable, fixes), *rollout, *watches, AGREEMENT_TIMEOUT, DECISION, STATUS_DIR)


def own_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of *environment* that `read` may go by, or complain of."""
    return {name: value for name, value in environment.items() if name.upper().startswith("VLLM_") or is_ours(name)}


def read(environment: Mapping[str, str], fixes: Iterable[str], observed: Container[str] = ()) -> Settings:
    """What *environment* says of the fixes named *fixes*, of which *observed* are observed where it says nothing.

    Never raises; what means nothing ends up in `problems`.
    """
    fixes = tuple(fixes)
    problems: list[str] = []
    values = _Values(environment, problems)
    master = values.one_of(PREFIX, {m.value: m for m in Master}, Master.ON, Master.OFF, "Nothing is patched")
    if values.name_what_is_unknown(names(fixes)):
        master = Master.OFF
    modes: dict[str, Mode] = {}
    trees: dict[str, str] = {}
    for name in fixes:
        if named := _ON_A_TREE.fullmatch(environment.get(variable(name), "").strip().lower()):
            modes[name], trees[name] = Mode.ON, named[1]
            continue
        default = Mode.OBSERVE if name in observed else Mode.AUTO
        choices = {m.value: m for m in Mode}
        modes[name] = values.one_of(variable(name), choices, default, Mode.OFF, f"{name} is off")
        if master is Master.OBSERVE and modes[name] is Mode.AUTO:
            modes[name] = Mode.OBSERVE
    shadow = values.parsed(
        SHADOW, shadow_rate.normal, shadow_rate.OFF, f"valid: {shadow_rate.VALID}. The shadow check is off"
    )
    actions = {a.value: a for a in Action}
    action = values.one_of(SHADOW_ACTION, actions, Action.REPORT, Action.REPORT, f"It counts as {Action.REPORT.value}")
    watches = {a.value: a for a in Addresses}
    addresses = values.one_of(ADDRESSES, watches, Addresses.REPORT, Addresses.OFF, "No address is watched")
    kv_marks = values.parsed(
        KV_MARKS,
        shadow_rate.normal_fraction,
        shadow_rate.OFF,
        f"valid: {shadow_rate.VALID_FRACTION}. No cache block is marked",
    )
    marks_actions = {a.value: a for a in MarksAction}
    marks_action = values.one_of(
        KV_MARKS_ACTION, marks_actions, MarksAction.REPORT, MarksAction.REPORT, f"It counts as {Action.REPORT.value}"
    )
    patience = _default_patience(environment)
    timeout = values.parsed(
        AGREEMENT_TIMEOUT, seconds, patience, f"valid: seconds, such as 900. Ranks wait {patience:.0f} s"
    )
    explicit = frozenset(name for name in fixes if environment.get(variable(name), "").strip())
    # Set and empty is not unset: a pod label that is gone gives an empty value, and must not put every engine in.
    rollout = environment[ROLLOUT].strip() if ROLLOUT in environment else None
    key = environment.get(ROLLOUT_KEY, "").strip()
    return Settings(
        master,
        modes,
        trees,
        explicit,
        tuple(problems),
        rollout,
        key,
        shadow,
        action,
        timeout,
        addresses,
        kv_marks,
        marks_action,
        values.misconfigured,
    )


class _Values:
    """Reads one variable after the other, and keeps what means nothing."""

    def __init__(self, environment: Mapping[str, str], problems: list[str]) -> None:
        self._environment = environment
        self._problems = problems
        self.misconfigured: dict[str, str] = {}

    def one_of(self, key: str, values: Mapping[str, T], default: T, otherwise: T, so: str) -> T:
        """The value of *key*, *default* if it is not set, *otherwise* if it means nothing.

        *so* says what follows then.
        """
        given = self._environment.get(key, "").strip()
        word = given.lower()
        if not word:
            return default
        value = values.get(_SAME.get(word, word))
        if value is not None:
            return value
        nearest = _nearest(word, {each: each for each in values})
        return self._nothing(key, given, f"is not a valid value{nearest} {so}", otherwise)

    def parsed(self, key: str, parse: Callable[[str], T], default: T, so: str) -> T:
        """What *parse*, which raises ValueError with what is wrong, makes of the value; *default* if there is none."""
        given = self._environment.get(key, "").strip()
        if not given:
            return default
        try:
            return parse(given)
        except ValueError as error:
            return self._nothing(key, given, f"{error}; {so}", default)

    def name_what_is_unknown(self, known: Iterable[str]) -> bool:
        """Report the variables that are ours by their prefix and none of those *known*.

        Returns if one of them may have been meant to switch off: nothing is patched then. It is named before others.
        """
        known = frozenset(known)
        endings = {after_prefix(each): each for each in known}
        unknown: dict[str, bool] = {}
        for key, value in self._environment.items():
            if key not in known and is_ours(key) and ((less := asks_for_less(key, value)) or value.strip()):
                unknown[key] = less
        ordered = sorted(unknown, key=lambda key: (not unknown[key], key))
        for key in ordered[:_NAMED]:
            label = key if key.isprintable() and len(key) <= _LONGEST_NAME else brief_repr(key)
            so = (
                "It may have been meant to switch off: nothing is patched until this is corrected"
                if unknown[key]
                else "It has no effect"
            )
            nearest = _nearest(after_prefix(key), endings)
            self._problems.append(f"{label} is not a variable of vllm-graphfix{nearest} {so}")
        if len(ordered) > _NAMED:
            self._problems.append(
                f"{len(ordered) - _NAMED} more variables that begin with {PREFIX} are unknown and have no effect"
            )
        for key in ordered[:_HANDED_ON]:
            name = re.sub(r"[^A-Za-z0-9_]", "_", key)[:_LONGEST_HANDED_ON]
            self.misconfigured[f"{name}_" if name in known else name] = brief(self._environment[key])
        return True in unknown.values()

    def _nothing(self, key: str, given: str, what: str, otherwise: T) -> T:
        self.misconfigured[key] = brief(given)
        self._problems.append(f"{key}={brief_repr(given)} {what} until this is corrected")
        return otherwise


def seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?", text) or not 0 < float(text) <= MOST_PATIENCE:
        raise ValueError(f"is not a number of seconds up to {MOST_PATIENCE}")
    return float(text)


def _default_patience(environment: Mapping[str, str]) -> float:
    """The default timeout, which is not less than what vLLM was told to wait for its engines.

    Where stock starts, the ranks' comparison must not end it.
    """
    try:
        return float(min(max(int(PATIENCE), int(environment.get(_VLLM_PATIENCE, ""))), MOST_PATIENCE))
    except ValueError:  # vLLM says what is wrong with its own variable
        return PATIENCE


def _nearest(word: str, candidates: Mapping[str, str]) -> str:
    """Name the one of *candidates* whose key is nearly *word*: a hint to another one would mislead."""
    from difflib import get_close_matches  # only for somebody who mistyped

    ordered = sorted(candidates)
    close = get_close_matches(word[:100], ordered, n=1, cutoff=0.75)
    if close:
        return f"; did you mean {candidates[close[0]]}?"
    if len(ordered) > _LISTED:  # of variables there are more than a line of a log should hold
        return "; `vllm-graphfix status` lists the fixes, and x-y has the variable VLLM_GRAPHFIX_X_Y."
    return f"; valid: {', '.join(ordered)}."


def effective(misconfigured: Mapping[str, str], master: str, fixes: Iterable[str]) -> list[str]:
    """Return those of *misconfigured* that switch off a fix, a detector or all, each as ``name=value``.

    With *master* strict all of them: an engine stops over a name without effect, too, and then on all ranks.
    """
    off = {*names(fixes)} - {SHADOW_ACTION, KV_MARKS_ACTION, AGREEMENT_TIMEOUT}
    return [
        f"{name}={value}"
        for name, value in sorted(misconfigured.items())
        if master == Master.STRICT.value or name in off or asks_for_less(name, value)
    ]


def is_brief(name: object, value: object) -> bool:
    """Return if *name* and *value* may be a variable of ours, or a mistyped one, and its value as `brief` writes it."""
    told = isinstance(value, str) and len(value) <= _LONGEST_VALUE and value.isascii() and value.isprintable()
    return told and isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_]{1,80}", name) is not None and is_ours(name)


def was_always_brief(name: str) -> bool:
    """Return if readers of before names were `misconfigured` take *name* for a variable's."""
    return re.fullmatch(rf"{PREFIX}[A-Z0-9_]{{0,64}}", name) is not None


def brief(value: str) -> str:
    """A value that means nothing, short and in ASCII.

    It is fit for a record, a label, and a decision with one for every variable.
    """
    told = ascii(value)[1:-1]
    return told if len(told) <= _LONGEST_VALUE else f"{told[: _LONGEST_VALUE - 3]}..."
