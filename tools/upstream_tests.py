"""Runs upstream's own unit tests of a stock release, without the plugin and with all fixes applied.

    python tools/upstream_tests.py 0.33.0 [PATH …] [--into DIR]

The tests are those of the release's sdist, which is fetched once (50 MB) and kept in the cache; PATH replaces those
below, which are about what the fixes patch and need no GPU. Most that need one fail, or are skipped, in both runs. It
prints the tests whose outcome differs, the fixes that end `failed`, and the wrappers that no test called. Exit code 0:
no outcome differs and no fix failed; 1: some do; 2: the tests could not be fetched or run.

On a machine with a GPU and without a network, with vLLM in FOLDER and a cached sdist's `tests` and `needed` in TREE:

    python tools/upstream_tests.py 0.33.0 tests/v1/cudagraph/*.py --site FOLDER --tests TREE --json FILE
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from fetch_vllm import FetchError, cache_folder, only_one_fetches, release
from vllm_graphfix.fixes import FIXES

PATHS = (
    "tests/v1/cudagraph/test_cudagraph_dispatch.py",
    "tests/v1/cudagraph/test_cudagraph_manager.py",
    "tests/v1/cudagraph/test_encoder_cudagraph.py",
    "tests/v1/attention/test_*metadata_builder.py",
    "tests/v1/attention/test_attention_splitting.py",
    "tests/v1/attention/test_batch_reordering.py",
    "tests/v1/attention/test_chunked_local_attention.py",
    "tests/v1/attention/test_indexer_*.py",
    "tests/v1/spec_decode/test_eagle*.py",
    "tests/v1/spec_decode/test_extract_hidden_states.py",
    "tests/v1/spec_decode/test_llm_base_proposer.py",
    "tests/v1/spec_decode/test_mtp.py",
    "tests/v1/worker/test_gpu_extract_hidden_states_speculator.py",
    "tests/v1/worker/test_gpu_model_runner*.py",
    "tests/v1/worker/test_workspace.py",
    "tests/compile/test_deepstack_input_contract.py",
    "tests/compile/test_wrapper.py",
)
"""Of the newest release; a pattern that matches nothing in an older one is left out."""
BUILD = ("setuptools", "setuptools_scm", "setuptools_rust", "wheel", "packaging", "jinja2")
"""Packages that pip needs to read the metadata of an sdist of vLLM for no device."""
NEEDED = ("orjson", "tblib", "pytest-asyncio", "pytest-timeout")
"""Packages that the tests import, and the Python of vLLM does not."""
_LONGEST = 120
"""Seconds of a test."""
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")


class Run(NamedTuple):
    """What came of one run of the tests, to its end or until its time was over."""

    outcomes: dict[str, dict[str, str]]
    """The outcome of each phase, ``setup``, ``call`` and ``teardown``, or ``collect``, by the test's id."""
    failed: dict[str, str]
    """The reasons of the fixes that ended `failed`."""
    calls: dict[str, int]
    """How often each wrapper was called, by ``fix: function``."""
    ended: bool = True

    @property
    def counts(self) -> str:
        """Count the outcomes of the tests; an error is one of a set-up or of a module."""
        kinds = Counter(
            phases.get("call") or ("skipped" if "skipped" in phases.values() else "errors")
            for phases in self.outcomes.values()
        )
        return ", ".join(f"{number:,} {kind}" for kind, number in sorted(kinds.items(), key=lambda pair: -pair[1]))


def compare(off: Run, on: Run) -> list[str]:
    """Name what the plugin changed: tests whose outcome differs, and fixes that failed.

    Of a run that was stopped only the tests that ended are compared.
    """
    names = off.outcomes.keys() | on.outcomes.keys()
    if not (off.ended and on.ended):
        names = {
            name
            for name in names
            if all({"teardown", "collect"} & run.outcomes.get(name, {}).keys() for run in (off, on))
        }
    differ = [
        f"differs: {name}: {_brief(off.outcomes.get(name))} without the plugin, {_brief(on.outcomes.get(name))} with it"
        for name in sorted(names)
        if off.outcomes.get(name) != on.outcomes.get(name)
    ]
    return [*differ, *(f"failed: {name}: {reason}" for name, reason in sorted(on.failed.items()))]


def _brief(phases: dict[str, str] | None) -> str:
    return ", ".join(f"{phase} {outcome}" for phase, outcome in phases.items()) if phases else "not run"


def fetch(version: str, cache: Path) -> Path:
    """Return the folder with ``tests/`` of a release and ``needed/``, cached or fetched. Raises FetchError."""
    tree = cache / f"tests-{version}"
    if tree.is_dir():
        return tree
    with only_one_fetches(tree.name, cache) as staging:
        if not tree.is_dir():
            unpacked = staging / "tree"
            _pip(["install", "--target", str(staging / "build"), *BUILD])
            # pip reads an sdist's metadata, for which it runs `setup.py`: here, not where it would install torch anew.
            reading = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
            options = ["--no-deps", "--no-binary=:all:", "--no-build-isolation", "--no-cache-dir"]
            _pip(
                ["download", *options, "--dest", str(staging), f"vllm=={version}"],
                {**reading, "PYTHONPATH": str(staging / "build"), "TMPDIR": str(staging)},
            )
            with tarfile.open(staging / f"vllm-{version}.tar.gz") as sdist:
                for member in sdist:
                    if PurePosixPath(member.name).parts[1:2] == ("tests",):
                        sdist.extract(member, unpacked, filter="data")
            (unpacked / f"vllm-{version}" / "tests").rename(unpacked / "tests")
            _pip(["install", "--no-deps", "--target", str(unpacked / "needed"), *NEEDED])
            unpacked.rename(tree)
    return tree


def _pip(arguments: Sequence[str], variables: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        [*_PIP, *arguments], env={**os.environ, **(variables or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        errors = "\n  ".join(line for line in done.stderr.splitlines() if line.startswith("ERROR"))
        raise FetchError(f"pip could not {arguments[0]} what upstream's tests take:\n  {errors or done.stderr[-500:]}")


def run(
    tests: Path, root: Path, paths: Sequence[str], settings: dict[str, str], workers: int = 0, seconds: float = 3600
) -> Run:
    """Run *paths* of the folder *tests* on the release in *root*, with *settings* as variables. Raises FetchError."""
    files = list(dict.fromkeys(str(file.relative_to(tests)) for path in paths for file in sorted(tests.glob(path))))
    if not files:
        raise FetchError(f"{tests} has none of {', '.join(paths)}")
    with tempfile.TemporaryDirectory(prefix="vllm-graphfix-") as scratch:
        results = Path(scratch, "results")
        results.mkdir()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        folders = (root, tests, tests / "needed", Path(__file__).parent, os.environ.get("PYTHONPATH", ""))
        environment = {
            **clean,
            "GRAPHFIX_OUTCOMES": str(results),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "VLLM_GRAPHFIX_STATUS_DIR": scratch,
            "VLLM_LOGGING_LEVEL": "ERROR",
            "XDG_CACHE_HOME": scratch,
            **settings,
        }
        options = ["-q", "--tb=no", "--disable-warnings", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        options += [f"--timeout={_LONGEST}", "-n", str(workers), "-p", "upstream_tests_plugin", "--rootdir", str(tests)]
        output = Path(scratch, "output")
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *files],
                cwd=tests,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                pass
            finally:
                # The workers and engines that tests started are of the same session.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                ended = process.wait() >= 0
        return _read(results, output, ended=ended)


def _read(results: Path, output: Path, *, ended: bool) -> Run:
    lines = (results / "outcomes").read_text().splitlines() if (results / "outcomes").exists() else []
    if not lines:
        raise FetchError(f"no test came to an end:\n{output.read_text()[-2000:]}")
    outcomes: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name, phase, outcome in map(json.loads, lines):
        outcomes[name][phase] = outcome
    failed: dict[str, str] = {}
    calls: Counter[str] = Counter()
    for file in results.glob("*.json"):
        process = json.loads(file.read_text())
        failed |= process["failed"]
        for name, number in process["calls"].items():
            calls[name] += number
    return Run(outcomes, failed, calls, ended)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", metavar="RELEASE", help="a stock release, like 0.33.0")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="tests of the sdist, patterns too")
    parser.add_argument("--into", type=Path, metavar="DIR", help="default: $GRAPHFIX_RELEASES, else the user's cache")
    parser.add_argument("--site", type=Path, metavar="FOLDER", help="a vLLM that runs on this machine's GPU")
    parser.add_argument("--tests", type=Path, metavar="TREE", help="has `tests` and `needed`; nothing is fetched")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="of pytest-xdist; default: none")
    parser.add_argument("--seconds", type=float, default=3600, metavar="S", help="of each run; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes there, too")
    options = parser.parse_intermixed_args(arguments)
    cache = options.into.absolute() if options.into else cache_folder()
    device = {} if options.site else {"CUDA_VISIBLE_DEVICES": ""}
    applied = {"VLLM_GRAPHFIX": "on", **{fix.variable: "auto" for fix in FIXES}}
    try:
        root = options.site.absolute() if options.site else release(options.release, cache)
        tests = options.tests.absolute() if options.tests else fetch(options.release, cache)
        off, on = (
            run(tests, root, options.paths or PATHS, {**device, **each}, options.workers, options.seconds)
            for each in ({"VLLM_GRAPHFIX": "off"}, applied)
        )
    except FetchError as error:
        print(f"upstream_tests: {error}", file=sys.stderr)
        return 2
    changed = compare(off, on)
    if not on.calls:
        changed.append("no fix was applied: nothing was compared")
    if options.json:
        options.json.write_text(json.dumps({"off": off._asdict(), "on": on._asdict(), "changed": changed}))
    uncalled = sorted(name for name, number in on.calls.items() if not number)
    print(f"vLLM {options.release}, {len(off.outcomes):,} tests without the plugin: {off.counts}")
    print(f"with all fixes applied: {on.counts}; {len(on.calls) - len(uncalled)} of {len(on.calls)} wrappers called")
    called = {name: number for name, number in on.calls.items() if number}
    for line in [*(f"called: {name}, {number:,} times" for name, number in sorted(called.items()))]:
        print(line)
    for line in [*(f"not called: {name}" for name in uncalled), *changed]:
        print(line)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
