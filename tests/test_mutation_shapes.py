"""A statement more, less or elsewhere than in any release that was looked at.

Such a vLLM is not touched, and not called fixed.
"""

from __future__ import annotations

import pytest

from edited import Change, before, both, cut, stock_source, swap
from stock import release_root
from vllm_files import CUDAGRAPHS, EAGLE, EAGLE_CUDAGRAPHS, EAGLE_FIRST, FLASHMLA, MAMBA, PREFILL, RUNNER
from vllm_graphfix import manifest
from vllm_graphfix.fix import Diagnosis, Verdict
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.source.files import Source

TARGET_DEPENDENT = "vllm/v1/worker/gpu/spec_decode/target_dependent_ar/cudagraph_utils.py"


def twice(pattern: str) -> Change:
    return swap(rf"^( *)({pattern}.*\n)", r"\1\2\1\2")


def in_function(name: str, *statements: str) -> Change:
    """*statements* are the first of the function."""
    body = "".join(rf"        {statement}\n" for statement in statements)
    return swap(rf"(^ *def {name}\((?:.*\n)+? *\).*:\n)", rf"\1{body}")


GRAPH, RECORDED, WARM_UP = (
    r"graph = torch\.cuda\.CUDAGraph",
    r"^ {28}forward_fn\(CUDAGraphMode\.NONE\)\n",
    r"^ {20}forward_fn\(CUDAGraphMode\.NONE\)\n",
)
PIECEWISE = swap(r"forward_fn\(CUDAGraphMode\.PIECEWISE\)", "pass")
TWO_RECORDED = swap(
    RECORDED, " " * 28 + "forward_fn(CUDAGraphMode.NONE)\n" + " " * 28 + "forward_fn(CUDAGraphMode.NONE)\n"
)

BY_FACTORY: dict[str, Change] = {
    "another graph": before(GRAPH, "torch.cuda.graph(self.pool)"),
    "no graph": swap(r"with torch\.cuda\.graph\(", "with self.graph("),
    "two recorded passes": both(PIECEWISE, TWO_RECORDED),
    "no recorded pass": swap(RECORDED, " " * 28 + "self.run(forward_fn)\n"),
    "the warm-up is recorded too": both(cut(WARM_UP), TWO_RECORDED),
    "two states in two ways": swap(
        r"^( {20})(forward_fn.* = create_forward_fn\(desc\))\n", r"\1if self.pool:\n\1    \2\n\1else:\n\1    \2\n"
    ),
    "another class": swap("class CudaGraphManager", "class Manager"),
    "the state is made elsewhere": swap(r"forward_fn.* = create_forward_fn\(desc\)", "forward_fn = self.made[desc]"),
}
SECOND = r"^ {24}forward_fn, attn_state = create_forward_fn\(desc\)\n"
WITH_TWO_STATES: dict[str, Change] = {
    "both before the warm-up": both(cut(SECOND), twice(r"forward_fn, attn_state = create_forward_fn")),
    "the second in the graph": both(
        cut(SECOND), swap(r"^( {28})(?=forward_fn\()", r"\1forward_fn, attn_state = create_forward_fn(desc)\n\1")
    ),
    "three": swap(f"({SECOND})", r"\1\1"),
    "the first after the warm-up": both(
        cut(r"^ {20}forward_fn, attn_state = create_forward_fn\(desc\)\n"),
        swap(f"({WARM_UP})", rf"\1{' ' * 20}forward_fn, attn_state = create_forward_fn(desc)\n"),
    ),
}
BUILT, ENTERED, RAN, RECORDS = (
    "prepare_inputs_to_capture(1)",
    "set_forward_context(1)",
    "model(1)",
    "torch.cuda.graph(1)",
)
BY_CAPTURE_GRAPH: dict[str, Change] = {
    "another state": in_function("capture_graph", BUILT),
    "another graph": in_function("capture_graph", RECORDS),
    "another state and graph": in_function("capture_graph", BUILT, RECORDS),
    "no state and no graph": both(
        swap(r"= prepare_inputs_to_capture\(", "= self.prepare("), swap(r"torch\.cuda\.graph\(", "self.graph(")
    ),
    "another context": in_function("capture_graph", ENTERED),
    "another pass": in_function("capture_graph", RAN),
    "another context and pass": in_function("capture_graph", ENTERED, RAN),
    "one pass by another name": swap(r"model\(", "self.model("),
    "a loop": in_function("capture_graph", "for _ in self.graphs: pass"),
}
OF_THE_DRAFT: dict[str, Change] = {
    "no state": swap(r"= prepare_inputs_to_capture\(", "= self.prepare("),
    "passes by another name": swap(r"^( *)generate_fn\(", r"\1self.generate("),
}
BLOCK, MASK = r"^ +block = i \+ tl\.arange.*\n", r"^ +mask = block < max_num_reqs\n"
STORE = r"^ +tl\.store\(last_token_indices_ptr \+ block, 0, mask=mask\)\n"
PLANNED = r"tile_scheduler_metadata, num_splits = get_mla_metadata_dense_fp8\("
POINTED = r"scheduler_metadata\.tile_scheduler_metadata = tile_scheduler_metadata"
COPIED = r"self\.cg_buf_tile_scheduler_metadata\[:n\]\.copy_"
SPLITS = r"self\.cg_buf_num_splits\[:n\]\.copy_"
WITHOUT_BUFFERS: dict[str, Change] = {
    "pointed at twice": twice(POINTED),
    "no buffer of tiles": swap(r"self\.cg_buf_tile_scheduler_metadata = torch\.zeros", "self.tiles = torch.zeros"),
    "no buffer of splits": swap(r"self\.cg_buf_num_splits = torch\.empty", "self.splits = torch.empty"),
    "a use of the tiles": before(PLANNED, "self.cg_buf_tile_scheduler_metadata"),
    "a use of the splits": before(PLANNED, "self.cg_buf_num_splits"),
    "another function": swap(r"def _build_decode\(", "def _build_decodes("),
    "no branch for fp8": swap(r"self\.is_fp8_kvcache\b(?! =)", "self.fp8"),
    "fp8 the other way round": swap(r"if self\.is_fp8_kvcache\b", "if not self.is_fp8_kvcache"),
}
WITH_BUFFERS: dict[str, Change] = {
    "kept twice": twice(COPIED),
    "both kept twice": both(twice(COPIED), twice(SPLITS)),
    "splits not kept": cut(rf"^ *{SPLITS}.*\n"),
    "nothing kept": both(cut(rf"^ *{SPLITS}.*\n"), cut(rf"^ *{COPIED}.*\n")),
    "kept after it was pointed at": both(
        cut(rf"^ *{COPIED}.*\n"),
        swap(rf"^( *)({POINTED}\n)", r"\1\2\1self.cg_buf_tile_scheduler_metadata[:n].copy_(tile_scheduler_metadata)\n"),
    ),
    "kept before it is planned": both(
        cut(rf"^ *{COPIED}.*\n"),
        before(PLANNED, "self.cg_buf_tile_scheduler_metadata[:n].copy_(tile_scheduler_metadata)"),
    ),
}
# of flashmla-padding
PADDED = r"blk_table_tensor\[num_reqs:num_reqs_padded\]\.fill_"
MARKED, CLEARED = r"is_prefilling = num_computed", r"is_prefilling\[num_reqs:\] = False"
OF_THE_TABLE: dict[str, Change] = {
    "padded twice": twice(PADDED),
    "not padded": cut(rf"^ *{PADDED}.*\n"),
    "padded under a condition": swap(rf"^( *)({PADDED}.*\n)", r"\1if num_reqs:\n\1    \2"),
    "returned twice": twice(r"return blk_table_tensor"),
    "returned under another name": swap(r"return blk_table_tensor", "return tables(blk_table_tensor)"),
    "used once more": before(PADDED, "blk_table_tensor"),
    "used once less": swap(r"blk_table_tensor = blk_table\.get_device", "blk_table_tensors = blk_table.get_device"),
}
OF_THE_MARKS: dict[str, Change] = {
    "marked twice": twice(MARKED),
    "marked twice, once otherwise": before(MARKED, "is_prefilling = None"),
    "not marked": cut(rf"^ *{MARKED}.*\n"),
    "marks that are not given": cut(r"^ *is_prefilling=is_prefilling,\n"),
    "marks that are not these": swap(r"is_prefilling=is_prefilling,", "is_prefilling=marks,"),
    "marks by another name": swap(r"is_prefilling=is_prefilling,", "prefilling=is_prefilling,"),
    "marks used once more": before(r"cm_base = CommonAttentionMetadata\(", "is_prefilling"),
}

CASES: dict[tuple[str, str, str], dict[str, Change]] = {
    ("capture-state", "0.18.1", CUDAGRAPHS): BY_FACTORY,
    ("capture-state", "0.21.0", CUDAGRAPHS): BY_FACTORY,
    ("capture-state", "0.22.1", CUDAGRAPHS): WITH_TWO_STATES,
    ("capture-state", "0.16.0", CUDAGRAPHS): BY_CAPTURE_GRAPH,
    ("capture-state", "0.16.0", EAGLE_FIRST): OF_THE_DRAFT
    | {"another class": swap("class EagleCudaGraphManager", "class Manager")},
    ("capture-state", "0.17.1", CUDAGRAPHS): {
        "a pass elsewhere": in_function("capture_graph", RAN),
        "a graph in both": in_function("_capture_full_graph", RECORDS),
        "a loop": in_function("capture_graph", "for _ in self.graphs: pass"),
    },
    ("capture-state", "0.17.1", EAGLE_CUDAGRAPHS): {**OF_THE_DRAFT},
    ("draft-prefill-state", "0.21.0", EAGLE_CUDAGRAPHS): {
        "a state taken twice": twice(r"attn_state = full_cg_attn_states\[desc\]"),
        "another parameter": swap(r"\bfull_cg_attn_states:", "states:"),
        "captured by itself": swap(r"super\(\)\.capture\(", "self.captured("),
        "no manager": swap(r"class (\w+)CudaGraphManager", r"class \1GraphManager"),
    },
    ("draft-prefill-state", "0.21.0", CUDAGRAPHS): {
        "no manager of the target's": swap("class ModelCudaGraphManager", "class ModelGraphManager"),
        "no manager": swap(r"\bCudaGraphManager\b", "GraphManager"),
        "another first parameter": swap(r"(^    def capture\(\n *self,\n)(?= *create_forward_fn)", r"\1        a,\n"),
        "states that are made elsewhere": swap("return captured_attn_states", "return self.states"),
        "states that are changed": swap(r"return super\(\)\.capture\(", "return self.changed("),
        "nothing is returned at times": before(r"return captured_attn_states", "if self.pool: return None"),
    },
    ("draft-prefill-state", "0.22.0", CUDAGRAPHS): {
        "one state for both passes": swap(r"create_forward_fn\(desc\)", "self.made(desc)")
    },
    ("draft-prefill-state", "0.33.0", TARGET_DEPENDENT): {
        "states that are given": swap(r"(^ *def capture\(\n *self,\n)", r"\1        attn_states,\n"),
        "states that are made elsewhere": swap(r"prepare_inputs_to_capture\(", "self.prepare("),
    },
    ("draft-prefill-state", "0.23.0", PREFILL): {
        "no choice": swap(
            r"attn_state_pair\.warmup if warmup else attn_state_pair\.captured", "attn_state_pair.captured"
        ),
        "chosen twice": twice(r"attn_state = attn_state_pair\.warmup if"),
        "the pair used once more": before(r"attn_state = attn_state_pair\.warmup if", "attn_state_pair"),
    },
    ("draft-prefill-state", "0.23.0", CUDAGRAPHS): {
        "no pair of two states": swap(
            r"AttentionStatePair\(\s*warmup_attn_state, capture_attn_state",
            "AttentionStatePair(warmup_attn_state, warmup_attn_state",
        ),
        "no manager": swap(r"\bCudaGraphManager\b", "GraphManager"),
    },
    ("draft-decode-mode", "0.16.0", CUDAGRAPHS): {
        "no mode": swap(r"if not cudagraph_mode\.has_full", "if cudagraph_mode.has_no")
    },
    ("draft-decode-mode", "0.17.1", EAGLE_CUDAGRAPHS): {
        "the mode taken twice": twice(
            r"self\.cudagraph_mode = self\.compilation_config\.cudagraph_mode\.decode_mode\(\)"
        ),
        "another class": swap("class EagleCudaGraphManager", "class Manager"),
        "the mode taken otherwise": swap(r"cudagraph_mode\.decode_mode\(\)", "cudagraph_mode.mixed_mode()"),
        "the mode of a copy": swap(r"(?<!self\.)cudagraph_mode = self\.cudagraph_mode\b", "cudagraph_mode = self.mode"),
        "the size from elsewhere": swap(r"self\.get_cudagraph_size\(num_tokens\)", "self.size(num_tokens)"),
        "the sizes of a copy": swap(r"self\.cudagraph_sizes\.get\(num_tokens\)", "self.sizes.get(num_tokens)"),
        "captured in every mode": swap(
            r"if self\.cudagraph_mode == CUDAGraphMode\.NONE", "if self.cudagraph_mode is None"
        ),
        "no method for the mode": swap("def get_cudagraph_runtime_mode", "def runtime_mode"),
        "no method for the size": swap("def get_cudagraph_size", "def size"),
        "no method that captures": swap(r"def capture\(", "def captures("),
    },
    ("draft-decode-mode", "0.17.1", EAGLE): {
        "drafts with another parameter": swap(r"(def generate_draft\(\n *self,\n)", r"\1        more,\n"),
        "drafts with another parameter, last in the alphabet": swap(
            r"(def generate_draft\(\n *self,\n)", r"\1        zeros,\n"
        ),
    },
    ("draft-decode-mode", "0.20.0", EAGLE): {
        "indices written elsewhere": swap(
            r"tl\.store\(last_token_indices_ptr \+ req_idx, .*\)", "write(last_token_index)"
        ),
        "no pool that is shared, and no mode": both(
            cut(r"^ *self\.decode_cudagraph_manager\.pool = .*\n"),
            swap(r"cudagraph_mode = CUDAGraphMode\.FULL_DECODE_ONLY", "pass"),
        ),
        "no mode, and drafts with another parameter": both(
            swap(r"cudagraph_mode = CUDAGraphMode\.FULL_DECODE_ONLY", "pass"),
            swap(r"(def generate_draft\(\n *self,\n)", r"\1        more,\n"),
        ),
        "no zeros, and no function that prepares": both(
            swap(r"tl\.store\(last_token_indices_ptr \+ block, 0, mask=mask\)", "pass"),
            swap(r"def prepare_eagle_inputs\(", "def prepare_inputs("),
        ),
    },
    ("draft-decode-mode", "0.21.0", EAGLE): {
        "two blocks": swap(rf"({BLOCK})({MASK})({STORE})", r"\1\1\2\3"),
        "two masks": swap(rf"({BLOCK})({MASK})({STORE})", r"\1\2\2\3"),
        "no block": swap(rf"({BLOCK})({MASK})({STORE})", r"\2\3"),
        "stored twice": swap(rf"({STORE})", r"\1\1"),
        "not for all beyond the batch": swap(
            rf"range\(num_reqs, (max_num_reqs, BLOCK_SIZE\):\n{BLOCK}{MASK}{STORE})", r"range(num_reqs + 1, \1"
        ),
        "the mode set once more": before(r"self\.decode_cudagraph_manager = ", "cudagraph_mode = self.mode"),
        "the mode set once less": swap(r"cudagraph_mode = CUDAGraphMode\.NONE", "pass"),
        "the manager made elsewhere": swap(r"self\.decode_cudagraph_manager = ", "self.manager = "),
        "the manager made under a condition": swap(
            r"self\.decode_cudagraph_manager = (?=Decode)", "if self.device: self.decode_cudagraph_manager = "
        ),
    },
    ("mamba-padding", "0.23.0", RUNNER): {
        **OF_THE_MARKS,
        "cleared twice": twice(CLEARED),
        "cleared behind something else": before(CLEARED, "pass"),
        "cleared before they are marked": both(
            cut(rf"^ *{CLEARED}\n"), before(MARKED, "is_prefilling[num_reqs:] = False")
        ),
        "marked and cleared twice": both(twice(CLEARED), twice(MARKED)),
        "marked in a condition": swap(rf"^( *)({MARKED}.*\n)", r"\1if self.chunked:\n\1    \2"),
    },
    ("mamba-padding", "0.21.0", RUNNER): {
        **OF_THE_MARKS,
        "another function": swap("def _build_attention_metadata", "def _build"),
        "cleared for some": before(r"cm_base = CommonAttentionMetadata\(", "is_prefilling[num_reqs + 1:] = False"),
    },
    ("mamba-padding", "0.21.0", MAMBA): {
        "split twice": before(r"num_decodes, num_prefills", "split_decodes_and_prefills(common_attn_metadata)"),
        "another parameter": swap(
            r"(def _compute_common_metadata\(\n *self,\n *)common_attn_metadata:", r"\1metadata:"
        ),
        "a parameter of another name": swap(
            r"(def _compute_common_metadata\(\n *self,\n *)common_attn_metadata:", r"\1attn_metadata:"
        ),
        "another function": swap(r"def _compute_common_metadata\(", "def _compute_metadata("),
        "not split": swap(r"split_decodes_and_prefills\(\n", "self.split(\n"),
        "not split by phase, which is named elsewhere": both(
            cut(r"^ *treat_short_extends_as_decodes=False,\n"),
            swap(r"^import torch\n", "import torch\n\ntreat_short_extends_as_decodes = 1\n"),
        ),
        "split twice by phase": before(
            r"num_decodes, num_prefills",
            (
                "split_decodes_and_prefills(common_attn_metadata, decode_threshold=1, "
                "treat_short_extends_as_decodes=False)"
            ),
        ),
        "split twice in the way that is not by phase": both(
            cut(r"^ *treat_short_extends_as_decodes=False,\n"),
            before(
                r"num_decodes, num_prefills", "split_decodes_and_prefills(common_attn_metadata, decode_threshold=1)"
            ),
        ),
        "split twice, not by phase": both(
            cut(r"^ *treat_short_extends_as_decodes=False,\n"),
            before(r"num_decodes, num_prefills", "split_decodes_and_prefills(1)"),
        ),
    },
    ("flashmla-fp8", "0.18.1", FLASHMLA): WITHOUT_BUFFERS,
    ("flashmla-fp8", "0.19.0", FLASHMLA): WITH_BUFFERS,
    ("flashmla-padding", "0.20.0", RUNNER): {
        **OF_THE_TABLE,
        "the null block twice": before(PADDED, "NULL_BLOCK_ID"),
        "another null block": swap(r"^class GPUModelRunner\b", "NULL_BLOCK_ID = 1\n\n\nclass GPUModelRunner"),
        "padded with another": swap(rf"({PADDED})\(NULL_BLOCK_ID\)", r"\1(0)"),
    },
    ("flashmla-padding", "0.18.1", RUNNER): {
        **OF_THE_TABLE,
        "padded with another": swap(rf"({PADDED})\(-1\)", r"\1(-2)"),
        "another function": swap("def _build_attention_metadata", "def _build"),
    },
    ("flashmla-padding", "0.18.1", FLASHMLA): {
        "another parameter": swap(r"(def _build_decode\(\n *self,\n)", r"\1        more,\n"),
        "another parameter, first in the alphabet": swap(r"(def _build_decode\(\n *self,\n)", r"\1        a,\n"),
        "fp8 told twice": twice(r"self\.is_fp8_kvcache = "),
        "fp8 told by another name": swap(r"self\.is_fp8_kvcache = ", "self.is_fp8 = "),
        "fp8 told the other way": swap(r"self\.is_fp8_kvcache = ", "self.is_fp8_kvcache = not "),
        "no __init__": swap(r"def __init__\(", "def init("),
        "another function": swap(r"def _build_decode\(", "def _build_decodes("),
    },
}


def judged(name: str, release: str, path: str, change: Change) -> Diagnosis:
    stock = stock_source(release_root(release))
    code = stock.read(path)
    assert code is not None
    text = change(code.decode()).encode()
    edited = Source("edited", lambda p: text if p == path else stock.read(p), lambda: None)
    return manifest.diagnose(BY_NAME[name], edited)


@pytest.mark.parametrize(
    ("name", "release", "path", "change"),
    [
        pytest.param(*where, change, id=f"{where[0]}-{where[1]}-{what}")
        for where, changes in CASES.items()
        for what, change in changes.items()
    ],
)
def test_a_statement_more_or_less_is_a_shape_that_nobody_has_looked_at(
    name: str, release: str, path: str, change: Change
) -> None:
    diagnosis = judged(name, release, path, change)
    assert diagnosis.verdict is Verdict.UNRECOGNISED
    assert diagnosis.where is not None
    assert diagnosis.where.partition(":")[0] in BY_NAME[name].inspected_files


HARMLESS: dict[tuple[str, str, str], dict[str, Change]] = {
    ("capture-state", "0.21.0", CUDAGRAPHS): {
        "another pass": twice(r"forward_fn\(CUDAGraphMode\.PIECEWISE\)"),
        "no pass of PIECEWISE": PIECEWISE,
    },
    ("capture-state", "0.17.1", EAGLE_CUDAGRAPHS): {
        "a loop": in_function("capture_graph", "for _ in self.graphs: pass"),
        "a loop in the other part": in_function("_capture_full_graph", "for _ in self.graphs: pass"),
    },
    ("flashmla-fp8", "0.18.1", FLASHMLA): {"another plan": before(PLANNED, "get_mla_metadata_dense_fp8(1, 1, 1)")},
    ("mamba-padding", "0.21.0", RUNNER): {"marks of two batches": before(MARKED, "CommonAttentionMetadata(1)")},
}
"""Statements that leave the defect as it is, and harm nothing."""

ELSE = [
    ("mamba-padding", "0.23.0", RUNNER, before(MARKED, "CommonAttentionMetadata(1)"), Verdict.FIXED),
    ("mamba-padding", "0.21.0", MAMBA, cut(r"^ *treat_short_extends_as_decodes=False,\n"), Verdict.FIXED),
    *(
        (name, release, path, change, Verdict.AFFECTED)
        for (name, release, path), changes in HARMLESS.items()
        for change in changes.values()
    ),
]
NO_MODE = cut(r"^ {8}if cudagraph_mode\.decode_mode\(\) == CUDAGraphMode\.FULL:\n(?: {12}.*\n| {8}else:\n)+")
NO_ZEROS = cut(STORE)


@pytest.mark.parametrize(
    ("change", "shape", "reason", "place"),
    [
        (
            NO_MODE,
            "two-managers-mode",
            "draft decodes get the configured mode, PIECEWISE included",
            "def init_cudagraph_manager",
        ),
        (
            NO_ZEROS,
            "two-managers-indices",
            "last_token_indices keep old values beyond the batch",
            "def _prepare_eagle_inputs_kernel",
        ),
        (
            both(NO_MODE, NO_ZEROS),
            "two-managers-mode-indices",
            (
                "draft decodes get the configured mode, PIECEWISE included; last_token_indices keep old "
                "values beyond the batch"
            ),
            "def init_cudagraph_manager",
        ),
    ],
    ids=["draft-decode-mode-mode", "draft-decode-mode-indices", "draft-decode-mode-both"],
)
def test_the_reason_names_the_missing_part_of_draft_decode_mode_with_its_place(
    change: Change, shape: str, reason: str, place: str
) -> None:
    diagnosis = judged("draft-decode-mode", "0.20.0", EAGLE, change)
    assert (diagnosis.verdict, diagnosis.shape, diagnosis.reason) == (Verdict.AFFECTED, shape, reason)
    assert diagnosis.where is not None
    line = int(diagnosis.where.rpartition(":")[2])
    assert place in change((release_root("0.20.0") / EAGLE).read_text()).splitlines()[line - 1]


@pytest.mark.parametrize(("name", "path", "function"), [
    ("flashmla-padding", RUNNER, "_build_attention_metadata"),
    ("flashmla-padding", FLASHMLA, "_build_decode"),
    ("mamba-padding", RUNNER, "_build_attention_metadata"),
])  # fmt: skip
def test_the_place_of_a_function_that_is_missing_is_the_file_where_it_should_be(
    name: str, path: str, function: str
) -> None:
    diagnosis = judged(name, "0.19.1", path, swap(rf"def {function}\(", "def another("))
    assert (diagnosis.verdict, diagnosis.where) == (Verdict.UNRECOGNISED, f"{path}:1")


@pytest.mark.parametrize("name", BY_NAME)
def test_where_none_of_its_files_is_there_nothing_is_proven(name: str) -> None:
    diagnosis = manifest.diagnose(BY_NAME[name], Source("nothing", lambda _: None, lambda: None))
    assert (diagnosis.verdict, diagnosis.defect_seen, diagnosis.known) == (Verdict.UNRECOGNISED, False, False)


@pytest.mark.parametrize(
    ("name", "release", "path", "change", "verdict"), ELSE, ids=[f"{row[0]}-{row[1]}-{row[4].value}" for row in ELSE]
)
def test_what_is_not_there_or_does_no_harm_is_no_unknown_shape(
    name: str, release: str, path: str, change: Change, verdict: Verdict
) -> None:
    assert judged(name, release, path, change).verdict is verdict
