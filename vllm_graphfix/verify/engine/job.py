"""What one engine is asked to do, and what it says: the two sides of a process, as JSON in a file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_graphfix.verify.codec import from_builtins, to_builtins
from vllm_graphfix.verify.comparison import Answer

GRAPHS = "graphs"
"""The mode in which graphs are as the arguments say."""
COMPILED = "no graphs"
"""The same without graphs: what torch.compile does is still done."""
EAGER = "eager"
"""`enforce_eager`: neither."""


@dataclass(frozen=True)
class Job:
    """One engine, started, asked and ended in a process of its own."""

    name: str
    """The name of the run; its log and its result are named so."""
    mode: str
    """`GRAPHS`, `COMPILED` or `EAGER`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keywords of `vllm.LLM`."""
    where_known: dict[str, Any] = field(default_factory=dict)
    """More of them, each left out where vLLM does not know it."""
    flags: tuple[str, ...] = ()
    """Or flags of vLLM's own command line."""
    folder: str = ""
    """Where relative paths in the flags begin."""
    environment: dict[str, str | None] = field(default_factory=dict)
    """On top of what the process inherits; what is None is not inherited."""
    prompts: tuple[tuple[int, ...] | str, ...] = ()
    """Token ids or text; none: as many as `generated` are made, the same for the same model."""
    generated: int = 0
    max_tokens: tuple[int, ...] = ()
    """The number of tokens of each prompt's answer."""
    adapters: tuple[str | None, ...] = ()
    """The folder of each prompt's LoRA adapter, None where it has none; or nothing at all."""
    prompt_logprobs: bool = False
    """Score the prompts too: an answer then begins with the prompt's second token."""
    sampled: bool = False
    """Answers and drafts are drawn at temperature 1, with a seed for each prompt, and not the likeliest tokens."""
    again: int = 0
    """Ask so many times more, every other time in the reverse order: what differs in the second pass is the engine's
    own noise."""
    probes: tuple[str, ...] = ()
    """What to look at inside the engine; names that `probes.probe_of` takes. The engine must be in one process."""
    poison: bool = False
    """Ask once more with poison in what must not matter, and where that shows, with each kind of it alone."""
    poison_last: bool = False
    """Ask twice more when all else is said, the second time with all kinds of poison: whether it shows, and no more.
    Whatever that ends in, what was said before is kept."""
    untuned: bool = False
    """A kernel that Triton would tune takes its first variant, and no other is compiled."""
    seconds: float | None = None
    """Seconds from the last thing that its probes saw to its end, where a hang is what is expected: compiling kernels
    before does not count."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(to_builtins(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        return from_builtins(json.loads(path.read_text()), cls)


@dataclass(frozen=True)
class Poisoned:
    """Answers of an engine with poison in what must not matter."""

    kinds: tuple[str, ...]
    buffers: tuple[str, ...] | None
    """The persistent inputs that were poisoned, or all of them."""
    finite: bool
    """Blocks held large numbers and no NaN, which a kernel that masks by multiplying with 0 cannot stand."""
    prompts: tuple[int, ...]
    """The prompts whose answers are not, to the last bit, those without poison; from 0."""
    worst: float
    """The largest difference of log-probabilities, infinite where a token is another one or a number is NaN."""
    ranks: tuple[dict[str, Any], ...]
    """What each rank has found (`poison.engine.PoisonedRunner.remove`)."""

    @property
    def findings(self) -> list[tuple[int, int, str, bool]]:
        """Rank, step, what was found, and whether somebody wrote there."""
        return [(rank, *finding) for rank, found in enumerate(self.ranks) for finding in found["findings"]]

    @property
    def padded(self) -> list[int]:
        """The first step of each rank in which padded rows of the model's output were NaN."""
        return [found["padded"] for found in self.ranks if found.get("padded")]

    @property
    def shows(self) -> bool:
        return bool(self.prompts or self.findings)

    @property
    def written(self) -> bool:
        """Whether somebody wrote where nobody may."""
        return any(written for *_, written in self.findings)


@dataclass(frozen=True)
class Said:
    """What an engine said."""

    passes: tuple[tuple[Answer, ...], ...]
    """The answers to all prompts, of each pass in the order of the prompts."""
    states: dict[str, dict[str, str]]
    """State of each fix, by rank."""
    observed: dict[str, list[float]]
    """What the probes saw, by name."""
    drafts: tuple[int, int] | None
    """Tokens of drafts that were accepted, and proposed; None without speculative decoding."""
    facts: dict[str, str]
    """What it ran on: vllm, torch, python, device."""
    start_seconds: float
    """From the first import of vLLM to an engine that answers."""
    import_seconds: float = 0.0
    """The part of these until vLLM was imported: next to none in a process that was forked."""
    answer_seconds: float = 0.0
    """From an engine that answers to all answers."""
    cpu_seconds: float = 0.0
    """Processor time of this process, and of those that it started and that have ended."""
    poisoned: tuple[Poisoned, ...] = ()
    """What was asked with poison, all kinds of it first."""
    poison_error: str | None = None
    """What the engine ended in when all else was said, with `Job.poison_last`; empty while it goes on."""
    cudagraph_mode: str | None = None
    """vLLM's, as its workers have it in the end; None for an engine that was given no flags."""
