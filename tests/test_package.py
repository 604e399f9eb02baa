"""The built packages, and what installing them brings along."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import vllm_graphfix
from stock import release_root
from table import verdict
from test_docs_commands import BUILDER, CLONE, DOWNLOAD, INSTALL, UNINSTALL
from test_source import wheel_of
from vllm_graphfix.fixes import BY_NAME
from wheels import write_wheel

PROJECT = Path(__file__).parent.parent


pytestmark = pytest.mark.xdist_group("packages")


@pytest.fixture
def built(committed: tuple[Path, dict[str, bytes]]) -> Path:
    """The folder with the sdist and the wheel."""
    tree, _ = committed
    return tree / "dist"


@pytest.fixture
def wheel(built: Path) -> zipfile.Path:
    return zipfile.Path(next(built.glob("*.whl")))


@pytest.fixture
def metadata(wheel: zipfile.Path) -> importlib.metadata.Distribution:
    folder = next(entry for entry in wheel.iterdir() if entry.name.endswith(".dist-info"))
    return importlib.metadata.PathDistribution(folder)


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.Path) -> None:
    """Every module, manifest and py.typed is in the wheel; tests, docs, tools and benchmarks are not."""
    ours = {
        path.relative_to(PROJECT).as_posix()
        for path in (PROJECT / "vllm_graphfix").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in wheel.root.namelist() if ".dist-info/" not in name and not name.endswith("/")}
    assert packed == ours
    assert "vllm_graphfix/py.typed" in packed
    assert [name for name in packed if name.startswith("vllm_graphfix/manifest") and name.endswith(".json")]


def test_the_wheel_says_which_setuptools_made_it(built: Path) -> None:
    """By the command that SECURITY.md shows."""
    command = "unzip -p vllm_graphfix-*.whl '*/WHEEL'"
    assert command in (PROJECT / "SECURITY.md").read_text()
    if shutil.which("unzip") is None:
        pytest.skip("unzip is not installed")
    output = subprocess.run(["/bin/bash", "-c", command], cwd=built, capture_output=True, text=True, check=True).stdout
    assert f"Generator: setuptools ({importlib.metadata.version('setuptools')})" in output


def test_sdist_holds_what_a_developer_needs(built: Path) -> None:
    """Tests, docs, benchmarks and tools are in the sdist, with the files that build and describe the project."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "setup.py", "pyproject.toml", "MANIFEST.in"} <= names
    assert {"tests", "docs", "benchmarks", "tools", "deploy", "examples", ".github", ".ci/run"} <= names
    assert {"CONTRIBUTING.md", "SECURITY.md", "mkdocs.yml", ".pre-commit-config.yaml"} <= names
    assert not [name for name in names if "__pycache__" in name]


def test_version_has_one_source(metadata: importlib.metadata.Distribution) -> None:
    """The version of the wheel is the one that the package states."""
    assert metadata.version == vllm_graphfix.__version__


def test_links_of_the_description_are_whole(metadata: importlib.metadata.Distribution) -> None:
    """PyPI shows README.md without the tree."""
    text = str(metadata.read_text("METADATA")).partition("\n\n")[2]
    assert text.count("\n") == (PROJECT / "README.md").read_text().count("\n")
    linked = re.findall(r"\]\(([^)\s]+)\)|^\[[^]\n]+\]: (\S+)$", text, re.MULTILINE)
    assert linked
    assert [target for pair in linked for target in pair if target and not target.startswith("https://")] == []
    source = next(
        address
        for name, _, address in (url.partition(", ") for url in metadata.metadata.get_all("Project-URL") or ())
        if name == "Source"
    )
    assert f"{source}/blob/main/docs/am-i-hit.md" in text
    assert f"{source.replace('//github.com', '//raw.githubusercontent.com')}/main/docs/status.svg" in text


def test_installing_moves_no_peer(metadata: importlib.metadata.Distribution) -> None:
    """Only these four libraries are required; vLLM comes with its extra, torch and the rest with none."""
    requirements = [Requirement(line) for line in metadata.requires or ()]
    required = {each.name for each in requirements if not each.marker or each.marker.evaluate({"extra": ""})}
    optional = {each.name: each for each in requirements if each.name not in required}
    assert required == {"psutil", "rich", "typer", "wrapt"}
    assert {"vllm", "torch", "triton", "flashinfer", "flashinfer-python"} & set(optional) == {"vllm"}
    assert str(optional["vllm"].marker) == 'extra == "vllm"'
    assert metadata.metadata.get_all("Provides-Extra") == [
        "prometheus",
        "vllm",
    ]  # what developers need is no business of a wheel's
    assert SpecifierSet(metadata.metadata["Requires-Python"]).contains("3.10")


def test_the_metadata_have_the_addresses_of_the_project(metadata: importlib.metadata.Distribution) -> None:
    """Every address begins with the source's, and each that names a file of the tree names one that is there."""
    urls = dict(line.split(", ", 1) for line in metadata.metadata.get_all("Project-URL") or ())
    assert set(urls) == {"Documentation", "Source", "Issues", "Changelog", "Security"}
    assert [address for address in urls.values() if not address.startswith(urls["Source"])] == []
    in_tree = [address.partition("/main/")[2] for address in urls.values() if "/main/" in address]
    assert [path for path in in_tree if not (PROJECT / path).exists()] == []
    assert len(in_tree) == 3


def test_entry_points(metadata: importlib.metadata.Distribution) -> None:
    """The wheel names the plugin for vLLM and the command for the shell, each pointing at something callable."""
    points = {(point.group, point.name): point.value for point in metadata.entry_points}
    assert points == {
        ("vllm.general_plugins", "graphfix"): "vllm_graphfix:register",
        ("console_scripts", "vllm-graphfix"): "vllm_graphfix.commands.cli:main",
    }
    for point in metadata.entry_points:
        assert callable(point.load())


def test_plugin_is_installed_here() -> None:
    """The tests run against an installed plugin, as vLLM finds it, and it is this tree's."""
    (point,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="graphfix")
    assert point.value == "vllm_graphfix:register"
    assert Path(vllm_graphfix.__file__).parent == PROJECT / "vllm_graphfix"


@pytest.mark.slow
def test_an_empty_environment_judges_a_wheel_of_vllm(built: Path, tmp_path: Path) -> None:
    """Installed is nothing but what the wheel brings, neither vLLM nor torch.

    `uvx vllm-graphfix` and `pipx run vllm-graphfix` do so.
    """
    vllm = tmp_path / "vllm-0.18.1-cp38-abi3-manylinux_2_31_x86_64.whl"
    wheel_of(release_root("0.18.1"), vllm)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "empty")], check=True)
    program = tmp_path / "empty" / "bin"
    install = [str(program / "python"), "-m", "pip", "install", "--quiet", *map(str, built.glob("*.whl"))]
    subprocess.run(install, check=True)
    command = [str(program / "vllm-graphfix"), "status", "--json", "--vllm", str(vllm)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    diagnoses = {row["name"]: row["diagnosis"] for row in json.loads(done.stdout)["fixes"]}
    assert diagnoses == {name: verdict(name, "0.18.1") for name in BY_NAME}


@pytest.fixture
def run_from_page(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that runs a page's command in its own folder, with a local index, and returns its output."""
    index = tmp_path / "index"
    index.mkdir()
    shutil.copy(next(built.glob("*.whl")), index)
    write_wheel(index, {"build_double.py": b"", "build-1.2.2.dist-info/RECORD": b""}, "build", "1.2.2")
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_NO_DEPS": "1",  # the libraries are no subject here, and in no folder
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }.items():
        monkeypatch.setenv(name, value)

    def run(command: str) -> str:
        here = {
            "VERSION": vllm_graphfix.__version__,
            "/tmp/build": str(tmp_path / "build"),  # noqa: S108 - it is what is not used
            "REPOSITORY": str(tmp_path / "repository"),
        }
        for word, instead in here.items():
            command = command.replace(word, instead)
        done = subprocess.run(
            ["/bin/bash", "-euo", "pipefail", "-c", command],
            cwd=tmp_path,
            input="y\n",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_the_commands_that_install_and_remove_it_do(
    run_from_page: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into an environment of their own: pip's variable for its `--python` says which."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "empty")], check=True)
    python = tmp_path / "empty" / "bin" / "python"
    monkeypatch.setenv("PIP_PYTHON", str(python))
    version = [str(python), "-c", "import vllm_graphfix; print(vllm_graphfix.__version__)"]
    run_from_page(INSTALL)
    there = subprocess.run(version, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert there.stdout == f"{vllm_graphfix.__version__}\n"
    run_from_page(UNINSTALL)
    assert subprocess.run(version, cwd=tmp_path, capture_output=True, check=False).returncode == 1
    assert list((tmp_path / "empty").rglob("*graphfix*")) == []


PYTHON = f"""#!/bin/sh
set -e
{sys.executable} "$@" --without-pip
printf '#!/bin/sh\\nexec {sys.executable} -m pip --python %s/bin/python "$@"\\n' "$3" > "$3/bin/pip"
chmod +x "$3/bin/pip"
"""
"""Stands in for `python3 -m venv FOLDER`: installing a pip there takes more time than all the rest."""


def test_the_commands_that_fetch_a_release_to_compare_it_do(
    built: Path, run_from_page: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wheel,) = built.glob("*.whl")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in run_from_page(DOWNLOAD)
    run_from_page(f"git clone --quiet --bare {PROJECT} REPOSITORY && git -C REPOSITORY tag vVERSION")
    assert run_from_page(f"{CLONE} && ls").split().count("Makefile") == 1
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(PYTHON)
    (tmp_path / "bin" / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    run_from_page(BUILDER)
    assert (tmp_path / "build" / "bin" / "python").exists()
    assert list((tmp_path / "build").rglob("build_double.py"))
