"""prefill-dispatch, model runner V1."""

from __future__ import annotations

from typing import Any

from measuring.calls import PADDED_REQUESTS, Calls, Row, arguments, measured, wrapped
from vllm_graphfix import manifest
from vllm_graphfix.fixes.prefill_dispatch import FIX
from vllm_graphfix.source.files import open_source

RELEASE = "0.33.0"
FEW, MOST = 8, 1024
"""Sizes of batches besides `PADDED_REQUESTS`; the larger is vLLM's own limit on a large card."""


def measure(rounds: int) -> list[Row]:
    import numpy as np
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_graphfix.verify.double.scenarios import prefill_dispatch as scenario
    from vllm_graphfix.verify.double.unpinned import unpinned

    scenario.CAPTURED = scenario.MAX_TOKENS = MOST
    attention = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)
    recurrent = MambaSpec(block_size=32, shapes=((2,),), dtypes=(torch.float32,))

    def step(
        specs: tuple[Any, ...], *, computed: int | None = None, rows: int = PADDED_REQUESTS
    ) -> tuple[Any, dict[str, Any]]:
        groups = [KVCacheGroupSpec(["layer"], spec) for spec in specs]
        with unpinned():
            made = scenario.DispatchV1(
                scenario._config(CUDAGraphMode.FULL_DECODE_ONLY, 1),
                KVCacheConfig(8, [], groups),
                backend=Mamba2AttentionBackend,
            )
        batch = made.runner.input_batch
        batch.num_prompt_tokens[:], batch.num_computed_tokens_cpu[:], batch.num_tokens_no_spec[:] = 3000, 3010, 3011
        if computed is not None:
            batch.num_computed_tokens_cpu[rows - 1] = computed
        return made.runner, {
            "num_tokens": rows,
            "num_reqs": rows,
            "num_scheduled_tokens_np": np.ones(rows, dtype=np.int32),
            "max_num_scheduled_tokens": 1,
            "use_cascade_attn": False,
            "num_encoder_reqs": 0,
        }

    def do_nothing(self: Any, **keywords: Any) -> None: ...

    hybrid = (attention, attention, attention, recurrent)
    steps = {
        "decodes, no recurrent layers": step((attention,)),
        "decodes": step(hybrid),
        f"{FEW} decodes": step(hybrid, rows=FEW),
        f"{MOST:,} decodes": step(hybrid, rows=MOST),
        "the last token of a prompt, with a state": step(hybrid, computed=2999),
        "a prefill of their shape": step(hybrid, computed=0),
    }
    (patch,) = FIX.patches(manifest.diagnose(FIX, open_source()).shape)
    rows = []
    for around, stock in (("alone", do_nothing), ("real", GPUModelRunner._determine_batch_execution_and_padding)):
        fixed, observed = wrapped(FIX, patch, stock)
        for label, (runner, keywords) in steps.items():
            # Stock goes another way where it takes a prefill for a decode: the right one is the stricter measure.
            right = {"force_uniform_decode": False} if label.startswith("a prefill") else {}
            batch = arguments(runner, **keywords)
            calls = Calls(arguments(runner, **keywords, **right)(stock), *map(batch, (fixed, stock, observed)))
            rows.append(measured(f"prefill-dispatch, V1, {label}", around, calls, rounds))
    return rows
