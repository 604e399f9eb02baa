"""hidden-states-padding on vLLM's own drafter: what the layers are given as slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from activities import activity_of
from vllm_graphfix.fixes.hidden_states_padding import PADDING_WRITTEN
from vllm_graphfix.verify.trials.hidden_states_padding import BLOCK_SIZE, BLOCKS, HIDDEN_SIZE, LAYER, LAYERS, proposer


@pytest.fixture
def drafter() -> Any:
    return proposer(torch.zeros(BLOCKS, BLOCK_SIZE, LAYERS, HIDDEN_SIZE), graphs=True)


def test_a_step_keeps_its_slots_in_the_drafters_own_buffer(drafter: Any) -> None:
    """Those that it has as -1 itself, of tokens whose context is another rank's, are nobody's either."""
    inputs = torch.tensor([5, -1, 7])
    before = activity_of("hidden-states-padding").counter(PADDING_WRITTEN).count
    drafter._determine_batch_execution_and_padding(3)
    slots = drafter._get_slot_mapping(8, inputs)[LAYER]
    assert slots.tolist() == [5, 0, 7, 0, 0, 0, 0, 0]
    assert slots.data_ptr() == drafter._slot_mapping_buffer.data_ptr()
    assert inputs.tolist() == [5, -1, 7], "the step's own are the model runner's"
    assert activity_of("hidden-states-padding").counter(PADDING_WRITTEN).count == before + 1


def test_a_step_whose_slots_the_model_runner_has_padded_is_counted_by_its_tokens(drafter: Any) -> None:
    before = activity_of("hidden-states-padding").counter(PADDING_WRITTEN).count
    drafter._determine_batch_execution_and_padding(3)
    assert drafter._get_slot_mapping(8, torch.tensor([5, 6, 7] + [-1] * 5))[LAYER].tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert activity_of("hidden-states-padding").counter(PADDING_WRITTEN).count == before + 1
    drafter._determine_batch_execution_and_padding(8)
    drafter._get_slot_mapping(8, torch.arange(8))
    assert activity_of("hidden-states-padding").counter(PADDING_WRITTEN).count == before + 1


def test_a_dummy_run_gets_the_buffers_values_and_is_not_counted(drafter: Any) -> None:
    before = activity_of("hidden-states-padding").counter(PADDING_WRITTEN).count
    drafter._slot_mapping_buffer.copy_(torch.arange(16))
    assert drafter._get_slot_mapping(8)[LAYER].tolist() == list(range(8))
    assert activity_of("hidden-states-padding").counter(PADDING_WRITTEN).count == before
