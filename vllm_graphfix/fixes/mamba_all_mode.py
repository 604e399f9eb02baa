"""`mamba-all-mode`: each group of Mamba-2 layers copies its block indices to where its graphs read them (PR 34874)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import correct_result, fix
from vllm_graphfix.fix import Diagnosis, Event, Slice, Verdict
from vllm_graphfix.fixes._premises import BUILDERS_STAY

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_BUILDER = "vllm/v1/attention/backends/mamba_attn.py"
_MAMBA2 = "vllm/v1/attention/backends/mamba2_attn.py"
_MIXER = "vllm/model_executor/layers/mamba/mamba_mixer2.py"
_BASE = "BaseMambaAttentionMetadataBuilder"
_UPDATE = f"{_BASE}.update_block_table"
_FOR_GRAPHS = "_update_metadata_for_cudagraph_capture"
"""The method that copies the indices to where graphs read them, since 0.17.0."""
_INDICES = ("block_idx_last_scheduled_token", "block_idx_last_computed_token")
"""Columns of a request's block table with the states that a decode writes and reads."""
_INDEX_NAMES = " ".join(_INDICES)
_FOR_GRAPHS_RETURNED = f"return self.{_FOR_GRAPHS}(new_metadata)"
"""Upstream's correction."""
_TABLE_COPIED = "persistent_state_indices_t.copy_(state_indices_t, non_blocking=True)"
_TABLE_REPLACED = "new_metadata.state_indices_tensor = state_indices_t"
_COPIES = tuple(
    tuple(f"self.{name}[:num_reqs].copy_({metadata}.{name}{rows}, *...)" for name in _INDICES)
    for metadata in ("metadata", "new_metadata")
    for rows in ("[:num_reqs]", "")
)
_GUARDED_COPIES = tuple(
    f"if {condition}: {'; '.join(copies)}"
    for condition in (
        "self.vllm_config.cache_config.mamba_cache_mode == 'all'",
        "metadata.block_idx_last_scheduled_token is not None",
    )
    for copies in _COPIES
)
"""The same correction before 0.17.0, for batches that have indices."""

INDICES_OF_ANOTHER_GROUP = Event(
    "indices-of-another-group",
    "A decode batch reached a second or later group of Mamba-2 layers with its block indices in the first group's "
    "buffers only: on stock this group's graphs read those of the capture.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find a further group's new block table, and the copies of its block indices to where its graphs read them."""
    if not all(source.contains_word(_BUILDER, name) for name in _INDICES):
        return Diagnosis.absent("Mamba's builder has no block indices: no state is kept for each block")
    update = source.function(_BUILDER, _UPDATE)
    compute = source.function(_BUILDER, f"{_BASE}._compute_common_metadata")
    for_graphs = source.function(_BUILDER, f"{_BASE}.{_FOR_GRAPHS}")
    if update is not None:
        returned = update.find_unique(_FOR_GRAPHS_RETURNED)
        remedy = update.at(returned) if returned and _copies_indices(for_graphs) else _place_of_copies(update)
        if remedy is not None:
            return Diagnosis.fixed("each group copies the block indices where its graphs read them", remedy)
        defect = update.find_unique(_TABLE_REPLACED) or update.find_unique("return new_metadata")
        if defect is not None and (_copies_indices(compute) or _copies_indices(for_graphs)):
            return Diagnosis.affected(
                "for further groups only the block table is updated, and their graphs keep the block indices of the "
                "capture",
                update.at(defect),
                "indices-of-the-first-group",
            )
    return Diagnosis.unrecognised("block tables of further groups are updated in a way", update or _BUILDER)


def _copies_indices(function: Function | None) -> bool:
    """Tell if *function* copies both kinds of indices into the builder's own buffers."""
    return function is not None and bool(function.find_each(*(f"self.{name}[...].copy_(...)" for name in _INDICES)))


def _place_of_copies(update: Function) -> str | None:
    """Find the copies of both kinds of indices beside that of the block table, or before it is returned."""
    table, replaced = update.find_unique(_TABLE_COPIED), update.find_unique(_TABLE_REPLACED)
    for pattern in itertools.chain(_COPIES, zip(_GUARDED_COPIES, strict=True)):
        copies = update.find_each(*pattern)
        if not copies:
            continue
        if (replaced and update.in_one_block(*copies, replaced)) or (table and update.in_one_block(table, *copies)):
            return update.at(copies[0])
    return None


@correct_result("vllm.v1.attention.backends.mamba_attn", _UPDATE, INDICES_OF_ANOTHER_GROUP)
def indices_for_this_group(updated: Any, self: Any, *_: Any, **__: Any) -> Callable[[], Any] | None:
    """Copy the block indices, (num_reqs,) int32 each, to where the graphs of this builder read them.

    None if the graphs do not need them, or have them already. They need them where stock has copied the block table to
    the builder's own buffer: for decodes alone, up to the size of the largest graph. The copy runs on the device, in
    the order of the steps, as stock's. The metadata get the copies, which are what the graph reads.
    """
    scheduled = updated.block_idx_last_scheduled_token
    if scheduled is None or updated.num_prefills:
        return None
    if updated.state_indices_tensor.data_ptr() != self.state_indices_tensor.data_ptr():
        return None
    if scheduled.data_ptr() == self.block_idx_last_scheduled_token.data_ptr():
        return None
    return lambda: _copy_indices(self, updated)


def _copy_indices(builder: Any, updated: Any) -> None:
    from torch import _foreach_copy_  # both or none: an error between two copies would mix up states

    names = ("block_idx_last_scheduled_token", "block_idx_last_computed_token")
    indices = [getattr(updated, name) for name in names]
    own = [getattr(builder, name)[: len(indices[0])] for name in names]
    _foreach_copy_(own, indices)
    vars(updated).update(zip(names, own, strict=True))


_SEVERAL_GROUPS = frozenset(
    "BambaForCausalLM GraniteMoeHybridForCausalLM NemotronHForCausalLM Zamba2ForCausalLM".split()
)
"""Models with many more Mamba-2 than attention layers, and prefix caching with a state for each block."""
_ONE_GROUP = frozenset(
    "FalconH1ForCausalLM FalconMambaForCausalLM JambaForCausalLM KimiLinearForCausalLM Lfm2ForCausalLM "
    "Lfm2MoeForCausalLM Mamba2ForCausalLM MambaForCausalLM MiniMaxText01ForCausalLM "
    "Plamo2ForCausalLM Qwen3NextForCausalLM".split()
)
"""Models with as many layers of each kind, with one kind alone, or with other states."""


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need, unseen

    models = "hybrids such as Nemotron-H, Granite 4, Bamba, Zamba2"
    caching = "from 0.15.0 on not with --mamba-cache-mode align"
    return (
        Need(
            "several groups of Mamba-2 layers",
            _several_groups,
            models,
            clause="the model has several groups of Mamba-2 layers",
        ),
        Need(
            "--enable-prefix-caching",
            _keeps_every_block,
            caching,
            ("--mamba-cache-mode=", "--enable-prefix-caching"),
            clause="prefix caching is on",
        ),
        unseen("model runner V1"),
        needs.FULL_GRAPHS,
    )


def _several_groups(deployment: Deployment, _: str) -> Fact:
    return deployment.with_layers(_SEVERAL_GROUPS, _ONE_GROUP, "several groups of Mamba-2 layers")


def _keeps_every_block(deployment: Deployment, _: str) -> Fact:
    """Tell if there is prefix caching with a state for each block."""
    from vllm_graphfix.deployment import Fact

    mode, missing = deployment.value("--mamba-cache-mode")
    if missing is None and mode == "align":
        return Fact(False, "--mamba-cache-mode align keeps no state for each block")
    caching = deployment.switched_on("--enable-prefix-caching")
    if caching.holds is False:
        return Fact(False, "--enable-prefix-caching is not given, without which models with Mamba layers have none")
    return caching if missing is None else Fact(None, missing)


FIX = fix(
    "mamba-all-mode",
    runner="V1",
    diagnose=diagnose,
    surroundings=(
        # The block table of a further group, and every use of the indices beside it
        Slice(
            _BUILDER,
            _UPDATE,
            f"metadata new_metadata num_reqs state_indices_t persistent_state_indices_t {_INDEX_NAMES}",
        ),
        Slice(_BUILDER, f"{_BASE}.{_FOR_GRAPHS}", _INDEX_NAMES),
        # Other updates of it, and metadata that groups share
        Slice(_MAMBA2, "", "update_block_table supports_update_block_table"),
        Slice(_MAMBA2, "Mamba2AttentionBackend.get_builder_cls"),
        Slice(_RUNNER, "GPUModelRunner._build_attention_metadata", "update_block_table cached_attn_metadata"),
        # The indices of the first group, and the kernels that read them
        Slice(_BUILDER, "", "supports_update_block_table", Verdict.AFFECTED),
        Slice(_BUILDER, f"{_BASE}.__init__", _INDEX_NAMES, Verdict.AFFECTED),
        Slice(_BUILDER, f"{_BASE}._compute_common_metadata", _INDEX_NAMES, Verdict.AFFECTED),
        Slice(_MAMBA2, "Mamba2AttentionMetadataBuilder.build", _INDEX_NAMES, Verdict.AFFECTED),
        Slice(_MIXER, "", _INDEX_NAMES, Verdict.AFFECTED),
        *BUILDERS_STAY,
    ),
    recognised=(*itertools.chain(*_COPIES), *_GUARDED_COPIES),
    corrections=(indices_for_this_group,),
    events=(INDICES_OF_ANOTHER_GROUP,),
    needs=needs,
    default_rationale="answers",
)
