"""What vLLM mixes into its worker class: each rank can be asked for the states of its fixes, and for its graphs."""

from __future__ import annotations

from typing import Any


class GraphfixStates:
    """vLLM's `worker_extension_cls`; its methods are called by `LLM.collective_rpc`."""

    def graphfix_states(self) -> dict[str, str]:
        import vllm_graphfix

        return {name: state.state.value for name, state in vllm_graphfix.states().items()}

    def graphfix_cudagraph_mode(self) -> str:
        config: Any = getattr(self, "vllm_config")  # noqa: B009 - the worker's, which this is mixed into
        return str(config.compilation_config.cudagraph_mode.name)

    def graphfix_poison(self, kinds: list[str], buffers: list[str] | None, finite: bool) -> None:
        """Begins to poison the steps of this rank; no request may be running."""
        from vllm_graphfix.verify.poison.engine import PoisonedRunner

        runner = getattr(self, "model_runner")  # noqa: B009 - as above
        self._graphfix_poisoned = PoisonedRunner(runner, kinds, buffers, worker=self, finite=finite)

    def graphfix_poison_found(self) -> dict[str, Any]:
        """Ends that, and tells what it has shown."""
        return self._graphfix_poisoned.remove()
