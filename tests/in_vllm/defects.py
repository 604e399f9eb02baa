"""What tests of the shadow check share: which defects a release has."""

from __future__ import annotations

import vllm_graphfix
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.source.files import open_source


def affected(fix: str) -> bool:
    """What the diagnosis says, which the fix's own tests hold against the releases, where nothing mends it here."""
    found = BY_NAME[fix].diagnose(open_source()).verdict.value == "affected"
    return found and vllm_graphfix.states()[fix].state.value != "active"
