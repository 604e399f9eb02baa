"""Where the shadow check wraps vLLM, as records that `Process` applies like fixes: diagnosed, all of their targets or none, read back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_graphfix.fix import Diagnosis, Fallback, Fix, Patch
from vllm_graphfix.shadow import drafter_v2, runner_v1, runner_v2
from vllm_graphfix.shadow.process import DRAFTER
from vllm_graphfix.source import Source


def _record(
    number: int,
    runner: str,
    model: str,
    diagnose: Callable[[Source], Diagnosis],
    patches: Callable[[str], Sequence[Patch]],
    reads: tuple[str, ...],
    modules: tuple[str, ...],
    fallback: Fallback,
) -> Fix:
    """What a fix tells people is empty here: docs/shadow.md tells it."""
    return Fix(
        number=number,
        name=f"shadow-{runner.lower()}" + (DRAFTER if model == "drafter" else ""),
        pr=None,
        references=(),
        summary=f"now and then a replay of model runner {runner}, {model}, is compared with the same step run without its graph",
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
        1,
        "V1",
        "target model",
        runner_v1.diagnose,
        runner_v1.patches,
        (runner_v1.GRAPHS, runner_v1.CONTEXT, runner_v1.RUNNER),
        (runner_v1.GRAPHS_MODULE,),
        runner_v1.FALLBACK,
    ),
    _record(
        2,
        "V2",
        "target model",
        runner_v2.diagnose,
        runner_v2.patches,
        (runner_v2.GRAPHS, runner_v2.CONTEXT, runner_v2.RUNNER),
        (runner_v2.GRAPHS_MODULE,),
        runner_v2.FALLBACK,
    ),
    _record(
        3,
        "V2",
        "drafter",
        drafter_v2.diagnose,
        drafter_v2.patches,
        drafter_v2.READS,
        drafter_v2.MODULES,
        drafter_v2.FALLBACK,
    ),
)
