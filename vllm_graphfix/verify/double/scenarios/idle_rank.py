"""idle-rank (PR 39444): an idle rank runs dummy steps between its requests' steps and after the last.

Two requests decode. The rank idles for a step while they wait, after the first has ended and the second has moved into
its row, and after both have ended: a later prefix hit reads what they left in the cache. The reference is a rank that
never idles. It runs twice: a hybrid of Mamba and attention in full graphs, and attention with an Eagle drafter without
graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker import gpu_worker

from vllm_graphfix.verify.double import steps
from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.idle_runner import (
    BLOCKS,
    DRAFT,
    KEYS,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    MIXER,
    PAGE,
    PROMPT,
    REQUESTS,
    WIDTH,
    CacheStandIn,
    eagle_drafter,
    lengths_of,
    model_runner,
    prefilled_request,
    step_on_a_cpu,
    write_slots,
)
from vllm_graphfix.verify.double.unpinned import unpinned
from vllm_graphfix.verify.measurement import Measurement
from vllm_graphfix.verify.poison.rows import Room, Rows

IDLE = "a step without work"
STEPS: list[tuple[str, ...] | str] = [
    ("first", "second"),
    ("first", "second"),
    IDLE,
    ("first", "second"),
    ("second",),
    IDLE,
    ("second",),
    IDLE,  # the last request has ended, and is still in the batch
    (),
]


def run(*, trigger: bool = True) -> Measurement:
    """Idle between steps. Without *trigger*, the rank idles before its first requests, with empty buffers."""
    schedule: Sequence[tuple[str, ...] | str] = STEPS if trigger else [IDLE, IDLE, ("first", "second")]
    numbers = (
        "every cache block of 2 requests and the outputs of a Mamba hybrid and of a model with a drafter, step by step"
    )
    never_idle = [step for step in schedule if step != IDLE]
    with unpinned():
        eager = [*_serve(_Rank(), never_idle), *_serve(_DraftingRank(), never_idle)]
        with cpu_cuda_graphs():
            hybrid = _Rank()
            hybrid.capture()
            graphed = [*_serve(hybrid, schedule), *_serve(_DraftingRank(), schedule)]
    counted = {"idle-step-on-real-blocks": 2 * (len(schedule) - len(never_idle))}  # two ranks
    return Measurement(numbers, tuple(eager), tuple(graphed), counted=counted)


class _Rank:
    """A Worker with the model runner of a Mamba hybrid: its batch, buffers, metadata builders and idle step."""

    mode = CUDAGraphMode.FULL

    def __init__(self) -> None:
        self.cache = CacheStandIn()
        self.runner = model_runner(self.cache, self.groups())
        self.worker: Any = object.__new__(gpu_worker.Worker)
        self.worker.model_runner, self.worker.use_v2_model_runner = self.runner, False
        self.runner._determine_batch_execution_and_padding = self._decide
        self.computed: dict[str, int] = {}
        inputs = {"runner": self.runner, "hidden": self.cache.hidden}
        caches = self.cache.by_layer()
        self._engine = steps.Engine(self, inputs, Room(REQUESTS, MAX_TOKENS), caches, MAX_MODEL_LEN - 1, PAGE)

    def groups(self) -> list[tuple[Any, list[str], Any]]:
        state = MambaSpec(block_size=MAX_MODEL_LEN, shapes=((WIDTH,),), dtypes=(torch.float32,))
        return [(Mamba2AttentionBackend, [MIXER], state), KEYS]

    def _decide(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Choose the graph that a rank with as many requests as it takes imposes on all ranks."""
        full = self.mode == CUDAGraphMode.FULL
        tokens = REQUESTS if full else 1
        return self.mode, BatchDescriptor(num_tokens=tokens, num_reqs=tokens if full else None), False, None, None

    def begin_step(self, names: tuple[str, ...]) -> None:
        """Announce a step; blocks of ended requests count as held, for a prefix hit finds them."""
        held = {block for name in self.computed for state, keys in [BLOCKS[name]] for block in (state, *keys)}
        steps.begin_step(self._engine, Rows(len(names), len(names), self.runner.input_batch.num_reqs), held)

    def capture(self) -> None:
        """Capture a graph of a batch of the most decodes."""
        metadata = self.metadata(REQUESTS, for_cudagraph_capture=True)
        slots = self.slots(REQUESTS)[1]
        self.cache.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.cache.graph):
            self.cache.output = self.cache.layers(metadata, slots)

    def idle(self) -> None:
        with step_on_a_cpu():
            self.worker.execute_dummy_batch()

    def step(self, names: tuple[str, ...]) -> torch.Tensor:
        """Decode a token of the requests *names*, and return their outputs in that order."""
        self.update(names)
        self.begin_step(names)
        rows = len(names)
        if not rows:
            return self.cache.hidden[:0]
        places = [self.computed[name] for name in self.runner.input_batch.req_ids]
        self._prepare(places)
        order = self.runner.input_batch.req_ids
        padded = REQUESTS if self.cache.graph else rows
        slots = [
            BLOCKS[name][1][place // PAGE] * PAGE + place % PAGE for name, place in zip(order, places, strict=True)
        ]
        for table in self.runner.input_batch.block_table.block_tables:  # in place of the kernel that computes them
            table.slot_mapping.gpu[:rows] = torch.tensor(slots)
            table.slot_mapping.gpu[rows:] = -1
        _, by_layer = self.slots(padded, rows)
        outputs = self._forward(rows, padded, by_layer)
        for name in names:
            self.computed[name] += 1
        return outputs[[order.index(name) for name in names]]

    def _forward(self, rows: int, padded: int, by_layer: Any) -> torch.Tensor:
        metadata = self.metadata(rows, padded)
        if self.cache.graph:
            self.cache.graph.replay()
            return self.cache.output
        return self.cache.layers(metadata, by_layer)

    def _prepare(self, places: list[int]) -> None:
        """Fill the persistent lengths as `_prepare_inputs` does, rows beyond the batch included."""
        runner, rows = self.runner, len(places)
        runner.query_start_loc.np[1 : rows + 1] = np.arange(1, rows + 1)
        runner.query_start_loc.np[rows + 1 :] = rows
        runner.query_start_loc.copy_to_gpu()
        for lengths in lengths_of(runner):
            lengths.zero_()[:rows] = torch.tensor(places) + 1
        runner.input_batch.block_table.commit_block_table(rows)

    def update(self, names: tuple[str, ...]) -> None:
        """Update the batch as `_update_states` does; prompts are in the cache, as if an earlier step had run them."""
        batch = self.runner.input_batch
        for name in [n for n in batch.req_ids if n not in names]:
            batch.remove_request(name)
        for name in names:
            if name not in self.computed:
                self.computed[name] = PROMPT
                batch.add_request(prefilled_request(name, len(batch.block_table.block_tables)))
        batch.condense()
        batch.refresh_metadata()
        for name, row in batch.req_id_to_index.items():
            batch.num_computed_tokens_cpu[row] = self.computed[name]

    def metadata(self, rows: int, padded: int | None = None, **capture: bool) -> Any:
        build = self.runner._build_attention_metadata
        padded = padded or rows
        values = {
            "num_tokens": rows,
            "num_reqs": rows,
            "max_query_len": 1,
            "num_tokens_padded": padded,
            "num_reqs_padded": padded,
            "slot_mappings": self.slots(padded, rows)[0],
            **capture,
        }
        with step_on_a_cpu():
            return build(**supported_kwargs(build, values))[0]

    def slots(self, padded: int, rows: int | None = None) -> Any:
        """Return the slot mappings by group and by layer; 0.14.1 has them in the metadata alone."""
        get = getattr(self.runner, "_get_slot_mappings", None)
        return get(padded, padded, padded if rows is None else rows) if get else (None, None)


class _DraftingRank(_Rank):
    """`_Rank` with attention and an Eagle drafter, without graphs."""

    mode = CUDAGraphMode.NONE

    def __init__(self) -> None:
        super().__init__()
        self.runner.drafter = eagle_drafter(self.cache, self.runner.vllm_config)
        self.runner.speculative_config = SimpleNamespace(
            use_eagle=lambda: True,
            uses_draft_model=lambda: False,
            uses_extract_hidden_states=lambda: False,
            enforce_eager=False,
        )

    def groups(self) -> list[tuple[Any, list[str], Any]]:
        backend, layers, spec = KEYS
        return [(backend, [*layers, DRAFT], spec)]

    def _forward(self, rows: int, padded: int, by_layer: Any) -> torch.Tensor:
        drafter, slots = self.runner.drafter, self.runner.input_batch.block_table[0].slot_mapping.gpu[:rows]
        outputs = self.cache.layers(None, by_layer) if by_layer else self.cache.hidden[:rows].clone()
        if by_layer is None:  # 0.14.1
            write_slots(self.cache.keys, slots, self.cache.hidden)
        own = drafter._get_slot_mapping(rows, slots)[DRAFT] if hasattr(drafter, "_get_slot_mapping") else slots
        write_slots(self.cache.drafts, own, self.cache.hidden)
        return outputs


def _serve(rank: _Rank, schedule: Sequence[tuple[str, ...] | str]) -> list[float]:
    """Return the outputs of each step that has requests, and the cache after it."""
    random = torch.Generator().manual_seed(0)
    numbers: list[float] = []
    for step in schedule:
        if step == IDLE:
            rank.begin_step(())
            # The inputs of a dummy step are of no request: data parallelism randomizes them.
            rank.cache.hidden.fill_(7.0)
            rank.idle()
            steps.end_step()
            continue
        rank.cache.hidden.copy_(torch.randn(MAX_TOKENS, WIDTH, generator=random))
        numbers += map(float, rank.step(tuple(step)).flatten())
        numbers += map(float, rank.cache.blocks())
        steps.end_step()
    return numbers
