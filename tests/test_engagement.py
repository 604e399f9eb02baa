"""In real processes of real releases: vLLM loads the plugin through its entry point, and what is needed engages."""

from __future__ import annotations

import pytest

from engaged import LOAD, REPORT, expected, imports, states
from stock import ALL_RELEASES, run_in_release
from table import ALL_APPLIED, SAMPLE, affected_by, slow_but_for, verdict
from vllm_graphfix._version import __version__
from vllm_graphfix.fixes import FIXES
from warm_release import run_in_fork


@pytest.mark.parametrize("release", slow_but_for(SAMPLE, ALL_RELEASES))
def test_load_general_plugins_engages_what_the_release_needs(release: str) -> None:
    reports = states(release, LOAD + imports(release) + REPORT)
    assert {name: state for name, (_, state, _, _) in reports.items()} == expected(release)
    assert {name: judged for name, (_, _, _, judged) in reports.items()} == {
        f.name: verdict(f.name, release) for f in FIXES
    }


# One release of each shape of code; every order is to end in the same.
SHAPES = ("0.16.0", "0.17.1", "0.18.1", "0.21.0", "0.22.1")


@pytest.mark.parametrize("release", slow_but_for(("0.17.1", "0.21.0"), SHAPES))
def test_targets_imported_before_register_are_patched_too(release: str) -> None:
    reports = states(release, imports(release) + LOAD + REPORT)
    assert {name: state for name, (_, state, _, _) in reports.items()} == expected(release)


@pytest.mark.parametrize("release", ["0.17.1", "0.21.0"])
def test_the_tenth_register_changes_nothing(release: str) -> None:
    code = f"""
import vllm_graphfix
{LOAD}{imports(release)}
from vllm_graphfix.patching import sites as patching
before = {{key: (site.installed, dict(site.layers)) for key, site in patching._sites.items()}}
for _ in range(9):
    vllm_graphfix.register()
after = {{key: (site.installed, dict(site.layers)) for key, site in patching._sites.items()}}
assert before == after and before
{REPORT}"""
    assert {name: state for name, (_, state, _, _) in states(release, code).items()} == expected(release)


@pytest.mark.xdist_group("0.18.1")
def test_a_forked_child_has_the_patches_and_their_states() -> None:
    code = f"""
import os, sys
{LOAD}{imports("0.18.1")}
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    sys.exit()
{REPORT}
sys.stdout.flush()
os._exit(0)
"""
    assert {name: state for name, (_, state, _, _) in states("0.18.1", code).items()} == expected("0.18.1")


@pytest.mark.xdist_group("0.18.1")
def test_without_an_import_of_its_target_a_fix_waits() -> None:
    reports = states("0.18.1", LOAD + REPORT)
    assert [name for name, (_, state, _, _) in reports.items() if state == "waiting"] == list(affected_by("0.18.1"))


@pytest.mark.xdist_group("0.17.1")
def test_reverting_restores_the_stock_functions() -> None:
    code = f"""
import vllm_graphfix
{imports("0.17.1")}
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.spec_decode.eagle import cudagraph
stock = [cudagraph_utils.CudaGraphManager.capture_graph, cudagraph_utils.set_forward_context, cudagraph.prepare_inputs_to_capture, cudagraph.EagleCudaGraphManager.capture_graph]
{LOAD}
patched = [cudagraph_utils.CudaGraphManager.capture_graph, cudagraph_utils.set_forward_context, cudagraph.prepare_inputs_to_capture, cudagraph.EagleCudaGraphManager.capture_graph]
assert not any(a is b for a, b in zip(stock, patched))
vllm_graphfix._this_process().manager.revert("capture-state")
reverted = [cudagraph_utils.CudaGraphManager.capture_graph, cudagraph_utils.set_forward_context, cudagraph.prepare_inputs_to_capture, cudagraph.EagleCudaGraphManager.capture_graph]
assert all(a is b for a, b in zip(stock, reverted))
{REPORT}"""  # noqa: E501
    reports = states("0.17.1", code)
    assert reports["capture-state"][1] == "off"
    assert reports["draft-decode-mode"][1] == "active"


@pytest.mark.xdist_group("0.21.0")
def test_patched_methods_of_vllm_keep_what_the_stock_ones_tell() -> None:
    code = f"""
import inspect, pickle
{imports("0.21.0")}
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.eagle.cudagraph import PrefillEagleCudaGraphManager
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder
targets = [(CudaGraphManager, "capture"), (PrefillEagleCudaGraphManager, "capture"), (BaseMambaAttentionMetadataBuilder, "_compute_common_metadata")]
def told(owner, name):
    f = getattr(owner, name)
    return f.__name__, f.__qualname__, f.__module__, f.__doc__, str(inspect.signature(f)), inspect.getsource(f), inspect.isfunction(f)
before = [told(*t) for t in targets]
manager = object.__new__(ModelCudaGraphManager)
manager.size = 3
pickled = pickle.dumps(manager)
{LOAD}
assert [told(*t) for t in targets] == before
assert pickle.dumps(manager) == pickled and pickle.loads(pickled).size == 3
assert isinstance(manager, CudaGraphManager) and ModelCudaGraphManager.capture is not CudaGraphManager.capture
{REPORT}"""  # noqa: E501
    assert states("0.21.0", code)["capture-state"][1] == "active"


SWITCHED: list[tuple[str, dict[str, str], dict[str, str]]] = [
    ("0.18.1", {"VLLM_GRAPHFIX": "off"}, {fix.name: "off" for fix in FIXES}),
    ("0.18.1", {"VLLM_GRAPHFIX": "OFF", "VLLM_GRAPHFIX_FLASHMLA_FP8": "on"}, {fix.name: "off" for fix in FIXES}),
    ("0.18.1", {"VLLM_GRAPHFIX_CAPTURE_STATE": "0"}, {"capture-state": "off", "flashmla-fp8": "active"}),
    ("0.18.1", {"VLLM_GRAPHFIX_CAPTURE_STATE": "observe"}, {"capture-state": "observing", "flashmla-fp8": "active"}),
    ("0.18.1", {"VLLM_GRAPHFIX_FLASHMLA_PADDING": "off"}, {"flashmla-fp8": "active", "flashmla-padding": "off"}),
    ("0.18.1", {"VLLM_GRAPHFIX_FLASHMLA_FP8": "off"}, {"flashmla-fp8": "off", "flashmla-padding": "active"}),
    ("0.18.1", {"VLLM_GRAPHFIX_FLASHMLA_FP8": "nonsense"}, {"flashmla-fp8": "off"}),
    ("0.18.1", {"VLLM_GRAPHFIX_ROLLOUT": "0%"}, {fix.name: "not-in-canary" for fix in FIXES}),
    ("0.18.1", {"VLLM_GRAPHFIX_ROLLOUT": "100%"}, {"flashmla-fp8": "active"}),
    (
        "0.21.0",
        {"VLLM_GRAPHFIX_DRAFT_PREFILL_STATE": "off"},
        {"capture-state": "incompatible", "draft-prefill-state": "off"},
    ),
    ("0.21.0", {"VLLM_GRAPHFIX_CAPTURE_STATE": "off"}, {"capture-state": "off", "draft-prefill-state": "active"}),
    ("0.20.0", {"VLLM_GRAPHFIX_DRAFT_PREFILL_STATE": "off"}, {"capture-state": "active", "draft-prefill-state": "off"}),
    ("0.18.1", {"VLLM_PLUGINS": ""}, {"flashmla-fp8": "waiting", "mamba-padding": "not-needed"}),
]


@pytest.mark.parametrize(("release", "env", "wanted"), SWITCHED, ids=[f"{row[0]}-{row[1]}" for row in SWITCHED])
def test_the_environment_decides(release: str, env: dict[str, str], wanted: dict[str, str]) -> None:
    reports = states(release, LOAD + imports(release) + REPORT, env)
    assert {name: reports[name][1] for name in wanted} == wanted


@pytest.mark.xdist_group("0.21.0")
def test_without_a_speculator_capture_state_stays_although_its_companion_is_off() -> None:
    code = LOAD + "import vllm.v1.worker.gpu.cudagraph_utils\n" + REPORT
    reports = states("0.21.0", code, {"VLLM_GRAPHFIX_DRAFT_PREFILL_STATE": "off"})
    assert reports["capture-state"][1] == "active"


LOGGED = """
import logging
import vllm.logger
for each in (logging.getLogger("vllm"), *logging.getLogger("vllm").handlers):
    each.setLevel({level!r})
"""
"""As vLLM's logger is where VLLM_LOGGING_LEVEL is that *level* at its import."""


def log(release: str, env: dict[str, str], level: str = "INFO") -> list[str]:
    done = run_in_fork(release, LOGGED.format(level=level) + LOAD + imports(release), env)
    return [line for line in done.stdout.splitlines() if "graphfix" in line.lower()]


@pytest.mark.xdist_group("0.18.1")
def test_one_info_line_sums_up_what_was_done() -> None:
    (line,) = log("0.18.1", ALL_APPLIED)
    assert "INFO" in line
    assert f"applied where vLLM imports them: {', '.join(affected_by('0.18.1'))}; " in line
    others = [fix.name for fix in FIXES if fix.name not in affected_by("0.18.1")]
    assert line.endswith(f"not-needed: {len(others)} (vllm-graphfix {__version__}, VLLM_GRAPHFIX=on)")


def test_a_process_that_imports_nothing_of_a_fix_says_so_when_it_ends() -> None:
    done = run_in_release("0.18.1", LOAD, {"VLLM_LOGGING_LEVEL": "INFO"}, libraries_loaded=True)
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "graphfix" in line.lower()]
    assert "this process has imported nothing that a fix concerns (vllm-graphfix " in line


@pytest.mark.xdist_group("0.18.1")
def test_the_line_is_there_too_where_all_is_off() -> None:
    (line,) = log("0.18.1", {"VLLM_GRAPHFIX": "off"})
    assert f"graphfix: off: {len(FIXES)} (vllm-graphfix {__version__}, VLLM_GRAPHFIX=off)" in line


@pytest.mark.xdist_group("0.18.1")
def test_debug_tells_of_every_fix() -> None:
    lines = log("0.18.1", {}, "DEBUG")
    for fix in FIXES:
        assert any("DEBUG" in line and fix.name in line for line in lines)


@pytest.mark.xdist_group("0.18.1")
def test_a_setting_that_means_nothing_is_a_warning_with_the_nearest_that_does() -> None:
    lines = log("0.18.1", {"VLLM_GRAPHFIX_CAPTURE_STAT": "on", "VLLM_GRAPHFIX_FLASHMLA_FP8": "onn"})
    warnings = [line for line in lines if "WARNING" in line]
    assert any(
        "VLLM_GRAPHFIX_CAPTURE_STAT is not a variable of vllm-graphfix" in w and "VLLM_GRAPHFIX_CAPTURE_STATE?" in w
        for w in warnings
    )
    assert any(
        "VLLM_GRAPHFIX_FLASHMLA_FP8='onn' is not a valid value" in w and "did you mean on?" in w for w in warnings
    )


@pytest.mark.xdist_group("0.18.1")
def test_fp8_without_padding_is_a_warning() -> None:
    lines = log("0.18.1", {"VLLM_GRAPHFIX_FLASHMLA_PADDING": "off"})
    assert any("WARNING" in line and "flashmla-padding" in line and "block -1" in line for line in lines)


@pytest.mark.parametrize("release", ["0.14.1", "0.17.1", "0.33.0"])
def test_vllm_knows_the_names_and_their_values_never_change_its_compile_key(release: str) -> None:
    code = f"""
{LOAD}
import vllm.envs as envs
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.fixes import BY_NAME
values = {{name: envs.environment_variables[name]() for name in settings.names(BY_NAME)}}
assert set(values.values()) == {{None}}, values
if hasattr(envs, "validate_environ"):
    envs.validate_environ(hard_fail=True)
"""
    run_in_release(
        release,
        code,
        {"VLLM_GRAPHFIX": "on", "VLLM_GRAPHFIX_CAPTURE_STATE": "off", "VLLM_GRAPHFIX_STATUS_DIR": "/nowhere"},
        libraries_loaded=True,
    )


def test_register_imports_nothing_heavy() -> None:
    code = """
import sys
import vllm_graphfix
vllm_graphfix.register()
heavy = {"torch", "numpy", "rich", "typer", "vllm"} & set(sys.modules)
assert not heavy, heavy
"""
    run_in_release("0.18.1", code)


@pytest.mark.xdist_group("0.18.1")
def test_a_vllm_without_cuda_still_serves_its_platform() -> None:
    code = LOAD + "from vllm.platforms import current_platform\nassert not current_platform.is_cuda()\n" + REPORT
    assert states("0.18.1", code)["mamba-padding"][1] == "not-needed"


@pytest.mark.parametrize("release", slow_but_for(("0.33.0",), ("0.15.0", "0.33.0")))
def test_a_stage_of_a_rollout_changes_no_factor_of_vllms_compile_key(release: str) -> None:
    """A change would make each stage compile a fleet anew.

    The engine that is asked has decided: its decision is in the environment.
    """
    code = f"""
{LOAD}
import json, os
import vllm.envs as envs
assert "VLLM_GRAPHFIX_DECISION" in os.environ
told = json.dumps(envs.compile_factors(), default=str, sort_keys=True)
print("FACTORS", told.replace(os.getcwd(), "scratch"))  # another folder in each run of this test
"""
    stages: list[dict[str, str]] = [
        {"VLLM_GRAPHFIX": "off"},
        {"VLLM_GRAPHFIX": "observe", "VLLM_GRAPHFIX_ROLLOUT": "5", "VLLM_GRAPHFIX_ROLLOUT_KEY": "a"},
        {"VLLM_GRAPHFIX_ROLLOUT": "50", "VLLM_GRAPHFIX_MAMBA_PADDING": "on", "VLLM_GRAPHFIX_STATUS_DIR": "/elsewhere"},
    ]
    factors = {
        next(line for line in run.stdout.splitlines() if line.startswith("FACTORS"))
        for run in (run_in_release(release, code, env, libraries_loaded=True) for env in stages)
    }
    assert len(factors) == 1
    assert "VLLM_GRAPHFIX_DECISION" in factors.pop()
