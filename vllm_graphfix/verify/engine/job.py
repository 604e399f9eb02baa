"""Job of one engine, and its result: the two sides of a process, which exchange them as JSON files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_graphfix.verify.codec import from_builtins, to_builtins
from vllm_graphfix.verify.comparison import Answer
from vllm_graphfix.verify.engine.exact import ExactRank

GRAPHS = "graphs"
"""Mode: CUDA graphs as the arguments say."""
COMPILED = "no graphs"
"""Mode: no CUDA graphs, but torch.compile as in `GRAPHS`."""
EAGER = "eager"
"""Mode: `enforce_eager`, neither graphs nor torch.compile."""


@dataclass(frozen=True)
class Job:
    """One engine, started, asked and ended in a process of its own."""

    name: str
    """Name of the run, its log and its result."""
    mode: str
    """`GRAPHS`, `COMPILED` or `EAGER`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keywords of `vllm.LLM`."""
    supported_arguments: dict[str, Any] = field(default_factory=dict)
    """More keywords; each is dropped if this vLLM does not know it."""
    flags: tuple[str, ...] = ()
    """Flags of vLLM's command line, in place of *arguments*."""
    folder: str = ""
    """Working directory for relative paths in *flags*."""
    environment: dict[str, str | None] = field(default_factory=dict)
    """Variables on top of the inherited ones; None unsets a variable."""
    prompts: tuple[tuple[int, ...] | str, ...] = ()
    """Token ids or text. If empty, *generated* prompts are made, the same ones for the same model."""
    generated: int = 0
    max_tokens: tuple[int, ...] = ()
    """Tokens of each prompt's answer."""
    adapters: tuple[str | None, ...] = ()
    """Folder of each prompt's LoRA adapter, None for a prompt without one; empty if no prompt has one."""
    prompt_logprobs: bool = False
    """Score the prompts too: an answer then begins with the prompt's second token."""
    sampled: bool = False
    """Sample answers and drafts at temperature 1, with a seed per prompt, instead of greedily."""
    extra_passes: int = 0
    """Ask all prompts so many times more, every other time in reverse order, to measure the engine's own noise."""
    probes: tuple[str, ...] = ()
    """Probes in the engine, by names that `probes.probe_of` takes. The engine must run in this process."""
    poison: bool = False
    """Ask once more with all kinds of poison; if poison shows, also with each kind alone."""
    poison_last: bool = False
    """Ask twice more at the end, the second time with all kinds of poison, to learn only whether it shows. A crash
    there loses nothing of the result."""
    exact: bool = False
    """Compare each replay with the same step without its graph."""
    batch_sizes: tuple[int, ...] = ()
    """Numbers of requests to which each batch of decodes is filled with further requests, as graphs pad it."""
    continued: tuple[tuple[int, ...], ...] = ()
    """Tokens behind each prompt to be scored; nothing is answered. Each pass has the prompts in another order."""
    untuned: bool = False
    """Let Triton's autotuner take the first variant that runs, and compile no other."""
    seconds: float | None = None
    """Time limit from the last observation of a probe to the end, for a case whose defect is a hang. Kernels that are
    compiled before do not count."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(to_builtins(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        return from_builtins(json.loads(path.read_text()), cls)


@dataclass(frozen=True)
class PoisonPass:
    """All prompts, asked once with poison, compared with the answers without it."""

    kinds: tuple[str, ...]
    buffers: tuple[str, ...] | None
    """Names of the poisoned persistent inputs; None for all of them."""
    finite: bool
    """True if blocks held large numbers instead of NaN: a kernel may mask by multiplying with 0."""
    prompts: tuple[int, ...]
    """Prompts, from 0, whose answers are not bitwise equal to those without poison."""
    worst: float
    """Largest difference of log-probabilities; infinite if a token differs or a number is NaN."""
    ranks: tuple[dict[str, Any], ...]
    """Results of `poison.engine.PoisonedRunner.remove`, by rank."""

    @property
    def findings(self) -> list[tuple[int, int, str, bool]]:
        """Rank, step, description, and True if poison was overwritten."""
        return [(rank, *finding) for rank, result in enumerate(self.ranks) for finding in result["findings"]]

    @property
    def padded(self) -> list[int]:
        """First step in which padded rows of the model's output were NaN, of each rank that had one."""
        return [result["padded"] for result in self.ranks if result.get("padded")]

    @property
    def shows(self) -> bool:
        return bool(self.prompts or self.findings)

    @property
    def written(self) -> bool:
        """True if a kernel wrote to memory that belongs to no request."""
        return any(written for *_, written in self.findings)


@dataclass(frozen=True)
class EngineResult:
    """Answers of one engine, its states and its times."""

    passes: tuple[tuple[Answer, ...], ...]
    """Answers to all prompts, by pass, each in the order of the prompts."""
    states: dict[str, dict[str, str]]
    """State of each fix, by rank."""
    observed: dict[str, list[float]]
    """Observations, by probe."""
    drafts: tuple[int, int] | None
    """Draft tokens that were accepted and proposed; None without speculative decoding."""
    facts: dict[str, str]
    """Versions of vllm, torch and Python, the device, the driver, the plugin's settings."""
    start_seconds: float
    """Seconds from the first import of vLLM to an engine that is ready."""
    import_seconds: float = 0.0
    """Seconds of these for importing vLLM; next to none in a forked process."""
    answer_seconds: float = 0.0
    """Seconds from an engine that is ready to the last answer."""
    cpu_seconds: float = 0.0
    """Processor time of this process and of its children that have ended."""
    poisoned: tuple[PoisonPass, ...] = ()
    """Passes with poison; the first one has all kinds."""
    poison_error: str | None = None
    """Error that ended the engine during `Job.poison_last`; empty while that runs."""
    exact: tuple[ExactRank, ...] = ()
    """Comparison of each replay, by rank, with `Job.exact`."""
    batch_sizes: tuple[int, ...] = ()
    """Numbers of requests for which decodes have a full graph or pieces, ascending."""
    cudagraph_mode: str | None = None
    """vLLM's mode of CUDA graphs, as the workers have it in the end."""
