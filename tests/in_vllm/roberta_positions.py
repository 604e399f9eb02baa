"""roberta-positions on vLLM's own models: whose positions are put back."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import override_forward_context
from vllm.model_executor.models import roberta
from vllm.v1.worker import gpu_model_runner

from activities import activity_of
from vllm_graphfix.fix import STEPPED_ASIDE
from vllm_graphfix.verify.double.model_runners import wrappers_on_the_double
from vllm_graphfix.verify.trials.roberta_positions import _model

ACTIVITY = activity_of("roberta-positions")
CONTEXT: Any = SimpleNamespace(attn_metadata=None, batch_descriptor=None, cudagraph_runtime_mode=CUDAGraphMode.NONE)
OWNERS = ("RobertaEmbeddingModel", "RobertaForSequenceClassification")


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    ACTIVITY.reset()
    with wrappers_on_the_double():
        yield


def positions_after(model: Any) -> list[int]:
    """The positions 0 to 3 after a call of *model*."""
    positions = torch.arange(4)
    with override_forward_context(CONTEXT):
        model.forward(input_ids=torch.zeros(4, dtype=torch.int64), positions=positions)
    assert ACTIVITY.error is None
    return positions.tolist()


@pytest.mark.parametrize("owner", OWNERS)
def test_positions_of_stocks_own_models_are_put_back(owner: str) -> None:
    assert positions_after(_model(owner)) == [0, 1, 2, 3]
    assert STEPPED_ASIDE not in ACTIVITY.counts


def test_positions_of_a_subclass_without_a_forward_are_put_back() -> None:
    model = _model("RobertaEmbeddingModel")
    model.__class__ = roberta.BgeM3EmbeddingModel
    assert positions_after(model) == [0, 1, 2, 3]


@pytest.mark.parametrize("owner", OWNERS)
def test_positions_that_a_subclass_has_put_back_are_not_put_back_twice(owner: str) -> None:
    class Model(getattr(roberta, owner)):  # type: ignore[misc]
        def forward(self, input_ids: Any, positions: Any, **kwargs: Any) -> Any:
            hidden_states = super().forward(input_ids, positions, **kwargs)
            positions -= self.padding_idx + 1
            return hidden_states

    model = _model(owner)
    model.__class__ = Model
    assert positions_after(model) == [0, 1, 2, 3]
    assert ACTIVITY.counts[STEPPED_ASIDE] == 1


def test_positions_that_another_plugin_does_not_add_to_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roberta, "replace_roberta_positions", lambda *_, **__: None)
    assert positions_after(_model("RobertaEmbeddingModel")) == [0, 1, 2, 3]
    assert ACTIVITY.counts[STEPPED_ASIDE] == 1


@pytest.mark.parametrize("replaced", ["by a subclass", "by another plugin"])
def test_positions_that_a_model_runner_has_put_back_are_not_put_back_twice(
    replaced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def _model_forward(self: Any, positions: Any, **kwargs: Any) -> Any:
        output = self.model.forward(positions=positions, **kwargs)
        positions -= self.model.padding_idx + 1
        return output

    kind: Any = gpu_model_runner.GPUModelRunner
    if replaced == "by a subclass":
        kind = type("ModelRunner", (kind,), {"_model_forward": _model_forward})
    else:
        monkeypatch.setattr(kind, "_model_forward", _model_forward)
    runner = object.__new__(kind)
    runner.model = _model("RobertaEmbeddingModel")
    positions = torch.arange(4)
    with override_forward_context(CONTEXT):
        runner._model_forward(input_ids=torch.zeros(4, dtype=torch.int64), positions=positions)
    assert positions.tolist() == [0, 1, 2, 3]
    assert ACTIVITY.counts[STEPPED_ASIDE] == 1


def test_positions_of_stocks_own_model_runner_are_put_back() -> None:
    runner = object.__new__(gpu_model_runner.GPUModelRunner)
    runner.model = _model("RobertaEmbeddingModel")
    positions = torch.arange(4)
    with override_forward_context(CONTEXT):
        runner._model_forward(input_ids=torch.zeros(4, dtype=torch.int64), positions=positions)
    assert positions.tolist() == [0, 1, 2, 3]
    assert STEPPED_ASIDE not in ACTIVITY.counts
