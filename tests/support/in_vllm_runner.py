"""Runs tests of `in_vllm` in a process of a release, with the plugin loaded; see `behaviours.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from vllm.plugins import load_general_plugins

_OPTIONS = (
    *("-q", "--no-header", "--noconftest", "--strict-markers", "--tb=short", "--disable-warnings"),
    *("-p", "no:cacheprovider", "--disable-plugin-autoload", "-rfE", "-c", os.devnull),
)


def main(paths: list[str], select: str, active: list[str]) -> None:
    """Exit with pytest's code, or with 1 if a fix of *active* is not active after the tests."""
    here = Path(__file__)
    sys.path.append(str(here.parent))
    load_general_plugins()
    import vllm_graphfix
    from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins

    package = here.parents[2] / "vllm_graphfix" / "__init__.py"
    assert package.samefile(str(vllm_graphfix.__file__)), "the plugin that is installed is that of another tree"
    install_flashmla_stand_ins()
    code = pytest.main([*_OPTIONS, "--rootdir", str(here.parents[1] / "in_vllm"), "-k", select, *paths])
    states = {name: vllm_graphfix.states()[name].state.value for name in active}
    if {*states.values()} - {"active"}:
        print(states)  # noqa: T201 - for the assertion of the test
        code = 1
    sys.exit(code)
