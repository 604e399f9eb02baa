"""Trials of flashmla-fp8: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

import re

from edited import after, before, both, swap
from trial_rows import LOOKALIKE, REMEDY, SHAPE, Edit, Served, Wording, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.flashmla_fp8 import _BACKEND, _CALLER, _COPIED, _FULL_GRAPHS

copied, taken, fits = (
    r"^ *self\.cg_buf_\w+\[:n\]\.copy_\(\w+\)\n",
    r"^ *\w+ = self\.cg_buf_\w+\[:n\]\n",
    r"^ *assert .*self\.cg_buf_.*\n",
)
cut = tuple((_BACKEND, pattern, "") for pattern in (taken, fits))
POINTED_AT = r"scheduler_metadata\.tile_scheduler_metadata = tile_scheduler_metadata"
pointed = rf"^( *){POINTED_AT}\n"
lines = ("n = tile_scheduler_metadata.size(0)", *_COPIED[:2], "n = num_splits.size(0)", *_COPIED[2:])
COPIED = (_FULL_GRAPHS.removesuffix(" ..."), *(f"    {line}" for line in lines))
PLANNED = r"tile_scheduler_metadata, num_splits = get_mla_metadata_dense_fp8\("
SPLITS = r"scheduler_metadata\.num_splits = num_splits"
copies = "".join(rf"\1{line}\n" for line in COPIED)
fp8, hopper = "--kv-cache-dtype fp8", "NVIDIA H100 80GB HBM3"

EDITS = (
    Edit("remedy cut out", "0.23.0", _BACKEND, copied, "", also=cut, runs=True),
    Edit("remedy cut out, 0.33.0", "0.33.0", _BACKEND, copied, "", also=cut),
    Edit("the plan kept in buffers", "0.18.1", _BACKEND, pointed, rf"{copies}\g<0>", Verdict.FIXED),
    Edit("the plan kept in buffers, 0.17.1", "0.17.1", _BACKEND, pointed, rf"{copies}\g<0>", Verdict.FIXED),
    Edit(
        "the plan kept in buffers, and made elsewhere",
        "0.18.1",
        _BACKEND,
        pointed,
        rf"{copies}\g<0>",
        also=((_CALLER, r"decode_metadata = self\._build_decode\(", "decode_metadata = self._kept_decode("),),
    ),
    Edit(
        "the plan handed elsewhere",
        "0.18.1",
        _BACKEND,
        r"scheduler_metadata\.tile_scheduler_metadata = .*",
        "scheduler_metadata.take(tile_scheduler_metadata)",
    ),
    Edit(
        "a builder from elsewhere",
        "0.19.0",
        _BACKEND,
        r"return FlashMLAMetadataBuilder$",
        "return BalancedFlashMLAMetadataBuilder",
    ),
)

SERVED = (
    Served("0.18.1", f"./v3 {fp8}", affects, "FULL_AND_PIECEWISE (the default)", hopper),
    Served("0.18.1", f"./v3 {fp8} --enforce-eager", does_not, "--enforce-eager", hopper),
    Served("0.18.1", f"./v3 {fp8} -cc.cudagraph_mode=PIECEWISE", does_not, "PIECEWISE", hopper),
    Served("0.18.1", "./v3", does_not, "not fp8", hopper),
    Served("0.18.1", "./modelopt", unknown, "quantization config", hopper),
    Served("0.18.1", f"./v3 {fp8}", does_not, "A100", "NVIDIA A100-SXM4-80GB"),
    Served("0.18.1", f"./v3 {fp8}", does_not, "Hopper", "NVIDIA B200"),
    Served("0.18.1", f"./kimi-vl {fp8}", affects, "FlashMLA", hopper),
    Served("0.18.1", f"./llama {fp8}", does_not, "LlamaForCausalLM has no latent attention"),
    Served("0.18.1", f"./v32 {fp8}", does_not, "sparse attention", hopper),
)

WORDINGS = (
    Wording(
        REMEDY,
        "0.18.1",
        _BACKEND,
        {
            "where there are buffers": before(POINTED_AT, "if self.cg_buf_num_splits is not None:", *COPIED[1:]),
            "by assignment": before(POINTED_AT, *(re.sub(r"\.copy_\((\w+)\)", r" = \1", line) for line in COPIED)),
            "by shape": before(POINTED_AT, *(line.replace(".size(0)", ".shape[0]") for line in COPIED)),
            "by len": before(POINTED_AT, *(re.sub(r"(\w+)\.size\(0\)", r"len(\1)", line) for line in COPIED)),
            "in one line": before(
                POINTED_AT,
                "if self.cg_buf_num_splits is not None:",
                (
                    "    tile_scheduler_metadata = self.cg_buf_tile_scheduler_metadata"
                    "[: len(tile_scheduler_metadata)].copy_(tile_scheduler_metadata)"
                ),
                "    num_splits = self.cg_buf_num_splits[: len(num_splits)].copy_(num_splits)",
            ),
            "by a method": both(
                before(
                    POINTED_AT,
                    (
                        "tile_scheduler_metadata = self._kept(self.cg_buf_tile_scheduler_metadata, "
                        "tile_scheduler_metadata)"
                    ),
                    "num_splits = self._kept(self.cg_buf_num_splits, num_splits)",
                ),
                before(
                    r"def _build_decode",
                    "def _kept(self, buffer, values):",
                    "    return values if buffer is None else buffer[: len(values)].copy_(values)",
                    "",
                ),
            ),
            "behind": after(
                SPLITS,
                *(
                    re.sub(r"^(\s+)(tile_scheduler_metadata|num_splits) =", r"\1scheduler_metadata.\2 =", line)
                    for line in COPIED
                ),
            ),
            "in the common builder": {
                _CALLER: before(
                    r"attn_metadata = self\.metadata_cls\(",
                    "kept = getattr(self, 'cg_buf_num_splits', None)",
                    "plan = getattr(decode_metadata, 'scheduler_metadata', None)",
                    "if kept is not None and plan is not None and plan.num_splits is not None:",
                    (
                        "    plan.tile_scheduler_metadata = self.cg_buf_tile_scheduler_metadata"
                        "[: len(plan.tile_scheduler_metadata)].copy_(plan.tile_scheduler_metadata)"
                    ),
                    "    plan.num_splits = kept[: len(plan.num_splits)].copy_(plan.num_splits)",
                )
            },
            "in a builder of its own": before(
                r"class FlashMLAImpl\(",
                "    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):",
                "        made = super().build(common_prefix_len, common_attn_metadata, fast_build)",
                "        plan = made.decode and made.decode.scheduler_metadata",
                "        if plan and self.is_fp8_kvcache and self.cg_buf_num_splits is not None:",
                "            kept = self.cg_buf_num_splits[: len(plan.num_splits)]",
                "            plan.num_splits = kept.copy_(plan.num_splits)",
                "            kept = self.cg_buf_tile_scheduler_metadata[: len(plan.tile_scheduler_metadata)]",
                "            plan.tile_scheduler_metadata = kept.copy_(plan.tile_scheduler_metadata)",
                "        return made",
                "",
                "",
            ),
            "in the graph": before(
                r"if self\.kv_cache_dtype\.startswith\(\"fp8\"\):\n +o, lse",
                "if self.kv_cache_dtype.startswith('fp8'):",
                (
                    "    scheduler_metadata.tile_scheduler_metadata, scheduler_metadata.num_splits = "
                    "get_mla_metadata_dense_fp8(attn_metadata.decode.seq_lens, q.shape[1] * self.num_heads, 1)"
                ),
            ),
            "new buffers": both(
                swap(r"cg_buf_", "graph_buf_"),
                before(POINTED_AT, *(line.replace("cg_buf_", "graph_buf_") for line in COPIED)),
            ),
        },
    ),
    Wording(
        LOOKALIKE,
        "0.18.1",
        _BACKEND,
        {
            "copied and not pointed at": before(POINTED_AT, *(line for line in COPIED if "= self.cg_buf" not in line)),
            "only the tiles": before(POINTED_AT, *COPIED[:4]),
            "only the splits": before(POINTED_AT, COPIED[0], *COPIED[4:]),
            "the tiles and not the splits pointed at": before(POINTED_AT, *COPIED[:-1]),
            "the splits and not the tiles pointed at": before(
                POINTED_AT, *(line for number, line in enumerate(COPIED) if number != 3)
            ),
            "copied if debugging": before(POINTED_AT, "if not __debug__:", *COPIED[1:]),
            "copied for large batches": before(POINTED_AT, "if num_decode_tokens > 128:", *COPIED[1:]),
            "copied before the plan": before(
                PLANNED, "n = 0", "self.cg_buf_tile_scheduler_metadata = self.cg_buf_tile_scheduler_metadata"
            ),
            "a clone pointed at": before(
                POINTED_AT,
                *COPIED,
                "tile_scheduler_metadata = tile_scheduler_metadata.clone()",
                "num_splits = num_splits.clone()",
            ),
            "copied into nothing": before(
                POINTED_AT, *(line.replace("[:n].copy_", "[:n].clone().copy_") for line in COPIED)
            ),
            "copied and planned again": before(
                POINTED_AT,
                *COPIED,
                (
                    "tile_scheduler_metadata, num_splits = get_mla_metadata_dense_fp8(seq_lens_device, "
                    "num_q_tokens_per_head_k, 1)"
                ),
            ),
            "planned again behind": both(
                before(POINTED_AT, *COPIED), after(SPLITS, "scheduler_metadata.num_splits = num_splits.clone()")
            ),
        },
    ),
    Wording(
        SHAPE,
        "0.18.1",
        _BACKEND,
        {
            "pointed at together": swap(
                (
                    r"scheduler_metadata\.tile_scheduler_metadata = tile_scheduler_metadata\n"
                    r"( +)scheduler_metadata\.num_splits = num_splits"
                ),
                (
                    r"(scheduler_metadata.tile_scheduler_metadata, scheduler_metadata.num_splits) = "
                    r"tile_scheduler_metadata, num_splits"
                ),
            ),
            "pointed at by setattr": swap(
                POINTED_AT, "setattr(scheduler_metadata, 'tile_scheduler_metadata', tile_scheduler_metadata)"
            ),
            "splits on the metadata itself": after(SPLITS, "self.latest = scheduler_metadata"),
            "splits pointed at first": swap(
                (
                    r"(scheduler_metadata\.tile_scheduler_metadata = tile_scheduler_metadata)\n"
                    r"( +)(scheduler_metadata\.num_splits = num_splits)"
                ),
                r"\3\n\2\1",
            ),
            "plan replaced": after(SPLITS, "import copy", "scheduler_metadata = copy.copy(scheduler_metadata)"),
            "plan under another name": swap(
                r"^( +)scheduler_metadata=scheduler_metadata,\n",
                (
                    r"\1scheduler_metadata=type(scheduler_metadata)(**vars(scheduler_metadata)) if False else "
                    r"scheduler_metadata,\n"
                ),
            ),
            "metadata class through a local": swap(
                r"return FlashMLADecodeMetadata\(", "made = FlashMLADecodeMetadata; return made("
            ),
            "metadata attribute renamed": swap(r"\bscheduler_metadata\b", "plan_metadata"),
            "buffers made by new zeros": swap(
                r"self\.cg_buf_num_splits = torch\.empty\(", "self.cg_buf_num_splits = torch.zeros("
            ),
            "buffers made lazily": swap(
                r"self\.cg_buf_num_splits = None\n",
                "self.cg_buf_num_splits = None\n        self.made_buffers = False\n",
            ),
            "buffers too small": swap(
                r"\(vllm_config\.scheduler_config\.max_num_seqs \+ 1\)",
                "(vllm_config.scheduler_config.max_num_seqs - 2)",
            ),
            "buffers of int64": swap(r"dtype=torch\.int32", "dtype=torch.int64"),
            "buffers for decodes only": swap(
                r"if self\.compilation_config\.cudagraph_mode\.has_full_cudagraphs\(\):",
                "if self.compilation_config.cudagraph_mode.decode_mode().name == 'FULL':",
            ),
            "buffers made for others": swap(
                r"if self\.compilation_config\.cudagraph_mode\.has_full_cudagraphs\(\):", "if not self.is_fp8_kvcache:"
            ),
            "the flag renamed": swap(r"self\.is_fp8_kvcache", "self.kvcache_is_fp8"),
            "the flag turned round": both(
                swap(r"self\.is_fp8_kvcache = (.*)", r"self.is_fp8_kvcache = not \1"),
                swap(r"if self\.is_fp8_kvcache", "if not self.is_fp8_kvcache"),
                swap(r"is_fp8_kvcache=self\.is_fp8_kvcache", "is_fp8_kvcache=not self.is_fp8_kvcache"),
            ),
        },
    ),
)
