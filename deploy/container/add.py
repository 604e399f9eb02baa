"""Adds a package to a Python whose own packages stay as they are. Needs nothing but pip 22.2 or later.

python3 add.py add FOLDER REQUIREMENT   # what REQUIREMENT needs and this Python lacks, into FOLDER
python3 add.py link FOLDER              # lets this Python import what is in FOLDER, behind all that it has itself

REQUIREMENT is a file or a folder of this machine, or 'vllm-graphfix==VERSION --hash=sha256:…' with the SHA-256 of the
wheel. Whatever comes from an index needs its hash: libraries have theirs in requirements.txt, beside this file.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


def installed() -> dict[str, str]:
    """Normalised name to version; pip's `freeze` would name files and repositories, which are no constraints."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = normalised(distribution.metadata["Name"] or "")
        if name and distribution.version:
            found.setdefault(name, distribution.version)  # the first on the path is the one that is imported
    return found


class NoHashError(Exception):
    """Something would come from an index, and nobody has said which bytes it must have."""


class Pin(NamedTuple):
    """A library as requirements.txt has it; one may be there several times, for different Pythons."""

    name: str
    version: str
    line: str
    """Version and marker, which pip takes as a constraint."""
    hashes: tuple[str, ...]


def pins(requirements: Path) -> list[Pin]:
    """The libraries of *requirements*, as `uv pip compile --generate-hashes` writes them; none if there is no file."""
    text = requirements.read_text() if requirements.is_file() else ""
    libraries = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if pinned := re.match(r"([A-Za-z0-9._-]+)==([^ ;]+)[^#]*?(?= --hash=)", line):
            hashes = tuple(re.findall(r"--hash=(sha256:[0-9a-f]{64})\b", line))
            libraries.append(Pin(normalised(pinned[1]), pinned[2], pinned[0].strip(), hashes))
    return libraries


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def add(folder: Path, requirement: str) -> None:
    """All that is installed is a constraint: pip adds what is missing, or says which two versions do not go together.

    Only what it would add is put into *folder*. With `--target` alone pip would put there whatever the package needs,
    and another version of a library could come before the one that vLLM was built with. Raises NoHashError before
    anything is added; pip itself refuses a file that has another hash.
    """
    wanted, *own_hashes = re.split(r"\s+--hash=", requirement.strip())
    is_here = Path(wanted).exists()
    if not is_here and not (own_hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in own_hashes)):
        raise NoHashError(f"{wanted} has no hash: write '{wanted} --hash=sha256:…', the SHA-256 of the wheel")
    known, there = pins(Path(__file__).with_name("requirements.txt")), installed()
    with tempfile.TemporaryDirectory() as scratch:
        constraints, plan, hashed = (Path(scratch, name) for name in ("constraints.txt", "plan.json", "hashed.txt"))
        lines = [f"{name}=={version}" for name, version in sorted(there.items())]
        lines += [pin.line for pin in known if pin.name not in there]
        constraints.write_text("".join(f"{line}\n" for line in lines))
        # Of an index wheels alone: to look at anything else would be to run it. A folder that is here is still built.
        wheels = ("--only-binary", ":all:")
        _pip("--dry-run", "--report", str(plan), "--constraint", str(constraints), *wheels, wanted)
        checked, unchecked = [], []
        for each in json.loads(plan.read_text())["install"]:
            name, version, url = each["metadata"]["name"], each["metadata"]["version"], each["download_info"]["url"]
            is_file = url.startswith("file:")
            hashes = own_hashes if each["requested"] else _hashes(known, name, version)
            place = f"{name} @ {url}" if is_file else f"{name}=={version}"
            if hashes:
                checked.append(" ".join([place, *(f"--hash={each}" for each in hashes)]))
            elif is_file:  # whoever put it on this machine may as well have changed this script
                unchecked.append(place)
            else:
                raise NoHashError(f"requirements.txt has no hash of {name} {version}: add it there")
        folder.mkdir(parents=True, exist_ok=True)
        if checked:
            hashed.write_text("".join(f"{line}\n" for line in checked))
            _pip(
                *("--require-hashes", "--only-binary", ":all:", "--no-deps"),
                *("--target", str(folder), "--requirement", str(hashed)),
            )
        if unchecked:
            _pip("--no-deps", "--target", str(folder), *unchecked)


def _hashes(known: Sequence[Pin], name: str, version: str) -> list[str]:
    return [each for pin in known if (pin.name, pin.version) == (normalised(name), version) for each in pin.hashes]


def link(folder: Path) -> None:
    """A .pth file puts *folder* at the end of the path, in every process of this Python; its commands get links."""
    Path(sysconfig.get_path("purelib"), "vllm-graphfix.pth").write_text(f"{folder.resolve()}\n")
    for command in (folder / "bin").glob("vllm-graphfix"):
        Path(sysconfig.get_path("scripts"), command.name).symlink_to(command.resolve())


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--no-cache-dir", *arguments], check=True)


def main(arguments: Sequence[str]) -> int:
    try:
        if len(arguments) == 3 and arguments[0] == "add":
            add(Path(arguments[1]), arguments[2])
        elif len(arguments) == 2 and arguments[0] == "link":
            link(Path(arguments[1]))
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except NoHashError as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as failed:  # pip has said why
        return failed.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
