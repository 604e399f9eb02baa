"""Trials of encoder-adapters: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import swap
from trial_rows import LOOKALIKE, SHAPE, Edit, Served, Wording, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes._encoder_runners import RUNNER, RUNNER_V2
from vllm_graphfix.fixes.encoder_adapters import _ADAPTERS, _MANAGER, _META, _STATE_V2

fixed = Verdict.FIXED
made = r"^( +)raw_model = self\.get_model\(\)\n"
takes = "self.lora_config is not None and self.lora_config.enable_tower_connector_lora"
refused = rf"\1if {takes}:\n\1    return None\n\n\g<0>"
made_v2 = r"^( +)and supports_encoder_cudagraph\(model\)\n"
takes_v2 = "vllm_config.lora_config is not None and vllm_config.lora_config.enable_tower_connector_lora"
refused_v2 = rf"\g<0>\1and not ({takes_v2})\n"
query = r"self\.encoder_cudagraph_manager\.supports_modality\(modality\)\n"
ordered = r"sorted\(range\(num_items\), key=lambda i: per_item_out_tokens\[i\]\)"
qwen = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
captured = "./model -cc.cudagraph_mm_encoder=true"
served = f"{captured} --enable-lora --enable-tower-connector-lora"

EDITS = (
    Edit("no graphs of encoders with adapters", "0.25.1", RUNNER, made, refused, fixed),
    Edit(
        "the same in other words",
        "0.23.0",
        RUNNER,
        made,
        refused.replace("self.lora_config is not None", "self.lora_config"),
        fixed,
    ),
    Edit(
        "the same in both model runners",
        "0.33.0",
        RUNNER,
        made,
        refused,
        fixed,
        also=((_STATE_V2, made_v2, refused_v2),),
    ),
    Edit("in one of two model runners", "0.30.0", RUNNER, made, refused),
    Edit("in the other one", "0.28.0", _STATE_V2, made_v2, refused_v2),
    Edit(
        "no graphs of encoders with adapters, where they are captured",
        "0.20.0",
        RUNNER,
        r"^( +)and self\.encoder_cudagraph_manager is None\n",
        rf"\g<0>\1and not ({takes})\n",
    ),
    Edit(
        "steps with adapters are encoded without a graph",
        "0.27.1",
        RUNNER,
        query,
        r"\g<0>                        and not (self.lora_config and self.lora_manager.supports_tower_connector_lora())"
        "\n",
        remedy=True,
    ),
    Edit(
        "the manager itself returns nothing",
        "0.29.0",
        _MANAGER,
        r"^( +)if self\.use_dp:\n( +)per_item_out_tokens",
        r"\1if getattr(self.model, 'lora_manager', None) is not None:\n\1    return None\n\g<0>",
        remedy=True,
    ),
    Edit("images in the order of the schedule", "0.32.0", _MANAGER, ordered, "list(range(num_items))"),
    Edit(
        "adapters told anew for each batch",
        "0.31.0",
        _MANAGER,
        r"^( +)graph_meta\.graph\.replay\(\)\n",
        r"\1self.model.lora_manager.set_batch(mm_kwargs)\n\g<0>",
    ),
    Edit(
        "the same, before images are replayed",
        "0.24.0",
        _MANAGER,
        r"^( +)batch_out_tokens = sum\(per_item_out_tokens",
        r"\1self._tell_adapters(batch_orig_indices)\n\g<0>",
        also=(
            (
                _MANAGER,
                r"^( +)def get_cumulative_stats",
                r"\1def _tell_adapters(self, images):\n\1    self.model.lora_manager.set_batch(images)\n\n\g<0>",
            ),
        ),
    ),
    Edit(
        "no way back without a graph",
        "0.26.0",
        RUNNER,
        r"^( +)if cudagraph_output is not None:\n",
        r"\1assert cudagraph_output is not None\n\g<0>",
    ),
    Edit(
        "no way back in the other model runner",
        "0.33.0",
        RUNNER_V2,
        r"^( +)if cudagraph_output is not None\n",
        r"\1if cg_manager is not None\n",
    ),
    Edit(
        "kernels are told of no adapter in another way",
        "0.22.1",
        _META,
        r"^( +)self\.no_lora_flag_cpu\[0\] = no_lora\n",
        r"\1self.no_lora = no_lora\n",
    ),
    Edit(
        "the model does not know who manages adapters",
        "0.21.0",
        _ADAPTERS,
        r"^( +)self\.model\.lora_manager = self\n",
        r"\1self.model.adapters = self\n",
    ),
    # Not right, though it looks so.
    Edit(
        "refused once they are made",
        "0.27.1",
        RUNNER,
        r"^( +)self\.encoder_cudagraph_manager = self\._create_encoder_cudagraph_manager\(\)\n",
        rf"\g<0>\1if {takes}:\n\1    return None\n",
    ),
    Edit(
        "refused for one kind of model",
        "0.31.0",
        RUNNER,
        made,
        rf"\1if self.is_pooling_model:\n\1    if {takes}:\n\1        return None\n\n\g<0>",
    ),
    Edit(
        "refused where there are no such adapters",
        "0.25.0",
        RUNNER,
        made,
        rf"\1if not ({takes}):\n\1    return None\n\n\g<0>",
    ),
    Edit("said, and not refused", "0.33.0", RUNNER, made, rf"\1if {takes}:\n\1    logger.info('x')\n\n\g<0>"),
    Edit(
        "refused, and made elsewhere",
        "0.29.0",
        RUNNER,
        made,
        refused,
        also=(
            (
                RUNNER,
                r"^( +)def capture_model\(",
                r"\1def _made_anew(self):\n\1    return EncoderCudaGraphManager(self.vllm_config)\n\n\g<0>",
            ),
        ),
    ),
    Edit(
        "no encoder is captured",
        "0.20.2",
        RUNNER,
        r"vllm\.v1\.worker\.encoder_cudagraph import",
        "vllm.v1.worker.encoder_graphs import",
    ),
)

WORDINGS = (
    Wording(
        LOOKALIKE,
        "0.33.0",
        _MANAGER,
        {
            "the largest first": swap(ordered, "sorted(range(num_items), key=lambda i: -per_item_out_tokens[i])"),
            "sorted in place": swap(
                rf"sorted_indices = {ordered}",
                "sorted_indices = list(range(num_items)); sorted_indices.sort(key=per_item_out_tokens.__getitem__)",
            ),
        },
    ),
    Wording(
        SHAPE,
        "0.27.1",
        RUNNER,
        {"asked of the model": swap(query, r"\g<0>                        and model.supports_encoder_cudagraph\n")},
    ),
)

SERVED = (
    Served("0.33.0", served, affects, "--enable-tower-connector-lora", model=qwen),
    Served("0.20.0", served, affects, "cudagraph_mm_encoder is on", model=qwen),
    Served("0.30.0", f"VLLM_USE_V2_MODEL_RUNNER=1 {served}", affects, "--enable-lora", model=qwen),
    Served("0.25.1", f"VLLM_USE_V2_MODEL_RUNNER=1 {served}", does_not, "V2", model=qwen),
    Served("0.33.0", f"{captured} --enable-lora", does_not, "--enable-tower-connector-lora is not given", model=qwen),
    Served("0.33.0", captured, does_not, "--enable-lora is not given", model=qwen),
    Served("0.33.0", served.replace("true", "false"), does_not, "cudagraph_mm_encoder is off", model=qwen),
    Served("0.33.0", f"{served} --enforce-eager", does_not, "--enforce-eager", model=qwen),
    Served("0.33.0", "./model --config serve.yaml", unknown, "--config", model=qwen),
)
