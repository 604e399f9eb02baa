"""Regenerates vllm_graphfix/manifest.json from stock releases.

    python tools/make_manifest.py [--root FOLDER] [VERSION …]

With versions: adds these (a new release) or looks at them again, and keeps the others. Without: all of
`fetch_vllm.ALL_RELEASES`. Prints the verdicts, so that a new release is looked at by a person before the manifest is
committed. Exit code 1, and nothing written, where something cannot be judged.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from fetch_vllm import ALL_RELEASES, FetchError, release
from vllm_graphfix import manifest
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.source.files import SourceError, open_source


class JudgeError(Exception):
    """A diagnosis is wrong; the message names the fix, the release and the line."""


def order(version: str) -> tuple[int, ...]:
    """What releases are sorted by."""
    return tuple(map(int, version.split(".")))


def look_at(version: str, root: Path) -> dict[str, Any]:
    """Digest of every file that a fix reads, and the verdict of every fix, of one release."""
    source = open_source(root)
    files = {path: source.digest(path) or "absent" for fix in FIXES for path in fix.reads}
    verdicts: dict[str, Any] = {}
    for fix in FIXES:
        try:
            found, evidence = manifest.examine(fix, source)
        except Exception as error:
            if isinstance(error, SourceError):
                raise
            last = [frame for frame in traceback.extract_tb(error.__traceback__) if "/fixes/" in frame.filename][-1:]
            place = "".join(f" ({Path(frame.filename).name}:{frame.lineno}: `{frame.line}`)" for frame in last)
            raise JudgeError(
                f"{fix.name}: diagnose() raises on vLLM {version}: {type(error).__name__}: {error}{place}"
            ) from error
        if found.verdict is Verdict.UNRECOGNISED:
            print(
                f"{version}: {fix.name} is unrecognised ({found.reason}, {found.where}): look at it before "
                "committing the manifest"
            )
        verdicts[fix.name] = {
            "verdict": found.verdict.value,
            "reason": found.reason,
            "where": found.where,
            "shape": found.shape,
            "evidence": evidence,
        }
    return {"files": files, "fixes": verdicts}


def _merged(looked_at: dict[str, dict[str, Any]], kept: dict[str, Any] | None) -> dict[str, Any]:
    """One manifest; *kept* is an older one, whose releases stay unless they were looked at again."""
    files: dict[str, dict[str, list[str]]] = {}
    fixes: dict[str, list[dict[str, Any]]] = {fix.name: [] for fix in FIXES}
    for path, digests in (kept or {"files": {}})["files"].items():
        for digest, versions in digests.items():
            remaining = [version for version in versions.split() if version not in looked_at]
            if remaining:
                files.setdefault(path, {})[digest] = remaining
    for name, entries in (kept or {"fixes": {}})["fixes"].items():
        for entry in entries:
            remaining = [version for version in entry["releases"] if version not in looked_at]
            if remaining and name in fixes:
                fixes[name].append({**entry, "releases": remaining})
    for version, seen in looked_at.items():
        for path, digest in seen["files"].items():
            files.setdefault(path, {}).setdefault(digest, []).append(version)
        for name, verdict in seen["fixes"].items():
            same = next((e for e in fixes[name] if {k: v for k, v in e.items() if k != "releases"} == verdict), None)
            if same is None:
                fixes[name].append({**verdict, "releases": [version]})
            else:
                same["releases"].append(version)
    for entries in fixes.values():
        for entry in entries:
            entry["releases"].sort(key=order)
        entries.sort(key=lambda entry: order(entry["releases"][0]))
    return {
        "schema": manifest.SCHEMA,
        "files": {
            path: {digest: " ".join(sorted(versions, key=order)) for digest, versions in sorted(digests.items())}
            for path, digests in sorted(files.items())
        },
        "fixes": fixes,
    }


def make(versions: list[str], root: Path | None = None, *, afresh: bool = False) -> None:
    """Looks at *versions* and writes the manifest; what it says of other releases stays unless it is made *afresh*."""
    looked_at = {}
    for version in versions:
        looked_at[version] = look_at(version, root / version if root else release(version))
        found = looked_at[version]["fixes"]
        print(f"{version:8}", " ".join(f"{name}={entry['verdict']}" for name, entry in found.items()))
    kept = json.loads(manifest.PATH.read_text()) if manifest.PATH.exists() and not afresh else None
    manifest.PATH.write_text(json.dumps(_merged(looked_at, kept), indent=1) + "\n")
    print(f"wrote {manifest.PATH.name}: {manifest.PATH.stat().st_size / 1024:.0f} KiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="stock releases; default: all of them, from scratch")
    parser.add_argument(
        "--root", type=Path, help="folder with one extracted release a folder; default: the download cache"
    )
    options = parser.parse_args()
    try:
        make(options.versions or list(ALL_RELEASES), options.root, afresh=not options.versions)
    except (FetchError, SourceError, JudgeError) as error:
        print(f"make_manifest: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
