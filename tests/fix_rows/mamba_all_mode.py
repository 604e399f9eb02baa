"""Trials of mamba-all-mode: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import after, before, both, swap
from trial_rows import LOOKALIKE, REMEDY, Edit, Served, Wording, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.mamba_all_mode import _BUILDER, _FOR_GRAPHS, _INDICES, _MAMBA2, _RUNNER

replaced = r"^        new_metadata\.state_indices_tensor = state_indices_t$"
copied = "        self.{0}[:num_reqs].copy_(metadata.{0}[:num_reqs])\n"
both_copied = "".join(copied.format(name) for name in _INDICES)
stored = "        new_metadata.state_indices_tensor = state_indices_t"
for_graphs = rf"return self\.{_FOR_GRAPHS}\(new_metadata\)"
nemotron = {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hybrid_override_pattern": "M-M-M*-"}
caching = "./model --enable-prefix-caching"
TABLE_COPIED = r"^            persistent_state_indices_t\.copy_\(state_indices_t, non_blocking=True\)$"
COPIES = tuple(f"self.{name}[:num_reqs].copy_(metadata.{name}[:num_reqs])" for name in _INDICES)
TO_HANDED_ON = r"new_metadata\.state_indices_tensor = state_indices_t"
RETURNED = r"return new_metadata"
NO_GRAPHS = "self.compilation_config.cudagraph_mode.has_full_cudagraphs()"

EDITS = (
    Edit("both indices copied", "0.16.0", _BUILDER, replaced, both_copied + stored, Verdict.FIXED),
    Edit("both copied, 0.14.1", "0.14.1", _BUILDER, replaced, both_copied + stored, Verdict.FIXED),
    Edit(
        "copied beside the table where there are indices",
        "0.16.0",
        _BUILDER,
        TABLE_COPIED,
        "            persistent_state_indices_t.copy_(state_indices_t, non_blocking=True)\n"
        "            if metadata.block_idx_last_scheduled_token is not None:\n"
        + "".join(f"                {line}\n" for line in COPIES).rstrip(),
        Verdict.FIXED,
    ),
    Edit("one of them", "0.15.1", _BUILDER, replaced, copied.format(_INDICES[0]) + stored, Verdict.AFFECTED, runs=True),
    Edit("copied elsewhere", "0.16.0", _BUILDER, replaced, f"        self.refresh(metadata)\n{stored}"),
    Edit(
        "a backend has a builder of its own",
        "0.17.0",
        _MAMBA2,
        r"return Mamba2AttentionMetadataBuilder$",
        "return GroupedMamba2AttentionMetadataBuilder",
    ),
    Edit("remedy cut out", "0.17.0", _BUILDER, for_graphs, "return new_metadata"),
)

SERVED = (
    Served("0.16.0", caching, affects, "NemotronHForCausalLM", model=nemotron),
    Served("0.16.0", f"{caching} --mamba-cache-mode all", affects, "FULL_AND_PIECEWISE", model=nemotron),
    Served("0.16.0", f"{caching} --mamba-cache-mode align", does_not, "align", model=nemotron),
    Served("0.16.0", "./model", does_not, "--enable-prefix-caching is not given", model=nemotron),
    Served("0.14.1", f"{caching} --no-enable-prefix-caching", does_not, "is not given", model=nemotron),
    Served("0.16.0", f"{caching} --enforce-eager", does_not, "--enforce-eager", model=nemotron),
    Served("0.16.0", "./mamba2 --enable-prefix-caching", does_not, "no several groups"),
    Served("0.16.0", "./new-hybrid --enable-prefix-caching", unknown, "does not know the model"),
)

WORDINGS = (
    Wording(
        REMEDY,
        "0.16.0",
        _BUILDER,
        {
            "both copied at once": before(
                TO_HANDED_ON,
                f"torch._foreach_copy_([self.{_INDICES[0]}[:num_reqs], self.{_INDICES[1]}[:num_reqs]],",
                f"    [metadata.{_INDICES[0]}[:num_reqs], metadata.{_INDICES[1]}[:num_reqs]])",
            ),
            "handed on from own buffers": before(
                TO_HANDED_ON,
                "if metadata.num_prefills == 0 and num_reqs <= self.decode_cudagraph_max_bs:",
                *(f"    {line}" for line in COPIES),
                *(f"    new_metadata.{name} = self.{name}[:num_reqs]" for name in _INDICES),
            ),
            "no further group is updated": swap(
                "supports_update_block_table: bool = True", "supports_update_block_table: bool = False"
            ),
            "no further group is updated in this mode": after(
                r"self\.compilation_config = vllm_config\.compilation_config",
                'self.supports_update_block_table = vllm_config.cache_config.mamba_cache_mode != "all"',
            ),
            "in the subclass": {
                _MAMBA2: before(
                    r"def build\(",
                    "def update_block_table(self, metadata, blk_table, slot_mapping):",
                    "    updated = super().update_block_table(metadata, blk_table, slot_mapping)",
                    f"    for name in {_INDICES!r}:",
                    "        if getattr(metadata, name) is not None and not metadata.num_prefills:",
                    "            rows = min(len(blk_table), len(getattr(self, name)))",
                    "            getattr(self, name)[:rows].copy_(getattr(metadata, name)[:rows])",
                    "    return updated",
                    "",
                )
            },
            "each group builds its own in the runner": {
                _RUNNER: swap(r"and builder\.supports_update_block_table$", "and builder.kv_cache_spec is None")
            },
        },
    ),
    Wording(
        LOOKALIKE,
        "0.16.0",
        _BUILDER,
        {
            "copied where there are no graphs": before(
                TO_HANDED_ON, f"if not {NO_GRAPHS}:", *(f"    {line}" for line in COPIES)
            ),
            "copied where there are prefills": before(
                TO_HANDED_ON, "if metadata.num_prefills > 0:", *(f"    {line}" for line in COPIES)
            ),
            "copied in no row": before(TO_HANDED_ON, "num_reqs = 0", *COPIES),
            "copied into a copy": before(
                TO_HANDED_ON, *(f"self.{name} = self.{name}.clone()" for name in _INDICES), *COPIES
            ),
            "copied from themselves": before(
                TO_HANDED_ON, *(f"metadata.{name} = self.{name}" for name in _INDICES), *COPIES
            ),
            "copied and overwritten": before(TO_HANDED_ON, *COPIES, *(f"self.{name}.zero_()" for name in _INDICES)),
            "copied behind a return": before(TO_HANDED_ON, "if num_reqs:", "    return new_metadata", *COPIES),
            "copied after it was returned": after(RETURNED, *COPIES),
            "copied in a helper that nobody calls": before(
                r"def update_block_table\(",
                "def _copy_indices(self, metadata, num_reqs):",
                *(f"    {line}" for line in COPIES),
                "",
            ),
            "copied for each further row of the table": before(
                TO_HANDED_ON, "for num_reqs in range(0):", *(f"    {line}" for line in COPIES)
            ),
        },
    ),
    Wording(
        LOOKALIKE,
        "0.17.0",
        _BUILDER,
        {
            "copied where drafts are": swap(
                r"^( +)if self\.vllm_config\.cache_config\.mamba_cache_mode == .all.:\n(?= +assert block_idx)",
                r"\1if self.use_spec_decode:\n",
            ),
            "made for graphs and dropped": swap(
                for_graphs, f"self.{_FOR_GRAPHS}(replace(new_metadata, num_prefills=1))\n        return new_metadata"
            ),
            "made for graphs of another": both(
                swap(for_graphs, f"return self.{_FOR_GRAPHS}(new_metadata)"),
                before(for_graphs, "new_metadata = replace(new_metadata, num_prefills=1)"),
            ),
        },
    ),
)
