"""Case: a tiny model, an engine, a workload and the place where a defect shows, and the engine jobs that it makes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_graphfix.fix import variable
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.source.files import Source
from vllm_graphfix.verify.engine.job import EAGER, GRAPHS, Job
from vllm_graphfix.verify.engine.llm import EXTENSION
from vllm_graphfix.verify.engine.models import VOCABULARY
from vllm_graphfix.verify.engine.probe_verdict import Judge
from vllm_graphfix.verify.engine.questions import SEED

_ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 30,  # keeps vLLM's memory profiling out of a GPU that several engines share
    "gpu_memory_utilization": 0.05,  # with the above, only a minimum that must be free at the start
    "enable_prefix_caching": False,
    "disable_log_stats": False,  # counts drafts
    "worker_extension_cls": EXTENSION,
    "seed": 0,
}
# Nothing here uses the kernels that autotuning would tune, in a batch of 8192 tokens.
_SUPPORTED_ARGUMENTS = {"enable_flashinfer_autotune": False}
GIB_PER_ENGINE = 5
"""GPU memory of one engine: KV cache, CUDA context, FlashInfer's workspace, graphs."""

CASE_ENVIRONMENT: dict[str, str | None] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, so that probes see the engine
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Since 0.21.0 an engine would compile FlashInfer's top-k and top-p for two minutes at its start; nothing here uses
    # them.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "OMP_NUM_THREADS": "2",  # engines share the machine
    "MAX_JOBS": "2",  # compilers of each engine, for FlashInfer's sources say, instead of one for each core
    "TQDM_DISABLE": "1",
}


_PATIENCE = {"stock": 1.0, "patched": 2.5}
"""Factors of the time limit for a hang: a slow engine with the fixes must not pass for one that hangs."""
NOTHING_COMPILED: dict[str, str | None] = {"TORCHDYNAMO_DISABLE": "1"}
"""Turns torch.compile off for functions beside the model, such as the ranks of log-probabilities: compiling them takes
longer than all answers of an engine."""

MODES = ("eager", "stock", "patched")
WATCHED = {"watched stock": "stock", "watched patched": "patched"}
"""Runs in which the shadow check looks at every replay, with the mode that they otherwise have."""


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: its fields are dictionaries
class Case:
    """A tiny model on an engine that runs eager, with graphs, and with graphs and the fixes."""

    name: str
    model: str
    runner: str
    """``V1`` or ``V2``."""
    graphs: dict[str, Any]
    """vLLM's `compilation_config`."""
    workload: tuple[tuple[int, int], ...]
    """Tokens of each prompt and of its answer."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further keywords of `vllm.LLM`."""
    supported_arguments: dict[str, Any] = field(default_factory=dict)
    """Further keywords, each for releases that know it."""
    conditional_arguments: tuple[str, str, dict[str, Any]] | None = None
    """File of vLLM, a word, and keywords that override *arguments* if the file contains the word."""
    draft: str | None = None
    adapters: tuple[str | None, ...] = ()
    """LoRA adapter of each prompt, a name of `adapters.NAMES` or None; empty if no prompt has one."""
    probes: tuple[str, ...] = ()
    """Probes in the engine: names of `probes.PROBES`, or ``module:class`` of others."""
    prompt_logprobs: bool = False
    """Score the prompts too; their tokens count as those of answers."""
    sampled: bool = False
    """Sample answers and drafts, with seeds, instead of greedily."""
    environment: dict[str, str | None] = field(default_factory=dict)
    """Further variables."""
    capability: int | None = None
    """Major compute capability that the kernels need."""

    needs: str | None = None
    """Package of its kernels that vLLM does not require, or file of vLLM's, as a path, that an archive may lack."""
    shows_with: tuple[str, str, str] | None = None
    """File of vLLM, a word without which this case is right on stock too, and what is wrong there instead."""
    shows_on: Callable[[Source], bool] | None = None
    """Predicate of releases on which this further case of a fix runs and fails; others skip it silently."""
    seconds: float | None = None
    """Time limit from a probe's last observation to the end of the stock engine, for a defect that is a hang."""
    judge: Judge | None = None
    """Verdict on the observations of the probes, for a defect that shows in something else than tokens."""
    padded: bool = False
    """True if some batches are padded to the size of a graph: the defect is about padding."""
    watched: bool = False
    """True if the defect shows in the outputs of a replay: the shadow check must then see it in a fourth engine, and
    nothing in a fifth one with the fixes."""
    poisoned: bool = False
    """True if poison must show the defect: stock and patched are asked again with it at the end."""
    poison_in_padding: bool = False
    """True if poison shows as NaN in padded rows of the model's output, which reach no other row."""
    compiles: bool = False
    """True if its kernels (FlashInfer, DeepGEMM, Triton) take minutes to compile: its engines start first."""

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the tiny models and adapters that it needs."""
        return tuple(filter(None, dict.fromkeys((self.model, self.draft, *self.adapters))))

    def on(self, source: Source) -> Case:
        """Return the case with the keywords for the vLLM of *source*."""
        if self.conditional_arguments is None or not source.contains_word(*self.conditional_arguments[:2]):
            return self
        return replace(self, arguments=self.arguments | self.conditional_arguments[2], conditional_arguments=None)

    def jobs(self, models: Path) -> list[Job]:
        """Return the jobs of all `MODES`; eager asks twice in one process, to measure its own noise.

        *models* holds the models' folders.
        """
        chance = random.Random(SEED)  # noqa: S311 - the same prompts in every run
        prompts = tuple(tuple(chance.choices(range(1, VOCABULARY), k=length)) for length, _ in self.workload)
        arguments = _ENGINE | {"model": str(models / self.model)} | self.arguments
        if self.draft is not None:
            arguments["speculative_config"] = {**arguments["speculative_config"], "model": str(models / self.draft)}
        return [
            Job(
                name=f"{self.name} {mode}",
                mode=EAGER if mode == "eager" else GRAPHS,
                arguments=arguments | {"compilation_config": self.graphs},
                supported_arguments=_SUPPORTED_ARGUMENTS | self.supported_arguments,
                environment=CASE_ENVIRONMENT
                | (NOTHING_COMPILED if self.graphs.get("mode") == 0 else {})
                | self.environment
                # The user's settings must not decide about fixes in a proof.
                | dict.fromkeys((*settings.names(BY_NAME), *filter(settings.is_ours, os.environ)))
                | dict.fromkeys(map(variable, BY_NAME), "auto")  # also fixes whose default is to observe
                | {settings.PREFIX: "on" if mode == "patched" else "off"}
                | {"VLLM_USE_V2_MODEL_RUNNER": "1" if self.runner == "V2" else "0"},
                prompts=prompts,
                max_tokens=tuple(count for _, count in self.workload),
                adapters=tuple(name and str(models / name) for name in self.adapters),
                prompt_logprobs=self.prompt_logprobs,
                sampled=self.sampled,
                extra_passes=int(mode == "eager"),
                probes=self.probes,
                poison_last=self.poisoned and mode != "eager",
                untuned=True,
                # Not eager: without graphs, kernels are compiled after a probe's first observation.
                seconds=self.seconds * _PATIENCE[mode] if self.seconds and mode in _PATIENCE else None,
            )
            for mode in MODES
        ]

    def watched_jobs(self, models: Path) -> list[Job]:
        """Return the jobs of stock and patched with every replay checked.

        Stock has the plugin too, with every fix off.
        """
        jobs = dict(zip(MODES, self.jobs(models), strict=True))
        checked: dict[str, str | None] = {settings.PREFIX: "on", settings.SHADOW: "1/1"}
        off: dict[str, str | None] = dict.fromkeys(map(variable, BY_NAME), "off")
        return [
            replace(
                jobs[mode],
                name=f"{self.name} {name}",
                probes=(),
                poison_last=False,
                environment=jobs[mode].environment | checked | (off if mode == "stock" else {}),
            )
            for name, mode in WATCHED.items()
        ]
