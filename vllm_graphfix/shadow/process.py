"""The shadow check of this process, and why there may be none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_graphfix.log import logger
from vllm_graphfix.shadow.rate import Action, Rate

if TYPE_CHECKING:
    from vllm_graphfix.shadow.check import Shadow

SHADOW: Shadow | None = None
"""None where nothing is checked."""
REFUSED: str | None = None
"""Why no step of this engine may run twice."""


def start(rate: Rate, action: Action) -> None:
    """Begins anew: a process may make one engine after the other, or be forked."""
    global SHADOW, REFUSED  # noqa: PLW0603 - one a process
    REFUSED = SHADOW = None
    if rate:
        from vllm_graphfix.shadow.check import Shadow

        SHADOW = Shadow(rate, action)


def refuse(reason: str) -> None:
    """Says once that the check is not compatible with this engine."""
    global REFUSED  # noqa: PLW0603 - one a process
    if REFUSED is None:
        REFUSED = reason
        logger.warning("graphfix: the shadow check is incompatible with this engine, and checks nothing: %s", reason)
