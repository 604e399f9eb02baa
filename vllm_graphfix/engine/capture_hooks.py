"""The functions of vLLM around which the gate is put.

These are the ones before which ranks publish their reports, in which they capture, and in which an engine core shuts
down what the gate has stopped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_graphfix.engine.capture_gate import RUNNERS, STOPS, GraphfixError
from vllm_graphfix.engine.gate_reports import PROFILING, WARM_UP
from vllm_graphfix.patching.hooks import guarded, when_imported, wrap

if TYPE_CHECKING:
    from vllm_graphfix.engine.capture_gate import CaptureGate

_CAPTURE = "compile_or_warm_up_model"
"""The method of a worker that captures the graphs which serve."""
_WORKERS = {"vllm.v1.worker.gpu_worker": "Worker", "vllm.v1.worker.cpu_worker": "CPUWorker"}


class CaptureHooks:
    """The wrappers that call a gate."""

    def __init__(self, gate: CaptureGate) -> None:
        self._gate = gate

    def watch(self) -> None:
        """Hook the imports of the modules whose functions are wrapped."""
        when_imported("vllm.v1.engine.core", self._watch_start)
        for worker, owner in _WORKERS.items():
            when_imported(worker, functools.partial(self.watch_profiling, owner))
            when_imported(worker, functools.partial(self.watch_capture, owner, _CAPTURE))
        for runner in RUNNERS:
            # V1 captures graphs to measure their size and discards them (0.18.0 and later), before the worker captures
            # those that serve.
            when_imported(runner, functools.partial(self.watch_capture, "GPUModelRunner", "profile_cudagraph_memory"))
            when_imported(runner, functools.partial(self.watch_recapture, "GPUModelRunner"))

    def _watch_start(self, core: Any) -> None:
        """Wrap the part of an engine core's start in which ranks may stop it, to shut its executor down then.

        A rank that does not report may be in a collective with ranks that have stopped. At its end, the core would wait
        for that rank without limit; the executor's `shutdown` ends the rank's process.
        """

        def around(stock: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                result = stock(engine, *args, **kwargs)
            except Exception as error:
                if STOPS in str(error):
                    guarded(engine.model_executor.shutdown)
                raise
            guarded(self._gate.status_record.publish_started)
            guarded(self._gate.status_record.start_heartbeat)  # from now on it may be stuck in a step
            return result

        if "_initialize_kv_caches" in vars(core.EngineCore):
            wrap(core.EngineCore, "_initialize_kv_caches", around)

    def watch_profiling(self, owner: str, module: Any) -> None:
        """Wrap the method that every rank calls before the first of them may capture, to publish its report.

        Some ranks capture while they measure memory, and others do not (a start-up plan, 0.30.0 and later; a later
        pipeline stage that is still compiling): a rank that waits for the others' reports must not depend on that.
        """

        def around(stock: Callable[..., Any], worker_or_runner: Any, *args: Any, **kwargs: Any) -> Any:
            guarded(self._gate.reports.publish_report, PROFILING)
            return stock(worker_or_runner, *args, **kwargs)

        if "determine_available_memory" in vars(getattr(module, owner)):
            wrap(getattr(module, owner), "determine_available_memory", around)

    def watch_capture(self, owner: str, method: str, module: Any) -> None:
        """Wrap a method that captures graphs: by then all fixes are applied or have failed.

        Whoever else has patched the method: the gate does not change its result, and a conflict must not disable it.
        """
        serves = method == _CAPTURE

        def around(stock: Callable[..., Any], worker_or_runner: Any, *args: Any, **kwargs: Any) -> Any:
            return self._capture(worker_or_runner, functools.partial(stock, worker_or_runner, *args, **kwargs), serves)

        kind = getattr(module, owner, None)
        if kind is not None and method in vars(kind):  # before 0.18.0 no runner measures its graphs
            wrap(kind, method, around)

    def watch_recapture(self, owner: str, module: Any) -> None:
        """Wrap the method of a model runner that captures, for calls while the engine serves.

        Stock vLLM captures anew by its worker's method alone (elastic expert parallelism). A worker extension that has
        discarded graphs, as for a long sleep, has the runner's to call.
        """

        def around(stock: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
            capture, worker = functools.partial(stock, runner, *args, **kwargs), self._gate.serving()
            if self._gate.captures or getattr(worker, "model_runner", None) is not runner:
                return capture()  # a part of a worker's capture, or of none that serves
            return self._capture(worker, capture, serves=True)

        if "capture_model" in vars(getattr(module, owner)):
            wrap(getattr(module, owner), "capture_model", around)

    def _capture(self, worker_or_runner: Any, capture: Callable[[], Any], serves: bool) -> Any:
        """Return the result of *capture*, let through by the gate; *serves*: its graphs do."""
        gate = self._gate
        gate.before_capture(worker_or_runner, WARM_UP if serves else PROFILING)
        if gate.has_graphs:
            guarded(gate.context.begin_capture, worker_or_runner if serves else None)
        gate.captures += 1
        try:
            result = capture()
            if gate.has_graphs and serves:
                gate.after_capture(worker_or_runner)
        except GraphfixError:
            raise
        except BaseException:  # vLLM reports it; the other ranks must not wait for this one's report
            guarded(gate.reports.publish_end)
            raise
        finally:
            gate.captures -= 1
            # After an error, too: a wrapper that fails later fails in no graph.
            guarded(gate.context.end_capture)
        if serves:
            guarded(gate.note_serving, worker_or_runner)
            guarded(gate.status_record.publish_started)
            guarded(gate.status_record.start_heartbeat)
            guarded(gate.context.on_captured, worker_or_runner, gate.has_graphs)
        return result
