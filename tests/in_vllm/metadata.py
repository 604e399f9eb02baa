"""The detector `metadata` in the scenarios of `verify`, and on what all builders of a release make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import claims
import pytest
import torch
import vllm
from defects import affected
from packaging.version import Version

from vllm_graphfix.engine import metadata
from vllm_graphfix.engine.metadata import MetadataCheck, _Capture, differing
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.verify.double import worker
from vllm_graphfix.verify.double.graph import CPUGraph
from vllm_graphfix.verify.trial import trial_of

SEEN = frozenset(
    "capture-state draft-prefill-state mamba-padding flashmla-fp8 prefill-dispatch mamba-all-mode c128a-stride "
    "dcp-context-lens flash-mixed-schedule adaptive-schedule draft-graph-support".split()
)
"""Defects that show in the metadata of a replay. The others are of drafters, adapters, and the values of tensors."""
BY_ADDRESS = frozenset({"flashmla-fp8"})
"""Of these, those that show without the trigger, too: the plan lies elsewhere, and says the same."""
SCENARIOS_FROM = Version("0.18.0")
"""The first release of the shadow check, for which these scenarios are: they run wherever there is the defect."""
WATCHED = pytest.mark.parametrize("fix", [fix.name for fix in FIXES if trial_of(fix.name).watched])
NOT_READ = {
    "FlexAttention.num_blocks_per_seq": "the builder alone reads it, for the mask",
    "FlexAttention.logical_block_ids": "the same",
    "FlexAttention.max_seq_len": "the same",
    "AiterFlashAttention.decode_metadata.max_seq_len": "layers read the one beside it, which is the longest of all",
    "AiterFlashAttention.num_actual_kv_tokens": "prompts alone read it",
    "AiterFlashAttention.total_tokens": "prompts alone read it",
    "PleShortConvAttention.spec_token_indx": "batches without a graph alone read it",
}
"""Fields that differ on right releases and that no full graph of decodes reads, by the source."""


@pytest.fixture(autouse=True)
def _every_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "_EVERY", 1)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CPUGraph)


def compared(fix: str, *, trigger: bool) -> Iterator[MetadataCheck]:
    """Yield the check of each scenario of *fix*; skip the test where the code does not run and is not affected."""
    worker._import_targets(fix)
    trial, own = trial_of(fix), dict(vars(CPUGraph))
    for watched in (trial.watched, *trial.watched_further):
        if watched is None:
            continue
        check = MetadataCheck()
        try:
            replay = worker._resolve(watched.scenario)
            check.begin_capture()
            if replay(trigger=trigger) is False:
                continue
        except Exception as error:  # as releases without the code fail
            if affected(fix) and Version(vllm.__version__) >= SCENARIOS_FROM:
                raise
            pytest.skip(f"the scenario does not run here: {error}")
        finally:
            check.end_capture()
        assert dict(vars(CPUGraph)) == own
        assert check.counts()["metadata"]["failures"] == 0
        yield check


@WATCHED
def test_a_defect_is_seen_where_there_is_one_and_nothing_elsewhere(fix: str) -> None:
    for check in compared(fix, trigger=True):
        wanted = affected(fix) and fix in SEEN
        assert bool(check.findings()) == wanted, check.findings()
        assert bool(check.counts()["metadata"]["differing"]) == wanted


@WATCHED
def test_without_the_conditions_of_the_defect_nothing_differs(fix: str) -> None:
    for check in compared(fix, trigger=False):
        assert bool(check.findings()) == (affected(fix) and fix in BY_ADDRESS), check.findings()


def of_right_builders() -> Iterator[tuple[str, set[str]]]:
    """Yield each builder and deployment whose claim is true, with the fields that differ if all are read."""
    for name, of_builder in claims.builders().items():
        for title, case in (claims.CASES | claims.ON_BLACKWELL if name == "FlashInfer" else claims.CASES).items():
            try:
                truth = claims.truth_of(of_builder, case)
                single = {"UNIFORM_SINGLE_TOKEN_DECODE"} if case.drafts == 0 else set()
                if truth.rows not in ("decodes", "alike") or truth.claim not in {"UNIFORM_BATCH", "ALWAYS", *single}:
                    continue
                with claims.prepared(of_builder[0].get_builder_cls(), case) as (builder, buffers):
                    yield f"{name}, {title}", set(fields_that_differ(name, builder, buffers, case))
            except Exception:  # noqa: S112 - one that has no metadata here, or refuses this batch
                continue


def fields_that_differ(name: str, builder: Any, buffers: Any, case: claims.Case) -> Iterator[str]:
    capture = _Capture("cpu")
    batch = buffers.captured()
    if case.ranks > 1:  # with context, as vLLM captures from 0.26.0 on: without any, ranks choose another path
        batch = buffers.batch([2 * case.ranks + buffers.tokens] * claims.ROWS, claims.LONGEST)
    made = builder.build_for_cudagraph_capture(batch)
    for path, each in metadata.objects_of({"layer": made}):
        capture.add(path, each)
        capture.read |= {(*path, field) for field in vars(each)}
    step = builder.build(0, buffers.batch(claims.LENGTHS, max(claims.LENGTHS)), **claims._of_drafts(builder, case))
    for path, _ in differing(capture.fields(), {"layer": step}, "cpu"):
        yield f"{name}.{'.'.join(map(str, path[1:]))}"


def test_builders_whose_claims_are_true_differ_in_no_field_that_a_graph_reads() -> None:
    seen = dict(of_right_builders())
    known = {"FlashAttention.dcp_context_kv_lens"} if affected("dcp-context-lens") else set()
    assert {field for fields in seen.values() for field in fields} - NOT_READ.keys() == known
    assert len(seen) >= 20
