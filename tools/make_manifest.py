"""Regenerates vllm_graphfix/manifest.json and the stock releases' flags (deployment/stock_flags.json).

    python tools/make_manifest.py [--root FOLDER] [--fix NAME] [VERSION …]

With versions: adds these (a new release) or looks at them again, and keeps the others. Without: all of
`fetch_vllm.ALL_RELEASES`. With --fix: of this fix alone, what is recorded of the others stays. Prints the verdicts, so
that a new release is looked at by a person before the manifest is committed. Exit code 1, and nothing written, where
something cannot be judged. Of all files of the package it records what they may replace (source/elsewhere.py), and
digests, in known_files.bin, known_code.bin and known_functions.bin.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fetch_vllm import ALL_RELEASES, FetchError, release
from vllm_graphfix import manifest
from vllm_graphfix.deployment.known_flags import RECORDED, flags_of
from vllm_graphfix.fix import Fix, Verdict
from vllm_graphfix.fixes import BY_NAME, FIXES, module_of
from vllm_graphfix.source.elsewhere import Reach, Search, reach_of
from vllm_graphfix.source.files import Source, SourceError, open_source
from vllm_graphfix.source.known_code import (
    KNOWN_CODE,
    KNOWN_FILES,
    KNOWN_FUNCTIONS,
    code_digest,
    known,
    module_path,
    packed,
)
from vllm_graphfix.source.known_code import digest as digest_of
from vllm_graphfix.source.replacements import family

COMMON = 20
"""A name that more files define, in all releases together, does not identify a function. In the condition of recognised
code it decides all the same."""

NOTHING = Reach(*4 * (frozenset(),))


class JudgeError(Exception):
    """A diagnosis is wrong; the message names the fix, the release and the line."""


def order(version: str) -> tuple[int, ...]:
    """Return the sort key of a release."""
    return tuple(map(int, version.split(".")))


def look_at(version: str, root: Path, fixes: Sequence[Fix] = FIXES) -> dict[str, Any]:
    """Return the digests of the files that *fixes* read in a release, and the verdict of each fix."""
    source = open_source(root)
    files = {path: source.digest(path) or "absent" for fix in fixes for path in fix.inspected_files}
    verdicts: dict[str, Any] = {}
    for fix in fixes:
        try:
            diagnosis, evidence = manifest.examine(fix, source)
        except Exception as error:
            if isinstance(error, SourceError):
                raise
            last = [frame for frame in traceback.extract_tb(error.__traceback__) if "/fixes/" in frame.filename][-1:]
            place = "".join(f" ({Path(frame.filename).name}:{frame.lineno}: `{frame.line}`)" for frame in last)
            raise JudgeError(
                f"{fix.name}: diagnose() raises on vLLM {version}: {type(error).__name__}: {error}{place}"
            ) from error
        if diagnosis.verdict is Verdict.UNRECOGNISED:
            print(
                f"{version}: {fix.name} is unrecognised ({diagnosis.reason}, {diagnosis.where}): look at it before "
                "committing the manifest"
            )
        verdicts[fix.name] = {
            "verdict": diagnosis.verdict.value,
            "reason": diagnosis.reason,
            "where": diagnosis.where,
            "shape": diagnosis.shape,
            "code": evidence.code,
            "slices": evidence.slices,
        }
    return {"files": files, "fixes": verdicts}


def extension_modules(root: Path) -> Iterator[str]:
    """Yield the extension modules that the wheel had, by its list of files: the cache has none of them."""
    for listed in root.glob("vllm-*.dist-info/RECORD"):
        paths = (line.partition(",")[0] for line in listed.read_text().splitlines())
        yield from (module_path(path) for path in paths if path.startswith("vllm/") and path.endswith(".so"))


def search_all(
    sources: Mapping[str, Source], fixes: Sequence[Fix], older: dict[str, Any]
) -> tuple[dict[str, dict[str, str]], dict[str, str], dict[str, list[str]], dict[Path, set[bytes]]]:
    """Search *sources* for everything that `source.elsewhere` compares; *older* is a manifest of other releases.

    Returns the replacements in all files, by fix: their values, each with the first release that has it; the subclasses
    of each class with a slice; the reach of each fix; and the digests of the functions that a verdict may depend on and
    of the code of all files.
    """
    full = {fix.name: module_of(fix.name).FIX for fix in FIXES}
    owners = {part.function.rpartition(".")[0] for fix in full.values() for part in fix.surroundings} - {""}
    searches: dict[str, Search] = {}
    seen: set[tuple[str, str | None]] = set()
    for version, source in sources.items():
        new = [path for path in sorted(source.sizes) if (path, source.digest(path)) not in seen]
        seen.update((path, source.digest(path)) for path in new)
        searches[version] = Search(source, new)
    hierarchies = [names.bases for search in searches.values() for names in search.names.values() if names]
    subclasses = {
        owner: family({owner, *older.get("subclasses", {}).get(owner, "").split()}, hierarchies) - {owner}
        for owner in sorted(owners)
    }
    parts = {name: (manifest.basis_of_all_clear(fix), fix.recognised) for name, fix in full.items()}
    first: dict[str, dict[str, str]] = {name: dict(older.get("elsewhere", {}).get(name, {})) for name in BY_NAME}
    before = older.get("reach", {}).items()
    reach = {name: Reach(*(frozenset(each.split()) for each in names)) for name, names in before}
    for name, of_fix in reaches_of(sources, searches, {fix.name: full[fix.name] for fix in fixes}).items():
        reach[name] = _together([of_fix, reach.get(name, NOTHING)])
    units: set[bytes] = set()
    code: set[bytes] = set()
    for version, search in searches.items():
        for fix in fixes:
            for _, each in search.replacements(*parts[fix.name], subclasses):
                first[fix.name].setdefault(each.value, version)
        units.update(deciding_code(search, [full[fix.name] for fix in fixes], reach))
        if len(fixes) == len(FIXES):  # it is of the releases, whatever the fixes are
            code.update(code_digest(path, sources[version].read(path) or b"") for path in search.paths)
        search.forget()
    return (
        first,
        {owner: " ".join(sorted(names)) for owner, names in subclasses.items() if names},
        {name: [" ".join(sorted(names)) for names in of_it] for name, of_it in reach.items()},
        {KNOWN_FUNCTIONS: units, KNOWN_CODE: code},
    )


def deciding_code(search: Search, fixes: Sequence[Fix], reach: Mapping[str, Reach]) -> Iterator[bytes]:
    """Yield the digest of each function, and other statement, for which a verdict on a fork asks if it is known.

    These are all of the files that `manifest` examines for edits, and whatever is in reach of one of *fixes*: one
    search for all of them together yields at least what one for each would. They are a third of all functions.
    """
    inspected = {path for fix in fixes for path in fix.inspected_files}
    for path in search.paths:
        if path in inspected or path.startswith(manifest.ENGINE):
            yield from (value for *_, value in search.units(path))
    data = [part for fix in fixes for part in fix.surroundings]
    distant = " ".join(fix.distant_code for fix in fixes)
    every = _together(reach.get(fix.name, NOTHING) for fix in fixes)
    yield from (value for *_, value in search.in_reach(every, (), data, distant) if value)


def reaches_of(
    sources: Mapping[str, Source], searches: Mapping[str, Search], fixes: Mapping[str, Fix]
) -> dict[str, Reach]:
    """Return the reach of each fix, in all of *sources* together."""
    files_of: dict[str, set[str]] = defaultdict(set)
    for search in searches.values():
        for path, names in search.names.items():
            for name in (names.bound | names.bases.keys()) if names else ():
                files_of[name].add(path)
    derived = [names.bases for search in searches.values() for names in search.names.values() if names]
    bases: dict[str, set[str]] = defaultdict(set)
    for each in derived:
        for name, of_it in each.items():
            bases[name] |= of_it
    # From a class to its bases, as `family` goes from a class to its subclasses.
    above = [{base: {name} for base in of_it} for name, of_it in bases.items()]
    owners = {part.function.rpartition(".")[0] for fix in fixes.values() for part in fix.surroundings} - {""}
    ancestors = {owner: family({owner}, above) - {owner} for owner in owners}
    common = {name for name, files in files_of.items() if len(files) > COMMON}.union(dir(torch.Tensor))
    reaches = dict.fromkeys(fixes, NOTHING)
    for source in sources.values():
        afresh = open_source(source.folder)  # its syntax trees take 150 MB
        for name, fix in fixes.items():
            basis = manifest.basis_of_all_clear(fix)
            users = [part for part in fix.surroundings if part not in basis]
            common_here = common - deciding_methods(fix)
            reach = reach_of(afresh, basis, users, ancestors, files_of, common_here)
            reaches[name] = _together([reaches[name], reach])
    return reaches


def deciding_methods(fix: Fix) -> set[str]:
    """Return the methods of vLLM's own objects, such as ``current_platform.is_cuda``, in recognised conditions."""
    others = {"self", "torch"}.union(*(part.names.split() for part in fix.surroundings))
    conditions = (
        node.test for text in fix.recognised for node in ast.walk(ast.parse(text)) if isinstance(node, ast.If)
    )
    called = (node.func for test in conditions for node in ast.walk(test) if isinstance(node, ast.Call))
    return {
        each.attr
        for each in called
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id not in others
    }


def _together(reaches: Iterable[Reach]) -> Reach:
    return Reach(*(frozenset().union(*names) for names in zip(*reaches, strict=True)))


def merged(looked_at: dict[str, dict[str, Any]], older: dict[str, Any]) -> dict[str, Any]:
    """Return *older*, a manifest, with the fixes and releases of *looked_at* replaced."""
    digests = {
        (path, version): digest
        for path, known in older["files"].items()
        for digest, versions in known.items()
        for version in versions.split()
    }
    verdicts = {
        (name, version): {key: value for key, value in entry.items() if key != "releases"}
        for name, entries in older["fixes"].items()
        for entry in entries
        for version in entry["releases"]
    }
    for version, seen in looked_at.items():
        digests |= {(path, version): digest for path, digest in seen["files"].items()}
        verdicts |= {(name, version): verdict for name, verdict in seen["fixes"].items()}
    read = {path for fix in FIXES for path in fix.inspected_files}
    files: dict[str, dict[str, list[str]]] = {path: {} for path in sorted(read)}
    for (path, version), digest in sorted(digests.items(), key=lambda each: order(each[0][1])):
        if path in read:
            files[path].setdefault(digest, []).append(version)
    fixes: dict[str, list[dict[str, Any]]] = {fix.name: [] for fix in FIXES}
    for (name, version), verdict in sorted(verdicts.items(), key=lambda each: order(each[0][1])):
        if name not in fixes:
            continue
        same = next((e for e in fixes[name] if {k: v for k, v in e.items() if k != "releases"} == verdict), None)
        if same is None:
            fixes[name].append({**verdict, "releases": [version]})
        else:
            same["releases"].append(version)
    return {
        "schema": manifest.SCHEMA,
        "files": {path: {d: " ".join(v) for d, v in sorted(known.items())} for path, known in files.items()},
        "fixes": fixes,
    }


def make(versions: list[str], root: Path | None = None, *, afresh: bool = False, fixes: Sequence[Fix] = FIXES) -> None:
    """Examine *versions* and write the manifest; its other releases stay unless it is made *afresh*."""
    looked_at = {}
    folders = {version: root / version if root else release(version) for version in versions}
    for version in versions:
        looked_at[version] = look_at(version, folders[version], fixes)
        judged = looked_at[version]["fixes"]
        print(f"{version:8}", " ".join(f"{name}={entry['verdict']}" for name, entry in judged.items()))
    older = json.loads(manifest.PATH.read_text()) if manifest.PATH.exists() and not afresh else {}
    if older.get("schema") != manifest.SCHEMA:
        older = {"files": {}, "fixes": {}}
    sources = {version: open_source(folder) for version, folder in folders.items()}
    for name in [fix.name for fix in fixes] if set(ALL_RELEASES) <= set(versions) else ():
        older.get("elsewhere", {}).pop(name, None)
        older.get("reach", {}).pop(name, None)
    replaced, subclasses, reach, digests = search_all(sources, fixes, older)
    made = merged(looked_at, older) | {"elsewhere": replaced, "subclasses": subclasses, "reach": reach}
    manifest.PATH.write_text(json.dumps(made, indent=1) + "\n")
    digests[KNOWN_FILES] = {digest_of(path, size) for source in sources.values() for path, size in source.sizes.items()}
    digests[KNOWN_FILES] |= {digest_of(each, 0) for folder in folders.values() for each in extension_modules(folder)}
    for path, new in digests.items():
        path.write_bytes(packed(new | (frozenset() if afresh else known(path))))
    write_flags(sources, afresh=afresh)
    print(f"wrote {manifest.PATH.name}: {manifest.PATH.stat().st_size / 1024:.0f} KiB")


def write_flags(sources: Mapping[str, Source], *, afresh: bool) -> None:
    """Write the first and the last release of each flag; those of other releases stay unless it is made *afresh*."""
    ranges: dict[str, str] = {} if afresh else json.loads(RECORDED.read_text())
    for version, source in sources.items():
        for flag in flags_of(source):
            first, *_, last = sorted([version, *ranges.get(flag, version).split(), version], key=order)
            ranges[flag] = f"{first} {last}"
    RECORDED.write_text(json.dumps(dict(sorted(ranges.items())), indent=0) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="stock releases; default: all of them, from scratch")
    parser.add_argument(
        "--root", type=Path, help="folder with one extracted release a folder; default: the download cache"
    )
    parser.add_argument(
        "--fix", choices=BY_NAME, metavar="NAME", action="append", help="this fix alone; the others stay as they are"
    )
    options = parser.parse_args()
    try:
        make(
            options.versions or list(ALL_RELEASES),
            options.root,
            afresh=not options.versions and options.fix is None,
            fixes=FIXES if options.fix is None else [BY_NAME[name] for name in options.fix],
        )
    except (FetchError, SourceError, JudgeError) as error:
        print(f"make_manifest: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
