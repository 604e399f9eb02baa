"""Names of environment variables that are the plugin's, and those that somebody has mistyped.

Imports nothing of the package: `vllm_graphfix.register` goes by it where nothing else can be imported.
"""

from __future__ import annotations

PREFIX = "VLLM_GRAPHFIX"
FIXES = "VLLM_GRAPHFIX_FIXES"
ROLLOUT = "VLLM_GRAPHFIX_ROLLOUT"
ROLLOUT_KEY = "VLLM_GRAPHFIX_ROLLOUT_KEY"

_EDITS = 2
"""Letters that may be missing, added or replaced in a mistyped word."""
_OF_A_PERCENTAGE = ("ROLLOUT", "CANARY", "PERCENT")
_OF_A_SWITCH = ("OFF", "DISABLE", "KILL")
_OF_ALL = frozenset({"ALL", "FIX", "FIXES", "MODE", "ON"})
"""Words that stand for the master switch if they are all that there is in a name; fixes' names have them, too."""
_MEANS_OFF = ("0", "false", "no", "off", "none", "disabled")


def is_ours(name: str) -> bool:
    """Return if *name* begins with the prefix of our variables, in any case, or within two letters of it."""
    return _after_prefix(name.upper()) is not None


def after_prefix(name: str) -> str:
    """Return what follows the prefix of our variables in *name*, in capitals; all of it where it has another one."""
    rest = _after_prefix(name.upper())
    return name.upper() if rest is None else rest


def asks_for_less(name: str, value: str) -> bool:
    """Return if *name*, which is no variable of ours, may have been meant to switch off, or to take a part of a fleet.

    It is within two letters of the master switch or of the percentage, or has a word for one of them in it, if need be
    with a value that means off. Empty, a percentage asks for nobody, and everything else is as if it were not set.
    """
    word = name.upper()
    rest = _after_prefix(word)
    if rest is None or name in (PREFIX, FIXES, ROLLOUT, ROLLOUT_KEY):
        return False
    if _within(rest, "ROLLOUT", _EDITS) or any(part in word for part in _OF_A_PERCENTAGE):
        return True
    if value.strip().lower() in _MEANS_OFF and ("ENABLE" in word or _OF_ALL.issuperset(rest.split("_"))):
        return True
    # A fix has SKIP in its name, at the end.
    of_a_switch = any(part in word for part in _OF_A_SWITCH) or rest.startswith("SKIP")
    return bool(value.strip()) and (of_a_switch or _within(word, PREFIX, _EDITS))


def _after_prefix(word: str) -> str | None:
    """Return what follows the prefix of *word*, in capitals; None if it has another one."""
    if word.startswith(PREFIX):
        return word[len(PREFIX) :].removeprefix("_")
    # A mistyped prefix ends where a word does: VLLM_GRAPHICS begins like ours, and is somebody else's.
    end = word.find("_", len(PREFIX) - _EDITS)
    while 0 <= end <= len(PREFIX) + _EDITS:
        if _within(word[:end], PREFIX, _EDITS):
            return word[end + 1 :]
        end = word.find("_", end + 1)
    return "" if end < 0 and _within(word, PREFIX, _EDITS) else None


def _within(word: str, other: str, edits: int) -> bool:
    """Return if at most so many *edits* make *other* of *word*: a letter inserted, removed or replaced."""
    if abs(len(word) - len(other)) > edits:
        return False
    same = 0
    while same < min(len(word), len(other)) and word[same] == other[same]:
        same += 1
    word, other = word[same:], other[same:]
    if not word or not other:
        return True  # what is left of one of them is no longer than `edits`
    if edits == 0:
        return False
    return any(_within(word[cut:], other[cut_other:], edits - 1) for cut, cut_other in ((1, 1), (1, 0), (0, 1)))
