"""Other people's packages for tests, in folders of their own.

Beside the libraries of the tests they would be in every process: ddtrace brings a plugin of pytest, Arctic Inference
one of vLLM.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import fetch_vllm

_HERE = Path(__file__).parents[1]
REQUIREMENTS = _HERE / "requirements-others.txt"
ARCTIC = "0.2.0"
"""The version of Arctic Inference: its patches are for vLLM 0.18.0. PyPI has its source alone; what it compiles is not
needed to put them on."""


@cache
def packages() -> Path:
    """Return the packages of ``requirements-others.txt``, to be put on the Python path; fetched if it is missing."""

    def install(into: Path) -> None:
        # Without what they ask for: it is named there too, or is what the tests have.
        run_pip(
            "install", "--no-deps", "--only-binary=:all:", "--target", str(into), "--requirement", str(REQUIREMENTS)
        )

    key = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    return _cached(f"others-{sys.implementation.cache_tag}-{key}", install)


@cache
def arctic_inference() -> Path:
    """Arctic Inference as a folder for the Python path; fetched if it is missing."""

    def unpack(into: Path) -> None:
        exact = ["--no-deps", "--no-binary=:all:", "--no-build-isolation", f"arctic-inference=={ARCTIC}"]
        run_pip("download", "--dest", str(into), *exact)
        (archive,) = into.glob("*.tar.gz")
        with tarfile.open(archive) as contents:
            contents.extractall(into, filter="data")
        (source,) = into.glob("*/pyproject.toml")
        for part in ("arctic_inference", "arctic_inference.egg-info"):
            (source.parent / part).rename(into / part)
        shutil.rmtree(source.parent)
        archive.unlink()

    return _cached(f"arctic-inference-{ARCTIC}", unpack)


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """The folder *name* beside the stock releases."""
    cache_folder = fetch_vllm.cache_folder()
    tree = cache_folder / name
    if not tree.is_dir():
        with fetch_vllm.only_one_fetches(name, cache_folder) as staging:
            if not tree.is_dir():  # else another process did it while we waited
                (staging / "tree").mkdir()
                make(staging / "tree")
                (staging / "tree").rename(tree)
    return tree


def run_pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def install_plugin(folder: Path) -> Path:
    """`other_plugin.py` as an installed distribution in *folder*, for the Python path."""
    metadata = folder / "other_plugin-1.0.dist-info"
    metadata.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("other_plugin.py"), folder)
    (metadata / "METADATA").write_text("Metadata-Version: 2.4\nName: other-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nother = other_plugin:register\n")
    return folder


if __name__ == "__main__":
    sys.stdout.write(f"{packages()}\n{arctic_inference()}\n")
