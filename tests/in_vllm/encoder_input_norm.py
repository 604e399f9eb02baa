"""encoder-input-norm: which images are normalised before graphs get them, and whose memory they are in then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
from vllm.v1.worker.gpu.mm import encoder_runner

import vllm_graphfix
from activities import activity_of
from vllm_graphfix.fix import Activity
from vllm_graphfix.fixes.encoder_input_norm import FIX
from vllm_graphfix.verify.double.scenarios import encoder_input_norm as scenario

ACTIVITY = activity_of("encoder-input-norm")


@pytest.fixture(autouse=True)
def no_error() -> None:
    ACTIVITY.error = None


def manager_of(model: Any, *, ranks: int = 1) -> Any:
    """vLLM's manager, which returns what it goes on with."""
    manager: Any = object.__new__(EncoderCudaGraphManager)
    vars(manager).update(
        model=model,
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=ranks)),
        use_dp=False,
        graph_hits=0,
        graph_misses=0,
        get_cumulative_stats=dict,
        _execute_local=lambda mm_kwargs: mm_kwargs,
        is_captured=lambda: True,
        supports_modality=lambda _: True,
    )
    return manager


def given(model: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """What a manager of *model* goes on with when it is given the images that are *asked* for."""
    found: dict[str, Any] = manager_of(model).execute(asked)
    assert ACTIVITY.error is None
    return found


def encoded_by_v1(model: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The embeddings that model runner V1 has of one image."""
    monkeypatch.setattr(gpu_model_runner, "group_and_batch_mm_kwargs", lambda *_, **__: [("image", 1, asked)])
    runner: Any = object.__new__(gpu_model_runner.GPUModelRunner)
    vars(runner).update(
        model=model,
        device=torch.device("cpu"),
        lora_config=None,
        observability_config=None,
        is_multimodal_pruning_enabled=False,
        requires_sequential_video_encoding=False,
        encoder_cudagraph_manager=manager_of(model),
        timed_encoder_operation=lambda *_: contextlib.nullcontext(),
        _batch_mm_inputs_from_scheduler=lambda _: (["hash"], [("image", asked)], [("request", None)]),
        _cache_encoder_output=lambda *_: None,
    )
    output: Any = SimpleNamespace(ec_manager_metadata=None, free_encoder_mm_hashes=[])
    return list(runner._execute_mm_encoder(output))


def encoded_by_v2(model: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Those that model runner V2 has."""
    monkeypatch.setattr(encoder_runner, "group_and_batch_mm_kwargs", lambda *_, **__: [("image", 1, asked)])
    runner: Any = object.__new__(encoder_runner.EncoderRunner)
    vars(runner).update(model=model, device=torch.device("cpu"), cudagraph_manager=manager_of(model))
    found: list[torch.Tensor] = runner.execute_mm_encoder([("image", asked)])
    return found


@pytest.fixture(params=["qwen2_vl_model", "qwen2_5_vl_model"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    with scenario.models_on_the_cpu():
        yield getattr(scenario, request.param)(normalises=True)


@pytest.fixture(params=[ValueError("another form")])
def fails_once(model: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The first normalisation fails, and none after it."""
    kind, failing = type(model.input_norm), iter([request.param])
    stock = kind.forward

    def forward(self: Any, *args: Any) -> Any:
        for error in failing:
            raise error
        return stock(self, *args)

    monkeypatch.setattr(kind, "forward", forward)


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


@pytest.mark.parametrize("encoded", [encoded_by_v1, encoded_by_v2])
@pytest.mark.usefixtures("fails_once")
def test_images_that_cannot_be_normalised_for_a_graph_are_encoded_without_one(
    model: Any, encoded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = scenario.images("image", [(1, 4, 4)], seed=1)
    (found,) = encoded(model, asked, monkeypatch)
    (right,) = model.embed_multimodal(**asked)
    assert torch.equal(found, right)
    assert ACTIVITY.error == "ValueError: another form"


@pytest.mark.parametrize("fails_once", [torch.OutOfMemoryError("out of memory")], indirect=True)
@pytest.mark.usefixtures("fails_once")
def test_where_memory_is_short_the_manager_goes_on_as_stock(model: Any) -> None:
    """The model, which would normalise them then, needs as much: the engine would end."""
    asked = scenario.images("image", [(1, 4, 4)], seed=1)
    assert manager_of(model).execute(asked) is asked
    assert ACTIVITY.error == "OutOfMemoryError: out of memory"


@pytest.mark.usefixtures("fails_once")
def test_a_rank_that_others_encode_with_goes_on_as_stock(model: Any) -> None:
    """It would leave them alone in their graphs."""
    asked = scenario.images("image", [(1, 4, 4)], seed=1)
    assert manager_of(model, ranks=2).execute(asked) is asked
    assert ACTIVITY.error == "ValueError: another form"


@pytest.mark.usefixtures("fails_once")
def test_a_rank_that_does_not_know_if_others_encode_with_it_goes_on_as_stock(model: Any) -> None:
    manager, asked = manager_of(model), scenario.images("image", [(1, 4, 4)], seed=1)
    del manager.vllm_config
    assert manager.execute(asked) is asked


@pytest.mark.usefixtures("fails_once")
def test_where_a_model_runner_has_no_way_back_the_manager_goes_on_as_stock(model: Any) -> None:
    (patch,) = FIX.patches("bytes")
    activity, asked = Activity(FIX.events), scenario.images("image", [(1, 4, 4)], seed=1)
    execute = patch.wrap(lambda self, mm_kwargs: mm_kwargs, activity)
    assert execute(manager_of(model), asked) is asked
    assert activity.error == "ValueError: another form"
