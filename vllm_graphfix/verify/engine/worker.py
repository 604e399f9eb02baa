"""One engine in one process.

    python -m vllm_graphfix.verify.engine.worker JOB RESULT [PIPE]

JOB is a file that `Job.write` wrote. RESULT is a JSON file: the fields of the engine's result, or, until the engine has
finished and if it fails, ``{"observed": …, "error": …}``. PIPE is the descriptor of a pipe: when its other end is
closed, this process and all that it started are killed. vLLM logs to this process's own output.

The environment decides whether the fixes are on, as in production.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_graphfix.settings.environment import DECISION, PREFIX, STATUS_DIR
from vllm_graphfix.verify.codec import from_builtins, to_builtins
from vllm_graphfix.verify.engine import llm as llms
from vllm_graphfix.verify.engine.exact import ExactRank
from vllm_graphfix.verify.engine.job import EngineResult, Job, PoisonPass
from vllm_graphfix.verify.engine.poisoned import Session, ask_last_with_poison, ask_with_poison
from vllm_graphfix.verify.engine.questions import SEED, ask, batch_sizes, made_up_prompts, score

if TYPE_CHECKING:
    from vllm import LLM

    from vllm_graphfix.verify.comparison import Answer


def main(job: Job, result: Path) -> int:
    observed: dict[str, list[float]] = {}
    try:
        written = to_builtins(_run(job, observed, result))
    except BaseException as error:  # an engine may end in SystemExit
        traceback.print_exc()
        _write(result, {"observed": observed, "error": _error_line(error)})
        return 1
    _write(result, written)
    return 0


def exit_with_pipe(pipe: int) -> None:
    """Kill this process group when the other end of *pipe* is closed: an orphaned engine would hold the GPU's memory.

    A forked process waits for that, since this one may hang in CUDA. PR_SET_PDEATHSIG would not reach the
    processes that the engine starts.
    """
    if os.fork():
        os.close(pipe)
        return
    os.read(pipe, 1)  # nothing is ever written: it returns at end of file
    os.killpg(0, signal.SIGKILL)


def write_at_once(file: Path, text: str) -> None:
    """Write *text* to *file* so that no reader sees a part of it."""
    unfinished = file.with_name(f"{file.name}.partial")
    unfinished.write_text(text)
    unfinished.replace(file)


def _write(result: Path, written: dict[str, Any]) -> None:
    write_at_once(result, json.dumps(written))


def _error_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else ""
    # pydantic writes the number of errors first, and then the errors.
    if len(lines) > 1 and re.match(r"\d+ validation errors? for ", line):
        line = " ".join(lines[1:]).partition(" [type=")[0]
    return f"{type(error).__name__}: {line}"


def _run(job: Job, observed: dict[str, list[float]], result: Path) -> EngineResult:
    from vllm_graphfix.verify.engine.probes import probe_of

    started = time.monotonic()
    # vLLM before the plugin, as in production. In a forked process vLLM is imported already.
    from vllm import LLM  # noqa: F401

    imported = time.monotonic()
    import vllm_graphfix

    vllm_graphfix.register()  # a copy that is only on the path has no entry point
    if not job.flags or job.untuned:
        llms.inspect_models_in_process()
    if job.untuned:
        llms.take_first_variant()
    finished = False

    def save() -> None:
        if not finished:
            _write(result, {"observed": observed, "error": ""})

    probes = [probe_of(name)(observed, save) for name in job.probes]
    for probe in probes:
        probe.before_the_engine()
    llm = llms.start_engine(job)
    for probe in probes:
        probe.in_the_engine(llm)
    ready = time.monotonic()
    prompts = job.prompts or made_up_prompts(job, llm)

    def answers(number: int) -> tuple[Answer, ...]:
        if job.continued:
            return score(llm, prompts, job, number)
        # With poison the order stays: a difference between passes without poison is then the engine's own.
        return ask(llm, prompts, job, reverse=bool(number % 2) and not job.poison)

    began = time.monotonic()
    passes = [answers(0)]
    seconds = time.monotonic() - began
    exact = _exact(llm, lambda: answers(0)) if job.exact else ()
    for number in range(job.extra_passes):
        # Cached blocks of the pass before would hide the noise of computing them again.
        llm.reset_prefix_cache()
        passes.append(answers(number + 1))
    poisoned: tuple[PoisonPass, ...] = ()
    session = Session(llm, lambda: ask(llm, prompts, job), passes, seconds, observed, partial(_write, result))
    if job.poison:
        poisoned = ask_with_poison(session)
    for probe in probes:
        probe.after_the_answers()
    observed |= _events()
    engine_result = EngineResult(
        passes=tuple(passes),
        states=_states(llm, job),
        # A copy, since probes also observe the poisoned steps to come.
        observed={name: list(numbers) for name, numbers in observed.items()},
        drafts=_drafts(llm),
        facts=_facts(),
        start_seconds=round(ready - started, 1),
        import_seconds=round(imported - started, 1),
        answer_seconds=round(time.monotonic() - ready, 1),
        cpu_seconds=round(sum(os.times()[:4]), 1),
        poisoned=poisoned,
        exact=tuple(from_builtins(rank, ExactRank) for rank in exact),
        batch_sizes=batch_sizes(llm),
        cudagraph_mode=_cudagraph_mode(llm),
    )
    if not job.poison_last:
        return engine_result
    finished = True  # from here on `_with_poison` writes, and a probe must not overwrite its result
    return _with_poison(engine_result, session, result)


def _exact(llm: LLM, ask_again: Callable[[], object]) -> Sequence[Any]:
    """Compare the replays of one more pass, and return the result of each rank.

    Its answers do not count. Caches keep what the run without the graph wrote, so that a graph's wrong entries, which
    other steps would read, are in none of them.
    """
    llm.reset_prefix_cache()
    llm.collective_rpc("graphfix_exact")
    ask_again()
    ranks: list[Any] = llm.collective_rpc("graphfix_exact_result")
    return ranks


def _with_poison(engine_result: EngineResult, session: Session, file: Path) -> EngineResult:
    """Add to *engine_result* what poison shows in the same engine. An error there loses nothing of it."""
    begun: dict[str, list[float]] = {}

    def write(late: dict[str, Any]) -> None:
        observed = engine_result.observed | begun
        _write(file, to_builtins(replace(engine_result, observed=observed, poison_error=late["error"])))

    write({"error": ""})
    try:
        again, poisoned = ask_last_with_poison(replace(session, observed=begun, write=write))
    except BaseException as error:  # as in `main`
        traceback.print_exc()
        return replace(engine_result, observed=engine_result.observed | begun, poison_error=_error_line(error))
    return replace(
        engine_result, passes=(*engine_result.passes, again), observed=engine_result.observed | begun, poisoned=poisoned
    )


def _states(llm: LLM, job: Job) -> dict[str, dict[str, str]]:
    """Return the states of the fixes in every worker, by rank.

    Empty if the workers cannot be asked, because the user has a worker extension of their own.
    """
    try:
        ranks: list[dict[str, str]] = llm.collective_rpc("graphfix_states")
    except Exception:
        if job.flags:
            return {}
        import vllm_graphfix

        # Without flags the engine runs in this process.
        ranks = [{name: state.state.value for name, state in vllm_graphfix.states().items()}]
    return {str(rank): states for rank, states in enumerate(ranks)}


def _events() -> dict[str, list[float]]:
    """Return the counters of the fixes and of the shadow check in this process, as observations."""
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
    """Return the workers' CUDA graph mode, which they lower if their attention backend does not support it.

    If they cannot be asked, return the configured mode.
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
    for ours in (DECISION, STATUS_DIR):  # set by the plugin and by `Engines`, not by the user
        chosen.pop(ours, None)
    switches = (f"{name}={value}" for name, value in sorted(chosen.items()))
    return {
        "vllm": vllm.__version__,
        "graphfix": vllm_graphfix.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": str(current_platform.get_device_name()),  # from NVML, which does not touch the GPU
        "driver": driver(),
        "switches": " ".join(switches) or f"{PREFIX}=on",
        "seed": str(SEED),
    }


def engine_process(job: Path, result: Path, pipe: int | None = None) -> int:
    """Run a whole engine process and return its exit code."""
    if pipe is not None:
        exit_with_pipe(pipe)
    code = main(Job.read(job), result)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    # The teardown of an interpreter hangs now and then after an illegal memory access.
    os._exit(engine_process(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else None))
