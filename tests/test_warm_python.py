"""The Python that is kept for tests which start many: what is shared by forks of one process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import warm_python

if TYPE_CHECKING:
    import pytest


def test_resources_of_a_process_outlive_a_fork_that_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_python, "_programs", {})
    monkeypatch.setattr(warm_python, "_shared", "")
    program = warm_python.executable(**{warm_python.IMPORTED: "json"})
    try:
        child = os.fork()
        if not child:
            try:
                warm_python.end_processes()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        done = subprocess.run([program, "-c", "print(3)"], capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == "3\n"
    finally:
        warm_python.end_processes()
    assert not Path(program).exists()
