"""prompt-logprobs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Calls, Row, arguments, measured, wrapped
from vllm_graphfix.fixes.prompt_logprobs import FIX

RELEASE = "0.21.0"


def measure(rounds: int) -> list[Row]:
    import torch
    from vllm.v1.worker.gpu_model_runner import ExecuteModelState

    state = ExecuteModelState(
        scheduler_output=SimpleNamespace(num_scheduled_tokens={str(request): 1 for request in range(REQUESTS)}),
        hidden_states=torch.zeros(PADDED_REQUESTS, 8),
        **dict.fromkeys(set(ExecuteModelState._fields) - {"scheduler_output", "hidden_states"}),
    )

    def runner_with(scored: dict[str, int]) -> Any:
        return SimpleNamespace(
            num_prompt_logprobs=scored,
            execute_model_state=state,
            speculative_config=SimpleNamespace(disable_padded_drafter_batch=False, use_eagle=lambda: True),
            compilation_config=SimpleNamespace(max_cudagraph_capture_size=PADDED_REQUESTS),
        )

    def do_nothing(self: Any, grammar_output: Any) -> None: ...

    def copy(self: Any, grammar_output: Any) -> None:
        """The least that any remedy must do."""
        self.execute_model_state.hidden_states.clone()

    (patch,) = FIX.patches("draft-first")
    fixed, observed = wrapped(FIX, patch, do_nothing)
    rows = []
    for label, reference, scored in (
        ("nobody asks for prompt_logprobs", do_nothing, {}),
        ("who asks for prompt_logprobs is not scheduled", do_nothing, {"preempted": 1}),
        ("a scored prompt", copy, {"0": 1}),
    ):
        functions = (reference, fixed, do_nothing, observed)
        calls = Calls(*(arguments(runner_with(scored), None)(function) for function in functions))
        rows.append(measured(f"prompt-logprobs, {label}", "alone", calls, rounds))
    return rows
