"""Full graphs that replay on other attention metadata than their captures read, by `engine/metadata.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_graphfix.engine.components import CaptureComponent

if TYPE_CHECKING:
    from vllm_graphfix.engine.metadata import MetadataCheck
    from vllm_graphfix.settings.decision import Decision


class MetadataComponent(CaptureComponent):
    """Owns the `MetadataCheck` of this process."""

    name = "metadata"

    def is_on(self, decision: Decision) -> bool:
        return decision.compares_metadata

    def make(self) -> MetadataCheck:
        from vllm_graphfix.engine.metadata import MetadataCheck

        return MetadataCheck(self.services.publish)


COMPONENT = MetadataComponent
