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
            self._gate.before_capture(worker_or_runner, WARM_UP if serves else PROFILING)
            if self._gate.has_graphs:
                guarded(self._gate.context.begin_capture, worker_or_runner if serves else None)
            try:
                result = stock(worker_or_runner, *args, **kwargs)
                if self._gate.has_graphs and serves:
                    self._gate.after_capture(worker_or_runner)
            except GraphfixError:
                raise
            except BaseException:  # vLLM reports it; the other ranks must not wait for this one's report
                guarded(self._gate.reports.publish_end)
                raise
            finally:
                # After an error, too: a wrapper that fails later fails in no graph.
                guarded(self._gate.context.end_capture)
            if serves:
                guarded(self._gate.status_record.publish_started)
                guarded(self._gate.status_record.start_heartbeat)
                guarded(self._gate.context.on_captured, worker_or_runner, self._gate.has_graphs)
            return result

        kind = getattr(module, owner, None)
        if kind is not None and method in vars(kind):  # before 0.18.0 no runner measures its graphs
            wrap(kind, method, around)
