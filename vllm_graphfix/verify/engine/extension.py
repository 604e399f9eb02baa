"""Methods that vLLM mixes into its worker class: each rank reports fixes and graphs, is poisoned, compares replays."""

from __future__ import annotations

from typing import Any


class GraphfixStates:
    """The `worker_extension_cls` of an engine; `LLM.collective_rpc` calls its methods."""

    def graphfix_states(self) -> dict[str, str]:
        import vllm_graphfix

        return {name: state.state.value for name, state in vllm_graphfix.states().items()}

    def graphfix_cudagraph_mode(self) -> str:
        config: Any = getattr(self, "vllm_config")  # noqa: B009 - an attribute of the worker class
        return str(config.compilation_config.cudagraph_mode.name)

    def graphfix_poison(self, kinds: list[str], buffers: list[str] | None, finite: bool) -> None:
        """Start to poison the steps of this rank. No request may be running."""
        from vllm_graphfix.verify.poison.engine import PoisonedRunner

        runner = getattr(self, "model_runner")  # noqa: B009 - as above
        self._graphfix_poisoned = PoisonedRunner(runner, kinds, buffers, worker=self, finite=finite)

    def graphfix_poison_result(self) -> dict[str, Any]:
        """Stop it and return what `PoisonedRunner.remove` returns."""
        return self._graphfix_poisoned.remove()

    def graphfix_exact(self) -> None:
        """Start to compare each replay of this rank with the same step without its graph. No request may be running."""
        from vllm_graphfix.verify.engine.exact import ExactReplays

        self._graphfix_exact = ExactReplays()
        self._graphfix_exact.begin()

    def graphfix_exact_result(self) -> dict[str, Any]:
        """Stop it and return an `ExactRank`, as builtins."""
        from vllm_graphfix.verify.codec import to_builtins

        rank: dict[str, Any] = to_builtins(self._graphfix_exact.end())
        return rank
