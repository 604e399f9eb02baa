"""encoder-input-norm: which images are normalised before graphs get them, and whose memory they are in then."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
from vllm.v1.worker.gpu.mm import encoder_runner

from activities import activity_of
from vllm_graphfix.fix import STEPPED_ASIDE, Activity
from vllm_graphfix.fixes.encoder_input_norm import FIX
from vllm_graphfix.verify.double.scenarios import encoder_input_norm as scenario

ACTIVITY = activity_of("encoder-input-norm")


@pytest.fixture(autouse=True)
def no_error() -> None:
    ACTIVITY.error = None


def manager_of(model: Any, *, ranks: int = 1) -> Any:
    """vLLM's manager, with no graphs."""
    manager: Any = object.__new__(EncoderCudaGraphManager)
    vars(manager).update(
        model=model,
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=ranks)),
        use_dp=False,
        graph_hits=0,
        graph_misses=0,
        get_cumulative_stats=dict,
        is_captured=lambda: True,
        supports_modality=lambda _: True,
    )
    return manager


def handed_on(manager: Any, pictures: dict[str, Any]) -> dict[str, Any]:
    """Return the images that *manager* encodes when it gets *pictures*."""
    (patch,) = FIX.patches("bytes-fall-back")
    result: dict[str, Any] = patch.wrap(lambda self, mm_kwargs: mm_kwargs, ACTIVITY)(manager, pictures)
    return result


def encoded_images(model: Any, pictures: dict[str, Any]) -> dict[str, Any]:
    """Return the images that a manager of *model* encodes when it gets *pictures*."""
    result = handed_on(manager_of(model), pictures)
    assert ACTIVITY.error is None
    return result


def encoded_by_v1(model: Any, pictures: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The embeddings that model runner V1 has of one image."""
    monkeypatch.setattr(gpu_model_runner, "group_and_batch_mm_kwargs", lambda *_, **__: [("image", 1, pictures)])
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
        _batch_mm_inputs_from_scheduler=lambda _: (["hash"], [("image", pictures)], [("request", None)]),
        _cache_encoder_output=lambda *_: None,
    )
    output: Any = SimpleNamespace(ec_manager_metadata=None, free_encoder_mm_hashes=[])
    return list(runner._execute_mm_encoder(output))


def encoded_by_v2(model: Any, pictures: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Those that model runner V2 has."""
    monkeypatch.setattr(encoder_runner, "group_and_batch_mm_kwargs", lambda *_, **__: [("image", 1, pictures)])
    runner: Any = object.__new__(encoder_runner.EncoderRunner)
    vars(runner).update(model=model, device=torch.device("cpu"), cudagraph_manager=manager_of(model))
    result: list[torch.Tensor] = runner.execute_mm_encoder([("image", pictures)])
    return result


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


@pytest.mark.parametrize(("kind", "name"), [("image", "pixel_values"), ("video", "pixel_values_videos")])
def test_images_are_normalised_and_the_callers_own_stay_as_they_are(model: Any, kind: str, name: str) -> None:
    pictures = scenario.images(kind, [(1, 4, 4)], seed=1)
    before = {key: value.clone() for key, value in pictures.items()}
    result = encoded_images(model, pictures)
    assert torch.equal(result[name], model.input_norm(before[name], model.visual.dtype))
    assert result[name].dtype == model.visual.dtype
    assert all(torch.equal(pictures[key], before[key]) and pictures[key].dtype == before[key].dtype for key in before)
    assert result[f"{kind}_grid_thw"] is pictures[f"{kind}_grid_thw"]


def test_embeddings_of_the_caller_stay_as_they_are(model: Any) -> None:
    pictures = {"image_embeds": torch.ones(4, 8), "image_grid_thw": torch.tensor([(1, 4, 4)])}
    assert encoded_images(model, pictures) is pictures


def test_images_that_were_normalised_before_stay_as_they_are(model: Any) -> None:
    model.input_norm = type(model.input_norm).identity()
    pictures = scenario.images("image", [(1, 4, 4)], seed=1)
    assert encoded_images(model, pictures) is pictures


def test_a_model_that_has_never_made_its_normalisation_is_not_touched(model: Any) -> None:
    """As OpenCUA of 0.28.0 and 0.29.0, which inherits from Qwen2.5-VL."""
    del model.input_norm
    pictures = scenario.images("image", [(1, 4, 4)], seed=1)
    assert encoded_images(model, pictures) is pictures


@pytest.mark.parametrize("encoded", [encoded_by_v1, encoded_by_v2])
@pytest.mark.usefixtures("fails_once")
def test_images_that_cannot_be_normalised_for_a_graph_are_encoded_without_one(
    model: Any, encoded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = scenario.images("image", [(1, 4, 4)], seed=1)
    (result,) = encoded(model, pictures, monkeypatch)
    (right,) = model.embed_multimodal(**pictures)
    assert torch.equal(result, right)
    assert ACTIVITY.error == "ValueError: another form"


@pytest.mark.parametrize("fails_once", [torch.OutOfMemoryError("out of memory")], indirect=True)
@pytest.mark.usefixtures("fails_once")
def test_where_memory_is_short_the_manager_goes_on_as_stock(model: Any) -> None:
    """The model, which would normalise them then, needs as much: the engine would end."""
    pictures = scenario.images("image", [(1, 4, 4)], seed=1)
    assert handed_on(manager_of(model), pictures) is pictures
    assert ACTIVITY.error == "OutOfMemoryError: out of memory"


@pytest.mark.usefixtures("fails_once")
def test_a_rank_that_others_encode_with_goes_on_as_stock(model: Any) -> None:
    """It would leave them alone in their graphs."""
    pictures = scenario.images("image", [(1, 4, 4)], seed=1)
    assert handed_on(manager_of(model, ranks=2), pictures) is pictures
    assert ACTIVITY.error == "ValueError: another form"


@pytest.mark.usefixtures("fails_once")
def test_a_rank_that_does_not_know_if_others_encode_with_it_goes_on_as_stock(model: Any) -> None:
    manager, pictures = manager_of(model), scenario.images("image", [(1, 4, 4)], seed=1)
    del manager.vllm_config
    assert handed_on(manager, pictures) is pictures


@pytest.mark.usefixtures("fails_once")
def test_where_a_model_runner_has_no_way_back_the_manager_goes_on_as_stock(model: Any) -> None:
    (patch,) = FIX.patches("bytes")
    activity, pictures = Activity(FIX.events), scenario.images("image", [(1, 4, 4)], seed=1)
    execute = patch.wrap(lambda self, mm_kwargs: mm_kwargs, activity)
    assert execute(manager_of(model), pictures) is pictures
    assert activity.error == "ValueError: another form"


STEPS = [("image", [(1, 4, 4)]), ("image", [(1, 8, 12)]), ("video", [(2, 4, 4)])]
"""In a graph, too large for one, and of the other kind."""


def normalised(model: Any, mm_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The images as `input_norm` makes them of bytes; what is no bytes any more stays."""
    return {
        name: model.input_norm(value, model.visual.dtype) if getattr(value, "dtype", None) == torch.uint8 else value
        for name, value in mm_kwargs.items()
    }


def normalise_when_selecting(model: Any) -> None:
    class Fork(type(model)):  # type: ignore[misc]
        def select_encoder_cudagraph_items(self, mm_kwargs: Any, indices: Any) -> Any:
            return super().select_encoder_cudagraph_items(normalised(self, mm_kwargs), indices)

    model.__class__ = Fork


def normalise_for_a_replay(model: Any) -> None:
    class Fork(type(model)):  # type: ignore[misc]
        def prepare_encoder_cudagraph_replay_buffers(self, mm_kwargs: Any, *args: Any) -> Any:
            return super().prepare_encoder_cudagraph_replay_buffers(normalised(self, mm_kwargs), *args)

        def encoder_eager_forward(self, mm_kwargs: Any, path: str = "default") -> Any:
            return super().encoder_eager_forward(normalised(self, mm_kwargs), path)

    model.__class__ = Fork


def normalise_where_pixels_are_looked_up(model: Any) -> None:
    stock = model._get_pixel_values_by_modality
    model._get_pixel_values_by_modality = lambda mm_kwargs: stock(normalised(model, mm_kwargs))


def normalise_in_the_encoder(model: Any) -> None:
    class Fork(type(model.visual)):  # type: ignore[misc]
        def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
            return super().forward(normalised(model, {"x": x})["x"], *args, **kwargs)

    model.visual.__class__ = Fork
    capture_bytes(model)


def normalise_in_a_hook(model: Any) -> None:
    model.visual.register_forward_pre_hook(lambda _, args: (normalised(model, {"x": args[0]})["x"], *args[1:]))
    capture_bytes(model)


def capture_bytes(model: Any) -> None:
    """The graph's buffer holds bytes, as it must where the graph itself normalises them."""
    stock = model.prepare_encoder_cudagraph_capture_inputs

    def prepare_encoder_cudagraph_capture_inputs(*args: Any, **kwargs: Any) -> Any:
        inputs = stock(*args, **kwargs)
        inputs.values["pixel_values"] = inputs.values["pixel_values"].to(torch.uint8)
        return inputs

    model.prepare_encoder_cudagraph_capture_inputs = prepare_encoder_cudagraph_capture_inputs


@pytest.mark.parametrize(
    "fork",
    [
        normalise_when_selecting,
        normalise_for_a_replay,
        normalise_where_pixels_are_looked_up,
        normalise_in_the_encoder,
        normalise_in_a_hook,
    ],
)
def test_a_model_of_ones_own_that_normalises_is_not_touched(model: Any, fork: Any) -> None:
    fork(model)
    check_right_without_the_fix(model)


def test_another_plugins_patch_of_a_models_class_is_not_touched(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(model)
    stock = kind.select_encoder_cudagraph_items
    monkeypatch.setattr(
        kind,
        "select_encoder_cudagraph_items",
        functools.wraps(stock)(lambda self, mm_kwargs, indices: stock(self, normalised(self, mm_kwargs), indices)),
    )
    check_right_without_the_fix(model)


def test_another_plugins_patch_of_the_manager_is_not_touched(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = EncoderCudaGraphManager._execute_local
    monkeypatch.setattr(
        EncoderCudaGraphManager,
        "_execute_local",
        lambda self, mm_kwargs: stock(self, normalised(self.model, mm_kwargs)),
    )
    check_right_without_the_fix(model)


def check_right_without_the_fix(model: Any) -> None:
    before = ACTIVITY.counts["images-not-normalised"]
    manager = scenario.captured_manager(model)
    for seed, (kind, grids) in enumerate(STEPS):
        pictures = scenario.images(kind, grids, seed)
        assert all(map(torch.equal, manager.execute(pictures), model.embed_multimodal(**pictures)))
    assert ACTIVITY.error is None
    assert ACTIVITY.counts["images-not-normalised"] == before, "nothing was corrected"


def test_images_that_another_caller_has_normalised_stay_as_they_are(model: Any) -> None:
    manager = scenario.captured_manager(model)
    pictures = scenario.images("image", [(1, 4, 4)], seed=1)
    assert all(map(torch.equal, manager.execute(normalised(model, pictures)), model.embed_multimodal(**pictures)))


@pytest.mark.parametrize("encoded", [encoded_by_v1, encoded_by_v2])
def test_a_model_runners_floats_are_bytes_that_nobody_has_normalised(
    model: Any, encoded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a processor of images makes them without torchvision."""
    pictures = scenario.images("image", [(1, 4, 4)], seed=1)
    pictures["pixel_values"] = pictures["pixel_values"].float()
    monkeypatch.setitem(globals(), "manager_of", scenario.captured_manager)
    (result,) = encoded(model, pictures, monkeypatch)
    (right,) = model.embed_multimodal(**pictures)
    assert torch.equal(result, right)


def test_what_steps_aside_says_so_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *values: warnings.append(text % values))
    monkeypatch.setattr("vllm_graphfix.fix.logger", logger)
    normalise_when_selecting(model)
    manager = manager_of(model)
    (patch,) = FIX.patches("bytes")
    activity, pictures = Activity(FIX.events), scenario.images("image", [(1, 4, 4)], seed=1)
    execute = patch.wrap(lambda self, mm_kwargs: mm_kwargs, activity)
    assert [execute(manager, pictures) is pictures for _ in range(2)] == [True, True]
    assert activity.counts == {"images-not-normalised": 0, STEPPED_ASIDE: 2}
    (warning,) = warnings
    assert "Fork.select_encoder_cudagraph_items is not vLLM's own" in warning


def test_what_adapters_have_encoded_without_a_graph_is_normalised_once(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the model: encoder-adapters returns None for it."""
    times: list[int] = []
    stock = type(model.input_norm).forward

    def forward(self: Any, *args: Any) -> Any:
        times.append(1)
        return stock(self, *args)

    monkeypatch.setattr(type(model.input_norm), "forward", forward)
    model.lora_manager = SimpleNamespace(
        supports_tower_connector_lora=True,
        mm_mapping=SimpleNamespace(tower_model=["visual."], connector=[]),
        punica_wrapper_mapping={
            "visual.": SimpleNamespace(token_mapping_meta=SimpleNamespace(no_lora_flag_cpu=torch.tensor([False])))
        },
    )
    pictures = scenario.images("image", [(1, 4, 4)], seed=1)
    (result,) = encoded_by_v2(model, pictures, monkeypatch)
    assert len(times) == 1
    assert torch.equal(result, model.embed_multimodal(**pictures)[0])
