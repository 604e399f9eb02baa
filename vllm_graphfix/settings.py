"""Environment -> `Settings`, once a process."""

# No `from __future__ import annotations`: as in `fix.py`, for the named tuple.

from collections.abc import Container, Iterable, Mapping
from enum import Enum
from typing import NamedTuple, TypeVar

from vllm_graphfix.fix import Mode, variable
from vllm_graphfix.shadow import rate
from vllm_graphfix.shadow.rate import Action

T = TypeVar("T")

PREFIX = "VLLM_GRAPHFIX"
ROLLOUT = "VLLM_GRAPHFIX_ROLLOUT"
ROLLOUT_KEY = "VLLM_GRAPHFIX_ROLLOUT_KEY"
SHADOW = "VLLM_GRAPHFIX_SHADOW"
SHADOW_ACTION = "VLLM_GRAPHFIX_SHADOW_ACTION"
DECISION = "VLLM_GRAPHFIX_DECISION"
STATUS_DIR = "VLLM_GRAPHFIX_STATUS_DIR"

_NAMED, _LISTED, _LONGEST_NAME = 20, 8, 80
"""Unknown names that are told one by one, and their characters: an environment may hold a hundred thousand, or one of a hundred thousand characters."""
_SAME = {"1": "on", "true": "on", "yes": "on", "0": "off", "false": "off", "no": "off"}


class Master(str, Enum):
    """The switch for everything."""

    ON = "on"
    OFF = "off"
    STRICT = "strict"
    OBSERVE = "observe"
    """Every fix that is left at `auto` is observed: also one that a later version of this package brings."""


class Settings(NamedTuple):
    master: Master
    modes: Mapping[str, Mode]
    """By the name of the fix; every fix has one, and none is `auto` where the master switch says `observe`."""
    explicit: frozenset[str]
    """Fixes whose mode the user set by name."""
    problems: tuple[str, ...]
    """What was set and means nothing here, each with what would."""
    rollout: str
    """The percentage as it was written; empty if none is set."""
    rollout_key: str
    """Empty for the host name."""
    shadow: str = rate.OFF
    """How often a replay is checked, as `rate.normal` writes it."""
    shadow_action: Action = Action.REPORT


def names(fixes: Iterable[str]) -> tuple[str, ...]:
    """Every name of the interface, to be registered with vLLM."""
    return (PREFIX, *map(variable, fixes), ROLLOUT, ROLLOUT_KEY, SHADOW, SHADOW_ACTION, DECISION, STATUS_DIR)


def read(environment: Mapping[str, str], fixes: Iterable[str], observed: Container[str] = ()) -> Settings:
    """What *environment* says of the fixes named *fixes*, of which *observed* are observed where it says nothing.

    Never raises; what means nothing ends up in `problems`.
    """
    fixes = tuple(fixes)
    problems: list[str] = []
    master = _choice(environment, PREFIX, {m.value: m for m in Master}, Master.ON, problems)
    modes: dict[str, Mode] = {}
    for name in fixes:
        default = Mode.OBSERVE if name in observed else Mode.AUTO
        modes[name] = _choice(environment, variable(name), {m.value: m for m in Mode}, default, problems)
        if master is Master.OBSERVE and modes[name] is Mode.AUTO:
            modes[name] = Mode.OBSERVE
    shadow = _rate(environment, problems)
    action = _choice(environment, SHADOW_ACTION, {a.value: a for a in Action}, Action.REPORT, problems)
    known = names(fixes)
    unknown = sorted(key for key in environment if key not in known and key.upper().startswith(PREFIX))
    problems += [
        f"{key if key.isprintable() and len(key) <= _LONGEST_NAME else shown(key)} is not a variable of vllm-graphfix{_nearest(key.upper(), known)} It has no effect"
        for key in unknown[:_NAMED]
    ]
    if len(unknown) > _NAMED:
        problems.append(
            f"{len(unknown) - _NAMED} more variables that begin with {PREFIX} are unknown and have no effect"
        )
    explicit = frozenset(name for name in fixes if environment.get(variable(name), "").strip())
    rollout, key = environment.get(ROLLOUT, "").strip(), environment.get(ROLLOUT_KEY, "").strip()
    return Settings(master, modes, explicit, tuple(problems), rollout, key, shadow, action)


def _rate(environment: Mapping[str, str], problems: list[str]) -> str:
    given = environment.get(SHADOW, "").strip()
    try:
        return rate.normal(given)
    except ValueError as error:
        problems.append(f"{SHADOW}={shown(given)} {error}; valid: {rate.VALID}. It has no effect")
        return rate.OFF


def _choice(environment: Mapping[str, str], key: str, values: Mapping[str, T], default: T, problems: list[str]) -> T:
    given = environment.get(key, "").strip()
    word = given.lower()
    if not word:
        return default
    value = values.get(_SAME.get(word, word))
    if value is None:
        problems.append(f"{key}={shown(given)} is not a valid value{_nearest(word, values)} It has no effect")
        return default
    return value


def _nearest(word: str, candidates: Iterable[str]) -> str:
    from difflib import get_close_matches  # only for somebody who mistyped

    ordered = sorted(candidates)
    close = get_close_matches(word[:100], ordered, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    if len(ordered) > _LISTED:  # of variables there are more than a line of a log should hold
        return "; `vllm-graphfix status` lists the fixes, and x-y has the variable VLLM_GRAPHFIX_X_Y."
    return f"; valid: {', '.join(ordered)}."


def shown(value: str) -> str:
    """A value fit for one line of a log, whatever it was."""
    return repr(value if len(value) <= 40 else value[:37] + "...")


def printable(text: str) -> str:
    """*text* on one line, without what a terminal would act on; directions of writing are among that."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else " " if letter.isspace() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
