"""What a forked child inherits of a process with the plugin while another thread was at work: no lock that nobody gives back, nothing half done.

A lock is held in earnest, by the code that takes it, in a thread that stops there. A child that hangs is killed by its alarm clock.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from records import run_python
from test_engagement import LOAD, REPORT, imports, reported
from warm_release import run_in_fork

FORK = """
import os, signal, sys, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 on, which is what is tried here

def in_child(act):
    "Whether a forked child that does this ends; else it was killed when it had hung for ten seconds."
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            act()
            sys.stdout.flush()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert not os.WIFSIGNALED(status), "the child hung"
    assert status == 0, status

reached, go_on = threading.Event(), threading.Event()

def stop_here():
    reached.set()
    assert go_on.wait(60)

def meanwhile(stops):
    "Returns when a thread is in the middle of what it does."
    thread = threading.Thread(target=stops, daemon=True)
    thread.start()
    assert reached.wait(60)
    return thread

"""

IMPORTS = (
    FORK
    + """
import importlib, importlib.util, time
from pathlib import Path
import wrapt
from vllm_graphfix.hooks import when_imported

class Name(str):
    "Of a module: wrapt stops where it looks that up, under its lock."
    __eq__ = str.__eq__
    def __hash__(self):
        if sys._getframe(1).f_globals["__name__"] == wrapt.register_post_import_hook.__module__:
            stop_here()
        return str.__hash__(self)

print("WRAPT", wrapt.__version__, wrapt.__file__)
sys.path.insert(0, os.getcwd())
for name, text in {"stops": "import __main__; __name__ = __main__.Name(__name__)", "awaited": "", "other": ""}.items():
    Path(name + ".py").write_text(text)
    if name != "other":
        when_imported(name, lambda module: print("HOOK", module.__name__))
sys.dont_write_bytecode = True
"""
)

LOCKED = """
thread = meanwhile({stops})
in_child(lambda: (importlib.import_module("other"), importlib.import_module("awaited")))
"""

SEARCHED = """
class Slow:
    "A finder that takes its time."
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread():
            reached.set()
            time.sleep(0.5)

sys.meta_path.insert(1, Slow())
meanwhile(lambda: importlib.util.find_spec("awaited"))
in_child(lambda: importlib.import_module("awaited"))
"""
"""Python forks when no thread is in a finder: it holds the lock of all imports there, and a fork waits for that one."""

HELD = {
    "a thread imports": LOCKED.format(stops='lambda: importlib.import_module("stops")'),
    "a thread hooks an import": LOCKED.format(stops='lambda: wrapt.register_post_import_hook(print, Name("later"))'),
    "a thread searches": SEARCHED,
}


def _path(version: str, folder: Path) -> list[str]:
    """The folder that has wrapt in this *version*, for Python's path."""
    if version == "installed":
        return []
    (bound,) = [
        next(iter(each.specifier))
        for each in map(Requirement, importlib.metadata.requires("vllm-graphfix") or ())
        if each.name == "wrapt"
    ]
    wanted = f"wrapt=={bound.version}" if version == "oldest" else "wrapt"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), wanted]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [str(folder)]


@pytest.mark.parametrize(
    "version", ["installed", *(pytest.param(each, marks=pytest.mark.slow) for each in ("oldest", "newest"))]
)
@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_an_import_in_a_child_waits_for_no_thread_that_was_in_wrapt(
    tmp_path: Path, version: str, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = _path(version, tmp_path / "site")
    told = run_python(f"import sys\nsys.path[:0] = {path!r}\n" + IMPORTS + held)
    assert all(f" {folder}{os.sep}" in told for folder in path)
    assert told.splitlines()[1:] == ["HOOK awaited"]
