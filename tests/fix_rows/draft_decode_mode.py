"""Trials of draft-decode-mode: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import after, before, both, swap
from trial_rows import LOOKALIKE, REMEDY, Edit, Served, Wording, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.draft_decode_mode import _CHOSEN, _MANAGER, _SPECULATOR, _UTILS

mode = r"^ {8}if cudagraph_mode\.decode_mode\(\) == CUDAGraphMode\.FULL:\n.*\n {8}else:\n.*\n"
zeros = (
    r"^ {8}for i in range\(num_reqs, max_num_reqs, BLOCK_SIZE\):\n(?:.*\n){2}.*last_token_indices_ptr \+ block, 0.*\n"
)
chosen = "".join(rf"\1{line}\n" for line in _CHOSEN.strip().splitlines())
configured = r"\1cudagraph_mode = vllm_config.compilation_config.cudagraph_mode\n"
affected = Verdict.AFFECTED
v2, eagle = "VLLM_USE_V2_MODEL_RUNNER=1 ", '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 3}'
mtp = '{"method": "mtp", "num_speculative_tokens": 1}'

DECODE_MODE = r"self\.cudagraph_mode = self\.compilation_config\.cudagraph_mode\.decode_mode\(\)"
FULL_OR_NONE = ("if self.cudagraph_mode != CUDAGraphMode.FULL:", "    self.cudagraph_mode = CUDAGraphMode.NONE")
DECODES = r"# Initialize cudagraph manager for draft decodes"
MADE = r"self\.graphs: dict"

EDITS = (
    Edit(
        "full graphs or none",
        "0.17.1",
        _MANAGER,
        rf"^( *)({DECODE_MODE})\n",
        r"\1\2\n" + "".join(rf"\1{line}\n" for line in FULL_OR_NONE),
        remedy=True,
    ),
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
        runs=True,
    ),
    Edit("another mode", "0.17.1", _MANAGER, r"cudagraph_mode\.decode_mode\(\)", "cudagraph_mode"),
    Edit(
        "the target's mode taken by the manager",
        "0.18.0",
        _MANAGER,
        r"assert not cudagraph_mode\.has_mode\(CUDAGraphMode\.PIECEWISE\), \([^)]*\)$",
        "cudagraph_mode = vllm_config.compilation_config.cudagraph_mode",
    ),
)

SERVED = (
    Served("0.17.1", f"{v2}./llama -O1 --speculative-config '{eagle}'", affects, "PIECEWISE"),
    Served("0.17.1", f"{v2}./llama --speculative-config '{eagle}'", does_not, "FULL_AND_PIECEWISE"),
    Served("0.17.1", f"{v2}./llama -O1 --speculative-config '{mtp}'", does_not, "one token"),
    Served("0.17.1", f"{v2}./llama -O1 --speculative-config.method=eagle", unknown, "num_speculative_tokens"),
    Served("0.17.1", f"./llama -O1 --speculative-config '{eagle}'", does_not, "V1"),
)

WORDINGS = (
    Wording(
        REMEDY,
        "0.17.1",
        _MANAGER,
        {
            "in one expression": swap(
                DECODE_MODE,
                (
                    "self.cudagraph_mode = CUDAGraphMode.FULL if "
                    "self.compilation_config.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL else "
                    "CUDAGraphMode.NONE"
                ),
            ),
            "by a local": swap(
                rf"^( +){DECODE_MODE}",
                (
                    r"\1mode = self.compilation_config.cudagraph_mode.decode_mode()\n"
                    r"\1self.cudagraph_mode = mode if mode == CUDAGraphMode.FULL else CUDAGraphMode.NONE"
                ),
            ),
            "at the end": before(MADE, *FULL_OR_NONE, "    self.cudagraph_sizes = {}"),
            "the manager is given no piecewise mode": {
                _SPECULATOR: swap(
                    r"EagleCudaGraphManager\(vllm_config, device\)",
                    "EagleCudaGraphManager(without_piecewise_decodes(vllm_config), device)",
                )
            },
            "the sizes know no piecewise graphs": {
                _UTILS: after(
                    r"def get_cudagraph_sizes\((?:.*\n)*?\) -> .*:$",
                    "    if cudagraph_mode == CUDAGraphMode.PIECEWISE and uniform_decode_cudagraph:",
                    "        return {}, {}",
                )
            },
            "drafts run on as many tokens as requests": {
                _SPECULATOR: before(
                    r"last_hidden_states, hidden_states = self\.run_model\(\n +num_tokens_padded",
                    "num_tokens_padded, cudagraph_runtime_mode = num_reqs, CUDAGraphMode.NONE",
                )
            },
            "nothing is captured": {
                _MANAGER: swap(
                    r"if self\.cudagraph_mode == CUDAGraphMode\.NONE:\n( +)return",
                    (
                        r"if self.cudagraph_mode != CUDAGraphMode.FULL:\n\1self.cudagraph_mode = CUDAGraphMode.NONE\n"
                        r"\1self.cudagraph_sizes = {}\n\1return"
                    ),
                )
            },
            "at run time": swap(
                r"cudagraph_mode = self\.cudagraph_mode\n",
                (
                    "cudagraph_mode = self.cudagraph_mode\n"
                    "            if cudagraph_mode == CUDAGraphMode.PIECEWISE:\n"
                    "                return CUDAGraphMode.NONE, None\n"
                ),
            ),
        },
    ),
    Wording(
        LOOKALIKE,
        "0.17.1",
        _MANAGER,
        {
            "full decode only noted": {
                _SPECULATOR: after(
                    r"self\.method = self\.speculative_config\.method",
                    "cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY",
                )
            },
            "chosen in a helper that nobody calls": before(
                r"def get_cudagraph_size\(",
                "def decode_mode(self):",
                "    full = self.cudagraph_mode_of_drafts == CUDAGraphMode.FULL",
                "    return CUDAGraphMode.FULL if full else CUDAGraphMode.NONE",
                "",
            ),
            "none if debugging": after(
                DECODE_MODE, "if not __debug__:", "    self.cudagraph_mode = CUDAGraphMode.NONE"
            ),
            "none while there is data parallelism": after(
                DECODE_MODE, "if self.dp_size > 1:", "    self.cudagraph_mode = CUDAGraphMode.NONE"
            ),
            "a local is none": after(
                DECODE_MODE,
                "mode = self.cudagraph_mode",
                "if mode != CUDAGraphMode.FULL:",
                "    mode = CUDAGraphMode.NONE",
            ),
            "none for the pool alone": swap(
                r"if self\.cudagraph_mode != CUDAGraphMode\.NONE:\n( +self\.pool)",
                r"if self.cudagraph_mode == CUDAGraphMode.FULL:\n\1",
            ),
            "asserted": after(DECODE_MODE, "assert self.cudagraph_mode is not None"),
            "taken twice": after(
                DECODE_MODE, "self.cudagraph_mode = self.compilation_config.cudagraph_mode.decode_mode()"
            ),
            "taken again later": before(
                MADE, "self.cudagraph_mode = self.compilation_config.cudagraph_mode.decode_mode()"
            ),
            "taken by another name": swap(r"self\.cudagraph_mode\b", "self.draft_cudagraph_mode"),
            "sizes by another name": swap(r"self\.cudagraph_sizes\b", "self.draft_cudagraph_sizes"),
            "mode kept elsewhere too": after(DECODE_MODE, "self.decode_mode = self.cudagraph_mode"),
            "run time mode from elsewhere": both(
                after(DECODE_MODE, "self.decode_mode = self.cudagraph_mode"),
                swap(r"cudagraph_mode = self\.cudagraph_mode\n", "cudagraph_mode = self.decode_mode\n"),
            ),
            "sizes from elsewhere": both(
                before(MADE, "self.sizes = dict(self.cudagraph_sizes)"),
                swap(r"return self\.cudagraph_sizes\.get\(num_tokens\)", "return self.sizes.get(num_tokens)"),
            ),
            "mixed mode": swap(
                DECODE_MODE, "self.cudagraph_mode = self.compilation_config.cudagraph_mode.mixed_mode()"
            ),
            "slots": after(
                r"class EagleCudaGraphManager:",
                (
                    "    __slots__ = ('vllm_config', 'scheduler_config', 'device', 'max_model_len', "
                    "'max_num_reqs', 'max_num_tokens', 'dp_size', 'compilation_config', 'cudagraph_mode', "
                    "'cudagraph_sizes', 'graphs', 'pool')"
                ),
                "",
            ),
        },
    ),
    Wording(
        REMEDY,
        "0.20.0",
        _SPECULATOR,
        {
            "mode in one expression": before(
                DECODES,
                (
                    "cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY if cudagraph_mode.decode_mode() == "
                    "CUDAGraphMode.FULL else CUDAGraphMode.NONE"
                ),
            ),
            "indices zeroed before": before(
                r"_prepare_eagle_inputs_kernel\[\(num_reqs,\)\]", "last_token_indices.zero_()"
            ),
            "indices zeroed behind": before(r"return last_token_indices\n", "last_token_indices[num_reqs:] = 0"),
        },
        of="nightly without both",
    ),
    Wording(
        LOOKALIKE,
        "0.20.0",
        _SPECULATOR,
        {
            "chosen and not used": before(
                DECODES,
                "unused = cudagraph_mode",
                "if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:",
                "    cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY",
                "cudagraph_mode = unused",
            ),
            "chosen in a branch": before(
                DECODES, "if not __debug__:", "    cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY"
            ),
            "chosen where it is full": before(
                DECODES,
                "if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:",
                "    cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY",
            ),
            "chosen behind": after(
                r"self\.decode_cudagraph_manager\.pool = .*", "cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY"
            ),
            "pool shared by hand": swap(
                r"self\.decode_cudagraph_manager\.pool = self\.prefill_cudagraph_manager\.pool",
                "pool = self.prefill_cudagraph_manager.pool; self.decode_cudagraph_manager.pool = pool",
            ),
            "decode length by another name": {
                _MANAGER: lambda text: text + "\n",
                _SPECULATOR: swap(r"decode_query_len=1,", "1,"),
            },
        },
        of="nightly without the mode",
    ),
    Wording(
        LOOKALIKE,
        "0.20.0",
        _SPECULATOR,
        {
            "filled with one": after(
                r"tl\.store\(eagle_seq_lens_ptr \+ block, 0, mask=mask\)",
                "tl.store(last_token_indices_ptr + block, 1, mask=mask)",
            ),
            "filled too little": after(
                r"tl\.store\(last_token_indices_ptr \+ req_idx, last_token_index\)",
                "for i in range(0, 0, BLOCK_SIZE):",
                "    block = i + tl.arange(0, BLOCK_SIZE)",
                "    mask = block < max_num_reqs",
                "    tl.store(last_token_indices_ptr + block, 0, mask=mask)",
            ),
            "filled for nobody": after(
                r"tl\.store\(last_token_indices_ptr \+ req_idx, last_token_index\)",
                "if num_reqs > max_num_reqs:",
                "    block = tl.arange(0, BLOCK_SIZE)",
                "    mask = block < max_num_reqs",
                "    tl.store(last_token_indices_ptr + block, 0, mask=mask)",
            ),
            "filled with the seq lens": after(
                r"tl\.store\(eagle_seq_lens_ptr \+ block, 0, mask=mask\)",
                "tl.store(last_token_indices_ptr + block, 0, mask=mask)",
            ),
        },
        of="nightly without the zeros",
    ),
)

OBSERVED = ([30.0, 90.0], [0.0, 90.0])
"""The values of its probe on stock, and with the fix."""
