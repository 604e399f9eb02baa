"""What every test gets. Stock releases, and code run against them: see ``stock.py``."""

from __future__ import annotations

import os
import signal

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


# `nohup` and a shell's background jobs ignore these, and every process that a test starts and interrupts would inherit that.
for ignored in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler if ignored == signal.SIGINT else signal.SIG_DFL)
