"""vLLM's classes without pinned memory, which needs CUDA."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


@contextmanager
def unpinned() -> Iterator[None]:
    """Keep the modules of vLLM that are imported by now from pinning memory, within the block.

    vLLM pins memory for a batch with prefills from 0.21 on, and for more from 0.25 on, without being configured so.
    """
    with ExitStack() as stack:
        for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
            replaced: dict[str, Any] = {"PIN_MEMORY": False, "is_pin_memory_available": lambda: False}
            copy = vars(module).get("async_tensor_h2d")
            if copy is not None and "pin_memory" in inspect.signature(copy).parameters:  # up to 0.23
                replaced["async_tensor_h2d"] = _without_pinning(copy)
            for name in replaced.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, replaced[name]))
        yield


def _without_pinning(copy: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's *copy* to a device with its last parameter, `pin_memory`, always False."""

    def copied(data: Any, *dtype_and_device: Any, **by_name: Any) -> Any:
        return copy(data, *dtype_and_device[:2], **by_name | {"pin_memory": False})

    return copied
