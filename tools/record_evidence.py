"""Records on the pages of the fixes what `vllm-graphfix verify --device cpu` finds on every stock release.

The page of a fix has a row for each outcome.

    python tools/record_evidence.py [FIX...] [--release VERSION...] [--workers N]

Ten minutes on two cores. With names only the pages of these fixes are recorded anew; with releases what the pages say
of the others stays. Exit code 1 if something was not proven.
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
from vllm_graphfix.verify.proof import differing

PAGES = Path(__file__).parent.parent / "docs" / "fixes"
PART = re.compile(r"(?<=<!-- recorded: cpu double -->\n).*?(?=<!-- end -->)", re.DOTALL)
HEAD = "| releases | what is compared | stock | patched |\n|---|---|---|---|\n"
_LONGEST = 160
"""Characters of an error in a cell."""


class Outcome(NamedTuple):
    """The result of a fix on a release, as cells of the table."""

    compared: str
    stock: str
    patched: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fixes", nargs="*", metavar="FIX", help="default: all")
    parser.add_argument("--release", nargs="+", choices=ALL_RELEASES, metavar="VERSION", default=ALL_RELEASES)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    known = [fix.name for fix in FIXES]
    if unknown := sorted(set(arguments.fixes) - set(known)):
        parser.error(f"no fix is named {', '.join(unknown)}")
    wanted = arguments.fixes or known
    with ThreadPoolExecutor(arguments.workers) as pool:
        ran = pool.map(lambda version: verified(version, wanted), arguments.release)
        by_release = dict(zip(arguments.release, ran, strict=True))
    for name in wanted:
        page = PAGES / f"{name}.md"
        if not PART.search(text := page.read_text()):
            raise SystemExit(f"{page}: no part `recorded: cpu double`")
        rows = table_rows(
            recorded(text) | {version: outcomes.get(name) for version, (outcomes, _) in by_release.items()}
        )
        page.write_text(with_rows(text, rows))
    proofs = [proof for _, proofs in by_release.values() for proof in proofs]
    print(f"{len(proofs)} pairs of a fix and a release, {sum(proofs)} proven")
    return 0 if all(proofs) else 1


def verified(version: str, fixes: Sequence[str]) -> tuple[dict[str, Outcome], list[bool]]:
    """Verify *fixes* on *version*: the outcomes by fix that it is affected by, and one flag each, true if proven."""
    command = [sys.executable, "-m", "vllm_graphfix", "verify", *fixes, "--device", "cpu", "--json"]
    environment = {name: value for name, value in os.environ.items() if "GRAPHFIX" not in name}
    done = subprocess.run(
        [*command, "--vllm", str(release(version))], env=environment, capture_output=True, text=True, check=False
    )
    if not done.stdout:
        raise SystemExit(f"vLLM {version}: {done.stderr}")
    print(f"vLLM {version}: exit code {done.returncode}", file=sys.stderr)
    rows = [row for row in json.loads(done.stdout)["fixes"] if row["diagnosis"] == "affected"]
    return {row["name"]: _outcome(row) for row in rows}, [row["outcome"] == "proven" for row in rows]


def _outcome(row: dict[str, Any]) -> Outcome:
    return Outcome(row["numbers"] or "", _numbers(row, "stock"), _numbers(row, "patched"))


def _numbers(row: dict[str, Any], run: str) -> str:
    if row[f"{run}_error"]:
        error = " ".join(row[f"{run}_error"].split())
        return f"`{error if len(error) <= _LONGEST else error[: _LONGEST - 1] + '…'}`".replace("|", "\\|")
    # JSON has null for what is not finite.
    eager, other = (tuple(float("nan") if x is None else x for x in row[name] or ()) for name in ("eager", run))
    wrong = differing(eager, other)
    return f"{wrong} of {len(eager)} numbers wrong" if wrong else f"all {len(eager)} equal to eager"


def recorded(page: str) -> dict[str, Outcome | None]:
    """Return the outcomes in the table of *page*, by release."""
    by_release: dict[str, Outcome | None] = dict.fromkeys(ALL_RELEASES)
    part = PART.search(page)
    for line in part[0].splitlines()[2:] if part else ():
        span, *cells = re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |"))
        first, _, last = span.partition(" – ")
        of = ALL_RELEASES[ALL_RELEASES.index(first) : ALL_RELEASES.index(last or first) + 1]
        by_release |= dict.fromkeys(of, Outcome(*cells))
    return by_release


def with_rows(page: str, rows: Iterable[str]) -> str:
    """Return *page* with *rows* in place of those recorded before."""
    return PART.sub(lambda _: HEAD + "".join(f"{row}\n" for row in rows), page, count=1)


def table_rows(by_release: dict[str, Outcome | None]) -> Iterator[str]:
    """Yield one row for consecutive releases with equal outcomes."""
    for outcome, group in groupby(by_release.items(), key=lambda item: item[1]):
        if outcome is not None:
            versions = [version for version, _ in group]
            span = versions[0] if len(versions) == 1 else f"{versions[0]} – {versions[-1]}"
            yield f"| {span} | {outcome.compared} | {outcome.stock} | {outcome.patched} |"


if __name__ == "__main__":
    sys.exit(main())
