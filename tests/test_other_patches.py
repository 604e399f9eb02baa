"""Other people's patches in the same process, before ours and after.

The state is `conflict` where a target is not the stock one, and `active` only where ours is called.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import other_packages
import server
from engaged import LOAD, REPORT, expected, imports, reported
from engine import write_llama
from stock import run_in_release
from test_failures import GATE
from vllm_graphfix.fixes import BY_NAME
from warm_release import WarmRelease, warm_process

FLASHMLA = "vllm.v1.attention.backends.mla.flashmla:FlashMLAMetadataBuilder._build_decode"
MAMBA = "vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadataBuilder._compute_common_metadata"
MANAGER = "vllm.v1.worker.gpu.cudagraph_utils"
EAGLE = "vllm.v1.worker.gpu.spec_decode.eagle.cudagraph"
SPECULATOR = "vllm.v1.worker.gpu.spec_decode.eagle.speculator"

TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "0.16.0": {FLASHMLA: ("flashmla-fp8", "flashmla-padding"), f"{MANAGER}:set_forward_context": ("capture-state",)},
    "0.17.1": {
        f"{EAGLE}:prepare_inputs_to_capture": ("capture-state",),
        f"{EAGLE}:EagleCudaGraphManager.__init__": ("draft-decode-mode",),
        f"{SPECULATOR}:EagleSpeculator.generate_draft": ("draft-decode-mode",),
        f"{MANAGER}:CudaGraphManager.capture_graph": ("capture-state",),
    },
    "0.18.1": {
        FLASHMLA: ("flashmla-fp8", "flashmla-padding"),
        f"{MANAGER}:CudaGraphManager.capture": ("capture-state",),
    },
    "0.21.0": {
        MAMBA: ("mamba-padding",),
        f"{MANAGER}:CudaGraphManager.capture": ("capture-state", "draft-prefill-state"),
        f"{EAGLE}:PrefillEagleCudaGraphManager.capture": ("draft-prefill-state",),
    },
}
"""Targets, by release, with the fixes that have a layer there."""

NAMES = {"0.16.0": (f"{MANAGER}:",), "0.17.1": (f"{MANAGER}:", f"{EAGLE}:"), "0.18.1": (), "0.21.0": ()}
"""Modules of which a fix patches names, and not only methods."""

PROBE = """
import contextlib, functools, inspect, json, sys
import vllm_graphfix.fixes as fixes
LAYERS = {}
def counted(fix):
    return fix._replace(patches=lambda shape: [p._replace(wrap=functools.partial(count, fix.name, p)) for p in fix.patches(shape)])
def count(fix, patch, stock, activity):
    key = f"{fix} {patch.module}:{patch.name}"
    @functools.wraps(stock)
    def layer(*args, **kwargs):
        LAYERS[key] = LAYERS.get(key, 0) + 1
        return stock(*args, **kwargs)
    return layer
fixes.FIXES = tuple(map(counted, fixes.FIXES))
"""  # noqa: E501
"""Layers that count their calls in the place of those of the fixes, whose own work is no matter here."""

CALL = """
import vllm_graphfix
found = {name: (state.state.value, state.reason) for name, state in vllm_graphfix.states().items()}
module, name = target.split(":")
*classes, name = name.split(".")
owner = sys.modules[module]
if classes:
    # As vLLM does: on an object, of a class that is derived from what stands there.
    leaf = type("Leaf", (getattr(owner, *classes),), {})
    leaf.__abstractmethods__ = frozenset()
    called = getattr(object.__new__(leaf), name)
else:
    classes = [vars(c).values() for c in vars(owner).values() if isinstance(c, type) and c.__module__ == module]
    uses = [inspect.unwrap(f).__globals__ for methods in classes for f in methods if inspect.isfunction(f)]
    called = next(names for names in uses if names["__name__"] == module)[name]
LAYERS.clear()
theirs = getattr(sys.modules.get("other_plugin"), "CALLS", 0)
with contextlib.suppress(Exception):
    called(None, None, None)  # whatever it makes of that, it was called
theirs = getattr(sys.modules.get("other_plugin"), "CALLS", 0) - theirs
print("OUTCOME " + json.dumps({"states": found, "layers": LAYERS, "theirs": theirs}))
"""
"""Tells the states, calls *target* as vLLM would, and tells whose code was called."""


class Outcome(NamedTuple):
    states: dict[str, str]
    reasons: dict[str, str]
    layers: dict[str, int]
    """Calls of our layers, by fix and target, in one call of a target."""
    theirs: int
    """Calls of their patch in it."""
    gate: str
    """With what the worker's start ended."""


def outcome(warm: WarmRelease, code: str, target: str, env: dict[str, str]) -> Outcome:
    """The outcome of *code*, which loads the plugins, and of the start-up and one call of *target* after it."""
    done = warm.run(f"{PROBE}target = {target!r}\n{code}{GATE}{CALL}", env)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout
    (gate,) = [line.removeprefix("GATE ") for line in lines if line.startswith("GATE ")]
    (line,) = [line.removeprefix("OUTCOME ") for line in lines if line.startswith("OUTCOME ")]
    report = json.loads(line)
    states = {name: state for name, (state, _) in report["states"].items()}
    reasons = {name: reason for name, (_, reason) in report["states"].items()}
    return Outcome(states, reasons, report["layers"], report["theirs"], gate)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_packages.install_plugin(tmp_path_factory.mktemp("other") / "site")


@pytest.fixture
def warm(request: pytest.FixtureRequest) -> WarmRelease:
    return warm_process(request.param)


# -- every way to patch ------------------------------------------------------------------------------------------------

BEFORE_AND_AFTER: dict[str, tuple[str, str]] = {
    "closure": ("conflict", "active"),
    "closure that does not say what it wraps": ("conflict", "conflict"),
    "own function": ("conflict", "conflict"),
    "functools.partial": ("conflict", "conflict"),
    "wrapt.patch_function_wrapper": ("conflict", "active"),
    "wrapt.FunctionWrapper": ("conflict", "active"),
    "wrapt.decorator": ("conflict", "active"),
    "mock.patch": ("conflict", "conflict"),
    "mock.patch with autospec": ("conflict", "conflict"),
    "__code__": ("conflict", "conflict"),
    "__code__ of the innermost function": ("conflict", "conflict"),
    "subclass": ("conflict", "conflict"),
    "subclass that calls": ("conflict", "conflict"),
    "subclass that inherits": ("conflict", "conflict"),
    "metaclass": ("conflict", "conflict"),
    "__init_subclass__": ("active", "active"),
    "name elsewhere": ("active", "active"),
    "copied module": ("active", "active"),
    "other module": ("conflict", "conflict"),
    "reloaded module": ("active", "conflict"),
}
"""The state of the fixes of a target that is patched in this way before they are applied, and after."""

ANONYMOUS = {"mock.patch", "mock.patch with autospec", "metaclass", "copied module", "other module", "reloaded module"}
"""Ways that leave no trace of whose they are."""

PASSES_ON = {
    *("closure", "closure that does not say what it wraps", "functools.partial"),
    *("wrapt.patch_function_wrapper", "wrapt.FunctionWrapper", "wrapt.decorator", "subclass that calls"),
}
"""Ways in which theirs calls what it found."""


def applicable(way: str, release: str, target: str) -> bool:
    """Return whether this patch concerns the fixes of *target* alone, and the kind of target that it is."""
    module, _, name = target.partition(":")
    if way == "reloaded module" and (release, module) == ("0.17.1", EAGLE):
        return False  # two fixes have targets in it
    if "." not in name:
        return "class" not in way
    if way in ("copied module", "other module") and f"{module}:" in NAMES[release]:
        return False  # names of the module are targets of another fix, or of this one
    if way in ("__init_subclass__", "metaclass") and name == "CudaGraphManager.capture":
        return False  # classes below it would be patched, with a target of another fix
    return "class" not in way or name != "EagleCudaGraphManager.__init__"  # on which capture-state has a target too


def case(release: str, target: str, way: str, marks: Any = ()) -> Any:
    return pytest.param(release, release, target, way, marks=marks, id=f"{release}-{target.rpartition('.')[2]}-{way}")


CASES = [
    case(release, target, way, () if target == FLASHMLA and release == "0.18.1" else pytest.mark.slow)
    for release, targets in TARGETS.items()
    for target in targets
    for way in BEFORE_AND_AFTER
    if applicable(way, release, target)
]


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(("warm", "release", "target", "way"), CASES, indirect=["warm"])
def test_a_fix_is_active_only_where_it_is_called_and_else_in_conflict(
    warm: WarmRelease, plugin: Path, release: str, target: str, way: str, order: str
) -> None:
    check(warm, plugin, release, target, way, order, "load")


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    ("warm", "release", "target", "way"),
    [each for each in CASES if each.values[-1] != "reloaded module"],  # nobody reloads a module while it is imported
    indirect=["warm"],
)
def test_a_patch_that_waits_for_the_import_of_the_target_ends_in_the_same(
    warm: WarmRelease, plugin: Path, release: str, target: str, way: str, order: str
) -> None:
    check(warm, plugin, release, target, way, order, "import")


def check(warm: WarmRelease, plugin: Path, release: str, target: str, way: str, order: str, when: str) -> None:
    """One process in which *way* is put on *target*; the engine is one that insists (strict) or not by turns."""
    path = f"sys.path.{'insert(0, ' if order == 'before' else 'append('}{str(plugin)!r})\n"
    strict = (list(BEFORE_AND_AFTER).index(way) + (order == "after")) % 2 == 0
    env = {"OTHER_TARGET": target, "OTHER_WAY": way, "OTHER_WHEN": when}
    result = outcome(
        warm, path + LOAD + imports(release), target, env | ({"VLLM_GRAPHFIX": "strict"} if strict else {})
    )
    concerned = TARGETS[release][target]
    wanted = BEFORE_AND_AFTER[way][order == "after"]
    if way == "copied module" and "." not in target.partition(":")[2]:
        wanted = "conflict"  # vLLM's code does not look names up in a copy
    for name, stock_alone in expected(release).items():
        together = {other.name for other in BY_NAME[name].requires} & set(concerned)
        possible = {wanted if name in concerned else stock_alone}
        if together and wanted != "active" and stock_alone == "active":
            possible = {"incompatible", *(possible & {"conflict"})}
        assert result.states[name] in possible, result
    layers = {fix: result.layers.get(f"{fix} {target}", 0) for fix in concerned}
    if wanted == "active":
        assert set(layers.values()) == {1}, result
    else:
        reasons = " ".join(result.reasons[fix] for fix in concerned)
        assert "other_plugin" in reasons or way in ANONYMOUS, result
        assert not any(layers.values()) or order == "after", "theirs was there first, and ours was put on it"
    if way in PASSES_ON:
        assert result.theirs == 1, result
    assert result.gate.startswith("GraphfixError" if strict and wanted != "active" else "AttributeError"), result


# -- agents and plugins from PyPI --------------------------------------------------------------------------------------

QUIET = {
    "DD_TRACE_ENABLED": "false",
    "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
    "DD_REMOTE_CONFIGURATION_ENABLED": "false",
    "OTEL_SDK_DISABLED": "true",
}
"""No agent runs here."""

DDTRACE = """
import ddtrace
ddtrace.patch(vllm=True)
"""
DDTRACE_DONE = """
import vllm
from vllm.v1.engine.llm_engine import LLMEngine
assert vllm._datadog_patch and type(vars(LLMEngine)["__init__"]).__name__ == "FunctionWrapper"
"""
OPENLIT = """
from openlit._config import OpenlitConfig
OpenlitConfig()
from openlit.instrumentation.vllm import VLLMInstrumentor
VLLMInstrumentor().instrument(skip_dep_check=True)
"""
OPENLIT_DONE = """
from vllm.entrypoints.llm import LLM
assert type(vars(LLM)["generate"]).__name__ == "FunctionWrapper"
"""
# What ddtrace puts on functions for its debugger: it gives them other code, and keeps file, name and line.
TRAMPOLINE = f"""
import importlib
from ddtrace.internal.wrapping import wrap
def theirs(function, args, kwargs):
    return function(*args, **kwargs)
wrap(importlib.import_module({FLASHMLA.partition(":")[0]!r}).FlashMLAMetadataBuilder._build_decode, theirs)
"""


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    ("warm", "release", "agent", "done"),
    [
        pytest.param(
            release,
            release,
            agent,
            done,
            marks=() if release == "0.18.1" and name == "ddtrace" else pytest.mark.slow,
            id=f"{release}-{name}",
        )
        for release in TARGETS
        for name, agent, done in (("ddtrace", DDTRACE, DDTRACE_DONE), ("openlit", OPENLIT, OPENLIT_DONE))
    ],
    indirect=["warm"],
)
def test_an_agent_that_traces_vllm_changes_no_state_and_is_changed_in_nothing(
    warm: WarmRelease, release: str, agent: str, done: str, order: str
) -> None:
    code = f"sys.path.append({str(other_packages.packages())!r})\n"
    ours = LOAD + imports(release)
    target = next(iter(TARGETS[release]))
    result = outcome(warm, code + (agent + ours if order == "before" else ours + agent) + done, target, QUIET)
    assert result.states == expected(release)
    assert {result.layers.get(f"{fix} {target}") for fix in TARGETS[release][target]} == {1}
    assert result.gate.startswith("AttributeError")


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.xdist_group("0.18.1")
@pytest.mark.parametrize("warm", ["0.18.1"], indirect=True)
def test_code_that_ddtrace_has_injected_into_a_target_is_a_conflict(warm: WarmRelease, order: str) -> None:
    code = f"sys.path.append({str(other_packages.packages())!r})\n"
    ours = LOAD + imports("0.18.1")
    result = outcome(warm, code + (TRAMPOLINE + ours if order == "before" else ours + TRAMPOLINE), FLASHMLA, QUIET)
    assert result.states == expected("0.18.1") | {"flashmla-fp8": "conflict", "flashmla-padding": "conflict"}
    assert "given the code of" in result.reasons["flashmla-fp8"]


BEGUN = """
import vllm_graphfix.engine.process as membership
BEGUN, EXPOSED = [], []
membership.EngineProcess._decide_for_engine = lambda self: BEGUN.append(self.role.value)
membership.EngineProcess._expose_metrics = lambda self: EXPOSED.append(self.role.value)
"""
"""Counts where an engine begins and where metrics are served, as our wrappers of vLLM's functions notice it."""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("imported", [True, False], ids=["engine arguments first", "plugins first"])
def test_an_engine_begins_with_arctic_inference_too(order: str, imported: bool, tmp_path: Path) -> None:
    """Arctic Inference gives vLLM 0.18.0's `AsyncEngineArgs`, those of `vllm serve`, a function of their own."""
    code = f"""
import json, sys
sys.path.{"insert(0, " if order == "before" else "append("}{str(other_packages.arctic_inference())!r})
{"import vllm.engine.arg_utils" if imported else ""}
{BEGUN}{LOAD}{imports("0.18.0")}
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.v1.worker.worker_base import WorkerBase
assert {{"create_engine_config"}} <= set(AsyncEngineArgs._arctic_patches) and WorkerBase._arctic_patches
for arguments in (EngineArgs, AsyncEngineArgs):
    made = arguments(model={str(write_llama(tmp_path))!r})
    try:
        made.create_engine_config()
    except Exception as error:
        print("STOCK", error)  # there is no device
{REPORT}print("BEGUN", len(BEGUN))
"""
    env = {"ARCTIC_INFERENCE_ENABLED": "1", "ARCTIC_INFERENCE_SKIP_PLATFORM_CHECK": "1"}
    done = run_in_release("0.18.0", code, env)
    assert done.stdout.count("STOCK") == 2, done.stdout
    assert "BEGUN 2" in done.stdout, done.stdout + done.stderr
    assert {name: state for name, (_, state, _, _) in reported(done.stdout).items()} == expected("0.18.0")


SPANS = """
import wrapt
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
spans, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
tracer = provider.get_tracer("theirs")
def traced(wrapped, instance, args, kwargs):
    with tracer.start_as_current_span(wrapped.__name__):
        return wrapped(*args, **kwargs)
for module, name in (
    ("vllm.plugins", "load_general_plugins"),
    ("vllm.engine.arg_utils", "EngineArgs.create_engine_config"),
    ("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model"),
    ("vllm.entrypoints.serve.instrumentator.metrics", "get_prometheus_registry"),
):
    wrapt.wrap_function_wrapper(module, name, traced)
"""
"""Spans as instrumentations of OpenTelemetry make them, around functions that we wrap for other purposes than fixes."""


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.xdist_group("0.18.1")
@pytest.mark.parametrize("warm", ["0.18.1"], indirect=True)
def test_where_both_wrap_a_function_theirs_records_and_ours_decides(
    warm: WarmRelease, plugin: Path, order: str
) -> None:
    code = BEGUN + (SPANS + LOAD if order == "before" else LOAD + SPANS) + imports("0.18.1")
    code += """
import contextlib
from vllm import plugins
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.serve.instrumentator import metrics
with contextlib.suppress(Exception):
    EngineArgs.create_engine_config(object())
metrics.get_prometheus_registry()
plugins.load_general_plugins()
"""
    own = "import vllm.v1.attention.backends.mla.flashmla as f\nf.FlashMLAMetadataBuilder._build_decode = print\n"
    probe = "print('BOTH', len(BEGUN), len(EXPOSED), sorted(span.name for span in spans.get_finished_spans()))\n"
    output = warm.run(own + code + GATE + probe, {"VLLM_GRAPHFIX": "strict"}).stdout
    (line,) = [line for line in output.splitlines() if line.startswith("BOTH")]
    names = ["create_engine_config", "get_prometheus_registry", "load_general_plugins"]
    # The gate is on top of what was there first, and stops before that runs; what came later has seen it stop.
    names.append("load_general_plugins" if order == "before" else "compile_or_warm_up_model")
    assert line == f"BOTH 1 1 {sorted(names)}", output
    assert "GATE GraphfixError" in output


@pytest.mark.slow
@pytest.mark.xdist_group("server")
@pytest.mark.parametrize("with_them", ["ddtrace", "another plugin"])
def test_a_server_with_them_tells_what_one_without_them_tells(with_them: str, plugin: Path, tmp_path: Path) -> None:
    installed = server.install(tmp_path / "installed")
    ours = [installed.plugin, server.cpu_release()]
    if with_them == "ddtrace":  # as ddtrace-run does it: by a sitecustomize
        packages = other_packages.packages()
        path, env = [packages / "ddtrace" / "bootstrap", *ours, packages], QUIET | {"DD_TRACE_ENABLED": "true"}
    else:  # which gives the arguments of `vllm serve` a function of their own, before ours is there
        target = {"OTHER_TARGET": "vllm.engine.arg_utils:AsyncEngineArgs.create_engine_config"}
        path = [plugin, *ours]
        env = target | {"OTHER_WAY": "closure that does not say what it wraps", "OTHER_WHEN": "load"}
    answers: list[tuple[Any, ...]] = []
    for extra in ({}, env | {"PYTHONPATH": os.pathsep.join(map(str, path))}):
        folder = tmp_path / f"server{len(answers)}"
        folder.mkdir()
        with server.serve(installed, folder, env=extra) as running:
            text = running.completions([5, 6, 7])
            fleet = running.fleet()
            states = sorted(
                (record["role"], sorted((name, fix["state"]) for name, fix in record["fixes"].items()))
                for record in running.records()
            )
            metrics = [line for line in running.metrics().splitlines() if line.startswith("graphfix_")]
            answers.append((text, fleet.code, states, len(metrics)))
            if with_them == "ddtrace" and extra:
                for pid in running.pids():
                    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
                    assert "/ddtrace/" in maps or "resource_tracker" in running.pids()[pid]
    assert answers[0] == answers[1]
    assert answers[0][3]
