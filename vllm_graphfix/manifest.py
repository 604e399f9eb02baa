"""The shipped manifest: which shapes of vLLM's code were looked at, and what they were found to be.

A diagnosis is decided by the structure of the code. The manifest adds two things: whether that very code is a stock
release's that was looked at (`Diagnosis.known`), and the verdict without parsing where all files that a
fix reads are those of such a release.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Diagnosis, Verdict
from vllm_graphfix.source.files import Source, SourceError

if TYPE_CHECKING:
    from vllm_graphfix.fix import Patchable

SCHEMA = 1
PATH = Path(__file__).with_name("manifest.json")


class ManifestError(Exception):
    """The manifest that ships with the package cannot be read."""


@functools.lru_cache(maxsize=1)
def load() -> dict[str, Any]:
    import json

    try:
        manifest = json.loads(PATH.read_bytes())
        if manifest["schema"] != SCHEMA:
            raise ValueError(f"schema {manifest['schema']}, expected {SCHEMA}")
        files = {path: dict(releases) for path, releases in manifest["files"].items()}
        fixes = {name: [_parsed_entry(entry) for entry in entries] for name, entries in manifest["fixes"].items()}
        if not all(isinstance(releases, str) for known in files.values() for releases in known.values()):
            raise TypeError("releases that are not text")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(
            f"{PATH.name} of vllm-graphfix cannot be read ({str(error)[:200]}); reinstall vllm-graphfix"
        ) from error
    return {"files": files, "fixes": fixes}


def _parsed_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """*entry*, if it has what a diagnosis takes from it."""
    Verdict(entry["verdict"])
    texts = (entry["reason"], entry["shape"], "" if entry["where"] is None else entry["where"])
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a field that is not text")
    return entry | {"releases": tuple(entry["releases"]), "evidence": dict(entry["evidence"])}


def diagnose(fix: Patchable, source: Source) -> Diagnosis:
    """The verdict of *fix* on *source*. Raises `SourceError`, `ManifestError`."""
    try:
        return _by_files(fix, source) or _by_structure(fix, source)
    except RecursionError as error:
        raise SourceError(f"the code of {source.label} is too deeply nested to be judged; is it vLLM's?") from error


def _by_files(fix: Patchable, source: Source) -> Diagnosis | None:
    files = load()["files"]
    releases: set[str] | None = None
    for path in fix.reads:
        same = set(files.get(path, {}).get(source.digest(path) or "absent", "").split())
        releases = same if releases is None else releases & same
        if not releases:
            return None
    for entry in load()["fixes"].get(fix.name, ()):
        if releases and not releases.isdisjoint(entry["releases"]):
            return Diagnosis(Verdict(entry["verdict"]), entry["reason"], entry["where"], entry["shape"], known=True)
    return None


def _by_structure(fix: Patchable, source: Source) -> Diagnosis:
    found, evidence = examine(fix, source)
    known = any(
        entry["verdict"] == found.verdict.value and entry["shape"] == found.shape and entry["evidence"] == evidence
        for entry in load()["fixes"].get(fix.name, ())
    )
    return Diagnosis(found.verdict, found.reason, found.where, found.shape, known)


def examine(fix: Patchable, source: Source) -> tuple[Diagnosis, dict[str, str]]:
    """The verdict from structure alone, and the fingerprints of the functions that it looked at."""
    # All fixes ask one source, one after the other: what an earlier one looked at is no evidence for this one.
    source.consulted.clear()
    source.replaced.clear()
    source.imported.clear()
    found = fix.diagnose(source)
    for place in fix.evidence:
        path, _, name = place.partition("::")
        source.function(path, name)
    if source.replaced and found.verdict is not Verdict.UNRECOGNISED:
        name = source.replaced[0].qualname
        found = Diagnosis.unrecognised(f"{name} is decorated or replaced in a way", source.replaced[0])
    seen = {(function.path, function.qualname.partition(".")[0]) for function in source.consulted.values()}
    elsewhere = [(name, path) for name, path, origin in source.imported if (origin, name) not in seen]
    if elsewhere and found.verdict in (Verdict.ABSENT, Verdict.FIXED):
        # What was looked for is there, under that name, and was not looked at.
        name, path = elsewhere[0]
        found = Diagnosis.unrecognised(f"{name} is imported from elsewhere, in a way", path)
    return found, {name: function.fingerprint() for name, function in sorted(source.consulted.items())}
