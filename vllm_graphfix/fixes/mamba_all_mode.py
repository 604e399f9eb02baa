"""`mamba-all-mode`: each group of Mamba-2 layers has its block indices where its own graphs read them (PR 34874).

The indices are those of its batch.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import NEWEST, About

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_BUILDER = "vllm/v1/attention/backends/mamba_attn.py"
_LATER = "vllm/v1/attention/backends/mamba2_attn.py"
_UTILS = "vllm/v1/attention/backends/utils.py"
_BUILDER_MODULE = "vllm.v1.attention.backends.mamba_attn"
_BASE = "BaseMambaAttentionMetadataBuilder"
_TARGET = f"{_BASE}.update_block_table"
_INDICES = ("block_idx_last_scheduled_token", "block_idx_last_computed_token")
"""Columns of a request's block table, which are the states that a decode writes and reads."""
_FOR_GRAPHS = "_update_metadata_for_cudagraph_capture"
"""What copies them where graphs read them, since 0.17.0."""

INDICES_OF_ANOTHER_GROUP = Event(
    "indices-of-another-group",
    "A decode batch reached a second or later group of Mamba-2 layers with its block indices in the first group's "
    "buffers only: on stock this group's graphs read those of the capture.",
)


def diagnose(source: Source) -> Diagnosis:
    if not all(source.says(_BUILDER, name) for name in _INDICES):
        return Diagnosis(Verdict.ABSENT, "Mamba's builder has no block indices: no state is kept for each block")
    update = source.function(_BUILDER, _TARGET)
    compute = source.function(_BUILDER, f"{_BASE}._compute_common_metadata")
    build = source.function(_RUNNER, "GPUModelRunner._build_attention_metadata")
    if update is not None:
        remedy = _place_of_copies(update) or _place_of_return(source, update)
        if remedy is not None:
            return Diagnosis(Verdict.FIXED, "each group copies the block indices where its graphs read them", remedy)
        replaced = update.only("new_metadata.state_indices_tensor = state_indices_t")
        returned = update.only("return new_metadata")
        if (
            compute is not None
            and _place_of_copies(compute) is not None
            and replaced
            and returned
            and update.in_one_block(replaced, returned, at_once=True)
            and update.only("new_metadata = copy.copy(metadata)")
            and update.only("persistent_state_indices_t = self.state_indices_tensor[:num_reqs]")
            and update.takes == "self, metadata, blk_table, slot_mapping"
            and update.mentions(new_metadata=3)
            # What is left of `metadata` goes to nothing that could copy indices.
            and (update.mentions(metadata=2) or (update.mentions(metadata=3) and update.only("metadata.seq_lens")))
            and update.only("metadata.num_prefills")
            and build is not None
            and build.only("builder.update_block_table(...)")
            and build.only("builder.build_for_cudagraph_capture(common_attn_metadata)")
        ):
            return Diagnosis(
                Verdict.AFFECTED,
                "for further groups only the block table is updated, and their graphs keep the block indices of the "
                "capture",
                update.at(replaced),
                "indices-of-the-first-group",
            )
    return Diagnosis.unrecognised("block tables of further groups are updated in a way", update or _BUILDER)


def _place_of_copies(function: Function) -> str | None:
    """Where *function* copies both kinds of indices into the builder's own buffers, or None."""
    copies = function.each(*(f"self.{name}[...].copy_(...)" for name in _INDICES))
    return function.at(copies[0]) if copies else None


def _place_of_return(source: Source, update: Function) -> str | None:
    """Where *update* returns what the builder makes of it for graphs, indices included; or None."""
    returned = update.only(f"return self.{_FOR_GRAPHS}(new_metadata)")
    for_graphs = source.function(_BUILDER, f"{_BASE}.{_FOR_GRAPHS}")
    if returned is None or for_graphs is None or _place_of_copies(for_graphs) is None:
        return None
    return update.at(returned)


def _indices_for_this_group(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `update_block_table(metadata, blk_table, slot_mapping)`: then this group's graphs have the block indices.

    They are copied on the device, in the order of the steps, as stock's own. The metadata that are returned stay as
    they are: their indices are the first group's, and right wherever no graph is replayed.
    """
    from torch import _foreach_copy_  # both or none: an error between two copies would leave states mixed up

    indices_of_others, corrects = activity.counter(INDICES_OF_ANOTHER_GROUP), activity.corrects

    @functools.wraps(stock)
    def update_block_table(self: Any, *args: Any, **kwargs: Any) -> Any:
        updated = stock(self, *args, **kwargs)
        try:
            given = _indices_elsewhere(self, updated)
            if given is not None:
                if corrects:
                    rows = len(given[0])
                    own = [self.block_idx_last_scheduled_token[:rows], self.block_idx_last_computed_token[:rows]]
                    _foreach_copy_(own, given)
                indices_of_others.count += 1
        except Exception as error:
            activity.failed(error)
        return updated

    return update_block_table


def _indices_elsewhere(builder: Any, updated: Any) -> list[Any] | None:
    """The block indices of *updated*, (num_reqs,) int32 each, if the graphs of *builder* lack them.

    None if the graphs do not need them, or have them already. They need them where stock has put the block table in the
    builder's own buffer: decodes alone, no more than the largest graph has.
    """
    scheduled = updated.block_idx_last_scheduled_token
    if scheduled is None or updated.num_prefills:
        return None
    if updated.state_indices_tensor.data_ptr() != builder.state_indices_tensor.data_ptr():
        return None
    if scheduled.data_ptr() == builder.block_idx_last_scheduled_token.data_ptr():
        return None
    return [scheduled, updated.block_idx_last_computed_token]


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_BUILDER_MODULE, _TARGET, _indices_for_this_group),)


_SEVERAL_GROUPS = frozenset(
    "BambaForCausalLM GraniteMoeHybridForCausalLM NemotronHForCausalLM Zamba2ForCausalLM".split()
)
"""Mamba-2 layers, of which a model has many more than of attention, and prefix caching with a state for each block."""
_ONE_GROUP = frozenset(
    "FalconH1ForCausalLM FalconMambaForCausalLM JambaForCausalLM KimiLinearForCausalLM Lfm2ForCausalLM "
    "Lfm2MoeForCausalLM Mamba2ForCausalLM\n"
    "    MambaForCausalLM MiniMaxText01ForCausalLM Plamo2ForCausalLM Qwen3NextForCausalLM".split()
)
"""Models with as many layers of each kind, with one kind alone, or with another kind of states."""


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need, unseen

    models = "hybrids such as Nemotron-H, Granite 4, Bamba, Zamba2"
    caching = "from 0.15.0 on not with --mamba-cache-mode align"
    return (
        Need("several groups of Mamba-2 layers", _several_groups, models),
        Need(
            "--enable-prefix-caching", _keeps_every_block, caching, ("--mamba-cache-mode=", "--enable-prefix-caching")
        ),
        unseen("model runner V1"),
        needs.FULL_GRAPHS,
    )


def _several_groups(deployment: Deployment, _: str) -> Fact:
    return deployment.with_layers(_SEVERAL_GROUPS, _ONE_GROUP, "several groups of Mamba-2 layers")


def _keeps_every_block(deployment: Deployment, _: str) -> Fact:
    """Prefix caching, with a state for each block."""
    from vllm_graphfix.deployment import Fact

    mode, missing = deployment.value("--mamba-cache-mode")
    if missing is None and mode == "align":
        return Fact(False, "--mamba-cache-mode align keeps no state for each block")
    caching = deployment.switched_on("--enable-prefix-caching")
    if caching.holds is False:
        return Fact(False, "--enable-prefix-caching is not given, without which models with Mamba layers have none")
    return caching if missing is None else Fact(None, missing)


FIX = Fix(
    number=13,
    name="mamba-all-mode",
    runner="V1",
    reads=(_RUNNER, _BUILDER, _LATER, _UTILS),
    modules=(_BUILDER_MODULE,),
    diagnose=diagnose,
    patches=patches,
    events=(INDICES_OF_ANOTHER_GROUP,),
    needs=needs,
    ground="answers",
    evidence=(
        *(
            f"{_BUILDER}::{_BASE}.{name}"
            for name in ("__init__", "build_for_cudagraph_capture", "_compute_prefix_caching_block_indices")
        ),
        f"{_LATER}::Mamba2AttentionMetadataBuilder.build",
        f"{_UTILS}::split_decodes_and_prefills",
        f"{_UTILS}::mamba_get_block_table_tensor",
    ),
)

ABOUT = About(
    pr=34874,
    references=("issue 34865",),
    summary="each group of Mamba-2 layers reads the block indices of its own batch",
    releases="0.14.1 - 0.16.0",
    absent=f"0.32.0 - {NEWEST}",
    seen="garbage or NaN for prompts longer than a block, and wrong states in the prefix cache",
    first_test="without `--enable-prefix-caching`: gone?",
    symptom="With prefix caching, Mamba-2 hybrids such as Nemotron-H answer long prompts with garbage or NaN under "
    "full CUDA graphs, and leave wrong states in the prefix cache.",
    cause="With prefix caching each block of a Mamba layer has a state (mode `all`), and a decode finds the block "
    "that it reads and the one that it writes by two indices. The first group's builder copies them where its graphs "
    "read them. For further groups vLLM only swaps the block table: their graphs go on reading the indices of the "
    "capture, which name each request's first block.",
    remedy="Whenever a further group's block table is copied to where its graphs read it, so are the indices, with "
    "one copy on the device.",
    detect="With --enable-prefix-caching, prompts longer than a Mamba block get wrong answers, even when sent for the "
    "first time; without that flag or with --enforce-eager they get right ones.",
    workaround='leave out --enable-prefix-caching, or --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', '
    "or --enforce-eager; from 0.15.0 on --mamba-cache-mode align.",
    removable="with vLLM 0.17.0",
    in_caches="wrong recurrent states of all groups of Mamba-2 layers but the first: the state of a prompt's first "
    "block is overwritten by that of later tokens, and the states of blocks that are filled while decoding are never "
    "written. Every request that shares the prefix reads them; keys and values computed after that are wrong, too",
    how_sure="which states are overwritten and which are missing was shown; that a store takes them follows from the "
    "code",
)
