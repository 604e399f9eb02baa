"""The detector `claims` on the captures of vLLM's own speculator for DFlash, whose builders are the draft's alone."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash

from vllm_graphfix.engine.claims import ClaimCheck
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios import draft_non_causal as scenario


@pytest.mark.parametrize("causal", [False, True])
def test_drafts_that_are_not_causal_are_reported_and_causal_ones_are_not(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, stock = ClaimCheck(), dflash.DFlashSpeculator.capture

    @functools.wraps(stock)
    def watched(speculator: Any, *args: Any, **kwargs: Any) -> None:
        runner = SimpleNamespace(speculator=speculator)
        check.begin_capture(SimpleNamespace(vllm_config=speculator.vllm_config, model_runner=runner))
        stock(speculator, *args, **kwargs)
        check.end_capture()

    monkeypatch.setattr(dflash.DFlashSpeculator, "capture", watched)
    with cpu_cuda_graphs(), scenario._on_a_blackwell():
        scenario._speculator(CUDAGraphMode.FULL_DECODE_ONLY, causal=causal)
    assert [each.builder for each in check.findings()] == ([] if causal else ["FlashInferMetadataBuilder"])
    prompts = 0 if causal else 2 * len(scenario.SIZES)  # one to warm up, one to capture
    assert check.counts() == {"claims": {"prompts-in-graphs": prompts, "failures": 0}}
