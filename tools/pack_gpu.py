"""Packs a stock vLLM, this plugin and all that they need for a GPU machine without network.

    python tools/pack_gpu.py VERSION --out FOLDER [--machine FREEZE] [--as-it-is PATTERN…] [--part-size MB] …

FREEZE is what `python -m pip list --format=freeze` prints on that machine. What is there and fits what vLLM asks for is
not packed, torch and CUDA's libraries like the rest; what does not fit is packed and comes before the machine's.
Without FREEZE the machine is taken to have Python, pip and a driver alone, and everything is packed: several GB.

Which releases are needed is read from the wheels themselves, beginning with vLLM's, for x86-64 Linux. They come from
the index that pip is set up for. In FOLDER are then the archive, `unpack.sh` and a README with what to run there.
Exit code 1: no wheel for something; the message names it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from email.parser import HeaderParser
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from fetch_vllm import PLATFORMS, cache_folder

PROJECT = Path(__file__).parent.parent
UNPACK = Path(__file__).with_name("unpack_gpu.sh")
REPEATED = {
    "as-it-is": "packages that are not packed, whatever version the machine has",
    "bring": "packages that are packed in any case",
    "pin": "asked of a package besides, such as 'xgrammar<0.3', where newer ones ask for what others refuse",
    "leave-out": "paths in wheels that are not packed, such as '*_vllm_fa2_C*', FlashAttention 2 (TurboQuant's)",
    "find-links": "folders of wheels that pip looks at, too",
}
README = """vLLM {version} and vllm-graphfix for Python {python} on x86-64 Linux, {size:.0f} MB.
On the GPU machine, with this folder:

sh unpack.sh /tmp/vllm-{version}
/tmp/vllm-{version}/bin/vllm-graphfix status
/tmp/vllm-{version}/bin/vllm-graphfix verify --device gpu --json > verify-{version}.json

After a change of the plugin its new wheel is enough there (`make packages`):

python3 -m pip --python /tmp/vllm-{version}/bin/python install --no-index --no-deps --force-reinstall GRAPHFIX.whl

Packed: {packed}.
The machine's own: {there}.
Left out of the wheels: {left_out}.
"""


class PackError(Exception):
    """The archive cannot be made; the message says why."""


class Wanted(NamedTuple):
    """All requirements of one package."""

    name: NormalizedName
    specifiers: frozenset[str]
    extras: frozenset[str]

    def allows(self, version: Version) -> bool:
        return all(Requirement(f"{self.name}{each}").specifier.contains(version, True) for each in self.specifiers)

    def pip_requirement(self) -> str:
        """Return the requirement for pip, without CPU builds of an exact version, which pip would prefer."""
        exact = [f"!={each[2:]}+cpu" for each in self.specifiers if re.fullmatch(r"==[^=*+]+", each)]
        return f"{self.name}{','.join(sorted([*self.specifiers, *exact]))}"


class Target(NamedTuple):
    """The machine that the archive is for."""

    python: str
    there: dict[NormalizedName, Version]
    as_it_is: Sequence[str] = ()
    """Names of packages, as patterns, that are never packed, whatever version the machine has, or none."""
    brought: Sequence[str] = ()
    """Names, as patterns, that are packed in any case."""

    def has(self, wanted: Wanted) -> bool:
        """Return whether the machine satisfies *wanted*, so that it is not packed."""
        version = self.there.get(wanted.name)
        as_it_is = any(fnmatch(wanted.name, each) for each in self.as_it_is)
        brought = any(fnmatch(wanted.name, each) for each in self.brought)
        return not brought and (as_it_is or (version is not None and wanted.allows(version)))

    def environment(self) -> dict[str, str]:
        """Return the environment for markers."""
        system = {"os_name": "posix", "sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
        cpython = {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
        return system | cpython | {"python_version": self.python, "python_full_version": f"{self.python}.0"}


class Resolved:
    """The wheels to pack, in *folder*, and the packages that the machine has."""

    def __init__(self, target: Target, folder: Path, find_links: Sequence[str]) -> None:
        self.wheels: dict[NormalizedName, Path] = {}
        self._target, self._folder, self._find_links = target, folder, find_links
        self._wanted: dict[NormalizedName, Wanted] = {}
        self._askers: dict[NormalizedName, dict[str, set[str]]] = {}
        """By package and specifier: the packages that require it."""

    def there(self) -> list[str]:
        return sorted(name for name, wanted in self._wanted.items() if self._target.has(wanted))

    def add(self, wheel: Path) -> None:
        """Add a wheel that is not from an index."""
        self.wheels[_named(wheel)[0]] = Path(shutil.copy(wheel, self._folder))

    def resolve(self, *roots: str) -> None:
        """Fetch wheels until all requirements are met. Raises `PackError`.

        There is no backtracking: a later requirement that a version does not meet fetches another one, and requirements
        that no version meets together are an error, which --pin resolves.
        """
        wanted = {("the command line", Requirement(root)) for root in roots}
        followed: set[tuple[str, Requirement]] = set()
        while more := wanted - followed:
            for asker, requirement in more:
                self._want(requirement, asker)
            followed |= more
            if missing := [wanted for name, wanted in self._wanted.items() if self._lacks(name, wanted)]:
                self._fetch(missing)
            wanted |= {(name, each) for name, wheel in self.wheels.items() for each in self._requirements(name, wheel)}

    def _want(self, requirement: Requirement, asker: str) -> None:
        name = canonicalize_name(requirement.name)
        for each in requirement.specifier:
            self._askers.setdefault(name, {}).setdefault(str(each), set()).add(asker)
        before = self._wanted.get(name, Wanted(name, frozenset(), frozenset()))
        specifiers = before.specifiers | {str(each) for each in requirement.specifier}
        self._wanted[name] = Wanted(name, specifiers, before.extras | requirement.extras)

    def _lacks(self, name: NormalizedName, wanted: Wanted) -> bool:
        wheel = self.wheels.get(name)
        return not self._target.has(wanted) and not (wheel and wanted.allows(_named(wheel)[1]))

    def _fetch(self, missing: Sequence[Wanted]) -> None:
        for wanted in missing:
            self.wheels.pop(wanted.name, Path("none")).unlink(missing_ok=True)
        try:
            download([each.pip_requirement() for each in missing], self._folder, self._target.python, self._find_links)
        except PackError as error:
            raise PackError("\n".join([str(error), *self._conflicts(missing, str(error))])) from None
        self.wheels |= {_named(wheel)[0]: wheel for wheel in self._folder.glob("*.whl")}

    def _conflicts(self, missing: Sequence[Wanted], error: str) -> Iterator[str]:
        """Yield the requirements of each package that *error* names, if it has several."""
        for name in [each.name for each in missing if re.search(rf"\b{each.name}\b", error)]:
            demands = sorted(self._askers.get(name, {}).items())
            if len(demands) > 1:
                lines = [f"{what} for {' and '.join(sorted(who))}" for what, who in demands]
                yield f"{name}: {'; '.join(lines)}"
                yield f"If these do not fit together, --pin an older release of one that asks for {name}"

    def _requirements(self, name: NormalizedName, wheel: Path) -> Iterator[Requirement]:
        """Yield the requirements of *wheel* on that machine, with its required extras."""
        with zipfile.ZipFile(wheel) as packed:
            (path,) = (each for each in packed.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each))
            metadata = HeaderParser().parsestr(packed.read(path).decode())
        extras = ["", *(self._wanted[name].extras if name in self._wanted else ())]
        for requirement in map(Requirement, metadata.get_all("Requires-Dist", [])):
            marker, environment = requirement.marker, self._target.environment()
            if marker is None or any(marker.evaluate(environment | {"extra": extra}) for extra in extras):
                yield requirement


def download(requirements: Sequence[str], folder: Path, python: str, find_links: Sequence[str]) -> None:
    """Download wheels for that machine, without their dependencies. Raises `PackError`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--implementation=cp", f"--python-version={python}"]
    command += [f"--platform={tag}" for tag in PLATFORMS] + [f"--find-links={each}" for each in find_links]
    # pip collects a wheel in the temporary folder first, which may be a small memory file system.
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        environment = os.environ | {"TMPDIR": temporary}
        command += [f"--dest={folder}", *requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise PackError("pip has no wheel for that machine:\n" + "\n".join(errors or done.stderr.splitlines()[-3:]))


def _named(wheel: Path) -> tuple[NormalizedName, Version]:
    return parse_wheel_filename(wheel.name)[:2]


class Parts:
    """A stream to files of at most *size* bytes each, and their digests; to one file if *size* is None."""

    def __init__(self, folder: Path, size: int | None) -> None:
        self._folder, self._size = folder, size
        self.digests: dict[str, Any] = {}
        self.written = 0
        self._file: IO[bytes] | None = None

    def write(self, data: bytes) -> int:
        rest = memoryview(data)
        while rest:
            room = self._size - self.written % self._size if self._size else len(rest)
            if self._file is None or (self._size and self.written % self._size == 0):
                self.close()
                name = f"wheels.tar.{len(self.digests):03}" if self._size else "wheels.tar"
                self.digests[name] = hashlib.sha256()
                self._file = (self._folder / name).open("wb")
            piece, rest = rest[:room], rest[room:]
            self._file.write(piece)
            list(self.digests.values())[-1].update(piece)
            self.written += len(piece)
        return len(data)

    def close(self) -> None:
        if self._file:
            self._file.close()


def slimmed(wheel: Path, patterns: Sequence[str]) -> list[str]:
    """Remove members of *wheel* whose paths match *patterns*; return their paths."""
    with zipfile.ZipFile(wheel) as before:
        gone = [each for each in before.namelist() if any(fnmatch(each, pattern) for pattern in patterns)]
        if gone:
            smaller = wheel.with_suffix(".smaller")
            with zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as after:
                for member in before.infolist():
                    if member.filename.endswith(".dist-info/RECORD"):
                        rows = before.read(member).decode().splitlines(keepends=True)
                        after.writestr(
                            member,
                            "".join(row for row in rows if row.rpartition(",")[0].rpartition(",")[0] not in gone),
                        )
                    elif member.filename not in gone:
                        with before.open(member) as source, after.open(member, "w") as copy:
                            shutil.copyfileobj(source, copy, 1 << 20)
            smaller.replace(wheel)
    return gone


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", metavar="VERSION", help="a release of vLLM, such as 0.34.0")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="made anew")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="the machine's (default: %(default)s)")
    parser.add_argument("--machine", type=Path, metavar="FREEZE", help="what `pip list --format=freeze` prints there")
    parser.add_argument("--part-size", type=int, metavar="MB", help="cut the archive into parts of at most that")
    for name, text in REPEATED.items():
        parser.add_argument(f"--{name}", action="append", default=[], metavar="PATTERN", help=text)
    parser.add_argument("--plugin", type=Path, metavar="WHEEL", help="default: built from this tree")
    options = parser.parse_args(arguments)
    there = {}
    for line in options.machine.read_text().splitlines() if options.machine else ():
        if pinned := re.fullmatch(r"([\w.-]+)==(\S+)", line):
            there[canonicalize_name(pinned[1])] = Version(pinned[2])
    target = Target(options.python, there, options.as_it_is, options.bring)
    if options.out.exists() and any(options.out.iterdir()) and not (options.out / "SHA256SUMS").exists():
        parser.error(f"{options.out} holds something else than an archive")
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    try:
        print(pack(options, target))
    except PackError as error:
        print(f"pack_gpu: {error}", file=sys.stderr)
        return 1
    return 0


def pack(options: argparse.Namespace, target: Target) -> str:
    """Write the archive; return the text of its README."""
    with tempfile.TemporaryDirectory(dir=options.out) as temporary:
        (wheels := Path(temporary, "wheels")).mkdir()
        resolved = Resolved(target, wheels, [str(cache_folder()), *options.find_links])
        resolved.add(options.plugin or built(Path(temporary, "plugin")))
        resolved.resolve(f"vllm=={options.version}", *options.pin)
        removed = [name for wheel in resolved.wheels.values() for name in slimmed(wheel, options.leave_out)]
        stream = Parts(options.out, options.part_size and options.part_size * 1_000_000)
        with tarfile.open(fileobj=stream, mode="w|") as archive:  # type: ignore[call-overload]
            for wheel in sorted(resolved.wheels.values()):
                archive.add(wheel, f"wheels/{wheel.name}")
                wheel.unlink()
        stream.close()
    sums = "".join(f"{digest.hexdigest()}  {name}\n" for name, digest in stream.digests.items())
    (options.out / "SHA256SUMS").write_text(sums)
    (options.out / "unpack.sh").write_text(UNPACK.read_text().replace("@PYTHON@", options.python))
    parts = {
        "packed": ", ".join(sorted(f"{name} {version}" for name, version in map(_named, resolved.wheels.values()))),
        "there": ", ".join(resolved.there()) or "nothing",
        "left_out": ", ".join(removed) or "nothing",
    }
    text = README.format(version=options.version, python=options.python, size=stream.written / 1e6, **parts)
    (options.out / "README").write_text(text)
    return text


def built(folder: Path) -> Path:
    """Build the wheel of this tree from its sdist, so that nothing of an older build gets into it."""
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(PROJECT)]
    if (done := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
        raise PackError(f"this tree's wheel cannot be built:\n{done.stderr[-600:]}")
    return next(folder.glob("*.whl"))


if __name__ == "__main__":
    sys.exit(main())
