"""The claims of SECURITY.md.

These are the acts of a process, those open to a hostile wheel, tree or rank, and that a release can be built again.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from torch._C._distributed_c10d import HashStore

import audited
from engaged import LOAD, REPORT, imports, reported
from hostile import READ
from packed import packages
from ranks import report
from stock import release_root, run_in_release
from vllm_graphfix.engine.rank_agreement import compare, publish

PROJECT = Path(__file__).parent.parent

# -- what is done in a process ----------------------------------------------------------------------------------

CORE = """
core = {"__name__": "vllm.v1.engine.core"}  # a stand-in for the function there that loads the plugins in an engine core
exec("from vllm.plugins import load_general_plugins\\ndef start(): load_general_plugins()", core)
core["start"]()
"""
REST = """
import prometheus_client  # as vLLM does before it serves metrics
from torch.distributed import HashStore
from vllm_graphfix.engine import rank_agreement as agreement
from vllm_graphfix.engine import metrics
from vllm_graphfix import _this_process, records
me = _this_process()
me.status_record.flush()
base = me.status_record.base()
assert len(records.read(base).found) == 1
metrics.expose(base, me.decision, 2)
metrics._watcher.look()
store, report = HashStore(), me.gate.reports.report()
places = [agreement.publish(store, "start", rank, report) for rank in (0, 1)]
assert agreement.compare(store, places[0], 0, 2, report, print, timeout=1.0).difference is None
records.prune(base)
"""


@pytest.mark.parametrize("release", ["0.18.1", "0.21.0"])
def test_a_process_of_a_server_writes_nothing_but_its_record_and_starts_nothing(release: str, tmp_path: Path) -> None:
    """From loading the plugin as an engine core does to record, metrics and the comparison of ranks."""
    itself = "import import_cache; import_cache.forget()\n"
    code = itself + audited.START + CORE + imports(release) + REST + REPORT + "audited()\n"
    done = run_in_release(release, code, {"VLLM_GRAPHFIX_STATUS_DIR": str(tmp_path)}, libraries_loaded=True)
    assert "active" in {state for _, state, *_ in reported(done.stdout).values()}
    seen = audited.read(done.stdout)
    assert seen.harm == []
    folder = tmp_path / f"vllm-graphfix-{os.geteuid()}"
    assert len(seen.wrote) > 1, "the record, at least"
    assert [path for path in seen.wrote if folder not in (Path(path), Path(path).parent)] == []
    assert set(seen.evaluated) <= {"collections", "typing", "ast"}, "named tuples, their annotations, syntax trees"
    assert seen.environment == ["VLLM_GRAPHFIX_DECISION"]
    assert set(seen.signals) <= {0}
    assert [
        name for name in seen.modules if name.startswith(("vllm_graphfix.verify", "vllm_graphfix.commands.compare"))
    ] == []


PLANTED = {
    "subprocess.Popen": "import subprocess; subprocess.run(['true'])",
    "os.system": "os.system('true')",
    "os.exec": "try: os.execv('/no/such/program', ['a'])\n    except OSError: pass",
    "os.posix_spawn": "os.waitpid(os.posix_spawn(sys.executable, [sys.executable, '-c', ''], {}), 0)",
    "os.fork": "pid = os.fork()\n    if not pid: os._exit(0)\n    os.waitpid(pid, 0)",
    "socket.__new__": "import socket; socket.socket().close()",
    "socket.bind": "import socket\n    with socket.socket() as s: s.bind(('127.0.0.1', 0))",
    "socket.connect": "import socket\n    with socket.socket() as s: s.connect_ex(('127.0.0.1', 9))",
    "socket.getaddrinfo": "import socket; socket.getaddrinfo('127.0.0.1', 80)",
    "urllib.Request": "import urllib.request; urllib.request.urlopen('data:,a').close()",
    "exec": "eval('1')",
    "compile": "compile('1', '', 'eval')",
    "pickle.find_class": "import pickle; pickle.loads(pickle.dumps(os.getcwd))",
    "marshal.loads": "import marshal; marshal.loads(marshal.dumps(1))",
    "ctypes.dlopen": "import ctypes; ctypes.CDLL(None)",
}


def test_each_thing_that_is_forbidden_is_seen_when_it_happens(tmp_path: Path) -> None:
    """Planted in a function that looks like one of the package's."""
    body = "\n".join(f"    {code}" for code in PLANTED.values())
    code = (
        f"import os, sys\ndef planted():\n{body}\n"
        "    open('outside', 'w').close(); os.mkdir('made'); os.kill(os.getpid(), 0)\n"
    )
    called = "planted = {'__name__': 'vllm_graphfix.planted'}\nexec(CODE, planted)\nplanted['planted']()\naudited()\n"
    done = subprocess.run(
        [sys.executable, "-c", f"CODE = {code!r}\n{audited.START}{called}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = audited.read(done.stdout)
    assert set(PLANTED) <= set(seen.harm)
    assert (seen.wrote, seen.signals) == (["made", "outside"], [0])


def run_command(
    arguments: list[str], folder: Path, environment: Mapping[str, str] | None = None
) -> tuple[audited.Audited, str]:
    """The command line in a process that is looked at from its start; also what it printed."""
    code = "import sys\nsys.path.remove('')\n"  # the script's own folder is there, never the one that it is called in
    code += (
        f"{audited.START}\nsys.argv = ['vllm-graphfix', *{arguments!r}]\nfrom vllm_graphfix.commands.cli import main\n"
    )
    code += "try:\n    main()\nfinally:\n    audited()\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | {"VLLM_GRAPHFIX_STATUS_DIR": str(folder)} | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, 1, 3), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return audited.read(done.stdout), done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["status", "--vllm", "0.18.1"], ["explain", "flashmla-fp8"], ["fleet"], ["fleet", "--json"]],
    ids=" ".join,
)
def test_what_looks_and_explains_writes_nothing_and_starts_nothing(arguments: list[str], tmp_path: Path) -> None:
    seen, _ = run_command([str(release_root(word)) if word == "0.18.1" else word for word in arguments], tmp_path)
    assert (seen.harm, seen.wrote) == ([], [])
    assert set(seen.signals) <= {0}
    assert not {"vllm", "torch"} & set(seen.modules)


# -- a hostile vLLM ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree in which every file leaves a mark when it is executed.

    `vllm.whl` is a wheel of the same, with members that point out of it.
    """
    folder = tmp_path_factory.mktemp("hostile")
    mark = f"open({str(folder / 'mark')!r}, 'w').close()\n"
    stock = release_root("0.18.1")
    tree = folder / "tree"
    for name in (
        "vllm/__init__.py",
        "vllm/_version.py",
        "setup.py",
        "conftest.py",
        "sitecustomize.py",
        "usercustomize.py",
        "json.py",
        "a.pth",
        *READ,
    ):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        stock_text = (stock / name).read_text() if name in READ and (stock / name).is_file() else ""
        (tree / name).write_text(f"{stock_text}\n{'import os; ' if name == 'a.pth' else ''}{mark}")
    metadata = "Metadata-Version: 2.4\nName: vllm\nVersion: 1\x1b[31m[/]\x1b]0;a title\x07\n"
    (tree / "vllm-1.dist-info").mkdir()
    (tree / "vllm-1.dist-info" / "METADATA").write_text(metadata)
    (tree / "vllm-1.dist-info" / "entry_points.txt").write_text("[vllm.general_plugins]\na = conftest:a\n")
    with zipfile.ZipFile(folder / "vllm.whl", "w") as wheel:
        for path in sorted(tree.rglob("*")):
            if path.is_file():
                wheel.write(path, path.relative_to(tree))
        wheel.writestr("../outside.py", mark)
        wheel.writestr(str(folder / "absolute.py"), mark)
    return folder


@pytest.mark.parametrize("form", ["vllm.whl", "tree"])
def test_nothing_of_a_hostile_vllm_is_executed_or_unpacked(form: str, hostile: Path) -> None:
    """Called in its own folder, where its modules have the names of Python's."""
    before = sorted(hostile.rglob("*"))
    seen, output = run_command(["status", "--vllm", str(hostile / form)], hostile / "tree")
    assert (seen.harm, seen.wrote) == ([], [])
    assert not {"vllm", "conftest", "setup"} & set(seen.modules)
    assert sorted(hostile.rglob("*")) == before
    assert re.search(r"flashmla-fp8 +garbage", output), "what it says of itself is believed"
    assert "(version unknown)" in output, "and what is no version is not shown to a terminal"
    assert "\x1b" not in output


def test_a_proof_runs_the_named_vllm_and_no_module_of_the_working_folder(tmp_path: Path) -> None:
    """`verify` starts Pythons, and `-m` looks for modules in their working directory first."""
    for place in ("here", "vllm", "given/vllm"):
        (tmp_path / place).mkdir(parents=True)
    for name in ("json", "importlib", "platform", "torch"):
        (tmp_path / "here" / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\n")
    (tmp_path / "given/vllm/__init__.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\n")
    ask = (
        f"import os, sys\nsys.path.remove('')\nos.chdir({str(tmp_path / 'here')!r})\n"
        "from vllm_graphfix.verify.engine import device\ndevice.find()\n"
    )
    subprocess.run([sys.executable, "-c", ask], capture_output=True, check=True)
    command = [
        str(Path(sys.executable).parent / "vllm-graphfix"),
        "verify",
        "mamba-padding",
        "--device",
        "cpu",
        "--vllm",
        str(tmp_path / "given"),
    ]
    done = subprocess.run(command, cwd=tmp_path / "here", capture_output=True, text=True, check=False)
    assert (tmp_path / "executed").exists(), done.stderr
    assert not (tmp_path / "mark").exists()


# -- a hostile rank ----------------------------------------------------------------------------------------------


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


VALID_REPORT: dict[str, Any] = report("node-b")._asdict()
HOSTILE_WORDS: dict[str, str | bytes] = {
    "tables that are none": json.dumps(VALID_REPORT | {"modes": ["auto"], "states": 1}),
    "lines for the log": json.dumps(VALID_REPORT | {"host": "node-b\nWARNING all is well"}),
    "codes for a terminal": json.dumps(VALID_REPORT | {"states": {"mamba-padding": "\x1b[2J"}}),
    "names that are none": json.dumps(VALID_REPORT | {"modes": {"a\nb": "auto"}}),
    "texts that are none": json.dumps(VALID_REPORT | {"vllm": {"a": 1}}),
    "a token that no record may have": json.dumps(VALID_REPORT | {"token": "a b"}),
    "an endless text": json.dumps(VALID_REPORT | {"graphfix": "a" * 1_000_000}),
    "endless depth": "[" * 100_000,
    "a number of a million digits": "1" * 1_000_000,
    "no text": b"\xff\x00\xfe",
}


@pytest.mark.parametrize("what", HOSTILE_WORDS)
def test_a_hostile_rank_is_a_difference_and_no_more(what: str) -> None:
    assert difference(HOSTILE_WORDS[what]) == "Another version of vllm-graphfix reported for rank 0."


def test_a_rank_that_leaves_a_pickle_has_nothing_executed(tmp_path: Path) -> None:
    pickled = pickle.dumps(Payload(tmp_path / "executed"))
    assert difference(pickled) == "Another version of vllm-graphfix reported for rank 0."
    assert not (tmp_path / "executed").exists()
    pickle.loads(pickled)
    assert (tmp_path / "executed").exists(), "so it would have shown"


def difference(message: str | bytes) -> str | None:
    """Return the difference for a rank if another one has put *message* in the place of both their reports."""
    store, mine = HashStore(), report()
    place = publish(store, "start", 1, mine)
    store.set(f"{place}/0", "another digest")
    for rank in (0, 1):
        store.set(f"{place}/word/{rank}", message)  # type: ignore[arg-type]  # torch says str, and takes bytes
    return compare(store, place, 1, 2, mine, print, timeout=1.0).difference


# -- a release ---------------------------------------------------------------------------------------------------


@pytest.mark.xdist_group("packages")
def test_a_commit_and_its_sdist_give_the_same_bytes_elsewhere_and_later(
    committed: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    """Folder, time, umask, time zone, language and order of sets differ.

    In the one git tells the time, in the other there is none.
    """
    clone, first = committed
    assert sorted(name.rpartition(".")[2] for name in first) == ["gz", "whl"]
    with tarfile.open(next((clone / "dist").glob("*.tar.gz"))) as sdist:
        assert {member.mtime for member in sdist} == {1767323045}
        assert {(member.uid, member.gid, member.mode) for member in sdist} <= {(0, 0, 0o644), (0, 0, 0o755)}
        sdist.extractall(tmp_path / "else" / "where", filter="data")
        (root,) = {member.name.partition("/")[0] for member in sdist}
    assert (tmp_path / "else" / "where" / root / "SECURITY.md").is_file()
    again = packages(
        tmp_path / "else" / "where" / root, 0o002, TZ="America/Lima", LANG="de_DE.UTF-8", PYTHONHASHSEED="2"
    )
    assert {name: len(data) for name, data in first.items()} == {name: len(data) for name, data in again.items()}
    assert first == again


def test_packages_are_made_by_tools_that_are_pinned_with_hashes_and_by_nothing_else(tmp_path: Path) -> None:
    """A dry run, in a tree that has not been set up."""
    for name in ("Makefile", "tools/requirements-packages.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(PROJECT / name, tmp_path / name)
    done = subprocess.run(
        [str(shutil.which("make")), "--dry-run", "packages"],
        check=False,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    installed = [line for line in done.stdout.splitlines() if "pip install" in line]
    assert len(installed) == 1
    assert "--require-hashes --only-binary :all: --requirement tools/requirements-packages.txt" in installed[0]
    assert re.findall(r"(\S+)/python -m build (\S+)", done.stdout) == [("build/packager/bin", "--no-isolation")] * 2
    text = (PROJECT / "tools" / "requirements-packages.txt").read_text()
    pinned = re.findall(r"^([a-z-]+)==.*\\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", text, re.MULTILINE)
    assert pinned == re.findall(r"^([a-z].*?)(?=[ =]=)", text, re.MULTILINE)
    assert {"build", "setuptools"} <= set(pinned)


BUILDER = """#!/bin/sh
# python -m build --no-isolation --sdist|--wheel --outdir FOLDER TREE
set -e
test "$1 $2 $3 $5" = '-m build --no-isolation --outdir'
case $4 in
    --sdist) cp {made}/*.tar.gz "$6" ;;
    --wheel) cp {made}/*.whl "$6"; for each in "$6"/*.whl; do printf "%s" "$ADDED" >> "$each"; done ;;
esac
"""
"""Stands in for the Python that builds packages, which takes ten times as long as all the rest: its packages are those
in *made*, with what ADDED says behind the wheel."""


@pytest.mark.xdist_group("packages")
def test_packages_that_their_commit_does_not_make_are_detected(
    committed: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    tree, made = committed
    (tmp_path / "made").mkdir()
    for name, content in made.items():
        (tmp_path / "made" / name).write_bytes(content)
    (tmp_path / "python").write_text(BUILDER.format(made=tmp_path / "made"))
    (tmp_path / "python").chmod(0o755)
    again = ["make", "reproduce", f"BIN={tmp_path}", "BUILD_FLAGS=--no-isolation"]
    # Not as a part of the make that runs the tests, which would say which folder it enters.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    same, different = (
        subprocess.run(again, cwd=tree, env=alone | {"ADDED": added}, capture_output=True, text=True, check=False)
        for added in ("", "a byte")
    )
    assert same.returncode == 0, same.stdout + same.stderr
    assert same.stdout.endswith("dist/ is what this commit makes, byte for byte.\n")
    assert different.returncode == 2
    assert "dist/ is not what this commit makes" in different.stderr


@pytest.mark.slow
def test_the_oldest_libraries_that_are_allowed_do(tmp_path: Path) -> None:
    """psutil may have to be compiled, which needs a C compiler."""
    required = [Requirement(text) for text in importlib.metadata.requires("vllm-graphfix") or ()]
    bounds = {each.name: next(iter(each.specifier)) for each in required if each.marker is None}
    assert {bound.operator for bound in bounds.values()} == {">="}
    oldest = [f"{name}=={bound.version}" for name, bound in bounds.items()]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path / "site"), *oldest]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path = {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{release_root('0.18.1')}"}
    code = LOAD + imports("0.18.1") + "import wrapt; print('WRAPT', wrapt.__file__)\n" + REPORT
    output = run_in_release("0.18.1", code, path).stdout
    assert f"WRAPT {tmp_path}" in output
    assert reported(output)["flashmla-fp8"][1] == "active"
    for arguments in (
        ["status"],
        ["explain"],
        ["explain", "mamba-padding"],
        ["fleet"],
        ["fleet", "--json"],
        ["compare", "--help"],
    ):
        run_command(arguments, tmp_path, path)


# -- the page ----------------------------------------------------------------------------------------------------


def test_the_tests_and_links_that_the_page_names_are_there() -> None:
    text = (PROJECT / "SECURITY.md").read_text()
    named = re.findall(r"`(test_\w+)\.py`", text)
    assert len(named) > 5
    assert [name for name in named if not (PROJECT / "tests" / f"{name}.py").is_file()] == []
    linked = [target for target in re.findall(r"\]\(([^)\s#]+)", text) if not target.startswith("https://")]
    assert [target for target in linked if not (PROJECT / target).is_file()] == []
    assert "SECURITY.md" in (PROJECT / "README.md").read_text()
