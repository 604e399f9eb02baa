"""A deployment, with all that is known of it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from vllm_graphfix.deployment.answers import Fact
from vllm_graphfix.deployment.attention import Attention
from vllm_graphfix.deployment.graphs import Graphs
from vllm_graphfix.deployment.runner import Runner
from vllm_graphfix.deployment.speculation import Speculation

if TYPE_CHECKING:
    from vllm_graphfix.source.files import Source

_SEPARATE = (
    "--headless",
    "--data-parallel-rank",
    "--data-parallel-start-rank",
    "--data-parallel-external-lb",
    "--data-parallel-hybrid-lb",
    "--data-parallel-multi-port-external-lb",
)


class Deployment(Graphs, Runner, Attention, Speculation):
    """What is known of an engine before it runs.

    It follows from its command line, its environment, the vLLM that it runs and the GPU that it runs on.

    The facts are methods, each with its reason. *environment* is that of this process, under the assignments in front
    of the line.
    """

    def data_parallel(self) -> Fact:
        """There are several data-parallel ranks."""
        number, missing = self._number("--data-parallel-size")
        if missing is not None:
            return Fact(None, missing)
        if number is not None and number > 1:
            return Fact(True, f"--data-parallel-size {number}")
        if number is None and self._given("--data-parallel-rank"):
            return Fact(None, "--data-parallel-size")
        return Fact(False, "there is only one data-parallel rank (--data-parallel-size)")

    def decides_separately(self) -> str | None:
        """The flag with which the nodes of one engine start, and decide, on their own.

        None if no such flag is known to be there.
        """
        nodes, _ = self._number("--nnodes")
        if nodes is not None and nodes > 1:
            return f"--nnodes {nodes}"
        if self.value("--distributed-executor-backend")[0] == "external_launcher":
            return "an external launcher, such as torchrun,"
        for flag in _SEPARATE:
            if self._given(flag):
                return flag
        ranks, here = self._number("--data-parallel-size")[0] or 1, self._number("--data-parallel-size-local")[0]
        if here is not None and here < ranks and self.value("--data-parallel-backend")[0] != "ray":
            return f"{here} of {ranks} data-parallel ranks on this node"
        return None


def read_deployment(
    line: str,
    source: Source,
    gpu: str | None = None,
    environment: Mapping[str, str] = os.environ,
    asked: Collection[str] = (),
) -> Deployment:
    """What the line of a `vllm serve` says; *asked* are flags that fixes ask for (`fixes.flags`). Raises FlagsError."""
    return Deployment(line, environment, source, gpu, asked)
