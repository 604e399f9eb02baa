"""`dcp-context-lens`: with decode context parallelism, FlashAttention's graphs read a rank's context lengths of their own batch (PR 36070)."""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Diagnosis, Event, Fallback, Fix, Mode, Patch, StockFunction, Verdict

if TYPE_CHECKING:
    from contextlib import ExitStack

    import torch

    from vllm_graphfix.deployment import Answer, Deployment, Fact
    from vllm_graphfix.source import Source
    from vllm_graphfix.syntax import Function
    from vllm_graphfix.trial import Trial
    from vllm_graphfix.verify.measurement import Measurement

_BACKEND = "vllm/v1/attention/backends/flash_attn.py"
_BACKEND_MODULE = "vllm.v1.attention.backends.flash_attn"
_BUILDER = "FlashAttentionMetadataBuilder"
_TARGET = f"{_BUILDER}.build"
_LENGTHS = "dcp_context_kv_lens"
_MENTIONS = {2: 4, 3: 6}
"""How often the lengths are named where they are assigned so many times: nothing else is done with them."""
_KEPT = "_graphfix_dcp_context_kv_lens"
"""The attribute of a builder that holds its persistent lengths."""

LENGTHS_OF_ANOTHER_BATCH = Event(
    "lengths-of-another-batch",
    "A batch as small as a graph came to FlashAttention with decode context parallelism: on stock a full graph attends to as much context as its "
    "capture had, or as the reused memory says.",
)
FALLBACK = Fallback()

_FLAG = "--decode-context-parallel-size"
_FLASH_ATTENTION_FIRST = (8, 9, 12)
"""Compute capabilities on which vLLM tries FlashAttention first."""


def diagnose(source: Source) -> Diagnosis:
    if not source.says(_BACKEND, _LENGTHS):
        return Diagnosis(Verdict.ABSENT, "FlashAttention has no lengths of a rank's share of the context")
    build, init = source.function(_BACKEND, _TARGET), source.function(_BACKEND, f"{_BUILDER}.__init__")
    if build is not None and init is not None and _gives_what_it_assigns(build):
        *_, assigned = build.assignments(_LENGTHS, "...")
        if _are_kept(build, assigned):
            return Diagnosis(Verdict.FIXED, "a rank's context lengths are in a persistent buffer", build.at(assigned))
        read = source.function(_BACKEND, "FlashAttentionImpl._forward_with_dcp")
        made, returned = build.only("attn_metadata = FlashAttentionMetadata(...)"), build.only("return attn_metadata")
        if (
            assigned in build.assignments(_LENGTHS, "get_dcp_local_seq_lens(...)")
            and build.takes == "self, common_prefix_len, common_attn_metadata, fast_build"
            and made
            and returned
            and build.in_one_block(made, returned, at_once=True)
            and build.mentions(attn_metadata=2)
            and read is not None
            and read.only(f"attn_metadata.{_LENGTHS}")
            and init.only("self.dcp_world_size = get_dcp_group().world_size")
            and init.only("self.use_full_cuda_graph = self.compilation_config.cudagraph_mode.has_full_cudagraphs()")
            and init.only("self.max_cudagraph_size = self.compilation_config.max_cudagraph_capture_size")
        ):
            return Diagnosis(
                Verdict.AFFECTED,
                "a rank's context lengths are a new tensor in each step, and a graph reads that of its capture",
                build.at(assigned),
                "new-lengths",
            )
    return Diagnosis(
        Verdict.UNRECOGNISED,
        "a rank's context lengths are made in a way that nobody has looked at",
        build.where if build else f"{_BACKEND}:1",
    )


def _gives_what_it_assigns(build: Function) -> bool:
    """Whether the metadata have the lengths that are assigned last, and nothing else is done with these but to schedule by them."""
    assigned = build.assignments(_LENGTHS, "...")
    return (
        len(assigned) in _MENTIONS
        and build.mentions(**{_LENGTHS: _MENTIONS[len(assigned)]})
        and build.gives("FlashAttentionMetadata(...)", f"{_LENGTHS}={_LENGTHS}")
    )


def _are_kept(build: Function, assigned: ast.Assign) -> bool:
    """Whether the lengths are the first rows of an attribute of the builder, which are written before, in the same block."""
    kept = assigned.value
    if not (isinstance(kept, ast.Subscript) and isinstance(kept.value, ast.Attribute)):
        return False
    rows = f"{ast.unparse(kept.value)}[:num_reqs]"
    written = [part for form in (f"{rows} = ...", f"{rows}.copy_(...)") for part in build.find(form)]
    return rows.startswith("self.") and ast.unparse(kept) == rows and build.in_one_block(*written[-1:], assigned)


def _own_lengths(stock: StockFunction) -> StockFunction:
    """Around `build`: the metadata's context lengths of this rank, (requests,) int32, are in a buffer of the builder.

    Copied on the device, to the address that graphs recorded, and 0 in the rows behind: a graph for any kind of batch has as many rows as requests
    at its capture. The schedule of FlashAttention 3 was made of the same lengths, and is in a buffer of vLLM's.
    """

    @functools.wraps(stock)
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = stock(self, *args, **kwargs)
        try:
            if self.dcp_world_size > 1 and self.use_full_cuda_graph:
                lengths = metadata.dcp_context_kv_lens
                kept, rows = _kept(self, lengths), lengths.shape[0]
                kept[:rows].copy_(lengths)
                kept[rows:].zero_()
                metadata.dcp_context_kv_lens = kept[:rows]
                if metadata.num_actual_tokens <= self.max_cudagraph_size:
                    LENGTHS_OF_ANOTHER_BATCH.count += 1
        except Exception as error:
            FALLBACK.take(error)
        return metadata

    return build


def _kept(builder: Any, lengths: torch.Tensor) -> torch.Tensor:
    """The builder's buffer, for as many requests as a batch may have; made with its first metadata, which no graph is captured before."""
    kept: torch.Tensor | None = getattr(builder, _KEPT, None)
    if kept is None:
        from torch import inference_mode

        with inference_mode(False):  # a tensor that is made in it can be written nowhere else
            kept = lengths.new_zeros(builder.vllm_config.scheduler_config.max_num_seqs)
        setattr(builder, _KEPT, kept)
    return kept


def _watch_lengths(stock: StockFunction) -> StockFunction:
    """Around the same."""

    @functools.wraps(stock)
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = stock(self, *args, **kwargs)
        try:
            if (
                self.dcp_world_size > 1
                and self.use_full_cuda_graph
                and metadata.num_actual_tokens <= self.max_cudagraph_size
            ):
                LENGTHS_OF_ANOTHER_BATCH.count += 1
        except Exception as error:
            FALLBACK.take(error)
        return metadata

    return build


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_BACKEND_MODULE, _TARGET, _own_lengths),)


def observers(shape: str) -> tuple[Patch, ...]:
    return (Patch(_BACKEND_MODULE, _TARGET, _watch_lengths),)


def applies(deployment: Deployment, shape: str) -> Answer:
    from vllm_graphfix.deployment import all_of

    return all_of(_shares_the_context(deployment), deployment.full_graphs(), _on_flash_attention(deployment))


def _shares_the_context(deployment: Deployment) -> Fact:
    """There are several ranks of decode context parallelism."""
    from vllm_graphfix.deployment import Fact

    value, missing = deployment.value(_FLAG)
    if missing is not None:
        return Fact(None, missing)
    if value is None or not value.isdecimal():
        return Fact(None if value else False, f"a number for {_FLAG}" if value else f"{_FLAG} is not given")
    return Fact(int(value) > 1, f"{_FLAG} {int(value)}")


def _on_flash_attention(deployment: Deployment) -> Fact:
    """Attention that is not latent runs on FlashAttention."""
    from vllm_graphfix.deployment import Fact

    logged = "the attention backend that vLLM logs when it starts, or --attention-backend"
    mla = deployment.mla()
    if mla.holds is not False:
        return Fact(mla.holds and False, mla.told)
    asked, missing = deployment.value("--attention-backend")
    config, unsure = deployment.value("--attention-config")
    if missing or unsure or config is not None:
        return Fact(None, missing or unsure or logged)
    if asked is not None and asked.lower() != "auto":
        return Fact(asked.upper() == "FLASH_ATTN", f"--attention-backend is {asked.upper()[:40]!r}")
    _, capability = deployment.gpu
    # On datacenter Blackwell FlashInfer comes first, and FlashAttention 2 has no fp8.
    if capability not in _FLASH_ATTENTION_FIRST or deployment.fp8_cache().holds is not False:
        return Fact(None, logged)
    return Fact(True, "vLLM takes FlashAttention for it on this GPU")


FIX = Fix(
    number=15,
    name="dcp-context-lens",
    pr=36070,
    references=(),
    summary="with decode context parallelism, graphs read the context lengths of their own batch",
    releases="0.14.1 - 0.19.1",
    symptom="With --decode-context-parallel-size above 1 and full CUDA graphs, models on FlashAttention answer with text that has nothing to do with "
    "the prompt, as if they had read none or a part of it.",
    cause="How many tokens of each request's context are on this rank is computed in every step, into a new tensor. A full graph reads the "
    "tensor of its capture, which was freed since: the context lengths of the capture's dummy batch, or whatever lies in that memory.",
    remedy="The lengths are copied into a buffer that each builder of metadata keeps, whose address the graph recorded. Rows behind the batch are 0.",
    detect="Wrong answers with --decode-context-parallel-size, and right ones with --enforce-eager or without that flag.",
    concerns="Models without latent attention (MLA) on FlashAttention, --decode-context-parallel-size above 1 (which needs more tensor-parallel ranks than "
    "KV heads), a cudagraph mode with FULL. Both model runners.",
    workaround='--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', or --enforce-eager.',
    removable="with vLLM 0.20.0",
    runner=None,
    reads=(_BACKEND,),
    modules=(_BACKEND_MODULE,),
    diagnose=diagnose,
    patches=patches,
    observers=observers,
    events=(LENGTHS_OF_ANOTHER_BATCH,),
    fallback=FALLBACK,
    default=Mode.OBSERVE,
    applies=applies,
    trial=lambda: trial(),  # noqa: PLW0108 - it stands below
)


def trial() -> Trial:
    from vllm_graphfix.deployment import Concern
    from vllm_graphfix.trial import Edit, Served, Trial

    new = r"^( +)dcp_context_kv_lens = get_dcp_local_seq_lens\(\n((?:.+\n)+?)\1\)\n"
    kept = r"^( +)local_context_kv_lens = get_dcp_local_seq_lens\(\n((?:.+\n)+?)\1\)\n(?:.+_dcp_context_kv_lens.+\n){3}"
    return Trial(
        scenario,
        edits=(
            Edit(
                "lengths in a buffer of the builder",
                "0.19.1",
                _BACKEND,
                new,
                r"\1of_this_rank = get_dcp_local_seq_lens(\n\2\1)\n\1self.of_this_rank[:num_reqs] = of_this_rank\n"
                r"\1self.of_this_rank[num_reqs:] = 0\n\1dcp_context_kv_lens = self.of_this_rank[:num_reqs]\n",
                Verdict.FIXED,
            ),
            Edit(
                "lengths copied into a buffer of the builder",
                "0.14.1",
                _BACKEND,
                new,
                r"\1self.kept[:num_reqs].copy_(get_dcp_local_seq_lens(\n\2\1))\n\1dcp_context_kv_lens = self.kept[:num_reqs]\n",
                Verdict.FIXED,
            ),
            Edit(
                "rows of a buffer that nobody writes",
                "0.19.1",
                _BACKEND,
                new,
                r"\1dcp_context_kv_lens = self.kept[:num_reqs]\n",
                Verdict.UNRECOGNISED,
            ),
            Edit(
                "lengths that are changed once they are known",
                "0.16.0",
                _BACKEND,
                new,
                r"\g<0>\1dcp_context_kv_lens.clamp_(min=1)\n",
                Verdict.UNRECOGNISED,
            ),
            Edit(
                "metadata that are changed before they are returned",
                "0.18.1",
                _BACKEND,
                r"^( +)return attn_metadata\n\n    def update",
                r"\1attn_metadata.dcp_context_kv_lens = None\n\g<0>",
                Verdict.UNRECOGNISED,
            ),
            Edit(
                "without the buffer",
                "0.20.0",
                _BACKEND,
                kept,
                r"\1dcp_context_kv_lens = get_dcp_local_seq_lens(\n\2\1)\n",
                Verdict.AFFECTED,
            ),
        ),
        served=(
            Served(
                "0.18.1", "./llama -tp 16 -dcp 2", Concern.CONCERNS, "--decode-context-parallel-size 2", "NVIDIA H100"
            ),
            Served(
                "0.14.1",
                "./llama -tp 16 --decode-context-parallel-size=2 --attention-backend flash_attn",
                Concern.CONCERNS,
                "FLASH_ATTN",
            ),
            Served("0.18.1", "./llama -tp 16", Concern.DOES_NOT, "--decode-context-parallel-size is not given"),
            Served("0.18.1", "./llama -tp 16 -dcp 1", Concern.DOES_NOT, "--decode-context-parallel-size 1"),
            Served(
                "0.18.1", "./llama -tp 16 -dcp 2 --enforce-eager", Concern.DOES_NOT, "--enforce-eager", "NVIDIA H100"
            ),
            Served("0.18.1", "./v3 -tp 16 -dcp 2", Concern.DOES_NOT, "latent attention", "NVIDIA H100"),
            Served("0.18.1", "./llama -tp 16 -dcp 2 --attention-backend FLASHINFER", Concern.DOES_NOT, "FLASHINFER"),
            Served("0.18.1", "./llama -tp 16 -dcp 2", Concern.UNKNOWN, "attention backend", "NVIDIA B200"),
            Served("0.18.1", "./llama -tp 16 -dcp 2 -ac.backend=FLASH_ATTN", Concern.UNKNOWN, "attention backend"),
            Served("0.18.1", "./llama -tp 16 -dcp two", Concern.UNKNOWN, "a number", "NVIDIA H100"),
        ),
    )


CAPTURED = 4
HEADS, WIDTH = 2, 8
BLOCKS, BLOCK_SIZE = 8, 4
LAYER = "model.layers.0.self_attn.attn"
STEPS = [[9 + step, 23 + step, 14 + step] for step in range(3)]
"""Lengths of the requests, step by step, of which one token is decoded."""


def scenario(*, hit: bool = True) -> Measurement:
    """One of two ranks that share the context decodes three requests in a graph for four. Not *hit*: it has the context to itself."""
    from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
    from vllm_graphfix.verify.measurement import Measurement

    ranks = 2 if hit else 1
    eager = _decode(ranks, captured=False)
    with cpu_cuda_graphs():
        graphed = _decode(ranks, captured=True)
    return Measurement(
        f"attention of 3 requests padded to 4 over {len(STEPS)} decode steps, on one of {ranks} ranks that share the context",
        tuple(eager),
        tuple(graphed),
    )


def _decode(ranks: int, *, captured: bool) -> list[float]:
    """The attention of each step's tokens, by vLLM's own metadata builder and layer."""
    from contextlib import ExitStack

    import torch
    from vllm.v1.attention.backends import flash_attn

    with ExitStack() as stack:
        _stand_in(ranks, stack)
        random = torch.Generator().manual_seed(0)
        cache = torch.randn(2, CAPTURED * BLOCKS, BLOCK_SIZE, 1, WIDTH, generator=random)
        query, key, value = torch.zeros(CAPTURED, HEADS, WIDTH), *torch.zeros(2, CAPTURED, 1, WIDTH)
        builder, rows = _builder(captured), _Rows()
        layer: Any = torch.nn.Module()
        layer._q_scale = layer._k_scale = layer._v_scale = torch.ones(())
        attention: Any = flash_attn.FlashAttentionImpl(HEADS, WIDTH, 0.5, 1, None, None, "auto")
        attention.vllm_flash_attn_version = 2

        def attend(metadata: Any) -> torch.Tensor:
            output = torch.zeros(CAPTURED, HEADS, WIDTH)
            attention.forward(layer, query, key, value, cache, metadata, output)
            return output

        if captured:
            metadata = builder.build(0, rows.batch([1] * CAPTURED, CAPTURED))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = attend(metadata)
        numbers: list[float] = []
        for lengths in STEPS:
            requests = len(lengths)
            for tensor in (query, key, value):
                tensor[:requests] = torch.randn(requests, *tensor.shape[1:], generator=random)
            metadata = builder.build(0, rows.batch(lengths, CAPTURED if captured else requests))
            if captured:
                graph.replay()
            else:
                output = attend(metadata)
            numbers += output[:requests].flatten().tolist()
        return numbers


def _stand_in(ranks: int, stack: ExitStack) -> None:
    """For the group of ranks and for kernels that have no CPU form, until *stack* ends."""
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from vllm.distributed import parallel_state
    from vllm.v1.attention.backends import flash_attn

    def gathered(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([tensor] * ranks, dim)  # the other rank's heads ask for the same

    def combined(output: torch.Tensor, lse: torch.Tensor, group: Any, return_lse: bool) -> Any:
        return output[:, :HEADS], lse[:, :HEADS]  # the other rank has nothing of the context

    def merged(output: Any, first: Any, first_lse: Any, second: Any, second_lse: Any) -> None:
        share = torch.sigmoid(first_lse - second_lse).T.unsqueeze(-1)
        output.copy_(share * first + (1 - share) * second)

    def varlen(**given: Any) -> Any:
        starts, table = given["cu_seqlens_q"], given.get("block_table")
        lengths = given["seqused_k"] if table is not None else starts.diff()
        if table is None:  # keys of the step's own tokens: a block of one for each request
            table = torch.arange(len(lengths), dtype=torch.int32).unsqueeze(1)
            given["k"], given["v"] = given["k"].unsqueeze(1), given["v"].unsqueeze(1)
        attend, _ = _attention_stand_in()
        found = attend(given["q"], given["k"], given["v"], starts, lengths, table, given["softmax_scale"])
        return found if given["out"] is None else given["out"].copy_(found[0])

    group = SimpleNamespace(world_size=ranks, rank_in_group=0, all_gather=gathered)
    stack.enter_context(mock.patch.object(parallel_state, "_DCP", group))
    names = {
        "cp_lse_ag_out_rs": combined,
        "merge_attn_states": merged,
        "flash_attn_varlen_func": varlen,
        "reshape_and_cache_flash": lambda *_: None,  # the cache is full as it is
    }
    for name, function in names.items():
        stack.enter_context(mock.patch.object(flash_attn, name, function, create=True))


@functools.cache
def _attention_stand_in() -> tuple[Any, object]:
    """One query token a request, attending to as many tokens of its blocks as *lengths* says: an operation, whose lengths no capture reads."""
    import torch

    library = torch.library.Library("vllm_graphfix_dcp", "FRAGMENT")
    library.define(
        "attend(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor lengths, Tensor table, float scale) -> (Tensor, Tensor)"
    )

    def attend(q: Any, k: Any, v: Any, starts: Any, lengths: Any, table: Any, scale: float) -> Any:
        out, lse = torch.zeros_like(q), torch.full(q.shape[1::-1], -torch.inf)
        for row, length in enumerate(lengths.tolist()):
            if length < 1 or starts[row] == starts[row + 1]:
                continue
            token = int(starts[row])
            keys, values = (cache[table[row].long()].flatten(0, 1)[:length, 0] for cache in (k, v))
            scores = q[token] @ keys.T * scale
            lse[:, token] = scores.logsumexp(-1)
            out[token] = scores.softmax(-1) @ values
        return out, lse

    library.impl("attend", attend, "CPU")
    library.impl("attend", lambda q, *_: (torch.empty_like(q), q.new_empty(q.shape[1::-1])), "Meta")
    return torch.ops.vllm_graphfix_dcp.attend, library  # without which it is gone


def _builder(captured: bool) -> Any:
    """vLLM's own, with a configuration of what it reads."""
    from types import SimpleNamespace

    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backends import flash_attn
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    mode = CUDAGraphMode.FULL if captured else CUDAGraphMode.NONE
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda parallel: HEADS,
            get_num_kv_heads=lambda parallel: 1,
            get_head_size=lambda: WIDTH,
        ),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=CAPTURED),
        scheduler_config=SimpleNamespace(max_num_seqs=CAPTURED),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=1),
    )
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=WIDTH, dtype=torch.float32)
    return flash_attn.FlashAttentionMetadataBuilder(spec, [LAYER], config, torch.device("cpu"))


class _Rows:
    """The persistent tensors of a model runner, and a batch of decodes in them, padded as both model runners do it."""

    def __init__(self) -> None:
        import torch

        self.lengths = torch.zeros(CAPTURED, dtype=torch.int32)
        self.starts = torch.zeros(CAPTURED + 1, dtype=torch.int32)
        self.table = torch.arange(CAPTURED * BLOCKS, dtype=torch.int32).view(CAPTURED, BLOCKS)

    def batch(self, lengths: list[int], rows: int) -> Any:
        from dataclasses import fields

        import torch
        from vllm.v1.attention.backend import CommonAttentionMetadata

        requests = len(lengths)
        self.lengths[:requests], self.lengths[requests:] = torch.tensor(lengths), 0
        self.starts[:] = torch.arange(CAPTURED + 1).clamp(max=requests)
        given = {
            "query_start_loc": self.starts[: rows + 1],
            "query_start_loc_cpu": self.starts[: rows + 1].clone(),
            "seq_lens": self.lengths[:rows],
            "num_reqs": rows,
            "num_actual_tokens": rows,
            "max_query_len": 1,
            "max_seq_len": BLOCKS * BLOCK_SIZE,
            "block_table_tensor": self.table[:rows],
            "slot_mapping": torch.zeros(rows, dtype=torch.int64),
        }
        known = {field.name for field in fields(CommonAttentionMetadata)}
        return CommonAttentionMetadata(**{name: value for name, value in given.items() if name in known})
