"""The rows of `fix_rows`: changes of vLLM's source and lines of `vllm serve`, each with the fix's answer."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict

if TYPE_CHECKING:
    from edited import Change


class Edit(NamedTuple):
    """A change of a stock release's source, and what the diagnosis has to make of it."""

    what: str
    """In a few words: the test's name."""
    release: str
    path: str
    pattern: str
    """Regular expression, where ``^`` and ``$`` are ends of lines; it has to occur. ``\\A`` in a file that the release
    lacks: a new one."""
    replacement: str
    verdict: Verdict = Verdict.UNRECOGNISED
    """Most edits are not recognised."""
    also: tuple[tuple[str, str, str], ...] = ()
    """Path, pattern and replacement of what else is changed, one after the other: in another file, or in the same."""
    shape: str = ""
    """What the diagnosis has to call it, if that matters: a shape that no stock release has is tested because an edit
    names it."""
    runs: bool = False
    """The scenario runs on it, and `verify` proves the fix there: for a remedy that is cut out."""
    remedy: bool = False
    """It cures the defect, whatever the diagnosis makes of it: what mutants of this release are compared with."""


REMEDY = "upstream's correction in other words"
LOOKALIKE = "looks like a correction"
SHAPE = "another shape"


class Wording(NamedTuple):
    """A wording that upstream might write, by hand: mutants that no operator makes."""

    kind: str
    release: str
    path: str
    changes: Mapping[str, Change | Mapping[str, Change]]
    """By name: of the file, or of several by their paths."""
    of: str = ""
    """`Edit.what` of what it is written into, if that is not the stock release."""


affects, does_not, unknown = Concern.CONCERNS, Concern.DOES_NOT, Concern.UNKNOWN


class Served(NamedTuple):
    """A command line of `vllm serve`, and whether the fix concerns it."""

    release: str
    line: str
    """Variables in front included. The model is one of `tests/support/served_models.py` (``./llama``, ``./mamba2``,
    ``./v3``, …), or ``./model``."""
    answer: Concern
    because: str
    """Some words of the reason."""
    gpu: str | None = None
    model: Mapping[str, Any] = MappingProxyType({})
    """The config.json of ``./model``."""


def edits_of(fix: str) -> tuple[Edit, ...]:
    """The edits of the trial of *fix*.

    There are at least upstream's remedy written into an affected release (`fixed`), and a change that the plugin does
    not recognise (`unrecognised`).
    """
    edits: tuple[Edit, ...] = _rows(fix).EDITS
    return edits


def wordings_of(fix: str) -> tuple[Wording, ...]:
    """The changes that its family has besides those that are generated; a trial need not have any."""
    wordings: tuple[Wording, ...] = getattr(_rows(fix), "WORDINGS", ())
    return wordings


def served_of(fix: str) -> tuple[Served, ...]:
    """At least one that it concerns, and one that it does not."""
    served: tuple[Served, ...] = _rows(fix).SERVED
    return served


def observed_of(fix: str) -> tuple[list[float], list[float]] | None:
    """The values of the probe of its case on stock, and with the fix; None where the case has no judge."""
    observed: tuple[list[float], list[float]] | None = getattr(_rows(fix), "OBSERVED", None)
    return observed


def _rows(fix: str) -> Any:
    return import_module(f"fix_rows.{fix.replace('-', '_')}")
