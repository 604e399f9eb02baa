"""The detector `metadata` on vLLM's own breakable graphs; graphs are the CPU double's, layers are stand-ins."""

from __future__ import annotations

import dataclasses
import gc
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, create_forward_context, get_forward_context, override_forward_context

from vllm_graphfix.engine import metadata
from vllm_graphfix.engine.metadata import MetadataCheck
from vllm_graphfix.verify.double.model_runners import breakable_graphs, wrappers_on_the_double

_LAYERS = "vllm.model_executor.layers"
OPERATORS = {
    "unified_attention_with_output": (f"{_LAYERS}.attention.attention", 4, (0, 24)),
    "qwen_gdn_attention_core": (f"{_LAYERS}.mamba.gdn.qwen_gdn_linear_attn", 4, (0, 30)),
    "mamba_mixer": (f"{_LAYERS}.mamba.mamba_mixer", 2, (0, 32)),
    "mamba_mixer2": (f"{_LAYERS}.mamba.mamba_mixer2", 2, (0, 32)),
    "short_conv": (f"{_LAYERS}.mamba.short_conv", 2, (0, 32)),
}
"""Each operator's module, its tensors, of which the last is the output, and the release that gave it an eager break."""
RELEASE = tuple(map(int, vllm.__version__.split(".")[:2]))
LAYER, TOKENS = "layer.0", 4


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(metadata, "_EVERY", 1)
    with wrappers_on_the_double(), breakable_graphs():
        yield


@dataclasses.dataclass
class MetadataStandIn:
    buffer: torch.Tensor
    """A persistent one."""
    made: torch.Tensor
    """One that a builder makes anew at each step."""
    number: int


class LayerStandIn:
    """Stands in for a layer of any operator: it reads the context, and the fields *reads* of its metadata."""

    def __init__(self, reads: tuple[str, ...] = ()) -> None:
        self.reads, self.kv_cache = reads, torch.zeros(1)
        self.impl = SimpleNamespace(forward=lambda *args, **kwargs: None)

    def run(self, *args: Any, **kwargs: Any) -> None:
        own = get_forward_context().attn_metadata
        for field in self.reads if own is not None else ():
            getattr(own[LAYER], field)

    conv_ssm_forward = forward_impl = forward_cuda = forward_native = _forward_core = run


class Engine:
    """A model of one layer in vLLM's wrapper, which is captured with the check on."""

    def __init__(self, operator: Callable[[torch.Tensor, torch.Tensor], Any], layer: LayerStandIn) -> None:
        compilation = SimpleNamespace(
            static_forward_context={LAYER: layer}, fast_moe_cold_start=False, static_all_moe_layers=[]
        )
        self.config = SimpleNamespace(
            compilation_config=compilation,
            parallel_config=SimpleNamespace(data_parallel_size=1),
            cache_config=SimpleNamespace(),
            use_cumem_cudagraph_pool=False,
        )
        self.operator, self.hidden = operator, torch.ones(TOKENS)
        self.graphs: Any = BreakableCUDAGraphWrapper(self.model, self.config)
        self.buffer = torch.zeros(1)
        self.check = MetadataCheck()

    def model(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * 2
        output = torch.empty_like(hidden)
        self.operator(hidden, output)
        return hidden + 1

    def step(self, own: MetadataStandIn | None, mode: CUDAGraphMode = CUDAGraphMode.PIECEWISE) -> torch.Tensor:
        context = create_forward_context(
            own and {LAYER: own},
            self.config,
            cudagraph_runtime_mode=mode,
            batch_descriptor=BatchDescriptor(TOKENS),
            slot_mapping={LAYER: self.buffer},
        )
        with override_forward_context(context):
            output: torch.Tensor = self.graphs(self.hidden)
        return output

    def made(self, number: int = 1) -> MetadataStandIn:
        return MetadataStandIn(self.buffer, torch.zeros(1), number)

    def run(self, captured: MetadataStandIn | None, mode: CUDAGraphMode = CUDAGraphMode.PIECEWISE) -> list[Any]:
        """Return the findings of a capture with *captured*, and of two steps."""
        self.check.begin_capture()
        self.step(captured, mode)
        self.check.end_capture()
        gc.collect()  # what nobody holds is gone
        for value in (1.0, 2.0):
            self.hidden.fill_(value)
            assert self.step(self.made(2), mode).tolist() == [2 * value + 1] * TOKENS
        assert self.check.counts()["metadata"]["failures"] == 0
        return [(each.field, each.difference) for each in self.check.findings()]


def operator_of(name: str) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """Return vLLM's operator *name*, as a function of its input and its output."""
    module, tensors, _ = OPERATORS[name]
    function = getattr(import_module(module), name)
    others = {"fast_kernel": False} if "fast_kernel" in inspect.signature(function).parameters else {}
    return lambda hidden, output: function(*[hidden] * (tensors - 1), output, layer_name=LAYER, **others)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_without_an_eager_break_is_seen(name: str) -> None:
    """Model runner V1 captures without metadata, and what the operator does then is in the graph (53030)."""
    has_break = OPERATORS[name][2] <= RELEASE
    findings = Engine(operator_of(name), LayerStandIn()).run(None)
    # The reader is the layer, or of attention the operator itself, by way of a helper.
    reader = name if name == "unified_attention_with_output" else "run"
    assert findings == ([] if has_break else [(f"attn_metadata in {reader}", "was None or empty")])


@pytest.mark.parametrize(
    ("reads", "findings"),
    [
        ((), []),
        (("buffer", "number"), []),
        (("made",), [("MetadataStandIn.made", "lies elsewhere")]),
    ],
)
def test_a_segment_that_reads_metadata_is_compared_with_them(reads: tuple[str, ...], findings: list[Any]) -> None:
    """Model runner V2 captures with metadata, of which right layers read persistent buffers."""
    layer = LayerStandIn(reads)
    engine = Engine(lambda hidden, output: layer.run(), layer)
    held = engine.made()  # so that no later tensor has its address
    assert engine.run(held) == findings


def test_full_graphs_are_compared_with_all_that_they_read() -> None:
    layer = LayerStandIn(("buffer", "number"))
    engine = Engine(lambda hidden, output: layer.run(), layer)
    assert engine.run(engine.made(), CUDAGraphMode.FULL) == [("MetadataStandIn.number", "is 2, not 1")]
