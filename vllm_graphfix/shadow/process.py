"""The shadow check of this process, and why there may be none."""

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
"""Under which records, `fleet` and metrics tell of it, as of a fix."""
DRAFTER = "-drafter"
"""The end of the name of what is wrapped for drafts."""
_TOLD = 5
"""Mismatches in a record."""

SHADOW: Shadow | None = None
"""None where nothing is checked."""
REFUSED: str | None = None
"""Why no step of this engine may run twice."""


def start(
    rate: Rate, action: Action, tell: Callable[[str], None] = lambda problem: None, abort: Abort | None = None
) -> None:
    """Begins anew: a process may make one engine after the other, or be forked.

    *tell* is called with the reason where the check ends this process; *abort* ends requests, if that is the action.
    """
    global SHADOW, REFUSED  # noqa: PLW0603 - one a process
    REFUSED = SHADOW = None
    if rate:
        from vllm_graphfix.shadow import watchdog
        from vllm_graphfix.shadow.check import Shadow

        watchdog.last_words = functools.partial(_note_end, tell)
        SHADOW = Shadow(rate, action, refuse, abort)


def serve(worker: Any) -> None:
    """Begins the check, once *worker* has captured its graphs.

    All stages of a pipeline make the same steps from here on, and up to here they do not: V1's last stage makes one
    more, and so do those that capture when they measure memory. Data-parallel ranks that share experts do, too.
    """
    if SHADOW is None:
        return
    from vllm_graphfix.shadow.failures import description
    from vllm_graphfix.shadow.forward import unsafe
    from vllm_graphfix.shadow.lockstep import can_count, is_in_lockstep

    SHADOW.memory.measuring = False
    on_v2 = bool(getattr(worker, "use_v2_model_runner", False))
    if getattr(worker.vllm_config, "lora_config", None) is not None:
        try:
            SHADOW.expect_adapters(worker.vllm_config.model_config.dtype)
        except Exception as error:  # what follows is begun all the same: other ranks wait for a word of this one
            SHADOW.stop(description(error), error)
    if is_in_lockstep(worker.vllm_config):
        reason = unsafe(worker.vllm_config)
        if reason is None and on_v2 and not can_count():
            reason = "it is not known how data-parallel ranks agree on a batch on model runner V2 of this release"
        if reason is not None:
            refuse(reason)
        if REFUSED is None:
            SHADOW.begin_in_lockstep()
    elif worker.vllm_config.parallel_config.pipeline_parallel_size > 1:
        SHADOW.begin_in_pipeline(drafts=on_v2)
        if REFUSED is not None:
            SHADOW.end()


def _note_end(tell: Callable[[str], None], reason: str) -> None:
    """Writes down why this process ends, which it does now: other ranks may have run something else than this one."""
    if SHADOW is not None:
        SHADOW.stopped = reason
    tell(f"the shadow check ended this process: {reason}")


def refuse(reason: str) -> None:
    """Says once that the check is not compatible with this engine."""
    global REFUSED  # noqa: PLW0603 - one a process
    if REFUSED is None:
        REFUSED = reason
        if SHADOW is not None:
            SHADOW.end()  # or each step from the first that is due on would ask again
        logger.warning("graphfix: the shadow check is incompatible with this engine and checks nothing: %s", reason)


def state(of_runners: Mapping[str, FixState]) -> FixState:
    """One state of what is wrapped for both model runners, of which an engine has one, and of the check itself."""
    told = list(of_runners.values())
    # Of the target model: that drafts alone are checked is not what was asked for.
    targets = [each for each in told if not each.name.endswith(DRAFTER)] or told
    best = next((each for each in targets if each.state is State.ACTIVE), targets[0])
    reason = "; ".join(f"{each.name}: {each.state.value}, {each.reason}" for each in told)
    found = best._replace(name=NAME, reason=reason)
    if REFUSED is not None:
        return found._replace(state=State.INCOMPATIBLE, reason=REFUSED, code=Code.ENGINE)
    if SHADOW is not None and SHADOW.stopped is not None:
        return found._replace(state=State.FAILED, reason=f"the check has stopped: {SHADOW.stopped}", code=Code.ERROR)
    if SHADOW is not None and SHADOW.leaves_out_a_graph():
        reason = f"each step of a graph is left out, so that nobody sees whether it is right; {found.reason}"
        found = found._replace(reason=reason, code=Code.GRAPH_EXCLUDED)
    if SHADOW is not None and SHADOW.cannot_abort is not None:
        reason = f"requests are not ended, since {SHADOW.cannot_abort}; {found.reason}"
        found = found._replace(reason=reason, code=Code.CANNOT_ABORT)
    return found


def counts() -> dict[str, dict[str, int]]:
    """For the events of a record."""
    if SHADOW is None:
        return {}
    found = SHADOW.results
    return {
        NAME: {
            "checks": found.checks,
            "mismatches": found.mismatches,
            "quarantined-graphs": len(found.quarantined),
            "quarantines-given-up": found.given_up,
            "aborted": 0,  # requests count where they end: `engine.abort`
            "steps-left-out": found.skipped,
            "milliseconds": int(1000 * found.seconds),
        }
    }


def wrong() -> tuple[Any, ...]:
    """For the report of a record: the first mismatches that this rank has found itself."""
    if SHADOW is None or not SHADOW.results.kept:
        return ()
    from vllm_graphfix.records.record import SHORT, Wrong

    return tuple(
        Wrong(
            _ascii(each.graph.name)[:SHORT],
            each.graph.padded_rows,
            each.rows,
            ", ".join(each.graph.backends)[:SHORT],
            (_ascii(each.failure) or " ".join(f"{error:.3g}" for error in each.errors))[:SHORT],
            f"{each.noise:.3g}",
            _ascii(each.first_layer)[:SHORT],
            each.check,
        )
        for each in SHADOW.results.to_report(_TOLD)
    )


def _ascii(text: str | None) -> str:
    return ascii(text or "")[1:-1]
