"""Fetches Prometheus, promtool and Alertmanager from Debian's packages, without installing them.

They are for the tests, two benchmarks and the picture of the dashboard. What is on the PATH is taken first. Prints the
paths of promtool and prometheus on standard output.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from fetch_vllm import FetchError, cache_folder, only_one_fetches

PACKAGE, ALERTMANAGER = "prometheus", "prometheus-alertmanager"
INSTEAD = "Install Prometheus (2.42 or later; the tests need its promtool) and put promtool and prometheus on the PATH."


class NoDebianError(FetchError):
    """There is no apt-get here, and the tools are not on the PATH."""


def tool(name: str, cache: Path | None = None) -> Path:
    """Return ``promtool``, ``prometheus`` or `ALERTMANAGER`, from the PATH, the cache or the package.

    Raises FetchError.
    """
    installed = shutil.which(name)
    if installed:
        return Path(installed)
    cache = cache or cache_folder()
    package = name if name == ALERTMANAGER else PACKAGE
    tree = cache / package
    if not tree.is_dir():
        if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
            raise NoDebianError(f"{name} is not on the PATH, and there is no apt-get to fetch it with. {INSTEAD}")
        with only_one_fetches(package, cache) as staging:
            if not tree.is_dir():  # else another process did it while we waited
                print(f"{package}: downloading Debian's package", file=sys.stderr)
                _run(["dpkg-deb", "--extract", str(_download(staging, package)), str(staging / "tree")])
                (staging / "tree").rename(tree)
    return tree / "usr" / "bin" / name


def _download(staging: Path, package: str) -> Path:
    """Return the package's file, by package lists of our own if the machine's are missing or old.

    apt-get needs no root for either. Raises FetchError.
    """
    options = ["--quiet", "--quiet", "-o", "Debug::NoLocking=1", f"-o=Dir::Cache={staging}/cache"]
    if os.geteuid() == 0:
        options += ["-o", "APT::Sandbox::User=root"]  # its own user cannot write into a folder of ours
    lists = staging / "lists" / "partial"
    lists.mkdir(parents=True)
    ours = [f"-o=Dir::State::Lists={lists.parent}"]
    try:
        _run(["apt-get", *options, "download", package], staging)
    except FetchError:
        _run(["apt-get", *options, *ours, "update"], staging)
        _run(["apt-get", *options, *ours, "download", package], staging)
    return next(staging.glob(f"{package}_*.deb"))


def _run(command: Sequence[str], folder: Path | None = None) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        output = textwrap.indent(done.stdout.strip() or f"exit code {done.returncode}", "  ")
        raise FetchError(f"{' '.join(command[:1])} could not fetch Debian's package:\n{output}\n{INSTEAD}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, metavar="DIR", help="default: $GRAPHFIX_RELEASES, else the user's cache")
    options = parser.parse_args(arguments)
    cache = options.into.absolute() if options.into else None
    try:
        print(tool("promtool", cache), tool("prometheus", cache), sep="\n")
    except FetchError as error:
        print(f"fetch_promtool: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
