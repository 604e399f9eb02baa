"""tools/install.py hands uv what pip is configured with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import install

PIP_CONF = """\
[global]
index-url = https://mirror.example/simple
extra-index-url =
    https://one.example/simple
    file:///two/simple
find-links = /wheels /more-wheels
cert = /certificates.pem
"""


def listed(folder: Path, **variables: str) -> str:
    """Return pip's list of its configuration, with the file above alone."""
    (folder / "pip.conf").write_text(PIP_CONF)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment.update(PIP_CONFIG_FILE=str(folder / "pip.conf"), **variables)
    command = [sys.executable, "-m", "pip", "config", "list"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_uv_asks_the_indexes_that_pip_would(tmp_path: Path) -> None:
    variables = install.uv_variables(listed(tmp_path))
    assert variables["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert variables["UV_INDEX"].split() == ["https://one.example/simple", "file:///two/simple"]
    assert variables["UV_FIND_LINKS"].split(",") == ["/wheels", "/more-wheels"]
    assert variables["SSL_CERT_FILE"] == "/certificates.pem"


def test_a_variable_of_pip_overrules_its_file(tmp_path: Path) -> None:
    variables = install.uv_variables(listed(tmp_path, PIP_INDEX_URL="https://named.example/simple"))
    assert variables["UV_DEFAULT_INDEX"] == "https://named.example/simple"


def test_without_configuration_uv_has_its_defaults() -> None:
    assert install.uv_variables("") == {"UV_INDEX_STRATEGY": "unsafe-best-match"}
