"""Forks that a hostile reader drew: away from the code that a verdict was about, with the defect, or right and harmed.

Each is one edit that a maintainer would make. None may be an all-clear, known, or patched.
"""

from __future__ import annotations

from collections.abc import Callable

from fork_trees import ForkTree

Edit = Callable[[ForkTree], None]

_BACKENDS = "vllm/v1/attention/backends"
_V2 = "vllm/v1/worker/gpu"
_MODELS = "vllm/model_executor/models"


def _replaced(path: str, old: str, new: str) -> Edit:
    return lambda tree: tree.replace(path, old, new)


def _own_backend_in_the_registry(tree: ForkTree) -> None:
    tree.put(
        f"{_BACKENDS}/mla/own_graphs.py",
        "from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder\n"
        "from vllm.v1.attention.backend import AttentionCGSupport\n"
        "from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend\n\n\n"
        "class OwnBuilder(MLACommonMetadataBuilder):\n"
        "    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE\n\n\n"
        "class OwnBackend(TritonMLABackend):\n"
        "    @staticmethod\n    def get_builder_cls():\n        return OwnBuilder\n",
    )
    tree.replace(f"{_BACKENDS}/registry.py", "mla.triton_mla.TritonMLABackend", "mla.own_graphs.OwnBackend")


def _own_builder_of_an_indexer(tree: ForkTree) -> None:
    tree.put(
        "vllm/models/own/indexer.py",
        "from vllm.v1.attention.backend import AttentionMetadataBuilder\n"
        "from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend\n\n\n"
        "class OwnBuilder(AttentionMetadataBuilder):\n"
        "    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):\n"
        "        return common_attn_metadata.seq_lens.unsqueeze(1) - self.next_n + 1 + self.steps\n\n\n"
        "class OwnBackend(DeepseekV32IndexerBackend):\n"
        "    @staticmethod\n    def get_builder_cls():\n        return OwnBuilder\n",
    )


def _marks_that_stay(tree: ForkTree) -> None:
    path = f"{_V2}/model_states/mamba_hybrid.py"
    tree.replace(
        path,
        'is_prefilling = torch.zeros(num_reqs, dtype=torch.bool, device="cpu")',
        "is_prefilling = self._marks[:num_reqs]",
    )


def _planned_once(tree: ForkTree) -> None:
    tree.replace(
        "vllm/v1/attention/ops/flashmla.py",
        "\ndef get_mla_metadata_dense_fp8(",
        "\n_plans = {}\n_plan = get_mla_metadata\n\n\ndef get_mla_metadata(lengths, *args, **kwargs):\n"
        "    key = lengths.data_ptr(), args\n"
        "    if key not in _plans:\n        _plans[key] = _plan(lengths, *args, **kwargs)\n"
        "    return _plans[key]\n\n\ndef get_mla_metadata_dense_fp8(",
    )


def _copied_for_micro_batches(tree: ForkTree) -> None:
    path = f"{_V2}/attn_utils.py"
    tree.replace(
        path,
        "            for layer_name in attn_group.layer_names:\n                attn_metadata[layer_name] = metadata\n",
        "            if ubatch_idx:\n                metadata = deepcopy(metadata)\n"
        "            for layer_name in attn_group.layer_names:\n                attn_metadata[layer_name] = metadata\n",
    )


def _normalised_on_the_way_into_graphs(tree: ForkTree) -> None:
    path = f"{_MODELS}/qwen2_5_vl.py"
    tree.replace(
        path,
        "            padding_logics={\n",
        '            padding_logics={\n                "pixel_values": copy_through(self.input_norm),\n',
    )


def _graphs_of_its_own(tree: ForkTree) -> None:
    tree.put(
        "vllm/v1/worker/own_graphs.py",
        "import torch\n\n\nclass OwnGraphs:\n    def __init__(self, run, x):\n"
        "        self.run, self.x, self.graph = run, x, torch.cuda.CUDAGraph()\n"
        "        with torch.cuda.graph(self.graph):\n            self.y = run(x)\n",
    )


def _kernel_called_by_a_model(tree: ForkTree) -> None:
    path = f"{_MODELS}/qwen2_5_vl.py"
    tree.replace(
        path,
        "        context_layer = self.attn(\n            query=q,",
        "        context_layer = kernel(q, k, v) if self.direct else self.attn(\n            query=q,",
    )
    tree.put(path, f"from vllm.vllm_flash_attn import flash_attn_varlen_func as kernel\n{tree.text(path)}")


EDITS: dict[str, tuple[str, tuple[str, ...], Edit]] = {
    "a backend of one's own in the registry": ("0.21.0", ("triton-mla-padding",), _own_backend_in_the_registry),
    "a builder of one's own for an indexer": ("0.30.0", ("indexer-padding",), _own_builder_of_an_indexer),
    "marks that stay from step to step on V2": ("0.30.0", ("mamba-padding",), _marks_that_stay),
    "a backend that claims more than it can": (
        "0.30.0",
        ("draft-graph-support",),
        _replaced(
            f"{_BACKENDS}/linear_attn.py",
            "AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE",
            "AttentionCGSupport.UNIFORM_BATCH",
        ),
    ),
    "a schedule for each buffer of lengths": ("0.30.0", ("capture-state",), _planned_once),
    "padded rows of V2 that name no block": (
        "0.30.0",
        ("flashmla-padding",),
        _replaced(
            f"{_V2}/block_table.py",
            "tl.store(dst_row_ptr + offset, 0, mask=offset < max_num_blocks)",
            "tl.store(dst_row_ptr + offset, -1, mask=offset < max_num_blocks)",
        ),
    ),
    "micro-batches of V2 that are not told of a capture": (
        "0.30.0",
        ("ubatch-max-seq-len",),
        _replaced(f"{_V2}/ubatch_utils.py", "                    for_capture=for_capture,\n", ""),
    ),
    "metadata that are copied for micro-batches": (
        "0.30.0",
        ("flashmla-fp8", "dcp-context-lens", "indexer-padding"),
        _copied_for_micro_batches,
    ),
    "images normalised on their way into graphs": (
        "0.29.0",
        ("encoder-input-norm",),
        _normalised_on_the_way_into_graphs,
    ),
    "graphs of its own for an encoder": ("0.18.1", ("encoder-padding", "encoder-adapters"), _graphs_of_its_own),
    "a kernel that a model calls itself": ("0.33.0", ("encoder-padding",), _kernel_called_by_a_model),
    "blocks that are handed out from the end": (
        "0.21.0",
        ("hidden-states-padding", "flashmla-padding"),
        _replaced(
            "vllm/v1/core/kv_cache_utils.py",
            "        self.num_free_blocks = len(blocks)\n",
            "        self.num_free_blocks = len(blocks)\n        blocks = blocks[::-1]\n",
        ),
    ),
}
"""By what it does: the release, the fixes of which the verdict would be wrong, and the edit."""

LICENCE, STATEMENT = "# Copyright of a company\n", "_OWN = True\n"


def with_a_line(tree: ForkTree, line: str) -> None:
    """Put *line* into every file of the package, which changes every size; a comment changes no code."""
    for path in tree.source().sizes:
        tree.changed[path] = (tree.text(path) or "") + line
