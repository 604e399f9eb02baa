"""The way of images from a model runner to an encoder, in graphs and without, and the code that normalises them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_graphfix.source.part import module_name

if TYPE_CHECKING:
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

MANAGER = "vllm/v1/worker/encoder_cudagraph.py"
QWEN2_VL = "vllm/model_executor/models/qwen2_vl.py"
QWEN2_5_VL = "vllm/model_executor/models/qwen2_5_vl.py"
VISION = "vllm/model_executor/models/vision.py"
MANAGER_CLASS = "EncoderCudaGraphManager"

_MADE = "self.input_norm = FusedInputNorm.from_model_config(self.model_config)"
_NORMALISED = "{pixels} = self.input_norm({pixels}, self.visual.dtype)"
_PIXELS_BY_MODALITY = """
if self.get_input_modality(mm_kwargs) == "image":
    pixel_values = mm_kwargs["pixel_values"]
else:
    pixel_values = mm_kwargs["pixel_values_videos"]
"""
_TAKEN = "self._get_pixel_values_by_modality(mm_kwargs)"
_REPLAYED = f"""values = metadata | {{"pixel_values": {_TAKEN}}}"""
_IN_A_GRAPH = "return self.visual(pixel_values, None, encoder_metadata=metadata)"
_WITHOUT_A_GRAPH = "return self.visual(pixel_values, grid_thw)"
_IN_THE_ENCODER = "{states} = self.input_norm(x.to(device=self.device), self.dtype)"
IMAGE_NAMES = "pixel_values values selected_pv visual"
"""Names of images on their way through a model."""
_EMBEDDED = "{states} = self.patch_embed({states})"
_CONVERTED = "{states} = x.to(device=self.device, dtype=self.dtype)"
_SLICE = "pixel_values[cum_patches[i] : cum_patches[i + 1]]"
_SELECTED = f"selected_pv = torch.cat([{_SLICE} for i in indices])"
_SELECTED_IMAGES = 'return {"pixel_values": selected_pv, "image_grid_thw": selected_grid}'
_SELECTED_VIDEOS = 'return {"pixel_values_videos": selected_pv, "video_grid_thw": selected_grid}'
_BATCHES = """
for modality, num_items, mm_kwargs_batch in group_and_batch_mm_kwargs(
    mm_kwargs, device=self.device, pin_memory=PIN_MEMORY
):
    ...
"""
_SPECS, _SELECT = "self._get_item_specs(mm_kwargs)", "self._select_items(mm_kwargs, {})"
_SHARD = "(local_mm_kwargs, image_rank_assignment, images_per_rank, max_output_tokens_per_rank)"
_BATCH = f"batch_mm_kwargs = {_SELECT.format('batch_indices')}"
_SOURCE = "src = replay.values.get(key)"
_REPLAY = """
replay = self.model.prepare_encoder_cudagraph_replay_buffers(
    mm_kwargs, self.max_batch_size, self.max_frames_per_batch, path
)
"""
MANAGED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "execute",
        "mm_kwargs",
        (
            "self._get_per_item_out_tokens(mm_kwargs)",
            "self._dp_shard(mm_kwargs, per_item_out_tokens)",
            "self._execute_local(mm_kwargs)",
        ),
    ),
    (
        "execute",
        "local_mm_kwargs",
        (f"{_SHARD} = self._dp_shard(mm_kwargs, per_item_out_tokens)", "self._execute_local(local_mm_kwargs)"),
    ),
    ("_dp_shard", "mm_kwargs", (_SPECS, _SELECT.format("local_indices"), _SELECT.format("[]"))),
    (
        "_dp_shard",
        "local_mm_kwargs",
        (
            f"local_mm_kwargs = {_SELECT.format('local_indices')}",
            f"local_mm_kwargs = {_SELECT.format('[]')}",
            f"return {_SHARD}",
        ),
    ),
    ("_execute_local", "mm_kwargs", (_SPECS, _BATCH)),
    (
        "_execute_local",
        "batch_mm_kwargs",
        (
            _BATCH,
            "self.model.encoder_eager_forward(batch_mm_kwargs, path=path)",
            "self._run_budget_graph(batch_mm_kwargs, token_budget, path=path)",
            "self.model.postprocess_encoder_output(*..., batch_mm_kwargs=batch_mm_kwargs)",
        ),
    ),
    ("_select_items", "mm_kwargs", ("return self.model.select_encoder_cudagraph_items(mm_kwargs, indices)",)),
    ("_run_budget_graph", "mm_kwargs", (_SPECS, _REPLAY)),
    ("_run_budget_graph", "replay", (_REPLAY, _SOURCE, "graph_meta.graph.replay()")),
    (
        "_run_budget_graph",
        "src",
        (_SOURCE, "src is None", "src.ndim == 0", "buf.copy_(src)", "padding_logic(buf, src)"),
    ),
    ("_copy_padded_buffer", "src", ("dst[: src.shape[0]].copy_(src)",)),
)
"""All uses of images in the manager, by method and variable: any other use might normalise them."""


class Model(NamedTuple):
    """A model that may normalise images on the device, with the code that does."""

    path: str
    name: str
    encoder: str
    states: str
    """The name of the images in its encoder's `forward`."""

    @property
    def module(self) -> str:
        return module_name(self.path)

    def method(self, source: Source, name: str) -> Function | None:
        return source.function(self.path, f"{self.name}.{name}")


MODELS = (
    Model(QWEN2_VL, "Qwen2VLForConditionalGeneration", "Qwen2VisionTransformer", "x"),
    Model(QWEN2_5_VL, "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VisionTransformer", "hidden_states"),
)


def normalises_itself(source: Source, model: Model) -> str | None:
    """Return the place where the encoder of *model* normalises its input before embedding it, if no other code does."""
    forward = source.function(model.path, f"{model.encoder}.forward")
    around = [model.method(source, f"_process_{kind}_input") for kind in ("image", "video")]
    if forward is None or any(each is None or each.contains_name("input_norm") for each in around):
        return None
    parts = forward.find_sequence(_IN_THE_ENCODER.format(states=model.states), _EMBEDDED.format(states=model.states))
    if parts and parts[0] in forward.node.body:
        return forward.at(parts[0])
    return None


def only_passes_images_on(source: Source) -> bool:
    """Tell if the manager only selects, copies and passes on images."""
    methods = {name: source.function(MANAGER, f"{MANAGER_CLASS}.{name}") for name, *_ in MANAGED}
    return all(
        method is not None and method.used_only_in(variable, *patterns)
        for name, variable, patterns in MANAGED
        for method in (methods[name],)
    )


def encodes_as_batched(encode: Function, *calls: str) -> bool:
    """Tell if a model runner's *encode* makes *calls* with each batch as grouped."""
    return (
        len(encode.find_each(_BATCHES, *calls)) == len(calls) + 1
        and encode.mentions(mm_kwargs_batch=len(calls) + 1)
        and encode.assigned("mm_kwargs_batch") == 1
    )


def _embeds_at_once(encode: Function, states: str) -> bool:
    """Tell if an encoder's `forward` embeds images without any step before."""
    parts = encode.find_sequence(_CONVERTED.format(states=states), _EMBEDDED.format(states=states), at_once=True)
    return bool(parts) and parts[0] in encode.node.body and encode.find("x")[0].lineno >= parts[0].lineno


def normalises_without_graphs(source: Source, model: Model) -> bool:
    """Tell if *model* normalises images on the way without graphs, and on no other way to its encoder."""
    make, pixels = model.method(source, "__init__"), model.method(source, "_get_pixel_values_by_modality")
    image, video = (model.method(source, f"_process_{kind}_input") for kind in ("image", "video"))
    replay = model.method(source, "prepare_encoder_cudagraph_replay_buffers")
    graph, eager = model.method(source, "encoder_cudagraph_forward"), model.method(source, "encoder_eager_forward")
    select = model.method(source, "select_encoder_cudagraph_items")
    encode = source.function(model.path, f"{model.encoder}.forward")
    return bool(
        make
        and make.find_unique(_MADE)
        and image
        and image.find_unique(_NORMALISED.format(pixels="pixel_values"))
        and video
        and video.find_unique(_NORMALISED.format(pixels="pixel_values_videos"))
        and pixels
        and pixels.find_each(_PIXELS_BY_MODALITY, "return pixel_values")
        and pixels.used_only_in("pixel_values", _PIXELS_BY_MODALITY, "return pixel_values")
        and select
        and select.used_only_in("pixel_values", f"pixel_values = {_TAKEN}", "pixel_values[:0]", _SLICE)
        and select.used_only_in("selected_pv", _SELECTED, _SELECTED_IMAGES, _SELECTED_VIDEOS)
        and select.find_each(f"pixel_values = {_TAKEN}", _SELECTED, _SELECTED_IMAGES, _SELECTED_VIDEOS)
        and replay
        and replay.used_only_in("values", _REPLAYED, "return EncoderCudaGraphReplayBuffers(values=values)")
        and replay.find_unique(_REPLAYED)
        and graph
        and graph.used_only_in("pixel_values", 'pixel_values = values.pop("pixel_values")', _IN_A_GRAPH)
        and graph.find_unique(_IN_A_GRAPH)
        and eager
        and eager.used_only_in("pixel_values", f"pixel_values = {_TAKEN}", _WITHOUT_A_GRAPH)
        and eager.find_unique(_WITHOUT_A_GRAPH)
        and encode
        and _embeds_at_once(encode, model.states)
        and not any(each.contains_name("input_norm") for each in (pixels, select, replay, graph, eager, encode))
    )
