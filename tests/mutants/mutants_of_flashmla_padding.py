"""What `flashmla-padding` patches, mutated in several releases."""

from __future__ import annotations

from functools import cache

from edited import Change, before, both, swap
from mutants_around import around, imported_otherwise
from mutants_by_hand import FIX_IN_WORDS, NEAR, SHAPE, SIZE, hand
from mutants_families import Base, Mutant, Plan, Target, family
from vllm_files import FLASHMLA, RUNNER

PADDED_WITH_MINUS_ONE = swap(r"(num_reqs:num_reqs_padded\]\.fill_)\(NULL_BLOCK_ID\)", r"\1(-1)")
FILLED = r"blk_table_tensor\[num_reqs:num_reqs_padded\]\.fill_\(-1\)"
PADDING_REMEDY = ((RUNNER, swap(FILLED, "blk_table_tensor[num_reqs:num_reqs_padded].fill_(0)")),)
PADDING_19 = Base("0.19.1", "stock", remedy=PADDING_REMEDY)
PADDING_17 = Base("0.17.1", "stock", remedy=PADDING_REMEDY)
PADDING_20 = Base("0.20.0", "stock")
PADDING_23 = Base("0.23.0", "less the fix", ((RUNNER, PADDED_WITH_MINUS_ONE),), remedy=PADDING_REMEDY)


def _filled(*lines: str) -> Change:
    return swap(rf"^( +){FILLED}", "\n".join(rf"\1{line}" for line in lines))


@cache
def flashmla_padding() -> tuple[Mutant, ...]:
    name, paths = "flashmla-padding", (RUNNER, FLASHMLA)
    focus = r"blk_table|num_reqs_padded|seq_lens_device|block_table_tensor|query_start_loc_cpu"
    build: Target = (RUNNER, "GPUModelRunner._build_attention_metadata")
    decode: Target = (FLASHMLA, "FlashMLAMetadataBuilder._build_decode")
    plans = (
        Plan(PADDING_19, ((build, 2), (decode, 3)), focus, paths),
        Plan(PADDING_17, ((build, 1), (decode, 2)), focus, paths),
        Plan(PADDING_20, ((build, 1),), focus, paths),
        Plan(PADDING_23, ((decode, 1),), focus, paths),
    )
    part = "blk_table_tensor[num_reqs:num_reqs_padded]"
    by_hand = [
        *around(name, PADDING_17, FLASHMLA, "FlashMLAMetadataBuilder", paths, ("_build_decode",)),
        *around(name, PADDING_19, RUNNER, "GPUModelRunner", paths, ("_build_attention_metadata",)),
        *imported_otherwise(name, PADDING_19, FLASHMLA, "get_mla_metadata_dense_fp8", paths),
        *imported_otherwise(name, PADDING_20, RUNNER, "NULL_BLOCK_ID", paths),
        *hand(
            name,
            PADDING_17,
            paths,
            FIX_IN_WORDS,
            RUNNER,
            as_upstream=_filled("NULL_BLOCK_ID = 0", f"{part}.fill_(NULL_BLOCK_ID)"),
            by_number=_filled(f"{part}.fill_(0)"),
            by_zero=_filled(f"{part}.zero_()"),
            by_assignment=_filled(f"{part} = 0"),
            by_masked_fill=_filled(f"{part}.fill_(-1)", f"{part}.clamp_(min=0)"),
            in_the_builder={
                FLASHMLA: before(
                    r"query_lens_cpu = query_start_loc_cpu\[1:\]",
                    "block_table_tensor = block_table_tensor.clamp(min=0)",
                )
            },
            in_the_builder_in_place={
                FLASHMLA: before(r"query_lens_cpu = query_start_loc_cpu\[1:\]", "block_table_tensor.clamp_(min=0)")
            },
        ),
        *hand(
            name,
            PADDING_17,
            paths,
            NEAR,
            RUNNER,
            null_is_minus_one=_filled("NULL_BLOCK_ID = -1", f"{part}.fill_(NULL_BLOCK_ID)"),
            null_is_minus_one_for_the_module=both(
                _filled(f"{part}.fill_(NULL_BLOCK_ID)"),
                before(r"class GPUModelRunner", "NULL_BLOCK_ID = -1", ""),
            ),
            filled_and_filled_again=_filled("NULL_BLOCK_ID = 0", f"{part}.fill_(NULL_BLOCK_ID)", f"{part} = -1"),
            filled_and_filled_all=_filled(
                "NULL_BLOCK_ID = 0", f"{part}.fill_(NULL_BLOCK_ID)", "blk_table_tensor[num_reqs:].fill_(-1)"
            ),
            filled_under_a_condition=_filled(
                "NULL_BLOCK_ID = 0",
                "if not __debug__:",
                f"    {part}.fill_(NULL_BLOCK_ID)",
                "else:",
                "    blk_table_tensor[num_reqs:].fill_(-1)",
            ),
            a_copy_filled=_filled(
                "NULL_BLOCK_ID = 0",
                "filled = blk_table_tensor",
                "blk_table_tensor[num_reqs:] = -1",
                "blk_table_tensor = blk_table_tensor.clone()",
                f"{part}.fill_(NULL_BLOCK_ID)",
                "return filled",
            ),
            the_wrong_rows=_filled("blk_table_tensor[num_reqs_padded:].fill_(-1)"),
            minus_two=_filled(f"{part}.fill_(-2)"),
            minus_one_by_name=_filled("PAD_BLOCK_ID = -1", f"{part}.fill_(PAD_BLOCK_ID)"),
            minus_one_by_keyword=_filled(f"{part}.fill_(value=-1)"),
            minus_one_by_assignment=_filled(f"{part} = -1"),
            minus_one_in_a_helper=both(
                _filled("self._pad(blk_table_tensor, num_reqs, num_reqs_padded)"),
                before(
                    r"def _build_attention_metadata",
                    "def _pad(self, table, first, last):",
                    "    table[first:last].fill_(-1)",
                    "",
                ),
            ),
            not_padded=_filled("pass"),
        ),
        *hand(
            name,
            PADDING_17,
            paths,
            SHAPE,
            FLASHMLA,
            keyword_only=swap(
                r"def _build_decode\(\n        self,\n", "def _build_decode(\n        self,\n        *,\n"
            ),
            keyword_only_from_the_middle=swap(r"(def _build_decode\((?:\n.*){4}\n)", r"\1        *,\n"),
            positional_only=swap(r"(def _build_decode\((?:\n.*){4}\n)", r"\1        /,\n"),
            more_by_keyword=swap(r"(def _build_decode\((?:\n.*){8}\n)", r"\1        **more,\n"),
            the_flag_renamed=swap(r"self\.is_fp8_kvcache", "self.kvcache_is_fp8"),
            the_flag_turned_round=both(
                swap(r"self\.is_fp8_kvcache = (.*)", r"self.is_fp8_kvcache = not \1"),
                swap(r"if self\.is_fp8_kvcache", "if not self.is_fp8_kvcache"),
                swap(r"is_fp8_kvcache=self\.is_fp8_kvcache", "is_fp8_kvcache=not self.is_fp8_kvcache"),
            ),
            lengths_copied_first=before(
                r"query_lens_cpu = query_start_loc_cpu\[1:\]", "seq_lens_device = seq_lens_device.clone()"
            ),
            tables_copied_first=before(
                r"query_lens_cpu = query_start_loc_cpu\[1:\]",
                "block_table_tensor = block_table_tensor.contiguous()",
            ),
            lengths_by_another_name=swap(r"\bseq_lens_device\b", "seq_lens"),
        ),
    ]
    return tuple(family(name, plans, by_hand, SIZE))
