"""Where the shadow check wraps vLLM, as records that `Process` applies like fixes: diagnosed, all of their targets or none, read back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_graphfix.fix import Diagnosis, Fallback, Fix, Patch
from vllm_graphfix.shadow import runner_v1, runner_v2
from vllm_graphfix.source import Source


def _record(
    runner: str,
    diagnose: Callable[[Source], Diagnosis],
    patches: Callable[[str], Sequence[Patch]],
    reads: tuple[str, ...],
    modules: tuple[str, ...],
    fallback: Fallback,
) -> Fix:
    """What a fix tells people is empty here: docs/shadow.md tells it."""
    return Fix(
        number=int(runner[1]),
        name=f"shadow-{runner.lower()}",
        pr=None,
        references=(),
        summary=f"now and then a replay of model runner {runner} is compared with the same step run without its graph",
        releases="0.18.0 - 0.33.0",
        symptom="",
        cause="",
        remedy="",
        detect="",
        concerns="",
        workaround="",
        removable="",
        runner=runner,
        reads=reads,
        modules=modules,
        diagnose=diagnose,
        patches=patches,
        observers=lambda shape: (),
        events=(),
        fallback=fallback,
    )


RUNNERS = (
    _record(
        "V1",
        runner_v1.diagnose,
        runner_v1.patches,
        (runner_v1.GRAPHS, runner_v1.CONTEXT, runner_v1.RUNNER),
        (runner_v1.GRAPHS_MODULE,),
        runner_v1.FALLBACK,
    ),
    _record(
        "V2",
        runner_v2.diagnose,
        runner_v2.patches,
        (runner_v2.GRAPHS, runner_v2.CONTEXT, runner_v2.RUNNER),
        (runner_v2.GRAPHS_MODULE,),
        runner_v2.FALLBACK,
    ),
)
