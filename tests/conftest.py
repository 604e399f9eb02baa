"""Fixtures and hooks for every test. Stock releases, and code run against them: see ``stock.py``."""

from __future__ import annotations

import ast
import functools
import gc
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FunctionType, SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

import warm_python
import warm_release
from fleets import alone, serve, start, two  # noqa: F401 - fixtures
from needs_release import modules_that_need_releases
from promtool import promtool  # noqa: F401 - a fixture
from served_models import among_models, served_models  # noqa: F401 - fixtures
from stock import ALL_RELEASES, release_root
from vllm_graphfix.source import files
from wheels import wheel_index  # noqa: F401 - a fixture

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
    """No test depends on how the person who runs it has set up vLLM or the plugin."""
    for name in list(os.environ):
        if name.startswith("VLLM_"):
            monkeypatch.delenv(name)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups, and before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what needs releases of vLLM.

    Tests of one release run in one process of pytest: a warm process of it serves them all.
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
    """Tests that share what their module makes run in one process, too: another one would make it again."""
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
    return _release_in_a_fork(item.function)


_IN_FORKS = {"run_in_fork", "check_behaviours"}
"""What runs code in a fork of the warm process of a release."""


@functools.cache
def _release_in_a_fork(function: Callable[..., object]) -> str | None:
    """The release that a test names, itself or by a function beside it, which runs code in a fork of that release."""
    code, around = function.__code__, function.__globals__
    beside = [around[name].__code__ for name in code.co_names if isinstance(around.get(name), FunctionType)]
    forking = [each for each in (code, *beside) if _IN_FORKS & {*each.co_names}]
    named = {each for code in forking for each in code.co_consts if each in ALL_RELEASES}
    return named.pop() if len(named) == 1 else None


gc.disable()  # nothing of what is imported and collected goes away


def pytest_collection_finish() -> None:
    """From here on no collection of garbage goes through all of that."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*warm_python.SELDOM)


@pytest.fixture(scope="session", autouse=True)
def _files_of_releases_are_parsed_once() -> Iterator[None]:
    """Tests of one release follow each other, and nobody changes a tree."""
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
    """Each stock release in turn; ``@pytest.mark.parametrize("release", [...])`` instead where fewer will do."""
    version: str = request.param
    release_root(version)
    return version


# `nohup` and a shell's background jobs ignore these, and every process that a test starts and interrupts would
# inherit that.
for ignored in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler if ignored == signal.SIGINT else signal.SIG_DFL)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tables of what tests say that they counted, as (table, row, column, number)."""
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
