"""prefill-dispatch, model runner V2: both functions of a step, around ones that do nothing, since vLLM's need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Calls, Function, Row, measured
from vllm_graphfix import manifest
from vllm_graphfix.fix import Activity
from vllm_graphfix.fixes.prefill_dispatch import FIX
from vllm_graphfix.source.files import open_source

RELEASE = "0.27.1"


def measure(rounds: int) -> list[Row]:
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

    from vllm_graphfix.verify.double.scenarios import prefill_dispatch as scenario

    scenario.CAPTURED = scenario.MAX_TOKENS = PADDED_REQUESTS
    groups = [KVCacheGroupSpec(["layer"], MambaSpec(block_size=32, shapes=((2,),), dtypes=(torch.float32,)))]
    names = [f"request-{number}" for number in range(PADDED_REQUESTS)]

    def step(requests: int, *, prefilling: int | None) -> tuple[Any, Any]:
        made = scenario.DispatchV2(
            scenario._config(CUDAGraphMode.FULL_DECODE_ONLY, 1),
            KVCacheConfig(8, [], groups),
            backend=Mamba2AttentionBackend,
        )
        for name in names:
            made._states.add(name, 50)
        made._states.num_computed_prefill_tokens[:] = 50
        if prefilling is not None:
            made._states.num_computed_prefill_tokens[prefilling] = 0
        scheduled = dict.fromkeys(names[:requests], 1)
        return made.runner, scenario._scheduler_output(scheduled, [], {})

    def update_nothing(self: Any, scheduler_output: Any) -> None: ...

    def dispatch_nothing(*arguments: Any, **keywords: Any) -> None: ...

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
    stock = (update_nothing, dispatch_nothing)
    patches = FIX.patches(manifest.diagnose(FIX, open_source()).shape)[-2:]
    fixed, observed = (
        tuple(patch.wrap(each, activity) for patch, each in zip(patches, stock, strict=True))
        for activity in (Activity(FIX.events), Activity(FIX.events, corrects=False))
    )
    rows = []
    for label, (runner, scheduled) in steps.items():
        ways = (stock, fixed, stock, observed)
        calls = Calls(*(both(update, choose, runner, scheduled) for update, choose in ways))
        rows.append(measured(f"prefill-dispatch, V2, {label}", "alone", calls, rounds))
    return rows
