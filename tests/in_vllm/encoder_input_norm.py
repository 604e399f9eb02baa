"""encoder-input-norm: which images are normalised before graphs get them, and whose memory they are in then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

import vllm_graphfix
from activities import activity_of
from vllm_graphfix.verify.double.scenarios import encoder_input_norm as scenario

ACTIVITY = activity_of("encoder-input-norm")


@pytest.fixture(autouse=True)
def no_error() -> None:
    ACTIVITY.error = None


def given(model: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """What a manager of *model* goes on with when it is given the images that are *asked* for."""
    manager: Any = object.__new__(EncoderCudaGraphManager)
    vars(manager).update(
        model=model,
        use_dp=False,
        graph_hits=0,
        graph_misses=0,
        get_cumulative_stats=dict,
        _execute_local=lambda mm_kwargs: mm_kwargs,
    )
    found: dict[str, Any] = manager.execute(asked)
    assert ACTIVITY.error is None
    return found


@pytest.fixture(params=["qwen2_vl_model", "qwen2_5_vl_model"])
def model(request: pytest.FixtureRequest) -> Any:
    with scenario.models_on_the_cpu():
        return getattr(scenario, request.param)(normalises=True)


def test_the_fix_is_active() -> None:
    assert vllm_graphfix.states()["encoder-input-norm"].state.value == "active"


@pytest.mark.parametrize(("kind", "name"), [("image", "pixel_values"), ("video", "pixel_values_videos")])
def test_images_are_normalised_and_the_callers_own_are_left_as_they_are(model: Any, kind: str, name: str) -> None:
    asked = scenario.images(kind, [(1, 4, 4)], seed=1)
    before = {key: value.clone() for key, value in asked.items()}
    found = given(model, asked)
    assert torch.equal(found[name], model.input_norm(before[name], model.visual.dtype))
    assert found[name].dtype == model.visual.dtype
    assert all(torch.equal(asked[key], before[key]) and asked[key].dtype == before[key].dtype for key in before)
    assert found[f"{kind}_grid_thw"] is asked[f"{kind}_grid_thw"]


def test_embeddings_that_are_given_stay_as_they_are(model: Any) -> None:
    asked = {"image_embeds": torch.ones(4, 8), "image_grid_thw": torch.tensor([(1, 4, 4)])}
    assert given(model, asked) is asked


def test_images_that_were_normalised_before_stay_as_they_are(model: Any) -> None:
    model.input_norm = type(model.input_norm).identity()
    asked = scenario.images("image", [(1, 4, 4)], seed=1)
    assert given(model, asked) is asked


def test_a_model_that_has_never_made_its_normalisation_is_left_alone(model: Any) -> None:
    """As OpenCUA of 0.28.0 and 0.29.0, which inherits from Qwen2.5-VL."""
    del model.input_norm
    asked = scenario.images("image", [(1, 4, 4)], seed=1)
    assert given(model, asked) is asked
