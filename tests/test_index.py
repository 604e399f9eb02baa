"""The index of the fixes: it says what their modules say, and processes that need no fix read nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import make_index
from edited import link
from stock import run_in_release
from table import affected_by
from vllm_graphfix import fixes
from vllm_graphfix.fix import Fix
from vllm_graphfix.fixes import BY_NAME, FIXES, module_of

OURS = "sorted(name.rpartition('.')[2] for name in sys.modules if name.startswith('vllm_graphfix.fixes.'))"


def test_the_index_says_what_the_modules_say() -> None:
    assert make_index.text(make_index.in_order(make_index.records())) == fixes.INDEX.read_text()


def test_a_fix_of_the_index_does_what_its_module_does() -> None:
    for fix in FIXES:
        own: Fix = module_of(fix.name).FIX
        in_both = set(fixes.entry(fix))
        assert {name: value for name, value in fix._asdict().items() if name in in_both} == {
            name: value for name, value in own._asdict().items() if name in in_both
        }
        assert [need.text for need in fix.needs()] == [need.text for need in own.needs()]


def test_a_wrong_record_is_an_error_of_one_line_and_no_index_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = {name: fix for name, fix in make_index.records().items() if name != "capture_state"}
    records["another_name"] = module_of("capture-state").FIX
    monkeypatch.setattr(make_index, "records", lambda: records)
    monkeypatch.setattr(fixes, "INDEX", tmp_path / "index.json")
    assert make_index.main() == 1
    expected = (
        "make_index: capture-state is the FIX of fixes/another_name.py: a fix and its module have the same name\n"
    )
    assert capsys.readouterr().err == expected
    assert not fixes.INDEX.exists()


@pytest.mark.parametrize(
    "wrong",
    ["FIX = None.name\n", "from vllm_graphfix.fixes.capture_state import FIX\n"],
    ids=["no import", "another fix's name"],
)
def test_an_index_of_another_form_keeps_its_order_whatever_is_wrong_with_a_module(tmp_path: Path, wrong: str) -> None:
    package, names = tmp_path / "vllm_graphfix", [fix.name for fix in reversed(FIXES)]
    link(fixes.INDEX.parent.parent, package, {("fixes", "index.json")})
    index, module = package / "fixes" / "index.json", package / "fixes" / "another_name.py"
    another_form = json.dumps([{"name": name, "another": "form"} for name in names])
    index.write_text(another_form)
    module.write_text(wrong)
    command = [sys.executable, make_index.__file__]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, timeout=120, check=False)
    assert (done.returncode, index.read_text()) == (1, another_form)
    module.unlink()
    subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, timeout=120, check=True)
    assert [entry["name"] for entry in json.loads(index.read_bytes())] == names


def test_a_new_fix_comes_behind_those_of_the_index() -> None:
    """The order of application and of all tables does not change with a fix's name."""
    records = make_index.records()
    new = module_of("capture-state").FIX._replace(name="a-new-fix")
    assert make_index.in_order({"a_new_fix": new, **records}) == [*make_index.in_order(records), new]


def python(code: str, **environment: str) -> Any:
    """Return what *code* prints, as JSON, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_process_that_imports_no_target_imports_no_fix() -> None:
    code = f"import json, sys, vllm_graphfix; vllm_graphfix.register(); print(json.dumps({OURS}))"
    assert python(code) == []


@pytest.mark.release
@pytest.mark.parametrize("release", ["0.18.1", "0.33.0"])
def test_of_a_known_release_those_are_imported_whose_target_is(release: str) -> None:
    """Of those that it needs; the dispatcher of graphs is a module of vLLM that imports few others."""
    code = f"""
import importlib, json, sys
import vllm_graphfix
vllm_graphfix.register()
importlib.import_module("vllm.v1.cudagraph_dispatcher")
before = {OURS}
states = vllm_graphfix.states()
print(json.dumps([before, {{name: state.state.value for name, state in states.items()}}, {OURS}, list(sys.modules)]))
"""
    done = run_in_release(release, code, libraries_loaded=True).stdout
    before, states, after, imported = json.loads(done.splitlines()[-1])
    concerned = {name.replace("-", "_") for name in affected_by(release) if {*BY_NAME[name].modules} & {*imported}}
    assert 0 < len(concerned) < 4
    assert {name for name in before if not name.startswith("_")} == concerned
    assert after == before, "to be asked for states imports nothing"
    assert {name for name, state in states.items() if state != "not-needed"} == set(affected_by(release))


@pytest.mark.parametrize("text", ["", "[", "[{}]", '[{"name": "x"}]', "7"])
def test_an_index_that_cannot_be_read_says_what_to_do(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fixes, "INDEX", tmp_path / "index.json")
    fixes.INDEX.write_text(text)
    with pytest.raises(ImportError, match=r"index.json of vllm-graphfix cannot be read \(.+\); reinstall"):
        fixes._read_index()


FORK = """
import builtins, json, os, sys, threading, time
import vllm_graphfix.fixes as fixes
inside = threading.Event()

class Slow:
    "A finder of modules that takes its time for the module of one fix."
    def find_spec(self, name, path, target=None):
        if name.endswith("mamba_padding") and not inside.is_set():
            inside.set()
            time.sleep(0.5)

sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=fixes.BY_NAME["mamba-padding"].patches, args=[""], daemon=True)
thread.start()
inside.wait()
child = os.fork()
if not child:
    print(json.dumps(len(fixes.BY_NAME["mamba-padding"].patches(""))), flush=True)
    os._exit(0)
os.waitpid(child, 0)
thread.join()
"""


def test_a_fork_waits_for_a_thread_that_imports_a_fix() -> None:
    """Without that, the child would wait for ever for the lock of the half imported module."""
    assert python(FORK) == len(BY_NAME["mamba-padding"].patches(""))
