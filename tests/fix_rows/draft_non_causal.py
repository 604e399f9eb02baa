"""Trials of draft-non-causal: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import before, both, swap
from trial_rows import LOOKALIKE, REMEDY, Edit, Served, Wording, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.draft_non_causal import _BASE, _FLASHINFER, _GRAPHS, _RUNNER, _SPECULATOR

v2, blackwell, hopper = "VLLM_USE_V2_MODEL_RUNNER=1 ", "NVIDIA B200", "NVIDIA H100 80GB HBM3"


def drafts(method: str = "dflash", backend: str = "FLASHINFER") -> str:
    return (
        f"""-sc '{{"method": "{method}", "model": "draft", "num_speculative_tokens": 7, """
        f""""attention_backend": "{backend}"}}'"""
    )


CHOSEN = r"^( +)if cudagraph_mode\.decode_mode\(\) == CUDAGraphMode\.FULL:\n"
SUPPORTED = (
    r"\1wants_full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL\n"
    r"\1supports_full = self.attn_cg_support.min_cg_support.value >= AttentionCGSupport.UNIFORM_BATCH.value\n"
    r"\1if {}:\n"
)
named = (_SPECULATOR, r"^logger = ", r"from vllm.v1.attention.backend import AttentionCGSupport\n\g<0>")
configured = (
    _SPECULATOR,
    r"^( +)def init_cudagraph_manager\(",
    (
        r"\1@property\n\1def attn_vllm_config(self):\n"
        r"\1    own = replace(self.vllm_config.attention_config, use_non_causal=not self.dflash_causal)\n"
        r"\1    return replace(self.vllm_config, attention_config=own)\n\n\g<0>"
    ),
)
imported = (_SPECULATOR, r"^from vllm\.config import VllmConfig$", "from vllm.config import VllmConfig, replace")
kept = (
    _BASE,
    r"^( +)self\.attn_groups, _, _ = init_attn_backend\(\n +kv_cache_config,\n +self\.vllm_config,\n",
    (
        r"\1self.attn_groups, self.attn_cg_support, _ = init_attn_backend(\n"
        r"\1    kv_cache_config,\n\1    self.attn_vllm_config,\n"
    ),
)
FIRST = r"^( +)if self\.speculator is not None:\n( +)self\.speculator\.init_cudagraph_manager\(cudagraph_mode\)\n"
SET = r"^( +)self\.model_state, self\.kv_cache_config, self\.block_tables\n( +)\)\n"
later = ((_RUNNER, FIRST, ""), (_RUNNER, SET, r"\g<0>\2self.speculator.init_cudagraph_manager(cudagraph_mode)\n"))
CLAIM = r"^( +)if has_trtllm_support:\n"
causal = (_FLASHINFER, CLAIM, r"\1if has_trtllm_support and not vllm_config.attention_config.use_non_causal:\n")
through = (named, configured, imported, kept, *later)
PLANNED = r'^( +)get_kv_cache_layout\(\),\n +backend="auto",(\n +\)\n +return self\._noncausal_prefill_wrapper)\n'

EDITS = (
    Edit(
        "the draft's attention is asked",
        "0.25.1",
        _SPECULATOR,
        CHOSEN,
        SUPPORTED.format("wants_full and supports_full"),
        also=(*through, causal),
        remedy=True,
    ),
    Edit(
        "asked, and claimed by FlashInfer all the same",
        "0.25.1",
        _SPECULATOR,
        CHOSEN,
        SUPPORTED.format("wants_full and supports_full"),
        also=through,
    ),
    Edit("claimed for causal attention alone, and nobody asks", "0.25.1", *causal, Verdict.UNRECOGNISED),
    Edit(
        "no graphs of drafts at all",
        "0.24.0",
        _SPECULATOR,
        r"cudagraph_mode = CUDAGraphMode\.FULL_DECODE_ONLY",
        "cudagraph_mode = CUDAGraphMode.NONE",
        remedy=True,
    ),
    Edit(
        "a wrapper of prefills that is made for graphs",
        "0.25.1",
        _FLASHINFER,
        PLANNED,
        r'\1get_kv_cache_layout(),\n\1backend="auto",\n\1use_cuda_graph=True,\2\n',
    ),
    Edit(
        "DSpark captures by itself",
        "0.25.1",
        "vllm/v1/worker/gpu/spec_decode/dspark/speculator.py",
        r"^( +)def load_draft_model\(",
        r"\1def capture(self, attn_states=None):\n\1    self.own_graphs.capture(self)\n\n\g<0>",
    ),
    Edit(
        "asked, and captured all the same", "0.26.0", _SPECULATOR, r"if wants_full and supports_full:", "if wants_full:"
    ),
    Edit(
        "claimed whatever the attention",
        "0.27.1",
        _FLASHINFER,
        r"has_trtllm_support and not vllm_config\.attention_config\.use_non_causal",
        "has_trtllm_support",
    ),
    Edit("asked as the target", "0.26.0", _BASE, r"self\.attn_vllm_config,", "self.vllm_config,"),
)

WORDINGS = (
    Wording(
        REMEDY,
        "0.25.1",
        _SPECULATOR,
        {
            "graphs of causal drafts alone": swap(
                CHOSEN, r"\1if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL and self.dflash_causal:\n"
            ),
            "graphs dropped before the capture": before(
                r"self\.query_cudagraph_manager\.capture\(",
                "if not self.dflash_causal:",
                "    self.query_cudagraph_manager._capture_descs = {}",
                "    self.query_cudagraph_manager._candidates = {}",
            ),
            "the manager's own choice": {
                _GRAPHS: swap(
                    r"^( +)super\(\)\.__init__\(\*args, \*\*kwargs\)\n",
                    r"\g<0>\1if not causal:\n\1    self._capture_descs, self._candidates = {}, {}\n",
                )
            },
        },
    ),
    Wording(
        LOOKALIKE,
        "0.25.1",
        _SPECULATOR,
        {
            "graphs of a mode that is not there": swap(
                CHOSEN, r"\1if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL and self.num_query_per_req > 1:\n"
            ),
            "chosen, and undone": both(
                swap(CHOSEN, r"\1wanted = cudagraph_mode\n\g<0>"),
                before(
                    r"self\.query_cudagraph_manager = DFlash", "cudagraph_mode = wanted if wanted else cudagraph_mode"
                ),
            ),
            "graphs dropped once they are captured": before(
                r"self\._prepare_eplb_forward\(num_query_tokens\)", "self.query_cudagraph_manager._capture_descs = {}"
            ),
        },
    ),
)

SERVED = (
    Served("0.25.1", f"{v2}./llama {drafts()}", affects, "FLASHINFER", blackwell),
    Served("0.24.0", f"{v2}./llama {drafts()}", affects, "FLASHINFER", blackwell),
    Served("0.25.1", f"{v2}./llama {drafts('dspark')}", affects, "dspark", blackwell),
    Served("0.25.1", f"{v2}./llama {drafts(backend='FLASH_ATTN')}", does_not, "FLASH_ATTN", blackwell),
    Served(
        "0.25.1",
        f"""{v2}./llama -sc '{{"method": "dflash", "model": "draft", "num_speculative_tokens": 7}}'""",
        unknown,
        "logs",
        blackwell,
    ),
    Served("0.25.1", f"{v2}./llama {drafts()}", does_not, "Blackwell", hopper),
    Served("0.25.1", f"{v2}./llama {drafts()}", unknown, "GPU"),
    Served("0.25.1", f"{v2}./llama {drafts('eagle3')}", does_not, "eagle3", blackwell),
    Served("0.25.1", f"{v2}./llama {drafts()} --enforce-eager", does_not, "--enforce-eager", blackwell),
    Served("0.25.1", f"{v2.replace('=1', '=0')}./llama {drafts()}", does_not, "V1", blackwell),
    Served("0.25.1", f"{v2}./llama", does_not, "no speculator", blackwell),
)
