"""Trials of image-embeddings: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import Change, before, both, swap
from trial_rows import LOOKALIKE, REMEDY, Edit, Served, Wording, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.image_embeddings import _BATCH, _DEFAULT_STATE, _RUNNER

v2 = "VLLM_USE_V2_MODEL_RUNNER=1 "
MADE = r"^( +)(input_batch = InputBatch\.make_dummy\(\n(?:.*\n)+?\1\)\n)"
BUFFER = "self.encoder_runner.inputs_embeds[:num_tokens_after_padding]"
EMBEDDED = rf"\1\2\1if self.supports_mm_inputs:\n\1    input_batch.inputs_embeds = {BUFFER}\n"
IF_IMAGES = r"^( +)if self\.supports_mm_inputs and self\.is_first_pp_rank:\n(?= +# Run MM)"
OF_DUMMY = r"inputs_embeds = self\.model_state\.dummy_inputs_embeds\(\n.*\n +\)"
qwen2_vl = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "vision_config": {"depth": 32},
}
fuyu = {"architectures": ["FuyuForCausalLM"], "model_type": "fuyu", "image_size": 300}

EDITS = (
    Edit("embeddings of the buffer", "0.16.0", _RUNNER, MADE, EMBEDDED, Verdict.FIXED),
    Edit("embeddings of the buffer, 0.15.0", "0.15.0", _RUNNER, MADE, EMBEDDED, Verdict.FIXED),
    Edit(
        "and not passed on",
        "0.16.0",
        _RUNNER,
        MADE,
        EMBEDDED,
        also=(
            (
                _RUNNER,
                r"inputs_embeds=input_batch\.inputs_embeds",
                "inputs_embeds=None if dummy_run else input_batch.inputs_embeds",
            ),
        ),
    ),
    Edit(
        "made by the dummy batch itself",
        "0.15.1",
        _BATCH,
        "inputs_embeds=None",
        "inputs_embeds=input_buffers.inputs_embeds[:num_tokens]",
    ),
    Edit(
        "not in dummy runs",
        "0.17.0",
        _RUNNER,
        IF_IMAGES,
        r"\1if self.supports_mm_inputs and self.is_first_pp_rank and not dummy_run:\n",
    ),
    Edit("no embeddings of a dummy batch", "0.25.1", _RUNNER, OF_DUMMY, "inputs_embeds = None"),
    Edit(
        "a state without embeddings of a dummy batch",
        "0.33.0",
        _DEFAULT_STATE,
        r"return self\.encoder_runner\.inputs_embeds\[:num_tokens\]",
        "return None",
    ),
)


def behind_the_dummy(*lines: str) -> Change:
    """*lines* behind the making of a dummy batch, as deep as that."""
    return swap(MADE, r"\1\2" + "".join(rf"\1{line}\n" for line in lines))


def set_if(condition: str, value: str = BUFFER) -> Change:
    return behind_the_dummy(f"if {condition}:", f"    input_batch.inputs_embeds = {value}")


OF_IMAGES = "self.supports_mm_inputs"
WORDINGS = (
    Wording(
        REMEDY,
        "0.16.0",
        _RUNNER,
        {
            "as many as the batch has": set_if(
                OF_IMAGES, "self.encoder_runner.inputs_embeds[: input_batch.num_tokens_after_padding]"
            ),
            "a copy": set_if(OF_IMAGES, f"{BUFFER}.clone()"),
            "zeros": set_if(
                OF_IMAGES,
                "torch.zeros(num_tokens_after_padding, self.encoder_runner.inputs_embeds.shape[1], device=self.device)",
            ),
            "in front of the model": before(
                r"hidden_states = self\.model\(",
                f"if {OF_IMAGES} and input_batch.inputs_embeds is None:",
                f"    input_batch.inputs_embeds = {BUFFER}",
            ),
            "set by name": behind_the_dummy(f"if {OF_IMAGES}:", f'    setattr(input_batch, "inputs_embeds", {BUFFER})'),
        },
    ),
    Wording(
        LOOKALIKE,
        "0.16.0",
        _RUNNER,
        {
            "with adapters alone": set_if(f"{OF_IMAGES} and self.lora_config"),
            "not in the profiling run": set_if(f"{OF_IMAGES} and not skip_attn_for_dummy_run"),
            "of another name": behind_the_dummy(f"if {OF_IMAGES}:", f"    input_batch.mm_embeds = {BUFFER}"),
            "undone": both(
                set_if(OF_IMAGES),
                before(r"# Run model\.", "if dummy_run:", "    input_batch.inputs_embeds = None"),
            ),
            "too late": before(
                r"self\.execute_model_state = hidden_states, ",
                f"if dummy_run and {OF_IMAGES}:",
                f"    input_batch.inputs_embeds = {BUFFER}",
            ),
        },
    ),
)

SERVED = (
    Served("0.16.0", f"{v2}./model", affects, "takes images", model=qwen2_vl),
    Served("0.15.0", f"{v2}./model -cc.cudagraph_mode=NONE", affects, "takes images", model=qwen2_vl),
    Served("0.16.0", "./model", does_not, "V1", model=qwen2_vl),
    Served("0.16.0", f"{v2}./model --enforce-eager", does_not, "--enforce-eager", model=qwen2_vl),
    Served("0.16.0", f"{v2}./llama", does_not, "takes no images"),
    Served("0.16.0", f"{v2}./model", unknown, "knowing whether", model=fuyu),
)
