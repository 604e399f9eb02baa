"""What the fixes that stay on the path of a decode step add to each call, against the stock function in the same process.

    python benchmarks/hot_path.py [--rounds N]

"alone" puts the fix around a function of the same signature that does nothing, so that nothing but the fix is measured;
"real" puts it around vLLM's own. "observed" is what stands in its place in mode observe, which counts and changes nothing.
Tensors are the CPU's: a copy or fill costs another time on a GPU, and the same Python.
The other fixes act while graphs are captured and are not called afterwards.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from measuring import Times, console, environment, interleaved, machine, run, table, verdict

from vllm_graphfix.fix import Event

import fetch_vllm  # isort: skip - measuring has put tools/ on the path

Function = Callable[..., Any]

TARGET = 5.0
"""Microseconds of Python a call, or of all calls of a step where a fix has several."""
COUNTER_TARGET = 0.2
"""Microseconds, of counting one event."""
RELEASES = {
    "mamba": "0.21.0",
    "flashmla": "0.18.1",
    "dispatch": "0.21.0",
    "dispatch-v2": "0.27.1",
    "indexer": "0.27.1",
    "triton-mla": "0.25.1",
    "workspace": "0.21.0",
    "prompt-logprobs": "0.21.0",
}
REQUESTS, PADDED_REQUESTS = 200, 256
"""Of a batch with padding; one without has as many requests as rows."""
CALLS = {"alone": 200, "real": 20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400, metavar="N", help="of calls of each function (default: 400)")
    parser.add_argument("--measure", choices=RELEASES, help=argparse.SUPPRESS)  # in the process that has this vLLM
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(MEASURE[options.measure](options.rounds)))
        return
    made = table(
        f"microseconds a call, {options.rounds} interleaved rounds; difference of the minima, and of the medians",
        *("fix, batch", "around", "stock min", "with fix min", "fix adds", "by median", "ratio", "target"),
        *("observed adds", "by median"),
    )
    for name, version in RELEASES.items():
        env = environment(fetch_vllm.release(version), OMP_NUM_THREADS="1", VLLM_GRAPHFIX="off")
        lines = run([__file__, "--measure", name, "--rounds", str(options.rounds)], env).output.splitlines()
        for batch, around, stock, fixed, observed, watched, has_target in json.loads(lines[-1]):
            before, after = Times(*stock), Times(*fixed)
            unobserved, seen = Times(*observed), Times(*watched)
            added = after.minimum - before.minimum
            made.add_row(
                batch,
                around,
                f"{before.minimum:.2f}",
                f"{after.minimum:.2f}",
                f"{added:+.2f}",
                f"{after.median - before.median:+.2f}",
                "" if around == "alone" else f"{after.minimum / before.minimum:.3f}",
                verdict(added, TARGET, "µs") if has_target and around == "alone" else "",
                f"{seen.minimum - unobserved.minimum:+.2f}",
                f"{seen.median - unobserved.median:+.2f}",
            )
        made.add_section()
    out = console()
    out.print(machine(), highlight=False)
    out.print(made)
    counted = _counter(options.rounds)
    out.print(
        f"counting an event: {counted.minimum:.3f} µs, median {counted.median:.3f} ({verdict(counted.minimum, COUNTER_TARGET, 'µs')})",
        highlight=False,
    )
    versions = ", ".join(f"{version} ({name})" for name, version in RELEASES.items())
    out.print(
        f"{REQUESTS} requests in {PADDED_REQUESTS} rows, or {PADDED_REQUESTS} requests; vLLM {versions}. For flashmla-fp8, "
        "stock is stock plus the two slice copies of the upstream fix; for padded rows of flashmla-padding, plus two slice fills.",
        highlight=False,
    )


class Calls(NamedTuple):
    """What is compared: the least that puts right, with the fix; stock on the same batch, and observed."""

    stock: Function
    fixed: Function
    unobserved: Function
    observed: Function


def _compared(label: str, around: str, calls: Calls, rounds: int, *, target: bool) -> tuple[object, ...]:
    times = interleaved(calls._asdict(), calls=CALLS[around], rounds=rounds)
    return label, around, *(times[name] for name in Calls._fields), target


def _counter(rounds: int) -> Times:
    """Of a loop that counts, less the loop."""
    event = Event("counted", "One call.")

    def counts() -> None:
        for _ in range(1000):
            event.count += 1

    def loops() -> None:
        for _ in range(1000):
            pass

    times = interleaved({"counts": counts, "loops": loops}, calls=1, rounds=rounds)
    return Times(*(1e-3 * (a - b) for a, b in zip(times["counts"], times["loops"], strict=True)))


# mamba-padding


def mamba(rounds: int) -> list[tuple[object, ...]]:
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
    from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import MambaSpec
    from vllm.v1.worker.utils import AttentionGroup

    from vllm_graphfix.fixes.mamba_padding import FIX

    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=4096, get_mamba_chunk_size=lambda: 256),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        scheduler_config=SimpleNamespace(max_num_seqs=PADDED_REQUESTS),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL, max_cudagraph_capture_size=PADDED_REQUESTS
        ),
        speculative_config=None,
        num_speculative_tokens=0,
    )
    spec = MambaSpec(block_size=4096, shapes=((2,),), dtypes=(torch.float32,))
    group = AttentionGroup(Mamba2AttentionBackend, ["layer"], spec, 0)
    group.create_metadata_builders(config, torch.device("cpu"))
    builder = group.get_metadata_builder()

    def batch(requests: int, *, stale_row: bool) -> Any:
        starts = torch.arange(PADDED_REQUESTS + 1, dtype=torch.int32).clamp(max=requests)
        is_prefilling = torch.zeros(PADDED_REQUESTS, dtype=torch.bool)
        is_prefilling[-1] = stale_row
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=(torch.arange(PADDED_REQUESTS) < requests).int() * 100,
            num_reqs=PADDED_REQUESTS,
            num_actual_tokens=requests,
            max_query_len=1,
            max_seq_len=100,
            block_table_tensor=torch.zeros(PADDED_REQUESTS, 1, dtype=torch.int32),
            slot_mapping=torch.zeros(PADDED_REQUESTS, dtype=torch.int64),
            is_prefilling=is_prefilling,
        )

    def does_nothing(self: Any, common_attn_metadata: Any, *, num_accepted_tokens: Any = None) -> None: ...

    stale = "mamba-padding, padding that reads as prefilling"
    right = batch(REQUESTS, stale_row=False)
    batches = {
        "mamba-padding, no padding": batch(PADDED_REQUESTS, stale_row=False),
        "mamba-padding, no padding, a request that is prefilling": batch(PADDED_REQUESTS, stale_row=True),
        "mamba-padding, padding that does not read as prefilling": right,
        stale: batch(REQUESTS, stale_row=True),
    }
    (patch,), (watch,) = FIX.patches("prefilling-over-padding"), FIX.observers("prefilling-over-padding")
    real = BaseMambaAttentionMetadataBuilder._compute_common_metadata
    found = []
    for around, stock in (("alone", does_nothing), ("real", real)):
        fixed, observed = patch.wrap(stock), watch.wrap(stock)
        for label, metadata in batches.items():
            if around == "real" and metadata.is_prefilling.any() and label != stale:
                continue  # what a prefill adds needs pinned memory, and would hide the fix
            # Of stale padding stock makes a prefill, which takes longer: the decode that it is is the stricter measure.
            # Observed it is a prefill, and around vLLM's own function not measured for the same reason.
            seen = right if label == stale and around == "real" else metadata
            calls = Calls(
                _call(stock, builder, right if label == stale else metadata),
                _call(fixed, builder, metadata),
                _call(stock, builder, seen),
                _call(observed, builder, seen),
            )
            found.append(_compared(label, around, calls, rounds, target=True))
    return found


# FlashMLA


def flashmla(rounds: int) -> list[tuple[object, ...]]:
    import torch

    from vllm_graphfix.verify.double.flashmla import PLAN_WIDTH, install_flashmla_stand_ins

    install_flashmla_stand_ins()
    from vllm.v1.attention.backends.mla import flashmla as flashmla_backend

    from vllm_graphfix.fixes import flashmla_fp8, flashmla_padding

    real = flashmla_backend.FlashMLAMetadataBuilder._build_decode
    parts = 132
    """Of the plan on an H200, which has as many multiprocessors."""
    builder = object.__new__(flashmla_backend.FlashMLAMetadataBuilder)
    builder.__dict__.update(
        is_fp8_kvcache=True,
        num_q_heads=16,
        cg_buf_tile_scheduler_metadata=torch.zeros(parts, PLAN_WIDTH, dtype=torch.int32),
        cg_buf_num_splits=torch.empty(PADDED_REQUESTS + 1, dtype=torch.int32),
    )
    plan, splits = (
        torch.zeros(parts, PLAN_WIDTH, dtype=torch.int32),
        torch.zeros(PADDED_REQUESTS + 1, dtype=torch.int32),
    )
    # The planner is a kernel; here it costs nothing, so that what is left is Python.
    flashmla_backend.get_mla_metadata_dense_fp8 = lambda *_: (plan, splits)
    metadata = SimpleNamespace(scheduler_metadata=SimpleNamespace())

    def hands_out_a_plan(
        self: Any,
        block_table_tensor: Any,
        seq_lens_device: Any,
        max_seq_len: Any,
        query_start_loc_cpu: Any,
        query_start_loc_device: Any,
        num_decode_tokens: Any,
        dcp_tot_seq_lens_device: Any,
    ) -> Any:
        metadata.scheduler_metadata.tile_scheduler_metadata = plan
        metadata.scheduler_metadata.num_splits = splits
        return metadata

    def hands_out_a_persistent_plan(
        self: Any,
        block_table_tensor: Any,
        seq_lens_device: Any,
        max_seq_len: Any,
        query_start_loc_cpu: Any,
        query_start_loc_device: Any,
        num_decode_tokens: Any,
        dcp_tot_seq_lens_device: Any,
    ) -> Any:
        tiles = self.cg_buf_tile_scheduler_metadata[:parts].copy_(plan)
        metadata.scheduler_metadata.tile_scheduler_metadata = tiles
        metadata.scheduler_metadata.num_splits = self.cg_buf_num_splits[: PADDED_REQUESTS + 1].copy_(splits)
        return metadata

    def with_two_fills(stock: Function) -> Function:
        """What any remedy on this path must write, at the least."""

        def _build_decode(self: Any, block_table_tensor: Any, seq_lens_device: Any, **keywords: Any) -> Any:
            block_table_tensor[REQUESTS:].fill_(0)
            seq_lens_device[REQUESTS:].fill_(1)
            return stock(self, block_table_tensor, seq_lens_device, **keywords)

        return _build_decode

    def real_with_two_copies(self: Any, **keywords: Any) -> Any:
        made = real(self, **keywords)
        scheduler = made.scheduler_metadata
        tiles = scheduler.tile_scheduler_metadata
        scheduler.tile_scheduler_metadata = self.cg_buf_tile_scheduler_metadata[:parts].copy_(tiles)
        scheduler.num_splits = self.cg_buf_num_splits[: PADDED_REQUESTS + 1].copy_(scheduler.num_splits)
        return made

    def arguments(requests: int) -> dict[str, Any]:
        starts = torch.arange(PADDED_REQUESTS + 1, dtype=torch.int32).clamp(max=requests)
        return {
            "block_table_tensor": torch.zeros(PADDED_REQUESTS, 64, dtype=torch.int32),
            "seq_lens_device": torch.full((PADDED_REQUESTS,), 100, dtype=torch.int32),
            "max_seq_len": 100,
            "query_start_loc_cpu": starts,
            "query_start_loc_device": starts,
            "num_decode_tokens": requests,
            "dcp_tot_seq_lens_device": None,
        }

    (persistent,), (padding,) = flashmla_fp8.FIX.patches("new-plan"), flashmla_padding.FIX.patches("minus-one")
    (plans,), (rows,) = flashmla_fp8.FIX.observers("new-plan"), flashmla_padding.FIX.observers("minus-one")
    full, padded = arguments(PADDED_REQUESTS), arguments(REQUESTS)
    found = []
    for around, stock, reference in (
        ("alone", hands_out_a_plan, hands_out_a_persistent_plan),
        ("real", real, real_with_two_copies),
    ):
        functions = (reference, persistent.wrap(stock), stock, plans.wrap(stock))
        calls = Calls(*(_call(function, builder, **full) for function in functions))
        found.append(_compared("flashmla-fp8, any batch", around, calls, rounds, target=True))
    for around, stock in (("alone", hands_out_a_plan), ("real", real)):
        fixed, observed = padding.wrap(stock), rows.wrap(stock)
        for label, reference, given in (("no padding", stock, full), ("padding", with_two_fills(stock), padded)):
            calls = Calls(*(_call(function, builder, **given) for function in (reference, fixed, stock, observed)))
            found.append(_compared(f"flashmla-padding, {label}", around, calls, rounds, target=False))
    return found


# prefill-dispatch


def dispatch(rounds: int) -> list[tuple[object, ...]]:
    import numpy as np
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_graphfix.fixes.prefill_dispatch import FIX
    from vllm_graphfix.verify.double.scenarios import prefill_dispatch as scenario

    scenario.CAPTURED = scenario.MAX_TOKENS = PADDED_REQUESTS
    attention = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)
    recurrent = MambaSpec(block_size=32, shapes=((2,),), dtypes=(torch.float32,))

    def step(specs: tuple[Any, ...], *, prefills: bool) -> tuple[Any, dict[str, Any]]:
        groups = [KVCacheGroupSpec(["layer"], spec) for spec in specs]
        with scenario._unpinned():
            made = scenario.DispatchV1(
                scenario._config(CUDAGraphMode.FULL_DECODE_ONLY, 1), KVCacheConfig(8, [], groups)
            )
        batch = made.runner.input_batch
        batch.num_prompt_tokens[:], batch.num_computed_tokens_cpu[:], batch.num_tokens_no_spec[:] = 50, 60, 61
        if prefills:
            batch.num_computed_tokens_cpu[-1] = 49
        return made.runner, {
            "num_tokens": PADDED_REQUESTS,
            "num_reqs": PADDED_REQUESTS,
            "num_scheduled_tokens_np": np.ones(PADDED_REQUESTS, dtype=np.int32),
            "max_num_scheduled_tokens": 1,
            "use_cascade_attn": False,
            "num_encoder_reqs": 0,
        }

    def does_nothing(self: Any, **keywords: Any) -> None: ...

    hybrid = (attention, attention, attention, recurrent)
    steps = {
        "decodes, no recurrent layers": step((attention,), prefills=False),
        "decodes": step(hybrid, prefills=False),
        "a prefill of their shape": step(hybrid, prefills=True),
    }
    (patch,), (watch,) = FIX.patches("shape-only-v1"), FIX.observers("shape-only-v1")
    found = []
    real = GPUModelRunner._determine_batch_execution_and_padding
    for around, stock in (("alone", does_nothing), ("real", real)):
        fixed, observed = patch.wrap(stock), watch.wrap(stock)
        for label, (runner, given) in steps.items():
            # Stock takes another way where it takes a prefill for a decode: the right one is the stricter measure.
            right = {"force_uniform_decode": False} if label.startswith("a prefill") else {}
            calls = Calls(
                _call(stock, runner, **given, **right),
                *(_call(function, runner, **given) for function in (fixed, stock, observed)),
            )
            found.append(_compared(f"prefill-dispatch, V1, {label}", around, calls, rounds, target=True))
    return found


def dispatch_v2(rounds: int) -> list[tuple[object, ...]]:
    """Both layers of a step, around functions that do nothing: vLLM's own need a GPU."""
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

    from vllm_graphfix.fixes.prefill_dispatch import FIX
    from vllm_graphfix.verify.double.scenarios import prefill_dispatch as scenario

    scenario.CAPTURED = scenario.MAX_TOKENS = PADDED_REQUESTS
    groups = [KVCacheGroupSpec(["layer"], MambaSpec(block_size=32, shapes=((2,),), dtypes=(torch.float32,)))]
    names = [f"request-{number}" for number in range(PADDED_REQUESTS)]

    def step(requests: int, *, prefilling: int | None) -> tuple[Any, Any]:
        made = scenario.DispatchV2(scenario._config(CUDAGraphMode.FULL_DECODE_ONLY, 1), KVCacheConfig(8, [], groups))
        for name in names:
            made._states.add(name, 50)
        made._states.num_computed_prefill_tokens[:] = 50
        if prefilling is not None:
            made._states.num_computed_prefill_tokens[prefilling] = 49
        scheduled = dict.fromkeys(names[:requests], 1)
        return made.runner, scenario._scheduler_output(scheduled, [], {})

    def updates_nothing(self: Any, scheduler_output: Any) -> None: ...

    def dispatches_nothing(*arguments: Any, **keywords: Any) -> None: ...

    def both(update: Function, choose: Function, runner: Any, scheduled: Any) -> Callable[[], object]:
        manager, tokens = runner.cudagraph_manager, scheduled.total_num_scheduled_tokens

        def call() -> None:
            update(runner, scheduled)
            choose(manager, tokens, tokens, 1, 1, 0, need_eager=False)

        return call

    steps = {
        "decodes": step(PADDED_REQUESTS, prefilling=None),
        "decodes, and the slot of one that ended in its prefill": step(REQUESTS, prefilling=PADDED_REQUESTS - 1),
        "a prefill of their shape": step(PADDED_REQUESTS, prefilling=0),
    }
    fixed, observed = (
        tuple(patch.wrap(stock) for patch, stock in zip(offered, (updates_nothing, dispatches_nothing), strict=True))
        for offered in (FIX.patches("shape-only-v2"), FIX.observers("shape-only-v2"))
    )
    found = []
    for label, (runner, scheduled) in steps.items():
        ways = ((updates_nothing, dispatches_nothing), fixed, (updates_nothing, dispatches_nothing), observed)
        calls = Calls(*(both(update, choose, runner, scheduled) for update, choose in ways))
        found.append(_compared(f"prefill-dispatch, V2, {label}", "alone", calls, rounds, target=True))
    return found


# The sparse indexer


def indexer(rounds: int) -> list[tuple[object, ...]]:
    import torch
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder

    from vllm_graphfix.fixes.indexer_padding import FIX
    from vllm_graphfix.verify.double.scenarios.indexer_padding import builder

    own = builder(1, requests=PADDED_REQUESTS, tokens=2 * PADDED_REQUESTS)
    lengths = own.decode_seq_lens_buffer[: 2 * PADDED_REQUESTS].view(PADDED_REQUESTS, 2)

    def does_nothing(
        self: Any,
        seq_lens: Any,
        block_table: Any,
        decode_lens: Any,
        decode_lens_cpu: Any,
        query_start_loc: Any,
        num_decodes: Any,
        num_decode_tokens: Any,
        use_native: Any,
        next_n: Any,
        max_decode_len: Any,
    ) -> Any:
        return (lengths,)

    def arguments(requests: int, tokens: int) -> dict[str, Any]:
        scheduled = (torch.arange(PADDED_REQUESTS) < requests).int() * tokens
        return {
            "seq_lens": scheduled * 50,
            "block_table": torch.zeros(PADDED_REQUESTS, 3, dtype=torch.int32),
            "decode_lens": scheduled,
            "decode_lens_cpu": scheduled,
            "query_start_loc": scheduled.cumsum(0, dtype=torch.int32) - scheduled,
            "num_decodes": PADDED_REQUESTS,
            "num_decode_tokens": PADDED_REQUESTS * tokens,
            "use_native": True,
            "next_n": 2,
            "max_decode_len": tokens,
        }

    batches = {
        "indexer-padding, a draft's decodes": arguments(REQUESTS, 1),
        "indexer-padding, no padding": arguments(PADDED_REQUESTS, 2),
        "indexer-padding, padding": arguments(REQUESTS, 2),
    }
    (patch,), (watch,) = FIX.patches("view-of-a-row"), FIX.observers("view-of-a-row")
    found = []
    for around, stock in (
        ("alone", does_nothing),
        ("real", DeepseekV32IndexerMetadataBuilder._prepare_decode_tensors),
    ):
        for label, given in batches.items():
            functions = (stock, patch.wrap(stock), stock, watch.wrap(stock))
            calls = Calls(*(_call(function, own, **given) for function in functions))
            found.append(_compared(label, around, calls, rounds, target=True))
    return found


# Triton MLA


def triton_mla(rounds: int) -> list[tuple[object, ...]]:
    import torch

    from vllm_graphfix.fixes.triton_mla_padding import FIX
    from vllm_graphfix.verify.double.scenarios.triton_mla_padding import metadata_builder

    builder = metadata_builder()
    real = type(builder).build
    zeros, counts = FIX.patches("divides-by-nothing")
    (watch,) = FIX.observers("divides-by-nothing")

    def builds_nothing(
        self: Any, common_prefix_len: Any, common_attn_metadata: Any, fast_build: Any = False
    ) -> None: ...

    def batch(requests: int) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.arange(PADDED_REQUESTS + 1, dtype=torch.int32).clamp(max=requests)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=(torch.arange(PADDED_REQUESTS) < requests).int() * 100,
            num_reqs=PADDED_REQUESTS,
            num_actual_tokens=PADDED_REQUESTS,
            max_query_len=1,
            max_seq_len=100,
            block_table_tensor=torch.zeros(PADDED_REQUESTS, 1, dtype=torch.int32),
            slot_mapping=torch.zeros(PADDED_REQUESTS, dtype=torch.int64),
        )

    found = []
    for around, stock in (("alone", builds_nothing), ("real", real)):
        fixed, observed = counts.wrap(stock), watch.wrap(stock)
        for label, metadata in (("no padding", batch(PADDED_REQUESTS)), ("padding", batch(REQUESTS))):
            calls = Calls(*(_call(function, builder, 0, metadata) for function in (stock, fixed, stock, observed)))
            found.append(_compared(f"triton-mla-padding, {label}", around, calls, rounds, target=True))

    def decode_attention_fwd(
        q: Any, k_buffer: Any, v_buffer: Any, o: Any, lse: Any, req_to_token: Any, b_seq_len: Any
    ) -> None: ...

    # Its Python runs in a step without a full graph alone, once a layer; in a graph it is two kernels.
    given = (None, None, None, torch.zeros(REQUESTS, 1, 1), None, None, torch.ones(REQUESTS, dtype=torch.int32))
    functions = (decode_attention_fwd, zeros.wrap(decode_attention_fwd), decode_attention_fwd, decode_attention_fwd)
    calls = Calls(*(_call(function, *given) for function in functions))
    found.append(_compared("triton-mla-padding, a layer outside of a graph", "alone", calls, rounds, target=False))
    return found


# workspace-growth


def workspace(rounds: int) -> list[tuple[object, ...]]:
    """A request that fits, as all but a few do. Layers ask for it, each once or twice where no graph replays."""
    import torch
    from vllm.v1.worker.workspace import WorkspaceManager

    from vllm_graphfix.fixes.workspace_growth import FIX

    real = WorkspaceManager._ensure_workspace_size
    size, larger = 1024, 2048
    torch.accelerator.empty_cache = lambda: None  # growth calls it, and there is no accelerator

    def does_nothing(self: Any, required_bytes: int) -> Any:
        return self._current_workspaces[0]

    def manager(around: Function, recorded: str) -> Any:
        """In which *around* has seen a capture, if that is what *recorded* says, and perhaps growth behind it."""
        made = WorkspaceManager(torch.device("cpu"))
        real(made, size)
        if recorded:
            capturing, torch.cuda.is_current_stream_capturing = torch.cuda.is_current_stream_capturing, lambda: True
            capture.wrap(lambda runner: around(made, size))(None)
            torch.cuda.is_current_stream_capturing = capturing
        if recorded == "outgrown":
            real(made, larger)
            around(made, larger)
        return made

    patch, capture, *_ = FIX.patches("one-slot")
    watch, *_ = FIX.observers("one-slot")
    found = []
    for name, stock in (("alone", does_nothing), ("real", real)):
        fixed, observed = patch.wrap(stock), watch.wrap(stock)
        for label, recorded in (
            ("no capture", ""),
            ("a recorded one", "in use"),
            ("one that was outgrown", "outgrown"),
        ):
            functions = (stock, fixed, stock, observed)
            calls = Calls(*(_call(function, manager(function, recorded), size) for function in functions))
            found.append(_compared(f"workspace-growth, {label}", name, calls, rounds, target=True))
    return found


# prompt-logprobs


def runner(rounds: int) -> list[tuple[object, ...]]:
    import torch
    from vllm.v1.worker.gpu_model_runner import ExecuteModelState

    from vllm_graphfix.fixes.prompt_logprobs import FIX

    state = ExecuteModelState(
        scheduler_output=SimpleNamespace(num_scheduled_tokens={str(request): 1 for request in range(REQUESTS)}),
        hidden_states=torch.zeros(PADDED_REQUESTS, 8),
        **dict.fromkeys(set(ExecuteModelState._fields) - {"scheduler_output", "hidden_states"}),
    )

    def runner_with(scored: dict[str, int]) -> Any:
        return SimpleNamespace(
            num_prompt_logprobs=scored,
            execute_model_state=state,
            speculative_config=SimpleNamespace(disable_padded_drafter_batch=False, use_eagle=lambda: True),
            compilation_config=SimpleNamespace(max_cudagraph_capture_size=PADDED_REQUESTS),
        )

    def does_nothing(self: Any, grammar_output: Any) -> None: ...

    def copies(self: Any, grammar_output: Any) -> None:
        """What any remedy must do, at the least."""
        self.execute_model_state.hidden_states.clone()

    (patch,), (watch,) = FIX.patches("draft-first"), FIX.observers("draft-first")
    fixed, observed = patch.wrap(does_nothing), watch.wrap(does_nothing)
    found = []
    for label, reference, scored in (
        ("nobody asks for prompt_logprobs", does_nothing, {}),
        ("who asks for prompt_logprobs is not scheduled", does_nothing, {"preempted": 1}),
        ("a scored prompt", copies, {"0": 1}),
    ):
        functions = (reference, fixed, does_nothing, observed)
        calls = Calls(*(_call(function, runner_with(scored), None) for function in functions))
        found.append(_compared(f"prompt-logprobs, {label}", "alone", calls, rounds, target=True))
    return found


def _call(function: Function, *arguments: Any, **keywords: Any) -> Callable[[], object]:
    return lambda: function(*arguments, **keywords)


MEASURE = {
    "mamba": mamba,
    "flashmla": flashmla,
    "dispatch": dispatch,
    "dispatch-v2": dispatch_v2,
    "indexer": indexer,
    "triton-mla": triton_mla,
    "workspace": workspace,
    "prompt-logprobs": runner,
}

if __name__ == "__main__":
    main()
