"""Small wheels that pip finds in place of the network's."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

MakeWheel = Callable[..., Path]


@pytest.fixture
def wheel_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which pip looks for wheels, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def write_wheel(
    index: Path,
    files: dict[str, bytes],
    name: str,
    version: str,
    tag: str = "py3-none-any",
    *,
    requires: Sequence[str] = (),
) -> Path:
    """*files* come on top of what a wheel needs."""
    named = f"{name.replace('-', '_')}-{version}"
    path = index / f"{named}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nSummary: Version: 1\n"
        metadata += "".join(f"Requires-Dist: {each}\n" for each in requires)
        wheel.writestr(f"{named}.dist-info/METADATA", metadata)
        wheel.writestr(f"{named}.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        for member, data in files.items():
            wheel.writestr(member, data)
    return path
