"""Leave-one-out: the verdict on each release from what is known of earlier ones.

    python tools/leave_one_out.py [FIX …] [--since 0.23.0] [--why]

For each release the manifest is cut before it. What is affected has to be recognised, or else the next release of vLLM
loses the fix; a verdict that is wrong is worse. It goes by the manifest; with --why it reads the releases of the fixes
that are named, and says which slices are new, and their lines that changed. Exit code 1 where a verdict is wrong.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fetch_vllm import ALL_RELEASES, release
from make_manifest import look_at, order
from vllm_graphfix import manifest
from vllm_graphfix.fix import Diagnosis, Fix, Verdict
from vllm_graphfix.fixes import BY_NAME, FIXES, module_of
from vllm_graphfix.manifest import Evidence
from vllm_graphfix.source import slices
from vllm_graphfix.source.files import Source, open_source


class Judged(NamedTuple):
    """The verdict on one release, from earlier ones."""

    fix: str
    release: str
    right: str
    verdict: str

    @property
    def is_wrong(self) -> bool:
        return self.verdict not in (self.right, Verdict.UNRECOGNISED.value)


def judged(fix: Fix, since: str, examined: dict[str, dict[str, Any]]) -> Iterator[Judged]:
    """Yield the verdicts on all releases from *since* on; *examined* has the manifest's entry of *fix* by release."""
    surroundings = module_of(fix.name).FIX.surroundings
    for version in ALL_RELEASES:
        if order(version) < order(since):
            continue
        earlier = [{**entry, "releases": [each]} for each, entry in examined.items() if order(each) < order(version)]
        entry = examined[version]
        diagnosis = Diagnosis(Verdict(entry["verdict"]), entry["reason"], entry["where"], entry["shape"])
        evidence = Evidence(
            entry["slices"], entry["code"], manifest.needed(surroundings, diagnosis.verdict, entry["slices"])
        )
        by_earlier = manifest.judge(diagnosis, evidence, earlier)
        if (
            by_earlier.verdict in (Verdict.FIXED, Verdict.ABSENT)
            and version in manifest.load()["elsewhere"][fix.name].values()
        ):
            by_earlier = by_earlier._replace(verdict=Verdict.UNRECOGNISED)
        yield Judged(fix.name, version, entry["verdict"], by_earlier.verdict.value)


def changed_lines(fix: Fix, before: Source, after: Source, places: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the slices at *places* that changed between two releases."""
    own: Fix = module_of(fix.name).FIX
    for part in own.surroundings:
        if part.place in places:
            old, new = (slices.lines(source, part, own.recognised, readable=True) or [] for source in (before, after))
            yield f"    {part.place}"
            yield from (f"      {line}" for line in difflib.ndiff(old, new) if line[0] in "+-")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fixes", nargs="*", metavar="FIX")
    parser.add_argument("--since", default="0.23.0", metavar="RELEASE", help="the first that is judged")
    parser.add_argument("--why", action="store_true", help="what is new where a verdict cannot be told")
    options = parser.parse_args(arguments)
    chosen = [BY_NAME[name] for name in options.fixes] or list(FIXES)
    examined: dict[str, dict[str, dict[str, Any]]] = {
        fix.name: {version: entry for entry in manifest.load()["fixes"][fix.name] for version in entry["releases"]}
        for fix in chosen
    }
    for version in ALL_RELEASES if options.why else ():
        for name, entry in look_at(version, release(version), chosen)["fixes"].items():
            examined[name][version] = entry
    all_judged = [each for fix in chosen for each in judged(fix, options.since, examined[fix.name])]
    for version in dict.fromkeys(each.release for each in all_judged):
        of_it = [each for each in all_judged if each.release == version]
        unknown = [each.fix for each in of_it if each.verdict == Verdict.UNRECOGNISED.value]
        wrong = [f"{each.fix} ({each.verdict}, is {each.right})" for each in of_it if each.is_wrong]
        print(f"{version}: {len(unknown)} of {len(of_it)} cannot be told: {', '.join(unknown)}", end="")
        print(f"; WRONG: {', '.join(wrong)}" if wrong else "")
        for name in unknown if options.why else ():
            print(f"  {name}")
            fix, previous = BY_NAME[name], ALL_RELEASES[ALL_RELEASES.index(version) - 1]
            before, after = examined[name][previous]["slices"], examined[name][version]["slices"]
            verdict = Verdict(examined[name][version]["verdict"])
            rests_on = manifest.needed(module_of(name).FIX.surroundings, verdict, after)
            places = [place for place, value in after.items() if before.get(place) != value and place in rests_on]
            print(*changed_lines(fix, open_source(release(previous)), open_source(release(version)), places), sep="\n")
    affected = [each for each in all_judged if each.right == Verdict.AFFECTED.value]
    recognised = sum(each.verdict == each.right for each in affected)
    wrong_ones = sum(each.is_wrong for each in all_judged)
    print(f"affected and recognised: {recognised} of {len(affected)}; wrong: {wrong_ones} of {len(all_judged)}")
    return int(wrong_ones > 0)


if __name__ == "__main__":
    sys.exit(main())
