"""Trial of roberta-positions.

Two RoBERTa models, an embedder and a reranker, serve batches of six tokens in a graph for eight, then one that fills
it. Real: vLLM's model classes down to their embedding, its model runner's buffers and inputs, its wrapper of piecewise
graphs. Stand-ins: the layers behind the embedding, and the embeddings of tokens and types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graphfix.verify.trial import Trial

if TYPE_CHECKING:
    from vllm_graphfix.verify.measurement import Measurement

GRAPH_SIZE = 8
"""Tokens of the graph, and of the longest request."""
PADDING_IDX = 1
HIDDEN_SIZE, VOCABULARY = 8, 32
SHORT: tuple[int, ...] = (4, 2)
FULL: tuple[int, ...] = (8,)
"""Tokens of each request of a batch."""


def run(*, trigger: bool = True) -> Measurement:
    """Embed padded batches. Without *trigger*, every batch fills its graph."""
    from vllm_graphfix.verify.double.model_runners import wrappers_on_the_double
    from vllm_graphfix.verify.measurement import Measurement

    steps = [*([SHORT if trigger else FULL] * 5), FULL, SHORT if trigger else FULL]
    models = ("RobertaEmbeddingModel", "RobertaForSequenceClassification")
    graphed: tuple[float, ...] = ()
    error = None
    with wrappers_on_the_double():
        eager = tuple(number for model in models for number in _serve(model, steps, graphs=False))
        try:
            graphed = tuple(number for model in models for number in _serve(model, steps, graphs=True))
        except IndexError as raised:  # on a GPU an assertion of the kernel, which ends the engine
            error = f"IndexError: {raised}"
    return Measurement(
        f"sums of hidden states of each token: {len(steps)} steps of an embedder and a reranker",
        eager,
        graphed,
        error,
        counted={"padded-positions-shifted": len(models) * steps.count(SHORT)},
    )


def _serve(model: str, steps: list[tuple[int, ...]], *, graphs: bool) -> list[float]:
    """Return sums of each token's hidden states over *steps*, padded to the captured size if with *graphs*."""
    from types import SimpleNamespace

    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor, override_forward_context

    runner = _runner()
    runner.model = _model(model)

    def forward(tokens: int, mode: CUDAGraphMode, metadata: Any) -> Any:
        padded = GRAPH_SIZE if graphs else tokens
        scheduled = SimpleNamespace(total_num_scheduled_tokens=tokens)
        input_ids, inputs_embeds, positions, *_ = runner._preprocess(scheduled, padded)
        context: Any = SimpleNamespace(
            attn_metadata=metadata, batch_descriptor=BatchDescriptor(padded), cudagraph_runtime_mode=mode
        )
        with override_forward_context(context):
            return runner.model(input_ids=input_ids, positions=positions, inputs_embeds=inputs_embeds)

    mode = CUDAGraphMode.PIECEWISE if graphs else CUDAGraphMode.NONE
    if graphs:  # warm-up and capture: dummy runs, which have no metadata
        forward(GRAPH_SIZE, CUDAGraphMode.NONE, None)
        forward(GRAPH_SIZE, mode, None)
    numbers: list[float] = []
    for number, lengths in enumerate(steps):
        tokens = sum(lengths)
        _prepare(runner, lengths, number)
        metadata = {"encoder.layer.0.attention": SimpleNamespace(num_actual_tokens=tokens)}
        numbers += forward(tokens, mode, metadata)[:tokens].sum(dim=1).tolist()
    return numbers


def _runner() -> Any:
    """Return a GPUModelRunner with what `_preprocess` reads, and nothing else."""
    from types import SimpleNamespace

    import torch
    from vllm.v1.utils import CpuGpuBuffer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def buffer(dtype: torch.dtype) -> CpuGpuBuffer:
        return CpuGpuBuffer(2 * GRAPH_SIZE, dtype=dtype, device=torch.device("cpu"), pin_memory=False)

    runner: Any = object.__new__(GPUModelRunner)
    runner.input_ids, runner.positions = buffer(torch.int32), buffer(torch.int64)
    runner.is_pooling_model = runner.supports_mm_inputs = runner.enable_prompt_embeds = runner.uses_mrope = False
    runner.uses_xdrope_dim = 0
    runner.model_config = SimpleNamespace(is_encoder_decoder=False)
    return runner


def _prepare(runner: Any, lengths: tuple[int, ...], number: int) -> None:
    """Fill the rows of a step's tokens as `_prepare_inputs` does; rows behind them keep older positions."""
    tokens = sum(lengths)
    runner.positions.np[:tokens] = [position for length in lengths for position in range(length)]
    runner.input_ids.np[:tokens] = [(5 * number + 3 * row) % VOCABULARY for row in range(tokens)]
    runner.positions.copy_to_gpu(tokens)
    runner.input_ids.copy_to_gpu(tokens)


def _model(name: str) -> Any:
    """Return the model *name* with random weights, and positions up to the longest request's last one."""
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.config import CUDAGraphMode
    from vllm.model_executor.models import roberta

    config: Any = SimpleNamespace(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN_SIZE,
        pad_token_id=PADDING_IDX,
        max_position_embeddings=GRAPH_SIZE + PADDING_IDX + 1,
        type_vocab_size=2,
        layer_norm_eps=1e-5,
    )
    with torch.random.fork_rng(devices=()), mock.patch.object(roberta, "VocabParallelEmbedding", torch.nn.Embedding):
        torch.manual_seed(0)
        embedding = roberta.RobertaEmbedding(config)
        mix = torch.randn(HIDDEN_SIZE, HIDDEN_SIZE)
    wrapped = SimpleNamespace(compilation_config=SimpleNamespace(), use_cumem_cudagraph_pool=False)
    first = CUDAGraphWrapper(embedding, wrapped, CUDAGraphMode.PIECEWISE)

    def encoder_stand_in(input_ids: Any, positions: Any, inputs_embeds: Any, intermediate_tensors: Any) -> Any:
        """Stand in for a `BertModel`: the embedding in the first of its graphs, and one layer without attention."""
        return torch.tanh(first(input_ids, positions, inputs_embeds) @ mix)

    model: Any = object.__new__(getattr(roberta, name))
    torch.nn.Module.__init__(model)
    model.padding_idx = PADDING_IDX
    model.model = model.roberta = encoder_stand_in
    return model


TRIAL = Trial(
    unwatched="runs with and without graphs have the same positions of padded rows, and the rows of requests are right "
    "up to the end",
    engine="none",
    shows_in="the CPU double, and engines of `benchmarks/vectors.py` at 9d2cfc5: the embedding's lookup of a padded "
    "row's position, which ends the engine",
)
