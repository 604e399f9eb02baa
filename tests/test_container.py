"""deploy/container: an image of vLLM gets the plugin, and nothing in it moves.

No Docker is needed: the Dockerfile's own command runs in a virtual environment that stands in for the image.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stock import release_environment, release_root

CONTAINER = Path(__file__).parent.parent / "deploy" / "container"
PROJECT = CONTAINER.parent.parent


def distribution(folder: Path, name: str, version: str) -> Path:
    """A distribution as installed; without files of its own."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("")
    (info / "INSTALLER").write_text("pip\n")
    return info


def installed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """installed.py, for a Python that has just what is in *folder*."""
    command = [sys.executable, "-S", str(CONTAINER / "installed.py"), *arguments]
    environment = {"PYTHONPATH": str(folder)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    folder = tmp_path / "image"
    distribution(folder, "vllm", "0.18.1")
    distribution(folder, "torch", "2.9.1+cu129")
    distribution(folder, "Typing_Extensions", "4.15.0")
    return folder


@pytest.fixture
def constraints(image: Path, tmp_path: Path) -> str:
    done = installed(image, "list")
    assert (done.returncode, done.stdout) == (0, "torch==2.9.1+cu129\ntyping-extensions==4.15.0\nvllm==0.18.1\n")
    (tmp_path / "constraints.txt").write_text(done.stdout)
    return str(tmp_path / "constraints.txt")


def test_what_is_added_is_no_difference(image: Path, constraints: str) -> None:
    distribution(image, "wrapt", "2.0.0")
    done = installed(image, "compare", constraints, "vllm", "torch")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("version", "said"), [("2.10.0", "2.10.0"), (None, "gone")], ids=["moved", "gone"])
def test_a_torch_that_moved_fails_the_build(image: Path, constraints: str, version: str | None, said: str) -> None:
    shutil.rmtree(image / "torch-2.9.1+cu129.dist-info")
    if version is not None:
        distribution(image, "torch", version)
    done = installed(image, "compare", constraints, "vllm", "torch")
    assert (done.returncode, done.stderr) == (1, f"torch was 2.9.1+cu129 and is {said}\n")


def test_an_image_without_vllm_fails_the_build(image: Path, constraints: str) -> None:
    done = installed(image, "compare", constraints, "vllm", "flashinfer-python")
    assert (done.returncode, done.stderr) == (1, "flashinfer-python is not installed in this image\n")


@pytest.mark.parametrize("arguments", [[], ["compare"], ["freeze"]])
def test_a_call_that_makes_no_sense_says_how(image: Path, arguments: list[str]) -> None:
    done = installed(image, *arguments)
    assert done.returncode == 2
    assert "installed.py compare constraints.txt" in done.stderr


def command_of_the_dockerfile() -> str:
    found = re.findall(r"^RUN (.*?[^\\])\n", (CONTAINER / "Dockerfile").read_text(), re.DOTALL | re.MULTILINE)
    (command,) = found
    return str(command)


@pytest.fixture
def python_of_an_image(tmp_path: Path) -> Path:
    """The folder of a virtual environment in which stock 0.18.1 and a torch of no substance are installed."""
    folder = tmp_path / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    distribution(packages, "torch", "2.9.1+cu129")
    for part in release_root("0.18.1").iterdir():
        (packages / part.name).symlink_to(part)
    return folder


def built_in(python: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """The RUN of the Dockerfile, for this tree."""
    (folder / "opt").mkdir()
    shutil.copy(CONTAINER / "installed.py", folder / "opt")
    tree = folder / "tree"
    shutil.copytree(PROJECT, tree, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__"))
    command = command_of_the_dockerfile().replace("/opt/vllm-graphfix", str(folder / "opt"))
    environment = release_environment("0.18.1", str(folder))
    del environment["PYTHONPATH"]
    environment |= {"GRAPHFIX": str(tree), "PATH": f"{python / 'bin'}:{environment['PATH']}"}
    return subprocess.run(
        ["/bin/sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_image_is_built_with_what_it_had_and_the_plugin(python_of_an_image: Path, tmp_path: Path) -> None:
    done = built_in(python_of_an_image, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "vLLM 0.18.1 in " in done.stdout
    assert "flashmla-fp8" in done.stdout


@pytest.mark.slow
def test_a_library_of_the_image_that_is_too_old_fails_the_build(python_of_an_image: Path, tmp_path: Path) -> None:
    """Rather than be moved."""
    pip = [str(python_of_an_image / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "typer==0.15.4", "click<8.2"], check=True)
    done = built_in(python_of_an_image, tmp_path)
    assert done.returncode != 0
    assert "(constraint) typer==0.15.4" in done.stdout
    assert "vLLM 0.18.1 in " not in done.stdout
