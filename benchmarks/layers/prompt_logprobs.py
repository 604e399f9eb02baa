"""prompt-logprobs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Calls, call, compared

RELEASE = "0.21.0"


def measure(rounds: int) -> list[tuple[object, ...]]:
    import torch
    from vllm.v1.worker.gpu_model_runner import ExecuteModelState

    from vllm_graphfix.fix import Activity
    from vllm_graphfix.fixes.prompt_logprobs import FIX

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

    def does_nothing(self: Any, grammar_output: Any) -> None: ...

    def copies(self: Any, grammar_output: Any) -> None:
        """What any remedy must do, at the least."""
        self.execute_model_state.hidden_states.clone()

    (patch,) = FIX.patches("draft-first")
    fixed = patch.wrap(does_nothing, Activity(FIX.events))
    observed = patch.wrap(does_nothing, Activity(FIX.events, corrects=False))
    found = []
    for label, reference, scored in (
        ("nobody asks for prompt_logprobs", does_nothing, {}),
        ("who asks for prompt_logprobs is not scheduled", does_nothing, {"preempted": 1}),
        ("a scored prompt", copies, {"0": 1}),
    ):
        functions = (reference, fixed, does_nothing, observed)
        calls = Calls(*(call(function, runner_with(scored), None) for function in functions))
        found.append(compared(f"prompt-logprobs, {label}", "alone", calls, rounds, target=True))
    return found
