"""Parse the environment into `Settings`, once a process.

An invalid value fails closed: it is never read as the default where the default would patch something. An unknown
variable fails closed if its author may have meant to switch off, or to choose a part of the fleet.
"""

# No `from __future__ import annotations`: as in `fix.py`, for the named tuple.

import re
from collections.abc import Callable, Container, Iterable, Mapping
from enum import Enum
from typing import NamedTuple, TypeVar

from vllm_graphfix import _variable_names
from vllm_graphfix.fix import Mode, variable
from vllm_graphfix.settings import shadow_rate
from vllm_graphfix.settings.shadow_rate import Action, MarksAction, ShadowGraphs
from vllm_graphfix.text import brief_repr

T = TypeVar("T")
E = TypeVar("E", bound=Enum)

PREFIX = _variable_names.PREFIX
FIXES = _variable_names.FIXES
ROLLOUT = _variable_names.ROLLOUT
ROLLOUT_KEY = _variable_names.ROLLOUT_KEY
is_ours = _variable_names.is_ours
after_prefix = _variable_names.after_prefix
asks_for_less = _variable_names.asks_for_less
SHADOW = "VLLM_GRAPHFIX_SHADOW"
SHADOW_ACTION = "VLLM_GRAPHFIX_SHADOW_ACTION"
SHADOW_GRAPHS = "VLLM_GRAPHFIX_SHADOW_GRAPHS"
ADDRESSES = "VLLM_GRAPHFIX_ADDRESSES"
CLAIMS = "VLLM_GRAPHFIX_CLAIMS"
BYPASS = "VLLM_GRAPHFIX_BYPASS"
METADATA = "VLLM_GRAPHFIX_METADATA"
TRACED = "VLLM_GRAPHFIX_TRACED"
KV_MARKS = "VLLM_GRAPHFIX_KV_MARKS"
KV_MARKS_ACTION = "VLLM_GRAPHFIX_KV_MARKS_ACTION"
AGREEMENT_TIMEOUT = "VLLM_GRAPHFIX_AGREEMENT_TIMEOUT"
DECISION = "VLLM_GRAPHFIX_DECISION"
STATUS_DIR = "VLLM_GRAPHFIX_STATUS_DIR"

DEFAULT_TIMEOUT = 600.0
"""Seconds that ranks wait for each other before a capture: as long as vLLM itself waits for an engine to start."""
MAX_TIMEOUT = 7 * 24 * 3600
_VLLM_TIMEOUT = "VLLM_ENGINE_READY_TIMEOUT_S"

_MAX_REPORTED, _LONGEST_NAME = 20, 80
"""Unknown variables that are reported one by one, and the characters of a name: an environment may hold a hundred
thousand of them, or one of a hundred thousand characters."""
_MAX_LISTED = 8
"""Valid values that a message lists."""
_MAX_PASSED_ON, _LONGEST_PASSED_ON = 8, 64
"""Unknown variables that a decision holds, and the characters of a name: every variable's value has to fit, too."""
_LONGEST_VALUE = 40
_ON_A_TREE = re.compile(r"on:([0-9a-f]{16})")
_SET = "(set)"
_OF_A_SETTING = re.compile(
    r"|on|off|auto|observe|strict|report|repair|quarantine|abort|true|false|yes|no|none|disabled"
    r"|[0-9]{1,3}(\.[0-9]{1,2})? ?%?"
)
"""Values that `asks_for_less` goes by, and others that no secret has."""
_SAME = {"1": "on", "true": "on", "yes": "on", "0": "off", "false": "off", "no": "off"}


class Master(str, Enum):
    """The switch for everything."""

    ON = "on"
    OFF = "off"
    STRICT = "strict"
    OBSERVE = "observe"
    """Observe every fix whose mode is `auto`, those of later versions of this package included."""


class Addresses(str, Enum):
    """The response to a tensor that is no longer at the address that graphs captured."""

    REPORT = "report"
    REPAIR = "repair"
    """Copy the tensor to the captured address, or take the graphs out of use."""
    OFF = "off"
    """Watch no addresses."""


class Claims(str, Enum):
    """The response to a builder of attention metadata that takes decodes for prompts in a full graph."""

    REPORT = "report"
    OFF = "off"
    """Watch no capture."""


class Bypass(str, Enum):
    """The response to a fix that is in place and that full graphs go past."""

    OFF = "off"
    """Watch no calls."""
    REPORT = "report"


class Metadata(str, Enum):
    """The response to a full graph that replays on other attention metadata than its capture read."""

    OFF = "off"
    """Compare no metadata."""
    REPORT = "report"


class Traced(str, Enum):
    """The response to a compiled model that is called with other arguments than were traced."""

    OFF = "off"
    """Compare no arguments."""
    REPORT = "report"


class Settings(NamedTuple):
    master: Master
    modes: Mapping[str, Mode]
    """The mode of every fix, by its name; none is `auto` if the master switch is `observe`."""
    trees: Mapping[str, str]
    """Fixes that ``on:TREE`` switches on for unrecognised code, each with that `Diagnosis.tree`."""
    explicit: frozenset[str]
    """Fixes whose mode the user set by name."""
    problems: tuple[str, ...]
    """Messages about invalid values and unknown variables, each with what is valid."""
    rollout: str | None
    """The percentage as the user wrote it, empty if the variable is set and empty; None if it is not set."""
    rollout_key: str
    """The key to choose by; empty for the host name."""
    shadow: str = shadow_rate.OFF
    """The rate of checked replays, as `shadow_rate.normal` writes it."""
    shadow_action: Action = Action.REPORT
    shadow_graphs: ShadowGraphs = ShadowGraphs.FULL
    agreement_timeout: float = DEFAULT_TIMEOUT
    """Seconds that ranks wait for each other before a capture."""
    addresses: Addresses = Addresses.REPORT
    claims: Claims = Claims.REPORT
    bypass: Bypass = Bypass.OFF
    metadata: Metadata = Metadata.OFF
    traced: Traced = Traced.OFF
    kv_marks: str = shadow_rate.OFF
    """The fraction of requests whose finished cache blocks are marked, as `shadow_rate.normal_fraction` writes it."""
    kv_marks_action: MarksAction = MarksAction.REPORT
    misconfigured: Mapping[str, str] = {}
    """Variables with an invalid value, and unknown variables, each with its value as `brief` or `_published` writes it;
    `decision.decide` adds the percentage."""


def names(fixes: Iterable[str]) -> tuple[str, ...]:
    """Return every variable of this package, for vLLM's registry of variables."""
    watches = (SHADOW, SHADOW_ACTION, SHADOW_GRAPHS, ADDRESSES, CLAIMS, BYPASS, METADATA, TRACED)
    marks = (KV_MARKS, KV_MARKS_ACTION)
    others = (ROLLOUT, ROLLOUT_KEY, *watches, *marks, AGREEMENT_TIMEOUT, DECISION, STATUS_DIR)
    return (PREFIX, FIXES, *map(variable, fixes), *others)


def own_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of *environment* that `read` may use or complain about."""
    return {name: value for name, value in environment.items() if name == _VLLM_TIMEOUT or is_ours(name)}


def read(environment: Mapping[str, str], fixes: Iterable[str], observed: Container[str] = ()) -> Settings:
    """Parse the settings of *environment*. Never raises: invalid values and unknown variables end up in `problems`.

    *fixes* are the names of all fixes; those in *observed* are observed unless a variable says otherwise.
    """
    fixes = tuple(fixes)
    written = environment
    environment, unusable = expanded(written, fixes)
    values = _Values(environment, written)
    master = values.one_of(PREFIX, Master, Master.ON, Master.OFF, "Nothing is patched")
    if values.report_unknown(names(fixes)) or (unusable and values.refuse_entry(unusable, fixes)):
        master = Master.OFF
    modes, trees = values.modes(fixes, observed, master)
    default_timeout = _default_timeout(environment)
    return Settings(
        master=master,
        modes=modes,
        trees=trees,
        explicit=frozenset(name for name in fixes if environment.get(variable(name), "").strip()),
        # Set and empty differs from unset: a pod label that has gone yields an empty value, which must not put every
        # engine in the rollout.
        rollout=environment[ROLLOUT].strip() if ROLLOUT in environment else None,
        rollout_key=environment.get(ROLLOUT_KEY, "").strip(),
        shadow=values.parsed(
            SHADOW, shadow_rate.normal, shadow_rate.OFF, f"valid: {shadow_rate.VALID}. The shadow check is off"
        ),
        shadow_action=values.one_of(SHADOW_ACTION, Action, Action.REPORT, Action.REPORT, "It counts as report"),
        shadow_graphs=values.one_of(
            SHADOW_GRAPHS, ShadowGraphs, ShadowGraphs.FULL, ShadowGraphs.FULL, "It counts as full"
        ),
        addresses=values.one_of(ADDRESSES, Addresses, Addresses.REPORT, Addresses.OFF, "No address is watched"),
        claims=values.one_of(CLAIMS, Claims, Claims.REPORT, Claims.OFF, "No capture is watched"),
        bypass=values.one_of(BYPASS, Bypass, Bypass.OFF, Bypass.OFF, "No call of a fix is watched"),
        metadata=values.one_of(METADATA, Metadata, Metadata.OFF, Metadata.OFF, "No metadata are compared"),
        traced=values.one_of(TRACED, Traced, Traced.OFF, Traced.OFF, "No arguments are compared"),
        kv_marks=values.parsed(
            KV_MARKS,
            shadow_rate.normal_fraction,
            shadow_rate.OFF,
            f"valid: {shadow_rate.VALID_FRACTION}. No cache block is marked",
        ),
        kv_marks_action=values.one_of(
            KV_MARKS_ACTION, MarksAction, MarksAction.REPORT, MarksAction.REPORT, "It counts as report"
        ),
        agreement_timeout=values.parsed(
            AGREEMENT_TIMEOUT,
            seconds,
            default_timeout,
            f"valid: seconds, such as 900. Ranks wait {default_timeout:.0f} s",
        ),
        # Last, since parsing the values above collects both.
        problems=tuple(values.problems),
        misconfigured=values.misconfigured,
    )


def expanded(environment: Mapping[str, str], fixes: Iterable[str]) -> tuple[dict[str, str], str]:
    """Write variables that hold several settings as single ones, which win where they are set, too.

    Also returns the first entry of `FIXES` that is no ``name=mode``, or that names a fix twice; empty if there is none.
    """
    single = dict(environment)
    for rate, action in ((SHADOW, SHADOW_ACTION), (KV_MARKS, KV_MARKS_ACTION)):
        value, comma, second = environment.get(rate, "").partition(",")
        if comma and second.strip():
            single[rate] = value
            single[action] = environment.get(action, "").strip() or second
    unseen = set(fixes)
    for entry in environment.get(FIXES, "").split(","):
        name, _, mode = (part.strip() for part in entry.partition("="))
        name = name.lower().replace("_", "-")
        if not entry.strip():
            continue
        if name not in unseen or not mode:
            return single, entry.strip()
        unseen.remove(name)
        single[variable(name)] = environment.get(variable(name), "").strip() or mode
    return single, ""


class _Values:
    """Parses one variable after another, and collects invalid values."""

    def __init__(self, environment: Mapping[str, str], written: Mapping[str, str]) -> None:
        """Parse *environment*, as `expanded` returns it for the one that the user has *written*."""
        self._environment = environment
        self._written = written
        self.problems: list[str] = []
        self.misconfigured: dict[str, str] = {}

    def modes(
        self, fixes: Iterable[str], observed: Container[str], master: Master
    ) -> tuple[dict[str, Mode], dict[str, str]]:
        """Return the mode of each fix, and the tree of those that ``on:TREE`` switches on."""
        modes: dict[str, Mode] = {}
        trees: dict[str, str] = {}
        for name in fixes:
            if on_tree := _ON_A_TREE.fullmatch(self._environment.get(variable(name), "").strip().lower()):
                modes[name], trees[name] = Mode.ON, on_tree[1]
                continue
            default = Mode.OBSERVE if name in observed else Mode.AUTO
            modes[name] = self.one_of(variable(name), Mode, default, Mode.OFF, f"{name} is off")
            if master is Master.OBSERVE and modes[name] is Mode.AUTO:
                modes[name] = Mode.OBSERVE
        return modes, trees

    def one_of(self, key: str, choices: type[E], default: E, on_invalid: E, consequence: str) -> E:
        """Parse the value of *key* as one of *choices*: *default* if it is not set, *on_invalid* if it is none of them.

        *consequence* ends the message about an invalid value.
        """
        text = self._environment.get(key, "").strip()
        word = text.lower()
        if not word:
            return default
        values = {each.value: each for each in choices}
        value = values.get(_SAME.get(word, word))
        if value is not None:
            return value
        nearest = f"{_nearest(word, {each: each for each in values})} {consequence}"
        holder = self._holder(key)
        if holder == key:
            return self._refuse(key, text, f"is not a valid value{nearest}", on_invalid)
        what = "a mode" if holder == FIXES else "an action"
        return self._refuse(
            holder, self._written[holder], f"has {brief_repr(text)}, which is not {what}{nearest}", on_invalid
        )

    def parsed(self, key: str, parse: Callable[[str], T], default: T, consequence: str) -> T:
        """Parse the value of *key*; *default* if it is not set, or if *parse* raises ValueError.

        The message about an invalid value is that of the error, followed by *consequence*.
        """
        text = self._environment.get(key, "").strip()
        if not text:
            return default
        try:
            return parse(text)
        except ValueError as error:
            return self._refuse(key, self._written.get(key, text).strip(), f"{error}; {consequence}", default)

    def _holder(self, key: str) -> str:
        """Return the variable that holds the value of *key*: another one, where `expanded` has split it."""
        if self._written.get(key, "").strip():
            return key
        return {SHADOW_ACTION: SHADOW, KV_MARKS_ACTION: KV_MARKS}.get(key, FIXES)

    def report_unknown(self, known: Iterable[str]) -> bool:
        """Report variables that have our prefix and are not in *known*.

        Returns True if the author of one may have meant to switch off: nothing may be patched then. Those come first.
        """
        known = frozenset(known)
        endings = {after_prefix(each): each for each in known}
        unknown: dict[str, bool] = {}
        for key, value in self._environment.items():
            if key not in known and is_ours(key) and ((less := asks_for_less(key, value)) or value.strip()):
                unknown[key] = less
        ordered = sorted(unknown, key=lambda key: (not unknown[key], key))
        for key in ordered[:_MAX_REPORTED]:
            label = key if key.isprintable() and len(key) <= _LONGEST_NAME else brief_repr(key)
            consequence = (
                "It may have been meant to switch off: nothing is patched until this is corrected"
                if unknown[key]
                else "It has no effect"
            )
            nearest = _nearest(after_prefix(key), endings)
            self.problems.append(f"{label} is not a variable of vllm-graphfix{nearest} {consequence}")
        if len(ordered) > _MAX_REPORTED:
            self.problems.append(
                f"{len(ordered) - _MAX_REPORTED} more variables that begin with {PREFIX} are unknown and have no effect"
            )
        for key in ordered[:_MAX_PASSED_ON]:
            name = re.sub(r"[^A-Za-z0-9_]", "_", key)[:_LONGEST_PASSED_ON]
            # A cut or replaced name must not stand for a valid variable.
            self.misconfigured[f"{name}_" if name in known else name] = _published(self._environment[key])
        return True in unknown.values()

    def refuse_entry(self, entry: str, fixes: Iterable[str]) -> bool:
        """Report an *entry* of `FIXES` that is none; returns True."""
        fixes = tuple(fixes)
        name, equals, mode = (part.strip() for part in entry.partition("="))
        name = name.lower().replace("_", "-")
        if name in fixes and mode:
            problem = f"sets {name} a second time, in {brief_repr(entry)}."
        elif name in fixes:
            problem = f"names {name} without a mode; valid: {', '.join(f'{name}={each.value}' for each in Mode)}."
        elif equals:
            problem = (
                f"sets {brief_repr(name)}, which is not a fix{_nearest(name, {each: each for each in fixes}, _LIST)}"
            )
        else:
            problem = f"has {brief_repr(entry)}, which is not of the form NAME=MODE, such as {fixes[0]}=off."
        return self._refuse(FIXES, self._written[FIXES], f"{problem} Nothing is patched", on_invalid=True)

    def _refuse(self, key: str, text: str, problem: str, on_invalid: T) -> T:
        self.misconfigured[key] = brief(text)
        self.problems.append(f"{key}={brief_repr(text)} {problem} until this is corrected")
        return on_invalid


def seconds(text: str) -> float:
    """Parse a number of seconds; raise ValueError, whose message follows the value."""
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?", text) or not 0 < float(text) <= MAX_TIMEOUT:
        raise ValueError(f"is not a number of seconds up to {MAX_TIMEOUT}")
    return float(text)


def _default_timeout(environment: Mapping[str, str]) -> float:
    """Return the default timeout in seconds, at least as long as vLLM waits for its engines.

    A shorter one could end an engine that starts slowly, and that stock vLLM would have waited for.
    """
    try:
        return float(min(max(int(DEFAULT_TIMEOUT), int(environment.get(_VLLM_TIMEOUT, ""))), MAX_TIMEOUT))
    except ValueError:  # not set, or invalid, which vLLM itself reports
        return DEFAULT_TIMEOUT


_LIST = "`vllm-graphfix explain` lists them."


def _nearest(word: str, candidates: Mapping[str, str], otherwise: str = "") -> str:
    """Suggest the one of *candidates* whose key is close to *word*; without a close one, list what is valid.

    *otherwise* takes the place of the list.
    """
    from difflib import get_close_matches  # here, since only a mistyped value needs it

    ordered = sorted(candidates)
    close = get_close_matches(word[:100], ordered, n=1, cutoff=0.75)
    if close:
        return f"; did you mean {candidates[close[0]]}?"
    if otherwise:
        return f"; {otherwise}"
    if len(ordered) > _MAX_LISTED:  # variables, which are too many for a line of a log
        return "; `vllm-graphfix status` lists the fixes, and x-y has the variable VLLM_GRAPHFIX_X_Y."
    return f"; valid: {', '.join(ordered)}."


def effective(misconfigured: Mapping[str, str], master: str, fixes: Iterable[str]) -> list[str]:
    """Return those of *misconfigured* that switch off a fix, a detector or everything, each as ``name=value``.

    All of them if *master* is strict: an engine then stops for an unknown variable without effect, too, on all ranks.
    """
    rates = {SHADOW: shadow_rate.normal, KV_MARKS: shadow_rate.normal_fraction}
    off = {*names(fixes)} - {SHADOW_ACTION, SHADOW_GRAPHS, KV_MARKS_ACTION, AGREEMENT_TIMEOUT}
    # An invalid action behind a valid rate switches nothing off.
    off -= {each for each, parse in rates.items() if _is_valid(misconfigured.get(each, "").partition(",")[0], parse)}
    return [
        f"{name}={value}"
        for name, value in sorted(misconfigured.items())
        if master == Master.STRICT.value or name in off or asks_for_less(name, value)
    ]


def _is_valid(text: str, parse: Callable[[str], str]) -> bool:
    try:
        return bool(parse(text))
    except ValueError:
        return False


def is_brief(name: object, value: object) -> bool:
    """Return True for a name with our prefix, mistyped or not, and a value as `brief` writes it."""
    if not isinstance(name, str) or not isinstance(value, str):
        return False
    fits = len(value) <= _LONGEST_VALUE and value.isascii() and value.isprintable()
    return fits and re.fullmatch(r"[A-Za-z0-9_]{1,80}", name) is not None and is_ours(name)


def was_always_brief(name: str) -> bool:
    """Return True if versions that knew no unknown variables in `misconfigured` accept *name* there."""
    return re.fullmatch(rf"{PREFIX}[A-Z0-9_]{{0,64}}", name) is not None


def _published(value: str) -> str:
    """Return *value* of an unknown variable for all to read: `_SET` for it, unless it can only be a setting.

    The variable may be another program's, and hold its password, or ours, and hold the key of the rollout.
    """
    return value.strip() if _OF_A_SETTING.fullmatch(value.strip().lower()) else _SET


def brief(value: str) -> str:
    """Shorten *value* to 40 ASCII characters, for a record, a label, and a decision with one of every variable."""
    escaped = ascii(value)[1:-1]
    return escaped if len(escaped) <= _LONGEST_VALUE else f"{escaped[: _LONGEST_VALUE - 3]}..."
