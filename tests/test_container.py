"""deploy/container: an image of vLLM gets the plugin, and nothing in it moves.

No Docker is needed: the Dockerfile's own commands run in a virtual environment that stands in for the image.
"""

from __future__ import annotations

import functools
import hashlib
import http.server
import importlib.metadata
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from stock import release_environment, release_root

CONTAINER = Path(__file__).parent.parent / "deploy" / "container"
PROJECT = CONTAINER.parent.parent
REQUIREMENTS = (CONTAINER / "requirements.txt").read_text()
DOCKERFILE = (CONTAINER / "Dockerfile").read_text()


def wheel(folder: Path, name: str, *needs: str) -> Path:
    """A wheel with one empty module and a command, version 1."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1-py3-none-any.whl"
    info = f"{name}-1.dist-info"
    metadata = "".join(
        ["Metadata-Version: 2.1\n", f"Name: {name}\nVersion: 1\n", *(f"Requires-Dist: {n}\n" for n in needs)]
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "def main(): print('it runs')\n")
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/entry_points.txt", f"[console_scripts]\nvllm-graphfix = {name}:main\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def run_add(
    python: str, *arguments: str | Path, links: Path | None = None, index: str | None = None, folder: Path = CONTAINER
) -> subprocess.CompletedProcess[str]:
    """add.py of *folder* in *python*, whose pip finds what is in *links*, or at *index*, and nothing else."""
    environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links), "PIP_CONFIG_FILE": "/dev/null"}
    if index is not None:
        environment = {"PIP_INDEX_URL": index, "PIP_CONFIG_FILE": "/dev/null", "NO_PROXY": "127.0.0.1"}
    return subprocess.run(
        [python, str(folder / "add.py"), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_is_missing_is_added_and_what_is_there_is_not(tmp_path: Path) -> None:
    """This Python has typer; a newer one in the folder would never be looked at, and an older one must not be."""
    links = tmp_path / "links"
    wheel(links, "needed")
    added = wheel(links, "added_thing", "needed", "typer")
    done = run_add(sys.executable, "add", tmp_path / "packages", added, links=links)
    assert done.returncode == 0, done.stdout + done.stderr
    there = {path.name for path in (tmp_path / "packages").iterdir()}
    assert there - {"__pycache__"} == {
        "added_thing.py", "added_thing-1.dist-info", "needed.py", "needed-1.dist-info", "bin"
    }  # fmt: skip


def test_a_library_that_does_not_fit_is_named_and_nothing_is_added(tmp_path: Path) -> None:
    added = wheel(tmp_path / "links", "added_thing", "typer<0.1")
    done = run_add(sys.executable, "add", tmp_path / "packages", added, links=tmp_path / "links")
    assert done.returncode != 0
    assert "(constraint) typer==" in done.stdout
    assert not (tmp_path / "packages").exists()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """The address of an index with `added-thing`, which needs `needed`; their wheels are in ``simple``."""
    for name, needs in (("added_thing", ["needed"]), ("needed", [])):
        folder = tmp_path / "simple" / name.replace("_", "-")
        made = wheel(tmp_path / "made", name, *needs)
        folder.mkdir(parents=True)
        shutil.move(made, folder)
        (folder / "index.html").write_text(f'<a href="{made.name}">{made.name}</a>')
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


def hash_of(name: str, folder: Path) -> str:
    (made,) = folder.glob(f"simple/*/{name}-1-*.whl")
    return f"--hash=sha256:{hashlib.sha256(made.read_bytes()).hexdigest()}"


def script_with(requirements: str, folder: Path) -> Path:
    """A folder with add.py and these requirements beside it."""
    beside = folder / "beside"
    beside.mkdir()
    shutil.copy(CONTAINER / "add.py", beside)
    (beside / "requirements.txt").write_text(requirements)
    return beside


def test_what_comes_from_an_index_has_the_hashes_that_were_named(index: str, tmp_path: Path) -> None:
    beside = script_with(f"needed==1 ; python_version >= '3' \\\n    {hash_of('needed', tmp_path)}\n", tmp_path)
    requirement = f"added-thing==1 {hash_of('added_thing', tmp_path)}"
    done = run_add(sys.executable, "add", tmp_path / "packages", requirement, index=index, folder=beside)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"added_thing.py", "needed.py"} <= {path.name for path in (tmp_path / "packages").iterdir()}


WRONG = "--hash=sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("requirement", "library", "why"),
    [
        ("added-thing==1", "needed==1 {}", "added-thing==1 has no hash: write 'added-thing==1 --hash=sha256:…'"),
        ("added-thing==1 --hash=sha256:FILL-IN", "needed==1 {}", "added-thing==1 has no hash"),
        (f"added-thing==1 {WRONG}", "needed==1 {}", "DO NOT MATCH THE HASHES"),
        ("added-thing==1 {}", "", "requirements.txt has no hash of needed 1: add it there"),
        ("added-thing==1 {}", f"needed==1 {WRONG}", "DO NOT MATCH THE HASHES"),
    ],
)
def test_what_comes_from_an_index_without_its_hash_is_not_added(
    requirement: str, library: str, why: str, index: str, tmp_path: Path
) -> None:
    beside = script_with(library.format(hash_of("needed", tmp_path)), tmp_path)
    wanted = requirement.format(hash_of("added_thing", tmp_path))
    done = run_add(sys.executable, "add", tmp_path / "packages", wanted, index=index, folder=beside)
    assert done.returncode == 1
    assert why in done.stdout + done.stderr
    assert not list(tmp_path.glob("packages/*.py"))


def test_every_library_of_the_plugin_is_pinned_with_hashes() -> None:
    pins = re.findall(r"^([a-z0-9-]+)==.*((?:\\\n    --hash=sha256:[0-9a-f]{64} ?)+)$", REQUIREMENTS, re.MULTILINE)
    names = re.findall(r"^([a-z0-9-]+)==", REQUIREMENTS, re.MULTILINE)
    assert [name for name, _ in pins] == names
    required = [Requirement(each) for each in importlib.metadata.requires("vllm-graphfix") or ()]
    assert {each.name for each in required if each.marker is None} <= set(names)


def test_a_linked_folder_is_behind_all_that_the_image_has(tmp_path: Path) -> None:
    packages, image = tmp_path / "packages", tmp_path / "image"
    packages.mkdir()
    (packages / "only_here.py").touch()
    (packages / "in_both.py").write_text("raise AssertionError")
    (packages / "bin").mkdir()
    (packages / "bin" / "vllm-graphfix").write_text("#!/bin/sh\necho it runs\n")
    (packages / "bin" / "vllm-graphfix").chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(image)], check=True)
    (site,) = image.glob("lib/python3*/site-packages")
    (site / "in_both.py").touch()
    python = str(image / "bin" / "python")
    assert run_add(python, "link", packages).returncode == 0
    subprocess.run([python, "-c", "import in_both, only_here"], check=True)
    done = subprocess.run([image / "bin" / "vllm-graphfix"], capture_output=True, text=True, check=True)
    assert done.stdout == "it runs\n"


@pytest.mark.parametrize("arguments", [[], ["add", "folder"], ["link"], ["freeze"]])
def test_a_call_that_makes_no_sense_says_how(arguments: list[str]) -> None:
    done = run_add(sys.executable, *arguments)
    assert done.returncode == 2
    assert "add.py link FOLDER" in done.stderr


def commands_of_the_dockerfile() -> list[str]:
    return re.findall(r"^RUN (.*)$", DOCKERFILE, re.MULTILINE)


def test_every_image_gets_the_same_folder_and_the_same_commands() -> None:
    """The stage that is pushed, the last stage, and the recipe for other images in the comment."""
    _, link = commands_of_the_dockerfile()
    assert f"#   RUN {link}\n" in DOCKERFILE
    assert re.findall(r"^(?:#   )?COPY --from=\S+ (.*)$", DOCKERFILE, re.MULTILINE) == [
        "/ /opt/vllm-graphfix/",
        "/opt/vllm-graphfix/ /",
        "/ /opt/vllm-graphfix/",
    ]


@pytest.fixture
def python_of_an_image(tmp_path: Path) -> Path:
    """The folder of a virtual environment in which stock 0.18.1 and a torch of no substance are installed."""
    folder = tmp_path / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    info = packages / "torch-2.9.1+cu129.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1+cu129\n")
    for part in release_root("0.18.1").iterdir():
        (packages / part.name).symlink_to(part)
    return folder


def built_in(python: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """The RUN of each stage of the Dockerfile, for this tree."""
    (folder / "opt").mkdir()
    for name in ("add.py", "requirements.txt"):
        shutil.copy(CONTAINER / name, folder / "opt")
    tree = folder / "tree"
    shutil.copytree(PROJECT, tree, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__"))
    command = " && ".join(commands_of_the_dockerfile()).replace("/opt/vllm-graphfix", str(folder / "opt"))
    environment = release_environment("0.18.1", str(folder))
    del environment["PYTHONPATH"]
    environment |= {"GRAPHFIX": str(tree), "PATH": f"{python / 'bin'}:{environment['PATH']}"}
    return subprocess.run(
        ["/bin/sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def site_packages(python: Path) -> set[str]:
    (packages,) = python.glob("lib/python3*/site-packages")
    return {path.name for path in packages.iterdir()}


@pytest.mark.slow
def test_the_image_is_built_with_what_it_had_and_the_plugin(python_of_an_image: Path, tmp_path: Path) -> None:
    before = site_packages(python_of_an_image)
    done = built_in(python_of_an_image, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "vLLM 0.18.1" in done.stdout
    assert "flashmla-fp8" in done.stdout
    assert site_packages(python_of_an_image) - before == {"vllm-graphfix.pth"}


@pytest.mark.slow
def test_a_library_of_the_image_that_is_too_old_fails_the_build(python_of_an_image: Path, tmp_path: Path) -> None:
    """Rather than be moved."""
    pip = [str(python_of_an_image / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "typer==0.15.4", "click<8.2"], check=True)
    done = built_in(python_of_an_image, tmp_path)
    assert done.returncode != 0
    assert "(constraint) typer==0.15.4" in done.stdout
    assert "vLLM 0.18.1" not in done.stdout
