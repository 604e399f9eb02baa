"""The detector `claims` on vLLM's own captures and builders: it reports those that take decodes for prompts, alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import claims
import pytest
import torch
import vllm
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_graphfix.engine.claims import _HARMLESS_BUILDERS, ClaimCheck
from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.double.decoding import RunnerStandIn, configuration
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios import draft_graph_support as scenario

CASES = claims.CASES | claims.ON_BLACKWELL
RELEASE = tuple(map(int, vllm.__version__.split(".")[:2]))


def worker(builders: list[Any], drafts: int) -> Any:
    groups = [[SimpleNamespace(metadata_builders=[builder]) for builder in builders]]
    speculative = SimpleNamespace(num_speculative_tokens=drafts) if drafts else None
    return SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=speculative), model_runner=SimpleNamespace(attn_groups=groups)
    )


def capture(build: Any, tokens: int, mode: CUDAGraphMode = CUDAGraphMode.FULL) -> None:
    """Capture as model runner V1 does, up to the dummy run, in which *build* stands for the metadata."""
    runner = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_num_of_warmups=0), _dummy_run=lambda *_, **__: build()
    )
    descriptor = BatchDescriptor(**supported_kwargs(BatchDescriptor, {"num_tokens": tokens, "uniform": True}))
    GPUModelRunner._warmup_and_capture(runner, descriptor, mode)


def seen_in_a_capture(builder: Any, case: claims.Case, mode: CUDAGraphMode = CUDAGraphMode.FULL) -> ClaimCheck:
    made = ClaimCheck()
    with claims.prepared(builder, case) as (one, buffers):
        own = dict(vars(one))
        made.begin_capture(worker([one], case.drafts))
        capture(lambda: one.build_for_cudagraph_capture(buffers.captured()), claims.ROWS * buffers.tokens, mode)
        made.end_capture()
        assert vars(one).keys() == own.keys(), "it is not watched any more"
        one.build_for_cudagraph_capture(buffers.captured())
    return made


def measured() -> Iterator[tuple[str, str]]:
    for name, of_builder in claims.builders().items():
        for title, case in (CASES if name == "FlashInfer" else claims.CASES).items():
            try:
                truth = claims.truth_of(of_builder, case)
                builder = of_builder[0].get_builder_cls()
                if truth.rows.startswith("refused"):
                    continue
                made = seen_in_a_capture(builder, case)
            except Exception:  # noqa: S112 - one that has no metadata here, or refuses this batch
                continue
            prompts = truth.rows == "prompts" and case.drafts and builder.__name__ not in _HARMLESS_BUILDERS
            wanted = [builder.__name__] if prompts else []
            if [each.builder for each in made.findings()] != wanted or made.counts().get("claims", {}).get("failures"):
                yield name, title
            TRIED[bool(wanted)] += 1


TRIED = {True: 0, False: 0}


def test_it_reports_the_builders_that_take_decodes_for_prompts_and_no_other() -> None:
    assert list(measured()) == []
    assert TRIED[True] >= 3
    assert TRIED[False] >= 40


def turboquant() -> Any:
    return claims.builders()["TurboQuant"][0].get_builder_cls()


@pytest.mark.skipif(RELEASE < (0, 21), reason="TurboQuant claims such graphs from 0.21.0 on")
def test_turboquant_is_reported_with_drafts_once_with_its_graph() -> None:
    made = seen_in_a_capture(turboquant(), claims.CASES["drafts"])
    assert [tuple(each) for each in made.findings()] == [("TurboQuantMetadataBuilder", "FULL 8")]
    assert made.counts() == {"claims": {"prompts-in-graphs": 1, "failures": 0}}


@pytest.mark.skipif(RELEASE < (0, 21), reason="TurboQuant claims such graphs from 0.21.0 on")
@pytest.mark.parametrize("case", ["piecewise", "one token"])
def test_what_is_no_full_graph_of_decodes_with_drafts_is_not_reported(case: str) -> None:
    piecewise = case == "piecewise"
    mode = CUDAGraphMode.PIECEWISE if piecewise else CUDAGraphMode.FULL
    made = seen_in_a_capture(turboquant(), claims.CASES["drafts" if piecewise else "one token"], mode)
    assert made.findings() == ()
    assert made.counts() == ({"claims": {"prompts-in-graphs": 0, "failures": 0}} if piecewise else {})


def test_flashmla_that_refuses_to_be_captured_under_context_parallelism_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("vllm_graphfix.engine.claims.logger.warning", lambda text, *args: lines.append(text % args))
    builder = claims.builders()["FlashMLA"][0].get_builder_cls()
    with pytest.raises(AssertionError):
        seen_in_a_capture(builder, claims.CASES["drafts, context parallel"])
    (line,) = lines
    assert "FlashMLAMetadataBuilder claims full graphs" in line
    assert "the graph of 8 tokens" in line


def captured_by_v2(tokens: int) -> ClaimCheck:
    """Capture decodes of so many *tokens* with vLLM's own manager, on Triton MLA."""
    made = ClaimCheck()
    config = configuration(CUDAGraphMode.FULL_DECODE_ONLY, [tokens, 2 * tokens, 4 * tokens], tokens - 1)
    config.mamba_config = None
    with cpu_cuda_graphs(), scenario._unpinned(), torch.inference_mode():
        runner, model = RunnerStandIn(config, [scenario.LAYER]), scenario._model()
        manager, runner.attn_groups = scenario._initialized(config, tokens)
        whole = SimpleNamespace(attn_groups=runner.attn_groups)
        made.begin_capture(SimpleNamespace(vllm_config=config, model_runner=whole))
        inputs = runner.capture_inputs() | {"model": model, "intermediate_tensors": None}
        manager.capture(**supported_kwargs(manager.capture, inputs))
        made.end_capture()
    return made


@pytest.mark.skipif(not (0, 17) <= RELEASE < (0, 20), reason="model runner V2 asks backends from 0.20.0 on")
@pytest.mark.parametrize("tokens", [1, 2])
def test_model_runner_v2s_own_captures_are_seen(tokens: int) -> None:
    made = captured_by_v2(tokens)
    named = [each.builder for each in made.findings()]
    assert named == (["MLACommonMetadataBuilder"] if tokens > 1 else [])
    assert all(each.graph.startswith("FULL ") for each in made.findings())
