"""What `flashmla-fp8` patches, mutated in several releases."""

from __future__ import annotations

import re
from functools import cache

from edited import Change, after, before, both, cut, swap
from mutants_around import around, imported_otherwise
from mutants_by_hand import FIX_IN_WORDS, NEAR, SHAPE, SIZE, hand
from mutants_families import Base, Mutant, Plan, Target, family
from vllm_files import FLASHMLA

WITHOUT_PLAN_IN_BUFFERS = cut(
    r"^ *self\.cg_buf_\w+\[:n\]\.copy_\(\w+\)\n",
    r"^ *\w+ = self\.cg_buf_\w+\[:n\]\n",
    r"^ *assert .*self\.cg_buf_.*\n",
)
POINTED_AT = r"scheduler_metadata\.tile_scheduler_metadata = tile_scheduler_metadata"
COPIED = (
    "if self.compilation_config.cudagraph_mode.has_full_cudagraphs():",
    "    n = tile_scheduler_metadata.size(0)",
    "    self.cg_buf_tile_scheduler_metadata[:n].copy_(tile_scheduler_metadata)",
    "    tile_scheduler_metadata = self.cg_buf_tile_scheduler_metadata[:n]",
    "    n = num_splits.size(0)",
    "    self.cg_buf_num_splits[:n].copy_(num_splits)",
    "    num_splits = self.cg_buf_num_splits[:n]",
)
FP8_REMEDY = ((FLASHMLA, before(POINTED_AT, *COPIED)),)
FP8_18 = Base("0.18.1", "stock", remedy=FP8_REMEDY)
FP8_17 = Base("0.17.1", "stock", remedy=FP8_REMEDY)
FP8_15 = Base("0.15.0", "stock", remedy=FP8_REMEDY)
FP8_19 = Base("0.19.1", "stock")
FP8_23 = Base("0.23.0", "less the fix", ((FLASHMLA, WITHOUT_PLAN_IN_BUFFERS),), remedy=FP8_REMEDY)


def _copied(*lines: str) -> Change:
    return before(POINTED_AT, *lines)


@cache
def flashmla_fp8() -> tuple[Mutant, ...]:
    name, paths = "flashmla-fp8", (FLASHMLA,)
    focus = r"scheduler_metadata|num_splits|cg_buf|is_fp8"
    build: Target = (FLASHMLA, "FlashMLAMetadataBuilder._build_decode")
    init: Target = (FLASHMLA, "FlashMLAMetadataBuilder.__init__")
    plans = (
        Plan(FP8_18, ((build, 4), (init, 2)), focus, paths),
        Plan(FP8_17, ((build, 1), (init, 1)), focus, paths),
        Plan(FP8_19, ((build, 2),), focus, paths),
        Plan(FP8_23, ((build, 1), (init, 1)), focus, paths),
        Plan(FP8_15, ((build, 1),), focus, paths),
    )
    planned = r"tile_scheduler_metadata, num_splits = get_mla_metadata_dense_fp8\("
    by_hand = [
        *around(name, FP8_18, FLASHMLA, "FlashMLAMetadataBuilder", paths, ("_build_decode",)),
        *imported_otherwise(name, FP8_18, FLASHMLA, "get_mla_metadata_dense_fp8", paths),
        *imported_otherwise(name, FP8_23, FLASHMLA, "get_mla_metadata_dense_fp8", paths),
        *hand(
            name,
            FP8_18,
            paths,
            FIX_IN_WORDS,
            FLASHMLA,
            as_upstream=_copied(*COPIED),
            where_there_are_buffers=_copied("if self.cg_buf_num_splits is not None:", *COPIED[1:]),
            by_assignment=_copied(*(re.sub(r"\.copy_\((\w+)\)", r" = \1", line) for line in COPIED)),
            by_shape=_copied(*(line.replace(".size(0)", ".shape[0]") for line in COPIED)),
            by_len=_copied(*(re.sub(r"(\w+)\.size\(0\)", r"len(\1)", line) for line in COPIED)),
            in_one_line=_copied(
                "if self.cg_buf_num_splits is not None:",
                (
                    "    tile_scheduler_metadata = self.cg_buf_tile_scheduler_metadata"
                    "[: len(tile_scheduler_metadata)].copy_(tile_scheduler_metadata)"
                ),
                "    num_splits = self.cg_buf_num_splits[: len(num_splits)].copy_(num_splits)",
            ),
            by_a_method=both(
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
            behind=after(
                r"scheduler_metadata\.num_splits = num_splits",
                *(
                    re.sub(r"^(\s+)(tile_scheduler_metadata|num_splits) =", r"\1scheduler_metadata.\2 =", line)
                    for line in COPIED
                ),
            ),
            new_buffers=both(
                swap(r"cg_buf_", "graph_buf_"),
                before(POINTED_AT, *(line.replace("cg_buf_", "graph_buf_") for line in COPIED)),
            ),
        ),
        *hand(
            name,
            FP8_18,
            paths,
            NEAR,
            FLASHMLA,
            copied_and_not_pointed_at=_copied(*(line for line in COPIED if "= self.cg_buf" not in line)),
            only_the_tiles=_copied(*COPIED[:4]),
            only_the_splits=_copied(COPIED[0], *COPIED[4:]),
            the_tiles_and_not_the_splits_pointed_at=_copied(*COPIED[:-1]),
            the_splits_and_not_the_tiles_pointed_at=_copied(
                *(line for number, line in enumerate(COPIED) if number != 3)
            ),
            copied_if_debugging=_copied("if not __debug__:", *COPIED[1:]),
            copied_for_large_batches=_copied("if num_decode_tokens > 128:", *COPIED[1:]),
            copied_before_the_plan=before(
                planned, "n = 0", "self.cg_buf_tile_scheduler_metadata = self.cg_buf_tile_scheduler_metadata"
            ),
            a_clone_pointed_at=_copied(
                *COPIED, "tile_scheduler_metadata = tile_scheduler_metadata.clone()", "num_splits = num_splits.clone()"
            ),
            copied_into_nothing=_copied(*(line.replace("[:n].copy_", "[:n].clone().copy_") for line in COPIED)),
            copied_and_planned_again=_copied(
                *COPIED,
                (
                    "tile_scheduler_metadata, num_splits = get_mla_metadata_dense_fp8(seq_lens_device, "
                    "num_q_tokens_per_head_k, 1)"
                ),
            ),
            planned_again_behind=both(
                before(POINTED_AT, *COPIED),
                after(
                    r"scheduler_metadata\.num_splits = num_splits",
                    "scheduler_metadata.num_splits = num_splits.clone()",
                ),
            ),
        ),
        *hand(
            name,
            FP8_18,
            paths,
            SHAPE,
            FLASHMLA,
            pointed_at_together=swap(
                (
                    r"scheduler_metadata\.tile_scheduler_metadata = tile_scheduler_metadata\n"
                    r"( +)scheduler_metadata\.num_splits = num_splits"
                ),
                (
                    r"(scheduler_metadata.tile_scheduler_metadata, scheduler_metadata.num_splits) = "
                    r"tile_scheduler_metadata, num_splits"
                ),
            ),
            pointed_at_by_setattr=swap(
                POINTED_AT, "setattr(scheduler_metadata, 'tile_scheduler_metadata', tile_scheduler_metadata)"
            ),
            splits_on_the_metadata_itself=after(
                r"scheduler_metadata\.num_splits = num_splits", "self.latest = scheduler_metadata"
            ),
            splits_pointed_at_first=swap(
                (
                    r"(scheduler_metadata\.tile_scheduler_metadata = tile_scheduler_metadata)\n"
                    r"( +)(scheduler_metadata\.num_splits = num_splits)"
                ),
                r"\3\n\2\1",
            ),
            plan_replaced=after(
                r"scheduler_metadata\.num_splits = num_splits",
                "import copy",
                "scheduler_metadata = copy.copy(scheduler_metadata)",
            ),
            plan_under_another_name=swap(
                r"^( +)scheduler_metadata=scheduler_metadata,\n",
                (
                    r"\1scheduler_metadata=type(scheduler_metadata)(**vars(scheduler_metadata)) if False else "
                    r"scheduler_metadata,\n"
                ),
            ),
            metadata_class_through_a_local=swap(
                r"return FlashMLADecodeMetadata\(", "made = FlashMLADecodeMetadata; return made("
            ),
            metadata_attribute_renamed=swap(r"\bscheduler_metadata\b", "plan_metadata"),
            buffers_made_by_new_zeros=swap(
                r"self\.cg_buf_num_splits = torch\.empty\(", "self.cg_buf_num_splits = torch.zeros("
            ),
            buffers_made_lazily=swap(
                r"self\.cg_buf_num_splits = None\n",
                "self.cg_buf_num_splits = None\n        self.made_buffers = False\n",
            ),
            buffers_too_small=swap(
                r"\(vllm_config\.scheduler_config\.max_num_seqs \+ 1\)",
                "(vllm_config.scheduler_config.max_num_seqs - 2)",
            ),
            buffers_of_int64=swap(r"dtype=torch\.int32", "dtype=torch.int64"),
            buffers_for_decodes_only=swap(
                r"if self\.compilation_config\.cudagraph_mode\.has_full_cudagraphs\(\):",
                "if self.compilation_config.cudagraph_mode.decode_mode().name == 'FULL':",
            ),
            buffers_made_for_others=swap(
                r"if self\.compilation_config\.cudagraph_mode\.has_full_cudagraphs\(\):",
                "if not self.is_fp8_kvcache:",
            ),
            the_flag_renamed=swap(r"self\.is_fp8_kvcache", "self.kvcache_is_fp8"),
            the_flag_turned_round=both(
                swap(r"self\.is_fp8_kvcache = (.*)", r"self.is_fp8_kvcache = not \1"),
                swap(r"if self\.is_fp8_kvcache", "if not self.is_fp8_kvcache"),
                swap(r"is_fp8_kvcache=self\.is_fp8_kvcache", "is_fp8_kvcache=not self.is_fp8_kvcache"),
            ),
        ),
    ]
    return tuple(family(name, plans, by_hand, SIZE))
