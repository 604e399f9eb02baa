"""The bounds of the package's code.

No process is started, no connection made, nothing evaluated, but for named exceptions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent
PACKAGE = PROJECT / "vllm_graphfix"

MODULES = frozenset(
    """subprocess multiprocessing pty
    socket socketserver ssl asyncio select selectors http urllib ftplib smtplib poplib imaplib telnetlib nntplib xmlrpc wsgiref webbrowser
    requests httpx aiohttp urllib3 zmq grpc
    pickle _pickle cPickle dill cloudpickle joblib marshal shelve dbm copyreg
    code codeop runpy imp zipimport pkgutil ctypes _ctypes cffi""".split()  # noqa: E501
)
BUILTINS = frozenset("eval exec compile __import__ breakpoint".split())
OF_OS = re.compile(
    r"system|popen|startfile|exec[lv]\w*|spawn\w+|posix_spawnp?|fork(pty)?|kill|killpg|dlopen|add_dll_directory"
)
ANYWHERE = frozenset(
    """import_module spec_from_file_location spec_from_loader module_from_spec exec_module load_module SourceFileLoader SourcelessFileLoader
    ExtensionFileLoader load_library load_dynamic ProcessPoolExecutor""".split()  # noqa: E501
)
"""Attributes and names, whatever they are of."""


def forbidden(code: str) -> set[str]:
    """Return the names in *code* that it must not have.

    This is what starts processes, opens connections, evaluates, unpickles, loads libraries, or imports by a path.
    """
    violations: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            violations.update(alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            violations.update({module} if module.partition(".")[0] in MODULES else ())
            names = {alias.name for alias in node.names}
            violations.update(names & ANYWHERE)
            violations.update(f"os.{name}" for name in names if module in ("os", "posix") and OF_OS.fullmatch(name))
            violations.update(f"builtins.{name}" for name in names & BUILTINS if module == "builtins")
        elif isinstance(node, ast.Name):
            violations.update({node.id} & (BUILTINS | ANYWHERE | {"__builtins__"}))
        elif isinstance(node, ast.Attribute):
            violations.update({node.attr} & ANYWHERE)
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner in ("os", "posix") and OF_OS.fullmatch(node.attr):
                violations.add(f"os.{node.attr}")
            if (owner, node.attr) in {("sys", "path"), ("sys", "meta_path"), ("torch", "load")}:
                violations.add(f"{owner}.{node.attr}")
            if owner == "builtins" and node.attr in BUILTINS:
                violations.add(f"builtins.{node.attr}")
    return violations


OWN_PYTHON = "starts this Python's own interpreter, by `-m` with a module of this package"
EXCEPTIONS: Mapping[str, Mapping[str, str]] = {
    "commands/fleet/prometheus.py": {
        "httpx": "asks the Prometheus that the user names with `fleet --prometheus`",
        "ssl": "reads the certificates that the user names",
    },
    "commands/hunt/twins.py": {
        "ProcessPoolExecutor": "makes twins, several at a time",
        "multiprocessing": "of its processes: a server without threads forks them",
        "multiprocessing.connection": "of its processes: each waits for the end of the one that it works for",
    },
    "fixes/__init__.py": {"import_module": "loads them: one a fix"},
    "verify/engine/twin.py": {"import_module": "the module in which this transformers keeps a function"},
    "engine/metrics.py": {"multiprocessing": "the name of this process, which vLLM gives to its API servers"},
    "engine/role.py": {"multiprocessing": "the name of this process, and the id of the one that started it"},
    "engine/abort.py": {"multiprocessing": "the id of the process that started this one: only its scheduler is told"},
    "engine/abort_channel.py": {
        "socket": "with an action `abort`, and never of a network: ranks name requests to their scheduler's process",
        "select": "waits for what they say, in a thread of its own",
    },
    "engine/status_record.py": {"multiprocessing.util": "runs at the end of a process, in forked children too"},
    "patching/hooks.py": {
        "import_module": "waits for another thread that imports a module of vLLM, one of those named in this package"
    },
    "records/process_identity.py": {"os.kill": "signal 0: whether a process is there"},
    "commands/doctor/nvidia_smi.py": {
        "subprocess": "nvidia-smi, once, for a bug report: no library of ours asks the driver",
        "os.killpg": "ends it where it hangs",
    },
    # `verify` and `compare`, in processes of their own:
    "verify/cpu_proof.py": {"subprocess": OWN_PYTHON, "os.killpg": "ends what it has started"},
    "verify/double/forks.py": {
        "os.fork": "a stock and a patched process, off one that has imported the libraries",
        "import_module": "the libraries",
        "sys.path": "puts the folder first that the user has named",
    },
    "verify/engine/device.py": {
        "subprocess": OWN_PYTHON,
        "ctypes": "asks NVML for the driver's version, and the driver whether this process has begun with CUDA",
    },
    "verify/engine/preloaded.py": {
        "subprocess": OWN_PYTHON,
        "os.fork": "engines, off a process that has imported vLLM",
    },
    "verify/engine/processes.py": {"subprocess": OWN_PYTHON, "os.killpg": "ends what it has started"},
    "engine/components/__init__.py": {
        "pkgutil": "lists the modules of its own folder",
        "import_module": "loads them: one a component",
    },
    "verify/engine/probes.py": {"import_module": "the module of this package that makes a case's probe"},
    "verify/engine/llm.py": {"import_module": "vLLM's parser of flags, which has moved between releases"},
    "verify/engine/worker.py": {
        "os.fork": "a process that ends an engine nobody waits for any more",
        "os.killpg": "by that one",
    },
    "verify/double/scenarios/draft_non_causal.py": {"import_module": "vLLM's FlashInfer backend, beside a stand-in"},
    "verify/trial.py": {"import_module": "the module of this package with a fix's trial"},
    "verify/double/mla_decode.py": {"import_module": "vLLM's builders of latent attention, which have moved"},
    "verify/double/scenarios/cutlass_mla_padding.py": {
        "import_module": "vLLM's module with the kernel's operator, and that of its builder"
    },
    "verify/double/flashmla.py": {"import_module": "vLLM's FlashMLA, for which it is the stand-in"},
    "verify/double/worker.py": {
        "import_module": "the scenarios of this package, and vLLM's modules that they name",
        "sys.path": "puts the vLLM first that the user has named",
    },
    "verify/double/scenarios/capture_state.py": {
        "import_module": "vLLM's speculators, which have moved between releases"
    },
    "verify/double/scenarios/prefill_dispatch.py": {
        "import_module": "vLLM's GDN backend, which has moved between releases"
    },
}
"""By module: what it names all the same, and why."""


def test_the_package_starts_nothing_connects_to_nothing_and_evaluates_nothing() -> None:
    """But for EXCEPTIONS; one that is no longer needed is an error too."""
    violations = {path.relative_to(PACKAGE).as_posix(): forbidden(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {name: names for name, names in violations.items() if names} == {
        name: set(reasons) for name, reasons in EXCEPTIONS.items()
    }


SAMPLE = """
import subprocess; import socket as s; import http.client; from urllib import request; import asyncio; import requests
import pickle; from marshal import loads; import shelve; import ctypes; import runpy; import code; from multiprocessing import Process
eval("1"); run = exec; compile("1", "", "eval"); __import__("os"); __builtins__["eval"]; import builtins; builtins.exec("1")
from builtins import eval as e; breakpoint()
os.system("true"); os.popen("true"); os.execv("a", []); os.spawnl(0, "a"); os.posix_spawn("a", [], {}); os.fork(); os.kill(1, 9)
from os import system; from posix import execv; os.forkpty()
importlib.import_module(name); from importlib import import_module; util.spec_from_file_location("a", path); machinery.SourceFileLoader
sys.path.insert(0, path); torch.load(path); torch.ops.load_library(path); pool = futures.ProcessPoolExecutor()
"""  # noqa: E501


@pytest.mark.parametrize("line", [part.strip() for part in SAMPLE.replace("\n", ";").split(";") if part.strip()])
def test_each_forbidden_construct_is_detected(line: str) -> None:
    assert forbidden(line) or line == "import builtins"


def test_what_only_looks_alike_is_not() -> None:
    assert (
        forbidden(
            "re.compile('a'); self.system(); executor.execute(); os.path.join(a); json.loads(b); import importlib.util"
        )
        == set()
    )
