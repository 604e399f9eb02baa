"""A forked child of a process with the plugin inherits no lock that nobody gives back, and nothing half done.

Another thread was at work when the process forked.

A lock is held in earnest, by the code that takes it, in a thread that stops there. A child that hangs says where.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from engaged import LOAD, REPORT, reported
from records import run_python
from vllm_graphfix.fixes import BY_NAME
from warm_release import run_in_fork

FORK = """
import faulthandler, os, sys, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 on, which is what is tried here

def in_child(act):
    "Raises AssertionError if a forked child fails in this, or hangs: after ten seconds it says where, and ends."
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(10, exit=True)
        try:
            act()
            sys.stdout.flush()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    go_on.set()
    assert status == 0, f"the child failed, or hung: {status}"

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
from vllm_graphfix.patching.hooks import when_imported

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
    output = run_python(f"import sys\nsys.path[:0] = {path!r}\n" + IMPORTS + held)
    assert all(f" {folder}{os.sep}" in output for folder in path)
    assert output.splitlines()[1:] == ["HOOK awaited"]


ANOTHER = "vllm.v1.attention.backends.mamba_attn"
MODULES = ("vllm.v1.worker.gpu.cudagraph_utils",)
"""Modules that fixes concern in 0.18.1."""

INTERRUPTED = (
    FORK
    + LOAD
    + """
import importlib
from vllm_graphfix import manifest
diagnose = manifest.diagnose

def slowly(fix, source):
    stop_here()
    return diagnose(fix, source)

def engine_core():
    manifest.diagnose = diagnose
    core = {"__name__": "vllm.v1.engine.core"}  # a stand-in for the function there that loads the plugins in an engine core
    exec("from vllm.plugins import load_general_plugins; load_general_plugins()", core)
    for module in %s:
        importlib.import_module(module)
"""  # noqa: E501
)


@pytest.mark.xdist_group("0.18.1")
def test_a_child_diagnoses_for_itself_what_a_thread_was_about_to(tmp_path: Path) -> None:
    """The thread imports one module that fixes concern, and the child the others."""
    code = INTERRUPTED % (MODULES,)
    rest = "in_child(lambda: (engine_core(), exec(REPORT)))"
    # What this fix concerns is imported on the way to that module, by modules whose locks the thread would then hold.
    env = {"VLLM_GRAPHFIX_STATUS_DIR": str(tmp_path), BY_NAME["ubatch-max-seq-len"].variable: "off"}
    expected = reported(run_in_fork("0.18.1", f"{code}\nREPORT = {REPORT!r}\n{rest}", env).stdout)
    stops = f'manifest.diagnose = slowly\nmeanwhile(lambda: importlib.import_module("{ANOTHER}"))'
    actual = reported(run_in_fork("0.18.1", f"{code}\nREPORT = {REPORT!r}\n{stops}\n{rest}", env).stdout)
    assert actual["capture-state"][1] == "active"
    assert {name: row[1] for name, row in actual.items()} == {
        name: "active" if ANOTHER in BY_NAME[name].modules and row[1] == "waiting" else row[1]
        for name, row in expected.items()
    }


RECORD = """
from records import names, read, record
from vllm_graphfix.records import Record, Reporter, identity

class Stops(Record):
    "A record whose writer stops where it looks up its name, under the lock."
    @property
    def file_name(self):
        stop_here()

reporter = Reporter(Path.cwd(), print)
meanwhile(lambda: reporter.publish(Stops(*record())))

def act():
    reporter.publish(record(identity()))
    reporter.flush(5.0)
    print("WRITTEN", len(read(Path.cwd()).found))
    reporter.close()
in_child(act)
"""

LOGGING = """
import logging

class Stops(logging.StreamHandler):
    "A handler that stops under its lock."
    def emit(self, record):
        if threading.current_thread() is not threading.main_thread():
            stop_here()
        else:
            print("WRITTEN", record.levelno // 30)

logging.getLogger("vllm.graphfix").addHandler(Stops())
from vllm_graphfix.log import logger
meanwhile(lambda: logger.warning("one"))
in_child(lambda: logger.warning("another"))
"""

PACKAGE = """
import vllm_graphfix
from vllm_graphfix.settings import environment as settings

read = settings.read
def slowly(*args):
    if threading.current_thread() is not threading.main_thread():
        stop_here()
    return read(*args)
settings.read = slowly
meanwhile(vllm_graphfix.states)
in_child(lambda: print("WRITTEN", int(bool(vllm_graphfix.states()))))
"""


@pytest.mark.parametrize("code", [RECORD, LOGGING, PACKAGE], ids=["a record", "the log", "the state of a process"])
def test_a_child_waits_for_no_thread_that_had_a_lock_of_ours(
    tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_python(FORK + "from pathlib import Path\n" + code) == "WRITTEN 1\n"
