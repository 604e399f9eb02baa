"""One process's way from the loading of plugins to its first capture.

Every call of the plugin is counted, or one of them fails.

Runs in forks of one process of a stock release. A call is found by the profiler: the caller is a file of the plugin and
the callee is not.
"""

from __future__ import annotations

import _imp
import ast
import builtins
import contextlib
import errno
import gc
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import logging
import marshal
import multiprocessing.util
import os
import re
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

_SPEC = importlib.util.find_spec("vllm_graphfix")
assert _SPEC is not None
assert _SPEC.origin is not None
PACKAGE = os.path.dirname(_SPEC.origin) + os.sep  # noqa: PTH120 - the profiler compares texts
"""Found, and not imported."""
LAYERS = re.compile(re.escape(PACKAGE + "fixes" + os.sep) + "(?!_)")
SHARED = (PACKAGE + "fixes" + os.sep + "_", PACKAGE + "authoring")
_LIMIT = 20
"""Seconds for one process."""

ERRORS: dict[str, Callable[[], BaseException]] = {
    "EIO": lambda: OSError(errno.EIO, "Input/output error"),
    "ENOSPC": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "PermissionError": lambda: PermissionError(errno.EPERM, "Operation not permitted"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
}


MODES = ("auto", "strict", "on", "refusing", "forked")
OF_THE_SYSTEM = (
    "posix",
    "os",
    "_io",
    "io",
    "pathlib",
    "_thread",
    "threading",
    "time",
    "posixpath",
    "genericpath",
    "multiprocessing",
)
SYSTEM_ERRORS = ("EIO", "PermissionError", "ENOSPC", "MemoryError", "RuntimeError")
ALL_ERRORS = (
    "RuntimeError AttributeError KeyError MemoryError RecursionError UnicodeDecodeError TypeError ImportError "
    "EIO ValueError AssertionError"
).split()
INTERRUPTS = ("KeyboardInterrupt", "SystemExit")
EXCLUDED = (
    "lock.__exit__ RLock.__exit__ lock.release ContextVar.get ContextVar.set ContextVar.reset __del__ "
    "weakref.remove _weakrefset._remove"
).split()
"""No fault is put there. Who does not give a lock back, which cannot be, is waited for for ever; the last three are
what goes on when an object ends."""


ENDED = re.compile("GraphfixError: |RuntimeError: vllm-graphfix ")
"""What the plugin ends an engine with."""


def error_of(name: str) -> BaseException:
    if name in ERRORS:
        return ERRORS[name]()
    made: BaseException = getattr(builtins, name)("injected")
    return made


class Profiler:
    """Counts the plugin's calls by place, and raises *error* from one of them."""

    def __init__(self, fault: tuple[str, int] | None, error: BaseException | None) -> None:
        self.calls: dict[str, int] = {}
        """By place: thread, file, function, line, instruction, callee."""
        self.modules: dict[str, str] = {}
        self.stage = ""
        self.by_stage: dict[str, dict[str, int]] = {}
        """The calls of a place in each stage of the process's way."""
        self.fired = False
        self._fault = fault
        self._error = error

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            caller, callee = frame.f_back, frame.f_code
            if (
                caller is None
                or not caller.f_code.co_filename.startswith(PACKAGE)
                or callee.co_filename.startswith(PACKAGE)
            ):
                return
            name, module = callee.co_name, frame.f_globals.get("__name__", "")
        elif event == "c_call":
            caller = frame
            if not frame.f_code.co_filename.startswith(PACKAGE):
                return
            name = getattr(called, "__qualname__", "?")
            module = getattr(called, "__module__", None) or type(getattr(called, "__self__", None)).__module__
        else:
            return
        code = caller.f_code
        thread = threading.current_thread().name
        place = f"{thread}:{code.co_filename[len(PACKAGE) :]}:{code.co_name}:{caller.f_lineno}:{caller.f_lasti}:{name}"
        number = self.calls[place] = self.calls.get(place, 0) + 1
        self.modules[place] = module
        in_stages = self.by_stage.setdefault(place, {})
        in_stages[self.stage] = in_stages.get(self.stage, 0) + 1
        if self._fault == (place, number) and self._error is not None:
            self.fired = True
            raise self._error

    def start(self) -> None:
        threading.setprofile(self)
        if self._fault is None or self._fault[0].startswith(f"{threading.main_thread().name}:"):
            sys.setprofile(self)  # which takes half as long as all the rest

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


class LogLines(logging.Handler):
    """A handler that collects the plugin's log lines; if *refusing*, it fails instead, as anybody's may."""

    def __init__(self, *, refusing: bool) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []
        self._refusing = refusing

    def emit(self, record: logging.LogRecord) -> None:
        if self._refusing:
            raise RuntimeError("this handler takes nothing")
        self.lines.append((record.levelno, record.getMessage()))


CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(
        data_parallel_size=1, data_parallel_size_local=1, data_parallel_rank=0, world_size=1
    ),
    model_config=SimpleNamespace(is_moe=False, served_model_name="stand-in", enforce_eager=False),
    compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL")),
    instance_id="abcde",
)
"""The configuration of the engine; no VllmConfig."""
STAND_IN = SimpleNamespace(vllm_config=CONFIG, local_rank=0)
"""For a worker, a runner and an engine core: vLLM's own functions fail on it with an AttributeError or a TypeError."""


def stages(modules: list[str]) -> dict[str, Callable[[], object]]:
    """The way of the process, in order. *modules* are imported by it; the others are there."""

    def load() -> None:
        from vllm.plugins import load_general_plugins

        load_general_plugins()

    def configure() -> None:
        from vllm.engine.arg_utils import EngineArgs

        EngineArgs.create_engine_config(None)

    def call(module: str, owner: str, name: str) -> Callable[[], object]:
        def run() -> object:
            return getattr(getattr(importlib.import_module(module), owner), name)(STAND_IN)

        return run

    def metrics() -> None:
        importlib.import_module("vllm.entrypoints.serve.instrumentator.metrics").get_prometheus_registry()

    def fork() -> None:
        child = os.fork()
        if child:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        # As an engine core that vLLM has forked does.
        core = {"__name__": "vllm.v1.engine.core", "vllm_config": CONFIG}
        exec("from vllm.plugins import load_general_plugins as load\ndef start(vllm_config): load()", core)  # noqa: S102
        core["start"](CONFIG)  # type: ignore[operator]

    way: dict[str, Callable[[], object]] = {"load plugins": load, "configure": configure}
    if "forked" in os.environ:
        way["fork"] = fork
    way |= {f"import {module}": lambda module=module: importlib.import_module(module) for module in modules}  # type: ignore[misc]
    way |= {
        "profile": call("vllm.v1.worker.gpu_worker", "Worker", "determine_available_memory"),
        "measure": call("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "profile_cudagraph_memory"),
        "capture": call("vllm.v1.worker.gpu_worker", "Worker", "compile_or_warm_up_model"),
        "core": call("vllm.v1.engine.core", "EngineCore", "_initialize_kv_caches"),
        "metrics": metrics,
        "threads": wait_for_threads,
        "states": lambda: None if _without_plugin() else importlib.import_module("vllm_graphfix").states(),
        "end": multiprocessing.util._run_finalizers,  # type: ignore[attr-defined]
    }
    return way


def _without_plugin() -> bool:
    return os.environ.get("VLLM_PLUGINS") == ""


def wait_for_threads() -> None:
    """Until the plugin's threads sleep, or some time has passed."""
    give_up = time.monotonic() + 1
    before: object = None
    while time.monotonic() < give_up:
        frames = sys._current_frames()
        now = [
            (thread.name, frames[thread.ident].f_lasti, id(frames[thread.ident]))
            for thread in threading.enumerate()
            if thread.name.startswith("graphfix") and thread.ident in frames
        ]
        if now == before and not any(name == "graphfix-record" for name, _, _ in now):
            return
        before = now
        time.sleep(0.002)


def layers(module: str, name: str) -> list[str]:
    """The fixes whose layers are around a function, read off the code that would run."""
    function: Any = sys.modules.get(module)
    for part in name.split("."):
        function = getattr(function, part, None)
    around = []
    while function is not None:
        if isinstance(function, FunctionType) and LAYERS.match(function.__code__.co_filename):
            around.append(os.path.basename(function.__code__.co_filename).removesuffix(".py").replace("_", "-"))  # noqa: PTH119
        elif isinstance(function, FunctionType) and function.__code__.co_filename.startswith(SHARED):
            around += _fixes_that_count_in(function)
        function = getattr(function, "__wrapped__", None)
    return around


def _fixes_that_count_in(layer: FunctionType) -> list[str]:
    """The fix whose events *layer* counts, which comes from a module that several fixes share."""
    from vllm_graphfix.fix import Activity
    from vllm_graphfix.fixes import FIXES

    contents = [cell.cell_contents for cell in layer.__closure__ or ()]
    counted = [set(each.counts) for each in contents if isinstance(each, Activity)]
    return [fix.name for fix in FIXES if {event.name for event in fix.events} in counted]


def patched() -> dict[str, list[tuple[str, str]]]:
    """Module and name of everything that the active fixes have patched."""
    import vllm_graphfix
    from vllm_graphfix.fixes import BY_NAME

    return {
        name: [(patch.module, patch.name) for patch in BY_NAME[name].patches(state.diagnosis.shape)]
        for name, state in vllm_graphfix.states().items()
        if state.state.value == "active" and state.diagnosis is not None
    }


def plan(counted: dict[str, Any], modes: tuple[str, ...] = MODES) -> Iterator[dict[str, Any]]:
    """The first and the last call of each place; what is called decides which errors are likely.

    What runs while a module of the plugin is imported has one way to fail: one fault in `auto`, and one for who
    insists.
    """
    seen = set()
    for mode in modes:
        for place, last, module in counted[mode]["calls"]:
            callee = place.rsplit(":", 1)[1]
            if callee in EXCLUDED or f"{module}.{callee}" in EXCLUDED:
                continue
            errors = SYSTEM_ERRORS if module.split(".")[0] in OF_THE_SYSTEM else ALL_ERRORS
            if callee == "getattr":
                errors = [error for error in errors if error != "AttributeError"]  # an answer, and no fault
            chance = zlib.crc32(place.encode())
            one, other, third, fourth = (errors[(chance + step) % len(errors)] for step in range(4))
            fault = {"mode": mode, "place": place, "number": 1, "error": one, "callee": module}
            main = place.startswith("MainThread:")
            if place.split(":")[2] == "<module>":
                if mode in ("auto", MODES[1 + chance % 2]):
                    yield fault | {"error": one if mode == "auto" else other}
            elif mode == "auto":
                yield fault
                if main:
                    yield fault | {"number": last, "error": other}
                    yield fault | {"error": INTERRUPTS[chance % 2]}
            elif mode == "strict" and main:
                yield fault | {"error": third}
            elif mode == "on" and main:
                yield fault | {"number": last, "error": fourth}
            elif (mode == "refusing" and main) or (mode == "forked" and place not in seen):
                yield fault | {"error": fourth}
            seen.add(place)


def main(
    modules: list[str],
    environments: dict[str, dict[str, str]],
    results: str,
    every: int,
    trees: dict[str, str],
    packages: dict[str, str],
    sources: list[str],
) -> None:
    """Imports vLLM, but for *modules*, and counts.

    Then there are a fork and a line for every nth fault, and for each of *trees* of vLLM and *packages* of the plugin.
    *sources* are the files of vLLM that the plugin may read.
    """
    warm_up(modules)
    compile_once(sources)
    gc.collect()
    gc.freeze()  # or each fork's first collection goes through, and copies, all that was imported
    counted: dict[str, Any] = {}
    for (
        mode,
        environment,
    ) in environments.items():  # from here, as below: how deep the stack is decides how often it is asked
        counted[mode] = in_fork(modules, None, {"environment": environment, "refusing": mode == "refusing"})
        assert counted[mode] is not None, mode
    targets, by_stage = counted["auto"]["targets"], {mode: counted[mode].pop("stages") for mode in MODES}
    faults = list(plan(counted))
    with open(results, "w") as file:  # noqa: PTH123
        print(json.dumps({"counted": counted, "planned": len(faults)}), file=file, flush=True)
        for fault in faults[::every]:
            job = fault | {"environment": environments[fault["mode"]], "refusing": fault["mode"] == "refusing"}
            job |= _in_its_stage(fault, by_stage[fault["mode"]])
            print(json.dumps([fault, in_fork(modules, targets, job)]), file=file, flush=True)
        for kind, damaged in (("tree", trees), ("package", packages)):
            for number, (what, root) in enumerate(damaged.items()):
                modes: tuple[str, ...] = ("auto", "strict")
                if kind == "tree":  # each is diagnosed anew, which takes longest: of a sample in one mode
                    modes = ("stock", *(modes if every == 1 or "zip" in what else modes[number % 2 :][:1]))
                jobs = {mode: {"environment": environments[mode], kind: root} for mode in modes}
                outcomes = {mode: in_fork(modules, targets, job) for mode, job in jobs.items()}
                print(json.dumps([{kind: what}, outcomes]), file=file, flush=True)


def _in_its_stage(fault: dict[str, Any], by_stage: dict[str, dict[str, dict[str, int]]]) -> dict[str, Any]:
    """Return the stage in which the main thread's call is made, and its number there: no profiler runs before that."""
    number = fault["number"]
    for stage, calls in by_stage[fault["place"]].items() if fault["place"].startswith("MainThread:") else ():
        if number <= calls:
            return {"since": stage, "number": number}
        number -= calls
    return {}


def warm_up(without: list[str]) -> None:
    """Imports vLLM, and what it is slow to find out; the modules *without* are then to be imported anew."""
    import vllm.engine.arg_utils

    if importlib.util.find_spec("torchvision") is None:  # as `image_processors` does: this imports no package of ours
        for name in ("image_processing_qwen2_vl", "video_processing_qwen2_vl"):
            path = f"transformers.models.qwen2_vl.{name}"
            vars(sys.modules.setdefault(path, ModuleType(path))).update(smart_resize=None, Qwen2VLVideoProcessor=None)
    for module in ("vllm.entrypoints.serve.instrumentator.metrics", "vllm.v1.engine.core", *without):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    for module in without:
        sys.modules.pop(module, None)
    _let_register_again(without)
    vllm.engine.arg_utils.EngineArgs.create_engine_config = lambda _: CONFIG
    installed = importlib.metadata.entry_points(group="vllm.general_plugins")
    importlib.metadata.entry_points = lambda **_: installed  # type: ignore[assignment]


def _let_register_again(modules: list[str]) -> None:
    """Let another import of *modules* register again what they have registered with vLLM and torch by name."""
    for name in ("vllm.utils.torch_utils", "vllm.utils"):
        owner: Any = sys.modules.get(name)
        if hasattr(owner, "direct_register_custom_op"):

            def register(*args: Any, _stock: Any = owner.direct_register_custom_op, **kwargs: Any) -> None:
                try:
                    _stock(*args, **kwargs)
                except RuntimeError as error:
                    if "multiple times" not in str(error):
                        raise

            owner.direct_register_custom_op = register
    ops: Any = sys.modules.get("vllm.model_executor.custom_op")
    for registry in (getattr(ops, "op_registry", {}), getattr(getattr(ops, "CustomOp", None), "op_registry", {})):
        for name, each in list(registry.items()):
            if each.__module__ in modules:
                del registry[name]


def compile_once(sources: list[str]) -> None:
    """Forks need not parse the texts of *sources* nor compile them, wherever these lie.

    What was damaged is another text, and parsed and compiled as ever.
    """
    trees: dict[Any, ast.AST] = {}
    codes: dict[Any, bytes] = {}
    for path in sources:
        with open(path, "rb") as file:  # noqa: PTH123
            text = file.read()
        trees[text.decode()] = ast.parse(text.decode())
        codes[text] = marshal.dumps(compile(text, path, "exec", dont_inherit=True))

    def parsed(text: Any, path: Any, *how: Any, **further: Any) -> Any:
        return trees.get(text) or compile(text, path, *how, **further)

    def compiled(text: Any, path: Any, *how: Any, **further: Any) -> Any:
        if text not in codes:
            return compile(text, path, *how, **further)
        code = marshal.loads(codes[text])  # noqa: S302 - made above
        _imp._fix_co_filename(code, path)  # type: ignore[attr-defined]
        return code

    for module, function in ((ast, parsed), (importlib._bootstrap_external, compiled)):
        setattr(module, "compile", function)  # noqa: B010 - where Python finds it before its builtin


def relocate(root: str) -> None:
    """From now on vLLM is in *root*, a folder or an archive."""
    stock = os.path.dirname(sys.modules["vllm"].__path__[0])  # noqa: PTH120
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "vllm" and hasattr(module, "__path__"):
            module.__path__ = [path.replace(stock, root, 1) for path in module.__path__]


def in_fork(modules: list[str], targets: dict[str, Any] | None, job: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of *job*; None if the process died, or hung.

    *job*: ``environment``; ``place`` and ``number`` of the call that fails, ``since`` a stage, and ``error``;
    ``refusing``, whether the log fails too; ``tree``, from which what is not there yet of vLLM is imported;
    ``package``, from which the plugin is.
    """
    result: dict[str, Any] | None = result_of_fork(job["environment"], _LIMIT, lambda: _run(modules, targets, job))
    return result


def result_of_fork(environment: dict[str, str], limit: int, run: Callable[[], Any]) -> Any:
    """Return the result of *run* in a fork with *environment* besides; None if it died, or took *limit* seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(limit)
        os.environ.update(environment)
        encoded = json.dumps(run()).encode()
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(encoded)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        word = pipe.read()
    os.waitpid(child, 0)
    return json.loads(word) if word else None


def _run(modules: list[str], targets: dict[str, list[tuple[str, str]]] | None, job: dict[str, Any]) -> dict[str, Any]:
    if "tree" in job:
        relocate(job["tree"])
    if "package" in job:
        sys.path.insert(0, job["package"])
    log = logging.getLogger("vllm.graphfix")
    log_lines = LogLines(refusing=job.get("refusing", False))
    log.addHandler(log_lines)
    log.propagate = False
    log.setLevel(logging.DEBUG)
    fault = (job["place"], job["number"]) if "place" in job else None
    profiler = Profiler(fault, error_of(job["error"]) if fault else None)
    ends: dict[str, str | None] = {}
    result: dict[str, Any] = {"ends": ends}
    way = stages(modules)
    since = job.get("since", next(iter(way))) if targets is None or fault else None  # else nobody asks for calls
    for stage, act in way.items():
        profiler.stage = stage
        if stage == since:
            profiler.start()
        try:
            act()
            ends[stage] = None
        except BaseException as error:
            ends[stage] = f"{type(error).__name__}: {error}"
            if isinstance(error, (KeyboardInterrupt, SystemExit)) or ENDED.match(ends[stage] or ""):
                break  # this process has ended
    profiler.stop()
    if _without_plugin():  # whose states and layers nobody asks for: to import it and to diagnose takes longest
        return result
    result["fired"] = profiler.fired
    try:
        import vllm_graphfix

        result["states"] = {
            name: [state.state.value, state.reason, state.diagnosis and state.diagnosis.verdict.value]
            for name, state in vllm_graphfix.states().items()
        }
    except Exception as error:
        result["states"] = f"{type(error).__name__}: {error}"
    result["log"] = log_lines.lines
    if targets is None:
        result["targets"] = patched()
        result["calls"] = [[place, number, profiler.modules[place]] for place, number in profiler.calls.items()]
        result["stages"] = profiler.by_stage
    else:
        result["layers"] = {
            fix: [fix in layers(module, name) for module, name in places] for fix, places in targets.items()
        }
    return result
