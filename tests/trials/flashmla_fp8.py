"""Trials of flashmla-fp8: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.flashmla_fp8 import _BACKEND, _CALLER, _FULL_GRAPHS, _KEPT

copied, taken, fits = (
    r"^ *self\.cg_buf_\w+\[:n\]\.copy_\(\w+\)\n",
    r"^ *\w+ = self\.cg_buf_\w+\[:n\]\n",
    r"^ *assert .*self\.cg_buf_.*\n",
)
cut = tuple((_BACKEND, pattern, "") for pattern in (taken, fits))
pointed = r"^( *)scheduler_metadata\.tile_scheduler_metadata = tile_scheduler_metadata\n"
lines = ("n = tile_scheduler_metadata.size(0)", *_KEPT[:2], "n = num_splits.size(0)", *_KEPT[2:])
kept = rf"\1{_FULL_GRAPHS.removesuffix(' ...')}\n" + "".join(rf"\1    {line}\n" for line in lines)
affects, does_not, unknown = Concern.CONCERNS, Concern.DOES_NOT, Concern.UNKNOWN
fp8, hopper = "--kv-cache-dtype fp8", "NVIDIA H100 80GB HBM3"

EDITS = (
    Edit("remedy cut out", "0.23.0", _BACKEND, copied, "", Verdict.AFFECTED, cut, runs=True),
    Edit("remedy cut out, 0.33.0", "0.33.0", _BACKEND, copied, "", Verdict.AFFECTED, cut),
    Edit("the plan kept in buffers", "0.18.1", _BACKEND, pointed, rf"{kept}\g<0>", Verdict.FIXED),
    Edit(
        "the plan kept in buffers, and made elsewhere",
        "0.18.1",
        _BACKEND,
        pointed,
        rf"{kept}\g<0>",
        Verdict.UNRECOGNISED,
        also=((_CALLER, r"decode_metadata = self\._build_decode\(", "decode_metadata = self._kept_decode("),),
    ),
    Edit(
        "the plan handed elsewhere",
        "0.18.1",
        _BACKEND,
        r"scheduler_metadata\.tile_scheduler_metadata = .*",
        "scheduler_metadata.take(tile_scheduler_metadata)",
        Verdict.UNRECOGNISED,
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
