"""Trials of deepstack-features: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import Change, after, before, swap
from trial_rows import LOOKALIKE, REMEDY, Edit, Served, Wording, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.deepstack_features import _MODELS

(VL, _), (OMNI, _) = _MODELS
IN_GET = r"(?=(?:\n? +if num_tokens > self\.deepstack_input_embeds_num_tokens:\n(?: {12}.*\n)+)?\n +# get deepstack)"
GET_NOTHING_HELD = r'^ +if getattr\(self, "deepstack_input_embeds_num_tokens", 0\) == 0:\n +return None\n' + IN_GET
NO_BUFFERS = r"^( +)return None  # If vision tower is skipped\n"
NOTHING_WITHOUT = (
    r'\g<0>        if getattr(self, "deepstack_input_embeds_num_tokens", 0) == 0:\n'
    r"            return None\n"
)
PASSED_ON = r"deepstack_input_embeds=deepstack_input_embeds,\n"
qwen = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
omni = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "model_type": "qwen3_omni_moe"}
qwen2 = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}

EDITS = (
    Edit(
        "features passed on in every batch",
        "0.22.1",
        VL,
        GET_NOTHING_HELD,
        "",
        Verdict.FIXED,
        also=((OMNI, GET_NOTHING_HELD, ""),),
    ),
    Edit(
        "features passed on in every batch, 0.20.2",
        "0.20.2",
        VL,
        GET_NOTHING_HELD,
        "",
        Verdict.FIXED,
        also=((OMNI, GET_NOTHING_HELD, ""),),
    ),
    Edit("by one of the two models", "0.21.0", VL, GET_NOTHING_HELD, ""),
    Edit(
        "remedy cut out",
        "0.23.0",
        VL,
        NO_BUFFERS,
        NOTHING_WITHOUT,
        also=((OMNI, NO_BUFFERS, NOTHING_WITHOUT),),
        runs=True,
    ),
    Edit(
        "none where the buffers are clear",
        "0.23.0",
        VL,
        NO_BUFFERS,
        r"\g<0>        if not self.deepstack_input_embeds[0].any():\n            return None\n",
    ),
    Edit(
        "left out by the caller",
        "0.24.0",
        VL,
        rf"^( +)# args for deepstack\n +{PASSED_ON}",
        r"\1deepstack_input_embeds=deepstack_input_embeds if self.has_images else None,\n",
    ),
    Edit(
        "as many as a batch may have from the start",
        "0.22.0",
        VL,
        r"^( +)self\.deepstack_input_embeds_num_tokens = 0\n(?=\n +with)",
        r"\1self.deepstack_input_embeds_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens\n",
    ),
)


def in_both(change: Change) -> dict[str, Change]:
    return {VL: change, OMNI: change}


held = r'if getattr\(self, "deepstack_input_embeds_num_tokens", 0\) == 0:\n +return None\n(?=\n +# get deepstack)'
got = r"deepstack_input_embeds = self\._get_deepstack_input_embeds\(\n +inputs_embeds\.size\(0\)\n +\)"
WORDINGS = (
    Wording(
        REMEDY,
        "0.22.1",
        VL,
        {
            "held by the getter": in_both(swap(held, "self.deepstack_input_embeds_num_tokens += num_tokens\n")),
            "held by the caller": in_both(
                before(got, "self.deepstack_input_embeds_num_tokens = inputs_embeds.size(0)")
            ),
            "asked for again": in_both(
                after(
                    got,
                    "if deepstack_input_embeds is None:",
                    "    self.deepstack_input_embeds_num_tokens = inputs_embeds.size(0)",
                    "    deepstack_input_embeds = self._get_deepstack_input_embeds(inputs_embeds.size(0))",
                )
            ),
            "none for no tokens": in_both(swap(held, "if num_tokens == 0:\n            return None\n")),
            "set by hand": in_both(swap(held, 'setattr(self, "deepstack_input_embeds_num_tokens", num_tokens)\n')),
        },
    ),
    Wording(
        LOOKALIKE,
        "0.22.1",
        VL,
        {
            "none for other reasons": in_both(
                swap(held, "if not self.deepstack_input_embeds[0].any():\n            return None\n")
            ),
            "held if debugging": in_both(
                before(got, "if not __debug__:", "    self.deepstack_input_embeds_num_tokens = inputs_embeds.size(0)")
            ),
            "held afterwards": in_both(
                after(got, "self.deepstack_input_embeds_num_tokens = self.deepstack_input_embeds_num_tokens or 0")
            ),
            "passed on and dropped": in_both(
                after(
                    got,
                    "if deepstack_input_embeds is not None and not self.deepstack_input_embeds[0].any():",
                    "    deepstack_input_embeds = None",
                )
            ),
            "counted under another name": in_both(
                before(got, "self.deepstack_input_embeds_number = inputs_embeds.size(0)")
            ),
        },
    ),
)

SERVED = (
    Served("0.21.0", "./model", affects, "Qwen3-VL", model=qwen),
    Served("0.22.1", "./model -cc.cudagraph_mode=NONE", affects, "Qwen3-Omni", model=omni),
    Served("0.21.0", "./model --enforce-eager", does_not, "--enforce-eager", model=qwen),
    Served("0.21.0", "./model --language-model-only", does_not, "--language-model-only", model=qwen),
    Served("0.21.0", "./model", does_not, "neither Qwen3-VL nor Qwen3-Omni", model=qwen2),
    Served("0.21.0", "./model --config serve.yaml", unknown, "--config", model=qwen),
)
