"""Rollouts with a check: generate, load new weights, generate again, and say what each worker's graphs are worth.

    python rollouts.py MODEL

The exit code is 1 if a worker lacks a fix that it may need, or if the shadow check has found a replay wrong. See
docs/reinforcement-learning.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

PROMPTS = [[3, 4, 5], [6, 7, 8, 9]]
"""Token ids, so that any model does."""


class WorkerReport:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`), for `collective_rpc` to call."""

    def graphfix_report(self) -> dict[str, Any]:
        """Return the fixes and counters of this worker, in text and numbers alone, which any executor can send."""
        import vllm_graphfix

        return {
            "registered": vllm_graphfix.registered(),
            "fixes": {
                name: {"mode": fix.mode.value, "state": fix.state.value, "reason": fix.reason}
                for name, fix in vllm_graphfix.states().items()
            },
            "events": vllm_graphfix.events(),
        }


def problems(report: dict[str, Any]) -> Iterator[str]:
    """Yield the reasons to doubt the rollouts of a worker."""
    if not report["registered"]:
        yield "vLLM has not loaded the plugin in this worker: is VLLM_PLUGINS set, without graphfix?"
    for name, fix in report["fixes"].items():
        # `waiting`: this worker has not imported the code that the fix is for, such as a drafter's.
        done = fix["state"] in ("active", "waiting", "not-needed")
        if not done and (fix["mode"], fix["state"]) != ("observe", "observing"):
            yield f"{name} is {fix['state']}: {fix['reason']}"
    if mismatches := report["events"].get("shadow", {}).get("mismatches"):
        yield f"the shadow check found {mismatches} wrong replays; `vllm-graphfix report` has the details"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="less, beside a trainer")
    parser.add_argument("--enforce-eager", action="store_true", help="without CUDA graphs, for comparison")
    arguments = parser.parse_args()

    from vllm import LLM, SamplingParams

    llm = LLM(
        **vars(arguments),
        max_model_len=256,
        skip_tokenizer_init=True,
        worker_extension_cls="rollouts.WorkerReport",
    )
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    for step in range(2):
        answers = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
        for answer in answers:
            print(f"step {step}: {answer.prompt_token_ids} -> {list(answer.outputs[0].token_ids)}")
        # Here a trainer makes its step. It sends new weights; this example reads those of MODEL once more.
        llm.collective_rpc("reload_weights")
        llm.reset_prefix_cache()  # what is cached was computed with the old weights

    doubtful = 0
    for rank, report in enumerate(llm.collective_rpc("graphfix_report")):
        states: dict[str, list[str]] = {}
        for name, fix in report["fixes"].items():
            states.setdefault(fix["state"], []).append(name)
        for state, names in states.items():
            print(f"worker {rank}: {state}: {', '.join(names)}")
        print(f"worker {rank}: shadow check: {report['events'].get('shadow', 'off')}")
        for problem in problems(report):
            doubtful += 1
            print(f"worker {rank}: PROBLEM: {problem}")
    return 1 if doubtful else 0


if __name__ == "__main__":
    sys.exit(main())
