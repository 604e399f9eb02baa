"""When something goes wrong: vLLM runs stock and says why.

Where the user insists, it stops before the first capture.
"""

from __future__ import annotations

import py_compile
from pathlib import Path

import pytest

from edited import edited
from engaged import LOAD, REPORT, imports, reported, states
from stock import release_root, run_in_release
from vllm_files import FLASHMLA
from vllm_graphfix.fixes import FIXES
from warm_release import run_in_fork

pytestmark = pytest.mark.xdist_group("0.18.1")

BUILDER = "vllm.v1.attention.backends.mla.flashmla.FlashMLAMetadataBuilder"

FOREIGN = """
import wrapt
@wrapt.patch_function_wrapper("vllm.v1.attention.backends.mla.flashmla", "FlashMLAMetadataBuilder._build_decode")
def theirs(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs)
"""


def unmakeable(name: str) -> str:
    """Code after which the layers of the fix *name* raise when they are made."""
    return f"""
import vllm_graphfix.fixes as fixes
def broken(fix):
    fail = lambda stock, activity: 1 / 0  # noqa: E731
    return fix._replace(patches=lambda shape: [patch._replace(wrap=fail) for patch in fix.patches(shape)])
fixes.FIXES = tuple(broken(fix) if fix.name == {name!r} else fix for fix in fixes.FIXES)
"""


# What goes wrong in the process, before the plugin is registered or its targets are imported, and the states that
# follow.
WRONG = {
    "the source cannot be read": (
        (
            "import vllm_graphfix.source.files as s\n"
            "def no(*a, **k): raise PermissionError(13, 'not yours')\ns.open = no\n"
        ),
        {"flashmla-fp8": "failed", "flashmla-padding": "failed", "capture-state": "failed", "mamba-padding": "failed"},
        "not yours",
    ),
    "the manifest cannot be read": (
        "import vllm_graphfix.manifest as m, pathlib\nm.PATH = pathlib.Path('/nowhere/manifest.json')\n",
        {"flashmla-fp8": "failed", "capture-state": "failed", "draft-prefill-state": "failed"},
        "reinstall vllm-graphfix",
    ),
    "a target's attribute is gone": (
        "import vllm.v1.attention.backends.mla.flashmla as f\ndel f.FlashMLAMetadataBuilder._build_decode\n",
        {"flashmla-fp8": "failed", "flashmla-padding": "failed", "capture-state": "active"},
        "has no FlashMLAMetadataBuilder._build_decode of its own",
    ),
    "a layer cannot be made": (
        unmakeable("flashmla-fp8"),
        {"flashmla-fp8": "failed", "flashmla-padding": "active", "capture-state": "active"},
        "ZeroDivisionError",
    ),
    "the companion cannot be made": (
        unmakeable("flashmla-padding"),
        {"flashmla-fp8": "incompatible", "flashmla-padding": "failed", "capture-state": "active"},
        "ZeroDivisionError",
    ),
    "a diagnosis raises": (
        "import vllm_graphfix.manifest as m\ndef no(fix, source): raise RuntimeError('odd')\nm.diagnose = no\n",
        {"flashmla-fp8": "failed", "mamba-padding": "failed"},
        "RuntimeError: odd",
    ),
    "somebody else has wrapped a target": (
        FOREIGN,
        {"flashmla-fp8": "conflict", "flashmla-padding": "conflict", "capture-state": "active"},
        "FlashMLAMetadataBuilder._build_decode is",
    ),
}
GATE = """
from types import SimpleNamespace
import vllm.v1.worker.gpu_worker as w
try:
    w.Worker.compile_or_warm_up_model(SimpleNamespace(vllm_config=SimpleNamespace(
        parallel_config=SimpleNamespace(), model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL")))))
except Exception as error:
    print(f"GATE {type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("what", WRONG)
def test_in_auto_vllm_runs_stock_with_the_reason_in_states_and_log(what: str) -> None:
    before, wanted, reason = WRONG[what]
    done = run_in_fork("0.18.1", before + LOAD + imports("0.18.1") + GATE + REPORT)
    report = reported(done.stdout)
    assert {name: report[name][1] for name in wanted} == wanted
    troubled = [name for name, state in wanted.items() if state not in ("active", "not-needed")]
    assert any(reason in report[name][2] for name in troubled)
    assert "GATE AttributeError" in done.stdout, "the stock start-up was called, with an object that is no worker"


@pytest.mark.parametrize("what", ["the manifest cannot be read", "somebody else has wrapped a target"])
@pytest.mark.parametrize(
    "env", [{"VLLM_GRAPHFIX": "strict"}, {"VLLM_GRAPHFIX_FLASHMLA_FP8": "on"}], ids=["strict", "on"]
)
def test_who_insists_is_stopped_before_the_first_capture_with_one_message(what: str, env: dict[str, str]) -> None:
    before, _, _ = WRONG[what]
    done = run_in_fork("0.18.1", before + LOAD + imports("0.18.1") + GATE, env)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("GATE")]
    assert line.startswith("GATE GraphfixError: vllm-graphfix stops this engine before it captures its CUDA graphs: ")
    assert "flashmla-fp8 is " in line
    assert "To serve without the fix, set its variable to off" in line


@pytest.mark.parametrize(
    "env", [{"VLLM_GRAPHFIX": "strict"}, {"VLLM_GRAPHFIX_FLASHMLA_FP8": "on"}], ids=["strict", "on"]
)
def test_who_insists_on_what_works_is_not_stopped(env: dict[str, str]) -> None:
    done = run_in_fork("0.18.1", LOAD + imports("0.18.1") + GATE, env)
    assert "GATE AttributeError" in done.stdout


MEANINGLESS: dict[str, tuple[dict[str, str], set[str]]] = {
    "the switch": ({"VLLM_GRAPHFIX": "observ"}, {fix.name for fix in FIXES}),
    "the switch, with a fix on": (
        {"VLLM_GRAPHFIX": "strct", "VLLM_GRAPHFIX_FLASHMLA_FP8": "on"},
        {fix.name for fix in FIXES},
    ),
    "a fix": ({"VLLM_GRAPHFIX_FLASHMLA_FP8": "onn"}, {"flashmla-fp8"}),
}
"""An environment, and the fixes that are off because of it."""


@pytest.mark.parametrize("what", MEANINGLESS)
def test_a_value_that_means_nothing_leaves_vllm_stock_and_stops_nobody(what: str) -> None:
    """Not even where the fix that the user insists on could not be applied."""
    env, off = MEANINGLESS[what]
    before, _, _ = WRONG["somebody else has wrapped a target"]
    done = run_in_fork(
        "0.18.1", before + LOAD + imports("0.18.1") + GATE + REPORT, env | {"VLLM_LOGGING_LEVEL": "WARNING"}
    )
    report = reported(done.stdout)
    for name in off:
        variable = next(each for each in env if env[each] != "on")
        assert list(report[name][1:3]) == ["off", f"{variable}={env[variable]} means nothing, which counts as off"]
    assert "GATE AttributeError" in done.stdout, "the stock start-up was called, with an object that is no worker"


COPIED = """
import vllm_graphfix.patching.sites as p
find = p._site
def refused(patch, diagnosed):
    if patch.module == "vllm.v1.worker.gpu.spec_decode.eagle.cudagraph":
        raise RuntimeError("late")
    return find(patch, diagnosed)
p._site = refused
"""
NAMES = """
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.spec_decode.eagle import cudagraph
print("STOCK", *[getattr(m, "prepare_inputs_to_capture").__code__.co_filename.endswith("cudagraph_utils.py") for m in (cudagraph_utils, cudagraph)])
"""  # noqa: E501


def test_a_fix_that_fails_on_a_later_module_leaves_no_layer_in_imported_names() -> None:
    done = run_in_release("0.17.1", COPIED + LOAD + imports("0.17.1") + NAMES + REPORT, libraries_loaded=True)
    assert reported(done.stdout)["capture-state"][1:3] == ["failed", "RuntimeError: late"]
    assert "STOCK True True" in done.stdout


def test_strict_ignores_a_fix_whose_targets_this_engine_never_imports() -> None:
    before, _, _ = WRONG["the manifest cannot be read"]
    done = run_in_fork(
        "0.18.1",
        before
        + LOAD
        + "from vllm_graphfix import _this_process\nassert _this_process().manager.unapplied(v2=None) == ()\n",
        {"VLLM_GRAPHFIX": "strict"},
    )
    assert done.returncode == 0


def test_strict_leaves_help_alone() -> None:
    before, _, _ = WRONG["the manifest cannot be read"]
    code = before + (
        "import vllm.platforms\nvllm.platforms.current_platform.device_type = 'cpu'\n"
        "import argparse\nfrom vllm.engine.arg_utils import EngineArgs\n"
        "parser = EngineArgs.add_cli_args(argparse.ArgumentParser())\nprint('HELP', len(parser.format_help()) > 1000)\n"
    )
    assert "HELP True" in run_in_fork("0.18.1", code, {"VLLM_GRAPHFIX": "strict"}).stdout


def test_a_target_that_is_there_as_bytecode_only_is_failed_not_absent(tmp_path: Path) -> None:
    root = edited(release_root("0.18.1"), tmp_path / "site", {FLASHMLA: lambda text: text + "\n"})
    py_compile.compile(str(root / FLASHMLA), cfile=str((root / FLASHMLA).with_suffix(".pyc")), doraise=True)
    (root / FLASHMLA).unlink()
    report = reported(
        run_in_release(root, LOAD + f"import {BUILDER.rsplit('.', 1)[0]}\n" + REPORT, libraries_loaded=True).stdout
    )
    assert report["flashmla-fp8"][1] == "failed"
    assert "bytecode only" in report["flashmla-fp8"][2]


def test_an_unrecognised_shape_stays_stock_with_a_warning(tmp_path: Path) -> None:
    planned = "scheduler_metadata.num_splits = num_splits\n"
    change = {FLASHMLA: lambda text: text.replace(planned, f"{planned}            self.last_splits = num_splits\n")}
    root = edited(release_root("0.18.1"), tmp_path / "site", change)
    done = run_in_release(
        root,
        LOAD + f"import {BUILDER.rsplit('.', 1)[0]}\n" + REPORT,
        {"VLLM_LOGGING_LEVEL": "WARNING"},
        libraries_loaded=True,
    )
    assert reported(done.stdout)["flashmla-fp8"][1] == "incompatible"
    assert any("WARNING" in line and "flashmla-fp8" in line for line in (done.stdout + done.stderr).splitlines())


def test_a_patch_over_ours_that_drops_it_is_seen() -> None:
    code = (
        LOAD
        + imports("0.18.1")
        + f"""
import {BUILDER.rsplit(".", 1)[0]} as f
f.FlashMLAMetadataBuilder._build_decode = lambda *args: None
"""
        + REPORT
    )
    assert states("0.18.1", code)["flashmla-fp8"][1] == "conflict"


INSISTENT = {"VLLM_GRAPHFIX": "strict"}
WORKER = """
from types import SimpleNamespace
import vllm.v1.worker.gpu_worker as w
def start(enforce_eager=False, **worker):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(), model_config=SimpleNamespace(enforce_eager=enforce_eager),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL")))
    try:
        w.Worker.compile_or_warm_up_model(SimpleNamespace(vllm_config=config, **worker))
    except Exception as error:
        return type(error).__name__
"""


def gate(before: str, worker: str, env: dict[str, str] | None = None) -> str:
    """The name of the error with which a worker's start-up ends.

    It is GraphfixError, or the stock code's about a stand-in.
    """
    code = before + LOAD + imports("0.18.1") + WORKER + f"print('GATE', start({worker}))\n"
    return run_in_fork("0.18.1", code, env or INSISTENT).stdout.split("GATE ")[1].strip()


def test_strict_stops_only_engines_with_graphs_and_the_model_runner_of_the_fix() -> None:
    eager = "enforce_eager=True, use_v2_model_runner=True"
    graphs = "use_v2_model_runner={}"
    unrecognised = """
import vllm_graphfix.fixes as fixes
from vllm_graphfix.fix import Diagnosis, Verdict
def odd(source): return Diagnosis(Verdict.UNRECOGNISED, "odd", defect_seen=True)
import vllm_graphfix.manifest as m
real = m.diagnose
m.diagnose = lambda fix, source: odd(source) if fix.name == "capture-state" else real(fix, source)
"""
    assert gate(unrecognised, eager) == "AttributeError"
    assert gate(unrecognised, graphs.format(False)) == "AttributeError"
    assert gate(unrecognised, graphs.format(True)) == "GraphfixError"
    nothing_seen = unrecognised.replace("defect_seen=True", "defect_seen=False")
    assert gate(nothing_seen, graphs.format(True)) == "AttributeError"
    informs = (
        "import logging, sys\nlogging.getLogger('vllm.graphfix').setLevel(logging.INFO)\n"
        "logging.getLogger('vllm.graphfix').addHandler(logging.StreamHandler(sys.stdout))\n"
    )
    code = unrecognised + LOAD + imports("0.18.1") + WORKER + f"{informs}start({eager})\n"
    assert "this engine runs without CUDA graphs: no fix is needed" in run_in_fork("0.18.1", code, INSISTENT).stdout


def test_a_patch_on_the_start_up_itself_does_not_open_the_gate() -> None:
    theirs = (
        "import wrapt\n@wrapt.patch_function_wrapper('vllm.v1.worker.gpu_worker', 'Worker.compile_or_warm_up_model')\n"
        "def theirs(wrapped, instance, args, kwargs): return wrapped(*args, **kwargs)\n"
    )
    assert gate(theirs + FOREIGN, "use_v2_model_runner=False") == "GraphfixError"


def test_strict_does_not_stop_an_engine_that_is_not_in_the_rollout() -> None:
    assert gate(FOREIGN, "use_v2_model_runner=False", INSISTENT) == "GraphfixError"
    assert gate(FOREIGN, "use_v2_model_runner=False", INSISTENT | {"VLLM_GRAPHFIX_ROLLOUT": "0"}) == "AttributeError"


@pytest.mark.parametrize(("arguments", "stops"), [([], True), (["--help"], False)])
def test_a_broken_install_stops_who_insists_but_never_a_call_for_help(arguments: list[str], stops: bool) -> None:
    broken = f"import sys\nsys.modules['wrapt'] = None\nsys.argv = ['vllm', *{arguments!r}]\nimport vllm_graphfix\n"
    done = run_in_release("0.18.1", broken + "vllm_graphfix.register()\n", INSISTENT, check=False)
    assert (done.returncode != 0) == stops
    assert not stops or "reinstall vllm-graphfix" in done.stderr.splitlines()[-1]
    assert run_in_release("0.18.1", broken + "vllm_graphfix.register()\n").returncode == 0


def test_an_import_that_runs_while_others_come_and_go_is_patched_whole() -> None:
    churn = """
import sys, threading, types
sys.setswitchinterval(1e-6)
stop = threading.Event()
def churn():
    number = 0
    while not stop.is_set():
        number += 1
        sys.modules[f"churn{number}"] = types.ModuleType("churn")
        del sys.modules[f"churn{number}"]
threading.Thread(target=churn, daemon=True).start()
"""
    report = reported(run_in_fork("0.18.1", churn + LOAD + imports("0.18.1") + "stop.set()\n" + REPORT).stdout)
    assert {report[name][1] for name in ("capture-state", "flashmla-fp8", "flashmla-padding")} == {"active"}


def test_a_module_that_another_thread_is_importing_is_patched_when_it_is_there() -> None:
    code = f"""
import importlib, sys, threading, time
import vllm_graphfix
thread = threading.Thread(target=importlib.import_module, args=("{BUILDER.rsplit(".", 1)[0]}",))
thread.start()
while "{BUILDER.rsplit(".", 1)[0]}" not in sys.modules:
    time.sleep(0.001)
vllm_graphfix.register()
thread.join()
{REPORT}"""
    report = reported(run_in_fork("0.18.1", code).stdout)
    assert (report["flashmla-fp8"][1], report["flashmla-padding"][1]) == ("active", "active")


BROKEN = "import sys\nsys.modules['wrapt'] = None\nimport vllm_graphfix\nvllm_graphfix.register()\n"


@pytest.mark.parametrize(
    ("env", "stops"),
    [
        ({"VLLM_GRAPHFIX_CAPTURE_STATE": "on"}, True),
        ({"VLLM_GRAPHFIX_CAPTURE_STATE": f"on:{'0f' * 8}"}, True),
        ({"VLLM_GRAPHFIX_CAPTURE_STATE": "on:xyz"}, False),
        ({"VLLM_GRAPHFIX_CAPTURE_STATE": "on", "VLLM_GRAPHFIX_ROLLOUT": "100"}, True),
        ({"VLLM_GRAPHFIX_CAPTURE_STATE": "on", "VLLM_GRAPHFIX_ROLLOUT": "0"}, False),
        ({"VLLM_GRAPHFIX_CAPTURE_STATE": "on", "VLLM_GRAPHFIX_ROLLOUT": " "}, False),
        ({"VLLM_GRAPHFIX_DEBUG": "1"}, False),
        ({"VLLM_GRAPHFIX_CAPTURE_STATE": "on", "VLLM_GRAPHFIX": "strct"}, False),
    ],
    ids=[
        "a fix",
        "a fix, for one tree",
        "a tree that means nothing",
        "inside the rollout",
        "perhaps outside the rollout",
        "an empty percentage",
        "no name of ours",
        "a switch that means nothing",
    ],
)
def test_a_broken_install_stops_only_who_insists_on_a_fix(env: dict[str, str], stops: bool) -> None:
    assert (run_in_release("0.18.1", BROKEN, env, check=False).returncode != 0) == stops


@pytest.mark.parametrize("arguments", ["del sys.argv", pytest.param("sys.argv = [[], {}]", marks=pytest.mark.slow)])
def test_fixes_do_not_depend_on_the_arguments_of_the_process(arguments: str) -> None:
    code = (
        f"import sys\n{arguments}\n"
        f"exec('register()', {{'__name__': [], 'register': __import__('vllm_graphfix').register}})\n"
    )
    report = reported(run_in_fork("0.18.1", code + imports("0.18.1") + REPORT).stdout)
    assert report["flashmla-fp8"][1] == "active"


def test_two_threads_that_register_at_once_are_one_process() -> None:
    code = """
import sys, threading
sys.setswitchinterval(1e-6)
import vllm_graphfix
together, made = threading.Barrier(8), []
def begin():
    together.wait()
    vllm_graphfix.states() if len(made) % 2 else vllm_graphfix.register()
    made.append(vllm_graphfix._this_process())
threads = [threading.Thread(target=begin) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("MADE", len(set(map(id, made))), len(made))
"""
    assert "MADE 1 8" in run_in_fork("0.18.1", code).stdout


def test_a_log_handler_that_waits_for_another_thread_does_not_hang_an_import() -> None:
    code = f"""
import logging, threading
import vllm.logger  # sets up logging, and forgets the handlers that it finds
class Asking(logging.Handler):
    def emit(self, record):
        thread = threading.Thread(target=vllm_graphfix.states, daemon=True)
        thread.start()
        thread.join(20)
        print("WAITED", thread.is_alive(), record.getMessage())
import vllm_graphfix
logging.getLogger("vllm.graphfix").addHandler(Asking())
logging.getLogger("vllm.graphfix").setLevel(logging.DEBUG)
{LOAD}{imports("0.18.1")}"""
    lines = [line for line in run_in_fork("0.18.1", code).stdout.splitlines() if line.startswith("WAITED")]
    assert any("graphfix: applied where vLLM imports them: " in line for line in lines)
    assert all(line.startswith("WAITED False") for line in lines), lines


def test_a_companion_takes_its_partner_with_it_only_if_it_fails_before_a_capture() -> None:
    activity = "vllm_graphfix._this_process().manager.activity('flashmla-padding')"
    fail = f"import vllm_graphfix\n{activity}.failed(RuntimeError('odd'))\n"
    code = LOAD + imports("0.18.1")
    before = reported(run_in_fork("0.18.1", code + fail + GATE + REPORT).stdout)
    assert (before["flashmla-padding"][1], before["flashmla-fp8"][1]) == ("failed", "incompatible")
    after = reported(run_in_fork("0.18.1", code + GATE + fail + REPORT).stdout)
    assert (after["flashmla-padding"][1], after["flashmla-fp8"][1]) == ("failed", "active")


@pytest.mark.parametrize("closed", ["sys.stdout.close()", pytest.param("sys.stderr.close()", marks=pytest.mark.slow)])
def test_a_process_that_ends_with_a_closed_stream_says_nothing_of_it(closed: str) -> None:
    code = f"{LOAD}\nimport sys\n{closed}\n"
    done = run_in_release("0.18.1", code, {"VLLM_LOGGING_LEVEL": "INFO"})
    assert "Traceback" not in done.stderr + done.stdout
    assert "Logging error" not in done.stderr
