"""flashmla-fp8 and flashmla-padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Calls, Function, Row, arguments, measured, wrapped
from vllm_graphfix.fixes import flashmla_fp8, flashmla_padding

RELEASE = "0.18.1"
_PARTS = 132
"""The number of parts of the plan on an H200, which has as many multiprocessors."""


def measure(rounds: int) -> list[Row]:
    import torch

    from vllm_graphfix.verify.double.flashmla import PLAN_WIDTH, install_flashmla_stand_ins

    install_flashmla_stand_ins()
    from vllm.v1.attention.backends.mla import flashmla as backend

    real = backend.FlashMLAMetadataBuilder._build_decode
    builder = object.__new__(backend.FlashMLAMetadataBuilder)
    builder.__dict__.update(
        is_fp8_kvcache=True,
        num_q_heads=16,
        cg_buf_tile_scheduler_metadata=torch.zeros(_PARTS, PLAN_WIDTH, dtype=torch.int32),
        cg_buf_num_splits=torch.empty(PADDED_REQUESTS + 1, dtype=torch.int32),
    )
    plan = torch.zeros(_PARTS, PLAN_WIDTH, dtype=torch.int32)
    splits = torch.zeros(PADDED_REQUESTS + 1, dtype=torch.int32)
    # The planner is a kernel; here it costs nothing, so that what is measured is Python.
    backend.get_mla_metadata_dense_fp8 = lambda *_: (plan, splits)
    metadata = SimpleNamespace(scheduler_metadata=SimpleNamespace())

    def make_plan(
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

    def with_two_copies(stock: Function) -> Function:
        """*stock* and the copies into buffers of the upstream fix."""

        def build(self: Any, **keywords: Any) -> Any:
            made = stock(self, **keywords)
            scheduler = made.scheduler_metadata
            tiles = scheduler.tile_scheduler_metadata
            scheduler.tile_scheduler_metadata = self.cg_buf_tile_scheduler_metadata[:_PARTS].copy_(tiles)
            scheduler.num_splits = self.cg_buf_num_splits[: PADDED_REQUESTS + 1].copy_(scheduler.num_splits)
            return made

        return build

    def with_two_fills(stock: Function) -> Function:
        """*stock* and the least that any remedy of padded rows must write."""

        def build(self: Any, block_table_tensor: Any, seq_lens_device: Any, **keywords: Any) -> Any:
            block_table_tensor[REQUESTS:].fill_(0)
            seq_lens_device[REQUESTS:].fill_(1)
            return stock(self, block_table_tensor, seq_lens_device, **keywords)

        return build

    def keywords(requests: int) -> dict[str, Any]:
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

    full, padded = (arguments(builder, **keywords(requests)) for requests in (PADDED_REQUESTS, REQUESTS))
    fp8, padding = flashmla_fp8.FIX, flashmla_padding.FIX
    ((new_plan,), (minus_one,)) = fp8.patches("new-plan"), padding.patches("minus-one")
    stocks = {"alone": make_plan, "real": real}
    rows = []
    for around, stock in stocks.items():
        fixed, observed = wrapped(fp8, new_plan, stock)
        calls = Calls(*map(full, (with_two_copies(stock), fixed, stock, observed)))
        rows.append(measured("flashmla-fp8, any batch", around, calls, rounds))
    for around, stock in stocks.items():
        fixed, observed = wrapped(padding, minus_one, stock)
        for label, reference, batch in (("no padding", stock, full), ("padding", with_two_fills(stock), padded)):
            calls = Calls(*map(batch, (reference, fixed, stock, observed)))
            rows.append(measured(f"flashmla-padding, {label}", around, calls, rounds, target=False))
    return rows
