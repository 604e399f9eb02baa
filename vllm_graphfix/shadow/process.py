"""The shadow check of this process, its state, and the reason why there is none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Code, State
from vllm_graphfix.log import logger
from vllm_graphfix.settings.shadow_rate import Action, Rate

if TYPE_CHECKING:
    from vllm_graphfix.patching.applied_fix import FixState
    from vllm_graphfix.settings.shadow_rate import Abort
    from vllm_graphfix.shadow.check import Shadow

NAME = "shadow"
"""The check's name in records, `fleet` and metrics, where it stands beside the fixes."""
DRAFTER = "-drafter"
"""The end of the name of what is wrapped for drafts."""
PIECES = "-pieces"
"""The end of the name of what is wrapped for steps in pieces alone."""
ENCODER = "-encoder"
"""The end of the name of what is wrapped for an encoder's graphs."""
UNLESS_FULL = (PIECES, ENCODER)
"""Ends of the names of wrappers that are there only if graphs of all kinds are to be checked."""
_MAX_MISMATCHES = 5
"""Mismatches in a record."""

SHADOW: Shadow | None = None
"""None where nothing is checked."""
REFUSED: str | None = None
"""The reason why no step of this engine may run twice."""


def start(
    rate: Rate,
    action: Action,
    publish: Callable[[str], None] = lambda problem: None,
    abort: Abort | None = None,
    *,
    pieces: bool = False,
) -> None:
    """Start anew: a process may make one engine after the other, or be forked.

    *publish* takes the reason if the check ends this process; *abort* ends requests, if that is the action; *pieces*:
    steps by piecewise and breakable graphs are checked, too.
    """
    global SHADOW, REFUSED  # noqa: PLW0603 - one a process
    # First: if what follows fails, wrappers must not go on with the check of an earlier engine.
    REFUSED = SHADOW = None
    if rate:
        from vllm_graphfix.shadow import watchdog
        from vllm_graphfix.shadow.check import Shadow

        watchdog.last_words = functools.partial(_record_end, publish)
        SHADOW = Shadow(rate, action, refuse, abort, pieces=pieces)


def on_captured(worker: Any) -> None:
    """Start to count steps, once *worker* has captured its graphs.

    From here on all stages of a pipeline make the same steps, and data-parallel ranks that share experts do, too.
    Before, they do not: V1's last stage makes one more, and so do those that capture when they measure memory.
    """
    if SHADOW is None:
        return
    from vllm_graphfix.shadow.forward import unsafe
    from vllm_graphfix.shadow.lockstep import can_count, is_in_lockstep

    SHADOW.memory.end_capture()
    on_v2 = bool(getattr(worker, "use_v2_model_runner", False))
    if getattr(worker.vllm_config, "lora_config", None) is not None:
        try:
            SHADOW.judge.allow_adapter_rounding(worker.vllm_config.model_config.dtype)
        except Exception as error:  # the rest has to start all the same: other ranks wait for a key of this one
            SHADOW.stop(error)
    if is_in_lockstep(worker.vllm_config):
        reason = unsafe(worker.vllm_config)
        if reason is None and on_v2 and not can_count():
            reason = "it is not known how data-parallel ranks agree on a batch on model runner V2 of this release"
        if reason is not None:
            refuse(reason)
        if REFUSED is None:
            SHADOW.start_in_lockstep()
    elif worker.vllm_config.parallel_config.pipeline_parallel_size > 1:
        SHADOW.start_in_pipeline(drafts=on_v2)
        if REFUSED is not None:
            SHADOW.end()


def _record_end(publish: Callable[[str], None], reason: str) -> None:
    """Record why this process ends now: other ranks may have run something else than this one."""
    if SHADOW is not None:
        SHADOW.stopped = reason
    publish(f"the shadow check ended this process: {reason}")


def refuse(reason: str) -> None:
    """Mark this engine as incompatible with the check; only the first reason counts."""
    global REFUSED  # noqa: PLW0603 - one a process
    if REFUSED is None:
        REFUSED = reason
        if SHADOW is not None:
            SHADOW.end()  # or each step from the first that is due on would ask again
        logger.warning("graphfix: the shadow check is incompatible with this engine and checks nothing: %s", reason)


def state(of_runners: Mapping[str, FixState]) -> FixState:
    """Combine the states of the wrappers for both model runners, of which an engine has one, and of the check."""
    states = [each for each in of_runners.values() if not (each.name.endswith(UNLESS_FULL) and each.state is State.OFF)]
    # Those of the target model: a check of drafts alone is not what was asked for.
    targets = [each for each in states if not each.name.endswith((DRAFTER, *UNLESS_FULL))] or states
    best = next((each for each in targets if each.state is State.ACTIVE), targets[0])
    reason = "; ".join(f"{each.name}: {each.state.value}, {each.reason}" for each in states)
    combined = best._replace(name=NAME, reason=reason)
    if REFUSED is not None:
        return combined._replace(state=State.INCOMPATIBLE, reason=REFUSED, code=Code.ENGINE)
    if SHADOW is None:
        return combined
    if SHADOW.stopped is not None:
        return combined._replace(state=State.FAILED, reason=f"the check has stopped: {SHADOW.stopped}", code=Code.ERROR)
    if SHADOW.without_pieces is not None:
        reason = f"piecewise and breakable graphs are left alone, since {SHADOW.without_pieces}; {combined.reason}"
        combined = combined._replace(reason=reason)
    if SHADOW.without_encoder is not None:
        reason = f"an encoder's graphs are left alone, since {SHADOW.without_encoder}; {combined.reason}"
        combined = combined._replace(reason=reason)
    if SHADOW.skips_a_graph():
        reason = f"each step of a graph is left out, so that nobody sees whether it is right; {combined.reason}"
        combined = combined._replace(reason=reason, code=Code.GRAPH_EXCLUDED)
    if SHADOW.consequences.cannot_abort is not None:
        reason = f"requests are not ended, since {SHADOW.consequences.cannot_abort}; {combined.reason}"
        combined = combined._replace(reason=reason, code=Code.CANNOT_ABORT)
    return combined


def counts() -> dict[str, dict[str, int]]:
    """Return the events of a record."""
    if SHADOW is None:
        return {}
    results = SHADOW.results
    return {
        NAME: {
            "checks": results.checks,
            "mismatches": results.mismatches,
            "quarantined-graphs": len(results.quarantined),
            "quarantines-given-up": results.quarantines_ended,
            "aborted": 0,  # the scheduler's process counts requests, where they end: `engine.abort`
            "steps-left-out": results.skipped,
            "milliseconds": int(1000 * results.seconds),
            **SHADOW.acceptance.events(),
        }
    }


def wrong() -> tuple[Any, ...]:
    """Return the `Wrong`s of a record: the first mismatches that this rank itself found."""
    if SHADOW is None or not SHADOW.results.first_mismatches:
        return ()
    from vllm_graphfix.records.record import SHORT, Wrong

    return tuple(
        Wrong(
            _ascii(each.graph.name)[:SHORT],
            each.graph.rows,
            each.rows,
            ", ".join(each.graph.backends)[:SHORT],
            (_ascii(each.failure) or " ".join(f"{error:.3g}" for error in each.errors))[:SHORT],
            f"{each.noise:.3g}",
            _ascii(each.first_layer)[:SHORT],
            each.check,
            str(SHADOW.acceptance.by_graph.get(each.graph.name, ""))[:SHORT],
        )
        for each in SHADOW.results.to_report(_MAX_MISMATCHES)
    )


def _ascii(text: str | None) -> str:
    return ascii(text or "")[1:-1]
