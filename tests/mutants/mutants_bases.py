"""The bases of the mutants of a fix: vLLMs with its defect and vLLMs without it, from the rows of its trial.

These are releases with the defect and the same with upstream's remedy written in, a later release that has the remedy,
and the same with the remedy cut out.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from edited import changes
from fetch_vllm import ALL_RELEASES
from mutants_made import Base, Mutant
from stock import release_root
from table import verdict
from trial_rows import Edit, edits_of
from vllm_graphfix.fix import Diagnosis, Verdict


class Where(NamedTuple):
    base: Base
    twin: Base | None
    """The same release with the defect, of one that has the remedy."""


@cache
def bases(fix: str) -> tuple[Where, ...]:
    """Each direction: with the defect, and with the remedy."""
    affected = [release for release in ALL_RELEASES if verdict(fix, release) == "affected"]
    ends = sorted({edit.release for edit in _remedies(fix)}, key=affected.index)
    directions: list[Where] = []
    for release in dict.fromkeys([ends[-1], ends[0]]):
        defective = base_of(fix, release)
        directions += [
            Where(defective, None),
            Where(Base(release, "with the remedy", changes=defective.remedy), defective),
        ]
    cut_out = [edit for edit in edits_of(fix) if edit.runs and verdict(fix, edit.release) == "fixed"]
    after = ALL_RELEASES[ALL_RELEASES.index(affected[-1]) + 1 :]
    later = [edit.release for edit in cut_out] or [release for release in after if verdict(fix, release) == "fixed"]
    for release in later[:1]:
        twin = base_of(fix, release, cut_out[0].what) if cut_out else None
        directions += [Where(base_of(fix, release), twin), *([Where(twin, None)] if twin else [])]
    return tuple(directions)


@cache
def base_of(fix: str, release: str, what: str = "") -> Base:
    """*release* as it is, or with the edit *what* of the trial, and upstream's remedy for that."""
    if what:
        edit = next(edit for edit in edits_of(fix) if (edit.release, edit.what) == (release, what))
        back = tuple((path, functools.partial(_as_in, release, path)) for path in changes(edit))
        return Base(release, what, changes=_changes(edit), remedy=back)
    return Base(release, "stock", remedy=_remedy(fix, release) if verdict(fix, release) == "affected" else ())


def _remedies(fix: str) -> list[Edit]:
    """Return the edits that are written into releases with the defect; first those that the rows call a remedy."""
    rows = [edit for edit in edits_of(fix) if verdict(fix, edit.release) == "affected"]
    return [edit for edit in rows if edit.remedy] + [edit for edit in rows if edit.verdict is Verdict.FIXED]


def _remedy(fix: str, release: str) -> tuple[tuple[str, Any], ...]:
    """That of the release, or another's that has a place in it."""
    for edit in sorted(_remedies(fix), key=lambda edit: edit.release != release):
        with suppress(LookupError):
            for path, change in changes(edit).items():
                change(Base(release, "stock").text(path))
            return _changes(edit)
    return ()


def _changes(edit: Edit) -> tuple[tuple[str, Any], ...]:
    return tuple(changes(edit).items())


def _as_in(release: str, path: str, _: str) -> str:
    return (release_root(release) / path).read_text()


def where_of(mutant: Mutant) -> Where:
    """Return where it comes from; a base that is none of the family's has no twin."""
    matching = (where for where in bases(mutant.fix) if where.base == mutant.base)
    return next(matching, Where(mutant.base, None))


def shape_of(fix: str, where: Where) -> str:
    """Return the shape that the diagnosis gives the defect there, or in the nearest of the releases that have it."""

    def far(base: Base) -> int:
        return abs(ALL_RELEASES.index(base.release) - ALL_RELEASES.index(where.base.release))

    defective = [each.base for each in bases(fix) if each.base.remedy]
    return diagnosis_of(
        fix, where.twin or min([*([where.base] if where.base.remedy else []), *defective], key=far)
    ).shape


@cache
def diagnosis_of(fix: str, base: Base) -> Diagnosis:
    from mutants_judged import diagnosed

    return diagnosed(Mutant(fix, base, ()))
