"""Fixtures and hooks for every test. Stock releases, and code run against them: see ``stock.py``."""

from __future__ import annotations

import ast
import functools
import gc
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

import warm_python
import warm_release
from fleets import alone, serve, start, two  # noqa: F401 - fixtures
from needs_release import modules_that_need_releases
from packed import committed  # noqa: F401 - a fixture
from promtool import promtool  # noqa: F401 - a fixture
from served_models import among_models, served_models  # noqa: F401 - fixtures
from stock import ALL_RELEASES, release_root
from vllm_graphfix.source import files
from wheels import wheel_index  # noqa: F401 - a fixture

# torch's stores look up a name for 127.0.0.1 at each connection: a packet that a name server loses costs 5 s otherwise.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
gc.disable()  # until tests run: nothing of what is imported and collected goes away
# `nohup` and a shell's background jobs ignore these, and every process that a test starts and interrupts would
# inherit that.
for ignored in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler if ignored == signal.SIGINT else signal.SIG_DFL)

# The same examples everywhere and each time. `make test-all` runs "whole" (--hypothesis-profile).
settings.register_profile(
    "sample",
    max_examples=30,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("whole", settings.get_profile("sample"), max_examples=600)
settings.load_profile("sample")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        held = ExitStack()
        config.add_cleanup(held.close)
        held.enter_context(warm_python.shared())


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove settings of vLLM and the plugin from the environment: no test depends on who runs it."""
    for name in list(os.environ):
        if name.startswith("VLLM_"):
            monkeypatch.delenv(name)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups, and before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that need a release, if ``-m`` asks for these, and group tests by release.

    One process of pytest then runs all tests of a release, in forks of one warm process.
    """
    if "release" in config.getoption("markexpr"):  # to find out which these are takes a second
        needing = modules_that_need_releases()
        for item in items:
            if item.path.stem in needing:
                item.add_marker(pytest.mark.release)
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if item.get_closest_marker("xdist_group") is None and (group := _group(item)):
            item.add_marker(pytest.mark.xdist_group(group))


def _group(item: pytest.Item) -> str | None:
    """Return the release that *item* is about, or its module if it shares what that makes; None for any process.

    A test whose fork's release is no parameter names it by `xdist_group`.
    """
    callspec = getattr(item, "callspec", None)
    parameters = callspec.params if callspec else {}
    if isinstance(release := parameters.get("release"), str):
        return release
    if not isinstance(item, pytest.Function):
        return None
    if any(fixture[-1].scope == "module" for fixture in item._fixtureinfo.name2fixturedefs.values()):
        return item.path.stem
    for value in parameters.values():  # an edit of a release, or a row of a trial: the others' files are parsed once
        if "release" in getattr(type(value), "_fields", ()):  # of the type: a stand-in's own attributes may raise
            return str(value.release)
    return None


def pytest_collection_finish() -> None:
    """Turn garbage collection on again; it leaves out what was imported and collected before."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*warm_python.SELDOM)


@pytest.fixture(scope="session", autouse=True)
def _files_of_releases_are_parsed_once() -> Iterator[None]:
    """Parse each file of a release once: tests of one release follow each other, and a release's files never change."""
    parse = functools.lru_cache(maxsize=128)(ast.parse)  # all fixes read 70 of one
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(files, "ast", SimpleNamespace(**vars(ast) | {"parse": parse}))
        yield


@pytest.fixture(scope="session", autouse=True)
def _end_of_warm_processes() -> Iterator[None]:
    yield
    warm_release.end_process()
    warm_python.end_processes()


@pytest.fixture(params=ALL_RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """Fetch and return each stock release in turn; to run on fewer, parametrize ``release``."""
    version: str = request.param
    release_root(version)
    return version


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a table of each kind of ``record_property("counted", (table, row, column, number))`` of passed tests."""
    tables: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "counted":
                table, row, column, number = value
                tables[table][row, column] += number
    for table, counted in tables.items():
        rows, columns = (sorted({cell[which] for cell in counted}) for which in (0, 1))
        terminalreporter.section(table)
        terminalreporter.write_line(f"| | {' | '.join(columns)} | all |")
        terminalreporter.write_line("|---|" + "---|" * (len(columns) + 1))
        for row in (*rows, "all"):
            sums = [sum(n for (r, c), n in counted.items() if c == column and row in (r, "all")) for column in columns]
            terminalreporter.write_line(f"| {row} | {' | '.join(f'{n:,}' for n in (*sums, sum(sums)))} |")
