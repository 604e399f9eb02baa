"""The shipped manifest: which shapes of vLLM's code were looked at, and what they were found to be.

A diagnosis is decided by the structure of the code. The manifest adds two things: whether that very code is a stock
release's that was looked at (`Diagnosis.known`), and the verdict without parsing where all files that a
fix reads are those of such a release.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from vllm_graphfix.fix import Diagnosis, Fix, Verdict
from vllm_graphfix.source import Source

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
        return {"files": dict(manifest["files"]), "fixes": dict(manifest["fixes"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ManifestError(
            f"{PATH.name} of vllm-graphfix cannot be read ({error}); reinstall vllm-graphfix"
        ) from error


def diagnose(fix: Fix, source: Source) -> Diagnosis:
    """The verdict of *fix* on *source*. Raises `SourceError`, `ManifestError`."""
    return _by_files(fix, source) or _by_structure(fix, source)


def _by_files(fix: Fix, source: Source) -> Diagnosis | None:
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


def _by_structure(fix: Fix, source: Source) -> Diagnosis:
    found, evidence = examine(fix, source)
    known = any(
        entry["verdict"] == found.verdict.value and entry["shape"] == found.shape and entry["evidence"] == evidence
        for entry in load()["fixes"].get(fix.name, ())
    )
    return Diagnosis(found.verdict, found.reason, found.where, found.shape, known)


def examine(fix: Fix, source: Source) -> tuple[Diagnosis, dict[str, str]]:
    """The verdict from structure alone, and the fingerprints of the functions that it looked at."""
    source.consulted.clear()
    found = fix.diagnose(source)
    return found, {name: function.fingerprint() for name, function in sorted(source.consulted.items())}
