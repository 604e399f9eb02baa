"""Adds a new release of vLLM: does all that needs no GPU, and lists what to run on one.

    python tools/new_release.py [VERSION…] [--no-archive] [--read FIX…] [--report FILE] [--pack OPTION…]

Fetches the release and judges it by its code; runs the CPU double on each fix whose code changed, and compares. Only
where the two agree is the release added to `ALL_RELEASES`, to `NEWEST`, to the manifest and the tables; the double's
numbers are recorded, and an archive for a GPU machine without network is written (tools/pack_gpu.py, which gets the
OPTIONs). Where there is a GPU, and a Python with that vLLM (--hunt), it ends with a hunt. Without a VERSION: every
release of the configured index that is newer than the newest known. Exit code 1: something could not be fetched, judged
or proven. Exit code 3, and nothing is written: the code has a shape that nobody has looked at, or the double says
otherwise than the code, or cannot run the code and nobody has read it (--read).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import make_manifest
from fetch_vllm import ALL_RELEASES, RECORDS, RELEASE_WHEELS, FetchError, release, wheel
from make_manifest import order
from vllm_graphfix import manifest
from vllm_graphfix.deployment.hardware import gpus
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.source.files import SourceError, open_source

TOOLS = Path(__file__).parent
PROJECT = TOOLS.parent
FETCH = TOOLS / "fetch_vllm.py"
ABOUT = PROJECT / "vllm_graphfix" / "fixes" / "_about.py"
ARCHIVES = PROJECT / "build" / "gpu"
FRAGMENTS = PROJECT / "changelog.d"
REPORT = PROJECT / "build" / "new-release.md"
_RELEASES = re.compile(r'(?<=^ALL_RELEASES = tuple\(\n)[\d. "\n]+(?=\.split\(\)\n\))', re.MULTILINE)
_STOCK = re.compile(r"\d+\.\d+\.\d+")
_NEWEST = re.compile(r'(?<=^NEWEST = ")[\d.]+', re.MULTILINE)
_MADE = re.compile(r"<!-- (?:generated|recorded): .*?<!-- end -->", re.DOTALL)
_CASES, _CASES_WITHOUT_VERDICT = "60", 3
"""Cases of a hunt, and its exit code if some have no verdict."""
_UNRECOGNISED = Verdict.UNRECOGNISED.value
_AGREES = {
    "affected": {"proven", "affected: the fix helps"},
    "fixed": {"right"},
    "absent": {"right", "nothing patched"},
}
"""The outcomes of `verify` that confirm a verdict."""


class NewReleaseError(Exception):
    """The release is not added; the message says why."""


class Change(NamedTuple):
    """A fix with another verdict than on the release before, or from other code."""

    fix: str
    before: dict[str, Any]
    after: dict[str, Any]

    @property
    def verdict(self) -> str:
        verdict: str = self.after["verdict"]
        return verdict

    @property
    def other_verdict(self) -> bool:
        return bool(self.verdict != self.before["verdict"])

    def functions(self) -> list[str]:
        """Return the functions that the verdict rests on and that changed."""
        changed = self.before["slices"].items() ^ self.after["slices"].items()
        return [f"`{place.partition('::')[2] or place.partition('::')[0]}`" for place in sorted(dict(changed))]

    def rows(self, version: str, previous: str) -> Iterator[str]:
        """Yield the change, and a command that shows the difference of the file."""
        where = self.after["where"] or self.before["where"]
        line = f"- `{self.fix}` was `{self.before['verdict']}`, is `{self.verdict}`: {self.after['reason']}"
        yield f"{line} ({where})" if where else line
        if where:
            files = (str(release(each) / where.partition(":")[0]) for each in (previous, version))
            yield f"  `{shlex.join(['diff', '-u', *files])}`"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="such as 0.34.0; default: all that are newer")
    parser.add_argument("--no-archive", action="store_true", help="no archive for a GPU machine")
    parser.add_argument("--read", nargs="+", default=[], metavar="FIX", help="whose code a person has read")
    parser.add_argument("--hunt", default=sys.executable, metavar="PYTHON", help="that has the release, for a hunt")
    parser.add_argument("--pack", nargs=argparse.REMAINDER, default=[], help="all that follows is for pack_gpu.py")
    options = parser.parse_args(arguments)
    report: list[str] = []
    try:
        versions = options.versions or newer()
        code = next(filter(None, (add(each, report, options) for each in versions)), 0)
    except (NewReleaseError, FetchError, SourceError, make_manifest.JudgeError) as error:
        report.append(f"Not added: {error}")
        code = 1
    if not report:
        report.append(f"No release is newer than {read_releases()[-1]}.")
    text = "\n".join(report).rstrip() + "\n"
    print(f"\n{text}", end="")
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(text)
    return code


def newer() -> list[str]:
    """Return the releases of the configured index after the newest known one, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "vllm", "--json", "--only-binary=:all:"]
    done = subprocess.run([*command, *RELEASE_WHEELS], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NewReleaseError(f"the index does not say which releases there are:\n{done.stderr.strip()}")
    offered = [each for each in json.loads(done.stdout)["versions"] if _STOCK.fullmatch(each)]
    return sorted((each for each in offered if order(each) > order(read_releases()[-1])), key=order)


def add(version: str, report: list[str], options: argparse.Namespace) -> int:
    """Add one release, append to *report*, and return the exit code."""
    releases = read_releases()
    before = [each for each in releases if _STOCK.fullmatch(version) and order(each) < order(version)]
    if version in releases or not before:
        raise NewReleaseError(f"{version} is known already, no stock release, or older than {releases[0]}")
    times = Times()
    root = release(version, keep_wheel=not options.no_archive)
    times.end("fetched")
    judged = make_manifest.look_at(version, root)["fixes"]
    changes = changed(judged, before[-1])
    times.end("judged")
    runs = [Run(name, judged[name]["verdict"], outcome) for name, outcome in run_new_code(root).items()]
    times.end("new code run")
    report += [f"## vLLM {version}", "", *table_of(runs)]
    if unknown := [each for each in changes if each.verdict == _UNRECOGNISED]:
        report += not_recognised(unknown, version, before[-1])
        return 3
    if doubtful := [each for each in runs if not each.agrees and each.fix not in options.read]:
        report += not_confirmed(doubtful, version)
        return 3
    write_releases([*releases, version])
    run("make_manifest.py", version)
    run("update_docs.py")
    (FRAGMENTS / f"releases-{version.replace('.', '-')}.added.md").write_text(fragment(version))
    times.end("written")
    proven = not run("record_evidence.py", "--release", version, check=False)
    times.end("run on the CPU double")
    report += to_look_at(changes, version, before[-1])
    if not proven:
        report += ["The CPU double did not prove every fix: what it said is above.", ""]
    packed = options.no_archive or pack(version, options.pack, report)
    if not options.no_archive:
        times.end("packed")
    right = hunt(version, before[-1], options.hunt, report)
    times.end("hunted")
    report += [f"{version} {times}.", "", "Next: `make test`; then commit.", ""]
    return 0 if proven and packed and right else 1


def hunt(version: str, previous: str, python: str, report: list[str]) -> bool:
    """Hunt in *version* by *python* where that can be, and append to *report*; return False if a case is wrong."""
    out = str(PROJECT / "build" / f"hunt-{version}")
    arguments = ["hunt", "--out", out, "--cases", _CASES, "--changed-since", str(release(previous))]
    command = [python, "-c", "import importlib.metadata; print(importlib.metadata.version('vllm'))"]
    has = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() if gpus() else ""
    if has != version:
        why = f"{python} has {f'vLLM {has}' if has else 'no vLLM'}" if gpus() else "this machine has no GPU"
        report += [
            f"No hunt: {why}. Where vLLM {version} and a GPU are:",
            f"`{shlex.join(['vllm-graphfix', *arguments])}`",
        ]
        report += [""]
        return True
    code = subprocess.run([python, "-m", "vllm_graphfix", *arguments], cwd=PROJECT, check=False).returncode
    report += [f"The hunt ended with exit code {code} (docs/hunt.md); its results are in `{out}`.", ""]
    return code in (0, _CASES_WITHOUT_VERDICT)


def pack(version: str, options: Sequence[str], report: list[str]) -> bool:
    """Pack an archive for a GPU machine and append to *report*; return whether it succeeded."""
    command = ["pack_gpu.py", version, "--out", str(ARCHIVES / version), *options]
    if run(*command, check=False):
        report += ["Not packed: what was missing is above. Again:", f"`python tools/{shlex.join(command)}`", ""]
        return False
    if wheel_file := wheel(version):
        wheel_file.unlink()  # the archive has it
    readme = (ARCHIVES / version / "README").read_text()
    report += [f"For a GPU machine, `{ARCHIVES / version}`:", "", textwrap.indent(readme, "    "), ""]
    return True


class Run(NamedTuple):
    """A fix whose code no known release has, run on the CPU double."""

    fix: str
    verdict: str
    """Verdict by its code, as the manifest would record it."""
    outcome: str
    """Outcome of `verify`."""

    @property
    def agrees(self) -> bool:
        return self.outcome in _AGREES.get(self.verdict, ())


def run_new_code(root: Path) -> dict[str, str]:
    """Run ``verify --device cpu`` for each fix whose code no known release has; return outcomes by fix."""
    source = open_source(root)
    names = [fix.name for fix in FIXES if not manifest.has_recorded_code(fix, source)]
    if not names:
        return {}
    command = [sys.executable, "-m", "vllm_graphfix", "verify", *names, "--vllm", str(root), "--device=cpu", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        raise NewReleaseError(f"the CPU double did not run: exit code {done.returncode}")
    return {each["name"]: _outcome(each) for each in json.loads(done.stdout)["fixes"]}


def _outcome(entry: dict[str, Any]) -> str:
    """Return the outcome of *entry*; `verify` also runs code that is ``fixed``, and reports it as not patched."""
    outcome: str = entry["outcome"]
    if entry["diagnosis"] == Verdict.FIXED.value and outcome == "nothing patched":
        return "not decided" if entry["numbers"] is None else "right"
    return outcome


class Times:
    """The time that each part took."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._parts: list[str] = []

    def end(self, part: str) -> None:
        now = time.monotonic()
        self._parts.append(f"{part} in {now - self._started:.0f} s")
        self._started = now

    def __str__(self) -> str:
        return ", ".join(self._parts)


def read_releases() -> list[str]:
    return re.findall(r"[\d.]+", "".join(_RELEASES.findall(FETCH.read_text())))


def write_releases(versions: Sequence[str]) -> None:
    """Write *versions*, and the newest of them, into the files that name them by hand."""
    in_order = sorted(versions, key=order)
    lines = textwrap.wrap(" ".join(in_order), 106)
    literal = "\n".join(f'    "{line}{" " if line is not lines[-1] else ""}"' for line in lines)
    FETCH.write_text(_RELEASES.sub(lambda _: literal, FETCH.read_text()))
    ABOUT.write_text(_NEWEST.sub(in_order[-1], ABOUT.read_text()))
    known = json.loads(RECORDS.read_text())
    for version in set(in_order) - set(known):  # each was fetched as a whole, which pip has checked
        for record in release(version).glob("vllm-*.dist-info/RECORD"):
            known[version] = hashlib.sha256(record.read_bytes()).hexdigest()
    RECORDS.write_text(json.dumps({version: known[version] for version in sorted(known, key=order)}, indent=2) + "\n")


def changed(judged: dict[str, Any], previous: str) -> list[Change]:
    """Return the fixes whose verdict or code in *judged* differs from that of *previous* in the manifest."""
    entries = json.loads(manifest.PATH.read_text())["fixes"]
    changes = []
    for name, after in judged.items():
        before = next(each for each in entries[name] if previous in each["releases"])
        if (after["verdict"], after["code"]) != (before["verdict"], before["code"]):
            changes.append(Change(name, before, after))
    return changes


def table_of(runs: Sequence[Run]) -> Iterator[str]:
    if runs:
        yield "Code that no known release has; to be read before it is committed:"
        yield ""
        yield "| fix | by its code | run on the CPU double |"
        yield "|---|---|---|"
        yield from (f"| `{each.fix}` | {each.verdict} | {each.outcome} |" for each in runs)
        yield ""


def not_confirmed(doubtful: Sequence[Run], version: str) -> Iterator[str]:
    yield f"**Not added**: {len(doubtful)} of {len(FIXES)} verdicts are not confirmed by a run. Nothing was written."
    yield "One that it contradicts is wrong, or its scenario is. One that it could not run is yours to read; then"
    names = " ".join(each.fix for each in doubtful)
    yield f"`make new-release VERSION={version} READ='{names}'`."
    yield ""


def not_recognised(unknown: Sequence[Change], version: str, previous: str) -> Iterator[str]:
    yield f"**Not added**: {len(unknown)} of {len(FIXES)} fixes do not know its code. Nothing was written."
    yield "Until they do, the plugin leaves that code alone there, and `status` says so. Look at each:"
    yield ""
    for each in unknown:
        yield from each.rows(version, previous)
    yield ""
    yield "Upstream's remedy in another form: teach `diagnose()` of that fix the form, narrowly. The defect in another"
    yield "form: a new shape, with patches and a scenario (docs/adding-a-release.md). Then, again,"
    yield f"`make new-release VERSION={version}`."
    yield ""


def to_look_at(changes: Sequence[Change], version: str, previous: str) -> Iterator[str]:
    others = [each for each in changes if each.other_verdict]
    if others:
        yield f"Judged otherwise than {previous}; to be read before it is committed:"
        yield ""
    for each in others:
        yield from each.rows(version, previous)
        page = f"vllm_graphfix/fixes/{each.fix.replace('-', '_')}.md"
        yield f"  `Releases`, `Absent` and `Removable` in {page} have to say so; then tools/update_docs.py."
    yield "" if others else f"Every verdict is that of {previous}."
    if same := [each for each in changes if not each.other_verdict]:
        yield "The same verdict, by code that changed and was recognised by its structure:"
        yield ""
        yield from (
            f"- `{each.fix}`, `{each.verdict}`: {', '.join(each.functions()) or 'outside of its slices'}"
            for each in same
        )
        yield ""
    by_hand = list(named_by_hand(previous)) if order(version) > order(ALL_RELEASES[-1]) else []
    if by_hand:
        yield f"Said by hand of {previous} as the last one; it holds up to there until somebody looks:"
        yield ""
        yield from (f"- {line}" for line in by_hand)
        yield ""


def named_by_hand(previous: str) -> Iterator[str]:
    """Yield lines of pages, outside generated parts, that name *previous* as the end of a span."""
    for page in sorted((PROJECT / "docs").rglob("*.md")):
        text = _MADE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(rf"(?:\bto|–|-) v?{re.escape(previous)}\b", line):
                yield f"{page.relative_to(PROJECT)}:{number}: {textwrap.shorten(line.strip(), 90, placeholder='…')}"


def fragment(version: str) -> str:
    """Return the changelog's fragment for *version*."""
    entries = json.loads(manifest.PATH.read_text())["fixes"].items()
    needed = [
        f"`{name}`"
        for name, of in entries
        for each in of
        if version in each["releases"] and each["verdict"] == "affected"
    ]
    has = f"the defects that {', '.join(needed)} put right" if needed else "none of the defects"
    text = f"vLLM {version} is known; it has {has}."
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def run(tool: str, *arguments: str, check: bool = True) -> int:
    """Run another tool in a process of its own, which reads the files just written; return its exit code."""
    done = subprocess.run([sys.executable, str(TOOLS / tool), *arguments], cwd=PROJECT, check=False)
    if check and done.returncode:
        raise NewReleaseError(f"{tool} ended with exit code {done.returncode}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
