"""What `mamba-padding` patches, mutated in several releases."""

from __future__ import annotations

from functools import cache

from edited import after, before, both, cut, swap
from mutants_around import around, imported_otherwise
from mutants_by_hand import FIX_IN_WORDS, NEAR, SHAPE, SIZE, hand
from mutants_families import Base, Mutant, Plan, Target, family
from vllm_files import MAMBA, RUNNER

MARKED = r"is_prefilling = num_computed_tokens_cpu < num_prompt_tokens_cpu"
CLEARED = "is_prefilling[num_reqs:] = False"
MAMBA_REMEDY = ((RUNNER, after(MARKED, CLEARED)),)
MAMBA_19 = Base("0.19.1", "stock", remedy=MAMBA_REMEDY)
MAMBA_21 = Base("0.21.0", "stock", remedy=MAMBA_REMEDY)
MAMBA_22 = Base("0.22.1", "stock")
MAMBA_23 = Base(
    "0.23.0", "less the fix", ((RUNNER, cut(r"^ *is_prefilling\[num_reqs:\] = False\n")),), remedy=MAMBA_REMEDY
)


@cache
def mamba_padding() -> tuple[Mutant, ...]:
    name, paths = "mamba-padding", (RUNNER, MAMBA)
    focus = r"is_prefilling|num_computed_tokens_cpu|num_prompt|split_decodes|common_attn_metadata|num_reqs_padded"
    build: Target = (RUNNER, "GPUModelRunner._build_attention_metadata")
    compute: Target = (MAMBA, "BaseMambaAttentionMetadataBuilder._compute_common_metadata")
    update: Target = (MAMBA, "BaseMambaAttentionMetadataBuilder._update_metadata_for_cudagraph_capture")
    plans = (
        Plan(MAMBA_21, ((build, 2), (compute, 3), (update, 1)), focus, paths),
        Plan(MAMBA_19, ((compute, 2),), focus, paths),
        Plan(MAMBA_22, ((build, 1),), focus, paths),
        Plan(MAMBA_23, ((compute, 1),), focus, paths),
    )
    by_hand = [
        *around(name, MAMBA_21, MAMBA, "BaseMambaAttentionMetadataBuilder", paths, ("_compute_common_metadata",)),
        *around(name, MAMBA_21, RUNNER, "GPUModelRunner", paths, ("_build_attention_metadata",)),
        *imported_otherwise(name, MAMBA_21, MAMBA, "split_decodes_and_prefills", paths),
        *hand(
            name,
            MAMBA_21,
            paths,
            FIX_IN_WORDS,
            RUNNER,
            as_upstream=after(MARKED, CLEARED),
            by_fill=after(MARKED, "is_prefilling[num_reqs:].fill_(False)"),
            by_and=swap(
                MARKED,
                (
                    "is_prefilling = (num_computed_tokens_cpu < num_prompt_tokens_cpu) & "
                    "(torch.arange(num_reqs_padded) < num_reqs)"
                ),
            ),
            by_and_behind=after(MARKED, "is_prefilling &= torch.arange(num_reqs_padded) < num_reqs"),
            by_a_slice_to_the_end=after(MARKED, "is_prefilling[num_reqs:num_reqs_padded] = False"),
            by_zeros=swap(
                MARKED,
                (
                    "is_prefilling = torch.zeros(num_reqs_padded, dtype=torch.bool)\n"
                    "        is_prefilling[:num_reqs] = (num_computed_tokens_cpu < "
                    "num_prompt_tokens_cpu)[:num_reqs]"
                ),
            ),
            by_cat=swap(
                MARKED,
                (
                    "is_prefilling = torch.cat([(num_computed_tokens_cpu < num_prompt_tokens_cpu)[:num_reqs], "
                    "torch.zeros(num_reqs_padded - num_reqs, dtype=torch.bool)])"
                ),
            ),
            where_there_is_padding=after(MARKED, "if num_reqs_padded > num_reqs:", f"    {CLEARED}"),
            in_the_builder={
                MAMBA: before(
                    r"num_reqs = common_attn_metadata\.num_reqs\n(?=\n +# Treat multi)",
                    "starts = common_attn_metadata.query_start_loc_cpu",
                    (
                        "common_attn_metadata = replace(common_attn_metadata, "
                        "is_prefilling=common_attn_metadata.is_prefilling & (starts[1:] != starts[:-1]))"
                    ),
                )
            },
            on_the_metadata=before(
                r"if self\.dcp_world_size > 1:\n +self\.dcp_local_seq_lens\.cpu\[:num_reqs\]",
                "cm_base.is_prefilling[num_reqs:] = False",
            ),
        ),
        *hand(
            name,
            MAMBA_21,
            paths,
            NEAR,
            RUNNER,
            cleared_on_a_copy=after(MARKED, "is_prefilling.clone()[num_reqs:] = False"),
            cleared_if_debugging=after(MARKED, "if not __debug__:", f"    {CLEARED}"),
            cleared_for_captures=after(MARKED, "if for_cudagraph_capture:", f"    {CLEARED}"),
            cleared_and_made_again=after(
                MARKED, CLEARED, "is_prefilling = num_computed_tokens_cpu < num_prompt_tokens_cpu"
            ),
            cleared_and_made_again_by_or=after(
                MARKED, CLEARED, "is_prefilling |= num_computed_tokens_cpu < num_prompt_tokens_cpu"
            ),
            cleared_and_another_handed_on=both(
                after(MARKED, CLEARED),
                swap(
                    r"is_prefilling=is_prefilling,",
                    "is_prefilling=num_computed_tokens_cpu < num_prompt_tokens_cpu,",
                ),
            ),
            cleared_too_late=before(r"return attn_metadata, spec_decode_common_attn_metadata\n", CLEARED),
            cleared_after_the_metadata=before(
                r"if self\.dcp_world_size > 1:\n +self\.dcp_local_seq_lens\.cpu\[:num_reqs\]", CLEARED
            ),
            cleared_after_a_return=after(MARKED, "if num_reqs == 0:", "    return {}, None", CLEARED),
            cleared_behind_the_padding=after(MARKED, "is_prefilling[num_reqs_padded:] = False"),
            num_reqs_set_first=after(MARKED, "num_reqs, real = num_reqs_padded, num_reqs", CLEARED, "num_reqs = real"),
            marked_without_name=both(
                cut(rf"^ +{MARKED}\n"),
                swap(
                    r"is_prefilling=is_prefilling,",
                    "is_prefilling=num_computed_tokens_cpu < num_prompt_tokens_cpu,",
                ),
            ),
            marked_with_a_type=swap(
                MARKED, "is_prefilling: torch.Tensor = num_computed_tokens_cpu < num_prompt_tokens_cpu"
            ),
            marked_by_another_name=both(
                swap(MARKED, "in_prefill = num_computed_tokens_cpu < num_prompt_tokens_cpu"),
                swap(r"is_prefilling=is_prefilling,", "is_prefilling=in_prefill,"),
            ),
            marked_in_a_helper=both(
                swap(MARKED, "marks = self._marks(num_computed_tokens_cpu, num_prompt_tokens_cpu)"),
                swap(r"is_prefilling=is_prefilling,", "is_prefilling=marks,"),
                before(
                    r"def _build_attention_metadata",
                    "def _marks(self, computed, prompt):",
                    "    return computed < prompt",
                    "",
                ),
            ),
            marked_with_another=swap(
                MARKED, "is_prefilling = causal_rows = num_computed_tokens_cpu < num_prompt_tokens_cpu"
            ),
            marked_in_a_tuple=swap(MARKED, "is_prefilling, _ = num_computed_tokens_cpu < num_prompt_tokens_cpu, None"),
            marked_the_other_way=swap(MARKED, "is_prefilling = num_prompt_tokens_cpu > num_computed_tokens_cpu"),
            marked_by_lt=swap(MARKED, "is_prefilling = torch.lt(num_computed_tokens_cpu, num_prompt_tokens_cpu)"),
            marked_on_the_metadata=both(
                cut(rf"^ +{MARKED}\n", r"^ +is_prefilling=is_prefilling,\n"),
                before(
                    r"if self\.dcp_world_size > 1:\n +self\.dcp_local_seq_lens\.cpu\[:num_reqs\]",
                    "cm_base.is_prefilling = num_computed_tokens_cpu < num_prompt_tokens_cpu",
                ),
            ),
        ),
        *hand(
            name,
            MAMBA_21,
            paths,
            SHAPE,
            MAMBA,
            split_by_phase_is_default=swap(r"^ +treat_short_extends_as_decodes=False,\n", ""),
            split_by_phase_from_an_attribute=swap(
                r"treat_short_extends_as_decodes=False", "treat_short_extends_as_decodes=bool(self.num_spec_tokens)"
            ),
            split_twice=before(
                r"num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens = \(",
                "split_decodes_and_prefills(common_attn_metadata, decode_threshold=decode_threshold)",
            ),
            split_by_position=swap(
                r"decode_threshold=decode_threshold,\n( +)treat",
                (
                    r"decode_threshold,\n\1treat_short_extends_as_decodes=False,\n"
                    r"\1require_uniform=False if treat_is_gone else False,\n\1# treat"
                ),
            ),
            split_on_a_copy=swap(
                r"split_decodes_and_prefills\(\n +common_attn_metadata,",
                "split_decodes_and_prefills(\n                replace(common_attn_metadata),",
            ),
            split_on_a_local=both(
                swap(
                    r"split_decodes_and_prefills\(\n +common_attn_metadata,",
                    "split_decodes_and_prefills(\n                m,",
                ),
                before(
                    r"num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens = \(",
                    "m = common_attn_metadata",
                ),
            ),
            kept_from_before=before(
                r"num_reqs = common_attn_metadata\.num_reqs\n(?=\n +# Treat multi)",
                "common_attn_metadata = getattr(self, 'latest', None) or common_attn_metadata",
            ),
            metadata_is_looked_up=before(
                r"num_reqs = common_attn_metadata\.num_reqs\n(?=\n +# Treat multi)",
                "self.seen = {id(common_attn_metadata): common_attn_metadata}",
            ),
        ),
    ]
    return tuple(family(name, plans, by_hand, SIZE))
