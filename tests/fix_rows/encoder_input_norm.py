"""Trials of encoder-input-norm: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes._encoder_images import MANAGER, QWEN2_5_VL, QWEN2_VL, VISION
from vllm_graphfix.fixes._encoder_runners import RUNNER, RUNNER_V2

fixed = Verdict.FIXED
replayed = r'"pixel_values": self\._get_pixel_values_by_modality\(mm_kwargs\),'
normalised = '"pixel_values": self.input_norm(self._get_pixel_values_by_modality(mm_kwargs), self.visual.dtype),'
popped = r'^( +)pixel_values = values\.pop\("pixel_values"\)\n'
popped_normalised = r"\g<0>\1pixel_values = self.input_norm(pixel_values, self.visual.dtype)\n"
encoded = r"^( +)pixel_values = (self\._get_pixel_values_by_modality\(mm_kwargs\))\n( +grid_thw = .*\n +return self)"
encoded_normalised = r"\1pixel_values = self.input_norm(\2, self.visual.dtype)\n\3"
embedded = r"^( +)x = x\.to\(device=self\.device, dtype=self\.dtype\)\n( +x = self\.patch_embed\(x\)\n)"
in_the_encoder = r"\1x = self.input_norm(x.to(device=self.device), self.dtype)\n\2"
around = r"^ +pixel_values = self\.input_norm\(pixel_values, self\.visual\.dtype\)\n"
of_videos = r"^ +pixel_values_videos = self\.input_norm\(\n.*\n +\)\n"
qwen = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
qwen3 = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
selected = r"^( +)pixel_values = (self\._get_pixel_values_by_modality\(mm_kwargs\))\n(\n +if len\(indices\))"
captured = "./model -cc.cudagraph_mm_encoder=true"

EDITS = (
    Edit(
        "the encoders themselves normalise",
        "0.29.0",
        QWEN2_VL,
        embedded,
        in_the_encoder,
        fixed,
        also=(
            (QWEN2_VL, around, ""),
            (QWEN2_VL, of_videos, ""),
            (
                QWEN2_5_VL,
                r"^( +)hidden_states = x\.to\(device=self\.device, dtype=self\.dtype\)\n",
                r"\1hidden_states = self.input_norm(x.to(device=self.device), self.dtype)\n",
            ),
            (QWEN2_5_VL, around, ""),
            (QWEN2_5_VL, of_videos, ""),
        ),
    ),
    Edit(
        "one of the two encoders does",
        "0.28.0",
        QWEN2_VL,
        embedded,
        in_the_encoder,
        also=((QWEN2_VL, around, ""), (QWEN2_VL, of_videos, "")),
    ),
    Edit("one encoder no more", "0.30.0", QWEN2_VL, r"^ +x = self\.input_norm\(.*\n", ""),
    Edit(
        "only large images",
        "0.33.0",
        QWEN2_5_VL,
        r"^( +)(hidden_states = self\.input_norm\(.*\n)",
        r"\1if len(x) > 1024:\n\1    \2",
    ),
    Edit(
        "normalised twice, without graphs",
        "0.31.0",
        QWEN2_VL,
        r'^( +)pixel_values = image_input\["pixel_values"\]\n',
        r"\g<0>\1pixel_values = self.input_norm(pixel_values, self.visual.dtype)\n",
    ),
    Edit(
        "normalised on each way to the encoder",
        "0.28.0",
        QWEN2_VL,
        replayed,
        normalised,
        also=(
            (QWEN2_VL, encoded, encoded_normalised),
            (QWEN2_5_VL, replayed, normalised),
            (QWEN2_5_VL, encoded, encoded_normalised),
        ),
        remedy=True,
    ),
    Edit("normalised for a graph alone", "0.28.0", QWEN2_VL, replayed, normalised),
    Edit("normalised for a graph of the other", "0.29.0", QWEN2_5_VL, replayed, normalised),
    Edit(
        "normalised in a graph",
        "0.29.0",
        QWEN2_VL,
        popped,
        popped_normalised,
        also=(
            (QWEN2_VL, encoded, encoded_normalised),
            (QWEN2_5_VL, popped, popped_normalised),
            (QWEN2_5_VL, encoded, encoded_normalised),
        ),
        remedy=True,
    ),
    Edit(
        "normalised by the manager",
        "0.28.0",
        MANAGER,
        r"^( +)if self\.use_dp:\n( +)per_item_out_tokens",
        r"\1mm_kwargs = self.model.input_norm.of(mm_kwargs)\n\g<0>",
    ),
    Edit(
        "normalised where images are looked up",
        "0.29.0",
        QWEN2_VL,
        r'^( +)pixel_values = mm_kwargs\["pixel_values"\]\n',
        r"\g<0>\1pixel_values = self.normalised(pixel_values)\n",
    ),
    Edit(
        "normalised where images are selected",
        "0.29.0",
        QWEN2_VL,
        selected,
        encoded_normalised,
        also=((QWEN2_5_VL, selected, encoded_normalised),),
        remedy=True,
    ),
    Edit(
        "normalised where selected images are returned",
        "0.28.0",
        QWEN2_5_VL,
        r'"pixel_values": selected_pv,',
        '"pixel_values": self.normalised(selected_pv),',
    ),
    Edit(
        "normalised by a model runner",
        "0.29.0",
        RUNNER,
        r"encoder_cudagraph_manager\.execute\(\n( +)mm_kwargs_batch,",
        r"encoder_cudagraph_manager.execute(\n\1normalise_pixels(model, mm_kwargs_batch),",
    ),
    Edit(
        "normalised by the other model runner",
        "0.28.0",
        RUNNER_V2,
        r"^( +)cg_manager = self\.cudagraph_manager\n",
        r"\g<0>\1mm_kwargs_batch = normalise_pixels(self.model, mm_kwargs_batch)\n",
    ),
    Edit(
        "normalised by the manager where a rank's images are selected",
        "0.29.0",
        MANAGER,
        r"return self\.model\.select_encoder_cudagraph_items\(mm_kwargs, indices\)",
        "return self.model.select_encoder_cudagraph_items(normalise_pixels(self.model, mm_kwargs), indices)",
    ),
    Edit(
        "normalised by the manager where images are copied",
        "0.28.0",
        MANAGER,
        r"dst\[: src\.shape\[0\]\]\.copy_\(src\)",
        "dst[: src.shape[0]].copy_(normalise_pixels(src))",
    ),
    Edit(
        "bytes normalised by an encoder",
        "0.29.0",
        QWEN2_5_VL,
        r"^( +)hidden_states = x\.to\(device=self\.device, dtype=self\.dtype\)\n",
        r"\1x = self.normalise_bytes(x)\n\g<0>",
    ),
    Edit(
        "another normalisation",
        "0.29.0",
        QWEN2_5_VL,
        r"FusedInputNorm\.from_model_config\(self\.model_config\)",
        "AnotherInputNorm(self.model_config)",
    ),
    Edit(
        "the normalisation takes other arguments",
        "0.28.0",
        VISION,
        r"^        grid_thw: torch\.Tensor,\n        visual_dtype",
        "        pixels: torch.Tensor,\n        visual_dtype",
    ),
    Edit(
        "no way back without a graph",
        "0.29.0",
        RUNNER,
        r"^( +)if cudagraph_output is not None:\n",
        r"\1assert cudagraph_output is not None\n\g<0>",
        shape="bytes",
    ),
    Edit(
        "no way back in the other model runner",
        "0.28.0",
        RUNNER_V2,
        r"^( +)if cudagraph_output is not None\n",
        r"\1if cg_manager is not None\n",
        shape="bytes",
    ),
    Edit(
        "no encoder is captured",
        "0.29.0",
        RUNNER,
        r"vllm\.v1\.worker\.encoder_cudagraph import",
        "vllm.v1.worker.encoder_graphs import",
    ),
    Edit(
        "graphs are without the encoder's normalisation",
        "0.30.0",
        QWEN2_VL,
        r"^( +)return self\.visual\(pixel_values, None, encoder_metadata=metadata\)\n",
        r"\1self.visual.input_norm = FusedInputNorm.identity()\n\g<0>",
    ),
)

SERVED = (
    Served("0.29.0", captured, affects, "Qwen2.5-VL", model=qwen),
    Served("0.28.0", f"VLLM_USE_V2_MODEL_RUNNER=1 {captured}", affects, "cudagraph_mm_encoder is on", model=qwen),
    Served("0.29.0", "./model", does_not, "cudagraph_mm_encoder is off", model=qwen),
    Served("0.29.0", f"{captured} --enforce-eager", does_not, "--enforce-eager", model=qwen),
    Served("0.29.0", f"{captured} --no-mm-device-do-normalize", does_not, "--no-mm-device-do-normalize", model=qwen),
    Served("0.28.0", f"VLLM_USE_RUST_FRONTEND=1 {captured}", does_not, "VLLM_USE_RUST_FRONTEND", model=qwen),
    Served("0.29.0", captured, does_not, "neither Qwen2-VL nor Qwen2.5-VL", model=qwen3),
    Served("0.29.0", "./model --config serve.yaml", unknown, "--config", model=qwen),
)
