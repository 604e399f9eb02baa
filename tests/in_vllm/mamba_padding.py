"""mamba-padding on vLLM's own Mamba builders: what they split, and what others see of the same metadata."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import mamba_attn
from vllm.v1.attention.backends.mamba1_attn import Mamba1AttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_graphfix.verify.double.unpinned import unpinned

BUILDERS = (Mamba1AttentionMetadataBuilder, Mamba2AttentionMetadataBuilder)
SLOTS = 8
CPU = torch.device("cpu")

every_builder = pytest.mark.parametrize("kind", BUILDERS, ids=["mamba1", "mamba2"])


@pytest.fixture(autouse=True)
def _cpu_memory() -> Iterator[None]:
    with unpinned():
        yield


def builder(kind: Any, speculative_tokens: int = 0) -> Any:
    speculative = SimpleNamespace(num_speculative_tokens=speculative_tokens, parallel_drafting=False)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=64, get_mamba_chunk_size=lambda: 8),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL, max_cudagraph_capture_size=SLOTS),
        speculative_config=speculative if speculative_tokens else None,
        num_speculative_tokens=speculative_tokens,
    )
    spec = MambaSpec(block_size=64, shapes=((2,),), dtypes=(torch.float32,), num_speculative_blocks=speculative_tokens)
    return kind(spec, ["model.layers.0.mixer"], config, CPU)


class SubclassedMetadata(CommonAttentionMetadata):  # type: ignore[misc]
    """A fork's, with something of its own."""


def batch(scheduled: list[int], prefilling: list[bool] | None, kind: Any = CommonAttentionMetadata) -> Any:
    """The metadata of a batch of rows that schedule so many tokens."""
    starts = torch.tensor([0, *scheduled]).cumsum(0).int()
    rows = len(scheduled)
    lengths = torch.where(starts.diff() > 0, starts.diff() + 10, 0).int()
    inputs = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts.clone(),
        "seq_lens": lengths,
        "num_reqs": rows,
        "num_actual_tokens": sum(scheduled) + scheduled.count(0),  # padded, as the model runner counts
        "max_query_len": max(1, *scheduled),
        "max_seq_len": 64,
        "block_table_tensor": torch.arange(1, 3 * rows + 1, dtype=torch.int32).view(rows, 3),
        "slot_mapping": torch.zeros(64, dtype=torch.int64),
        "is_prefilling": None if prefilling is None else torch.tensor(prefilling),
        "seq_lens_cpu_upper_bound": lengths.clone(),
    }
    known = {field.name for field in fields(CommonAttentionMetadata)}
    return kind(**{name: value for name, value in inputs.items() if name in known})


class Split:
    """Watches what the builders hand to `split_decodes_and_prefills`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.metadata: list[Any] = []
        self.thresholds: list[int] = []
        self._stock = mamba_attn.split_decodes_and_prefills
        monkeypatch.setattr(mamba_attn, "split_decodes_and_prefills", self._split)

    def _split(self, metadata: Any, decode_threshold: int, **kwargs: Any) -> Any:
        self.metadata.append(metadata)
        self.thresholds.append(decode_threshold)
        return self._stock(metadata, decode_threshold=decode_threshold, **kwargs)


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Split:
    return Split(monkeypatch)


def snapshot(metadata: Any) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in vars(metadata).items()}


# scheduled tokens and the runner's marks, then the marks that the builder is to split by
PADDED = {
    "one padded row": ([1, 1, 1, 0], [False, False, False, True], [False] * 4),
    "many padded rows": ([1, 0, 0, 0, 0], [False, True, False, True, True], [False] * 5),
    "a real prefill before": ([1, 3, 0], [False, True, True], [False, True, False]),
    "a short extend before": ([1, 1, 0, 0], [False, True, True, False], [False, True, False, False]),
    "prefills only": ([4, 2, 0], [True, True, True], [True, True, False]),
    "all rows padded": ([0, 0, 0], [True, False, True], [False] * 3),
    "one row, padded": ([0], [True], [False]),
    "several tokens a decode": ([2, 2, 0], [False, False, True], [False] * 3),
}


@every_builder
@pytest.mark.parametrize(("scheduled", "marks", "expected"), PADDED.values(), ids=list(PADDED))
def test_real_rows_keep_their_mark_and_padded_rows_never_prefill(
    split: Split, kind: Any, scheduled: list[int], marks: list[bool], expected: list[bool]
) -> None:
    metadata = batch(scheduled, marks)
    built = builder(kind).build(0, metadata)
    (inputs,) = split.metadata
    assert inputs.is_prefilling.tolist() == expected
    assert inputs.is_prefilling.dtype == torch.bool
    prefills = [row for row, tokens in enumerate(scheduled) if expected[row] or tokens > 1]
    assert built.num_decodes == (min(prefills) if prefills else len(scheduled))


@every_builder
@pytest.mark.parametrize(("scheduled", "marks", "expected"), PADDED.values(), ids=list(PADDED))
def test_the_callers_metadata_is_not_modified(
    kind: Any, scheduled: list[int], marks: list[bool], expected: list[bool]
) -> None:
    metadata = batch(scheduled, marks)
    before, values = dict(vars(metadata)), snapshot(metadata)
    builder(kind).build(0, metadata)
    assert set(vars(metadata)) == set(before)
    for name, value in before.items():
        now = getattr(metadata, name)
        if name != "_num_computed_tokens_cache":  # vLLM's own, filled by whoever asks first
            assert now is value, name
        if isinstance(value, torch.Tensor):
            assert torch.equal(now, values[name]), name


def test_builders_of_other_layers_see_what_the_runner_gave(split: Split) -> None:
    metadata = batch(*PADDED["one padded row"][:2])
    other = copy.copy(metadata)  # as the model runner does it for each group
    for kind in BUILDERS:
        builder(kind).build(0, metadata)
    assert metadata.is_prefilling is other.is_prefilling
    assert other.is_prefilling.tolist() == [False, False, False, True]
    assert [m.is_prefilling.tolist() for m in split.metadata] == [[False] * 4] * 2


def test_all_but_the_marks_is_handed_on_as_it_is(split: Split) -> None:
    metadata = batch(*PADDED["a real prefill before"][:2], kind=SubclassedMetadata)
    metadata.of_a_fork = object()
    builder(Mamba2AttentionMetadataBuilder).build(0, metadata)
    (inputs,) = split.metadata
    assert type(inputs) is SubclassedMetadata
    same = {name for name, value in vars(inputs).items() if value is vars(metadata)[name]}
    assert set(vars(metadata)) - same <= {"is_prefilling", "_num_computed_tokens_cache"}


UNPADDED = {
    "decodes": ([1, 1, 1], [False, False, False]),
    "a prefill": ([1, 5], [False, True]),
    "a short extend": ([1, 1], [False, True]),
    "one row": ([1], [False]),
    "one prefill": ([7], [True]),
    "padded, none marked": ([1, 1, 0], [False, False, False]),
    "padded after a prefill, none marked": ([1, 4, 0], [False, True, False]),
}


@every_builder
@pytest.mark.parametrize(("scheduled", "marks"), UNPADDED.values(), ids=list(UNPADDED))
def test_without_marked_padding_the_very_same_metadata_is_split(
    split: Split, kind: Any, scheduled: list[int], marks: list[bool]
) -> None:
    metadata = batch(scheduled, marks)
    builder(kind).build(0, metadata)
    (inputs,) = split.metadata
    assert inputs is metadata


def test_a_batch_without_marks_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock refuses it where it splits by the marks; that is for stock to say."""
    metadata = batch([1, 0], None)
    with pytest.raises(AssertionError):
        builder(Mamba2AttentionMetadataBuilder).build(0, metadata)
    inputs: list[Any] = []

    def split(common: Any, **_: Any) -> tuple[int, int, int, int]:
        inputs.append(common)
        return 2, 0, 2, 0

    monkeypatch.setattr(mamba_attn, "split_decodes_and_prefills", split)
    builder(Mamba2AttentionMetadataBuilder).build(0, metadata)
    assert len(inputs) == 1
    assert inputs[0] is metadata


@every_builder
def test_a_batch_of_no_rows_is_refused_by_stock(kind: Any) -> None:
    metadata = batch([1], [True])
    metadata.query_start_loc_cpu = metadata.query_start_loc_cpu[:1]
    metadata.num_reqs, metadata.is_prefilling = 0, metadata.is_prefilling[:0]
    with pytest.raises(IndexError, match="index 0 is out of bounds"):
        builder(kind).build(0, metadata)


@every_builder
def test_the_keyword_of_speculative_decoding_is_passed_on(split: Split, kind: Any) -> None:
    accepted = torch.tensor([2, 1, 1], dtype=torch.int32)
    built = builder(kind, speculative_tokens=1)._compute_common_metadata(
        batch([2, 2, 0], [False, False, True]), num_accepted_tokens=accepted
    )
    assert split.thresholds == [2]
    assert split.metadata[0].is_prefilling.tolist() == [False] * 3
    assert (built.num_decodes, built.num_prefills) == (3, 0)
    assert built.num_accepted_tokens.tolist() == [2, 1, 1]


@every_builder
def test_a_capture_is_stock(split: Split, kind: Any) -> None:
    metadata = batch([1, 1, 1, 1], [False] * 4)
    built = builder(kind).build_for_cudagraph_capture(metadata)
    assert split.metadata[0] is metadata
    assert (built.num_decodes, built.num_prefills) == (4, 0)


@every_builder
def test_a_padded_decode_batch_refreshes_what_the_graph_reads(kind: Any) -> None:
    own = builder(kind)
    captured = own.build_for_cudagraph_capture(batch([1, 1, 1, 1], [False] * 4))
    address = captured.state_indices_tensor_d.data_ptr()
    built = own.build(0, batch(*PADDED["one padded row"][:2]))
    assert built.num_prefills == 0
    assert built.state_indices_tensor_d.data_ptr() == address
    assert built.state_indices_tensor_d[:3, 0].tolist() == [1, 4, 7]
