"""vLLM's dispatch of batches to graphs: which graph is being captured, and how to take one out of dispatch.

A graph is identified by its mode and number of tokens. That is coarser than vLLM's descriptors, which differ by
release: if several descriptors match, such as those with and without LoRA, all of them are meant.
"""

# No `from __future__ import annotations`: as in `fix.py`, for the named tuple.

import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

_WRAPPERS = (
    ("vllm.compilation.cuda_graph", "CUDAGraphWrapper", "concrete_cudagraph_entries"),
    ("vllm.compilation.breakable_cudagraph", "BreakableCUDAGraphWrapper", "entries"),
)
"""Classes of vLLM whose objects hold graphs, each with the attribute that has them."""
_V1, _V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu."
_PROFILING = "profile_cudagraph_memory"
"""Captures graphs to measure their size and discards them, in both model runners."""


class Graph(NamedTuple):
    """A graph that was being captured."""

    owner: object
    """The object that dispatches to the graph: a manager of model runner V2, or model runner V1 itself."""
    mode: str
    """``FULL`` or ``PIECEWISE``."""
    tokens: int
    serves: bool
    """False for a graph that is captured only to measure its size."""
    longest: int | None = None
    """Most tokens of a request in a graph for decodes of varying lengths (V2 from 0.28.0 on)."""


def graph_being_captured() -> Graph | None:
    """Return the graph whose capture, or warm-up, is on the call stack; None if that is not known. Never raises.

    It is read from vLLM's frames, after an error or a claim that is not true, so that a right capture costs nothing.
    """
    graph: Graph | None = None
    try:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            name = str(frame.f_globals.get("__name__", ""))
            if name == _V1 or name.startswith(_V2):
                graph = graph or _graph_in_frame(name, frame.f_code.co_name, frame.f_locals)
                if graph is not None and frame.f_code.co_name == _PROFILING:
                    return graph._replace(serves=False)
            frame = frame.f_back
    except Exception:  # a fork of vLLM may have other variables in its frames
        return None
    return graph


def _graph_in_frame(module: str, function: str, variables: Any) -> Graph | None:
    if module == _V1 and function in ("_warmup_and_capture", "_capture_cudagraphs"):
        descriptor = variables.get("desc", variables.get("batch_desc"))
        tokens = variables["num_tokens"] if descriptor is None else descriptor.num_tokens
        return Graph(variables["self"], variables["cudagraph_runtime_mode"].name, int(tokens), serves=True)
    if module.startswith(_V2) and function == "capture" and hasattr(variables.get("self"), "_candidates"):
        desc = variables["desc"]
        longest = getattr(desc, "max_query_len", None)
        return Graph(variables["self"], desc.cg_mode.name, int(desc.num_tokens), serves=True, longest=longest)
    if module.startswith(_V2) and function == "capture_graph":  # 0.14.1-0.17.1; up to 0.16.0 every graph is a full one
        mode = variables.get("capture_cg_mode")
        return Graph(
            variables["self"], "FULL" if mode is None else mode.name, int(variables["num_tokens"]), serves=True
        )
    return None


class Dispatch:
    """The graphs to which one model runner may dispatch a batch."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._managers = dict(_managers(runner))

    def name_of(self, graph: Graph) -> str | None:
        """Return the name of *graph* on all ranks, such as ``cudagraph_manager FULL 8``; None for an unknown owner."""
        for name, manager in self._managers.items():
            if graph.owner is (self._runner if _is_v1(manager) else manager):
                return f"{name} {graph.mode} {graph.tokens}"
        return None

    @property
    def can_leave_out(self) -> bool:
        """Tell if graphs can be taken out of dispatch on this rank.

        If one rank cannot, the others must not: ranks that dispatch differently wait for each other for ever.
        """
        drafter = getattr(self._runner, "drafter", None)
        # In 0.14.1 V1's drafter chooses its graphs by a list of sizes that it shares with the compiler.
        drafts_known = not getattr(drafter, "use_cuda_graph", False) or hasattr(drafter, "cudagraph_dispatcher")
        return bool(self._managers) and drafts_known

    def names(self) -> list[str]:
        """Return the names, equal on all ranks, of the graphs to which a batch may be dispatched now."""
        named = ((name, *graph) for name, manager in self._managers.items() for graph in _dispatched_to(manager))
        return list(dict.fromkeys(f"{name} {mode} {tokens}" for name, mode, tokens in named))

    def leave_out(self, names: Iterable[str]) -> None:
        """Take the graphs with these *names* out of dispatch, for good; unknown names are ignored.

        Their batches run in another graph, or without one. The graphs stay in memory.
        """
        for name in names:
            manager_name, mode, tokens = name.rsplit(" ", 2)
            manager = self._managers.get(manager_name)
            if manager is not None:
                _leave_out(manager, mode, int(tokens))
                if _is_v1(manager) and (drafts := self._managers.get("drafter.cudagraph_dispatcher")) is not None:
                    # The drafter captures in the same pass, in a mode of its own.
                    for other in ("FULL", "PIECEWISE"):
                        _leave_out(drafts, other, int(tokens))


def _managers(runner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the managers that dispatch to graphs in *runner*, each with a name that is equal on every rank."""
    for prefix, owner in (
        ("", runner),
        ("drafter.", getattr(runner, "drafter", None)),
        ("speculator.", getattr(runner, "speculator", None)),
    ):
        # A copy, made by one call in C: the heartbeat's thread asks, too, while a step may add an attribute.
        for name, value in [*getattr(owner, "__dict__", {}).items()]:
            if _is_v1(value) or (
                hasattr(value, "graphs") and (hasattr(value, "_candidates") or hasattr(value, "cudagraph_sizes"))
            ):
                yield f"{prefix}{name}", value


def managers_of(runner: Any) -> Iterator[Any]:
    """Yield the managers that dispatch to graphs in *runner*."""
    yield from (manager for _, manager in _managers(runner))


def count_graphs(runner: Any) -> int:
    """Return the number of graphs that *runner* has captured and not discarded, an encoder's and those of pieces, too.

    0 for releases whose wrappers do not list their objects, if they have no manager either.
    """
    counts = [len(getattr(manager, "graphs", ())) for manager in managers_of(runner)]
    encoder = getattr(getattr(runner, "model_state", None), "encoder_runner", None)
    for manager in (getattr(runner, "encoder_cudagraph_manager", None), getattr(encoder, "cudagraph_manager", None)):
        counts += [len(graphs) for graphs in getattr(manager, "budget_graphs", {}).values()]
    for module, name, entries in _WRAPPERS:
        objects = getattr(getattr(sys.modules.get(module), name, None), "_all_instances", ())
        counts += [len(vars(wrapper).get(entries, ())) for wrapper in list(objects)]
    return sum(counts)


def builders_of(runner: Any) -> Iterator[Any]:
    """Yield the builders of attention metadata of a model runner, or of a speculator."""
    groups = [group for groups in getattr(runner, "attn_groups", None) or () for group in groups]
    lists = [group.metadata_builders for group in groups]
    lists.append(getattr(runner, "attn_metadata_builders", None) or [])  # model runner V2 up to 0.16.0
    yield from (builder for builders in lists for builder in builders)


def _is_v1(manager: Any) -> bool:
    return hasattr(manager, "cudagraph_keys")


def _candidates_of(manager: Any) -> Iterable[list[Any]]:
    """Return the lists of descriptors of a manager of model runner V2, from 0.18.0 on."""
    candidates: Any = manager._candidates
    return candidates.values() if isinstance(candidates, dict) else candidates


def _dispatched_to(manager: Any) -> Iterator[tuple[str, int]]:
    """Yield mode and tokens of each graph of *manager*."""
    if _is_v1(manager):
        for mode, keys in manager.cudagraph_keys.items():
            yield from ((mode.name, key.num_tokens) for key in keys)
    elif hasattr(manager, "_candidates"):
        for each in _candidates_of(manager):
            yield from ((descriptor.cg_mode.name, descriptor.num_tokens) for descriptor in each)
    else:
        # As PIECEWISE, since taking that out removes every graph of the size: see `_leave_out`.
        yield from (("PIECEWISE", size) for size in set(manager.cudagraph_sizes.values()))


def _leave_out(manager: Any, mode: str, tokens: int) -> None:
    # vLLM assumes that each size of a full graph is also one of a piecewise graph: ranks that agree on the lesser mode
    # and the larger size rely on it. So a full graph goes with its piecewise one.
    modes = {"FULL", mode}

    def is_meant(descriptor: Any, of: Any) -> bool:
        return of.name in modes and bool(descriptor.num_tokens == tokens)

    if _is_v1(manager):
        for of, keys in manager.cudagraph_keys.items():
            keys.difference_update([key for key in keys if is_meant(key, of)])
    elif hasattr(manager, "_candidates"):
        # `run_fullgraph` asserts that it has the graph that was dispatched to: no candidate, no such batch.
        for each in _candidates_of(manager):
            each[:] = [descriptor for descriptor in each if not is_meant(descriptor, descriptor.cg_mode)]
    else:
        # 0.17: a batch without a graph in the table runs eagerly.
        without_graph_eager = hasattr(manager, "get_cudagraph_runtime_mode")
        if without_graph_eager:
            manager.graphs.pop(tokens, None)
        for sizes in (manager.cudagraph_sizes, getattr(manager, "uniform_decode_cudagraph_sizes", {})):
            if mode == "FULL" and without_graph_eager:
                continue
            for batch in [batch for batch, size in sizes.items() if size == tokens]:
                del sizes[batch]
