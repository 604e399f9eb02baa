"""The graphs that vLLM may dispatch a batch to: which one it is capturing, and how one is taken out.

A graph is known by the mode and the number of tokens that it was captured for. That is coarser than vLLM's descriptors,
which differ by release: where there are several, with and without LoRA say, all of them are is_meant.
"""

# No `from __future__ import annotations`: as in `fix.py`, for the named tuple.

import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

_V1, _V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu."
_PROFILING = "profile_cudagraph_memory"
"""Captures graphs to learn their size and throws them away, in both model runners."""


class Graph(NamedTuple):
    """One that was being captured."""

    owner: object
    """The manager whose graph it is, of model runner V2; model runner V1 itself."""
    mode: str
    """``FULL`` or ``PIECEWISE``."""
    tokens: int
    kept: bool
    """Whether it is to serve. One that was captured to learn its size is not."""


def graph_being_captured() -> Graph | None:
    """The graph whose capture, warm-up included, has called this; None where it is not known which. Never raises.

    vLLM's frames say so, which costs nothing as long as nobody asks: whoever does has met an error.
    """
    found: Graph | None = None
    try:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            name = str(frame.f_globals.get("__name__", ""))
            if name == _V1 or name.startswith(_V2):
                found = found or _graph_in_frame(name, frame.f_code.co_name, frame.f_locals)
                if found is not None and frame.f_code.co_name == _PROFILING:
                    return found._replace(kept=False)
            frame = frame.f_back
    except Exception:  # a fork's frames may hold anything
        return None
    return found


def _graph_in_frame(module: str, function: str, variables: Any) -> Graph | None:
    if module == _V1 and function in ("_warmup_and_capture", "_capture_cudagraphs"):
        descriptor = variables.get("desc", variables.get("batch_desc"))
        tokens = variables["num_tokens"] if descriptor is None else descriptor.num_tokens
        return Graph(variables["self"], variables["cudagraph_runtime_mode"].name, int(tokens), kept=True)
    if module.startswith(_V2) and function == "capture" and hasattr(variables.get("self"), "_candidates"):
        return Graph(variables["self"], variables["desc"].cg_mode.name, int(variables["desc"].num_tokens), kept=True)
    if module.startswith(_V2) and function == "capture_graph":  # 0.14.1-0.17.1; up to 0.16.0 every graph is a full one
        mode = variables.get("capture_cg_mode")
        return Graph(variables["self"], "FULL" if mode is None else mode.name, int(variables["num_tokens"]), kept=True)
    return None


class Dispatch:
    """What one model runner may dispatch a batch to."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._managers = dict(_managers(runner))

    def name_of(self, graph: Graph) -> str | None:
        """What all ranks call *graph*, such as ``cudagraph_manager FULL 8``; None if it is not known whose it is."""
        for name, manager in self._managers.items():
            if graph.owner is (self._runner if _is_v1(manager) else manager):
                return f"{name} {graph.mode} {graph.tokens}"
        return None

    @property
    def can_leave_out(self) -> bool:
        """Whether graphs can be taken out.

        Where one rank cannot, the others must not: a rank that dispatches otherwise waits for the rest for ever.
        """
        drafter = getattr(self._runner, "drafter", None)
        # In 0.14.1 V1's drafter chooses its graphs by a list of sizes that it shares with the compiler.
        drafts_known = not getattr(drafter, "use_cuda_graph", False) or hasattr(drafter, "cudagraph_dispatcher")
        return bool(self._managers) and drafts_known

    def names(self) -> list[str]:
        """What all ranks call the graphs that a batch may be dispatched to now."""
        found = {
            f"{name} {mode} {tokens}": None
            for name, manager in self._managers.items()
            for mode, tokens in _dispatched_to(manager)
        }
        return list(found)

    def leave_out(self, names: Iterable[str]) -> None:
        """Takes the graphs with these names out of dispatch, for good.

        What this rank does not have, it need not take out. The batches of these graphs run in another graph, or without
        one. The graphs stay in memory.
        """
        for name in names:
            manager_name, mode, tokens = name.rsplit(" ", 2)
            manager = self._managers.get(manager_name)
            if manager is not None:
                _leave_out(manager, mode, int(tokens))
                if _is_v1(manager) and (drafts := self._managers.get("drafter.cudagraph_dispatcher")) is not None:
                    # It captures in the same pass, in a mode of its own.
                    for other in ("FULL", "PIECEWISE"):
                        _leave_out(drafts, other, int(tokens))


def _managers(runner: Any) -> Iterator[tuple[str, Any]]:
    """What dispatches to graphs in *runner*, by a name that is the same on every rank."""
    for prefix, owner in (
        ("", runner),
        ("drafter.", getattr(runner, "drafter", None)),
        ("speculator.", getattr(runner, "speculator", None)),
    ):
        for name, value in getattr(owner, "__dict__", {}).items():
            if _is_v1(value) or (
                hasattr(value, "graphs") and (hasattr(value, "_candidates") or hasattr(value, "cudagraph_sizes"))
            ):
                yield f"{prefix}{name}", value


def _is_v1(manager: Any) -> bool:
    return hasattr(manager, "cudagraph_keys")


def _dispatched_to(manager: Any) -> Iterator[tuple[str, int]]:
    """Mode and tokens of each graph of *manager*."""
    if _is_v1(manager):
        for mode, keys in manager.cudagraph_keys.items():
            yield from ((mode.name, key.num_tokens) for key in keys)
    elif hasattr(manager, "_candidates"):
        candidates = manager._candidates
        for each in candidates.values() if isinstance(candidates, dict) else candidates:
            yield from ((descriptor.cg_mode.name, descriptor.num_tokens) for descriptor in each)
    else:
        # Of a size that is only a piecewise graph's nothing is left.
        yield from (("PIECEWISE", size) for size in set(manager.cudagraph_sizes.values()))


def _leave_out(manager: Any, mode: str, tokens: int) -> None:
    # vLLM goes by every size of a full graph being one of a piecewise graph too: ranks that agree on the lesser mode
    # and the larger size ask for that.
    modes = {"FULL", mode}

    def is_meant(descriptor: Any, of: Any) -> bool:
        return of.name in modes and bool(descriptor.num_tokens == tokens)

    if _is_v1(manager):
        for of, keys in manager.cudagraph_keys.items():
            keys.difference_update([key for key in keys if is_meant(key, of)])
    elif hasattr(manager, "_candidates"):
        # `run_fullgraph` asserts that it has the graph that was dispatched to: no candidate, no such batch.
        candidates = manager._candidates
        for each in candidates.values() if isinstance(candidates, dict) else candidates:
            each[:] = [descriptor for descriptor in each if not is_meant(descriptor, descriptor.cg_mode)]
    else:
        without_graph_eager = hasattr(
            manager, "get_cudagraph_runtime_mode"
        )  # 0.17: no batch is dispatched to a graph that is not there
        if without_graph_eager:
            manager.graphs.pop(tokens, None)
        for sizes in (manager.cudagraph_sizes, getattr(manager, "uniform_decode_cudagraph_sizes", {})):
            if mode == "FULL" and without_graph_eager:
                continue
            for batch in [batch for batch, size in sizes.items() if size == tokens]:
                del sizes[batch]
