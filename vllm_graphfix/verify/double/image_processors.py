"""Stand-ins for image processors, which vLLM's models of images import, and which need torchvision."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

_NEED_TORCHVISION = ("image_processing_qwen2_vl", "video_processing_qwen2_vl")


def install_image_processor_stand_ins() -> None:
    """Let vLLM's models of images be imported without torchvision; no image is processed on the double."""
    if find_spec("torchvision") is not None:
        return
    for name in _NEED_TORCHVISION:
        path = f"transformers.models.qwen2_vl.{name}"
        module = sys.modules.setdefault(path, ModuleType(path))
        for function_or_class in ("smart_resize", "Qwen2VLVideoProcessor"):
            vars(module).setdefault(function_or_class, None)
