"""flashmla-fp8 and flashmla-padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Calls, Function, call, compared

RELEASE = "0.18.1"


def measure(rounds: int) -> list[tuple[object, ...]]:
    import torch

    from vllm_graphfix.verify.double.flashmla import PLAN_WIDTH, install_flashmla_stand_ins

    install_flashmla_stand_ins()
    from vllm.v1.attention.backends.mla import flashmla as flashmla_backend

    from vllm_graphfix.fix import Activity, Fix
    from vllm_graphfix.fixes import flashmla_fp8, flashmla_padding

    real = flashmla_backend.FlashMLAMetadataBuilder._build_decode
    parts = 132
    """The number of parts of the plan on an H200, which has as many multiprocessors."""
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

    def both(fix: Fix, shape: str, stock: Function) -> tuple[Function, Function]:
        """Corrected, and only observed."""
        (patch,) = fix.patches(shape)
        return patch.wrap(stock, Activity(fix.events)), patch.wrap(stock, Activity(fix.events, corrects=False))

    full, padded = arguments(PADDED_REQUESTS), arguments(REQUESTS)
    found = []
    for around, stock, reference in (
        ("alone", hands_out_a_plan, hands_out_a_persistent_plan),
        ("real", real, real_with_two_copies),
    ):
        fixed, observed = both(flashmla_fp8.FIX, "new-plan", stock)
        functions = (reference, fixed, stock, observed)
        calls = Calls(*(call(function, builder, **full) for function in functions))
        found.append(compared("flashmla-fp8, any batch", around, calls, rounds, target=True))
    for around, stock in (("alone", hands_out_a_plan), ("real", real)):
        fixed, observed = both(flashmla_padding.FIX, "minus-one", stock)
        for label, reference, given in (("no padding", stock, full), ("padding", with_two_fills(stock), padded)):
            calls = Calls(*(call(function, builder, **given) for function in (reference, fixed, stock, observed)))
            found.append(compared(f"flashmla-padding, {label}", around, calls, rounds, target=False))
    return found
