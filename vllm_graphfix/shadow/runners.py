"""The parts of vLLM that the shadow check wraps.

They are records that `FixManager` applies like fixes: diagnosed, all of their targets or none, read back.
"""

# No `from __future__ import annotations`: as in `fix.py`, for the named tuple.

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm_graphfix.fix import Companion, Diagnosis, Event, Patch
from vllm_graphfix.settings.environment import SHADOW
from vllm_graphfix.shadow import drafter_shapes, drafter_v2, encoder, pieces, runner_v1, runner_v2
from vllm_graphfix.shadow.lockstep import AGREEMENT_MODULE
from vllm_graphfix.shadow.process import DRAFTER, ENCODER, PIECES

if TYPE_CHECKING:
    from vllm_graphfix.source.files import Source


class Graphs(NamedTuple):
    """Graphs of a model runner, with the fields of a fix that `FixManager` uses."""

    name: str
    runner: str
    diagnose: Callable[["Source"], Diagnosis]
    patches: Callable[[str], Sequence[Patch]]
    inspected_files: tuple[str, ...]
    modules: tuple[str, ...]
    variable: str = SHADOW
    requires: tuple[Companion, ...] = ()
    events: tuple[Event, ...] = ()
    """Empty: the check counts in its `Results`."""


RUNNERS = (
    Graphs(
        "shadow-v1",
        "V1",
        runner_v1.diagnose,
        runner_v1.patches,
        (runner_v1.GRAPHS, runner_v1.BREAKABLE, runner_v1.CONTEXT, runner_v1.RUNNER),
        (runner_v1.GRAPHS_MODULE, runner_v1.BREAKABLE_MODULE),
    ),
    Graphs(
        "shadow-v2",
        "V2",
        runner_v2.diagnose,
        runner_v2.patches,
        (runner_v2.GRAPHS, runner_v2.CONTEXT, runner_v2.RUNNER, runner_v2.DISPATCH),
        (runner_v2.GRAPHS_MODULE, AGREEMENT_MODULE),
    ),
    Graphs(
        f"shadow-v2{DRAFTER}",
        "V2",
        drafter_shapes.diagnose,
        drafter_v2.patches,
        drafter_shapes.READS,
        drafter_shapes.MODULES,
    ),
    Graphs(
        f"shadow-v2-dflash{DRAFTER}",
        "V2",
        drafter_shapes.diagnose_parallel,
        drafter_v2.patches_parallel,
        drafter_shapes.PARALLEL_READS,
        (drafter_shapes.PARALLEL.module,),
    ),
    Graphs(
        f"shadow-v1{PIECES}",
        "V1",
        pieces.diagnose_v1,
        pieces.patches_v1,
        (runner_v1.GRAPHS, runner_v1.BREAKABLE, runner_v1.CONTEXT, runner_v1.RUNNER),
        (pieces.V1_MODULE,),
    ),
    Graphs(
        f"shadow-v2{PIECES}",
        "V2",
        pieces.diagnose_v2,
        pieces.patches_v2,
        (runner_v2.GRAPHS, runner_v2.CONTEXT, runner_v2.RUNNER, runner_v2.DISPATCH),
        (runner_v2.GRAPHS_MODULE,),
    ),
    Graphs(
        f"shadow{ENCODER}",
        "V1 and V2",
        encoder.diagnose,
        encoder.patches,
        (encoder.GRAPHS,),
        (encoder.GRAPHS.removesuffix(".py").replace("/", "."),),
    ),
)
