"""Records on the pages of the fixes what `vllm-graphfix verify --device cpu` finds on every stock release.

The page of a fix has a row for each outcome.

    python tools/record_evidence.py [FIX...] [--workers N]

Ten minutes on two cores. With names only the pages of these fixes are recorded anew. Exit code 1 if something was not
proven.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from fetch_vllm import ALL_RELEASES, release
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.verify.report import differing

PAGES = Path(__file__).parent.parent / "docs" / "fixes"
PART = re.compile(r"(?<=<!-- recorded: cpu double -->\n).*?(?=<!-- end -->)", re.DOTALL)
HEAD = "| releases | what is compared | stock | patched |\n|---|---|---|---|\n"
_LONGEST = 160
"""Characters of an error that are shown."""


class Found(NamedTuple):
    """What a release has come to for a fix, as the table says it."""

    compared: str
    stock: str
    patched: str
    proven: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fixes", nargs="*", metavar="FIX", help="default: all")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    known = [fix.name for fix in FIXES]
    if unknown := sorted(set(arguments.fixes) - set(known)):
        parser.error(f"no fix is named {', '.join(unknown)}")
    wanted = arguments.fixes or known
    with ThreadPoolExecutor(arguments.workers) as pool:
        found = dict(zip(ALL_RELEASES, pool.map(lambda version: verified(version, wanted), ALL_RELEASES), strict=True))
    for name in wanted:
        page = PAGES / f"{name}.md"
        if not PART.search(text := page.read_text()):
            raise SystemExit(f"{page}: no part `recorded: cpu double`")
        rows = table_rows({version: each.get(name) for version, each in found.items()})
        page.write_text(with_rows(text, rows))
    outcomes = [each for by_fix in found.values() for each in by_fix.values()]
    print(f"{len(outcomes)} pairs of a fix and a release, {sum(each.proven for each in outcomes)} proven")
    return 0 if all(each.proven for each in outcomes) else 1


def verified(version: str, fixes: Sequence[str]) -> dict[str, Found]:
    """What is found for those of *fixes* that *version* is affected by."""
    command = [sys.executable, "-m", "vllm_graphfix", "verify", *fixes, "--device", "cpu", "--json"]
    environment = {name: value for name, value in os.environ.items() if "GRAPHFIX" not in name}
    done = subprocess.run(
        [*command, "--vllm", str(release(version))], env=environment, capture_output=True, text=True, check=False
    )
    if not done.stdout:
        raise SystemExit(f"vLLM {version}: {done.stderr}")
    print(f"vLLM {version}: exit code {done.returncode}", file=sys.stderr)
    return {each["name"]: _found(each) for each in json.loads(done.stdout)["fixes"] if each["diagnosis"] == "affected"}


def _found(row: dict[str, Any]) -> Found:
    return Found(row["numbers"] or "", _told(row, "stock"), _told(row, "patched"), row["outcome"] == "proven")


def _told(row: dict[str, Any], run: str) -> str:
    if row[f"{run}_error"]:
        error = " ".join(row[f"{run}_error"].split())
        return f"`{error if len(error) <= _LONGEST else error[: _LONGEST - 1] + '…'}`".replace("|", "\\|")
    # JSON has null for what is not finite.
    eager, other = (tuple(float("nan") if x is None else x for x in row[name] or ()) for name in ("eager", run))
    wrong = differing(eager, other)
    return f"{wrong} of {len(eager)} numbers wrong" if wrong else f"all {len(eager)} equal to eager"


def with_rows(page: str, rows: Iterable[str]) -> str:
    """*page* with *rows* for those that were recorded before."""
    return PART.sub(lambda _: HEAD + "".join(f"{row}\n" for row in rows), page)


def table_rows(by_release: dict[str, Found | None]) -> Iterator[str]:
    """Releases that follow each other and came to the same have one row."""
    for found, group in groupby(by_release.items(), key=lambda item: item[1]):
        if found is not None:
            versions = [version for version, _ in group]
            span = versions[0] if len(versions) == 1 else f"{versions[0]} – {versions[-1]}"
            yield f"| {span} | {found.compared} | {found.stock} | {found.patched} |"


if __name__ == "__main__":
    sys.exit(main())
