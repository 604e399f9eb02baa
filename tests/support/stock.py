"""Stock vLLM releases for tests: where they are, and code run against one in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import fetch_vllm
from fetch_vllm import ALL_RELEASES
from warm_python import executable

__all__ = [
    "ALL_RELEASES",
    "calling_main",
    "isolated_environment",
    "release_environment",
    "release_root",
    "run_in_release",
]


@cache
def release_root(version: str) -> Path:
    """The folder to put on the Python path; fetched if it is missing, and an error, never a skip, if that fails."""
    return fetch_vllm.release(version)


def run_in_release(
    release: str | Path,
    code: str,
    env: Mapping[str, str] | None = None,
    *,
    check: bool = True,
    timeout: float = 300,
    libraries_loaded: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs *code* in a fresh Python where *release* (a version, or a folder that holds ``vllm/``) is importable.

    The plugin is there as it is in production: installed, found through its entry point. Of this process's environment
    no ``VLLM_`` variable reaches the other; *env* comes on top. With *check*, a non-zero exit code is an AssertionError
    that shows the output. With *libraries_loaded* it is a fork of a Python that has imported torch and
    the like, nothing of vLLM's: for what is not about how a process starts.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-graphfix-") as scratch:
        done = subprocess.run(
            [executable() if libraries_loaded else sys.executable, "-c", textwrap.dedent(code)],
            cwd=scratch,
            env=release_environment(release, scratch) | dict(env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    if check and done.returncode:
        raise AssertionError(f"vLLM {release}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def calling_main(file: str, *arguments: object) -> str:
    """Return code that calls ``main`` of *file*, beside this one, with *arguments*, whose `repr` is code."""
    return f"import runpy\nrunpy.run_path({str(Path(__file__).with_name(file))!r})['main'](*{arguments!r})\n"


def release_environment(release: str | Path, scratch: str) -> dict[str, str]:
    """The environment of a process in which *release* is importable, and which leaves what it writes in *scratch*."""
    root = release_root(release) if isinstance(release, str) else release
    return isolated_environment(scratch) | {"PYTHONPATH": str(root), "VLLM_LOGGING_LEVEL": "ERROR"}


def isolated_environment(scratch: str) -> dict[str, str]:
    """This process's environment without settings of vLLM's and the plugin's; what a process writes is in *scratch*."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return clean | {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_GRAPHFIX_STATUS_DIR": scratch,
        "CUDA_VISIBLE_DEVICES": "",  # the CPU is what is tested, also where there is a GPU
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # tests run side by side
        "XDG_CACHE_HOME": scratch,  # vLLM keeps what it finds out about models
        "XDG_CONFIG_HOME": scratch,
    }
