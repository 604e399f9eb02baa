"""Starts the `vllm.LLM` of a job, with its keywords or with flags of vLLM's command line."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from vllm_graphfix.verify.engine.job import COMPILED, EAGER, Job
from vllm_graphfix.verify.engine.questions import BEST

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

EXTENSION = "vllm_graphfix.verify.engine.extension.GraphfixStates"


class FlagError(Exception):
    """vLLM does not know a flag, or rejects its value; the message is vLLM's."""


def start_engine(job: Job) -> LLM:
    from vllm import LLM

    if job.flags:
        os.chdir(job.folder or ".")
        return LLM(**vars(engine_arguments(job)))  # as LLM.from_engine_args does, which 0.18 and older lack
    arguments = dict(job.arguments)
    if job.supported_arguments:
        from vllm.engine.arg_utils import EngineArgs

        arguments |= {
            name: value for name, value in job.supported_arguments.items() if name in EngineArgs.__dataclass_fields__
        }
    if job.sampled and "speculative_config" in arguments:
        arguments["speculative_config"] = arguments["speculative_config"] | _drawn_drafts()
    if job.mode == EAGER:
        arguments.pop("compilation_config", None)
        arguments["enforce_eager"] = True
    return LLM(**arguments)


def inspect_models_in_process() -> None:
    """Let vLLM inspect the model's class in this process.

    By default it starts another one for that, with all imports, so as not to touch the GPU. This process loads the
    class and touches the GPU anyway.
    """
    with suppress(ImportError):
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda function: function()


def take_first_variant() -> None:
    """Let Triton's autotuner take the first variant that runs, and compile no other.

    All engines of a case then run the same variant, whatever else the GPU does.
    """
    try:
        from triton.runtime.autotuner import Autotuner

        pruned, measured = Autotuner.prune_configs, Autotuner._bench
    except (ImportError, AttributeError):
        return
    runs: set[Any] = set()

    def prune(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        runs.discard(tuner)
        return pruned(tuner, *args, **kwargs)

    def bench(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        if tuner in runs:
            return [math.inf] * 3
        seconds = measured(tuner, *args, **kwargs)
        if math.isfinite(seconds[0] if isinstance(seconds, Sequence) else seconds):
            runs.add(tuner)
        return seconds

    Autotuner.prune_configs, Autotuner._bench = prune, bench


def _drawn_drafts() -> dict[str, str]:
    """Return the speculative option that samples drafts from the draft model, by its name in this vLLM.

    vLLM 0.21 and 0.22 renamed it.
    """
    from vllm.config import speculative

    methods = get_args(getattr(speculative, "DraftSampleMethod", None))
    drawn = next((method for method in methods if method != "greedy"), None)
    return {"draft_sample_method": drawn} if drawn else {"rejection_sample_method": "probabilistic"}


def engine_arguments(job: Job) -> EngineArgs:
    """Parse the flags of *job* and set what the job needs beyond them. Raises FlagError."""
    from vllm.config import CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs.from_cli_args(parsed_flags(job.flags))
    if job.mode == EAGER:
        arguments.enforce_eager = True
    elif job.mode == COMPILED:
        arguments.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    arguments.worker_extension_cls = arguments.worker_extension_cls or EXTENSION  # the user's own comes first
    # Log-probabilities and statistics that the comparison needs; tokens do not depend on them.
    if 0 <= arguments.max_logprobs < BEST:
        arguments.max_logprobs = BEST
    arguments.logprobs_mode = "raw_logprobs"
    arguments.disable_log_stats = False
    return arguments


def parsed_flags(flags: tuple[str, ...]) -> Any:
    """Parse *flags* as `vllm serve` does, so that its command line can be used as it is. Raises FlagError.

    `EngineArgs.from_cli_args` drops the flags that only the server knows.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is a peer
        def error(self, message: str) -> NoReturn:  # argparse would print the usage of 200 flags and exit
            raise FlagError(message)

    parser, add = Parser(prog="vllm-graphfix compare", add_help=False), AsyncEngineArgs.add_cli_args
    for place in ("openai", "launchers", "common"):  # up to 0.28, up to 0.32, since
        with suppress(ImportError, AttributeError):
            add = importlib.import_module(f"vllm.entrypoints.{place}.cli_args").make_arg_parser
            break
    parsed = add(parser).parse_args([*flags])
    if getattr(parsed, "model_tag", None) is not None:  # the positional argument of `vllm serve`
        raise FlagError(f"unrecognized arguments: {parsed.model_tag}")
    return parsed
