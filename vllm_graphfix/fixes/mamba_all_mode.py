"""`mamba-all-mode`: each group of Mamba-2 layers has the block indices of its batch where its own graphs read them (PR 34874)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Diagnosis, Event, Fallback, Fix, Mode, Patch, StockFunction, Verdict

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Answer, Deployment, Fact
    from vllm_graphfix.source import Source
    from vllm_graphfix.syntax import Function
    from vllm_graphfix.trial import Trial
    from vllm_graphfix.verify.measurement import Measurement

_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_BUILDER = "vllm/v1/attention/backends/mamba_attn.py"
_BUILDER_MODULE = "vllm.v1.attention.backends.mamba_attn"
_BASE = "BaseMambaAttentionMetadataBuilder"
_TARGET = f"{_BASE}.update_block_table"
_INDICES = ("block_idx_last_scheduled_token", "block_idx_last_computed_token")
"""Columns of a request's block table, which are the states that a decode writes and reads."""
_FOR_GRAPHS = "_update_metadata_for_cudagraph_capture"
"""What copies them where graphs read them, since 0.17.0."""

INDICES_OF_ANOTHER_GROUP = Event(
    "indices-of-another-group",
    "A decode batch came to a second or later group of Mamba-2 layers with its block indices in the first group's buffers alone: on stock "
    "this group's graphs read those of the capture.",
)
FALLBACK = Fallback()


def diagnose(source: Source) -> Diagnosis:
    if not all(source.says(_BUILDER, name) for name in _INDICES):
        return Diagnosis(Verdict.ABSENT, "Mamba's builder has no indices of blocks: no state is kept for each block")
    update = source.function(_BUILDER, _TARGET)
    compute = source.function(_BUILDER, f"{_BASE}._compute_common_metadata")
    build = source.function(_RUNNER, "GPUModelRunner._build_attention_metadata")
    if update is not None:
        remedy = _copied_in(update) or _copied_by(source, update)
        if remedy is not None:
            return Diagnosis(Verdict.FIXED, "each group copies the block indices where its graphs read them", remedy)
        replaced = update.only("new_metadata.state_indices_tensor = state_indices_t")
        returned = update.only("return new_metadata")
        if (
            compute is not None
            and _copied_in(compute) is not None
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
                "a group whose block table alone is updated leaves its graphs the block indices of the capture",
                update.at(replaced),
                "indices-of-the-first-group",
            )
    return Diagnosis(
        Verdict.UNRECOGNISED,
        "block tables of further groups are updated in a way that nobody has looked at",
        update.where if update else f"{_BUILDER}:1",
    )


def _copied_in(function: Function) -> str | None:
    """Where *function* copies both kinds of indices into the builder's own buffers, or None."""
    copies = function.each(*(f"self.{name}[...].copy_(...)" for name in _INDICES))
    return function.at(copies[0]) if copies else None


def _copied_by(source: Source, update: Function) -> str | None:
    """Where *update* returns what the builder makes of it for graphs, indices included; or None."""
    returned = update.only(f"return self.{_FOR_GRAPHS}(new_metadata)")
    for_graphs = source.function(_BUILDER, f"{_BASE}.{_FOR_GRAPHS}")
    if returned is None or for_graphs is None or _copied_in(for_graphs) is None:
        return None
    return update.at(returned)


def _indices_for_this_group(stock: StockFunction) -> StockFunction:
    """Around `update_block_table(metadata, blk_table, slot_mapping)`, after it.

    On the device, in the order of the steps, as stock's own copies. The metadata that are returned stay as they are: their indices are the
    first group's, and right wherever no graph is replayed.
    """
    from torch import _foreach_copy_  # both or none: an error between two copies would leave states mixed up

    @functools.wraps(stock)
    def update_block_table(self: Any, *args: Any, **kwargs: Any) -> Any:
        updated = stock(self, *args, **kwargs)
        try:
            given = _indices_elsewhere(self, updated)
            if given is not None:
                rows = len(given[0])
                own = [self.block_idx_last_scheduled_token[:rows], self.block_idx_last_computed_token[:rows]]
                _foreach_copy_(own, given)
                INDICES_OF_ANOTHER_GROUP.count += 1
        except Exception as error:
            FALLBACK.take(error)
        return updated

    return update_block_table


def _watch_indices(stock: StockFunction) -> StockFunction:
    """Around the same."""

    @functools.wraps(stock)
    def update_block_table(self: Any, *args: Any, **kwargs: Any) -> Any:
        updated = stock(self, *args, **kwargs)
        try:
            if _indices_elsewhere(self, updated) is not None:
                INDICES_OF_ANOTHER_GROUP.count += 1
        except Exception as error:
            FALLBACK.take(error)
        return updated

    return update_block_table


def _indices_elsewhere(builder: Any, updated: Any) -> list[Any] | None:
    """The block indices of *updated*, (num_reqs,) int32 each, where the graphs of *builder* need them and do not have them.

    They need them where stock has put the block table in the builder's own buffer: decodes alone, no more than the largest graph has.
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


def observers(shape: str) -> tuple[Patch, ...]:
    return (Patch(_BUILDER_MODULE, _TARGET, _watch_indices),)


_SEVERAL_GROUPS = frozenset(
    "BambaForCausalLM GraniteMoeHybridForCausalLM NemotronHForCausalLM Zamba2ForCausalLM".split()
)
"""Mamba-2 layers, of which a model has many more than of attention, and prefix caching with a state for each block."""
_ONE_GROUP = frozenset(
    """FalconH1ForCausalLM FalconMambaForCausalLM JambaForCausalLM KimiLinearForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM Mamba2ForCausalLM
    MambaForCausalLM MiniMaxText01ForCausalLM Plamo2ForCausalLM Qwen3NextForCausalLM""".split()
)
"""As many layers of each kind, one kind alone, or another kind of states."""


def applies(deployment: Deployment, shape: str) -> Answer:
    from vllm_graphfix.deployment import all_of

    layers = deployment.with_layers(_SEVERAL_GROUPS, _ONE_GROUP, "several groups of Mamba-2 layers")
    return all_of(layers, _keeps_every_block(deployment), deployment.full_graphs())


def _keeps_every_block(deployment: Deployment) -> Fact:
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
    pr=34874,
    references=("issue 34865",),
    summary="each group of Mamba-2 layers reads the block indices of its own batch",
    releases="0.14.1 - 0.16.0",
    absent="0.32.0 - 0.33.0",
    symptom="With prefix caching, Mamba-2 hybrids such as Nemotron-H answer long prompts with garbage or NaN under full CUDA graphs, and leave wrong states "
    "in the prefix cache.",
    cause="With prefix caching each block of a Mamba layer has a state (mode `all`), and a decode finds the block that it reads and the one that "
    "it writes by two indices. The first group's builder copies them where its graphs read them. For further groups vLLM only exchanges "
    "the block table: their graphs go on reading the indices of the capture, which name each request's first block.",
    remedy="Where a further group's block table is put where its graphs read it, so are the indices, by one copy on the device.",
    detect="With --enable-prefix-caching, prompts longer than a Mamba block are answered wrongly, also when sent for the first time, and rightly without it or with "
    "--enforce-eager.",
    concerns="Hybrids with more Mamba-2 layers than attention layers (Nemotron-H, Granite 4, Bamba, Zamba2), --enable-prefix-caching, model "
    "runner V1, a cudagraph mode with FULL.",
    workaround='no --enable-prefix-caching, or --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', or --enforce-eager; from 0.15.0 on --mamba-cache-mode align.',
    removable="with vLLM 0.17.0",
    runner="V1",
    reads=(_RUNNER, _BUILDER),
    modules=(_BUILDER_MODULE,),
    diagnose=diagnose,
    patches=patches,
    observers=observers,
    events=(INDICES_OF_ANOTHER_GROUP,),
    fallback=FALLBACK,
    default=Mode.OBSERVE,
    applies=applies,
    flags=("--enable-prefix-caching", "--mamba-cache-mode="),
    trial=lambda: trial(),  # noqa: PLW0108 - it stands below
)


def trial() -> Trial:
    from vllm_graphfix.deployment import Concern
    from vllm_graphfix.trial import Edit, Served, Trial

    replaced = r"^        new_metadata\.state_indices_tensor = state_indices_t$"
    copied = "        self.{0}[:num_reqs].copy_(metadata.{0}[:num_reqs])\n"
    both = "".join(copied.format(name) for name in _INDICES)
    kept = "        new_metadata.state_indices_tensor = state_indices_t"
    for_graphs = rf"return self\.{_FOR_GRAPHS}\(new_metadata\)"
    nemotron = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M-M*-",
    }
    caching = "./model --enable-prefix-caching"
    affects, does_not = Concern.CONCERNS, Concern.DOES_NOT
    return Trial(
        scenario=scenario,
        edits=(
            Edit("both indices copied", "0.16.0", _BUILDER, replaced, both + kept, Verdict.FIXED),
            Edit("both copied, 0.14.1", "0.14.1", _BUILDER, replaced, both + kept, Verdict.FIXED),
            Edit("one of them", "0.15.1", _BUILDER, replaced, copied.format(_INDICES[0]) + kept, Verdict.UNRECOGNISED),
            Edit(
                "copied elsewhere",
                "0.16.0",
                _BUILDER,
                replaced,
                f"        self.refresh(metadata)\n{kept}",
                Verdict.UNRECOGNISED,
            ),
            Edit("remedy cut out", "0.17.0", _BUILDER, for_graphs, "return new_metadata", Verdict.UNRECOGNISED),
        ),
        served=(
            Served("0.16.0", caching, affects, "NemotronHForCausalLM", model=nemotron),
            Served("0.16.0", f"{caching} --mamba-cache-mode all", affects, "FULL_AND_PIECEWISE", model=nemotron),
            Served("0.16.0", f"{caching} --mamba-cache-mode align", does_not, "align", model=nemotron),
            Served("0.16.0", "./model", does_not, "--enable-prefix-caching is not given", model=nemotron),
            Served("0.14.1", f"{caching} --no-enable-prefix-caching", does_not, "is not given", model=nemotron),
            Served("0.16.0", f"{caching} --enforce-eager", does_not, "--enforce-eager", model=nemotron),
            Served("0.16.0", "./mamba2 --enable-prefix-caching", does_not, "no several groups"),
            Served("0.16.0", "./new-hybrid --enable-prefix-caching", Concern.UNKNOWN, "not a model that is known"),
        ),
    )


# -- the scenario: three requests decode across block boundaries, on two groups of Mamba-2 layers

CAPTURED, MAX_MODEL_LEN, BLOCK = 4, 32, 4
"""Requests of the graph, one more than there are; tokens of a request, and those of one block."""
HEADS, HEAD_WIDTH, STATE = 2, 2, 2
LAYERS = ("model.layers.0.mixer", "model.layers.1.mixer")
"""A group of its own each, as the layers of a model with one attention layer to each."""
COMPUTED = {"first": 6, "second": 9, "third": 3}
"""Tokens of each request before the first step: with a state in each of their blocks."""
STEPS = 6


def scenario(*, hit: bool = True) -> Measurement:
    """The outputs of both layers. Not *hit*: without prefix caching, where a request has one state and no index."""
    from vllm.config import CUDAGraphMode

    from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
    from vllm_graphfix.verify.measurement import Measurement

    eager = _serve(CUDAGraphMode.NONE, hit)
    with cpu_cuda_graphs():
        graphed = _serve(CUDAGraphMode.FULL, hit)
    told = f"outputs of two Mamba-2 layers for {len(COMPUTED)} requests over {STEPS} decode steps"
    return Measurement(told, tuple(eager), tuple(graphed))


def _serve(mode: Any, caching: bool) -> list[float]:
    import torch
    from vllm.forward_context import override_forward_context

    runner = _runner(mode, caching)
    random = torch.Generator().manual_seed(0)
    mixers = [_mixer(runner.cache_config, name, random) for name in LAYERS]
    width = HEADS * HEAD_WIDTH
    hidden = torch.zeros(CAPTURED, 2 * width + 2 * STATE + HEADS)
    outputs = torch.zeros(len(mixers), CAPTURED, width)

    def forward(metadata: Any, rows: int) -> None:
        # The engine's own context, less what these layers do not look at.
        with override_forward_context(_namespace(attn_metadata=metadata, virtual_engine=0)), _cpu_kernels():
            for mixer, output in zip(mixers, outputs, strict=True):
                mixer.conv_ssm_forward(hidden[:rows], output[:rows])

    graph = None
    if mode.has_full_cudagraphs():
        captured = _metadata(runner, [1] * CAPTURED, CAPTURED, for_cudagraph_capture=True)
        forward(captured, CAPTURED)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward(captured, CAPTURED)
    _add_requests(runner, caching)
    numbers: list[float] = []
    for step in range(STEPS):
        hidden[: len(COMPUTED)] = torch.randn(len(COMPUTED), hidden.shape[1], generator=random)
        lengths = [computed + step + 1 for computed in COMPUTED.values()]
        metadata = _metadata(runner, lengths, len(lengths) if graph is None else CAPTURED)
        if graph is None:
            forward(metadata, len(lengths))
        else:
            graph.replay()
        numbers += outputs[:, : len(lengths)].flatten().tolist()
    return numbers


def _runner(mode: Any, caching: bool) -> Any:
    """A GPUModelRunner with no more than its batch and what `_build_attention_metadata` reads."""
    import inspect

    import torch
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.utils import CpuGpuBuffer
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.utils import AttentionGroup

    device = torch.device("cpu")
    block = BLOCK if caching else MAX_MODEL_LEN
    config = _namespace(
        model_config=_namespace(
            max_model_len=MAX_MODEL_LEN, get_mamba_chunk_size=lambda: BLOCK, enable_return_routed_experts=False
        ),
        cache_config=_namespace(
            enable_prefix_caching=caching,  # 0.14.1 has no other mode than `all`
            mamba_cache_mode="all" if caching else "none",
            mamba_block_size=block,
            kv_sharing_fast_prefill=False,
        ),
        scheduler_config=_namespace(max_num_seqs=CAPTURED),
        parallel_config=_namespace(decode_context_parallel_size=1),
        compilation_config=_namespace(cudagraph_mode=mode, max_cudagraph_capture_size=CAPTURED),
        speculative_config=None,
    )
    cache_mode = {"mamba_cache_mode": config.cache_config.mamba_cache_mode}
    spec = MambaSpec(
        block_size=block,
        shapes=((STATE,),),
        dtypes=(torch.float32,),
        **(cache_mode if "mamba_cache_mode" in inspect.signature(MambaSpec).parameters else {}),
    )
    groups = [AttentionGroup(Mamba2AttentionBackend, [name], spec, at) for at, name in enumerate(LAYERS)]
    for group in groups:
        group.create_metadata_builders(config, device, kernel_block_size=None)
    runner: Any = object.__new__(GPUModelRunner)
    runner.__dict__.update(
        {name: getattr(config, name) for name in ("model_config", "cache_config", "compilation_config")},
        input_batch=InputBatch(
            max_num_reqs=CAPTURED,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=CAPTURED,
            device=device,
            pin_memory=False,
            vocab_size=8,
            block_sizes=[block] * len(LAYERS),
            kernel_block_sizes=[block] * len(LAYERS),
        ),
        kv_cache_config=KVCacheConfig(
            num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([name], spec) for name in LAYERS]
        ),
        attn_groups=[[group] for group in groups],
        query_start_loc=CpuGpuBuffer(CAPTURED + 1, dtype=torch.int32, device=device, pin_memory=False),
        seq_lens=CpuGpuBuffer(CAPTURED, dtype=torch.int32, device=device, pin_memory=False),
        device=device,
        max_model_len=MAX_MODEL_LEN,
        speculative_config=None,
        is_mm_prefix_lm=False,
        dcp_world_size=1,
    )
    return runner


def _add_requests(runner: Any, caching: bool) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    blocks = MAX_MODEL_LEN // BLOCK if caching else 1
    for at, (name, computed) in enumerate(COMPUTED.items()):
        mine = list(range(1 + at * blocks, 1 + (at + 1) * blocks))
        runner.input_batch.add_request(
            CachedRequestState(
                req_id=name,
                prompt_token_ids=[0] * computed,
                mm_features=[],
                sampling_params=SamplingParams(temperature=0.0),
                generator=None,
                block_ids=(mine,) * len(LAYERS),
                num_computed_tokens=computed,
                output_token_ids=[],
            )
        )
    runner.input_batch.block_table.commit_block_table(len(COMPUTED))


def _metadata(runner: Any, lengths: list[int], padded: int, **capture: bool) -> Any:
    """Of both layers, for a decode of requests of these *lengths* in a graph of *padded* rows."""
    rows = len(lengths)
    runner.query_start_loc.np[:] = [min(row, rows) for row in range(CAPTURED + 1)]
    runner.seq_lens.np[:] = [*lengths, *[0] * (CAPTURED - rows)]
    for buffer in (runner.query_start_loc, runner.seq_lens):
        buffer.copy_to_gpu()
    slots = {}
    if hasattr(runner, "_get_slot_mappings"):  # since 0.15.0 beside the metadata
        slots["slot_mappings"] = runner._get_slot_mappings(padded, padded, rows)[0]
    metadata, _ = runner._build_attention_metadata(
        num_tokens=rows,
        num_reqs=rows,
        max_query_len=1,
        num_tokens_padded=padded,
        num_reqs_padded=padded,
        **slots,
        **capture,
    )
    return metadata


def _mixer(cache_config: Any, name: str, random: Any) -> Any:
    """vLLM's Mamba-2 layer between its projections, on random states."""
    import torch
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    width, blocks = HEADS * HEAD_WIDTH, 1 + len(COMPUTED) * MAX_MODEL_LEN // BLOCK
    mixer: Any = object.__new__(MambaMixer2)
    mixer.__dict__.update(
        prefix=name,
        cache_config=cache_config,
        kv_cache=[
            (
                torch.randn(blocks, 1, width + 2 * STATE, generator=random),
                torch.randn(blocks, HEADS, HEAD_WIDTH, STATE, generator=random),
            )
        ],
        tped_intermediate_size=width,
        tped_conv_size=width + 2 * STATE,
        tped_dt_size=HEADS,
        split_hidden_states_B_C_fn=functools.partial(torch.split, split_size_or_sections=[width, STATE, STATE], dim=-1),
        conv_weights=None,
        conv1d=_namespace(bias=None),
        activation="silu",
        n_groups=1,
        tp_size=1,
        num_heads=HEADS,
        head_dim=HEAD_WIDTH,
        ssm_state_size=STATE,
        A=torch.zeros(HEADS),
        D=torch.zeros(HEADS),
        dt_bias=torch.zeros(HEADS),
        is_blackwell=False,
    )
    return mixer


def _cpu_kernels() -> Any:
    """Stand-ins for the two Triton kernels of a decode: a state goes on by half, and is read and written where theirs would."""
    from unittest import mock

    from vllm.model_executor.layers.mamba import mamba_mixer2

    return mock.patch.multiple(
        mamba_mixer2, causal_conv1d_update=_convolution_stand_in, selective_state_update=_state_update_stand_in
    )


def _convolution_stand_in(
    x: Any,
    conv_state: Any,
    weight: object,
    bias: object,
    activation: object,
    *,
    conv_state_indices: Any,
    block_idx_last_scheduled_token: Any,
    initial_state_idx: Any,
) -> Any:
    """x (rows, width), conv_state (blocks, width, 1); indices (rows, blocks of a request), or (rows,) without the two columns to pick."""

    def picked(column: Any) -> Any:
        if column is None:
            return conv_state_indices.clamp(min=0).long()
        return conv_state_indices.gather(1, column.long().unsqueeze(1)).squeeze(1).clamp(min=0).long()

    mixed = x + conv_state[picked(initial_state_idx)].squeeze(-1) / 2
    conv_state.index_copy_(0, picked(block_idx_last_scheduled_token), mixed.unsqueeze(-1))
    return mixed


def _state_update_stand_in(
    state: Any,
    x: Any,
    dt: object,
    A: object,  # noqa: N803 - vLLM's names
    B: Any,  # noqa: N803
    C: Any,  # noqa: N803
    D: object,  # noqa: N803
    *,
    state_batch_indices: Any,
    dst_state_batch_indices: Any,
    out: Any,
    **_: object,
) -> None:
    """state (blocks, heads, width, N), x and out (rows, heads, width), B and C (rows, 1, N), indices (rows,), below 0 for padded rows."""
    # A padded row's is the null block, which no request has.
    read, written = (blocks.clamp(min=0).long() for blocks in (state_batch_indices, dst_state_batch_indices))
    updated = state[read] / 2 + x.unsqueeze(-1) * B.unsqueeze(2)
    state.index_copy_(0, written, updated)
    out.copy_((updated * C.unsqueeze(2)).sum(-1))


def _namespace(**attributes: Any) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(**attributes)
