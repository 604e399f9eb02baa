"""Environment -> `Settings`, once a process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple, TypeVar

from vllm_graphfix.fix import Mode, variable

T = TypeVar("T")

PREFIX = "VLLM_GRAPHFIX"
ROLLOUT = "VLLM_GRAPHFIX_ROLLOUT"
RESERVED = (ROLLOUT, "VLLM_GRAPHFIX_ROLLOUT_KEY", "VLLM_GRAPHFIX_DECISION", "VLLM_GRAPHFIX_STATUS_DIR")
"""Names of the interface that this version does not act on yet."""

_SAME = {"1": "on", "true": "on", "yes": "on", "0": "off", "false": "off", "no": "off"}


class Master(str, Enum):
    """The switch for everything."""

    ON = "on"
    OFF = "off"
    STRICT = "strict"


class Settings(NamedTuple):
    master: Master
    modes: Mapping[str, Mode]
    """By the name of the fix; every fix has one."""
    explicit: frozenset[str]
    """Fixes whose mode the user set by name."""
    problems: tuple[str, ...]
    """What was set and means nothing here, each with what would."""
    withheld: str | None
    """Why nothing is patched although the master switch is on."""

    def loud(self, name: str) -> bool:
        """Whether the engine must not start without the fix where it is needed."""
        return self.master is Master.STRICT or self.modes[name] is Mode.ON


def names(fixes: Iterable[str]) -> tuple[str, ...]:
    """Every name of the interface, to be registered with vLLM."""
    return (PREFIX, *map(variable, fixes), *RESERVED)


def read(environment: Mapping[str, str], fixes: Iterable[str]) -> Settings:
    """What *environment* says of the fixes named *fixes*. Never raises; what means nothing ends up in `problems`."""
    fixes = tuple(fixes)
    problems: list[str] = []
    master = _choice(environment, PREFIX, {m.value: m for m in Master}, Master.ON, problems)
    modes: dict[str, Mode] = {}
    for name in fixes:
        modes[name] = _choice(environment, variable(name), {m.value: m for m in Mode}, Mode.AUTO, problems)
        if modes[name] is Mode.OBSERVE:
            problems.append(f"{variable(name)}=observe comes with a later version; until then the fix is off")
    known = names(fixes)
    problems += [
        f"{key} means nothing{_nearest(key.upper(), known)} It changes nothing"
        for key in sorted(environment)
        if key not in known and key.upper().startswith(PREFIX)
    ]
    withheld = None
    rollout = environment.get(ROLLOUT, "").strip()
    if rollout and rollout.rstrip("%").strip() not in ("100", "100.0"):
        withheld = f"{ROLLOUT}={_shown(rollout)} needs a later version; this one does not patch a part of a fleet, so it patches nothing"
        problems.append(withheld)
    explicit = frozenset(name for name in fixes if environment.get(variable(name), "").strip())
    return Settings(master, modes, explicit, tuple(problems), withheld)


def _choice(environment: Mapping[str, str], key: str, values: Mapping[str, T], default: T, problems: list[str]) -> T:
    given = environment.get(key, "").strip()
    word = given.lower()
    if not word:
        return default
    value = values.get(_SAME.get(word, word))
    if value is None:
        problems.append(f"{key}={_shown(given)} means nothing{_nearest(word, values)} It changes nothing")
        return default
    return value


def _nearest(word: str, candidates: Iterable[str]) -> str:
    from difflib import get_close_matches  # only for somebody who mistyped

    ordered = sorted(candidates)
    close = get_close_matches(word[:100], ordered, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; valid: {', '.join(ordered)}."


def _shown(value: str) -> str:
    """A value fit for one line of a log, whatever it was."""
    return repr(value if len(value) <= 40 else value[:37] + "...")
