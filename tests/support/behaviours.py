"""Runs a file of ``in_vllm/`` on a stock release.

pytest runs inside a process in which that vLLM and the plugin are loaded.

One process a file and release, a fork of a warm one, since importing vLLM takes seconds. What fails is named in the
output that the assertion shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from stock import calling_main, run_in_release
from warm_release import run_in_fork

_FOLDER = Path(__file__).parents[1] / "in_vllm"


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
    code = calling_main("in_vllm_runner.py", paths, select, [*active])
    if isinstance(release, str) and not fresh:
        run_in_fork(release, code, env)
    else:
        run_in_release(release, code, env, libraries_loaded=not fresh)
