"""What every test gets. Stock releases, and code run against them: see ``stock.py``."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from stock import ALL_RELEASES, release_root

# The same examples everywhere and each time. `make test-all` runs "whole" (--hypothesis-profile).
settings.register_profile(
    "sample",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("whole", settings.get_profile("sample"), max_examples=600)
settings.load_profile("sample")


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A table of the orders that `test_orders.py` has run."""
    ran: Counter[tuple[str, str]] = Counter()
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "orders":
                release, about, orders = value
                ran[release, about] += orders
    if not ran:
        return
    columns = list(dict.fromkeys(about for _, about in ran))
    terminalreporter.section("orders")
    terminalreporter.write_line(f"| release | {' | '.join(columns)} | orders | processes |")
    terminalreporter.write_line("|---|" + "---|" * (len(columns) + 2))
    for release in [*(each for each in ALL_RELEASES if any(each == r for r, _ in ran)), "all"]:
        row = [sum(n for (r, about), n in ran.items() if about == c and release in (r, "all")) for c in columns]
        told = [*row, sum(row), 3 * sum(row)]
        terminalreporter.write_line(f"| {release} | {' | '.join(f'{n:,}' for n in told)} |")
