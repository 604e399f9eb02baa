"""A plugin of pytest that runs upstream's tests with vLLM's plugins loaded, as in an engine's process.

After each test it writes, into the folder that $GRAPHFIX_OUTCOMES names, the outcome of each phase to `outcomes`, and,
to a file of this process, the fixes that ended `failed` and how often each wrapper of a fix was called.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

_calls: Counter[str] = Counter()
_folder = Path(os.environ["GRAPHFIX_OUTCOMES"])


def pytest_configure(config: pytest.Config) -> None:
    """Count the calls of what the fixes put in place, then load vLLM's plugins."""
    from vllm.plugins import load_general_plugins

    from vllm_graphfix.patching import sites

    set_layer = sites.Site.set_layer

    def set_counted_layer(self: Any, fix: str, new: Any) -> None:
        set_layer(self, fix, new if new is None else _counted(new, f"{fix}: {self.name}"))

    sites.Site.set_layer = set_counted_layer  # type: ignore[method-assign]
    load_general_plugins()
    pytest_runtest_logfinish()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out upstream's cleaning of the device after each test where there is none: it takes most of the time."""
    import torch

    if not torch.accelerator.is_available():
        for item in items:
            item.add_marker("skip_global_cleanup")


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
    """Write the outcome of one phase of a test."""
    _write(report.nodeid, report.when, report.outcome)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write a module that could not be collected."""
    if report.outcome != "passed":
        _write(report.nodeid, "collect", report.outcome)


def _write(test: str, phase: str, outcome: str) -> None:
    """Append one line; a worker's reports reach pytest-xdist's controller, which writes them."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with (_folder / "outcomes").open("a") as file:
            file.write(json.dumps([test, phase, outcome]) + "\n")


def pytest_runtest_logfinish() -> None:
    """Write the fixes that failed and the calls so far: a run may be ended at any time."""
    import vllm_graphfix

    states = vllm_graphfix.states()
    failed = {name: state.reason for name, state in states.items() if state.state.value == "failed"}
    fresh = _folder / f"{os.getpid()}.new"
    fresh.write_text(json.dumps({"failed": failed, "calls": _calls}))
    fresh.replace(fresh.with_suffix(".json"))
