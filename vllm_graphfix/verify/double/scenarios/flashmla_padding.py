"""flashmla-padding (issue 33664): the dense fp8 kernel gets padded rows of length 0 with block ids -1."""

from __future__ import annotations

from itertools import chain

from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios.flashmla_fp8 import DenseFP8Decode
from vllm_graphfix.verify.measurement import Measurement


def run(*, trigger: bool = True) -> Measurement:
    """Decode two requests in a graph for four; the eager reference has no padding.

    Without *trigger*, the graph is for two, and requests have the lengths of its capture, whose plan fits them.
    """
    install_flashmla_stand_ins()
    steps = [[63 + step, 200 + step] for step in range(3)] if trigger else [[1, 1]] * 3
    eager = DenseFP8Decode()
    expected = [eager.step(lengths) for lengths in steps]
    replayed: list[list[float]] = []
    error = None
    with cpu_cuda_graphs():
        graphed = DenseFP8Decode(captured_requests=4 if trigger else 2)
        try:
            replayed = [graphed.step(lengths) for lengths in steps]
        except RuntimeError as e:
            error = str(e).splitlines()[0]
    return Measurement(
        numbers="attention output of 2 requests padded to 4 over 3 decode steps (every 64th of 512 values a head)",
        eager=tuple(chain.from_iterable(expected)),
        graphed=tuple(chain.from_iterable(replayed)),
        error=error,
        counted={"padded-rows-given": len(steps)},
    )
