"""All facts about a deployment in one class, and its reader."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_graphfix.deployment.answers import Fact
from vllm_graphfix.deployment.attention import Attention
from vllm_graphfix.deployment.graphs import Graphs
from vllm_graphfix.deployment.hardware import first_bytes
from vllm_graphfix.deployment.runner import Runner, default_runner
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
    """Facts about an engine before it starts, from its command line, environment, vLLM and GPU.

    Each fact is a method and comes with its reason.
    """

    @property
    def default_runner(self) -> str:
        """The model runner of its vLLM where nobody chooses one; empty if that is not known."""
        return default_runner(self._source)

    def data_parallel(self) -> Fact:
        """There are several data-parallel ranks."""
        number, missing = self._number("--data-parallel-size")
        if missing is not None:
            return Fact(None, missing)
        if number is not None and number > 1:
            return Fact(True, f"--data-parallel-size {number}")
        if number is None and self._has("--data-parallel-rank"):
            return Fact(None, "--data-parallel-size")
        return Fact(False, "there is only one data-parallel rank (--data-parallel-size)")

    def decides_separately(self) -> str | None:
        """Return the flag that makes the nodes of one engine start, and decide about fixes, independently.

        None if the line has no such flag.
        """
        nodes, _ = self._number("--nnodes")
        if nodes is not None and nodes > 1:
            return f"--nnodes {nodes}"
        if self.value("--distributed-executor-backend")[0] == "external_launcher":
            return "an external launcher, such as torchrun,"
        for flag in _SEPARATE:
            if self._has(flag):
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
    flags: Collection[str] = (),
    read: Callable[[Path, int], bytes | None] = first_bytes,
) -> Deployment:
    """Read the arguments of a `vllm serve`. *flags* are those that fixes read besides (`fixes.flags`).

    *read* returns the first bytes of a file. Raises FlagsError for a line that vLLM would refuse, or for a model's
    folder that does not exist.
    """
    deployment = Deployment(line, environment, source, gpu, flags, read)
    deployment.configured("architectures")  # reads config.json, wherever a fact would need it later
    return deployment
