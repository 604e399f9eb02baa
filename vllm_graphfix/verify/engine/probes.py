"""Probes: observe in an engine what its tokens do not show.

The engine runs in this process. Probes wrap functions of vLLM and change no results.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

Observed = dict[str, list[float]]


class Probe:
    """Writes numbers into *observed* and calls *save* after each change, since the engine may crash next."""

    name: str

    def __init__(self, observed: Observed, save: Callable[[], None]) -> None:
        self._observed, self._save = observed, save

    def before_the_engine(self) -> None:
        """Hook before the engine is built; vLLM can be imported."""

    def in_the_engine(self, llm: LLM) -> None:
        """Hook after graphs are captured, before the first prompt."""

    def after_the_answers(self) -> None:
        """Hook after the last answer."""


class PaddedRows(Probe):
    """Lowest sequence length and block id in the arguments of dense fp8 FlashMLA's planner and kernel, in decodes."""

    name = "padded-rows"

    def in_the_engine(self, llm: LLM) -> None:
        from vllm.v1.attention.backends.mla import flashmla

        lowest = self._observed.setdefault(self.name, [float("inf"), float("inf")])
        plan, build = flashmla.get_mla_metadata_dense_fp8, flashmla.FlashMLAMetadataBuilder._build_decode

        def note(length: float, block: float) -> None:
            if length < lowest[0] or block < lowest[1]:
                lowest[:] = min(lowest[0], length), min(lowest[1], block)
                self._save()

        # With functools.wraps, through which the plugin recognises its own function.
        @functools.wraps(plan)
        def planned(cache_seqlens: Any, *args: Any, **kwargs: Any) -> Any:
            note(int(cache_seqlens.min()), float("inf"))
            return plan(cache_seqlens, *args, **kwargs)

        @functools.wraps(build)
        def built(*args: Any, **kwargs: Any) -> Any:
            metadata = build(*args, **kwargs)
            note(int(metadata.seq_lens.min()), int(metadata.block_table[:, 0].min()))
            return metadata

        flashmla.get_mla_metadata_dense_fp8 = planned
        flashmla.FlashMLAMetadataBuilder._build_decode = built


class IndexerLengths(Probe):
    """Lowest length of a token that the builder of the sparse indexer's metadata prepares for a decode batch."""

    name = "indexer-lengths"

    def in_the_engine(self, llm: LLM) -> None:
        from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder

        lowest = self._observed.setdefault(self.name, [float("inf")])
        prepare = DeepseekV32IndexerMetadataBuilder._prepare_decode_tensors

        # With functools.wraps, through which the plugin recognises its own function.
        @functools.wraps(prepare)
        def prepared(*args: Any, **kwargs: Any) -> Any:
            tensors = prepare(*args, **kwargs)
            length = int(tensors[0].min())
            if length < lowest[0]:
                lowest[0] = length
                self._save()  # before the kernel that may not come to its end
            return tensors

        DeepseekV32IndexerMetadataBuilder._prepare_decode_tensors = prepared


class CountedInGraphs(Probe):
    """Two counters on the device: the graphs record the counting, and so every replay counts."""

    def before_the_engine(self) -> None:
        import torch

        self._counts = torch.zeros(2, dtype=torch.int64, device="cuda" if torch.cuda.is_available() else "cpu")
        self.count_into(self._counts)

    def count_into(self, counts: Any) -> None:
        """Wrap a function of vLLM, with functools.wraps, in one that adds to *counts*."""
        raise NotImplementedError

    def in_the_engine(self, llm: LLM) -> None:
        self._observed[self.name] = [0.0, 0.0]
        generate = llm.generate

        def generated(*args: Any, **kwargs: Any) -> Any:
            answers = generate(*args, **kwargs)
            self.read()
            return answers

        llm.generate = generated

    def read(self) -> None:
        self._observed[self.name] = [float(count) for count in self._counts.tolist()]
        self._save()


class EmptyRows(CountedInGraphs):
    """Rows of length 0 with numbers that are not finite after Triton's MLA decode, and all rows of length 0."""

    name = "empty-rows"

    def count_into(self, counts: Any) -> None:
        import torch
        from vllm.v1.attention.backends.mla import triton_mla

        forward = triton_mla.TritonMLAImpl.forward_mqa

        @functools.wraps(forward)
        def counted(implementation: Any, q: Any, cache: Any, attn_metadata: Any, layer: Any) -> Any:
            output, log_sums = forward(implementation, q, cache, attn_metadata, layer)
            empty = attn_metadata.decode.seq_lens < 1
            wrong = empty & ~output.isfinite().flatten(1).all(1)
            counts.add_(torch.stack([wrong.sum(), empty.sum()]))
            return output, log_sums

        triton_mla.TritonMLAImpl.forward_mqa = counted


class PlannersInDraftGraphs(Probe):
    """Full graphs of the draft's prefill that record FlashMLA's planner kernel, and all of them."""

    name = "planners-in-draft-graphs"
    manager = "PrefillEagleCudaGraphManager"
    kernel = re.compile(r"get_mla_metadata")

    def before_the_engine(self) -> None:
        import torch

        seen = self._observed.setdefault(self.name, [0.0, 0.0])
        probe = self

        class GraphWithNodes(torch.cuda.CUDAGraph):
            """Graph whose nodes survive instantiation, at which CUDA frees them by default."""

            def __init__(self, keep_graph: bool = False) -> None:
                super().__init__(keep_graph=True)  # type: ignore[call-arg] # the compiled base class takes it

            def capture_end(self) -> None:
                super().capture_end()
                if capturing() == probe.manager:
                    seen[:] = seen[0] + any(map(probe.kernel.search, nodes_of(self))), seen[1] + 1
                    probe._save()
                self.instantiate()

        torch.cuda.CUDAGraph = GraphWithNodes  # type: ignore[misc]


def nodes_of(graph: Any) -> list[str]:
    """Return CUDA's description of each kernel node of a captured graph made with `keep_graph`.

    Raises RuntimeError if CUDA describes none.
    """
    graph.enable_debug_mode()
    with tempfile.TemporaryDirectory() as folder:
        dot = Path(folder) / "graph.dot"
        graph.debug_dump(str(dot))
        if not dot.exists():
            raise RuntimeError("CUDA did not list the nodes of a graph")
        return [line for line in dot.read_text(errors="replace").splitlines() if "kernel" in line.lower()]


def capturing() -> str | None:
    """Return the name of the class whose `capture` method is the innermost one on the stack."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "capture" and "self" in frame.f_locals:
            return type(frame.f_locals["self"]).__name__
        frame = frame.f_back
    return None


class Drafts(Probe):
    """Every draft token in the order of proposals, with the batch size before each batch."""

    name = "drafts"

    def in_the_engine(self, llm: LLM) -> None:
        seen = self._observed.setdefault(self.name, [])

        def watch(worker: Any) -> None:
            speculator = worker.model_runner.speculator
            propose = speculator.propose

            def proposed(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
                drafts = propose(input_batch, *args, **kwargs)
                seen.append(float(input_batch.num_reqs))
                seen.extend(map(float, drafts[: input_batch.num_reqs].flatten().tolist()))
                return drafts

            speculator.propose = proposed

        llm.collective_rpc(watch)


class PiecewiseDraftDecodes(Probe):
    """Draft decodes in piecewise graphs with more tokens than requests, and all draft decodes.

    In the former, attention reads entries beyond the valid ones.
    """

    name = "piecewise-draft-decodes"

    def in_the_engine(self, llm: LLM) -> None:
        seen = self._observed.setdefault(self.name, [0.0, 0.0])

        def watch(worker: Any) -> None:
            speculator = worker.model_runner.speculator
            generate = speculator.generate_draft

            def generated(num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
                mode = kwargs.get("cudagraph_runtime_mode", args[-1] if args else None)
                seen[1] += 1
                if getattr(mode, "name", "") == "PIECEWISE" and num_tokens > num_reqs:
                    seen[0] += 1
                    self._save()
                return generate(num_reqs, num_tokens, *args, **kwargs)

            speculator.generate_draft = generated

        llm.collective_rpc(watch)


class OutgrownWorkspace(Probe):
    """Grows the workspace, as a layer that needs more does, and allocates tensors in the memory that this frees.

    Observes the bytes of these tensors that a kernel overwrote, and 1 once they were checked. The engine may crash with
    an illegal memory access before.
    """

    name = "outgrown-workspace"
    PATTERN = 0xA5
    TENSORS = 8
    """Number of tensors, each as large as the old workspace, so that one of them gets its memory."""

    def __init__(self, observed: Observed, save: Callable[[], None]) -> None:
        super().__init__(observed, save)
        self._tensors: list[Any] = []

    def in_the_engine(self, llm: LLM) -> None:
        self._observed.setdefault(self.name, [0.0, 0.0])
        self._save()
        llm.collective_rpc(self._grow)

    def _grow(self, worker: Any) -> None:
        import torch
        from vllm.v1.worker.workspace import current_workspace_manager

        manager = current_workspace_manager()
        # No variable may refer to an old workspace: its memory would not be freed.
        sizes = {
            (workspace.device, workspace.nbytes) for workspace in manager._current_workspaces if workspace is not None
        }
        for device, size in sizes:
            manager.get_simultaneous(((2 * size,), torch.uint8))
            self._tensors += [torch.empty((size,), dtype=torch.uint8, device=device) for _ in range(self.TENSORS)]
        for tensor in self._tensors:
            tensor.fill_(self.PATTERN)

    def after_the_answers(self) -> None:
        if self._tensors:
            written = sum(float((tensor != self.PATTERN).sum()) for tensor in self._tensors)
            self._observed[self.name][:] = written, 1.0
            self._save()


class BlocksChangedByAnIdleStep(Probe):
    """Blocks that steps of an idle rank change, and all compared blocks, in both cases without the null block.

    The probe makes such steps between those of the engine, which makes none without data parallelism.
    """

    name = "blocks-changed-by-an-idle-step"
    every = 16
    """Steps of the engine between two idle steps."""

    def in_the_engine(self, llm: LLM) -> None:
        seen = self._observed.setdefault(self.name, [0.0, 0.0])
        engine: Any = llm.llm_engine
        step, steps = engine.step, itertools.count(1)

        def then_idle(*args: Any, **kwargs: Any) -> Any:
            outputs = step(*args, **kwargs)
            if next(steps) % self.every == 0:
                before = [[blocks.clone() for blocks in caches] for caches in llm.collective_rpc(caches_of)]
                engine.engine_core.execute_dummy_batch()
                for old, new in zip(before, llm.collective_rpc(caches_of), strict=True):
                    for was, now in zip(old, new, strict=True):
                        seen[0] += int((was != now).flatten(1).any(1).sum())
                        seen[1] += len(now)
                self._save()
            return outputs

        engine.step = then_idle


def caches_of(worker: Any) -> list[Any]:
    """Return the tensors of the worker's cache as (blocks, bytes), without block 0, the null block."""
    import torch

    runner = worker.model_runner
    total = runner.kv_cache_config.num_blocks
    caches = []
    for cache in runner.kv_caches:
        for tensor in cache if isinstance(cache, (list, tuple)) else (cache,):
            axis = next(axis for axis, size in enumerate(tensor.shape) if size and size % total == 0)
            blocks = tensor.movedim(axis, 0).reshape(total, -1).contiguous()
            caches.append(blocks.view(torch.uint8)[1:])  # as bytes, since NaN does not equal itself
    return caches


PROBES: dict[str, type[Probe]] = {
    probe.name: probe
    for probe in (
        PaddedRows,
        IndexerLengths,
        EmptyRows,
        PlannersInDraftGraphs,
        Drafts,
        PiecewiseDraftDecodes,
        OutgrownWorkspace,
        BlocksChangedByAnIdleStep,
    )
}


def probe_of(name: str) -> type[Probe]:
    """Return the class of the probe *name*: one of `PROBES`, or ``module:class`` of another module."""
    module, _, attribute = name.partition(":")
    if not attribute:
        return PROBES[name]
    probe: type[Probe] = getattr(importlib.import_module(module), attribute)
    return probe
