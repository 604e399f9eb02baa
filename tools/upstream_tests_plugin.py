"""A plugin of pytest that runs upstream's tests with vLLM's plugins loaded, as in an engine's process.

At the end it writes, into the file that $GRAPHFIX_OUTCOMES names, the outcome of each phase of each test, the fixes
that ended `failed`, and how often each wrapper of a fix was called.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

_phases: defaultdict[str, dict[str, str]] = defaultdict(dict)
_calls: Counter[str] = Counter()


def pytest_configure(config: pytest.Config) -> None:
    """Count the calls of what the fixes put in place, then load vLLM's plugins."""
    from vllm.plugins import load_general_plugins

    from vllm_graphfix.patching import sites

    set_layer = sites.Site.set_layer

    def set_counted_layer(self: Any, fix: str, new: Any) -> None:
        set_layer(self, fix, new if new is None else _counted(new, f"{fix}: {self.name}"))

    sites.Site.set_layer = set_counted_layer  # type: ignore[method-assign]
    load_general_plugins()


def _counted(layer: Any, name: str) -> Any:
    """Count the calls of each wrapper that *layer* makes."""
    _calls[name] += 0

    def counted(stock: Any) -> Any:
        wrapper = layer(stock)

        @functools.wraps(stock)
        def call(*args: Any, **kwargs: Any) -> Any:
            _calls[name] += 1
            return wrapper(*args, **kwargs)

        return call

    return counted


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the outcome of one phase of a test."""
    _phases[report.nodeid][report.when] = report.outcome


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Keep a module that could not be collected."""
    if report.outcome != "passed":
        _phases[report.nodeid]["collect"] = report.outcome


def pytest_sessionfinish() -> None:
    """Write what came of the tests."""
    import vllm_graphfix

    states = vllm_graphfix.states()
    failed = {name: state.reason for name, state in states.items() if state.state.value == "failed"}
    outcome = {"outcomes": _phases, "failed": failed, "calls": _calls}
    Path(os.environ["GRAPHFIX_OUTCOMES"]).write_text(json.dumps(outcome))
