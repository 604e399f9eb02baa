"""Trials of mamba-padding: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import after, before, both, cut, swap
from trial_rows import LOOKALIKE, REMEDY, SHAPE, Edit, Served, Wording, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.mamba_padding import _BUILDER, _RUNNER

MARKED = r"is_prefilling = num_computed_tokens_cpu < num_prompt_tokens_cpu"
CLEARED = "is_prefilling[num_reqs:] = False"
line = rf"^( *)({MARKED})\n"

EDITS = (
    Edit(
        "remedy cut out",
        "0.23.0",
        _RUNNER,
        r"^ *is_prefilling\[num_reqs:\] = False\n",
        "",
        Verdict.AFFECTED,
        shape="prefilling-over-padding",
        runs=True,
    ),
    Edit("padded rows cleared", "0.21.0", _RUNNER, line, rf"\1\2\n\1{CLEARED}\n", Verdict.FIXED),
    Edit("padded rows cleared, 0.19.1", "0.19.1", _RUNNER, line, rf"\1\2\n\1{CLEARED}\n", Verdict.FIXED),
    Edit(
        "marked again by the builder of a backend",
        "0.22.0",
        "vllm/v1/attention/backends/mamba2_attn.py",
        r"return Mamba2AttentionMetadataBuilder$",
        "return PhaseMamba2AttentionMetadataBuilder",
    ),
    Edit(
        "marked again as the builder splits the batch",
        "0.23.0",
        _BUILDER,
        r"^( +)(m = common_attn_metadata|num_reqs = common_attn_metadata\.num_reqs)\n",
        r"\1common_attn_metadata.is_prefilling[:] = True\n\g<0>",
    ),
    Edit(
        "cleared behind the padding",
        "0.21.0",
        _RUNNER,
        line,
        rf"\1num_reqs = num_reqs_padded\n\1\2\n\1{CLEARED}\n",
        Verdict.AFFECTED,
        shape="prefilling-over-padding",
    ),
    Edit("cleared now and then", "0.21.0", _RUNNER, line, rf"\1\2\n\1if self.odd:\n\1    {CLEARED}\n"),
    Edit(
        "marked elsewhere",
        "0.20.0",
        _RUNNER,
        r"is_prefilling = .* < .*",
        "is_prefilling = self._prefilling(num_reqs_padded)",
    ),
    Edit(
        "split now and then",
        "0.20.0",
        _BUILDER,
        r"treat_short_extends_as_decodes=False",
        "treat_short_extends_as_decodes=self.treat_so",
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

WORDINGS = (
    Wording(
        REMEDY,
        "0.21.0",
        _RUNNER,
        {
            "by fill": after(MARKED, "is_prefilling[num_reqs:].fill_(False)"),
            "by and": swap(
                MARKED,
                (
                    "is_prefilling = (num_computed_tokens_cpu < num_prompt_tokens_cpu) & "
                    "(torch.arange(num_reqs_padded) < num_reqs)"
                ),
            ),
            "by and behind": after(MARKED, "is_prefilling &= torch.arange(num_reqs_padded) < num_reqs"),
            "by a slice to the end": after(MARKED, "is_prefilling[num_reqs:num_reqs_padded] = False"),
            "by zeros": swap(
                MARKED,
                (
                    "is_prefilling = torch.zeros(num_reqs_padded, dtype=torch.bool)\n"
                    "        is_prefilling[:num_reqs] = (num_computed_tokens_cpu < "
                    "num_prompt_tokens_cpu)[:num_reqs]"
                ),
            ),
            "by cat": swap(
                MARKED,
                (
                    "is_prefilling = torch.cat([(num_computed_tokens_cpu < num_prompt_tokens_cpu)[:num_reqs], "
                    "torch.zeros(num_reqs_padded - num_reqs, dtype=torch.bool)])"
                ),
            ),
            "where there is padding": after(MARKED, "if num_reqs_padded > num_reqs:", f"    {CLEARED}"),
            "in the builder": {
                _BUILDER: before(
                    r"num_reqs = common_attn_metadata\.num_reqs\n(?=\n +# Treat multi)",
                    "starts = common_attn_metadata.query_start_loc_cpu",
                    (
                        "common_attn_metadata = replace(common_attn_metadata, "
                        "is_prefilling=common_attn_metadata.is_prefilling & (starts[1:] != starts[:-1]))"
                    ),
                )
            },
            "on the metadata": before(
                r"if self\.dcp_world_size > 1:\n +self\.dcp_local_seq_lens\.cpu\[:num_reqs\]",
                "cm_base.is_prefilling[num_reqs:] = False",
            ),
        },
    ),
    Wording(
        LOOKALIKE,
        "0.21.0",
        _RUNNER,
        {
            "cleared on a copy": after(MARKED, "is_prefilling.clone()[num_reqs:] = False"),
            "cleared if debugging": after(MARKED, "if not __debug__:", f"    {CLEARED}"),
            "cleared for captures": after(MARKED, "if for_cudagraph_capture:", f"    {CLEARED}"),
            "cleared and made again": after(
                MARKED, CLEARED, "is_prefilling = num_computed_tokens_cpu < num_prompt_tokens_cpu"
            ),
            "cleared and made again by or": after(
                MARKED, CLEARED, "is_prefilling |= num_computed_tokens_cpu < num_prompt_tokens_cpu"
            ),
            "cleared and another handed on": both(
                after(MARKED, CLEARED),
                swap(r"is_prefilling=is_prefilling,", "is_prefilling=num_computed_tokens_cpu < num_prompt_tokens_cpu,"),
            ),
            "cleared too late": before(r"return attn_metadata, spec_decode_common_attn_metadata\n", CLEARED),
            "cleared after the metadata": before(
                r"if self\.dcp_world_size > 1:\n +self\.dcp_local_seq_lens\.cpu\[:num_reqs\]", CLEARED
            ),
            "cleared after a return": after(MARKED, "if num_reqs == 0:", "    return {}, None", CLEARED),
            "cleared behind the padding": after(MARKED, "is_prefilling[num_reqs_padded:] = False"),
            "num reqs set first": after(
                MARKED, "num_reqs, real = num_reqs_padded, num_reqs", CLEARED, "num_reqs = real"
            ),
            "marked without name": both(
                cut(rf"^ +{MARKED}\n"),
                swap(r"is_prefilling=is_prefilling,", "is_prefilling=num_computed_tokens_cpu < num_prompt_tokens_cpu,"),
            ),
            "marked with a type": swap(
                MARKED, "is_prefilling: torch.Tensor = num_computed_tokens_cpu < num_prompt_tokens_cpu"
            ),
            "marked by another name": both(
                swap(MARKED, "in_prefill = num_computed_tokens_cpu < num_prompt_tokens_cpu"),
                swap(r"is_prefilling=is_prefilling,", "is_prefilling=in_prefill,"),
            ),
            "marked in a helper": both(
                swap(MARKED, "marks = self._marks(num_computed_tokens_cpu, num_prompt_tokens_cpu)"),
                swap(r"is_prefilling=is_prefilling,", "is_prefilling=marks,"),
                before(
                    r"def _build_attention_metadata",
                    "def _marks(self, computed, prompt):",
                    "    return computed < prompt",
                    "",
                ),
            ),
            "marked with another": swap(
                MARKED, "is_prefilling = causal_rows = num_computed_tokens_cpu < num_prompt_tokens_cpu"
            ),
            "marked in a tuple": swap(
                MARKED, "is_prefilling, _ = num_computed_tokens_cpu < num_prompt_tokens_cpu, None"
            ),
            "marked the other way": swap(MARKED, "is_prefilling = num_prompt_tokens_cpu > num_computed_tokens_cpu"),
            "marked by lt": swap(MARKED, "is_prefilling = torch.lt(num_computed_tokens_cpu, num_prompt_tokens_cpu)"),
            "marked on the metadata": both(
                cut(rf"^ +{MARKED}\n", r"^ +is_prefilling=is_prefilling,\n"),
                before(
                    r"if self\.dcp_world_size > 1:\n +self\.dcp_local_seq_lens\.cpu\[:num_reqs\]",
                    "cm_base.is_prefilling = num_computed_tokens_cpu < num_prompt_tokens_cpu",
                ),
            ),
        },
    ),
    Wording(
        SHAPE,
        "0.21.0",
        _BUILDER,
        {
            "split by phase is default": swap(r"^ +treat_short_extends_as_decodes=False,\n", ""),
            "split by phase from an attribute": swap(
                r"treat_short_extends_as_decodes=False", "treat_short_extends_as_decodes=bool(self.num_spec_tokens)"
            ),
            "split twice": before(
                r"num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens = \(",
                "split_decodes_and_prefills(common_attn_metadata, decode_threshold=decode_threshold)",
            ),
            "split by position": swap(
                r"decode_threshold=decode_threshold,\n( +)treat",
                (
                    r"decode_threshold,\n\1treat_short_extends_as_decodes=False,\n"
                    r"\1require_uniform=False if treat_is_gone else False,\n\1# treat"
                ),
            ),
            "split on a copy": swap(
                r"split_decodes_and_prefills\(\n +common_attn_metadata,",
                "split_decodes_and_prefills(\n                replace(common_attn_metadata),",
            ),
            "split on a local": both(
                swap(
                    r"split_decodes_and_prefills\(\n +common_attn_metadata,",
                    "split_decodes_and_prefills(\n                m,",
                ),
                before(
                    r"num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens = \(", "m = common_attn_metadata"
                ),
            ),
            "kept from before": before(
                r"num_reqs = common_attn_metadata\.num_reqs\n(?=\n +# Treat multi)",
                "common_attn_metadata = getattr(self, 'latest', None) or common_attn_metadata",
            ),
            "metadata is looked up": before(
                r"num_reqs = common_attn_metadata\.num_reqs\n(?=\n +# Treat multi)",
                "self.seen = {id(common_attn_metadata): common_attn_metadata}",
            ),
        },
    ),
)
