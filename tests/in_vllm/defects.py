"""The defects of a release, for tests of the shadow check."""

from __future__ import annotations

import vllm_graphfix
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.source.files import open_source


def affected(fix: str) -> bool:
    """Return whether the diagnosis, which the fix's own tests check, says so, and nothing mends it here."""
    is_affected = BY_NAME[fix].diagnose(open_source()).verdict.value == "affected"
    return is_affected and vllm_graphfix.states()[fix].state.value != "active"
