"""Prometheus's own tool, for the tests that need it. conftest.py has the fixture, for all of these."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import fetch_promtool


@pytest.fixture(scope="session")
def promtool() -> Path:
    """promtool from the PATH or Debian's package.

    Only where neither can be is the test skipped; a failed download is an error.
    """
    try:
        return fetch_promtool.tool("promtool")
    except fetch_promtool.NoDebianError as error:
        pytest.skip(str(error))


def ran(promtool: Path, *arguments: str | Path) -> str:
    # It makes much garbage and holds little: collected an eighth as often, it takes two thirds of the time.
    seldom = os.environ | {"GOGC": "800"}
    done = subprocess.run([promtool, *arguments], env=seldom, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
