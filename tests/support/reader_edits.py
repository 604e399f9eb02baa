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


def _marks_of_its_own(tree: ForkTree) -> None:
    path, place = (
        "vllm/v1/worker/gpu_model_runner.py",
        "        if self.dcp_world_size > 1:\n            self.dcp_local_seq_lens.cpu",
    )
    tree.replace(path, place, f"        self._note_resumed(cm_base)\n\n{place}")
    tree.replace(
        path,
        "    def _build_attention_metadata(\n",
        "    def _note_resumed(self, metadata):\n"
        "        rows = slice(metadata.num_reqs)\n"
        "        resumed = torch.from_numpy(self.input_batch.num_tokens_no_spec[rows] - 1)\n"
        "        metadata.is_prefilling = self.input_batch.num_computed_tokens_cpu_tensor[rows] < resumed\n\n"
        "    def _build_attention_metadata(\n",
    )


def _written_without_the_operator(tree: ForkTree) -> None:
    path = f"{_MODELS}/extract_hidden_states.py"
    tree.replace(
        path,
        "        _ = self.cache_only_layers[str(self.target_num_hidden_layers)](hidden_states)\n",
        "        self._store(hidden_states)\n",
    )
    tree.replace(
        path,
        '    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:\n        """No weights',
        "    def _store(self, hidden_states):\n"
        "        layer = next(iter(self.cache_only_layers.values()))\n"
        "        slots = get_forward_context().slot_mapping.get(layer.layer_name)\n"
        "        layer.kv_cache.flatten(0, 1)[slots] = hidden_states\n\n"
        '    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:\n        """No weights',
    )


def _a_group_less(tree: ForkTree) -> None:
    path = f"{_BACKENDS}/mla/indexer.py"
    divided = "                    seq_lens //= self.compress_ratio\n"
    tree.replace(path, divided, f"{divided}                    seq_lens -= 1\n")


def _a_platform_that_is_less(tree: ForkTree) -> None:
    path = "vllm/platforms/interface.py"
    is_it = "        return self._enum == PlatformEnum.CUDA\n"
    tree.replace(path, is_it, f"{is_it.rstrip()} and not self.is_compatible_only\n")


def _compiled(path: str, imported_by: str = "") -> Edit:
    def edit(tree: ForkTree) -> None:
        tree.changed[path] = "\x7fELF"
        if imported_by:
            tree.put(imported_by, f"from . import fast_paths\n{tree.text(imported_by)}")

    return edit


_IF_LOCKED = 'if os.environ.get("VLLM_LOCK_WORKSPACE") != "1":'
_COMPLETES = 'get_forward_context().additional_kwargs.get("completes_group", True)'
_SLOTS = (
    "        token_to_req_indices = state_metadata.token_to_req_indices\n"
    "        slot_mapping = state_metadata.slot_mapping\n"
)
_FREE = "            end_free_gpu_memory = torch.accelerator.get_memory_info()[0]\n\n"

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
    "marks of prefills written again in another function": ("0.22.0", ("mamba-padding",), _marks_of_its_own),
    "hidden states written without the operator": ("0.25.0", ("hidden-states-padding",), _written_without_the_operator),
    "another workspace manager after sleep": (
        "0.33.0",
        ("workspace-growth",),
        _replaced(
            "vllm/v1/worker/gpu_worker.py",
            "        self.synchronize_device()\n\n    def discard(self",
            "        init_workspace_manager(self.device)\n        self.synchronize_device()\n\n    def discard(self",
        ),
    ),
    "a lock that an environment variable allows": (
        "0.33.0",
        ("workspace-growth",),
        _replaced(
            "vllm/v1/worker/workspace.py",
            "        self._locked = True\n",
            f"        {_IF_LOCKED}\n            return\n        self._locked = True\n",
        ),
    ),
    "the same in the function that calls it": (
        "0.33.0",
        ("workspace-growth",),
        _replaced(
            "vllm/v1/worker/workspace.py",
            "    current_workspace_manager().lock()\n",
            f"    {_IF_LOCKED}\n        return\n    current_workspace_manager().lock()\n",
        ),
    ),
    "a capture that may return before the lock": (
        "0.33.0",
        ("workspace-growth",),
        _replaced(
            f"{_V2}/model_runner.py",
            f"{_FREE}        if not profile_only:\n            # Lock",
            f"{_FREE}        if self.vllm_config.parallel_config.enable_eplb:\n            return 0\n\n"
            "        if not profile_only:\n            # Lock",
        ),
    ),
    "entries that a mark in the forward context leaves out": (
        "0.33.0",
        ("compressor-skip",),
        _replaced(
            "vllm/models/deepseek_v4/compressor.py",
            f"{_SLOTS}        num_actual",
            f"        if not {_COMPLETES}:\n            return\n{_SLOTS}        num_actual",
        ),
    ),
    "lengths that lack a group": ("0.28.0", ("indexer-padding",), _a_group_less),
    "a platform that is CUDA in name alone": (
        "0.33.0",
        ("compressor-skip", "encoder-padding"),
        _a_platform_that_is_less,
    ),
    "a module compiled beside its source": (
        "0.33.0",
        ("workspace-growth",),
        _compiled("vllm/v1/worker/workspace.cpython-312-x86_64-linux-gnu.so"),
    ),
    "a compiled module that a package imports": (
        "0.33.0",
        ("compressor-skip",),
        _compiled("vllm/models/deepseek_v4/fast_paths.abi3.so", "vllm/models/deepseek_v4/__init__.py"),
    ),
}
"""By what it does: the release, the fixes of which the verdict would be wrong, and the edit."""

LICENCE, STATEMENT = "# Copyright of a company\n", "_OWN = True\n"


def with_a_line(tree: ForkTree, line: str) -> None:
    """Put *line* into every file of the package, which changes every size; a comment changes no code."""
    for path in tree.source().sizes:
        tree.changed[path] = (tree.text(path) or "") + line
