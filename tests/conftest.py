"""What every test gets. Stock releases, and code run against them: see ``stock.py``."""

from __future__ import annotations

import os

import pytest
from stock import ALL_RELEASES, release_root


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on how the person who runs it has set up vLLM or the plugin."""
    for name in list(os.environ):
        if name.startswith("VLLM_"):
            monkeypatch.delenv(name)


@pytest.fixture(params=ALL_RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """Each of the 29 releases in turn; ``@pytest.mark.parametrize("release", [...])`` instead where fewer will do."""
    version: str = request.param
    release_root(version)
    return version
