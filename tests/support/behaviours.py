"""Runs a file of ``in_vllm/`` on a stock release.

pytest runs inside a process in which that vLLM and the plugin are loaded.

One process a file and release, a fork of a warm one, since importing vLLM takes seconds. What fails is named in the
output that the assertion shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from stock import run_in_release
from warm_release import run_in_fork

_FOLDER = Path(__file__).parents[1] / "in_vllm"
_PACKAGE = Path(__file__).parents[2] / "vllm_graphfix" / "__init__.py"

_CODE = """
import os, sys
sys.path.append({support!r})
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm_graphfix
assert os.path.samefile(vllm_graphfix.__file__, {package!r}), "the plugin that is installed is that of another tree"
from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins
install_flashmla_stand_ins()
import pytest
options = "-q --no-header --noconftest --strict-markers --tb=short --disable-warnings".split()
options += "-p no:cacheprovider --disable-plugin-autoload -rfE".split()
code = pytest.main([*options, "-c", os.devnull, "--rootdir", {folder!r}, "-k", {select!r}, *{paths!r}])
states = {{name: vllm_graphfix.states()[name].state.value for name in {active!r}}}
if {{*states.values()}} - {{"active"}}:
    sys.exit(print(states) or 1)
sys.exit(code)
"""


def check_behaviours(
    release: str | Path,
    name: str,
    env: Mapping[str, str] | None = None,
    *,
    also: Sequence[str] = (),
    active: Sequence[str] = (),
    select: str = "",
    fresh: bool = False,
) -> None:
    """Runs the tests of ``in_vllm/<name>.py``, and of each of *also*, or those that pytest's ``-k`` *select* names.

    *fresh*: in a Python that has imported nothing yet, for what *env* says to Triton.

    Raises AssertionError with pytest's report if one fails, if there was none to run, or if a fix of *active* is not
    active after them.
    """
    paths = [str(_FOLDER / f"{each}.py") for each in (name, *also)]
    here = {"folder": str(_FOLDER), "package": str(_PACKAGE), "support": str(Path(__file__).parent)}
    code = _CODE.format(**here, paths=paths, active=[*active], select=select)
    if isinstance(release, str) and not fresh:
        run_in_fork(release, code, env)
    else:
        run_in_release(release, code, env, libraries_loaded=not fresh)
