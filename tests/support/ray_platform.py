"""Stand-ins for a GPU in the processes of an engine on Ray.

It is a platform plugin: vLLM imports it when it looks for its platform.
"""

from __future__ import annotations

import os

from vllm.platforms.interface import UnspecifiedPlatform

BEGAN_WITH = os.environ.get("VLLM_GRAPHFIX_DECISION")
"""What an actor found on its node: it looks for its platform before the release sets anything."""


def platform() -> str:
    """For the entry point group ``vllm.platform_plugins``."""
    return "ray_platform.StandInPlatform"


class StandInPlatform(UnspecifiedPlatform):  # type: ignore[misc]
    """A device that Ray deals out as GPUs."""

    device_name = "stand-in"
    device_type = "cpu"
    ray_device_key = "GPU"
    device_control_env_var = "STAND_IN_VISIBLE_DEVICES"
