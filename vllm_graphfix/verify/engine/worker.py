"""One engine in one process.

    python -m vllm_graphfix.verify.engine.worker JOB RESULT [PIPE]

JOB is a file that `Job.write` wrote. RESULT is a JSON file: the fields of the engine's result, or, until the engine has
finished and if it fails, ``{"observed": …, "error": …}``. PIPE is the descriptor of a pipe: when its other end is
closed, this process and all that it started are killed. vLLM logs to this process's own output.

The environment decides whether the fixes are on, as in production.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import platform
import random
import re
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from vllm_graphfix.settings.environment import DECISION, PREFIX, STATUS_DIR
from vllm_graphfix.verify.codec import to_builtins
from vllm_graphfix.verify.comparison import Answer
from vllm_graphfix.verify.engine.job import COMPILED, EAGER, Job, Poisoned, Said
from vllm_graphfix.verify.engine.poisoned import Asked, ask_last_with_poison, ask_with_poison

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

BEST = 5
"""Log-probabilities asked for at each position."""
SEED = 7
EXTENSION = "vllm_graphfix.verify.engine.extension.GraphfixStates"


class FlagError(Exception):
    """vLLM does not know a flag, or not this value of it; the message is vLLM's."""


def main(job: Job, result: Path) -> int:
    observed: dict[str, list[float]] = {}
    try:
        said = to_builtins(_run(job, observed, result))
    except BaseException as error:  # an engine may end in SystemExit
        traceback.print_exc()
        _write(result, {"observed": observed, "error": _told(error)})
        return 1
    _write(result, said)
    return 0


def end_with_the_other_end_of(pipe: int) -> None:
    """However that ended: an engine that nobody reads must not keep the GPU's memory.

    A process that watches, since this one may hang in CUDA, and since a signal at the death of its parent would reach
    it alone, and not the processes that an engine has.
    """
    if os.fork():
        os.close(pipe)
        return
    os.read(pipe, 1)  # nobody writes
    os.killpg(0, signal.SIGKILL)


def _write(result: Path, written: dict[str, Any]) -> None:
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(written))
    partial.replace(result)  # whoever reads it reads all of it


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and re.match(
        r"\d+ validation errors? for ", lines[0]
    ):  # pydantic: which it is comes after how many
        return " ".join(lines[1:]).partition(" [type=")[0]
    return lines[0] if lines else ""


def _run(job: Job, observed: dict[str, list[float]], result: Path) -> Said:
    from vllm_graphfix.verify.engine.probes import probe_of

    started = time.monotonic()
    # First vLLM, then the plugin, as vLLM does: in a process that was forked, vLLM has been imported before.
    from vllm import LLM  # noqa: F401

    imported = time.monotonic()
    import vllm_graphfix

    vllm_graphfix.register()  # where it lies on the path only, there is no entry point to find it by
    if not job.flags:
        _inspect_models_in_this_process()
    if job.untuned:
        _take_the_first_that_runs()
    looking = True

    def save() -> None:
        if looking:
            _write(result, {"observed": observed, "error": ""})

    probes = [probe_of(name)(observed, save) for name in job.probes]
    for probe in probes:
        probe.before_the_engine()
    llm = _engine(job)
    for probe in probes:
        probe.in_the_engine(llm)
    ready = time.monotonic()
    prompts = job.prompts or _made_up_prompts(job, llm)
    passes = [_ask(llm, prompts, job)]
    for number in range(job.again):
        # What is kept of the pass before would hide the noise of computing it again.
        llm.reset_prefix_cache()
        # With poison, what is asked again is the same: what differs then is no poison's doing.
        passes.append(_ask(llm, prompts, job, order=1 if number % 2 or job.poison else -1))
    poisoned: tuple[Poisoned, ...] = ()
    asked = Asked(llm, lambda: _ask(llm, prompts, job), passes, observed, partial(_write, result))
    if job.poison:
        poisoned = ask_with_poison(asked)
    for probe in probes:
        probe.after_the_answers()
    observed |= _events()
    said = Said(
        passes=tuple(passes),
        states=_states(llm, job),
        # A copy: what a probe sees in poisoned steps is no proof of anything.
        observed={name: list(numbers) for name, numbers in observed.items()},
        drafts=_drafts(llm),
        facts=_facts(),
        start_seconds=round(ready - started, 1),
        import_seconds=round(imported - started, 1),
        answer_seconds=round(time.monotonic() - ready, 1),
        cpu_seconds=round(sum(os.times()[:4]), 1),
        poisoned=poisoned,
        cudagraph_mode=_cudagraph_mode(llm),
    )
    if not job.poison_last:
        return said
    looking = False
    return _with_poison(said, asked, result)


def _with_poison(said: Said, asked: Asked, result: Path) -> Said:
    """The same, and what poison shows in the engine that said it; what that ends in loses nothing of *said*."""
    begun: dict[str, list[float]] = {}

    def write(told: dict[str, Any]) -> None:
        _write(result, to_builtins(replace(said, observed=said.observed | begun, poison_error=told["error"])))

    write({"error": ""})
    try:
        again, poisoned = ask_last_with_poison(replace(asked, observed=begun, write=write))
    except BaseException as error:  # as in `main`
        traceback.print_exc()
        return replace(said, observed=said.observed | begun, poison_error=_told(error))
    return replace(said, passes=(*said.passes, again), observed=said.observed | begun, poisoned=poisoned)


def _inspect_models_in_this_process() -> None:
    """Saves the process with all of its imports that vLLM starts to look at a model's class, lest it touch the GPU.

    This one is going to load the class anyway, and touches the GPU.
    """
    with suppress(ImportError):
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda function: function()


def _take_the_first_that_runs() -> None:
    """Triton's kernels that would be tuned take their first variant that runs, and compile no other.

    All engines of a case then have the same one, whatever else the GPU does meanwhile.
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


def _engine(job: Job) -> LLM:
    from vllm import LLM

    if job.flags:
        os.chdir(job.folder or ".")
        return LLM(**vars(_engine_arguments(job)))  # as LLM.from_engine_args does, which 0.18 and older lack
    arguments = dict(job.arguments)
    if job.where_known:
        from vllm.engine.arg_utils import EngineArgs

        arguments |= {name: value for name, value in job.where_known.items() if name in EngineArgs.__dataclass_fields__}
    if job.sampled and "speculative_config" in arguments:
        arguments["speculative_config"] = arguments["speculative_config"] | _drawn_drafts()
    if job.mode == EAGER:
        arguments.pop("compilation_config", None)
        arguments["enforce_eager"] = True
    return LLM(**arguments)


def _drawn_drafts() -> dict[str, str]:
    """Drafts that are drawn from the draft model's distribution, in the words of this vLLM.

    0.21 and 0.22 have changed these words.
    """
    from vllm.config import speculative

    methods = get_args(getattr(speculative, "DraftSampleMethod", None))
    drawn = next((method for method in methods if method != "greedy"), None)
    return {"draft_sample_method": drawn} if drawn else {"rejection_sample_method": "probabilistic"}


def _engine_arguments(job: Job) -> EngineArgs:
    """What vLLM makes of the flags, and what the job needs beyond them."""
    from vllm.config import CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs

    given = EngineArgs.from_cli_args(_parsed_flags(job.flags))
    if job.mode == EAGER:
        given.enforce_eager = True
    elif job.mode == COMPILED:
        given.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    given.worker_extension_cls = given.worker_extension_cls or EXTENSION  # the user's own is left where it is
    # What is asked for and counted; tokens do not depend on it.
    if 0 <= given.max_logprobs < BEST:
        given.max_logprobs = BEST
    given.logprobs_mode = "raw_logprobs"
    given.disable_log_stats = False
    return given


def _parsed_flags(flags: tuple[str, ...]) -> Any:
    """The *flags* as `vllm serve` parses them, so that its command line can be taken over.

    What the server alone knows is dropped later.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is a peer
        def error(self, message: str) -> NoReturn:  # argparse would print the usage of 200 flags
            raise FlagError(message)

    parser, add = Parser(prog="vllm-graphfix compare", add_help=False), AsyncEngineArgs.add_cli_args
    for place in ("openai", "launchers", "common"):  # up to 0.28, up to 0.32, since
        with suppress(ImportError, AttributeError):
            add = importlib.import_module(f"vllm.entrypoints.{place}.cli_args").make_arg_parser
            break
    parsed = add(parser).parse_args([*flags])
    if getattr(parsed, "model_tag", None) is not None:  # where `vllm serve` expects its model
        raise FlagError(f"unrecognized arguments: {parsed.model_tag}")
    return parsed


def _made_up_prompts(job: Job, llm: LLM) -> tuple[tuple[int, ...], ...]:
    """Random tokens, in lengths from a few to half of what the model takes beside the answers."""
    config = llm.llm_engine.model_config
    longest = max(16, min(1024, (config.max_model_len - max(job.max_tokens)) // 2))
    chance = random.Random(SEED)  # noqa: S311 - the same prompts in every process
    words = _word_tokens(llm, config.get_vocab_size())
    lengths = [max(4, longest * (number % 8 + 1) // 8 - number) for number in range(job.generated)]
    return tuple(tuple(chance.choices(words, k=min(length, config.max_model_len - 1))) for length in lengths)


def _word_tokens(llm: LLM, vocabulary: int) -> list[int]:
    """Token ids that stand for text.

    Placeholders of images and the like want an image, and ids beyond the tokenizer's are padding.
    """
    special: set[int] = set()
    try:
        tokenizer = llm.get_tokenizer()
        special.update(tokenizer.all_special_ids, getattr(tokenizer, "added_tokens_encoder", {}).values())
        vocabulary = min(vocabulary, len(tokenizer))
    except Exception:  # --skip-tokenizer-init; a tokenizer of its own kind
        special.update(range(10))  # which are rarely words
    return [token for token in range(vocabulary) if token not in special] or list(range(vocabulary))


def _ask(llm: LLM, prompts: tuple[Any, ...], job: Job, order: int = 1) -> tuple[Answer, ...]:
    """The answers to *prompts*, in their order; with an *order* of -1 the last one is asked first."""
    from vllm import SamplingParams

    asked = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "logprobs": BEST}
    if job.prompt_logprobs:
        asked["prompt_logprobs"] = BEST
    if job.sampled:
        asked["temperature"] = 1.0
    seeds = [zlib.crc32(repr(prompt).encode()) if job.sampled else None for prompt in prompts]
    sampling = [
        SamplingParams(max_tokens=count, seed=seed, **asked) for count, seed in zip(job.max_tokens, seeds, strict=True)
    ]
    given = [prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)} for prompt in prompts]
    adapters = {"lora_request": _lora_requests(job.adapters)[::order]} if job.adapters else {}
    outputs = llm.generate(given[::order], sampling[::order], use_tqdm=False, **adapters)
    return tuple(_answer(output) for output in outputs)[::order]


def _lora_requests(folders: tuple[str | None, ...]) -> list[Any]:
    from vllm.lora.request import LoRARequest

    numbers = {folder: number for number, folder in enumerate(sorted(filter(None, set(folders))), 1)}
    return [LoRARequest(folder, numbers[folder], folder) if folder else None for folder in folders]


def _answer(output: Any) -> Answer:
    (completion,) = output.outputs
    tokens, given = list(completion.token_ids), list(completion.logprobs)
    if output.prompt_logprobs is not None:  # of the first token there is none
        tokens, given = [*output.prompt_token_ids[1:], *tokens], [*output.prompt_logprobs[1:], *given]
    top = tuple({token: float(found.logprob) for token, found in best.items()} for best in given)
    return Answer(tuple(tokens), top)


def _states(llm: LLM, job: Job) -> dict[str, dict[str, str]]:
    """The states of the fixes in every worker, by rank.

    Empty if the workers cannot be asked, because the user has a worker extension of their own.
    """
    try:
        told: list[dict[str, str]] = llm.collective_rpc("graphfix_states")
    except Exception:
        if job.flags:
            return {}
        import vllm_graphfix

        # Without flags, the engine is in this process.
        told = [{name: state.state.value for name, state in vllm_graphfix.states().items()}]
    return {str(rank): states for rank, states in enumerate(told)}


def _events() -> dict[str, list[float]]:
    """What the fixes and the shadow check have counted in this process, by fix and event."""
    import vllm_graphfix
    from vllm_graphfix.shadow import process

    counts = vllm_graphfix._this_process().manager.counts()
    counted = {
        f"{fix}: {event}": [float(count)] for fix, events in counts.items() for event, count in events.items() if count
    }
    for event, count in process.counts().get(process.NAME, {}).items():
        counted[f"{process.NAME}: {event}"] = [float(count)]
    if wrong := process.wrong():
        counted[f"{process.NAME}: first mismatch in check"] = [float(wrong[0].check)]
    return counted


def _cudagraph_mode(llm: LLM) -> str:
    """The workers' CUDA graph mode, which they take back where their attention cannot do it.

    If they cannot be asked, the mode that they were given.
    """
    try:
        return " and ".join(sorted(set(llm.collective_rpc("graphfix_cudagraph_mode"))))
    except Exception:
        config: Any = llm.llm_engine.vllm_config.compilation_config
        return str(config.cudagraph_mode.name)


def _drafts(llm: LLM) -> tuple[int, int] | None:
    try:
        counters = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    except Exception:  # statistics are switched off
        return None
    accepted, proposed = (counters.get(f"vllm:spec_decode_num_{what}_tokens", 0) for what in ("accepted", "draft"))
    return (int(accepted), int(proposed)) if proposed else None


def _facts() -> dict[str, str]:
    import torch
    import vllm
    from vllm.platforms import current_platform

    import vllm_graphfix
    from vllm_graphfix.verify.engine.device import driver

    chosen = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    for ours in (DECISION, STATUS_DIR):  # set by the plugin, and by whoever started this process
        chosen.pop(ours, None)
    switches = (f"{name}={value}" for name, value in sorted(chosen.items()))
    return {
        "vllm": vllm.__version__,
        "graphfix": vllm_graphfix.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(current_platform.get_device_name()),  # of NVML: this process need not touch the GPU
        "driver": driver(),
        "switches": " ".join(switches) or f"{PREFIX}=on",
        "seed": str(SEED),
    }


def engine_process(job: Path, result: Path, pipe: int | None = None) -> int:
    """All of a process for one engine: its exit code."""
    if pipe is not None:
        end_with_the_other_end_of(pipe)
    code = main(Job.read(job), result)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    # What is torn down at the end of an interpreter hangs now and then after an illegal memory access.
    os._exit(engine_process(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else None))
