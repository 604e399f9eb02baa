"""Trials of mamba-all-mode: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.mamba_all_mode import _BUILDER, _FOR_GRAPHS, _INDICES

replaced = r"^        new_metadata\.state_indices_tensor = state_indices_t$"
copied = "        self.{0}[:num_reqs].copy_(metadata.{0}[:num_reqs])\n"
both = "".join(copied.format(name) for name in _INDICES)
kept = "        new_metadata.state_indices_tensor = state_indices_t"
for_graphs = rf"return self\.{_FOR_GRAPHS}\(new_metadata\)"
nemotron = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M*-",
}
caching = "./model --enable-prefix-caching"
affects, does_not = Concern.CONCERNS, Concern.DOES_NOT

EDITS = (
    Edit("both indices copied", "0.16.0", _BUILDER, replaced, both + kept, Verdict.FIXED),
    Edit("both copied, 0.14.1", "0.14.1", _BUILDER, replaced, both + kept, Verdict.FIXED),
    Edit("one of them", "0.15.1", _BUILDER, replaced, copied.format(_INDICES[0]) + kept, Verdict.UNRECOGNISED),
    Edit(
        "copied elsewhere",
        "0.16.0",
        _BUILDER,
        replaced,
        f"        self.refresh(metadata)\n{kept}",
        Verdict.UNRECOGNISED,
    ),
    Edit("remedy cut out", "0.17.0", _BUILDER, for_graphs, "return new_metadata", Verdict.UNRECOGNISED),
)

SERVED = (
    Served("0.16.0", caching, affects, "NemotronHForCausalLM", model=nemotron),
    Served("0.16.0", f"{caching} --mamba-cache-mode all", affects, "FULL_AND_PIECEWISE", model=nemotron),
    Served("0.16.0", f"{caching} --mamba-cache-mode align", does_not, "align", model=nemotron),
    Served("0.16.0", "./model", does_not, "--enable-prefix-caching is not given", model=nemotron),
    Served("0.14.1", f"{caching} --no-enable-prefix-caching", does_not, "is not given", model=nemotron),
    Served("0.16.0", f"{caching} --enforce-eager", does_not, "--enforce-eager", model=nemotron),
    Served("0.16.0", "./mamba2 --enable-prefix-caching", does_not, "no several groups"),
    Served("0.16.0", "./new-hybrid --enable-prefix-caching", Concern.UNKNOWN, "does not know the model"),
)
