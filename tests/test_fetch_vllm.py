"""The cache of stock releases, with pip and a small wheel in place of the network."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

import fetch_vllm
from wheels import MakeWheel, write_wheel


@pytest.fixture(autouse=True)
def make_wheel(wheel_index: Path) -> MakeWheel:
    """Puts a wheel of vLLM 9.9.9 where pip looks, and nowhere else."""

    def make(files: dict[str, bytes]) -> Path:
        return write_wheel(wheel_index, files, "vllm", "9.9.9", "cp38-abi3-manylinux_2_31_x86_64")

    return make


def test_keeps_python_and_drops_compiled_code(make_wheel: MakeWheel, tmp_path: Path) -> None:
    """Shared libraries, kernels' sources and executables are not unpacked; the wheel is deleted."""
    make_wheel({"vllm/a.py": b"A = 1\n", "vllm/_C.abi3.so": b"x", "vllm/k.cuh": b"x", "vllm/server": b"\x7fELF.."})
    root = fetch_vllm.release("9.9.9", tmp_path / "cache")
    files = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert files == {"vllm/a.py", "vllm-9.9.9.dist-info/METADATA", "vllm-9.9.9.dist-info/WHEEL"}
    assert (root / "vllm" / "a.py").read_bytes() == b"A = 1\n"
    assert not list((tmp_path / "cache").rglob("*.whl"))


def test_a_release_in_the_cache_needs_no_pip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A release that is there is not fetched again, also where the cache cannot be written."""
    (tmp_path / "0.18.1").mkdir()
    tmp_path.chmod(0o555)
    assert fetch_vllm.main(["--into", str(tmp_path), "0.18.1"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / '0.18.1'}\n"


def test_keeps_the_wheel_on_demand(make_wheel: MakeWheel, tmp_path: Path) -> None:
    """A kept wheel is beside the folders, also where the release was fetched without it before."""
    make_wheel({"vllm/a.py": b""})
    fetch_vllm.release("9.9.9", tmp_path / "cache")
    assert fetch_vllm.wheel("9.9.9", tmp_path / "cache") is None
    fetch_vllm.release("9.9.9", tmp_path / "cache", keep_wheel=True)
    wheel = fetch_vllm.wheel("9.9.9", tmp_path / "cache")
    assert wheel
    assert zipfile.is_zipfile(wheel)


@pytest.mark.parametrize("name", ["../outside.py", "/outside.py", "vllm/../../outside.py", "..\\outside.py"])
def test_nothing_is_unpacked_outside_the_cache(make_wheel: MakeWheel, tmp_path: Path, name: str) -> None:
    """A wheel with a path that leads out of it is refused, and nothing of it stays."""
    make_wheel({name: b"", "vllm/a.py": b""})
    with pytest.raises(fetch_vllm.FetchError, match="outside its own folder"):
        fetch_vllm.release("9.9.9", tmp_path / "cache")
    assert not list(tmp_path.rglob("*.py"))
    assert not (tmp_path / "cache" / "9.9.9").exists()


def test_a_failed_download_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the version, pip's error and the next step; the exit code is 1."""
    assert fetch_vllm.main(["--into", str(tmp_path / "cache"), "9.9.8"]) == 1
    error = capsys.readouterr().err
    assert "vLLM 9.9.8" in error
    assert "No matching distribution" in error
    assert "pip index versions vllm" in error


@pytest.mark.parametrize("version", ["../x", "0.18.1; rm", "latest", "0.18", ""])
def test_a_version_is_a_version(version: str, tmp_path: Path) -> None:
    """Text that is no version becomes neither a path nor an argument of pip."""
    with pytest.raises(fetch_vllm.FetchError, match="not a version"):
        fetch_vllm.release(version, tmp_path)
