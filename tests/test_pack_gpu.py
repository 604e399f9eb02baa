"""The pack for a GPU machine without network, with small wheels in place of vLLM, torch and the rest."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

import pack_gpu
from wheels import write_wheel

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
LINUX = "cp38-abi3-manylinux_2_28_x86_64"
TORCH = b"import types\n__version__ = '2.14.0'\nversion = types.SimpleNamespace(cuda='13.0')\n"


@pytest.fixture(autouse=True)
def stand_ins(wheel_index: Path) -> Path:
    """vLLM 9.9.9, which pins its torch, which pins its CUDA; and this plugin."""

    def make(
        name: str, version: str, *requires: str, tag: str = "py3-none-any", files: dict[str, bytes] | None = None
    ) -> Path:
        module = name.replace("-", "_")
        members = {f"{module}/{each}": data for each, data in (files or {}).items()} or {f"{module}/__init__.py": b""}
        record = "".join(f"{each},,\n" for each in members).encode()
        members |= {f"{module}-{version}.dist-info/RECORD": record}
        return write_wheel(wheel_index, members, name, version, tag, requires=requires)

    make(
        "vllm",
        "9.9.9",
        "torch==2.14.0",
        "web[fast]>=1",
        "old; python_version < '3.8'",
        tag=LINUX,
        files={"a": b"", "b": b"x" * 999},
    )
    make("torch", "2.14.0", "nvidia-cublas==13.1; platform_system == 'Linux'", files={"__init__.py": TORCH})
    make("torch", "2.14.0+cpu")
    make("nvidia-cublas", "13.1")
    make("web", "1.5", "wire<3; extra == 'fast'", "slow; extra == 'slow'")
    make("wire", "2.0", "web<1.5")
    make("wire", "3.0")
    make("web", "1.2", "wire; extra == 'fast'")
    plugin = make("vllm-graphfix", "0.1.0", "wrapt")
    make("wrapt", "2.0")
    return plugin


def picked(requirements: Sequence[str], folder: Path, python: str, find_links: Sequence[str], index: Path) -> None:
    """In place of pip, which takes seconds: the newest wheel of *index* that is allowed."""
    wheels = sorted((*parse_wheel_filename(path.name)[:2], path) for path in index.glob("*.whl"))
    for requirement in map(Requirement, requirements):
        fits = [path for name, version, path in wheels if name == requirement.name and version in requirement.specifier]
        shutil.copy(fits[-1], folder)


Pack = Callable[..., "set[str]"]


@pytest.fixture
def packed(
    tmp_path: Path, stand_ins: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Pack:
    def pack(*options: str, machine: str = "", code: int = 0, pip: bool = False) -> set[str]:
        """Names and versions of the wheels in the archive."""
        if not pip:
            monkeypatch.setattr(pack_gpu, "download", functools.partial(picked, index=stand_ins.parent))
        (tmp_path / "machine").write_text(machine)
        command = ["9.9.9", "--out", str(tmp_path / "out"), "--plugin", str(stand_ins), "--python", HERE]
        assert pack_gpu.main([*command, "--machine", str(tmp_path / "machine"), *options]) == code, capsys.readouterr()
        if code:
            return set()
        parts = sorted((tmp_path / "out").glob("wheels.tar*"))
        (tmp_path / "whole").write_bytes(b"".join(part.read_bytes() for part in parts))
        with tarfile.open(tmp_path / "whole") as archive:
            archive.extractall(tmp_path / "taken", filter="data")
        return {"-".join(path.name.split("-")[:2]) for path in (tmp_path / "taken" / "wheels").iterdir()}

    return pack


def test_a_bare_machine_gets_everything_that_the_wheels_ask_for_there(packed: Pack) -> None:
    """No CPU build of torch, no package of another Python or extra; a later demand changes a version."""
    names = {"vllm-9.9.9", "torch-2.14.0", "nvidia_cublas-13.1", "web-1.2", "wire-2.0"}
    assert packed() == names | {"vllm_graphfix-0.1.0", "wrapt-2.0"}


def test_what_the_machine_has_and_fits_is_not_packed(packed: Pack, tmp_path: Path) -> None:
    """Nor what only that asks for; a version that does not fit is packed."""
    machine = "torch==2.14.0+cu130\nWrapt==2.5\nweb==0.9\n# a comment\n-e git+https://somewhere\n"
    assert packed(machine=machine) == {"vllm-9.9.9", "web-1.2", "wire-2.0", "vllm_graphfix-0.1.0"}
    readme = (tmp_path / "out" / "README").read_text()
    assert "The machine's own: torch, wrapt.\n" in readme
    assert "Packed: vllm 9.9.9, vllm-graphfix 0.1.0, web 1.2, wire 2.0.\n" in readme


def test_its_own_torch_on_the_machines_cuda(packed: Pack) -> None:
    machine = "torch==2.11.0+cu130\nnvidia-cublas==13.0\nwrapt==2\nweb==1.2\nwire==2\n"
    own = packed("--as-it-is", "nvidia-*", machine=machine)
    assert own == {"vllm-9.9.9", "torch-2.14.0", "vllm_graphfix-0.1.0"}
    assert packed("--as-it-is", "nvidia-*", "--bring", "nvidia-cublas", machine=machine) == own | {"nvidia_cublas-13.1"}


def test_files_omitted_from_wheels_are_in_the_readme(packed: Pack, tmp_path: Path) -> None:
    packed("--leave-out", "vllm/[b]")
    (wheel,) = (tmp_path / "taken" / "wheels").glob("vllm-9*")
    with zipfile.ZipFile(wheel) as archive:
        assert not {"vllm/b"} & set(archive.namelist())
        assert archive.read("vllm-9.9.9.dist-info/RECORD") == b"vllm/a,,\n"
    assert "Left out of the wheels: vllm/b.\n" in (tmp_path / "out" / "README").read_text()


def test_a_missing_wheel_is_named(packed: Pack, stand_ins: Path, capsys: pytest.CaptureFixture[str]) -> None:
    next(stand_ins.parent.glob("vllm-9*")).unlink()
    packed(code=1, pip=True)
    error = capsys.readouterr().err
    assert error.startswith("pack_gpu: pip has no wheel for that machine:\nERROR: ")
    assert "requirement vllm" in error


def test_conflicting_requirements_are_reported_with_the_packages_that_have_them(
    packed: Pack, capsys: pytest.CaptureFixture[str]
) -> None:
    packed("--pin", "wire>=3", code=1, pip=True)
    messages = capsys.readouterr().err.splitlines()[-2:]
    assert messages[0].startswith("wire: <3 for web; >=3 for the command line")
    assert messages[1].endswith("--pin an older release of one that asks for wire")


def test_an_older_release_can_be_pinned(packed: Pack) -> None:
    assert {"web-1.2", "wire-3.0"} <= packed("--pin", "wire>=3", "--pin", "web<1.5")


def test_parts_are_of_at_most_that_size_and_make_the_whole(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    parts = pack_gpu.Parts(tmp_path / "parts", 10)
    for data in (b"12345", b"67890", b"a" * 23, b""):
        assert parts.write(data) == len(data)
    parts.close()
    written = {path.name: path.read_bytes() for path in (tmp_path / "parts").iterdir()}
    assert [len(written[name]) for name in sorted(written)] == [10, 10, 10, 3]
    assert b"".join(written[name] for name in parts.digests) == b"1234567890" + b"a" * 23


def test_the_archive_unpacks_without_a_network(packed: Pack, tmp_path: Path) -> None:
    """In parts; the machine's Python is a virtual environment's, and torch finds its CUDA; a damaged part stops it."""
    packed("--part-size", "1", machine="nvidia-cublas==13.1\nweb==1.2\nwire==2\nwrapt==2\n", pip=True)
    script, folder, machine = tmp_path / "out" / "unpack.sh", tmp_path / "site", tmp_path / "environment"
    venv.create(machine, symlinks=True)
    (packages,) = machine.glob("lib/python*/site-packages")
    (packages / "pip.pth").write_text(sysconfig.get_path("purelib"))
    (packages / "of_the_machine.py").touch()
    command = ["sh", str(script), str(folder)]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(machine / "bin" / "python"), "PIP_CONFIG_FILE": "/dev/null"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, "torch 2.14.0 with CUDA 13.0\n"), done.stderr
    assert list(folder.glob("lib/python*/site-packages/vllm_graphfix/__init__.py"))
    look = "import of_the_machine, vllm_graphfix; print(vllm_graphfix.__file__)"
    seen = subprocess.run(
        [str(folder / "bin" / "python"), "-P", "-c", look], capture_output=True, text=True, check=True
    )
    assert seen.stdout.startswith(str(folder))
    (script.parent / "wheels.tar.000").write_bytes(b"")
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode != 0
    assert "wheels.tar.000" in done.stdout + done.stderr
