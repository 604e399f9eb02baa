"""Trials of draft-decode-mode: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.draft_decode_mode import _CHOSEN, _MANAGER, _SPECULATOR

mode = r"^ {8}if cudagraph_mode\.decode_mode\(\) == CUDAGraphMode\.FULL:\n.*\n {8}else:\n.*\n"
zeros = (
    r"^ {8}for i in range\(num_reqs, max_num_reqs, BLOCK_SIZE\):\n(?:.*\n){2}.*last_token_indices_ptr \+ block, 0.*\n"
)
chosen = "".join(rf"\1{line}\n" for line in _CHOSEN.strip().splitlines())
configured = r"\1cudagraph_mode = vllm_config.compilation_config.cudagraph_mode\n"
affected, unrecognised = Verdict.AFFECTED, Verdict.UNRECOGNISED
affects, does_not, unknown = Concern.CONCERNS, Concern.DOES_NOT, Concern.UNKNOWN
v2, eagle = "VLLM_USE_V2_MODEL_RUNNER=1 ", '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 3}'
mtp = '{"method": "mtp", "num_speculative_tokens": 1}'

EDITS = (
    Edit(
        "a mode that is chosen",
        "0.17.1",
        _SPECULATOR,
        r"^( *)self\.cudagraph_manager = EagleCudaGraphManager\(vllm_config, device",
        rf"{configured}{chosen}\g<0>, cudagraph_mode",
        Verdict.FIXED,
    ),
    Edit("nightly without the mode", "0.20.0", _SPECULATOR, mode, "", affected, shape="two-managers-mode"),
    Edit("nightly without the zeros", "0.20.0", _SPECULATOR, zeros, "", affected, shape="two-managers-indices"),
    Edit(
        "nightly without both",
        "0.20.0",
        _SPECULATOR,
        mode,
        "",
        affected,
        also=((_SPECULATOR, zeros, ""),),
        shape="two-managers-mode-indices",
    ),
    Edit("another mode", "0.17.1", _MANAGER, r"cudagraph_mode\.decode_mode\(\)", "cudagraph_mode", unrecognised),
)

SERVED = (
    Served("0.17.1", f"{v2}./llama -O1 --speculative-config '{eagle}'", affects, "PIECEWISE"),
    Served("0.17.1", f"{v2}./llama --speculative-config '{eagle}'", does_not, "FULL_AND_PIECEWISE"),
    Served("0.17.1", f"{v2}./llama -O1 --speculative-config '{mtp}'", does_not, "one token"),
    Served("0.17.1", f"{v2}./llama -O1 --speculative-config.method=eagle", unknown, "num_speculative_tokens"),
    Served("0.17.1", f"./llama -O1 --speculative-config '{eagle}'", does_not, "V1"),
)
