"""Stand-ins for the functions of vLLM that layers wrap, and arguments for them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from activities import Layer
from stock import ALL_RELEASES, release_root
from trial_rows import edits_of
from vllm_graphfix import manifest
from vllm_graphfix.fix import Fix, Patch, Verdict
from vllm_graphfix.source.files import open_source


def shapes(fix: Fix) -> tuple[str, ...]:
    """The shapes of stock's releases, and those that an edit of the trial names."""
    affected = (entry for entry in manifest.load()["fixes"][fix.name] if entry["verdict"] == "affected")
    named = (edit.shape for edit in edits_of(fix.name) if edit.verdict is Verdict.AFFECTED and edit.shape)
    return tuple(dict.fromkeys([*(entry["shape"] for entry in affected), *named]))


class Stop(Exception):  # noqa: N818 - no error: what a stock function raises here
    pass


def _returned_or_raised(arguments: dict[str, Any]) -> dict[str, Any]:
    for value in arguments.values():
        if isinstance(value, Stop):
            raise value
    return arguments


PARAMETERS = {
    "decode_attention_fwd": "q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len",
    "CudaGraphManager.capture": "self, create_forward_fn, progress_bar_desc",
    "CudaGraphManager.capture_graph": "self, num_tokens, capture_cg_mode, model",
    "EagleCudaGraphManager.capture_graph": "self, num_tokens, generate_fn, input_buffers",
    "prepare_inputs_to_capture": "num_reqs, num_tokens, input_buffers",
    "PrefillEagleCudaGraphManager.capture": "self, forward_fn, full_cg_attn_states, progress_bar_desc",
    "EagleSpeculator.generate_draft": (
        "self, num_reqs, num_tokens_padded, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode"
    ),
    "EagleSpeculator.init_cudagraph_manager": "self, cudagraph_mode",
    "prepare_eagle_inputs": "input_buffers, input_batch, last_token_indices, num_sampled",
    "BaseMambaAttentionMetadataBuilder._compute_common_metadata": "self, common_attn_metadata, num_accepted_tokens",
    "FlashMLAMetadataBuilder._build_decode": (
        "self, block_table_tensor, seq_lens_device, max_seq_len, query_start_loc_cpu, query_start_loc_device, "
        "num_decode_tokens, dcp_tot_seq_lens_device"
    ),
    "GPUModelRunner._determine_batch_execution_and_padding": (
        "self, num_tokens, num_reqs, num_scheduled_tokens_np, max_num_scheduled_tokens, use_cascade_attn"
    ),
    "GPUModelRunner._dummy_run": "self, num_tokens",
    "GPUModelRunner.update_requests": "self, scheduler_output",
    "dispatch_cg_and_sync_dp": "cudagraph_manager, num_reqs, num_tokens, uniform_token_count, dp_size, dp_rank",
    "DeepseekV32IndexerMetadataBuilder._prepare_decode_tensors": (
        "self, seq_lens, block_table, decode_lens, decode_lens_cpu, query_start_loc, num_decodes, "
        "num_decode_tokens, use_native, next_n, max_decode_len"
    ),
    "MLACommonMetadataBuilder.build": "self, common_prefix_len, common_attn_metadata, fast_build",
    "WorkspaceManager._ensure_workspace_size": "self, required_bytes",
    "GPUModelRunner.capture_model": "self",
    "GPUModelRunner.profile_cudagraph_memory": "self",
    "Worker.execute_dummy_batch": "self",
    "GPUModelRunner.sample_tokens": "self, grammar_output",
    "EagleCudaGraphManager.__init__": "self, vllm_config, device",
    "set_forward_context": "attn_metadata, vllm_config, num_tokens",
    "PunicaWrapperGPU.update_metadata": "self, mapping, lora_index_to_id, max_loras, vocab_size",
}
"""By function. Of others, as the latest release has them."""


def stock_of(patch: Patch | Layer) -> Callable[..., Any]:
    """A stand-in for the function that *patch* wraps.

    It returns what it was given, by the names of stock's parameters.
    """
    parameters = PARAMETERS.get(patch.name) or _in_the_latest_release(patch.module, patch.name)
    made: dict[str, Callable[..., Any]] = {}
    exec(f"def stand_in({parameters}): return told(locals())", {"told": _returned_or_raised}, made)  # noqa: S102 - a signature of stock's
    return made["stand_in"]


@functools.cache
def _in_the_latest_release(module: str, name: str) -> str:
    path = module.replace(".", "/") + ".py"
    for release in reversed(ALL_RELEASES):
        source = open_source(release_root(release))
        origin = re.search(
            rf"^from (vllm[\w.]*) import [^#]*?\b{name}\b", (source.read(path) or b"").decode(), re.MULTILINE
        )
        for each in filter(None, (path, origin and origin[1].replace(".", "/") + ".py")):
            function = source.function(each, name)
            if function is not None:
                return function.signature.replace("*, ", "")
    raise LookupError(f"no release has {name} in {module}")


class Hostile:
    """Whatever it is asked for, it raises."""

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __bool__(self) -> bool:
        raise RuntimeError("bool")

    def __len__(self) -> int:
        raise RuntimeError("len")


def arguments_for(patch: Patch | Layer, kind: Callable[[], Any]) -> dict[str, Any]:
    code = stock_of(patch).__code__
    return {name: kind() for name in code.co_varnames[: code.co_argcount]}
