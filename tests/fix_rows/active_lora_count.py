"""Trials of active-lora-count: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.active_lora_count import _CONFIG, _EXPAND, _META, _MIXIN, _PUNICA, _RUNNER, _UTILS_V2

counted = r"^( +)((?:self\.)?num_active_loras) = lora_ids\.size\(0\)\n"
handed = r"^( +)self\.num_active_loras_cpu\[0\] = num_active_loras\n"
launched = r"^( +)num_active_loras\.item\(\),\n"
room = r"\1num_active_loras = min(num_active_loras + 1, self.active_lora_ids.size(0))"
fixed = Verdict.FIXED
lora = "./llama --enable-lora"
specialised = f"{lora} --specialize-active-lora"

EDITS = (
    Edit(
        "one more after rounding up",
        "0.33.0",
        _META,
        handed,
        room + "\n" + r"\1self.num_active_loras_cpu[0] = num_active_loras" + "\n",
        fixed,
    ),
    Edit(
        "one more before rounding up",
        "0.25.1",
        _META,
        counted,
        r"\1\2 = min(lora_ids.size(0) + 1, self.active_lora_ids.size(0))" + "\n",
        fixed,
    ),
    Edit(
        "the same in the first release",
        "0.16.0",
        _META,
        counted,
        r"\1\2 = min(lora_ids.size(0) + 1, self.active_lora_ids.size(0))" + "\n",
        fixed,
    ),
    Edit(
        "programs for all adapters, whatever the batch",
        "0.17.0",
        _META,
        r"^( +)if specialize_active_lora:\n.*\n.*\n.*\n",
        r"\1num_active_loras = self.default_num_active_loras_cpu" + "\n",
        fixed,
    ),
    Edit("one more than the list has places", "0.20.0", _META, counted, r"\1\2 = lora_ids.size(0) + 1" + "\n"),
    Edit(
        "one more now and then",
        "0.32.0",
        _META,
        handed,
        r"\1if num_tokens > 1:" + "\n    " + room + "\n" + r"\1self.num_active_loras_cpu[0] = num_active_loras" + "\n",
    ),
    Edit(
        "adapters alone in the list",
        "0.24.0",
        _META,
        counted,
        r"\1lora_ids = lora_ids[lora_ids >= 0]" + "\n" + r"\1\2 = lora_ids.size(0)" + "\n",
    ),
    Edit(
        "rows without an adapter count in V1's dispatch",
        "0.28.0",
        _RUNNER,
        r"else len\(self\.input_batch\.lora_id_to_lora_request\)",
        "else len(self.input_batch.lora_id_to_lora_request)"
        " + int((self.input_batch.request_lora_mapping[:num_reqs] == 0).any())",
    ),
    Edit(
        "one more in V2's dispatch",
        "0.31.0",
        _UTILS_V2,
        r"return len\(lora_state\.get_activate_loras\(req_ids\)\)",
        "return len(lora_state.get_activate_loras(req_ids)) + 1",
    ),
    Edit(
        "a row without an adapter in the greatest capture",
        "0.27.0",
        _MIXIN,
        r"list\(range\(1, effective_num_loras \+ 1\)\),",
        "[0, *range(1, effective_num_loras + 1)],",
    ),
    Edit(
        "programs for the whole list",
        "0.30.0",
        _EXPAND,
        launched,
        r"\1lora_ids.size(0)," + "\n",
        also=(("vllm/lora/ops/triton_ops/lora_shrink_op.py", launched, r"\1lora_ids.size(0)," + "\n"),),
    ),
    Edit(
        "one more in the wrapper",
        "0.26.0",
        _PUNICA,
        r"^( +)self\.prompt_mapping_meta\.prepare_tensors\(self\.sampler_indices\)\n",
        r"\g<0>\1self.token_mapping_meta.num_active_loras_cpu += 1" + "\n",
    ),
    Edit(
        "one more where kernels are given it",
        "0.29.0",
        _META,
        r"^( +)num_active_loras = self\.num_active_loras_cpu\n",
        r"\1num_active_loras = self.num_active_loras_cpu + 1" + "\n",
    ),
    # Not right, though it looks so.
    Edit(
        "one more for graphs of one adapter",
        "0.31.0",
        _META,
        counted,
        r"\g<0>\1if \2 == 1:" + "\n" + r"\1    \2 = min(\2 + 1, self.active_lora_ids.size(0))" + "\n",
    ),
    Edit(
        "one more, and counted again",
        "0.33.0",
        _META,
        handed,
        room
        + "\n"
        + r"\1num_active_loras = lora_ids.size(0)"
        + "\n"
        + r"\1self.num_active_loras_cpu[0] = num_active_loras"
        + "\n",
    ),
    Edit("one more once it is handed on", "0.33.0", _META, handed, r"\g<0>" + room + "\n"),
    Edit(
        "one more, taken back for what was captured",
        "0.28.0",
        _META,
        handed,
        room + "\n" + r"\1num_active_loras = min(num_active_loras, max(self.captured_lora_counts))" + "\n"
        r"\1self.num_active_loras_cpu[0] = num_active_loras" + "\n",
    ),
    Edit(
        "programs for all adapters while debugging",
        "0.27.1",
        _META,
        r"^( +)if specialize_active_lora:\n",
        r"\1if specialize_active_lora and not envs.VLLM_DEBUG:" + "\n",
    ),
    Edit(
        "programs for all adapters, and those of the batch after all",
        "0.25.0",
        _META,
        r"^( +)if specialize_active_lora:\n(?=.*num_active_loras_cpu)",
        r"\1num_active_loras = self.default_num_active_loras_cpu" + "\n" + r"\g<0>",
        Verdict.AFFECTED,
    ),
    Edit("no such option", "0.22.0", _CONFIG, "specialize_active_lora", "specialize_no_lora"),
)

SERVED = (
    Served("0.33.0", specialised, affects, "--specialize-active-lora"),
    Served("0.16.0", f"{specialised} -cc.cudagraph_mode=PIECEWISE", affects, "--specialize-active-lora"),
    Served("0.25.1", f"VLLM_USE_V2_MODEL_RUNNER=1 {specialised}", affects, "--specialize-active-lora"),
    Served("0.23.0", f"VLLM_USE_V2_MODEL_RUNNER=1 {specialised}", does_not, "V2"),
    Served("0.33.0", lora, does_not, "--specialize-active-lora is not given"),
    Served("0.33.0", f"{lora} --no-specialize-active-lora", does_not, "--specialize-active-lora is not given"),
    Served("0.33.0", "./llama --specialize-active-lora", does_not, "--enable-lora is not given"),
    Served("0.33.0", f"{specialised} --enforce-eager", does_not, "--enforce-eager"),
    Served("0.33.0", f"{specialised} --compilation-config config.json", unknown, "--compilation-config"),
    Served("0.33.0", "./llama --config serve.yaml", unknown, "--config"),
)
