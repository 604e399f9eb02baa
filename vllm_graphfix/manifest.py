"""The manifest that ships with the package: the code of the recorded stock releases, and the verdicts on it.

A verdict needs two checks. The first is the fix's own `diagnose`: patterns of the defect and of its remedies. The
second is the code around them, the fix's `surroundings`, whose fingerprints are known from a release or new. The burden
of proof is on the all-clear:

- ``affected``: the defect was recognised, and each slice is that of some release that has it in that shape.
- ``fixed``: a remedy was recognised, and each slice is that of some release that has the component.
- ``absent``: all functions are those of one release that lacks the component. A search without a match proves nothing:
  the component may have another name, or be in another file.
- ``unrecognised``: anything else.

Where all files that a fix reads are those of one release, its verdict is taken from here, and nothing is parsed.
An all-clear, ``fixed`` or ``absent``, depends on the rest of the package, too: a file that no known release has might
replace the code that it rests on (`source/elsewhere.py`).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix.fix import Diagnosis, Verdict
from vllm_graphfix.fixes import BY_NAME, module_of
from vllm_graphfix.source import elsewhere, slices
from vllm_graphfix.source.files import Source, SourceError
from vllm_graphfix.source.known_code import KNOWN_FUNCTIONS, known

if TYPE_CHECKING:
    from vllm_graphfix.fix import Fix, Patch, Patchable, Slice

SCHEMA = 2
PATH = Path(__file__).with_name("manifest.json")
ENGINE = ("vllm/v1/", "vllm/compilation/", "vllm/forward_context.py")
"""Paths of the code that decides which graphs are captured, and with what they are replayed."""


class ManifestError(Exception):
    """The manifest that ships with the package cannot be read."""


@functools.lru_cache(maxsize=1)
def load() -> dict[str, Any]:
    """Read the manifest, once. Raises `ManifestError`."""
    import json

    try:
        manifest = json.loads(PATH.read_bytes())
        if manifest["schema"] != SCHEMA:
            raise ValueError(f"schema {manifest['schema']}, expected {SCHEMA}")
        files = {path: dict(releases) for path, releases in manifest["files"].items()}
        fixes = {name: [_parsed_entry(entry) for entry in entries] for name, entries in manifest["fixes"].items()}
        replaced = {name: dict(known) for name, known in manifest["elsewhere"].items()}
        subclasses = {name: str.split(names) for name, names in manifest["subclasses"].items()}
        reach = {
            name: elsewhere.Reach(*(frozenset(str.split(each)) for each in names))
            for name, names in manifest["reach"].items()
        }
        if not all(isinstance(releases, str) for known in files.values() for releases in known.values()):
            raise TypeError("releases that are not text")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(
            f"{PATH.name} of vllm-graphfix cannot be read ({str(error)[:200]}); reinstall vllm-graphfix"
        ) from error
    return {"files": files, "fixes": fixes, "elsewhere": replaced, "subclasses": subclasses, "reach": reach}


def _parsed_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Check the fields of *entry* that a diagnosis uses. Raises TypeError, ValueError, KeyError."""
    Verdict(entry["verdict"])
    texts = (entry["reason"], entry["shape"], "" if entry["where"] is None else entry["where"])
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a field that is not text")
    if not all(isinstance(value, str) for value in (*entry["slices"].values(), entry["code"])):
        raise TypeError("a fingerprint that is not text")
    return entry | {"releases": tuple(entry["releases"])}


def diagnose(fix: Patchable, source: Source) -> Diagnosis:
    """Judge *source* for *fix*. Raises `SourceError`, `ManifestError`."""
    if source.release is not None:
        return _of_release(fix, source.release)
    try:
        diagnosis = _by_files(fix, source) or _by_structure(fix, source)
        if diagnosis.verdict in (Verdict.FIXED, Verdict.ABSENT):
            refused = _replaced_elsewhere(fix, source, diagnosis) or _acted_on_elsewhere(fix, source, diagnosis)
            diagnosis = refused or diagnosis
        elif diagnosis.verdict is Verdict.AFFECTED:
            diagnosis = _acted_on_elsewhere(fix, source, diagnosis) or diagnosis
            if diagnosis.known and _is_named_elsewhere(fix, source):
                diagnosis = diagnosis._replace(known=False)
        if diagnosis.known and _is_edited(fix, source):
            diagnosis = diagnosis._replace(known=False)
        return diagnosis._replace(tree=tree_of(fix, source, diagnosis.shape)) if diagnosis.defect_seen else diagnosis
    except RecursionError as error:
        raise SourceError(f"the code of {source.label} is too deeply nested to be judged; is it vLLM's?") from error


def releases() -> tuple[str, ...]:
    """Return the recorded stock releases, oldest first. Raises `ManifestError`."""
    recorded = {release for entries in load()["fixes"].values() for entry in entries for release in entry["releases"]}
    return tuple(sorted(recorded, key=lambda release: [int(part) for part in release.split(".")]))


def _of_release(fix: Patchable, release: str) -> Diagnosis:
    for entry in load()["fixes"].get(fix.name, ()):
        if release in entry["releases"]:
            return Diagnosis(Verdict(entry["verdict"]), entry["reason"], entry["where"], entry["shape"], known=True)
    return Diagnosis.unrecognised(f"{release} is a release", "vllm/__init__.py")


def has_recorded_code(fix: Patchable, source: Source) -> bool:
    """Tell if a known release has the code that a verdict of *fix* rests on, whatever else is new in *source*."""
    return (_by_files(fix, source) or _by_structure(fix, source)).known


def _replaced_elsewhere(fix: Patchable, source: Source, diagnosis: Diagnosis) -> Diagnosis | None:
    """Refuse the all-clear *diagnosis* where a file of no known release may replace the code that it rests on."""
    if fix.name not in BY_NAME:
        return None
    search, recorded = _search(source), load()["elsewhere"].get(fix.name, {})
    if search.foreign_binary is not None:
        reason = f"{diagnosis.reason}; but there is code without source that no known release has"
        return Diagnosis(Verdict.UNRECOGNISED, reason, f"{search.foreign_binary}:1")
    if not search.paths:
        return None
    if search.is_like_no_release:
        reason = f"{diagnosis.reason}; but most files of this vLLM are of no known release"
        return Diagnosis(Verdict.UNRECOGNISED, reason)
    own = module_of(fix.name).FIX
    for part, replacement in search.replacements(basis_of_all_clear(own), own.recognised, load()["subclasses"]):
        if replacement.value not in recorded and part.only_for in (None, diagnosis.verdict):
            reason = f"{diagnosis.reason}; but {part.function or part.path} may be replaced by code of no known release"
            return Diagnosis(Verdict.UNRECOGNISED, reason, replacement.where)
    return None


def _acted_on_elsewhere(fix: Patchable, source: Source, diagnosis: Diagnosis) -> Diagnosis | None:
    """Refuse the *diagnosis* of a fork where code of no known release may act on the code that it rests on.

    That code may undo a remedy, or be one, in which case the patch could do harm.
    """
    search = _search(source)
    if fix.name not in BY_NAME or not (search.paths and search.is_fork):
        return None
    own, seen = module_of(fix.name).FIX, diagnosis.verdict is Verdict.AFFECTED
    nothing = elsewhere.Reach(*4 * (frozenset(),))
    # Slices judge the surroundings of a recognised defect; only distant code might be a remedy.
    reach, data = (nothing, ()) if seen else (load()["reach"].get(fix.name, nothing), own.surroundings)
    for name, where, value in search.in_reach(reach, _as_known(own, source), data, own.distant_code):
        if value not in known(KNOWN_FUNCTIONS):
            reason = f"{diagnosis.reason}; but code of no known release may act on it, by {name}"
            return Diagnosis(Verdict.UNRECOGNISED, reason, where, diagnosis.shape if seen else "", defect_seen=seen)
    return None


def _is_edited(fix: Patchable, source: Source) -> bool:
    """Tell if a file that *fix* reads, or one of the engine, is of no known release or may not be what is imported."""
    search = _search(source)
    relevant = (path for path in search.paths if path in fix.inspected_files or path.startswith(ENGINE))
    return search.foreign_binary is not None or any(map(search.has_new_code, relevant))


def _is_named_elsewhere(fix: Patchable, source: Source) -> bool:
    """Tell if a file that no known release has, and *fix* does not read, may mention code that a verdict rests on."""
    search, reach = _search(source), load()["reach"].get(fix.name)
    if reach is None:
        return False
    names = {name for name in reach.own if "_" in name or not name.islower()}  # names such as `make` are too common
    return any(
        search.names[path] is None or not names.isdisjoint(search.words(path))
        for path in set(search.paths).difference(fix.inspected_files)
    )


def basis_of_all_clear(fix: Fix) -> list[Slice]:
    """Return the slices that ``fixed`` or ``absent`` rests on."""
    return [part for part in fix.surroundings if part.only_for is not Verdict.AFFECTED]


def _as_known(fix: Fix, source: Source) -> list[Slice]:
    """Return the slices that an all-clear rests on, and others that are known from some release.

    Slices of whole files and classes that only ``fixed`` rests on are left out.
    """
    entries = load()["fixes"].get(fix.name, ())

    def is_known(part: Slice) -> bool:
        value = slices.fingerprint(source, part, fix.recognised)
        return any(entry["slices"].get(part.place) == value for entry in entries)

    return [
        part
        for part in fix.surroundings
        if (part.only_for is not Verdict.FIXED or "." in part.function)
        and (part.only_for is not Verdict.AFFECTED or is_known(part))
    ]


@functools.lru_cache(maxsize=1)
def _search(source: Source) -> elsewhere.Search:
    """Return one search for all fixes, which judge *source* one after the other."""
    return elsewhere.Search(source)


def tree_of(fix: Patchable, source: Source, shape: str) -> str:
    """Hash all files that *fix* reads, and the shape that its patches are for: the identity of this tree."""
    files = (f"{path} {source.digest(path) or 'absent'}" for path in sorted(fix.inspected_files))
    return hashlib.sha256("\n".join([fix.name, shape, *files]).encode()).hexdigest()[:16]


def _by_files(fix: Patchable, source: Source) -> Diagnosis | None:
    if all(source.read(path) is None for path in fix.inspected_files) and (not source.sizes or _search(source).paths):
        return None  # that its files are missing proves something only in a package without new files
    files = load()["files"]
    releases: set[str] | None = None
    for path in fix.inspected_files:
        same = set(files.get(path, {}).get(source.digest(path) or "absent", "").split())
        releases = same if releases is None else releases & same
        if not releases:
            return None
    for entry in load()["fixes"].get(fix.name, ()):
        if releases and not releases.isdisjoint(entry["releases"]):
            return Diagnosis(Verdict(entry["verdict"]), entry["reason"], entry["where"], entry["shape"], known=True)
    return None


class Evidence(NamedTuple):
    """The fingerprints of the code that a verdict rests on."""

    slices: dict[str, str]
    """Fingerprints of the fix's `surroundings`, and signatures of its targets, by place."""
    code: str
    """Hash of all functions that these are slices of; "" where none of them exists: then nothing is proven."""
    needed: frozenset[str]
    """The places that the verdict rests on."""

    @property
    def functions(self) -> list[str]:
        """The places that exist, without whole files and signatures."""
        there = (place for place, value in self.slices.items() if value != slices.MISSING)
        return [place for place in there if not place.endswith(("::", "()"))]


def _by_structure(fix: Patchable, source: Source) -> Diagnosis:
    diagnosis, evidence = examine(fix, source)
    if not evidence.slices:
        return diagnosis  # nothing is recorded for the shadow check
    entries = load()["fixes"].get(fix.name, [])
    judged = judge(diagnosis, evidence, entries)
    if judged.known and not any(
        _has_the_files_of(source, release, fix.inspected_files)
        for entry in entries
        if entry["code"] == evidence.code
        for release in entry["releases"]
    ):
        return judged._replace(known=False)
    return judged


def _has_the_files_of(source: Source, release: str, paths: Iterable[str]) -> bool:
    """Tell if *source* has the same of the files *paths* as *release*, so that none was moved."""
    files = load()["files"]
    return all(
        (source.read(path) is None) == (release in files.get(path, {}).get("absent", "").split()) for path in paths
    )


def judge(diagnosis: Diagnosis, evidence: Evidence, entries: list[dict[str, Any]]) -> Diagnosis:
    """Weigh *diagnosis*, which rests on patterns alone, by the *entries* of known releases, oldest first."""
    if diagnosis.verdict is Verdict.UNRECOGNISED or not evidence.code:
        return _not_proven(diagnosis, evidence, entries)
    judged = (diagnosis.verdict.value, diagnosis.shape, evidence.code)
    if any((entry["verdict"], entry["shape"], entry["code"]) == judged for entry in entries):
        return diagnosis._replace(known=True)
    trusted = _trusted(diagnosis, entries)
    # No signature is recorded for a shape that no release has.
    recorded = {place for entry in trusted for place in entry["slices"]}
    new = [
        place
        for place, value in evidence.slices.items()
        if place in evidence.needed
        and (place in recorded or not place.endswith("()"))
        and not any(entry["slices"].get(place) == value for entry in trusted)
        and not (value == slices.EMPTY and _appeared(place, trusted))
    ]
    return _not_proven(diagnosis, evidence, entries, new) if new or not trusted else diagnosis


def _appeared(place: str, trusted: list[dict[str, Any]]) -> bool:
    """Tell if no release has the function at *place*: without a mention of the data it changes nothing."""
    return {entry["slices"].get(place) for entry in trusted} == {slices.MISSING}


def _trusted(diagnosis: Diagnosis, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries whose slices *diagnosis* may share."""
    if diagnosis.verdict is Verdict.AFFECTED:
        # The first word of a shape names the patches; the others vary them, and are recognised by themselves.
        shape = diagnosis.shape.partition(" ")[0]
        affected = [entry for entry in entries if entry["verdict"] == diagnosis.verdict.value]
        alike = [entry for entry in affected if entry["shape"].partition(" ")[0] == shape]
        # A shape that no release has is that of a nightly without the remedy, which slices leave out, too.
        return alike or [entry for entry in entries if entry["verdict"] == Verdict.FIXED.value]
    if diagnosis.verdict is Verdict.FIXED:
        # A remedy in an affected release keeps that release's surroundings, since slices leave it out.
        return [entry for entry in entries if entry["verdict"] in (Verdict.FIXED.value, Verdict.AFFECTED.value)]
    return []


def _not_proven(
    diagnosis: Diagnosis, evidence: Evidence, entries: list[dict[str, Any]], new: list[str] | None = None
) -> Diagnosis:
    """Turn *diagnosis* into unrecognised, with the new code, the nearest known release and its verdict."""

    def likeness(entry: dict[str, Any]) -> int:
        return sum(entry["slices"].get(place) == value for place, value in evidence.slices.items())

    # Among equally near releases the newest, which is the last.
    nearest = max(reversed(entries), key=likeness, default=None)
    reason, where = diagnosis.reason, diagnosis.where
    if nearest is not None:
        changed = new or [place for place, value in evidence.slices.items() if nearest["slices"].get(place) != value]
        names = [place.partition("::")[2] or place.partition("::")[0] for place in changed]
        if diagnosis.verdict is not Verdict.UNRECOGNISED:
            claim = {
                Verdict.AFFECTED: f"{diagnosis.reason}; but what surrounds it is new",
                Verdict.FIXED: f"a remedy is there ({diagnosis.reason}), but what surrounds it is new",
                Verdict.ABSENT: "nothing of it was seen, in code that is new",
            }
            reason = claim[diagnosis.verdict]
        reason += (
            f"; the nearest known release is {nearest['releases'][-1]}, where it is {nearest['verdict']}"
            f"; changed since: {', '.join(names[:3]) or 'nothing that is fingerprinted'}"
            f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        )
        if changed and not where:
            where = f"{changed[0].partition('::')[0]}:1"
    seen = diagnosis.verdict is Verdict.AFFECTED or diagnosis.defect_seen
    return Diagnosis(Verdict.UNRECOGNISED, reason, where, diagnosis.shape if seen else "", defect_seen=seen)


def examine(fix: Patchable, source: Source) -> tuple[Diagnosis, Evidence]:
    """Judge *source* by the patterns of *fix* alone, and take the fingerprints of its surroundings."""
    # All fixes share the source, one after the other: forget what an earlier one requested.
    source.replaced.clear()
    source.imported.clear()
    diagnosis = fix.diagnose(source)
    own = module_of(fix.name).FIX if fix.name in BY_NAME else None  # the shadow check has no surroundings
    surroundings, recognised = (own.surroundings, own.recognised) if own else ((), ())
    values = {part.place: slices.fingerprint(source, part, recognised) for part in surroundings}
    targets = own.patches(diagnosis.shape) if own and diagnosis.verdict is Verdict.AFFECTED else ()
    values |= {f"{place}()": takes for place, takes in _signatures(source, targets)}
    missing = [path for path, name in map(_place_of, targets) if name.partition(".")[0] not in source.names(path)]
    if missing:
        unknown = Diagnosis.unrecognised("what is patched is defined in a way", missing[0], defect_seen=True)
        diagnosis = unknown._replace(shape=diagnosis.shape)
    # A slice for ``fixed`` alone may be of a whole runner, whose other code does not matter.
    whole = {
        part.place: slices.fingerprint(source, part._replace(names=""))
        for part in surroundings
        if part.function and part.only_for is not Verdict.FIXED
    }
    if source.replaced and diagnosis.verdict is not Verdict.UNRECOGNISED:
        function, seen = source.replaced[0], diagnosis.verdict is Verdict.AFFECTED
        in_a_way = f"{function.qualname} is decorated or replaced in a way"
        diagnosis = Diagnosis.unrecognised(in_a_way, function, defect_seen=seen)
    return diagnosis, Evidence(values, slices.joined(values, whole), needed(surroundings, diagnosis.verdict, values))


def _signatures(source: Source, patches: Iterable[Patch]) -> Iterator[tuple[str, str]]:
    """Yield the place of each function that is patched, and the parameters that its wrapper depends on."""
    for patch in patches:
        path, name = _place_of(patch)
        function = source.function(path, name)
        if function is not None:  # None for a name that the module imports
            yield f"{path}::{name}", ", ".join(function.signature.split(", ")[: patch.leading])


def _place_of(patch: Patch) -> tuple[str, str]:
    return f"{patch.module.replace('.', '/')}.py", patch.name


def needed(surroundings: Iterable[Slice], verdict: Verdict, places: Iterable[str] = ()) -> frozenset[str]:
    """Return the places of *surroundings* that *verdict* rests on, and those of signatures among *places*."""
    of_slices = {part.place for part in surroundings if part.only_for in (None, verdict)}
    return frozenset(of_slices.union(place for place in places if place.endswith("()")))
