"""Trials of mamba-padding: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.mamba_padding import _BUILDER, _RUNNER

marked, cleared = r"^( *)(is_prefilling = .* < .*)\n", r"is_prefilling[num_reqs:] = False\n"
affects, does_not, unknown = Concern.CONCERNS, Concern.DOES_NOT, Concern.UNKNOWN

EDITS = (
    Edit(
        "remedy cut out",
        "0.23.0",
        _RUNNER,
        r"^ *is_prefilling\[num_reqs:\] = False\n",
        "",
        Verdict.AFFECTED,
        runs=True,
    ),
    Edit("padded rows cleared", "0.21.0", _RUNNER, marked, rf"\1\2\n\1{cleared}", Verdict.FIXED),
    Edit(
        "cleared now and then",
        "0.21.0",
        _RUNNER,
        marked,
        rf"\1\2\n\1if self.odd:\n\1    {cleared}",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "marked elsewhere",
        "0.20.0",
        _RUNNER,
        r"is_prefilling = .* < .*",
        "is_prefilling = self._prefilling(num_reqs_padded)",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "split now and then",
        "0.20.0",
        _BUILDER,
        r"treat_short_extends_as_decodes=False",
        "treat_short_extends_as_decodes=self.treat_so",
        Verdict.UNRECOGNISED,
    ),
)

SERVED = (
    Served("0.21.0", "./mamba2", affects, "Mamba2ForCausalLM"),
    Served("0.21.0", "./mamba2 --no-enable-chunked-prefill", affects, "Mamba2ForCausalLM"),
    Served("0.21.0", "./mamba2 -cc.cudagraph_mode=PIECEWISE", does_not, "PIECEWISE"),
    Served("0.21.0", "VLLM_USE_V2_MODEL_RUNNER=1 ./mamba2", does_not, "V2"),
    Served("0.21.0", "./qwen3-next", does_not, "Qwen3NextForCausalLM"),
    Served("0.21.0", "./llama", does_not, "LlamaForCausalLM"),
    Served("0.21.0", "./new-hybrid", unknown, "does not know the model"),
    Served("0.21.0", "ibm/hybrid", unknown, "config.json of ibm/hybrid"),
)
